"""How far the results of two kernels may lie apart, and how far they do."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cbatch.runtime.kv_cache import as_bytes

# Storing a result rounds it by up to 0.0005 in float16 and 0.004 in bfloat16. Attention of the reference in these types
# differs from itself in float64 by 0.0005 and 0.004 of a row, and by 2e-6 in float32. The rest is a margin for kernels
# that round in other places.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Most that rounding changes the result of a kernel, as a share of the largest number of a row."""

TF32_TOLERANCE = 1e-2
"""The same in float32 of what has products of matrices, if these may be computed with numbers of 11 bits (TF32)."""


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
