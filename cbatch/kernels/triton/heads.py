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
def _clipped(x, CLIP):
    if CLIP != 0.0:
        x = tl.minimum(tl.maximum(x, -CLIP), CLIP)
    return x


@triton.jit
def _norm_heads(left, right, rest, weight, bias, column, rest_column, DIM, HALF, HAS_REST, NORM):
    """Norms heads in three parts [N, ...], each head by itself.

    weight, bias: [N, 1] places of the first number of each head's weights
    """
    inside, rest_inside = column < HALF, rest_column < DIM - 2 * HALF
    if NORM.kind == "layer":
        mean = tl.sum(left + right, axis=1)
        if HAS_REST:
            mean += tl.sum(rest, axis=1)
        mean = mean[:, None] / DIM
        left, right = tl.where(inside, left - mean, 0.0), tl.where(inside, right - mean, 0.0)
        if HAS_REST:
            rest = tl.where(rest_inside, rest - mean, 0.0)
    if NORM.kind != "none":
        squares = tl.sum(left * left + right * right, axis=1)
        if HAS_REST:
            squares += tl.sum(rest * rest, axis=1)
        factor = tl.rsqrt(squares / DIM + NORM.eps)[:, None]
        left_factor, right_factor, rest_factor = factor, factor, factor
        if weight is not None:
            left_factor *= tl.load(weight + column, mask=inside, other=0.0)
            right_factor *= tl.load(weight + HALF + column, mask=inside, other=0.0)
            if HAS_REST:
                rest_factor *= tl.load(weight + 2 * HALF + rest_column, mask=rest_inside, other=0.0)
        left *= left_factor
        right *= right_factor
        if HAS_REST:
            rest *= rest_factor
    if bias is not None:
        left += tl.load(bias + column, mask=inside, other=0.0)
        right += tl.load(bias + HALF + column, mask=inside, other=0.0)
        if HAS_REST:
            rest += tl.load(bias + 2 * HALF + rest_column, mask=rest_inside, other=0.0)
    return left, right, rest


@triton.jit
def _prepare(
    row, start, there, weight, bias, step, cosine, sine, column, rest_column, DIM, HALF, HAS_REST, LAST, CLIP, NORM
):
    """Reads heads [N, DIM], norms and rotates them; returns both halves of what is rotated, and the rest; float32.

    start, there: [N, 1] where each head begins in the row, and which of them exist
    step:         [N, 1] where the norm weights of each begin
    cosine:       None if nothing is rotated
    """
    weight, bias = further(weight, step), further(bias, step)
    inside = there & (column < HALF)
    left = _clipped(tl.load(row + start + column, mask=inside, other=0.0).to(tl.float32), CLIP)
    right = _clipped(tl.load(row + start + HALF + column, mask=inside, other=0.0).to(tl.float32), CLIP)
    rest = left
    if HAS_REST:
        rest_inside = there & (rest_column < DIM - 2 * HALF)
        rest = _clipped(tl.load(row + start + 2 * HALF + rest_column, mask=rest_inside, other=0.0).to(tl.float32), CLIP)
    if not LAST:
        left, right, rest = _norm_heads(left, right, rest, weight, bias, column, rest_column, DIM, HALF, HAS_REST, NORM)
    if cosine is not None:
        left, right = left * cosine - right * sine, right * cosine + left * sine
    if LAST:
        left, right, rest = _norm_heads(left, right, rest, weight, bias, column, rest_column, DIM, HALF, HAS_REST, NORM)
    return left, right, rest


@triton.jit
def _store(to, left, right, rest, there, column, rest_column, DIM, HALF, HAS_REST):
    """Writes heads in three parts to places [N, 1]; bytes are FP8."""
    inside = there & (column < HALF)
    if to.dtype.element_ty == tl.uint8:
        left, right = to_fp8(left), to_fp8(right)
    tl.store(to + column, left.to(to.dtype.element_ty), mask=inside)
    tl.store(to + HALF + column, right.to(to.dtype.element_ty), mask=inside)
    if HAS_REST:
        if to.dtype.element_ty == tl.uint8:
            rest = to_fp8(rest)
        rest_inside = there & (rest_column < DIM - 2 * HALF)
        tl.store(to + 2 * HALF + rest_column, rest.to(to.dtype.element_ty), mask=rest_inside)


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
    HAS_REST: tl.constexpr = DIM > 2 * HALF
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    member, column = tl.arange(0, GROUP_TILE)[:, None], tl.arange(0, HALF_TILE)[None, :]
    rest_column = tl.arange(0, REST_TILE)[None, :]
    cosine, sine = None, None
    if cosines is not None:
        cosine = tl.load(cosines + token * HALF + column, mask=column < HALF, other=0.0)
        sine = tl.load(sines + token * HALF + column, mask=column < HALF, other=0.0)
    row = qkv + token * WIDTH

    there = member < GROUP
    number = head * GROUP + tl.where(there, member, 0)
    left, right, rest = _prepare(
        row, number * DIM, there, query_weight, query_bias, number * QUERY_STEP, cosine, sine, column, rest_column, DIM,
        HALF, HAS_REST, LAST, CLIP, QUERY_NORM,
    )  # fmt: skip
    if scales is not None:
        scale = tl.load(scales + token)
        left, right, rest = left * scale, right * scale, rest * scale
    to = query + token * (GROUP * KV_HEADS * DIM) + number * DIM
    _store(to, left, right, rest, there, column, rest_column, DIM, HALF, HAS_REST)

    if keys is not None:
        slot = tl.load(slots + token).to(tl.int64)
        if slot >= 0:
            cell = (slot // BLOCK_SIZE * KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
            one = tl.zeros([1, 1], tl.int64)
            key = one + (GROUP * KV_HEADS + head) * DIM
            key_left, key_right, key_rest = _prepare(
                row, key, one == 0, key_weight, key_bias, one + head * KEY_STEP, cosine, sine, column, rest_column, DIM,
                HALF, HAS_REST, LAST, CLIP, KEY_NORM,
            )  # fmt: skip
            to_key = keys + one + cell * DIM
            _store(to_key, key_left, key_right, key_rest, one == 0, column, rest_column, DIM, HALF, HAS_REST)
            _store_value(
                row + (GROUP + 1) * KV_HEADS * DIM + head * VALUE_DIM, values + cell * VALUE_DIM, value_weight,
                value_bias, head * VALUE_STEP, VALUE_DIM, VALUE_TILE, CLIP, VALUE_NORM,
            )  # fmt: skip


@triton.jit
def _store_value(source, to, weight, bias, step, DIM, TILE, CLIP, NORM):
    column = tl.arange(0, TILE)
    inside = column < DIM
    x = _clipped(tl.load(source + column, mask=inside, other=0.0).to(tl.float32), CLIP)
    x = normed(x, inside, step + column, weight, bias, DIM, NORM)
    if to.dtype.element_ty == tl.uint8:
        x = to_fp8(x)
    tl.store(to + column, x.to(to.dtype.element_ty), mask=inside)


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
