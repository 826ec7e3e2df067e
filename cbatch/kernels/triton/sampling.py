"""Samples a token for each row of logits on a GPU without sorting it; `sampler.py` defines what is sampled.

There are two kernels. The first reads all logits once; each program takes a chunk of one row. For greedy rows and rows
without filters, it leaves only the best token of each chunk to compare. For rows with filters, it keeps the largest
logit of each block of tokens, and the sum of the probabilities. The second has one program per row, and goes on like
`kernels/cpu/sampling.py`:

- Order the tokens by logit, then by id: the filters always keep a prefix of that order. The largest logits of the
  blocks give a lower bound of the last logit that can be kept. Only blocks that reach the bound are read again.
- A token is drawn from all that reach the bound, and then checked: what is the probability of all tokens before it? If
  the filters do not keep it, they keep only tokens before it, and the draw is repeated among these, which takes few
  rounds. A token's noise is always the same, so the last draw gives what a draw among the kept tokens would have given.

Chunks depend only on the vocabulary, and every sum has one order, so a row's token is the same in every batch.

Functions take a row of logits as a tuple (values, their number, temperature, mask, ids of the blocks of tokens to scan,
how many these are). A mask is a tuple (bitmask of the allowed tokens, whether there are any: see
`sample/structured/token_bitmask.py`). Loops are `while`: Triton 3.6's interpreter cannot loop up to a number that it
computed.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbatch.kernels.triton.attention_tile import LAUNCH
from cbatch.kernels.triton.conversion import quotient

_INFINITY = tl.constexpr(math.inf)
_SLACK = tl.constexpr(1e-3)
"""More than rounding can change a bound."""
_STEP, _BELOW_ONE = tl.constexpr(2.0**-32), tl.constexpr(1 - 2.0**-24)
_STEEPNESS, _OFFSET = tl.constexpr(-math.log(2) * 2.0**-23), tl.constexpr(127 * math.log(2) + 1e-3)

_SINGLE = ["words", "masks", "tokens", "largest"]
"""Arguments of which a program reads or writes few numbers: another address must not compile a kernel again."""


class Tiling(NamedTuple):
    """Tuning parameters, all powers of two.

    block:  tokens whose largest logit is kept
    chunk:  blocks of a program of the first kernel
    part:   blocks whose noise that program computes at once; it divides `chunk`
    group:  blocks that the second kernel reads at once
    warps:  warps of a program of the first and of the second kernel
    """

    block: int = 64
    chunk: int = 128
    part: int = 16
    group: int = 64
    warps: tuple[int, int] = (8, 16)


TILING = Tiling()


def sample_rows(
    logits: Tensor, words: Tensor, tokens: Tensor, largest: Tensor, masks: Tensor | None = None, tiling: Tiling = TILING
) -> None:
    """Chooses a token for each row, without waiting for the device.

    logits:  [R, V] float32, float16 or bfloat16
    words:   [R, W] int32, contiguous, see `sampler.pack_sampling_params`
    tokens:  [R] int64, filled in; arbitrary in a row whose largest logit is not finite
    largest: [R] float32, the largest logit of each row, filled in
    masks:   [M, ceil(V / 32)] int32, contiguous: sets of allowed tokens, which rows of `words` refer to by their number
    """
    if masks is None:
        masks = words  # no row reads it, and a kernel of its own would be one more to compile
    if logits.stride(1) != 1 or (logits.storage_offset() * logits.itemsize) % 16:
        logits = logits.clone(memory_format=torch.contiguous_format)
    rows, length = logits.shape
    blocks = triton.cdiv(length, tiling.block)
    chunks = triton.cdiv(blocks, tiling.chunk)
    found = torch.empty((rows, 3, chunks), dtype=torch.float32, device=logits.device)
    places = torch.empty((rows, chunks), dtype=torch.int32, device=logits.device)
    block_max = torch.empty((rows, blocks), dtype=torch.float32, device=logits.device)
    lists = torch.empty((rows, blocks), dtype=torch.int32, device=logits.device)
    stride = logits.stride(0) if rows > 1 else length  # that of a single row means nothing, and may be anything
    first_warps, second_warps = tiling.warps
    _scan_kernel[(chunks, rows)](
        logits, stride, length, words, masks, blocks, block_max, found, places, WORDS=words.shape[1],
        CHUNK=tiling.chunk, PART=tiling.part, BLOCK=tiling.block, num_warps=first_warps, **LAUNCH,
    )  # fmt: skip
    _choose_kernel[(rows,)](
        logits, stride, length, words, masks, blocks, block_max, found, places, chunks, lists, tokens, largest,
        WORDS=words.shape[1], CHUNKS=triton.next_power_of_2(chunks), BLOCKS=triton.next_power_of_2(blocks),
        GROUP=tiling.group, BLOCK=tiling.block, num_warps=second_warps, **LAUNCH,
    )  # fmt: skip


@triton.jit
def to_ordered_int(x):
    """A float32 as an integer in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def from_ordered_int(order):
    """The float32 of an integer from `to_ordered_int`."""
    bits = order.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _mix(word):
    """See `sampler._mix`."""
    word = word ^ (word >> 16)
    word = word * 0x85EBCA6B
    word = word ^ (word >> 13)
    word = word * 0xC2B2AE35
    return word ^ (word >> 16)


