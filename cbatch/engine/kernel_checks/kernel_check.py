"""Checks of kernels: how one is run, its result, and how far the results of two kernels may lie apart."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from cbatch.base.errors import CbatchError, ModelError, in_short
from cbatch.runtime.kv_cache import FP8, as_bytes
from cbatch.runtime.memory import clear_frames, is_out_of_memory, release_memory
from cbatch.runtime.transfer import computing_on, synchronize

R = TypeVar("R")

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

    error:     the largest difference, as a share of the largest number of its row; if it gives tokens, the share of
               the rows that have another one
    tolerance: the largest error of a kernel that is right
    failure:   the kernel's exception as a sentence, if it raised one; then the error is NaN
    skipped:   why the kernel was not checked, if it was not; then the error is 0
    workload:  makes the kernel's workload; None if its speed says nothing
    of_tokens: whether it gives tokens, not numbers
    kernel:    of which operation it is the kernel, by name in `KERNELS`; empty for any other check
    """

    name: str
    error: float
    tolerance: float
    failure: str = ""
    workload: Callable[[], Workload] | None = None
    skipped: str = ""
    of_tokens: bool = False
    kernel: str = ""

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
    """Runs one check, and once more if memory ran out, after all that is not in use was given back.

    measure: runs the kernel, waits for it, and returns its error

    Raises ModelError if the device cannot be used any more afterwards: an illegal memory access makes everything that
    follows in the process fail.
    """

    def make(workload: Callable[[], Workload]) -> Workload:
        work = _as_step(device, workload)
        return replace(work, run=partial(_as_step, device, work.run))

    made = partial(make, workload) if workload is not None else None
    failure = ""
    for _ in range(2):
        try:
            return KernelCheck(name, _as_step(device, measure), tolerance, workload=made, of_tokens=of_tokens)
        except CbatchError:
            raise
        except Exception as error:  # whatever a compiler, a driver or a library raises
            failure, is_full = in_short(error), is_out_of_memory(error)
            clear_frames(error)
        _check_alive(name, device)
        if not is_full:
            break
        release_memory(device)
    return KernelCheck(name, math.nan, tolerance, failure)


def _check_alive(name: str, device: torch.device) -> None:
    """Raises ModelError if nothing more runs on the device."""
    try:
        synchronize(device)
    except Exception as error:
        raise ModelError(
            f"{device} stopped working while {name} was checked ({in_short(error)}), and nothing more runs on it in "
            "this process; start again with --attention reference."
        ) from error


def _as_step(device: torch.device, function: Callable[[], R]) -> R:
    with computing_on(device), torch.inference_mode():
        return function()


def product_tolerance(dtype: torch.dtype, tolerance: float) -> float:
    """The tolerance of what has products of matrices in it."""
    # Numbers of 11 bits are allowed. The older names of this setting raise if the program has used the newer ones.
    has_tf32 = torch.backends.cuda.matmul.fp32_precision not in ("none", "ieee")
    return max(tolerance, TF32_TOLERANCE) if dtype == torch.float32 and has_tf32 else tolerance


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
    """The same of tensors that hold NaN where nothing is stored.

    Numbers of FP8 were computed before they were rounded. Where they lie near the middle of two numbers, kernels may
    choose different ones: up to one in eight may be the next number. One in two is if all are rounded down.
    """
    mine, theirs = found.float(), expected.float()
    if found.dtype == FP8:
        one, other = _places(found), _places(expected)
        number = ~(mine.isnan() | theirs.isnan())
        near = number & ((one - other).abs() <= 1)
        if int((near & (one != other)).sum()) * 8 <= int(number.sum()):
            mine = torch.where(near, theirs, mine)
    if not torch.equal(mine.isnan(), theirs.isnan()):
        return math.inf
    return largest_error(mine.nan_to_num(), theirs.nan_to_num())


def _places(cache: Tensor) -> Tensor:
    """The place of each number of FP8 among all in their order; 0 for both zeros."""
    codes = as_bytes(cache).short()
    return torch.where(codes < 0x80, codes, 0x80 - codes)
