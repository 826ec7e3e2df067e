"""Small arrays from the host to a device and back, and what torch is set to while it computes there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.runtime.device import is_accelerator, is_cuda, pins_memory

_ALIGNMENT = 16
"""Bytes. Triton compiles a kernel once more for addresses that are not multiples of it."""


def use_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU torch's current device, on which Triton launches kernels wherever the tensors are."""
    return torch.cuda.device(device) if is_cuda(device) else nullcontext()


_ROUNDED_SUMS = "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"
"""Settings by which cuBLAS may add parts of a product in 16 bits; both are on by default."""


@contextmanager
def computing_on(device: torch.device) -> Iterator[None]:
    """Makes a GPU torch's current device, and sums of its products float32.

    torch has these settings for the whole process. A program's own products find its own ones afterwards.
    """
    settings = torch.backends.cuda.matmul
    changed = [name for name in _ROUNDED_SUMS if is_cuda(device) and getattr(settings, name)]
    for name in changed:
        setattr(settings, name, False)
    try:
        with use_device(device):
            yield
    finally:
        for name in changed:
            setattr(settings, name, True)


def synchronize(device: torch.device) -> None:
    """Waits until a GPU has done all its work; a CPU always has."""
    if is_cuda(device):
        torch.cuda.synchronize(device)
    elif is_accelerator(device):
        torch.accelerator.synchronize(device)


def padded(values: NDArray[Any], size: int, padding: int | np.integer[Any] = 0) -> NDArray[Any]:
    """The values [N] or [N, K], then the padding, `size` in all."""
    result = np.empty((size, *values.shape[1:]), values.dtype)
    result[: len(values)], result[len(values) :] = values, padding
    return result


def to_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The arrays as tensors on a device, by one asynchronous copy. On the CPU they share their memory."""
    if not is_accelerator(device):
        return [torch.from_numpy(array) for array in arrays]
    if not pins_memory(device):
        return [torch.from_numpy(array).to(device) for array in arrays]
    return unpack(pack(arrays, arrays, pin=True).to(device, non_blocking=True), arrays)


class HostCopy:
    """A copy of tensors to the host, asynchronous if the device pins memory."""

    def __init__(self, *tensors: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        self._tensors = tensors
        if any(pins_memory(tensor.device) for tensor in tensors):
            there = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors]
            for target, tensor in zip(there, tensors, strict=True):
                target.copy_(tensor, non_blocking=True)
            self._tensors = tuple(there)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(tensors[0].device))
        elif any(is_accelerator(tensor.device) for tensor in tensors):
            self._tensors = tuple(tensor.cpu() for tensor in tensors)

    def get(self) -> tuple[Tensor, ...]:
        """Waits for the copy, and returns the tensors on the host."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensors


def pack(arrays: Sequence[NDArray[Any]], layout: Sequence[NDArray[Any]], *, pin: bool) -> Tensor:
    """A buffer with the numbers of all arrays, at the aligned offsets of `layout`, up to the end of the last array.

    layout: the arrays themselves, or larger ones, perhaps of other types, to which the numbers are converted
    """
    places = _places(layout)
    size = places[-2] + arrays[-1].size * layout[-1].itemsize
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pin)
    there = buffer.numpy()
    for array, room, place in zip(arrays, layout, places, strict=False):
        there[place : place + array.size * room.itemsize].view(room.dtype)[:] = array.reshape(-1)
    return buffer


def unpack(buffer: Tensor, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
    """The tensors in a buffer for arrays of these shapes and types (see `pack`); they share its memory."""
    result = []
    for array, place in zip(arrays, _places(arrays), strict=False):
        kind = torch.from_numpy(np.empty(0, array.dtype)).dtype
        result.append(buffer[place : place + array.nbytes].view(kind).view(array.shape))
    return result


class FixedTensors:
    """Tensors at fixed addresses of a device, zeros at first: what captured graphs find changed from step to step.

    tensors: one for each array that there is room for
    """

    def __init__(self, room: Sequence[NDArray[Any]], device: torch.device) -> None:
        self._room = room
        self._packed = torch.zeros(_places(room)[-1], dtype=torch.uint8, device=device)
        self.tensors = unpack(self._packed, room)
        self._is_zero = True

    def fill(self, *arrays: NDArray[Any]) -> None:
        """Overwrites the beginning of each with the numbers of an array, by one copy on the current stream."""
        packed = pack(arrays, self._room, pin=pins_memory(self._packed.device))
        self._packed[: len(packed)].copy_(packed, non_blocking=True)
        self._is_zero = False

    def zero(self) -> None:
        """Overwrites all with zeros, unless they are."""
        if not self._is_zero:
            self._packed.zero_()
        self._is_zero = True


def _places(arrays: Sequence[NDArray[Any]]) -> list[int]:
    return [0, *accumulate(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)]