@triton.jit
def uniform_of(ids, key):
    """The uniform random number of each token id; key: two words."""
    words = _mix(_mix(ids.to(tl.uint32) ^ key[0]) ^ key[1])
    return tl.minimum((words.to(tl.float32) + 0.5) * _STEP, _BELOW_ONE)


@triton.jit
def noise(uniform):
    """Standard Gumbel noise (see `sampler.gumbel_noise`).

    log1p after W. Kahan: a factor corrects what 1 - u loses in rounding.
    """
    rest = 1 - uniform
    exponential = tl.where(rest == 1, uniform, -tl.log(rest) * (uniform / (1 - rest)))
    return -tl.log(exponential)


@triton.jit
def noise_bound(uniform):
    """An upper bound of the noise: see `kernels/cpu/sampling.py`."""
    return uniform.to(tl.int32, bitcast=True).to(tl.float32) * _STEEPNESS + _OFFSET


@triton.jit
def keep_allowed(raw, ids, is_token, mask):
    """Logits, and minus infinity for tokens that the mask does not allow."""
    if mask[1]:
        word = tl.load(mask[0] + (ids >> 5), mask=is_token, other=0)
        raw = tl.where((word >> (ids & 31)) & 1 != 0, raw, -_INFINITY)
    return raw


@triton.jit
def _tile(row, start, LISTED, GROUP, BLOCK):
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
    return tl.where(raw == raw, quotient(raw, temperature), -_INFINITY), places


@triton.jit
def max_of(x):
    return tl.max(tl.max(x, 1), 0)


@triton.jit
def min_of(x):
    return tl.min(tl.min(x, 1), 0)


@triton.jit
def sum_of(x):
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def noisy_argmax(row, start, key, first, bounds, LISTED, GROUP, BLOCK):
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
def mass_before(row, most, limit, end, GROUP, BLOCK):
    """The sum of e^(x - most) over the tokens before the token `end`, whose x is `limit`."""
    mass = tl.zeros([GROUP, BLOCK], tl.float32)
    group = 0
    while group < row[5]:
        x, ids = _tile(row, group, True, GROUP, BLOCK)
        mass += tl.where((x > limit) | ((x == limit) & (ids < end)), tl.exp(x - most), 0.0)
        group += GROUP
    return sum_of(mass)


@triton.jit
def kth_largest(row, k, least, most, LISTED, GROUP, BLOCK):
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


