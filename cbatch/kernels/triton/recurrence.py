"""Recurrent layers with a decay: what they have in common, and the scan of Mamba 2, which is no more than that.

A sequence has a slot of states, of any type, which a kernel reads and writes on the device; what is computed is
float32. The result of a token depends on its own sequence only, and on where the tokens of a chunk are cut.

For each token t, a layer adds the outer product of a key k_t and an update u_t to its state S, which decays before:

    S = exp(g_t) * S + k_t outer u_t
    o_t = q_t S

Over a tile of tokens, with the sums G of the logarithms g up to and with a token, that is three products of matrices
(Dao and Gu, https://arxiv.org/abs/2405.21060; Yang et al., https://arxiv.org/abs/2412.06464):

    o_t = exp(G_t) * q_t S + sum over i <= t of exp(G_t - G_i) * (q_t k_i) * u_i
    S = exp(G_last) * S + sum over i of exp(G_last - G_i) * k_i outer u_i

Tiles are counted from the first token of a chunk. The engine cuts prompts at multiples of 64 tokens, so not a bit
depends on where it has cut one; a chunk that begins elsewhere has tiles of its own. A tile with a snapshot in its
middle becomes two. The state is rounded to its type after each tile, as it is after each chunk.

The last tokens of a chunk, if they are `SHORT` or fewer, are left to the kernels that go token by token, which run
afterwards: a token that is decoded beside chunks has the same bits as without them.

Products are exact to float32, of 16-bit queries and keys with states of float32, by the matrix units. Models of
float32, and chips without such units, go token by token.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbatch.kernels.operands import Recurrence
from cbatch.kernels.triton.attention_tile import LAUNCH, launch_options, power_of_2

TILE = 16
"""Larger ones take more registers than a thread has."""
SHORT = 8
"""Tokens at the end of a chunk that do not take a tile, at most."""
_STATES = 4096
"""Numbers of a state that a program holds that goes token by token: 32 registers of each of 128 threads."""

CHUNK_TENSORS = ["starts", "slots", "snapshot_counts", "snapshot_slots"]
"""Arguments of all these kernels; see `Recurrence`. Where they begin may change from step to step."""


def chunk_tensors(recurrence: Recurrence) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Arguments of a kernel, in the order of `CHUNK_TENSORS`."""
    return recurrence.starts, recurrence.slots, recurrence.snapshot_counts, recurrence.snapshot_slots


@triton.jit
def read_chunk(starts, slots, snapshot_counts, snapshot_slots, chunk):
    """A chunk's first row, tokens (0 for padding), slot, tokens before its snapshot (0 for none), and slot for it."""
    start, slot = tl.load(starts + chunk), tl.load(slots + chunk).to(tl.int64)
    count = tl.where(slot < 0, 0, tl.load(starts + chunk + 1) - start)
    target = tl.load(snapshot_slots + chunk).to(tl.int64)
    return start.to(tl.int64), count, slot, tl.where(target < 0, 0, tl.load(snapshot_counts + chunk)), target


@triton.jit
def softplus(x):
    """log(1 + exp(x)), exact for small results too.

    With u = exp(-|x|), log(1 + u) is the series of 2 * artanh(u / (2 + u)), whose argument is 1/3 at most. The sum
    1 + u would lose the digits of a small u.
    """
    u = tl.exp(-tl.abs(x))
    s = u / (2.0 + u)
    z = s * s
    series = 1.0 + z * (1 / 3 + z * (1 / 5 + z * (1 / 7 + z * (1 / 9 + z * (1 / 11 + z * (1 / 13 + z * (1 / 15)))))))
    return tl.maximum(x, 0.0) + 2.0 * s * series


def takes_tiles(dtype: torch.dtype, capability: int) -> bool:
    """Whether long chunks of queries and keys of a type go tile by tile.  capability: of the chip, 90 for 9.0"""
    return dtype.itemsize == 2 and capability >= 80


