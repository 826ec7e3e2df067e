"""Passes over the logits of one row, block by block of its tokens, in one program.

A row is (values, their number, temperature, ids of the blocks to look at, how many these are). Loops are `while`: the
interpreter of Triton 3.6 cannot count up to a number that it computed.
"""

# mypy: allow-untyped-decorators

from __future__ import annotations

import math

import triton
import triton.language as tl

from cbatch.engine.kernels.triton.gumbel import from_ordered_int, noise, noise_bound, to_ordered_int, uniform_of

_INFINITY = tl.constexpr(math.inf)


@triton.jit
def _tile(
    row: tl.tensor, start: tl.tensor, LISTED: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """x [GROUP, BLOCK], values divided by the temperature, and their places, of the row's blocks from `start`.

    row: (values, their number, temperature, ids of the blocks to look at, how many these are)

    x is minus infinity where there is no value, or one that is not a number. Without LISTED the blocks are all blocks.
    """
    values, length, temperature, lists, stop = row
    blocks = start + tl.arange(0, GROUP)
    is_there = blocks < stop
    if LISTED:
        blocks = tl.load(lists + blocks, mask=is_there, other=0)
    places = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    raw = tl.load(values + places, mask=is_there[:, None] & (places < length), other=-_INFINITY).to(tl.float32)
    # Rounded as torch does it: equal logits must stay equal, and others in their order.
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
    """The largest x plus noise, and its token, of those within the bounds (floor, limit, end): that reach the floor and
    come before the token `end`, whose x is `limit`. Where there is none, the token is `first`.

    Logarithms are taken only where a bound of the noise does not rule out that they matter.
    """
    length, stop = row[1], row[4]
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
    """The sum of e^(x - most) of the tokens before the token `end`, whose x is `limit`."""
    mass = tl.zeros([GROUP, BLOCK], tl.float32)
    group = 0
    while group < row[4]:
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
    """A number that k of the x reach: more only where the k-th is equal to the next. At least k reach `least`.

    Halves the range where it must be, and draws its ends in to the next x: many can be equal in half precision.
    """
    low, high = to_ordered_int(least), to_ordered_int(most)
    while low < high:
        middle = (low + high + 1) >> 1
        pivot = from_ordered_int(middle)
        reached = tl.zeros([GROUP, BLOCK], tl.int32)
        above = tl.full([GROUP, BLOCK], _INFINITY, tl.float32)
        below = tl.full([GROUP, BLOCK], -_INFINITY, tl.float32)
        group = 0
        while group < row[4]:
            x, _ids = _tile(row, group, LISTED, GROUP, BLOCK)
            patterns = x >= pivot
            reached += patterns.to(tl.int32)
            above = tl.minimum(above, tl.where(patterns, x, _INFINITY))
            below = tl.maximum(below, tl.where(patterns, -_INFINITY, x))
            group += GROUP
        count = sum_of(reached)
        if count >= k:
            low = tl.maximum(to_ordered_int(min_of(above)), middle)
            high = tl.where(count == k, low, high)
        else:
            high = tl.minimum(to_ordered_int(max_of(below)), middle - 1)
    return from_ordered_int(low)
