"""The seam between a model's layers and the kernels that attend over the paged cache."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from cbatch.engine.runtime.batch import RaggedBatch
from cbatch.engine.runtime.kv_cache import LayerShape, Shape


class AttentionBackend(Protocol):
    """Causal attention of a ragged batch over the paged cache.

    `prepare` runs once a step; what it returns is handed to `store_kv` and `attend` once for every layer. How a block
    lies in memory is the backend's own affair.

    gathers_kv: whether it gathers what a slice looks back at, and so takes more memory behind a longer text
    """

    name: str
    gathers_kv: bool

    def block_shapes(self, layer: LayerShape, block_size: int, dtype: torch.dtype) -> tuple[Shape, Shape]:
        """Shapes of the keys and of the values of one block."""

    def prepare(self, batch: RaggedBatch, block_size: int) -> Any:
        """What the step's layers have in common: lengths, tables, a launch plan."""

    def store_kv(self, keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, metadata: Any) -> None:
        """Stores the step's keys [T, heads, key_dim] and values [T, heads, value_dim] in one layer's cache.

        This is the only place where the cache changes.
        """

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        metadata: Any,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attends with query [T, query heads, key_dim] over one layer's cache; returns [T, query heads, value_dim].

        keys, values: [num_blocks, *block shape], the tokens of the whole step already written: a sequence may read
                      blocks that another one fills in this very step.
        window:       a token sees itself and the window-1 tokens before it.
        softcap:      scores are bent to softcap * tanh(score / softcap).
        sinks:        [query heads] extra scores that take part in the softmax and carry no value.
        """
