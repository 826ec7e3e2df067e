"""The CPU: how many threads compute on it, arrays for its vector units, and settings of Python for computing."""

from __future__ import annotations

import gc
import math
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # a process that only drives replicas is tuned without torch
    import torch
    from torch import Tensor

_LINE = 64
"""Bytes of a line of the processor's cache, and of its longest vector."""

_USUAL_SECOND_CACHE = 2**20
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")

_outside = threading.local()


def num_threads() -> int:
    """Number of threads for computing, also within `single_threaded`."""
    import torch

    count: int = getattr(_outside, "count", None) or torch.get_num_threads()
    return count


def second_cache_bytes() -> int:
    """The size of the second cache of a core, as far as Linux says it: between 256 KiB and 4 MiB, 1 MiB if unknown."""
    with suppress(OSError, ValueError):
        for folder in _CACHES.glob("index*"):
            if (folder / "level").read_text().strip() == "2":
                size = int((folder / "size").read_text().strip().removesuffix("K")) * 1024
                return min(max(size, 2**18), 2**22)
    return _USUAL_SECOND_CACHE


@contextmanager
def single_threaded() -> Iterator[None]:
    """Keeps torch's operations on the calling thread.

    After a parallel operation, torch's other threads spin for about a millisecond, which takes the cores from our own
    threads.
    """
    import torch

    _outside.count = before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _outside.count = None


def empty(shape: int | tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """An array that begins with a line, so that no vector of it lies in two; numpy begins large ones 16 bytes later."""
    dtype = np.dtype(dtype)
    size = math.prod(shape if isinstance(shape, tuple) else (shape,)) * dtype.itemsize
    memory = np.empty(size + _LINE, np.uint8)
    start = -memory.ctypes.data % _LINE
    array: NDArray[Any] = memory[start : start + size].view(dtype).reshape(shape)
    return array


def empty_tensor(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialized numbers on any device.

    On a CPU numpy makes them: it asks the system for large pages, which spares page-table walks, and the system commits
    memory when it is first touched.
    """
    import torch

    if device.type != "cpu":
        return torch.empty(*shape, dtype=dtype, device=device)
    return torch.from_numpy(empty(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


SWITCH_SECONDS = 5e-4


def tune_process() -> None:
    """Prepares Python for a process that has loaded a model and works on several threads.

    `freeze` keeps full garbage collections from walking over all of torch, which took half of the time of short rows.
    The switch interval bounds how long another thread may keep the interpreter while the engine waits for it.
    """
    gc.freeze()
    sys.setswitchinterval(SWITCH_SECONDS)
