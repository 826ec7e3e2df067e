"""Runs a model on a ragged batch over the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from cbatch.engine.attention.interface import AttentionBackend
from cbatch.engine.batch import RaggedBatch
from cbatch.engine.kv_pool import KVPool
from cbatch.engine.models.transformers import PagedContext, TransformersModel


class Runner:
    """Owns the model and the cache's tensors; knows nothing of requests."""

    def __init__(self, model: TransformersModel, pool: KVPool, attention: AttentionBackend) -> None:
        self.model = model
        self.pool = pool
        self.attention = attention

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch) -> Tensor:
        """Logits [R, vocabulary] of the rows that get a token; the batch's keys and values are in the cache then."""
        metadata = self.attention.prepare(batch, self.pool.block_size)
        return self.model.forward(batch, PagedContext(self.pool, self.attention, metadata, batch.slot_mapping))
