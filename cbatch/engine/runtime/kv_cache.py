"""The memory of the paged KV cache."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cbatch.engine.runtime.aligned import empty


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer stores for each token: `heads` keys of `key_dim` and values of `value_dim`."""

    heads: int
    key_dim: int
    value_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return self.heads * (self.key_dim + self.value_dim) * dtype.itemsize


Shape = tuple[int, ...]


class KVCache:
    """Keys and values of every layer, in blocks, as the attention backend lays them out.

    shapes         [layers] shapes of the keys and of the values of a block
    keys[layer]    [num_blocks, *shape], and values likewise
    stacks         both with all layers in one tensor [layers, num_blocks, *shape]; None where layers differ
    kept           what a model's kernels want to know of them, made once; None before that
    """

    def __init__(
        self,
        shapes: list[tuple[Shape, Shape]],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.stacked: tuple[Tensor, Tensor] | None = None
        self.kept: Any = None
        make = partial(_empty, dtype=dtype, device=device)
        if len(set(shapes)) == 1:
            keys, values = (make(len(shapes), num_blocks, *shape) for shape in shapes[0])
            self.stacked = keys, values
            self.keys, self.values = list(keys), list(values)
        else:
            self.keys = [make(num_blocks, *shape) for shape, _ in shapes]
            self.values = [make(num_blocks, *shape) for _, shape in shapes]


def _empty(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.empty(*shape, dtype=dtype, device=device)
    # numpy asks the system for large pages, so that scattered blocks are found without walking its tables.
    return torch.from_numpy(empty(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
