"""The memory of the paged KV cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.runtime.cpu import empty_tensor
from cbatch.runtime.memory import use_small_pages
from cbatch.runtime.transfer import to_device

_SMALL_BYTES = 2**21
"""At the beginning of each layer's part on a CPU, which the first tokens fill. In large pages, the first token of all
would wait until the system has cleared two for each layer."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The keys and values of an attention layer for each token: `heads` of `key_dim` and of `value_dim` numbers."""

    heads: int
    key_dim: int
    value_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of a token in a cache of that type, with the scales of U8."""
        scales = 2 * U8_SCALE_BYTES if dtype == U8 else 0
        return self.heads * ((self.key_dim + self.value_dim) * dtype.itemsize + scales)


Shape = tuple[int, ...]

FP8 = torch.float8_e4m3fn
"""One byte: a sign, 4 bits of exponent and 3 of mantissa, without infinity; up to 448 (Micikevicius et al., 2022)."""
FP8_MAX = 448.0

U8 = torch.uint8
"""One byte: U8_OFFSET more than an integer, times a float32 scale for each token and head."""
U8_MAX, U8_OFFSET = 127, 128
U8_SCALE_BYTES = 4


def as_stored(new: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers in the type of a cache: rounded to the nearest, ties to even; in FP8, larger ones become the largest.

    In U8, [..., dim] numbers become [..., dim + U8_SCALE_BYTES] bytes: those of the numbers, then those of their scale.
    """
    if dtype == U8:
        numbers = new.float()
        largest = numbers.abs().amax(-1, keepdim=True)
        inverse = torch.where(largest < 1e-30, 0.0, largest.new_tensor(U8_MAX) / largest)
        integers = (numbers.double() * inverse).round()  # of the exact product
        scales = torch.where(largest < 1e-30, 0.0, largest * (1 / U8_MAX))
        return torch.cat([(integers + U8_OFFSET).to(U8), scales.view(U8)], -1)
    return new.float().clamp(-FP8_MAX, FP8_MAX).to(FP8) if dtype == FP8 else new.to(dtype)


def as_numbers(stored: Tensor) -> Tensor:
    """The numbers [..., dim] float32 that a cache of U8 stands for, as `as_stored` makes it."""
    numbers, scales = stored[..., :-U8_SCALE_BYTES], stored[..., -U8_SCALE_BYTES:]
    integers: Tensor = numbers.float() - U8_OFFSET
    return integers * scales.clone(memory_format=torch.contiguous_format).view(torch.float32)


def as_bytes(cache: Tensor) -> Tensor:
    """A cache of FP8 as its bytes, which every device can copy and index; any other as it is."""
    return cache.view(torch.uint8) if cache.dtype == FP8 else cache


class KVCache:
    """Keys and values of every layer, in blocks, as the attention backend lays them out.

    A block has the same number in every layer, wherever the layer is.

    shapes         [layers] shapes of the keys and of the values of a block
    device         of all layers, or of each
    keys[layer]    [num_blocks, *shape], and values likewise
    flat           keys and values of all layers in one tensor each, those of a layer after those of the one before;
                   None if they lie on several devices
    """

    def __init__(
        self,
        shapes: list[tuple[Shape, Shape]],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | Sequence[torch.device],
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.flat: tuple[Tensor, Tensor] | None = None
        devices = [device] * len(shapes) if isinstance(device, torch.device) else device
        if len(set(devices)) == 1:
            parts = [_stacked([pair[part] for pair in shapes], num_blocks, dtype, devices[0]) for part in (0, 1)]
            self.flat = parts[0][0], parts[1][0]
            self.keys, self.values = parts[0][1], parts[1][1]
        else:
            make, places = partial(empty_tensor, dtype=dtype), list(zip(shapes, devices, strict=True))
            self.keys = [make(num_blocks, *shape, device=place) for (shape, _), place in places]
            self.values = [make(num_blocks, *shape, device=place) for (_, shape), place in places]

    def copy_blocks(self, pairs: NDArray[np.int64]) -> None:
        """Copies whole blocks, in every layer.  pairs: [N, 2], a block and the one that becomes like it"""
        columns = [np.ascontiguousarray(column) for column in pairs.T]
        places = {device: to_device(columns, device) for device in {part.device for part in self.keys}}
        for part in (*self.keys, *self.values):
            sources, targets = places[part.device]
            stored = as_bytes(part)
            stored[targets] = stored[sources]


def _stacked(
    shapes: list[Shape], num_blocks: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    sizes = [num_blocks * math.prod(shape) for shape in shapes]
    whole = empty_tensor(sum(sizes), dtype=dtype, device=device)
    parts = torch.split(whole, sizes)
    if device.type == "cpu":
        for part in parts:
            use_small_pages(part.view(torch.uint8)[:_SMALL_BYTES].numpy())
    return whole, [part.view(num_blocks, *shape) for part, shape in zip(parts, shapes, strict=True)]
