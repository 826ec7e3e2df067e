"""Attention of a model whose layers are on several devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import Tensor

from cbatch.attention.base import AttendOptions, AttentionBackend
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.kv_cache import LayerShape, Shape
from cbatch.runtime.transfer import use_device


class PerDeviceAttention:
    """The same backend once for each device. Each layer is served by that of its device.

    Blocks are laid out alike everywhere, and a step is prepared on each device that has layers.
    """

    capturable = None

    def __init__(self, backends: Mapping[torch.device, AttentionBackend]) -> None:
        """backends: of the same name and the same type of KV cache"""
        self.backends = backends
        any_of_them = next(iter(backends.values()))
        self.name, self.kv_dtype = any_of_them.name, any_of_them.kv_dtype
        self.gathers_kv, self.batch_invariant = any_of_them.gathers_kv, any_of_them.batch_invariant

    def block_shapes(self, layer: LayerShape, block_size: int, dtype: torch.dtype) -> tuple[Shape, Shape]:
        return next(iter(self.backends.values())).block_shapes(layer, block_size, dtype)

    def prepare(self, batch: RaggedBatch, block_size: int) -> Any:
        with use_device(batch.device):
            return self.backends[batch.device].prepare(batch, block_size)

    def store_kv(self, keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, metadata: Any) -> None:
        with use_device(keys.device):
            self.backends[keys.device].store_kv(keys, values, new_keys, new_values, metadata)

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, metadata: Any, **options: Unpack[AttendOptions]
    ) -> Tensor:
        with use_device(keys.device):
            return self.backends[keys.device].attend(query, keys, values, metadata, **options)
