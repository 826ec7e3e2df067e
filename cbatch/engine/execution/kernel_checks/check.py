"""What the check of a kernel says, and how one is run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor

from cbatch.engine.base.errors import CbatchError, ModelError
from cbatch.engine.runtime.kv_cache import as_bytes
from cbatch.engine.runtime.memory import clear_frames
from cbatch.engine.runtime.transfer import synchronize, use_device

# Storing a result rounds it by up to 0.0005 in float16 and 0.004 in bfloat16. Attention of the reference in these types
# differs from itself in float64 by 0.0005 and 0.004 of a row, and by 2e-6 in float32. The rest is a margin for kernels
# that round in other places.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Most that rounding changes the result of a kernel, as a share of the largest number of a row."""

TF32_TOLERANCE = 1e-2
"""The same in float32 of what has products of matrices, if these may be computed with numbers of 11 bits (TF32)."""


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

    error:     the largest difference, as a share of the largest number of its row
    tolerance: the largest error that rounding explains
    failure:   the kernel's exception as a sentence, if it raised one; then the error is NaN
    skipped:   why the kernel was not checked, if it was not; then the error is 0
    workload:  makes the kernel's workload; None if its speed says nothing
    """

    name: str
    error: float
    tolerance: float
    failure: str = ""
    workload: Callable[[], Workload] | None = None
    skipped: str = ""

    @property
    def agrees(self) -> bool:
        return self.error <= self.tolerance  # false for NaN

    @property
    def reason(self) -> str:
        """Why the kernel cannot be used, as a sentence."""
        if self.failure:
            return f"{self.name} fails ({self.failure})."
        return f"{self.name} differs from torch by {self.error:.2g}; rounding explains {self.tolerance:g}."


def run_check(
    name: str,
    device: torch.device,
    tolerance: float,
    measure: Callable[[], float],
    workload: Callable[[], Workload] | None = None,
) -> KernelCheck:
    """Runs one check.

    measure: runs the kernel, waits for it, and returns its error

    Raises ModelError if the device cannot be used any more afterwards: an illegal memory access makes everything that
    follows in the process fail.
    """
    made = partial(_workload_on, device, workload) if workload is not None else None
    try:
        with use_device(device), torch.inference_mode():
            return KernelCheck(name, measure(), tolerance, workload=made)
    except CbatchError:
        raise
    except Exception as error:  # whatever a compiler, a driver or a library raises
        failure = first_line(error)
        clear_frames(error)
    try:
        synchronize(device)
    except Exception as error:
        raise ModelError(
            f"{device} stopped working while {name} was checked ({first_line(error)}), and nothing more runs on it in "
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


def first_line(error: BaseException) -> str:
    """The kind of an error and the beginning of what it says, without a full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {shorten(lines[0], 200).rstrip('.')}" if lines else type(error).__name__


def allows_tf32() -> bool:
    """Whether the process allows products of float32 on a GPU to be computed with numbers of 11 bits."""
    # The older names of this setting raise if the program has used the newer ones.
    return torch.backends.cuda.matmul.fp32_precision not in ("none", "ieee")


def product_tolerance(dtype: torch.dtype, tolerance: float) -> float:
    """The tolerance of what has products of matrices in it."""
    return max(tolerance, TF32_TOLERANCE) if dtype == torch.float32 and allows_tf32() else tolerance


def largest_error(found: Tensor, expected: Tensor) -> float:
    """The largest difference of a row, as a share of the row's largest expected number; infinite if not finite.

    found, expected: [rows, ...]. Rows are compared with themselves, since attention over a long text averages it: its
                     numbers are a fiftieth of those of a first token.
    """
    if found.shape != expected.shape or not bool(found.isfinite().all()):
        return math.inf
    found, expected = found.double().flatten(1), expected.double().flatten(1)
    return float(((found - expected).abs().amax(1) / expected.abs().amax(1).clamp(min=1e-12)).amax())


def error_of_cache(found: Tensor, expected: Tensor) -> float:
    """The same of a cache, whose slots hold NaN where nothing is stored."""
    found, expected = found.float(), expected.float()
    if not torch.equal(found.isnan(), expected.isnan()):
        return math.inf
    return largest_error(found.nan_to_num(), expected.nan_to_num())


def error_of_fp8_cache(found: Tensor, expected: Tensor) -> float:
    """The same of a cache of FP8 whose numbers are computed before they are rounded.

    Where they lie near the middle of two numbers of FP8, kernels may choose different ones: up to one in eight may be
    the next number. One in two is if all are rounded down.
    """
    mine, other = _places(found), _places(expected)
    number = ~(found.float().isnan() | expected.float().isnan())
    near = number & ((mine - other).abs() <= 1)
    if int((near & (mine != other)).sum()) * 8 <= int(number.sum()):
        found = torch.where(near, expected.float(), found.float())
    return error_of_cache(found, expected)


def _places(cache: Tensor) -> Tensor:
    """The place of each number of FP8 among all in their order; 0 for both zeros."""
    codes = as_bytes(cache).short()
    return torch.where(codes < 0x80, codes, 0x80 - codes)
