"""The peak memory of a block of code."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading

import psutil
import torch

INTERVAL = 0.002
"""Seconds between two samples of a process; shorter peaks are missed."""


class PeakMemory:
    """The most bytes taken beyond those at the start: of the GPU, or of this process on a CPU.

    `peak_bytes` is set when the block ends.
    """

    def __init__(self, device: torch.device, *, releases: bool = True) -> None:
        """`releases`: return free memory of the process to the system first, so that taking it again is seen."""
        self._releases = releases
        self._device = device
        self._counts_peaks = device.type not in ("cpu", "mps")  # an Apple GPU works in memory of the process
        self._process = psutil.Process()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="cbatch-memory", daemon=True)
        self._at_start = self._peak = 0
        self.peak_bytes = 0

    def __enter__(self) -> PeakMemory:
        if self._counts_peaks:
            torch.get_device_module(self._device).reset_peak_memory_stats(self._device)
            self._at_start = torch.get_device_module(self._device).memory_allocated(self._device)
        else:
            if self._releases:
                release_free_memory()
            self._at_start = self._peak = self._process.memory_info().rss
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._counts_peaks:
            self._peak = torch.get_device_module(self._device).max_memory_allocated(self._device)
        else:
            self._stop.set()
            self._thread.join()
        self.peak_bytes = max(self._peak - self._at_start, 0)

    def _watch(self) -> None:
        while not self._stop.wait(INTERVAL):
            self._peak = max(self._peak, self._process.memory_info().rss)


def release_free_memory() -> None:
    """Returns free memory to the system where the C library can."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