@triton.jit
def _row_params(words, length):
    """A row's temperature (0: greedy), k (0: no top-k), top-p and min-p, and whether any of them filters."""
    temperature = tl.load(words).to(tl.float32, bitcast=True)
    top_p = tl.load(words + 1).to(tl.float32, bitcast=True)
    min_p = tl.load(words + 2).to(tl.float32, bitcast=True)
    k = tl.load(words + 3)
    k = tl.where(k < length, k, 0)
    filters = (temperature > 0) & ((k > 0) | (top_p < 1) | (min_p > 0))
    return temperature, k, top_p, min_p, filters


@triton.jit
def _noise_key(words):
    high = tl.load(words + 4).to(tl.uint32, bitcast=True)
    low = tl.load(words + 5).to(tl.uint32, bitcast=True)
    return high, low


@triton.jit
def _row_mask(words, masks, length):
    """The bitmask of a row, and whether it has one."""
    number = tl.load(words + 6)
    return masks + (number - 1).to(tl.int64) * tl.cdiv(length, 32), number > 0


@triton.jit
def _select_blocks(block_max, lists, blocks, least, BLOCKS):
    """Lists the blocks whose largest x reaches `least` and is not minus infinity; returns their number."""
    block = tl.arange(0, BLOCKS)
    top = tl.load(block_max + block, mask=block < blocks, other=-_INFINITY)
    is_there = (top >= least) & (top > -_INFINITY)
    tl.store(lists + tl.cumsum(is_there.to(tl.int32), 0) - 1, block, mask=is_there)
    tl.debug_barrier()  # other threads of the program read the list
    return tl.sum(is_there.to(tl.int32), 0)


@triton.jit
def _logit_floor(length, top_p, min_p, most):
    """A lower bound of the x of tokens that top-p and min-p keep."""
    floor = tl.full((), -_INFINITY, tl.float32)
    if top_p < 1:  # all tokens below it add up to less than 1 - top_p, because the likeliest alone has e^0
        floor = most + tl.log((1 - top_p) / length) - _SLACK
    if min_p > 0:
        floor = tl.maximum(floor, most + tl.log(min_p) - _SLACK)
    return floor


@triton.jit
def _draw_filtered(
    values, length, mask, block_max, blocks, lists, params, key, first, most, total, GROUP, BLOCK, BLOCKS,
):  # fmt: skip
    """Draws from the tokens that reach the floor, then from those before the drawn token, until the filters keep it.

    first, most: the likeliest token and its x; total: the sum of e^(x - most) of all tokens
    """
    temperature, k, top_p, min_p = params[0], params[1], params[2], params[3]
    floor = _logit_floor(length, top_p, min_p, most)
    least = floor
    if k > 0:
        least = tl.full((), -_INFINITY, tl.float32)
        if k <= blocks:  # k blocks have a token that reaches the k-th largest of the blocks' maxima
            summary = (block_max, blocks, 1.0, (lists, False), lists, tl.cdiv(blocks, BLOCK))
            least = kth_largest(summary, k, least, most, False, GROUP, BLOCK)
    row = (values, length, temperature, mask, lists, _select_blocks(block_max, lists, blocks, least, BLOCKS))
    if k > 0:
        least = kth_largest(row, k, least, most, True, GROUP, BLOCK)
        floor = tl.maximum(floor, least)
        if top_p < 1:
            total = mass_before(row, most, least, length, GROUP, BLOCK)
    limit, end, token, is_kept = tl.full((), -_INFINITY, tl.float32), length, first, False
    while not is_kept:
        _score, token = noisy_argmax(row, 0, key, first, (floor, limit, end), True, GROUP, BLOCK)
        limit, end = quotient(tl.load(values + token).to(tl.float32), temperature), token
        is_kept = (token == first) | (tl.exp(limit - most) >= min_p)
        if is_kept & (token != first) & (top_p < 1):
            is_kept = mass_before(row, most, limit, end, GROUP, BLOCK) < top_p * total
    return token


