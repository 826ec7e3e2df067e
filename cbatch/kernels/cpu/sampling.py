"""Chooses tokens: the argmax of a row, and draws without sorting it; `sampler.py` defines what is drawn.

Floats are compared as integers in the same order, which the compiler can vectorize.

Order the tokens by logit, then by id: the filters always keep a prefix of that order. So a token is drawn from all of
them (or from the top k), and then checked: how many come before it, and what is their probability? If the filters do
not keep it, they keep only tokens before it, and the draw is repeated among these. A token's noise is always the same,
so the last draw gives what a draw among the kept tokens would have given. It takes few rounds: the first token is kept
with the probability of all that the filters keep.

Every pass skips the blocks of tokens whose largest logit shows that none of them can matter.
"""

from __future__ import annotations

import math
from functools import lru_cache
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from cbatch.kernels.cpu.emit import FLOAT, INT32, Value, emitted
from cbatch.kernels.cpu.fast_math import bits_of, exp
from cbatch.kernels.cpu.jit import entry, kernel
from cbatch.kernels.cpu.thread_pool import ThreadPool
from cbatch.kernels.cpu.work_queue import Worker, claimed

BLOCK = 64
"""Numbers whose maximum is found before they are searched."""

_INFINITY = np.float32(np.inf)
_LN2 = math.log(2)
_SLACK = 1e-3
"""More than rounding can change a bound of the noise."""

_MAX_NOISE = np.float32(33 * _LN2 + _SLACK)
_STEEPNESS = np.float32(-_LN2 * 2.0**-23)
_OFFSET = np.float32(127 * _LN2 + _SLACK)
_NEGLIGIBLE = np.float32(32)
"""So far below the largest logit, a whole vocabulary adds less than rounding changes in the sum."""


class SamplingWorkspace(NamedTuple):
    """Memory for one row in each thread.

    block_max:  [threads, blocks] the largest logit of each block, divided by the temperature
    candidates: [threads, V] logits that may be among the top k, divided by the temperature
    """

    block_max: NDArray[np.float32]
    candidates: NDArray[np.float32]


