"""The kernels of a layer of the Llama family between its matrix products (see `LayerOps`).

A step of few tokens takes as long as its launches and the reading of its weights, so whatever fits into one kernel is
one kernel. No argument that changes from step to step is a number on the host: nothing is compiled again, and a
captured launch is right for the next step. Sums, norms, angles and gates are float32 whatever the tensors are.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from cbatch.engine.kernels.layer_ops import Positions
from cbatch.engine.kernels.triton.attention_tile import power_of_2, to_fp8
from cbatch.engine.runtime.kv_cache import as_bytes

_OPTIONS = {"enable_fp_fusion": True}
"""Of every launch: versions of Triton differ in what they do if it is not said."""

heads_first = True
"""A block of the cache is [kv_heads, block_size, head_dim]."""


@triton.jit(do_not_specialize_on_alignment=["rows"])
def _norm_kernel(
    residual: tl.tensor,
    added: tl.tensor,
    rows: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    eps: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    EMBEDS: tl.constexpr,
    SELECTS: tl.constexpr,
) -> None:
    """One program per row of `out`; see `embed_and_norm`, `add_and_norm` and `select_and_norm`."""
    row = tl.program_id(0).to(tl.int64)
    source = row
    if EMBEDS or SELECTS:
        source = tl.load(rows + row).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    x = tl.load(added + source * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
    if not EMBEDS:
        x += tl.load(residual + source * HIDDEN + column, mask=inside, other=0.0)
    if not SELECTS:
        tl.store(residual + row * HIDDEN + column, x, mask=inside)
    x *= tl.rsqrt(tl.sum(x * x, axis=0) / HIDDEN + eps)
    x *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * HIDDEN + column, x.to(out.dtype.element_ty), mask=inside)


def embed_and_norm(embedding: Tensor, ids: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """residual [T, hidden] float32 = embedding[ids]; out [T, hidden] = its RMSNorm (Zhang and Sennrich, 2019)."""
    _norm(residual, embedding, ids, weight, eps, out, embeds=True, selects=False)


def add_and_norm(residual: Tensor, added: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """residual [T, hidden] float32 += added [T, hidden]; out [T, hidden] = its RMSNorm."""
    _norm(residual, added, residual, weight, eps, out, embeds=False, selects=False)


def select_and_norm(residual: Tensor, added: Tensor, rows: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """out [R, hidden] = RMSNorm of (residual + added)[rows]; the residual does not change."""
    _norm(residual, added, rows, weight, eps, out, embeds=False, selects=True)


def _norm(
    residual: Tensor, added: Tensor, rows: Tensor, weight: Tensor, eps: float, out: Tensor, embeds: bool, selects: bool
) -> None:
    hidden = out.shape[1]
    block = power_of_2(hidden)
    _norm_kernel[(out.shape[0],)](
        residual, added, rows, weight, out, eps, hidden, block, embeds, selects, **_options(block // 16)
    )


@triton.jit
def _norm_and_rope(
    row: tl.tensor,
    part: tl.tensor,
    inside: tl.tensor,
    norm: tl.tensor,
    cosine: tl.tensor,
    sine: tl.tensor,
    eps: tl.constexpr,
    DIM: tl.constexpr,
    HAS_NORMS: tl.constexpr,
) -> Any:
    """Reads heads [N, DIM], norms them if there are norms, and rotates them (RoPE); returns both halves, float32.

    part, inside: [N, half] offsets of the left halves from `row`, and which of them exist
    """
    half: tl.constexpr = DIM // 2
    left = tl.load(row + part, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(row + part + half, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORMS:
        column = tl.arange(0, cosine.shape[1])[None, :]
        factor = tl.rsqrt(tl.sum(left * left + right * right, axis=1) / DIM + eps)[:, None]
        left *= factor * tl.load(norm + column, mask=column < half, other=0.0).to(tl.float32)
        right *= factor * tl.load(norm + half + column, mask=column < half, other=0.0).to(tl.float32)
    return left * cosine - right * sine, right * cosine + left * sine


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _rope_and_store_kv_kernel(
    qkv: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    slots: tl.tensor,
    norms: tl.tensor,
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    eps: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    HALF_TILE: tl.constexpr,
    HAS_NORMS: tl.constexpr,
) -> None:
    """One program per token and KV head, with the query heads that share it; see `rope_and_store_kv`."""
    half: tl.constexpr = DIM // 2
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    member, column = tl.arange(0, GROUP_TILE)[:, None], tl.arange(0, HALF_TILE)[None, :]
    inside = column < half
    cosine = tl.load(cosines + token * half + column, mask=inside, other=0.0)
    sine = tl.load(sines + token * half + column, mask=inside, other=0.0)
    row = qkv + token * ((GROUP + 2) * KV_HEADS * DIM)

    part, there = (head * GROUP + member) * DIM + column, (member < GROUP) & inside
    left, right = _norm_and_rope(row, part, there, norms, cosine, sine, eps, DIM, HAS_NORMS)
    to = query + token * (GROUP * KV_HEADS * DIM) + part
    tl.store(to, left.to(query.dtype.element_ty), mask=there)
    tl.store(to + half, right.to(query.dtype.element_ty), mask=there)

    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        cell = ((slot // BLOCK_SIZE * KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE) * DIM + column
        key = (GROUP * KV_HEADS + head) * DIM + column
        key_left, key_right = _norm_and_rope(row, key, inside, norms + DIM, cosine, sine, eps, DIM, HAS_NORMS)
        value = key + KV_HEADS * DIM
        value_left, value_right = tl.load(row + value, mask=inside), tl.load(row + value + half, mask=inside)
        if keys.dtype.element_ty == tl.uint8:
            key_left, key_right = to_fp8(key_left), to_fp8(key_right)
            value_left, value_right = to_fp8(value_left), to_fp8(value_right)
        tl.store(keys + cell, key_left.to(keys.dtype.element_ty), mask=inside)
        tl.store(keys + cell + half, key_right.to(keys.dtype.element_ty), mask=inside)
        tl.store(values + cell, value_left, mask=inside)
        tl.store(values + cell + half, value_right, mask=inside)


def rope_and_store_kv(
    qkv: Tensor, positions: Positions, norms: Tensor | None, eps: float, query: Tensor, keys: Tensor, values: Tensor
) -> None:
    """Norms and rotates a step's queries and keys, and stores keys and values in the cache of one layer.

    qkv:          [T, (heads + 2 * kv_heads) * head_dim] queries, keys and values as their matrix gives them
    norms:        [2 * head_dim] weights of the norms of queries, then of keys, if the model has them
    query:        [T, heads, head_dim], written
    keys, values: [num_blocks, kv_heads, block_size, head_dim], written
    """
    _, kv_heads, block_size, dim = keys.shape
    group = query.shape[1] // kv_heads
    tile, half = power_of_2(group), power_of_2(dim // 2)
    _rope_and_store_kv_kernel[(query.shape[0], kv_heads)](
        qkv, *positions, qkv if norms is None else norms, query, as_bytes(keys), as_bytes(values), eps,
        kv_heads, group, dim, block_size, tile, half, norms is not None, **_options(tile * half // 8),
    )  # fmt: skip


@triton.jit
def _silu_and_mul_kernel(gate_up: tl.tensor, out: tl.tensor, INNER: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """One program per row and block of columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < INNER
    gate = tl.load(gate_up + row * (2 * INNER) + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * INNER) + INNER + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * INNER + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


def silu_and_mul(gate_up: Tensor, out: Tensor) -> None:
    """out [T, inner] = silu(gate) * up (SwiGLU, Shazeer, 2020), with both [T, 2 * inner] = gate, then up."""
    rows, inner = out.shape
    block = min(power_of_2(inner), 1024)
    _silu_and_mul_kernel[(rows, -(-inner // block))](gate_up, out, inner, block, **_options(block // 8))


def logits(hidden: Tensor, lm_head: Tensor, out: Tensor | None = None) -> Tensor:
    """Logits [R, vocabulary] float32 of hidden [R, hidden], in `out` if it is given.

    In bfloat16, many tokens would share the largest logit. The device sums in float32 anyway, and writing that takes
    less time than a kernel that widens the logits for the sampler.
    """
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, lm_head.t(), out_dtype=torch.float32, out=out)
    values = linear(hidden, lm_head).float()
    return values if out is None else out.copy_(values)


@cache
def _options(threads: int) -> dict[str, Any]:
    """Of a launch, with warps for so many threads, each of which reads 16 bytes, or a few times that."""
    return {"num_warps": min(max(threads // 32, 1), 16), **_OPTIONS}
