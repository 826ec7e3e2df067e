"""The scan of Mamba 2 (Dao and Gu, https://arxiv.org/abs/2405.21060).

`SelectiveScan` in `model/ops` has the formulas. States may be of any type; what is computed is
float32.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from cbatch.kernels.operands import Recurrence
from cbatch.kernels.triton.recurrence.tiles import (
    CHUNK_TENSORS,
    SHORT,
    chunk_tensors,
    decay_between,
    dot_in_parts,
    num_tiles,
    read_chunk,
    softplus,
    takes_tiles,
    tile_bounds,
    tile_constants,
    tiled_tokens,
    token_constants,
)


@triton.jit(do_not_specialize_on_alignment=CHUNK_TENSORS)
def _selective_scan_kernel(
    xbc: tl.tensor, steps: tl.tensor, decay: tl.tensor, step_bias: tl.tensor, skip: tl.tensor, state: tl.tensor,
    starts: tl.tensor, slots: tl.tensor, snapshot_counts: tl.tensor, snapshot_slots: tl.tensor, out: tl.tensor,
    XBC_ROW: tl.constexpr, STEPS_ROW: tl.constexpr, OUT_ROW: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    GROUPS: tl.constexpr, STATE_SIZE: tl.constexpr, STEP_MIN: tl.constexpr, STEP_MAX: tl.constexpr,
    LENGTH_TILE: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, SHORT: tl.constexpr,
) -> None:  # fmt: skip
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
    xbc: tl.tensor, steps: tl.tensor, decay: tl.tensor, step_bias: tl.tensor, skip: tl.tensor, state: tl.tensor,
    starts: tl.tensor, slots: tl.tensor, snapshot_counts: tl.tensor, snapshot_slots: tl.tensor, out: tl.tensor,
    XBC_ROW: tl.constexpr, STEPS_ROW: tl.constexpr, OUT_ROW: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    GROUPS: tl.constexpr, STATE_SIZE: tl.constexpr, STEP_MIN: tl.constexpr, STEP_MAX: tl.constexpr,
    LENGTH_TILE: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, SHORT: tl.constexpr,
) -> None:  # fmt: skip
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
    chunks, tiles = len(recurrence.slots), takes_tiles(xbc.dtype, capability)
    if tiles and recurrence.longest > SHORT:
        constants = tile_constants(heads.state_size, heads.head_dim, capability)
        blocks = -(-heads.head_dim // constants["WIDTH"])
        _selective_scan_tile_kernel[(chunks, heads.heads, blocks)](*arguments, **constants)
    constants = token_constants(heads.state_size, heads.head_dim, tiles=tiles)
    blocks = -(-heads.head_dim // constants["WIDTH"])
    _selective_scan_kernel[(chunks, heads.heads, blocks)](*arguments, **constants)
