"""The interface between a model's layers and the kernels that attend over the paged cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, Required, TypedDict, Unpack

import torch
from torch import Tensor

from cbatch.kernels.triton.attention_metadata import StepBuffers
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.kv_cache import LayerShape, Shape


class AttendOptions(TypedDict, total=False):
    """How a layer attends.

    window:  a token sees itself and the window-1 tokens before it
    chunk:   instead of a window: a token sees itself and those before it from the last multiple of `chunk` on
    softcap: a score becomes softcap * tanh(score / softcap)
    sinks:   [query heads] extra scores that take part in the softmax and carry no value
    """

    scale: Required[float]
    window: int | None
    chunk: int | None
    softcap: float | None
    sinks: Tensor | None


class AttentionBackend(Protocol):
    """Causal attention of a ragged batch over the paged cache, except as `RaggedBatch.ends_seen` says.

    `prepare` runs once a step. What it returns goes to `store_kv` and `attend`, which run once for each layer. Only the
    backend knows how a block is laid out in memory.

    gathers_kv: whether it copies the keys and values of a sequence together, which takes more memory for longer texts
    kv_dtype:   type of the keys and values in the cache; None: that of the model
    batch_invariant: whether a token has the same bits whatever else is in its step, and however its sequence was cut
    """

    name: str
    gathers_kv: bool
    batch_invariant: bool
    kv_dtype: torch.dtype | None

    @property
    def graph_buffers(self) -> Callable[..., StepBuffers] | None:
        """Makes the buffers of a captured step (`TritonAttention`); None if CUDA graphs cannot capture its calls."""

    def block_shapes(self, layer: LayerShape, block_size: int, dtype: torch.dtype) -> tuple[Shape, Shape]:
        """Shapes of the keys and of the values of one block."""

    def prepare(self, batch: RaggedBatch, block_size: int) -> Any:
        """Metadata that the layers of a step share: lengths, tables, a launch plan."""

    def store_kv(self, keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, metadata: Any) -> None:
        """Stores the step's keys [T, heads, key_dim] and values [T, heads, value_dim] in the cache of one layer."""

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, metadata: Any, **options: Unpack[AttendOptions]
    ) -> Tensor:
        """Attends with query [T, query heads, key_dim] over the cache of one layer: [T, query heads, value_dim].

        keys, values: [num_blocks, *block shape]. The tokens of the whole step are stored already: a sequence may read
                      blocks that another one fills in the same step.
        """
