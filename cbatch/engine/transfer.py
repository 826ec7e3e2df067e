"""From the host to a device: small arrays, and which device is meant."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16
"""Bytes: kernels are compiled for addresses that are multiples of it, or once more for others."""


def current(device: torch.device) -> AbstractContextManager[object]:
    """Kernels of Triton are launched on torch's current device, wherever the tensors lie."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def to_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The arrays as tensors there, by one copy that nobody waits for. On the CPU they keep their memory."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return views(packed(arrays, pin=True).to(device, non_blocking=True), arrays)


def packed(arrays: Sequence[NDArray[Any]], *, pin: bool) -> Tensor:
    """The bytes of all arrays one after the other, each from an aligned place on."""
    places = _places(arrays)
    buffer = torch.empty(places[-1], dtype=torch.uint8, pin_memory=pin)
    there = buffer.numpy()
    for array, place in zip(arrays, places, strict=False):
        there[place : place + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return buffer


def views(buffer: Tensor, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
    """What `packed` has put into a buffer, as tensors of the arrays' shapes and types that share its memory."""
    result = []
    for array, place in zip(arrays, _places(arrays), strict=False):
        kind = torch.from_numpy(np.empty(0, array.dtype)).dtype
        result.append(buffer[place : place + array.nbytes].view(kind).view(array.shape))
    return result


def _places(arrays: Sequence[NDArray[Any]]) -> list[int]:
    return [0, *accumulate(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)]
