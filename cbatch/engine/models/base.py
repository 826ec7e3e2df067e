"""What the engine needs of a model, whoever computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from cbatch.engine.attention.base import AttentionBackend
from cbatch.engine.runtime.batch import Logits, RaggedBatch
from cbatch.engine.runtime.kv_cache import KVCache, LayerShape


@dataclass(frozen=True, slots=True)
class LinearCost:
    """What a step has to read and multiply, for estimates of what a device could do at best.

    weight_bytes:    of the matrices that every step reads
    parameters:      that every token is multiplied with, without those of the head
    head_parameters: those of the output head, which only tokens with an output are multiplied with
    assumed:         sentences on what could not be known from the model
    """

    weight_bytes: int
    parameters: float
    head_parameters: int
    assumed: tuple[str, ...] = ()


class Model(Protocol):
    """A causal language model that runs ragged batches over a paged cache.

    name:           of its class in transformers
    kind:           the `model_type` of its config
    layers:         shape of what each attention call of a step stores, in the order of the calls
    windows:        how many tokens back each of them sees, itself included; None for all
    max_model_len:  longest sequence, prompt and output, in tokens
    num_parameters, weight_bytes: of all weights in memory
    has_own_threads: whether it computes on threads that are not torch's
    """

    name: str
    kind: str
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    max_model_len: int
    layers: list[LayerShape]
    windows: list[int | None]
    has_own_threads: bool

    @property
    def num_parameters(self) -> int: ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def linear_cost(self) -> LinearCost: ...

    def forward(self, batch: RaggedBatch, kv_cache: KVCache, attention: AttentionBackend) -> Logits:
        """Logits [R, vocabulary] of the rows to sample; a model of torch's enters its inference mode by itself."""
