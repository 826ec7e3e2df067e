"""Passes over the logits of one row, in blocks of tokens, in one program, and the Gumbel noise of its tokens.

A row is a tuple (values, their number, temperature, mask, ids of the blocks to scan, how many these are). A mask is a
tuple (bitmask of the allowed tokens, whether there are any: see `structured/token_bitmask.py`). Loops are `while`:
Triton 3.6's interpreter cannot loop up to a number that it computed.
"""

# mypy: allow-untyped-decorators

from __future__ import annotations

import math

import triton
import triton.language as tl

_INFINITY = tl.constexpr(math.inf)
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


@triton.jit
def keep_allowed(raw: tl.tensor, ids: tl.tensor, is_token: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Logits, and minus infinity for tokens that the mask does not allow."""
    if mask[1]:
        word = tl.load(mask[0] + (ids >> 5), mask=is_token, other=0)
        raw = tl.where((word >> (ids & 31)) & 1 != 0, raw, -_INFINITY)
    return raw


@triton.jit
def _tile(
    row: tl.tensor, start: tl.tensor, LISTED: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """x [GROUP, BLOCK], values divided by the temperature, and their token ids, of the row's blocks from `start`.

    x is minus infinity past the end of the row, for NaN and for tokens that are not allowed. Without LISTED, all blocks
    are scanned.
    """
    values, length, temperature, mask, lists, stop = row
    blocks = start + tl.arange(0, GROUP)
    is_there = blocks < stop
    if LISTED:
        blocks = tl.load(lists + blocks, mask=is_there, other=0)
    places = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_token = is_there[:, None] & (places < length)
    raw = tl.load(values + places, mask=is_token, other=-_INFINITY).to(tl.float32)
    raw = keep_allowed(raw, places, is_token, mask)
    # Rounded as in torch: equal logits must stay equal, and the order of others must not change.
    return tl.where(raw == raw, tl.div_rn(raw, temperature), -_INFINITY), places


@triton.jit
def max_of(x: tl.tensor) -> tl.tensor:
    return tl.max(tl.max(x, 1), 0)


@triton.jit
def min_of(x: tl.tensor) -> tl.tensor:
    return tl.min(tl.min(x, 1), 0)


@triton.jit
def sum_of(x: tl.tensor) -> tl.tensor:
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def noisy_argmax(
    row: tl.tensor,
    start: tl.tensor,
    key: tl.tensor,
    first: tl.tensor,
    bounds: tl.tensor,
    LISTED: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The largest x plus noise, and its token, within the bounds (floor, limit, end): tokens that reach the floor and
    come before the token `end`, whose x is `limit`. If there is none, the token is `first`.

    Only tokens that an upper bound of the noise does not rule out take logarithms.
    """
    length, stop = row[1], row[5]
    floor, limit, end = bounds
    best = tl.full((), -_INFINITY, tl.float32)
    token = first
    group = start
    while group < stop:
        x, ids = _tile(row, group, LISTED, GROUP, BLOCK)
        x = tl.where((x >= floor) & ((x > limit) | ((x == limit) & (ids < end))), x, -_INFINITY)
        uniform = uniform_of(ids, key)
        if max_of(x + noise_bound(uniform)) > best:
            score = x + noise(uniform)
            most = max_of(score)
            if most > best:
                best = most
                token = min_of(tl.where(score == most, ids, length))
        group += GROUP
    return best, token


@triton.jit
def mass_before(
    row: tl.tensor, most: tl.tensor, limit: tl.tensor, end: tl.tensor, GROUP: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """The sum of e^(x - most) over the tokens before the token `end`, whose x is `limit`."""
    mass = tl.zeros([GROUP, BLOCK], tl.float32)
    group = 0
    while group < row[5]:
        x, ids = _tile(row, group, True, GROUP, BLOCK)
        mass += tl.where((x > limit) | ((x == limit) & (ids < end)), tl.exp(x - most), 0.0)
        group += GROUP
    return sum_of(mass)


@triton.jit
def kth_largest(
    row: tl.tensor,
    k: tl.tensor,
    least: tl.tensor,
    most: tl.tensor,
    LISTED: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The k-th largest x, by bisection; at least k reach `least`.

    Each step also moves the ends of the range to the nearest x, because many can be equal in half precision.
    """
    low, high = to_ordered_int(least), to_ordered_int(most)
    while low < high:
        middle = (low + high + 1) >> 1
        pivot = from_ordered_int(middle)
        reached = tl.zeros([GROUP, BLOCK], tl.int32)
        above = tl.full([GROUP, BLOCK], _INFINITY, tl.float32)
        below = tl.full([GROUP, BLOCK], -_INFINITY, tl.float32)
        group = 0
        while group < row[5]:
            x, _ids = _tile(row, group, LISTED, GROUP, BLOCK)
            reaches = x >= pivot
            reached += reaches.to(tl.int32)
            above = tl.minimum(above, tl.where(reaches, x, _INFINITY))
            below = tl.maximum(below, tl.where(reaches, -_INFINITY, x))
            group += GROUP
        count = sum_of(reached)
        if count >= k:
            low = tl.maximum(to_ordered_int(min_of(above)), middle)
            high = tl.where(count == k, low, high)
        else:
            high = tl.minimum(to_ordered_int(max_of(below)), middle - 1)
    return from_ordered_int(low)
