"""Attention on the CPU over the paged cache, for models of transformers.

Models with a program call the same kernels from their own step (`model/cpu.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Unpack

import numpy as np
import torch
from torch import Tensor

from cbatch.attention.base import AttendOptions
from cbatch.kernels.cpu import paged_kv
from cbatch.kernels.cpu.attention import attend_layer
from cbatch.kernels.cpu.kv_store import store_kv_layer
from cbatch.kernels.cpu.matmul.microkernel import LANES
from cbatch.kernels.cpu.tensors import DTYPES, as_array, block_shapes, element_of, paged_kv_of
from cbatch.kernels.cpu.thread_pool import shared_thread_pool
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.cpu import empty, num_threads
from cbatch.runtime.kv_cache import U8, LayerShape, Shape

Plan = Callable[[int, int, int], paged_kv.AttentionPlan]
"""Metadata that the layers of a step share: the attention plan for heads, heads of a group, and value_dim."""


class CpuAttention:
    """Compiled kernels over panels of keys and values (`kernels/cpu/attention.py`)."""

    name = "cpu"
    gathers_kv = False
    batch_invariant = True
    graph_buffers = None

    def __init__(self, kv_dtype: torch.dtype | None = None) -> None:
        """kv_dtype: U8, or None for that of the model"""
        self.kv_dtype = kv_dtype
        self._thread_pool = shared_thread_pool(num_threads())
        self._workspace = cache(partial(paged_kv.new_attention_workspace, self._thread_pool.size))

    def block_shapes(self, layer: LayerShape, block_size: int, dtype: torch.dtype) -> tuple[Shape, Shape]:
        return block_shapes(layer, block_size, dtype)

    def prepare(self, batch: RaggedBatch, block_size: int) -> Plan:
        return cache(partial(paged_kv.plan_attention, batch, block_size))

    def store_kv(self, keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, metadata: Plan) -> None:
        element = element_of(_computed_in(keys, new_keys))
        kv = paged_kv_of(keys, values, element)
        rows = empty((self._thread_pool.size, LANES, max(kv.key_dim, kv.value_dim)), element)
        new = (as_array(part.flatten(1)) for part in (new_keys, new_values))
        self._thread_pool.run(store_kv_layer, kv, metadata(1, 1, 0), *new, rows)

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, metadata: Plan, **options: Unpack[AttendOptions]
    ) -> Tensor:
        dtype = _computed_in(keys, query)
        kv = paged_kv_of(keys, values, element_of(dtype))
        tokens, heads, _ = query.shape
        group = heads // kv.heads
        workspace = self._workspace(group, kv.key_dim, kv.value_dim, element_of(dtype))
        sinks = options.get("sinks")
        extra = np.empty(0, np.float32) if sinks is None else sinks.float().numpy()
        window, chunk, softcap = options.get("window") or 0, options.get("chunk") or 0, options.get("softcap") or 0.0
        params = paged_kv.AttentionParams(options["scale"], window, chunk, softcap, extra)
        out = torch.empty(tokens, heads * kv.value_dim, dtype=dtype)
        plan = metadata(heads, group, kv.value_dim)
        self._thread_pool.run(
            attend_layer, kv, plan, params, as_array(query.flatten(1).to(dtype)), as_array(out),
            workspace,
        )  # fmt: skip
        return out.view(tokens, heads, kv.value_dim).to(query.dtype)


def _computed_in(cache: Tensor, new: Tensor) -> torch.dtype:
    """The type that goes into products: that of the cache; for one of U8, that of queries, keys and values."""
    if cache.dtype != U8:
        return cache.dtype
    return new.dtype if new.dtype in DTYPES else torch.float32
