"""Runs a model on a ragged batch over the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from cbatch.engine.attention.interface import AttentionBackend
from cbatch.engine.batch import RaggedBatch
from cbatch.engine.graphs import DecodeGraphs, is_recordable
from cbatch.engine.kv_pool import KVPool
from cbatch.engine.models.interface import Model


class Runner:
    """Owns the model and the cache's tensors; knows nothing of requests."""

    def __init__(
        self, model: Model, attention: AttentionBackend, num_blocks: int, block_size: int, graph_rows: int = 0
    ) -> None:
        """graph_rows: decode steps of up to so many rows become CUDA graphs, where model and attention allow it"""
        self.model = model
        self.attention = attention
        shapes = [attention.block_shapes(layer, block_size, model.dtype) for layer in model.layers]
        self.pool = KVPool(shapes, num_blocks, block_size, model.dtype, model.device)
        self._graphs: DecodeGraphs | None = None
        if graph_rows and model.device.type == "cuda" and is_recordable(model, attention):
            self._graphs = DecodeGraphs(model, attention, self.pool, graph_rows)

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch) -> Tensor:
        """Logits [R, vocabulary] of the rows that get a token; the batch's keys and values are in the cache then."""
        if self._graphs is not None and (logits := self._graphs.forward(batch)) is not None:
            return logits
        return self.model.forward(batch, self.pool, self.attention)
