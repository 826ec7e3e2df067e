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


def use_device(device: torch.device) -> AbstractContextManager[object]:
    """Kernels of Triton are launched on torch's current device, wherever the tensors lie."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def synchronize(device: torch.device) -> None:
    """Waits until a GPU has done all its work; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def to_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The arrays as tensors there, by one copy that nobody waits for. On the CPU they keep their memory."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return unpack(pack(arrays, arrays, pin=True).to(device, non_blocking=True), arrays)


class HostCopy:
    """Tensors on their way to the host. Nobody waits for them until they are asked for."""

    def __init__(self, *tensors: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        self._tensors = tensors
        if any(tensor.device.type == "cuda" for tensor in tensors):
            there = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors]
            for target, tensor in zip(there, tensors, strict=True):
                target.copy_(tensor, non_blocking=True)
            self._tensors = tuple(there)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(tensors[0].device))

    def get(self) -> tuple[Tensor, ...]:
        """The tensors, on the host."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensors


def pack(arrays: Sequence[NDArray[Any]], room: Sequence[NDArray[Any]], *, pin: bool) -> Tensor:
    """The bytes of all arrays, each where that of `room` begins, in memory that ends with the last.

    room: the arrays themselves, or larger ones; each has an aligned place
    """
    places = _places(room)
    buffer = torch.empty(places[-2] + arrays[-1].nbytes, dtype=torch.uint8, pin_memory=pin)
    there = buffer.numpy()
    for array, place in zip(arrays, places, strict=False):
        there[place : place + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return buffer


def unpack(buffer: Tensor, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
    """A buffer for arrays of these shapes and types (see `pack`), as tensors that share its memory."""
    result = []
    for array, place in zip(arrays, _places(arrays), strict=False):
        kind = torch.from_numpy(np.empty(0, array.dtype)).dtype
        result.append(buffer[place : place + array.nbytes].view(kind).view(array.shape))
    return result


def packed_size(arrays: Sequence[NDArray[Any]]) -> int:
    """Bytes of a buffer for all arrays."""
    return _places(arrays)[-1]


def _places(arrays: Sequence[NDArray[Any]]) -> list[int]:
    return [0, *accumulate(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)]