@lru_cache(maxsize=2)
def sampling_workspace(threads: int, vocabulary: int) -> SamplingWorkspace:
    """Memory that is kept between steps."""
    blocks = -(-vocabulary // BLOCK)
    return SamplingWorkspace(np.empty((threads, blocks), np.float32), np.empty((threads, vocabulary), np.float32))


_workspace_lock = Lock()
"""Held while the workspace is in use: two engines may sample in two threads."""


def draw_tokens(
    thread_pool: ThreadPool, logits: NDArray[np.float32], vocabulary: int, starts: NDArray[np.int64],
    words: NDArray[np.int32],
) -> NDArray[np.int64]:  # fmt: skip
    """Draws D tokens; see `draw_rows`. words: [D, ...] parameters of the rows (see `pack_sampling_params`)"""
    tokens, numbers = np.zeros(len(starts), np.int64), words.view(np.float32)
    rows = logits, vocabulary, starts, words.view(np.uint32), numbers
    with _workspace_lock:
        thread_pool.run(draw_rows, *rows, sampling_workspace(thread_pool.size, vocabulary), tokens)
    return tokens


def _flip(bits: Value) -> Value:
    """Flips all bits but the sign if the sign is set."""
    return bits ^ (bits.ashr(31) & 0x7FFFFFFF)


@emitted(types.int32, types.float32)
def _to_ordered_int(x: Value) -> Value:
    """A float32 as an int32 in the same order."""
    return _flip(x.bits(INT32))


@emitted(types.float32, types.int32)
def _from_ordered_int(order: Value) -> Value:
    """The float32 of an int32 from `_to_ordered_int`."""
    return _flip(order).bits(FLOAT)


@kernel
def _max_of(part: Any) -> Any:
    """The maximum of some numbers; meaningless if one of them is NaN."""
    most = _to_ordered_int(-_INFINITY)
    for i in range(len(part)):
        order = _to_ordered_int(part[i])
        most = order if order > most else most
    return _from_ordered_int(most)


@kernel
def argmax(row: Any) -> Any:
    """The index of a row's first maximum, and the maximum; (0, NaN) if any number of the row is NaN."""
    index, most, num_nan = 0, -_INFINITY, np.int32(0)
    for start in range(0, len(row), BLOCK):
        part = row[start : start + BLOCK]
        for i in range(len(part)):
            num_nan = np.int32(num_nan + (part[i] != part[i]))
        top = _max_of(part)
        if top > most:
            index, most = start, top
    if num_nan > 0:
        return 0, np.float32(np.nan)
    while row[index] != most:
        index += 1
    return index, most


@emitted(types.float32, types.float32, types.float32)
def divide(x: Value, y: Value) -> Any:
    """x / y, rounded as in torch: without `arcp` the compiler does not multiply by 1 / y."""
    return x.builder.fdiv(x.of, y.of, flags=("contract",))


@emitted(types.uint32, types.uint32)
def _mix(word: Value) -> Value:
    """See `sampler._mix`. With Python's integers the compiler would compute in 64 bits, which takes twice as long."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        word = (word ^ word >> shift) * factor
    return word ^ word >> 16


@kernel
def _uniform(token: int, key: Any) -> Any:
    word = _mix(np.uint32(_mix(np.uint32(token) ^ key[0]) ^ key[1]))
    return (np.float32(word) + np.float32(0.5)) * np.float32(2.0**-32)


@kernel
def noise(token: int, key: Any) -> Any:
    """Standard Gumbel noise as float32 (see `sampler.gumbel_noise`)."""
    uniform = min(_uniform(token, key), np.float32(1 - 2.0**-24))
    return -np.float32(math.log(-np.float32(math.log1p(-uniform))))


@kernel
def _noise_bound(token: int, key: Any) -> Any:
    """An upper bound of the token's noise, from -log(u): the bits of u as an integer, scaled, are nearly log(u) and
    never more."""
    return np.float32(np.int32(bits_of(_uniform(token, key)))) * _STEEPNESS + _OFFSET


@kernel
def block_maxima(row: Any, temperature: Any, block_max: Any) -> Any:
    """Fills in `block_max`; returns the token with the largest logit."""
    place = 0
    for block in range(len(block_max)):
        block_max[block] = divide(_max_of(row[block * BLOCK : (block + 1) * BLOCK]), temperature)
        if not block_max[block] <= block_max[place]:
            place = block
    part = row[place * BLOCK : (place + 1) * BLOCK]
    for i in range(len(part)):
        if divide(part[i], temperature) == block_max[place]:
            return place * BLOCK + i
    return 0  # it is NaN


@kernel
def _kth_largest(values: Any, k: int) -> Any:
    """The k-th largest of some numbers, by bisection over their ordered integers."""
    low, high = np.int64(_to_ordered_int(-_INFINITY)), np.int64(_to_ordered_int(_INFINITY))
    while low < high:
        middle = (low + high + 1) >> 1
        value = _from_ordered_int(np.int32(middle))
        count = np.int32(0)
        for i in range(len(values)):
            count = np.int32(count + (values[i] >= value))
        if count >= k:
            low = middle
        else:
            high = middle - 1
    return _from_ordered_int(np.int32(low))


@kernel
def kth_largest_logit(row: Any, temperature: Any, k: int, block_max: Any, candidates: Any) -> Any:
    """The k-th largest logit, divided by the temperature.

    The k-th largest of `block_max` is a lower bound, so only the logits that reach it are candidates.
    """
    least = _kth_largest(block_max, k) if k <= len(block_max) else -_INFINITY
    count = 0
    for block in range(len(block_max)):
        if block_max[block] >= least:
            part = row[block * BLOCK : (block + 1) * BLOCK]
            for i in range(len(part)):
                x = divide(part[i], temperature)
                candidates[count] = x
                count += x >= least
    return _kth_largest(candidates[:count], k)


@kernel
def mass_before(row: Any, temperature: Any, block_max: Any, most: Any, limit: Any, end: int) -> float:
    """The sum of e^(x - most) over the tokens before the token `end`, whose x is `limit`; x: logit / temperature."""
    total = 0.0
    for block in range(len(block_max)):
        if block_max[block] >= limit and block_max[block] >= most - _NEGLIGIBLE:
            part, stop, mass = row[block * BLOCK : (block + 1) * BLOCK], np.int32(end - block * BLOCK), np.float32(0)
            for i in range(len(part)):
                x = divide(part[i], temperature)
                mass += exp(x - most) if (x > limit) | ((x == limit) & (np.int32(i) < stop)) else np.float32(0)
            total += float(mass)
    return total


@kernel
def _noisy_argmax(row: Any, temperature: Any, key: Any, block_max: Any, first: int, limit: Any, end: int) -> int:
    """Of the tokens before the token `end` (see `mass_before`), the one with the largest x plus noise, or `first`.

    Only the few that an upper bound of the noise does not rule out take logarithms.
    """
    token = first
    best = divide(row[first], temperature) + noise(first, key)
    for block in range(len(block_max)):
        if block_max[block] < limit or block_max[block] + _MAX_NOISE < best:
            continue
        part, start, hits = row[block * BLOCK : (block + 1) * BLOCK], block * BLOCK, np.int32(0)
        for i in range(len(part)):
            x = divide(part[i], temperature)
            hits = np.int32(hits + ((x + _noise_bound(start + i, key) >= best) & (x >= limit)))
        if hits == 0:
            continue
        for i in range(len(part)):
            x = divide(part[i], temperature)
            if x + _noise_bound(start + i, key) >= best and (x > limit or (x == limit and start + i < end)):
                score = x + noise(start + i, key)
                if score > best:
                    token, best = start + i, score
    return token


@kernel
def is_kept(
    row: Any, temperature: Any, top_p: Any, min_p: Any, block_max: Any, first: int, total: float, token: int
) -> bool:  # fmt: skip
    """Whether top-p and min-p keep a token that top-k keeps; total: the mass of all that top-k keeps."""
    if token == first:
        return True
    most, x = divide(row[first], temperature), divide(row[token], temperature)
    if exp(x - most) < min_p:
        return False
    return bool(top_p >= 1 or mass_before(row, temperature, block_max, most, x, token) < top_p * total)


@entry
def draw_rows(
    worker: Worker, logits: Any, vocabulary: int, starts: Any, words: Any, numbers: Any, workspace: SamplingWorkspace,
    tokens: Any,
) -> None:  # fmt: skip
    """Draws tokens [D] int64 from the rows of logits, flat float32. Every thread of a pool calls it.

    starts:         [D] where the logits of each row begin
    words, numbers: [D, ...] its parameters as uint32, and the same bits as float32

    A row whose largest logit is not finite gets an arbitrary token.
    """
    block_max, candidates = workspace.block_max[worker.thread], workspace.candidates[worker.thread]
    for task in claimed(worker, 0, len(tokens)):
        row = logits[starts[task] : starts[task] + vocabulary]
        temperature, top_p, min_p = numbers[task, 0], numbers[task, 1], numbers[task, 2]
        top_k: Any = np.int64(words[task, 3])
        first = block_maxima(row, temperature, block_max)
        limit, end, total = -_INFINITY, vocabulary, 1.0
        if 0 < top_k < vocabulary:
            limit = kth_largest_logit(row, temperature, top_k, block_max, candidates)
        if top_p < 1:
            total = mass_before(row, temperature, block_max, divide(row[first], temperature), limit, end)
        while True:
            token = _noisy_argmax(row, temperature, words[task, 4:6], block_max, first, limit, end)
            if is_kept(row, temperature, top_p, min_p, block_max, first, total, token):
                break
            limit, end = divide(row[token], temperature), token
        tokens[task] = token
