"""Memory of a device: how much is free, how much a step takes, and how to release it."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from numpy.typing import NDArray

from cbatch.base.config import CPU_CACHE_SHARE
from cbatch.base.errors import ModelError
from cbatch.base.units import format_bytes
from cbatch.runtime.device import is_accelerator
from cbatch.runtime.processors import control_groups

Step = Callable[[], object]


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The figures that the size of the KV cache depends on. Tests use their own.

    name:         of the device, for messages
    share:        the cache's default share of free memory, such as `90%`
    free:         returns the free bytes
    measure_peak: runs a step, and returns the most bytes it held beyond those it holds afterwards; None: steps are not
                  profiled on this device
    """

    name: str
    share: str
    free: Callable[[], int]
    measure_peak: Callable[[Step], int] | None = None


def device_memory(device: torch.device) -> DeviceMemory:
    """The memory of a GPU or of the host.

    On a CPU no step is profiled. The cache takes only a quarter of the free memory, so steps fit beside it; a peak
    could not be told apart from the process's heap and other programs; and a large step takes seconds at every start.
    The same holds for Apple's GPU, which works in the host's memory and counts no peak.
    """
    if not is_accelerator(device):
        return DeviceMemory(str(device), CPU_CACHE_SHARE, _free_host_bytes)
    if device.type == "mps":
        return DeviceMemory(str(device), CPU_CACHE_SHARE, _free_apple_bytes)
    return DeviceMemory(str(device), "90%", partial(_free_gpu_bytes, device), partial(_measure_gpu_peak, device))


_mapped: WeakKeyDictionary[mmap.mmap, int] = WeakKeyDictionary()


def count_as_taken(memory: mmap.mmap, size: int) -> None:
    """Counts the bytes of a mapped file as taken for as long as it is mapped.

    The system calls its pages available, since it can read them again; but a model reads its weights in every step.
    """
    _mapped[memory] = size


def drop_mapped_pages(files: Iterable[Path]) -> None:
    """Drops all pages that this process has of mapped files. They are read again, from the file, when they are needed.

    files: mapped by this process, copy-on-write or to read only. What it has written to their pages is lost
    """
    if sys.platform != "linux":
        return
    names = {os.path.realpath(file) for file in files}
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5] in names and fields[1][3] == "p":
                first, stop = (int(address, 16) for address in fields[0].split("-"))
                _system_madvise()(first, stop - first, mmap.MADV_DONTNEED)


_BYTES_BETWEEN_DROPS = 2**24


@dataclass(eq=False)
class MappedFiles(ABC):
    """Files that are mapped. What has been read is dropped from time to time, so that a process need not hold a model
    and its packed weights at once; what is still in use is read again.
    """

    paths: tuple[Path, ...]
    _bytes_read: int = field(default=0, init=False)

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Of all tensors in them."""

    def count_read(self, num_bytes: int) -> None:
        """Drops what has been read if that is much by now."""
        self._bytes_read += num_bytes
        if self._bytes_read > _BYTES_BETWEEN_DROPS:
            self.drop_pages()

    def drop_pages(self) -> None:
        """Gives back the memory of what has been read."""
        self._bytes_read = 0
        drop_mapped_pages(self.paths)


def use_small_pages(memory: NDArray[Any]) -> None:
    """Asks the system to give memory out in small pages, which holds for whole ones only; it may refuse."""
    if sys.platform == "linux":
        address = memory.ctypes.data
        first, stop = -(-address // mmap.PAGESIZE), (address + memory.nbytes) // mmap.PAGESIZE
        _system_madvise()(first * mmap.PAGESIZE, (stop - first) * mmap.PAGESIZE, mmap.MADV_NOHUGEPAGE)


@cache
def _system_madvise() -> Any:
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def check_room(what: str, needed: int, device: torch.device) -> None:
    """Raises ModelError, with both figures, if a part of a model needs more memory than its device has free."""
    free = device_memory(device).free()
    if needed > free:
        raise ModelError(
            f"{what} need {format_bytes(needed)}, and {format_bytes(free)} are free on {device}; use a smaller model."
        )


def _free_host_bytes() -> int:
    import psutil

    free = min(int(psutil.virtual_memory().available), free_cgroup_bytes())
    return max(free - sum(_mapped.values()), 0)


def _free_gpu_bytes(device: torch.device) -> int:
    """Free bytes after torch has returned its cached memory, since a KV cache is one or two large tensors."""
    module = torch.get_device_module(device)
    module.empty_cache()
    try:
        return int(module.mem_get_info(device)[0])
    except RuntimeError:  # some Intel GPUs do not tell what is free
        return int(module.get_device_properties(device).total_memory - module.memory_reserved(device))


def _free_apple_bytes() -> int:
    torch.mps.empty_cache()
    return min(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory(), _free_host_bytes())


def _measure_gpu_peak(device: torch.device, step: Step) -> int:
    # torch counts on the host, so there is no need to wait for the device.
    module = torch.get_device_module(device)
    module.reset_peak_memory_stats(device)
    step()
    return int(module.max_memory_allocated(device) - module.memory_allocated(device))


def release_memory(device: torch.device) -> None:
    """Returns unused memory to the device, after collecting reference cycles."""
    gc.collect()
    if is_accelerator(device):
        torch.get_device_module(device).empty_cache()


_SIGNS = ("out of memory", "ALLOC_FAILED", "OUT_OF_DEVICE_MEMORY", "can't allocate memory", "not enough memory")
"""In messages of CUDA, cuBLAS, Triton, Intel's runtime and torch on a CPU, which raise plain RuntimeErrors."""


def kernel_too_large(error: BaseException) -> str | None:
    """Says in a sentence, without a full stop, that a kernel does not fit on the GPU; None for any other error.

    It takes more than there is of what a multiprocessor has for one program. Smaller steps take as much.
    """
    errors = sys.modules.get("triton.runtime.errors")  # not there if no kernel was launched
    if errors is not None and isinstance(error, errors.OutOfResources):
        needs = f"{error.required} of {error.name}, and this GPU has {error.limit}"
    elif isinstance(error, RuntimeError) and "too many resources requested" in str(error):
        needs = "more registers than this GPU has"
    else:
        return None
    return f"a kernel needs {needs}; --attention reference does without such kernels"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out, or was raised while such an error was handled."""
    if kernel_too_large(error):
        return False
    return any(
        isinstance(one, torch.OutOfMemoryError | MemoryError)
        or (isinstance(one, RuntimeError) and any(sign in str(one) for sign in _SIGNS))
        for one in _chain(error)
    )


def clear_frames(error: BaseException) -> None:
    """Clears the frames that an error was raised through, so that keeping the error does not keep their tensors."""
    for one in _chain(error):
        traceback.clear_frames(one.__traceback__)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    left, seen = [error], set[int]()
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            left += [one.__cause__, one.__context__]


_FILES = (
    ("memory.max", "memory.current", "file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
)
"""Of groups of version 2 and of version 1: limit, what is taken, and how much of it are pages of files, which the
system drops when it needs memory (https://docs.kernel.org/admin-guide/cgroup-v2.html).
"""


def free_cgroup_bytes() -> int:
    """Bytes that are free within the narrowest limit of this process's container or group; sys.maxsize without one."""
    free = sys.maxsize
    for group, (limit, taken, files) in product(control_groups("memory"), _FILES):
        with suppress(OSError, ValueError):  # no such folder here, or no limit
            most, now = (int((group / name).read_text()) for name in (limit, taken))
            statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            free = min(free, max(most - now + int(statistics.get(files, 0)), 0))
    return free
