"""Checks of kernels: their results, and how one is run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from cbatch.base.errors import CbatchError, ModelError, in_short
from cbatch.runtime.memory import clear_frames
from cbatch.runtime.transfer import synchronize, use_device


@dataclass(frozen=True, slots=True)
class Workload:
    """A kernel at a size that means something, to measure its speed.

    run:        calls it once
    bytes_read: what it has to read and write, in bytes, if it is limited by the memory; else 0
    flops:      its floating-point operations, if it is limited by them; else 0
    """

    run: Callable[[], Any]
    bytes_read: float = 0.0
    flops: float = 0.0


@dataclass(frozen=True, slots=True)
class KernelCheck:
    """Whether a kernel agrees with plain torch on a device.

    error:     the largest difference, as a share of the largest number of its row; if it gives tokens, the share of
               the rows that have another one
    tolerance: the largest error of a kernel that is right
    failure:   the kernel's exception as a sentence, if it raised one; then the error is NaN
    skipped:   why the kernel was not checked, if it was not; then the error is 0
    workload:  makes the kernel's workload; None if its speed says nothing
    of_tokens: whether it gives tokens, not numbers
    """

    name: str
    error: float
    tolerance: float
    failure: str = ""
    workload: Callable[[], Workload] | None = None
    skipped: str = ""
    of_tokens: bool = False

    @property
    def agrees(self) -> bool:
        return self.error <= self.tolerance  # false for NaN

    @property
    def reason(self) -> str:
        """Why the kernel cannot be used, as a sentence."""
        if self.failure:
            return f"{self.name} fails ({self.failure})."
        if self.of_tokens:
            return f"{self.name} gives other tokens than torch in {self.error:.0%} of the rows."
        return f"{self.name} differs from torch by {self.error:.2g}; rounding explains {self.tolerance:g}."


def run_check(
    name: str,
    device: torch.device,
    tolerance: float,
    measure: Callable[[], float],
    workload: Callable[[], Workload] | None = None,
    *,
    of_tokens: bool = False,
) -> KernelCheck:
    """Runs one check.

    measure: runs the kernel, waits for it, and returns its error

    Raises ModelError if the device cannot be used any more afterwards: an illegal memory access makes everything that
    follows in the process fail.
    """
    made = partial(_workload_on, device, workload) if workload is not None else None
    try:
        with use_device(device), torch.inference_mode():
            return KernelCheck(name, measure(), tolerance, workload=made, of_tokens=of_tokens)
    except CbatchError:
        raise
    except Exception as error:  # whatever a compiler, a driver or a library raises
        failure = in_short(error)
        clear_frames(error)
    try:
        synchronize(device)
    except Exception as error:
        raise ModelError(
            f"{device} stopped working while {name} was checked ({in_short(error)}), and nothing more runs on it in "
            "this process; start again with --attention reference."
        ) from error
    return KernelCheck(name, math.nan, tolerance, failure)


def _workload_on(device: torch.device, make: Callable[[], Workload]) -> Workload:
    """A workload that is made and run as a step is."""
    with use_device(device), torch.inference_mode():
        work = make()

    def run() -> None:
        with use_device(device), torch.inference_mode():
            work.run()

    return replace(work, run=run)