def token_constants(length: int, width: int, *, tiles: bool) -> dict[str, Any]:
    """For kernels that go token by token: WIDTH of a head's `width` states, each `length` long, in a program.

    tiles: whether there are kernels that go tile by tile
    """
    padded = power_of_2(length)
    columns = min(max(_STATES // padded, 1), power_of_2(width))
    return {
        "LENGTH_TILE": padded, "WIDTH": columns, "TILE": TILE if tiles else 0, "SHORT": SHORT,
        **launch_options(padded * columns // 32),
    }  # fmt: skip


def tile_constants(length: int, width: int, capability: int) -> dict[str, Any]:
    """Likewise for kernels that go tile by tile.

    The matrix units of 9.0 and 10.0 read the longer operands from shared memory; others take all from registers.
    """
    padded = max(power_of_2(length), 16)
    reads_shared = 90 <= capability < 120
    columns = min(32 if reads_shared else 16, power_of_2(width))
    return {
        "LENGTH_TILE": padded, "WIDTH": max(columns, 16), "TILE": TILE, "SHORT": SHORT,
        "num_warps": 4 if padded <= 128 and reads_shared else 8, "num_stages": 1, **LAUNCH,
    }  # fmt: skip


@triton.jit
def tiled_tokens(count, TILE, SHORT):
    """How many of a chunk's first tokens go tile by tile; none if TILE is 0."""
    if TILE == 0:
        return 0 * count
    rest = count % TILE
    return tl.where(rest <= SHORT, count - rest, count)


@triton.jit
def num_tiles(count, cut, TILE):
    """How many tiles there are of `count` tokens with a snapshot after `cut` tokens."""
    return tl.cdiv(count, TILE) + ((cut < count) & (cut % TILE > 0)).to(tl.int32)


@triton.jit
def tile_bounds(number, count, cut, TILE):
    """First token of a tile, and the one after its last."""
    is_cut = (cut < count) & (cut % TILE > 0)
    is_after = is_cut & (number > cut // TILE)
    begin = tl.where(is_after, number - 1, number) * TILE
    end = tl.minimum(begin + TILE, count)
    end = tl.where(is_cut & (number == cut // TILE), cut, end)
    return tl.where(is_after & (number == cut // TILE + 1), cut, begin), end


@triton.jit
def decay_between(total, TILE):
    """[t, i] exp(G_t - G_i) for tokens i up to t, else 0.  total: [TILE] G"""
    t = tl.arange(0, TILE)
    return tl.exp(tl.where(t[:, None] >= t[None, :], total[:, None] - total[None, :], float("-inf")))


@triton.jit
def _in_parts(x, like):
    """Numbers of float32 as sums of three of a 16-bit type; those of float16 must be below 65520."""
    upper = x.to(like.dtype)
    rest = x - upper.to(tl.float32)
    middle = rest.to(like.dtype)
    return upper, middle, (rest - middle.to(tl.float32)).to(like.dtype)


@triton.jit
def dot_in_parts(a, b, total):
    """a times b plus total, with 16-bit numbers a, and numbers b of float32."""
    upper, middle, lower = _in_parts(b, a)
    return tl.dot(a, upper, tl.dot(a, middle, tl.dot(a, lower, total)))


@triton.jit
def two_dots_in_parts(a, b, x, total):
    """a times x, and b times x, both plus total. Two calls would hold all parts of x in registers."""
    upper, middle, lower = _in_parts(x, a)
    left, right = tl.dot(a, lower, total), tl.dot(b, lower, total)
    left, right = tl.dot(a, middle, left), tl.dot(b, middle, right)
    return tl.dot(a, upper, left), tl.dot(b, upper, right)


@triton.jit(do_not_specialize_on_alignment=CHUNK_TENSORS)
def _selective_scan_kernel(
    xbc, steps, decay, step_bias, skip, state, starts, slots, snapshot_counts, snapshot_slots, out,
    XBC_ROW: tl.constexpr, STEPS_ROW: tl.constexpr, OUT_ROW: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    GROUPS: tl.constexpr, STATE_SIZE: tl.constexpr, STEP_MIN: tl.constexpr, STEP_MAX: tl.constexpr,
    LENGTH_TILE: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """One program per chunk, head and WIDTH rows of its state: what does not take a tile, token by token."""
    start, count, slot, cut, target = read_chunk(starts, slots, snapshot_counts, snapshot_slots, tl.program_id(0))
    first = tiled_tokens(count, TILE, SHORT)
    if first >= count:
        return
    head, n = tl.program_id(1), tl.arange(0, LENGTH_TILE)
    p = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    in_head, in_state = p < HEAD_DIM, n < STATE_SIZE
    states = state + head * HEAD_DIM * STATE_SIZE + p[:, None] * STATE_SIZE + n[None, :]
    kept = in_head[:, None] & in_state[None, :]
    now = tl.load(states + slot * (HEADS * HEAD_DIM * STATE_SIZE), mask=kept, other=0.0).to(tl.float32)
    rate_of_decay, bias, direct = tl.load(decay + head), tl.load(step_bias + head), tl.load(skip + head)
    source = xbc + start * XBC_ROW + head * HEAD_DIM + p
    shared = xbc + start * XBC_ROW + HEADS * HEAD_DIM + head // (HEADS // GROUPS) * STATE_SIZE + n
    step_of, to = steps + start * STEPS_ROW + head, out + start * OUT_ROW + head * HEAD_DIM + p
    for token in range(first, count):
        x = tl.load(source + token * XBC_ROW, mask=in_head, other=0.0).to(tl.float32)
        b = tl.load(shared + token * XBC_ROW, mask=in_state, other=0.0).to(tl.float32)
        c = tl.load(shared + token * XBC_ROW + GROUPS * STATE_SIZE, mask=in_state, other=0.0).to(tl.float32)
        step = softplus(tl.load(step_of + token * STEPS_ROW).to(tl.float32) + bias)
        step = tl.minimum(tl.maximum(step, STEP_MIN), STEP_MAX)
        now = now * tl.exp(rate_of_decay * step) + (step * x)[:, None] * b[None, :]
        result = tl.sum(now * c[None, :], axis=1) + direct * x
        tl.store(to + token * OUT_ROW, result.to(out.dtype.element_ty), mask=in_head)
        if token + 1 == cut:
            # What goes on is rounded as what the snapshot holds, so that a sequence may go on from either.
            rounded = now.to(state.dtype.element_ty)
            tl.store(states + target * (HEADS * HEAD_DIM * STATE_SIZE), rounded, mask=kept)
            now = rounded.to(tl.float32)
    tl.store(states + slot * (HEADS * HEAD_DIM * STATE_SIZE), now.to(state.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize_on_alignment=CHUNK_TENSORS)
def _selective_scan_tile_kernel(
    xbc, steps, decay, step_bias, skip, state, starts, slots, snapshot_counts, snapshot_slots, out,
    XBC_ROW: tl.constexpr, STEPS_ROW: tl.constexpr, OUT_ROW: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    GROUPS: tl.constexpr, STATE_SIZE: tl.constexpr, STEP_MIN: tl.constexpr, STEP_MAX: tl.constexpr,
    LENGTH_TILE: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """One program per chunk, head and WIDTH rows of its state: tile by tile."""
    start, count, slot, cut, target = read_chunk(starts, slots, snapshot_counts, snapshot_slots, tl.program_id(0))
    count = tiled_tokens(count, TILE, SHORT)
    if count <= 0:
        return
    head, n, t = tl.program_id(1), tl.arange(0, LENGTH_TILE), tl.arange(0, TILE)
    p = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    in_head, in_state = p < HEAD_DIM, n < STATE_SIZE
    states = state + head * HEAD_DIM * STATE_SIZE + n[:, None] + p[None, :] * STATE_SIZE
    kept = in_state[:, None] & in_head[None, :]
    now = tl.load(states + slot * (HEADS * HEAD_DIM * STATE_SIZE), mask=kept, other=0.0).to(tl.float32)
    rate_of_decay, bias, direct = tl.load(decay + head), tl.load(step_bias + head), tl.load(skip + head)
    source = xbc + head * HEAD_DIM + p[None, :]
    shared = xbc + HEADS * HEAD_DIM + head // (HEADS // GROUPS) * STATE_SIZE + n[None, :]
    for number in range(0, num_tiles(count, cut, TILE)):
        begin, end = tile_bounds(number, count, cut, TILE)
        row, there = start + begin + t, begin + t < end
        written, read = there[:, None] & in_head[None, :], there[:, None] & in_state[None, :]
        x = tl.load(source + row[:, None] * XBC_ROW, mask=written, other=0.0).to(tl.float32)
        b = tl.load(shared + row[:, None] * XBC_ROW, mask=read, other=0.0)
        c = tl.load(shared + row[:, None] * XBC_ROW + GROUPS * STATE_SIZE, mask=read, other=0.0)
        step = softplus(tl.load(steps + row * STEPS_ROW + head, mask=there, other=0.0).to(tl.float32) + bias)
        step = tl.where(there, tl.minimum(tl.maximum(step, STEP_MIN), STEP_MAX), 0.0)
        total = tl.cumsum(rate_of_decay * step, 0)
        updates = step[:, None] * x
        scores = tl.dot(c, tl.trans(b)) * decay_between(total, TILE)
        result = dot_in_parts(c, now, tl.zeros([TILE, WIDTH], tl.float32)) * tl.exp(total)[:, None]
        result = tl.dot(scores, updates, result, input_precision="tf32x3") + direct * x
        last = tl.min(total, 0)
        now = dot_in_parts(tl.trans(b), updates * tl.exp(last - total)[:, None], now * tl.exp(last))
        to = out + row[:, None] * OUT_ROW + head * HEAD_DIM + p[None, :]
        tl.store(to, result.to(out.dtype.element_ty), mask=written)
        rounded = now.to(state.dtype.element_ty)
        if end == cut:
            tl.store(states + target * (HEADS * HEAD_DIM * STATE_SIZE), rounded, mask=kept)
        now = rounded.to(tl.float32)
    tl.store(states + slot * (HEADS * HEAD_DIM * STATE_SIZE), now.to(state.dtype.element_ty), mask=kept)


def selective_scan(
    xbc: Tensor, steps: Tensor, heads: Any, weights: tuple[Tensor, Tensor, Tensor], state: Tensor,
    recurrence: Recurrence, out: Tensor, *, capability: int,
) -> None:  # fmt: skip
    """See `model/ops/selective_scan.py`.  capability: of the chip, 90 for 9.0"""
    arguments = (
        xbc, steps, *weights, state, *chunk_tensors(recurrence), out, xbc.stride(0),
        steps.stride(0), out.stride(0), heads.heads, heads.head_dim, heads.groups, heads.state_size, heads.step_min,
        heads.step_max,
    )  # fmt: skip
    grid, tiles = (len(recurrence.slots), heads.heads), takes_tiles(xbc.dtype, capability)
    if tiles and recurrence.longest > SHORT:
        constants = tile_constants(heads.state_size, heads.head_dim, capability)
        _selective_scan_tile_kernel[(*grid, -(-heads.head_dim // constants["WIDTH"]))](*arguments, **constants)
    constants = token_constants(heads.state_size, heads.head_dim, tiles=tiles)
    _selective_scan_kernel[(*grid, -(-heads.head_dim // constants["WIDTH"]))](*arguments, **constants)
