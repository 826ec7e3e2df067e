"""Queries, keys and values of a layer, between the product that gives them and attention."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from cbatch.kernels.operands import NormWeights, Positions
from cbatch.kernels.triton.attention_tile import further, launch_options, power_of_2, wait_for_last_launch
from cbatch.kernels.triton.conversion import to_fp8
from cbatch.kernels.triton.norm import normed
from cbatch.runtime.kv_cache import as_bytes


@triton.jit
def _loaded(row, there, column, inside, CLIP):
    """Columns of rows as float32, 0 where they are not inside; None if there are none."""
    x = None
    if column is not None:
        x = tl.load(row + column, mask=there & inside, other=0.0).to(tl.float32)
        if CLIP != 0.0:
            x = tl.minimum(tl.maximum(x, -CLIP), CLIP)
    return x


@triton.jit
def _scaled(x, factor, weight, bias, column, inside):
    """x times factor and weight, if there is a factor, plus bias; None of None."""
    if x is not None:
        if factor is not None:
            if weight is not None:
                factor *= tl.load(weight + column, mask=inside, other=0.0)
            x *= factor
        if bias is not None:
            x += tl.load(bias + column, mask=inside, other=0.0)
    return x


@triton.jit
def _store(to, x, there, column, inside):
    """Writes x, unless it is None; bytes are FP8."""
    if x is not None:
        if to.dtype.element_ty == tl.uint8:
            x = to_fp8(x)
        tl.store(to + column, x.to(to.dtype.element_ty), mask=there & inside)


@triton.jit
def _norm_heads(left, right, rest, weight, bias, columns, inside, DIM, NORM):
    """Norms heads in three parts [N, ...], each head by itself.

    weight, bias: [N, 1] places of the first number of each head's weights
    """
    if NORM.kind == "layer":
        mean = tl.sum(left + right, axis=1)
        if rest is not None:
            mean += tl.sum(rest, axis=1)
        mean = mean[:, None] / DIM
        left, right = tl.where(inside[0], left - mean, 0.0), tl.where(inside[0], right - mean, 0.0)
        if rest is not None:
            rest = tl.where(inside[2], rest - mean, 0.0)
    factor = None
    if NORM.kind != "none":
        squares = tl.sum(left * left + right * right, axis=1)
        if rest is not None:
            squares += tl.sum(rest * rest, axis=1)
        factor = tl.rsqrt(squares / DIM + NORM.eps)[:, None]
    left = _scaled(left, factor, weight, bias, columns[0], inside[0])
    right = _scaled(right, factor, weight, bias, columns[1], inside[1])
    return left, right, _scaled(rest, factor, weight, bias, columns[2], inside[2])


@triton.jit
def _prepare(row, there, weight, bias, step, cosine, sine, columns, inside, DIM, LAST, CLIP, NORM):
    """Reads heads [N, DIM], norms and rotates them; returns both halves of what is rotated, and the rest; float32.

    row, there: [N, 1] where each head begins, and which of them exist
    step:       [N, 1] where the norm weights of each begin
    cosine:     None if nothing is rotated
    columns:    of the three parts, and which of them are inside; None for the rest if there is none
    """
    weight, bias = further(weight, step), further(bias, step)
    left, right = _loaded(row, there, columns[0], inside[0], CLIP), _loaded(row, there, columns[1], inside[1], CLIP)
    rest = _loaded(row, there, columns[2], inside[2], CLIP)
    if not LAST:
        left, right, rest = _norm_heads(left, right, rest, weight, bias, columns, inside, DIM, NORM)
    if cosine is not None:
        left, right = left * cosine - right * sine, right * cosine + left * sine
    if LAST:
        left, right, rest = _norm_heads(left, right, rest, weight, bias, columns, inside, DIM, NORM)
    return left, right, rest


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _prepare_heads_kernel(
    qkv, cosines, sines, scales, slots, query_weight, query_bias, key_weight, key_bias, value_weight, value_bias, query,
    keys, values, WIDTH: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr, GROUP_TILE: tl.constexpr,
    HALF_TILE: tl.constexpr, REST_TILE: tl.constexpr, VALUE_TILE: tl.constexpr, LAST: tl.constexpr, CLIP: tl.constexpr,
    QUERY_STEP: tl.constexpr, KEY_STEP: tl.constexpr, VALUE_STEP: tl.constexpr, QUERY_NORM: tl.constexpr,
    KEY_NORM: tl.constexpr, VALUE_NORM: tl.constexpr,
):  # fmt: skip
    """One program per token and KV head, with the query heads that share it; see `prepare_heads`.

    A head is two halves that are rotated together, and the rest. STEP is from one head's norm weights to the next's.
    """
    wait_for_last_launch()
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    member, column = tl.arange(0, GROUP_TILE)[:, None], tl.arange(0, HALF_TILE)[None, :]
    columns, inside = (column, HALF + column, None), (column < HALF, column < HALF, None)
    if DIM > 2 * HALF:
        rest = 2 * HALF + tl.arange(0, REST_TILE)[None, :]
        columns, inside = (column, HALF + column, rest), (column < HALF, column < HALF, rest < DIM)
    cosine, sine = None, None
    if cosines is not None:
        cosine = tl.load(cosines + token * HALF + column, mask=column < HALF, other=0.0)
        sine = tl.load(sines + token * HALF + column, mask=column < HALF, other=0.0)
    row = qkv + token * WIDTH

    there = member < GROUP
    number = head * GROUP + tl.where(there, member, 0)
    parts = _prepare(
        row + number * DIM, there, query_weight, query_bias, number * QUERY_STEP, cosine, sine, columns, inside, DIM,
        LAST, CLIP, QUERY_NORM,
    )  # fmt: skip
    scale = None
    if scales is not None:
        scale = tl.load(scales + token)
    to = query + token * (GROUP * KV_HEADS * DIM) + number * DIM
    for part in tl.static_range(3):
        _store(to, _scaled(parts[part], scale, None, None, None, None), there, columns[part], inside[part])

    if keys is not None:
        slot = tl.load(slots + token).to(tl.int64)
        if slot >= 0:
            cell = (slot // BLOCK_SIZE * KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
            one = tl.zeros([1, 1], tl.int64)
            key = one + (GROUP * KV_HEADS + head) * DIM
            key_parts = _prepare(
                row + key, one == 0, key_weight, key_bias, one + head * KEY_STEP, cosine, sine, columns, inside, DIM,
                LAST, CLIP, KEY_NORM,
            )  # fmt: skip
            for part in tl.static_range(3):
                _store(keys + one + cell * DIM, key_parts[part], one == 0, columns[part], inside[part])
            _store_value(
                row + (GROUP + 1) * KV_HEADS * DIM + head * VALUE_DIM, values + cell * VALUE_DIM, value_weight,
                value_bias, head * VALUE_STEP, VALUE_DIM, VALUE_TILE, CLIP, VALUE_NORM,
            )  # fmt: skip


@triton.jit
def _store_value(source, to, weight, bias, step, DIM, TILE, CLIP, NORM):
    column = tl.arange(0, TILE)
    inside = column < DIM
    x = _loaded(source, inside, column, inside, CLIP)
    _store(to, normed(x, inside, step + column, weight, bias, DIM, NORM), inside, column, inside)


def prepare_heads(
    qkv: Tensor, one: Any, norms: tuple[NormWeights, ...], positions: Positions, query: Tensor, keys: Tensor | None,
    values: Tensor | None, *, capability: int,
) -> None:  # fmt: skip
    """See `model/ops/attention.py`. keys, values: [num_blocks, kv_heads, block_size, dim]"""
    kv_heads, key_dim, value_dim = one.shape.heads, one.shape.key_dim, one.shape.value_dim
    half = key_dim // 2 if positions.cosines is None else positions.cosines.shape[1]
    group = one.heads // kv_heads
    tile, half_tile = power_of_2(group), power_of_2(half)
    stored = (None, None) if keys is None or values is None else (as_bytes(keys), as_bytes(values))
    _prepare_heads_kernel[(query.shape[0], kv_heads)](
        qkv, positions.cosines, positions.sines, positions.query_scales, positions.slots,
        *(part for norm in norms for part in (norm.weight, norm.bias)), query, *stored, qkv.stride(0), kv_heads, group,
        key_dim, value_dim, half, 0 if keys is None else keys.shape[2], tile, half_tile,
        power_of_2(max(key_dim - 2 * half, 1)), power_of_2(value_dim), one.norms.last, one.clip,
        *(_step(norm, dim) for norm, dim in zip(norms, (key_dim, key_dim, value_dim), strict=True)),
        *(norm.form for norm in norms), **launch_options(tile * half_tile // 8, capability),
    )  # fmt: skip


def _step(norm: NormWeights, dim: int) -> int:
    """How far the weights of one head are from those of the next: 0 if all have the same."""
    given = norm.weight if norm.weight is not None else norm.bias
    return 0 if given is None or given.numel() == dim else dim
