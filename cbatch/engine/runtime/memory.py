"""Memory of the device a model computes on: how much is free, how much a step takes, and how it is given back."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

Step = Callable[[], object]


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What is asked of a device's memory before a cache is made in it. Tests put one of their own in its place.

    name:    of the device, for sentences
    share:   of what is free, which the cache gets where nobody says how much: `90%`
    free:    bytes that can still be taken
    peak_of: calls a step, and returns how many bytes were taken at most while it ran, beyond what is still taken after
             it. None: steps are not tried out on this device.
    """

    name: str
    share: str
    free: Callable[[], int]
    measure_peak: Callable[[Step], int] | None = None


def device_memory(device: torch.device) -> DeviceMemory:
    """That of a GPU, or the host's.

    On a CPU no step is tried out. The cache takes a quarter of what is free there, so steps find room; a peak could
    not be told from what the process's heap keeps and what other programs take meanwhile; and a large step takes a CPU
    seconds, for which everybody would wait at the start.
    """
    if device.type == "cuda":
        return DeviceMemory(str(device), "90%", partial(_free_gpu_bytes, device), partial(_measure_gpu_peak, device))
    return DeviceMemory(str(device), "25%", _free_host_bytes)


def _free_host_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


def _free_gpu_bytes(device: torch.device) -> int:
    """What the driver has left, when it has back whatever torch keeps for later: a cache is one or two large pieces."""
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


def _measure_gpu_peak(device: torch.device, step: Step) -> int:
    # The host counts what it hands out, so nobody has to wait for the device.
    torch.cuda.reset_peak_memory_stats(device)
    step()
    return torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)


def release_memory(device: torch.device) -> None:
    """Returns what nobody holds any more to the device, also what is held only by cycles of Python's objects."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


_SIGNS = ("out of memory", "ALLOC_FAILED", "can't allocate memory", "not enough memory")
"""In texts of drivers and libraries (CUDA, cuBLAS, Triton, torch on a CPU), which have no kind of error for it."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory did not suffice, or came up while such a one was handled."""
    return any(
        isinstance(one, torch.OutOfMemoryError | MemoryError)
        or (isinstance(one, RuntimeError) and any(sign in str(one) for sign in _SIGNS))
        for one in _chain(error)
    )


def clear_frames(error: BaseException) -> None:
    """Empties the frames that an error was raised through, so that whoever keeps it does not keep their tensors."""
    for one in _chain(error):
        traceback.clear_frames(one.__traceback__)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what caused it, and what was handled when it came up."""
    left, seen = [error], set[int]()
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            left += [one.__cause__, one.__context__]
