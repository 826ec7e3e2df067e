"""The CPU: how many threads compute on it, arrays for its vector units, and settings of Python for computing."""

from __future__ import annotations

import gc
import math
import os
import sys
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cbatch.runtime.processors import Processors, read_processors

if TYPE_CHECKING:  # a process that only drives replicas is tuned without torch
    import torch
    from torch import Tensor

_LINE = 64
"""Bytes of a line of the processor's cache, and of its longest vector."""

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""From which torch takes its number of threads."""

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass
class _Threads:
    """The threads of this process, as its last engine has chosen them.

    reason:     for people
    count:      that of torch, if it was set here; another one is set by the user
    processors: None if the user has set the number
    near:       CPUs that threads stay on, to be near the weights; empty: any
    outside:    torch's number of threads outside of `single_threaded`
    num_single: threads that are inside
    """

    reason: str = ""
    count: int = 0
    processors: Processors | None = None
    near: frozenset[int] = frozenset()
    outside: int = 0
    num_single: int = 0

    def take(self, count: int, reason: str, processors: Processors | None = None) -> None:
        import torch

        self.outside = self.count = count
        self.reason, self.processors, self.near = reason, processors, frozenset()
        torch.set_num_threads(count)


_threads, _lock, _here = _Threads(), threading.Lock(), threading.local()


def choose_threads(asked: int | None = None) -> None:
    """Sets torch's number of threads, which is that of all computing.

    A number that was asked for goes first, then one in OMP_NUM_THREADS, MKL_NUM_THREADS or from torch.set_num_threads,
    then that for the processors that the system gives.
    """
    import torch

    with _lock, ThreadPoolExecutor(1) as new:  # a thread keeps the number that torch had when it was first asked in it
        count = _threads.outside if _threads.num_single else new.submit(torch.get_num_threads).result()
    found = read_processors()
    variable = next((name for name in _THREAD_VARIABLES if os.environ.get(name, "").lstrip("0").isdecimal()), None)
    if asked is not None:
        _threads.take(asked, "as was asked for")
    elif variable is not None:
        _threads.take(count, f"as {variable} says")
    elif count in (_threads.count, len(found.cores), found.num_cpus, os.cpu_count()):
        _threads.take(found.num_threads, found.reason, found)
    else:
        _threads.take(count, "as torch.set_num_threads says")
        _threads.count = 0


def num_threads() -> int:
    """Number of threads for computing, also within `single_threaded`."""
    import torch

    return _threads.outside if _threads.num_single else torch.get_num_threads()


def describe_threads() -> str:
    """The number of threads for computing, and the reason for it."""
    return f"{num_threads()}: {_threads.reason}"


@contextmanager
def near_weights(num_bytes: int) -> Iterator[None]:
    """Takes threads of one NUMA node only, if the weights fit into its memory and nobody has set a number of threads.

    Meanwhile this thread, and those that it starts, compute and allocate there.
    """
    if (processors := _threads.processors) is not None and len(processors.nodes) > 1:
        chosen = processors.on_one_node(num_bytes)
        _threads.take(chosen.num_threads, chosen.reason, processors)
        _threads.near = chosen.cpus if chosen.is_part else frozenset()
    with on_cpus(_threads.near):
        yield


def near_cpus() -> frozenset[int]:
    """The CPUs that computing threads must stay on; empty: any."""
    return _threads.near


@contextmanager
def on_cpus(cpus: Collection[int]) -> Iterator[None]:
    """Keeps the calling thread, and those that it starts meanwhile, on these CPUs, unless there are none."""
    before = os.sched_getaffinity(0) if cpus else ()
    bind_thread(cpus)
    try:
        yield
    finally:
        bind_thread(before)


def bind_thread(cpus: Collection[int]) -> None:
    """Keeps the calling thread on these CPUs, unless there are none."""
    if cpus:
        os.sched_setaffinity(0, cpus)


def second_cache_bytes() -> int:
    """The size of the second cache of a core, as far as Linux says it: between 256 KiB and 4 MiB, 1 MiB if unknown."""
    with suppress(OSError, ValueError):
        for folder in _CACHES.glob("index*"):
            if (folder / "level").read_text().strip() == "2":
                size = int((folder / "size").read_text().strip().removesuffix("K")) * 1024
                return min(max(size, 2**18), 2**22)
    return 2**20


@contextmanager
def single_threaded() -> Iterator[None]:
    """Keeps torch's operations on the calling thread.

    After a parallel operation, torch's other threads spin for about a millisecond, which takes the cores from our own
    threads.
    """
    import torch

    with _lock:
        if _threads.num_single == 0:
            _threads.outside = torch.get_num_threads()
        _threads.num_single += 1
    depth = getattr(_here, "depth", 0)
    _here.depth = depth + 1
    torch.set_num_threads(1)
    try:
        yield
    finally:
        _here.depth = depth
        with _lock:
            _threads.num_single -= 1
            torch.set_num_threads(1 if depth else _threads.outside)


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
