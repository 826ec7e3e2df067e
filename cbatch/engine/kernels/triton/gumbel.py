"""The Gumbel noise of tokens, and float32 as ordered integers, for the sampling kernels."""

# mypy: allow-untyped-decorators

from __future__ import annotations

import math

import triton
import triton.language as tl

_STEP = tl.constexpr(2.0**-32)
_BELOW_ONE = tl.constexpr(1 - 2.0**-24)
_STEEPNESS = tl.constexpr(-math.log(2) * 2.0**-23)
_OFFSET = tl.constexpr(127 * math.log(2) + 1e-3)


@triton.jit
def to_ordered_int(x: tl.tensor) -> tl.tensor:
    """A float32 as an integer in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def from_ordered_int(order: tl.tensor) -> tl.tensor:
    """The float32 of an integer from `to_ordered_int`."""
    bits = order.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _mix(word: tl.tensor) -> tl.tensor:
    """See `sampler._mix`."""
    word = word ^ (word >> 16)
    word = word * 0x85EBCA6B
    word = word ^ (word >> 13)
    word = word * 0xC2B2AE35
    return word ^ (word >> 16)


@triton.jit
def uniform_of(ids: tl.tensor, key: tl.tensor) -> tl.tensor:
    """The uniform random number of each token id; key: two words."""
    words = _mix(_mix(ids.to(tl.uint32) ^ key[0]) ^ key[1])
    return tl.minimum((words.to(tl.float32) + 0.5) * _STEP, _BELOW_ONE)


@triton.jit
def noise(uniform: tl.tensor) -> tl.tensor:
    """Standard Gumbel noise (see `sampler.gumbel_noise`).

    log1p after W. Kahan: a factor corrects what 1 - u loses in rounding.
    """
    rest = 1 - uniform
    exponential = tl.where(rest == 1, uniform, -tl.log(rest) * (uniform / (1 - rest)))
    return -tl.log(exponential)


@triton.jit
def noise_bound(uniform: tl.tensor) -> tl.tensor:
    """An upper bound of the noise: see `kernels/cpu/sampling.py`."""
    return uniform.to(tl.int32, bitcast=True).to(tl.float32) * _STEEPNESS + _OFFSET
