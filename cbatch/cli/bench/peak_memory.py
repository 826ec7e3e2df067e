"""The most memory that something takes while it runs."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading

import psutil
import torch

INTERVAL = 0.002
"""Seconds between two looks at a process; what comes and goes within is not seen."""


class PeakMemory:
    """Bytes that were taken at most beyond what was taken at the start: of the device, or of this process on a CPU.

    `peak_bytes` is there after the block.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._process = psutil.Process()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="cbatch-memory", daemon=True)
        self._before = self._most = 0
        self.peak_bytes = 0

    def __enter__(self) -> PeakMemory:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        else:
            _release_free_memory()
            self._before = self._most = self._process.memory_info().rss
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._device.type == "cuda":
            self._most = torch.cuda.max_memory_allocated(self._device)
        else:
            self._stop.set()
            self._thread.join()
        self.peak_bytes = max(self._most - self._before, 0)

    def _watch(self) -> None:
        while not self._stop.wait(INTERVAL):
            self._most = max(self._most, self._process.memory_info().rss)


def _release_free_memory() -> None:
    """Returns what is free to the system, where the C library can, so that it is seen when it is taken again."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