@triton.jit(do_not_specialize_on_alignment=_SINGLE)
def _scan_kernel(
    logits, stride, length, words, masks, blocks, block_max, found, places, WORDS: tl.constexpr, CHUNK: tl.constexpr,
    PART: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One chunk of one row: its best token [R, C], and in `found` [R, 3, C] its score, sum and largest raw logit.

    The score of a token is x = logit / temperature, plus its noise if the row is drawn without filters.
    """
    chunk, row, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    words += row * WORDS
    params = _row_params(words, length)
    temperature, filters = params[0], params[4]
    values, place = logits + row.to(tl.int64) * stride, found + row * 3 * chunks + chunk
    block = chunk * CHUNK + tl.arange(0, CHUNK)
    ids = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    raw = tl.load(values + ids, mask=ids < length, other=-_INFINITY).to(tl.float32)
    mask = _row_mask(words, masks, length)
    raw = keep_allowed(raw, ids, ids < length, mask)
    is_nan = raw != raw
    raw = tl.where(is_nan, -_INFINITY, raw)
    tl.store(place + 2 * chunks, tl.where(max_of(is_nan.to(tl.int32)) > 0, float("nan"), max_of(raw)))
    divisor = tl.where(temperature > 0, temperature, 1.0)
    x = quotient(raw, divisor)
    score = max_of(x)
    token = min_of(tl.where(x == score, ids, length))
    if filters:
        tl.store(block_max + row * blocks + block, tl.max(x, 1), mask=block < blocks)
        base = tl.where((score > -_INFINITY) & (score < _INFINITY), score, 0.0)
        tl.store(place + chunks, sum_of(tl.exp(x - base)))
    elif temperature > 0:
        whole = (values, length, divisor, mask, places, tl.minimum(chunk * CHUNK + CHUNK, blocks))
        bounds = (-_INFINITY, -_INFINITY, length)
        score, token = noisy_argmax(whole, chunk * CHUNK, _noise_key(words), token, bounds, False, PART, BLOCK)
    tl.store(place, score)
    tl.store(places + row * chunks + chunk, token)


@triton.jit(do_not_specialize_on_alignment=_SINGLE)
def _choose_kernel(
    logits, stride, length, words, masks, blocks, block_max, found, places, chunks, lists, tokens, largest,
    WORDS: tl.constexpr, CHUNKS: tl.constexpr, BLOCKS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row, by what `_scan_kernel` found in its chunks: its token [R] and its largest logit [R]."""
    row, chunk = tl.program_id(0), tl.arange(0, CHUNKS)
    place, is_there = found + row * 3 * chunks + chunk, chunk < chunks
    peaks = tl.load(place + 2 * chunks, mask=is_there, other=-_INFINITY)
    is_nan = peaks != peaks
    peak = tl.max(tl.where(is_nan, -_INFINITY, peaks), 0)
    tl.store(largest + row, tl.where(tl.max(is_nan.to(tl.int32), 0) > 0, float("nan"), peak))
    scores = tl.load(place, mask=is_there, other=-_INFINITY)
    ids = tl.load(places + row * chunks + chunk, mask=is_there, other=0)
    most = tl.max(scores, 0)
    token = tl.min(tl.where(is_there & (scores == most), ids, length), 0)
    words += row * WORDS
    params = _row_params(words, length)
    if params[4] & (most > -_INFINITY) & (most < _INFINITY):
        total = tl.sum(tl.load(place + chunks, mask=is_there, other=0.0) * tl.exp(scores - most), 0)
        values, block_max, lists = logits + row.to(tl.int64) * stride, block_max + row * blocks, lists + row * blocks
        key, mask = _noise_key(words), _row_mask(words, masks, length)
        token = _draw_filtered(
            values, length, mask, block_max, blocks, lists, params, key, token, most, total, GROUP, BLOCK, BLOCKS
        )
    tl.store(tokens + row, token)
