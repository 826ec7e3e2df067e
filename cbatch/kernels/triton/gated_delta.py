"""The gated delta rule (Yang et al., https://arxiv.org/abs/2412.06464).

`GatedDelta` in `model/ops` has the formulas. Queries and keys are divided by their lengths on the way.
States may be of any type; what is computed is float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbatch.kernels.operands import Recurrence
from cbatch.kernels.triton.attention_tile import LAUNCH, find_tile
from cbatch.kernels.triton.recurrence import (
    CHUNK_TENSORS,
    SHORT,
    TILE,
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
    two_dots_in_parts,
)

_LONGEST_TILE = 128
"""With longer keys, tiles take more registers than a thread has."""


@triton.jit
def _unit(x):
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + 1e-6)


@triton.jit(do_not_specialize_on_alignment=CHUNK_TENSORS)
def _gated_delta_kernel(
    qkv, controls, decay, decay_bias, state, starts, slots, snapshot_counts, snapshot_slots, out, QKV_ROW: tl.constexpr,
    CONTROLS_ROW: tl.constexpr, OUT_ROW: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, LENGTH_TILE: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    SHORT: tl.constexpr,
):  # fmt: skip
    """One program per chunk, value head and WIDTH columns of its state: what does not take a tile, token by token."""
    start, count, slot, cut, target = read_chunk(starts, slots, snapshot_counts, snapshot_slots, tl.program_id(0))
    first = tiled_tokens(count, TILE, SHORT)
    if first >= count:
        return
    head, k = tl.program_id(1), tl.arange(0, LENGTH_TILE)
    v = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    is_key, is_value = k < KEY_DIM, v < VALUE_DIM
    states = state + head * KEY_DIM * VALUE_DIM + k[:, None] * VALUE_DIM + v[None, :]
    kept = is_key[:, None] & is_value[None, :]
    now = tl.load(states + slot * (VALUE_HEADS * KEY_DIM * VALUE_DIM), mask=kept, other=0.0).to(tl.float32)
    rate_of_decay, bias = tl.load(decay + head), tl.load(decay_bias + head)
    query = qkv + start * QKV_ROW + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + k
    value = qkv + start * QKV_ROW + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + v
    control, to = controls + start * CONTROLS_ROW + head, out + start * OUT_ROW + head * VALUE_DIM + v
    for token in range(first, count):
        q = _unit(tl.load(query + token * QKV_ROW, mask=is_key, other=0.0).to(tl.float32)) * (KEY_DIM**-0.5)
        key = _unit(tl.load(query + token * QKV_ROW + KEY_HEADS * KEY_DIM, mask=is_key, other=0.0).to(tl.float32))
        new = tl.load(value + token * QKV_ROW, mask=is_value, other=0.0).to(tl.float32)
        b = tl.load(control + token * CONTROLS_ROW).to(tl.float32)
        a = tl.load(control + token * CONTROLS_ROW + VALUE_HEADS).to(tl.float32)
        now *= tl.exp(rate_of_decay * softplus(a + bias))
        error = new - tl.sum(now * key[:, None], axis=0)
        now += key[:, None] * (tl.sigmoid(b) * error)[None, :]
        result = tl.sum(now * q[:, None], axis=0)
        tl.store(to + token * OUT_ROW, result.to(out.dtype.element_ty), mask=is_value)
        if token + 1 == cut:
            # What goes on is rounded as what the snapshot holds, so that a sequence may go on from either.
            rounded = now.to(state.dtype.element_ty)
            tl.store(states + target * (VALUE_HEADS * KEY_DIM * VALUE_DIM), rounded, mask=kept)
            now = rounded.to(tl.float32)
    tl.store(states + slot * (VALUE_HEADS * KEY_DIM * VALUE_DIM), now.to(state.dtype.element_ty), mask=kept)


@triton.jit
def _load_controls(controls, head, row, there, rate_of_decay, bias, CONTROLS_ROW, VALUE_HEADS):
    """Of the tokens of a tile: how much of an error is mended, and the sums of the logarithms of their decays."""
    place = controls + row * CONTROLS_ROW + head
    b = tl.load(place, mask=there, other=0.0).to(tl.float32)
    a = tl.load(place + VALUE_HEADS, mask=there, other=0.0).to(tl.float32)
    log_decay = tl.where(there, rate_of_decay * softplus(a + bias), 0.0)
    return tl.where(there, tl.sigmoid(b), 0.0), tl.cumsum(log_decay, 0)


@triton.jit
def _load_vectors(place, row, there, QKV_ROW, KEY_DIM, LENGTH_TILE):
    """[TILE, LENGTH_TILE] queries or keys of a tile as they are, and [TILE] factors that make their lengths 1."""
    k = tl.arange(0, LENGTH_TILE)
    kept = there[:, None] & (k < KEY_DIM)[None, :]
    x = tl.load(place + row[:, None] * QKV_ROW + k[None, :], mask=kept, other=0.0)
    wide = x.to(tl.float32)
    return x, tl.rsqrt(tl.sum(wide * wide, axis=1) + 1e-6)


@triton.jit(do_not_specialize=["chunks"], do_not_specialize_on_alignment=CHUNK_TENSORS)
def _invert_kernel(
    qkv, controls, decay, decay_bias, starts, slots, snapshot_counts, snapshot_slots, inverses, chunks,
    QKV_ROW: tl.constexpr, CONTROLS_ROW: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, LENGTH_TILE: tl.constexpr, TILE: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """One program per tile and value head: the inverse of the system that its updates solve.

    The update of a token is b_t * (v_t - exp(G_t) * k_t S - sum over i < t of exp(G_t - G_i) * (k_t k_i) * u_i). With
    the factors of u_i as a matrix A, which is 0 on the diagonal and above it, (1 + A) u is known before any u.

    inverses: [T, value_heads, TILE] float32, of which a tile writes the rows of its tokens
    """
    # A chunk has two tiles more at most than its tokens need: one may not be full, and one is cut.
    chunk, number = find_tile(starts, 1, 2, chunks, tl.program_id(0), TILE)
    start, count, _, cut, _ = read_chunk(starts, slots, snapshot_counts, snapshot_slots, chunk)
    count = tiled_tokens(count, TILE, SHORT)
    if number >= num_tiles(count, cut, TILE):
        return
    head, t = tl.program_id(1), tl.arange(0, TILE)
    begin, end = tile_bounds(number, count, cut, TILE)
    row, there = start + begin + t, begin + t < end
    rate, total = _load_controls(
        controls, head, row, there, tl.load(decay + head), tl.load(decay_bias + head), CONTROLS_ROW, VALUE_HEADS
    )  # fmt: skip
    key = qkv + (KEY_HEADS + head // (VALUE_HEADS // KEY_HEADS)) * KEY_DIM
    k, of_key = _load_vectors(key, row, there, QKV_ROW, KEY_DIM, LENGTH_TILE)
    factors = tl.dot(k, tl.trans(k)) * decay_between(total, TILE) * (rate * of_key)[:, None] * of_key[None, :]
    factors = tl.trans(tl.where(t[:, None] > t[None, :], factors, 0.0))
    inverse = (t[:, None] == t[None, :]).to(tl.float32)
    for done in range(1, TILE):  # forward substitution, of all columns at once
        factor = tl.sum(tl.where(t[None, :] == done, factors, 0.0), axis=1)
        known = tl.sum(factor[:, None] * inverse, axis=0)
        inverse -= tl.where(t[:, None] == done, known[None, :], 0.0)
    place = inverses + (row[:, None] * VALUE_HEADS + head) * TILE + t[None, :]
    tl.store(place, inverse, mask=there[:, None])


@triton.jit(do_not_specialize_on_alignment=CHUNK_TENSORS)
def _gated_delta_tile_kernel(
    qkv, controls, decay, decay_bias, state, starts, slots, snapshot_counts, snapshot_slots, inverses, out,
    QKV_ROW: tl.constexpr, CONTROLS_ROW: tl.constexpr, OUT_ROW: tl.constexpr, KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, LENGTH_TILE: tl.constexpr,
    WIDTH: tl.constexpr, TILE: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """One program per chunk, value head and WIDTH columns of its state: tile by tile."""
    start, count, slot, cut, target = read_chunk(starts, slots, snapshot_counts, snapshot_slots, tl.program_id(0))
    count = tiled_tokens(count, TILE, SHORT)
    if count <= 0:
        return
    head, k, t = tl.program_id(1), tl.arange(0, LENGTH_TILE), tl.arange(0, TILE)
    v = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    states = state + head * KEY_DIM * VALUE_DIM + k[:, None] * VALUE_DIM + v[None, :]
    kept = (k < KEY_DIM)[:, None] & (v < VALUE_DIM)[None, :]
    now = tl.load(states + slot * (VALUE_HEADS * KEY_DIM * VALUE_DIM), mask=kept, other=0.0).to(tl.float32)
    rate_of_decay, bias = tl.load(decay + head), tl.load(decay_bias + head)
    query = qkv + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM
    value = qkv + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + v
    for number in range(0, num_tiles(count, cut, TILE)):
        begin, end = tile_bounds(number, count, cut, TILE)
        row, there = start + begin + t, begin + t < end
        rate, total = _load_controls(controls, head, row, there, rate_of_decay, bias, CONTROLS_ROW, VALUE_HEADS)
        q, of_query = _load_vectors(query, row, there, QKV_ROW, KEY_DIM, LENGTH_TILE)
        keys, of_key = _load_vectors(query + KEY_HEADS * KEY_DIM, row, there, QKV_ROW, KEY_DIM, LENGTH_TILE)
        written = there[:, None] & (v < VALUE_DIM)[None, :]
        new = tl.load(value[None, :] + row[:, None] * QKV_ROW, mask=written, other=0.0).to(tl.float32)
        fade, nothing = tl.exp(total), tl.zeros([TILE, WIDTH], tl.float32)
        seen, result = two_dots_in_parts(keys, q, now, nothing)
        error = new - seen * (fade * of_key)[:, None]
        place = inverses + (row[:, None] * VALUE_HEADS + head) * TILE + t[None, :]
        inverse = tl.load(place, mask=there[:, None], other=0.0)
        updates = tl.dot(inverse, error * rate[:, None], input_precision="tf32x3") * of_key[:, None]
        scores = tl.dot(q, tl.trans(keys)) * decay_between(total, TILE)
        result = tl.dot(scores, updates, result * fade[:, None], input_precision="tf32x3")
        result *= (of_query * KEY_DIM**-0.5)[:, None]
        last = tl.min(total, 0)
        now = dot_in_parts(tl.trans(keys), updates * tl.exp(last - total)[:, None], now * tl.exp(last))
        to = out + row[:, None] * OUT_ROW + head * VALUE_DIM + v[None, :]
        tl.store(to, result.to(out.dtype.element_ty), mask=written)
        rounded = now.to(state.dtype.element_ty)
        if end == cut:
            tl.store(states + target * (VALUE_HEADS * KEY_DIM * VALUE_DIM), rounded, mask=kept)
        now = rounded.to(tl.float32)
    tl.store(states + slot * (VALUE_HEADS * KEY_DIM * VALUE_DIM), now.to(state.dtype.element_ty), mask=kept)


def gated_delta(
    qkv: Tensor, controls: Tensor, heads: Any, weights: tuple[Tensor, Tensor], state: Tensor, recurrence: Recurrence,
    out: Tensor, *, capability: int,
) -> None:  # fmt: skip
    """See `model/ops/gated_delta.py`.  capability: of the chip, 90 for 9.0"""
    given, ints = (qkv, controls, *weights), chunk_tensors(recurrence)
    rows, chunks = (qkv.stride(0), controls.stride(0)), len(recurrence.slots)
    sizes = heads.key_heads, heads.value_heads, heads.key_dim, heads.value_dim
    tiles = takes_tiles(qkv.dtype, capability) and heads.key_dim <= _LONGEST_TILE
    if tiles and recurrence.longest > SHORT:
        constants = tile_constants(heads.key_dim, heads.value_dim, capability)
        inverses = torch.empty(len(qkv), heads.value_heads, TILE, dtype=torch.float32, device=qkv.device)
        _invert_kernel[(len(qkv) // TILE + 2 * chunks, heads.value_heads)](
            *given, *ints, inverses, chunks, *rows, *sizes[:3], constants["LENGTH_TILE"], TILE, SHORT, num_warps=1,
            **LAUNCH,
        )  # fmt: skip
        _gated_delta_tile_kernel[(chunks, heads.value_heads, -(-heads.value_dim // constants["WIDTH"]))](
            *given, state, *ints, inverses, out, *rows, out.stride(0), *sizes, **constants
        )
    constants = token_constants(heads.key_dim, heads.value_dim, tiles=tiles)
    _gated_delta_kernel[(chunks, heads.value_heads, -(-heads.value_dim // constants["WIDTH"]))](
        *given, state, *ints, out, *rows, out.stride(0), *sizes, **constants
    )
