"""Code of both attention kernels: tokens in the cache, how they are stored, attention over one tile of them, and how
the partial results of sequences that are split are merged: by the decode kernel itself, or by one after the other.

Scores are in base 2: they are multiplied with log2(e), because the hardware computes exp2.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

from cbatch.kernels.triton.attention_metadata import AttentionMetadata
from cbatch.kernels.triton.conversion import COMPILED, from_fp8, to_fp8
from cbatch.kernels.triton.occupancy import DeviceLimits

LOG2_E = 1.4426950408889634
LAUNCH: dict[str, Any] = {"enable_fp_fusion": True}
"""Options of every launch. Triton fuses products and sums by default only up to 3.9, so results would differ."""


def attend_arguments(
    scale: float, window: int | None = None, chunk: int | None = None, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The options of `AttentionBackend.attend` as arguments of a kernel. Those that are None are compiled out of it.

    A chunk is a window of as many tokens at most; `first_seen` tells them apart.
    """
    window, is_chunked = window if chunk is None else chunk, chunk is not None
    return {"scale": scale * LOG2_E, "window": window, "softcap": softcap, "sinks": sinks, "IS_CHUNKED": is_chunked}


class Heads(NamedTuple):
    """The constants of a launch for a layer: the same for most layers of a model, so it is looked up by them.

    query_heads  of a token
    block        [kv_heads, block_size, key_dim]
    """

    query_heads: int
    block: torch.Size
    value_dim: int
    dtype: torch.dtype
    cache_dtype: torch.dtype

    @classmethod
    def of(cls, query: Tensor, keys: Tensor, values: Tensor) -> Heads:
        return cls(query.shape[1], keys.shape[1:], values.shape[-1], query.dtype, keys.dtype)


@cache
def cache_layout(heads: Heads) -> dict[str, int]:
    """Arguments for the layout of a layer's cache. Tiles are padded to powers of 2 and masked."""
    kv_heads, block_size, key_dim = heads.block
    return {
        "KV_HEADS": kv_heads,
        "GROUP": heads.query_heads // kv_heads,
        "BLOCK_SIZE": block_size,
        "KEY_DIM": key_dim,
        "VALUE_DIM": heads.value_dim,
        "KEY_TILE": max(16, power_of_2(key_dim)),
        "VALUE_TILE": max(16, power_of_2(heads.value_dim)),
    }


def narrow_rows(group: int) -> int:
    """Rows of a tile of the decode kernel, tokens times heads. It takes the chunks that fit into one."""
    return max(16, power_of_2(group))


@cache
def launch_options(threads: int, capability: int = 0) -> dict[str, Any]:
    """Of a launch with warps for so many threads, each of which reads 16 bytes, or a few times that.

    capability: of the chip, 90 for 9.0, if the kernel begins with `wait_for_last_launch`
    """
    return {"num_warps": min(max(threads // 32, 1), 16), **early_launch(capability), **LAUNCH}


def early_launch(capability: int) -> dict[str, Any]:
    """The option for a kernel that begins with `wait_for_last_launch`: it is launched while the last one still ends."""
    return {"launch_pdl": True} if capability >= 90 else {}


@triton.jit
def wait_for_last_launch():
    """Waits until the kernel before is done and its results can be seen, and lets the next one be launched.

    No program of a kernel that is launched early may read or write anything before, or end without it.
    """
    if COMPILED and cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def power_of_2(number: int) -> int:
    """The next power of 2. That of Triton is a function for kernels, too, which takes many times longer."""
    return 1 << (number - 1).bit_length()


@triton.jit
def further(place, step):
    """An address so much further on; None for None."""
    if place is not None:
        place += step
    return place


@triton.jit
def find_tile(before, STEP, MORE, count, tile, TILE):
    """The part of a list that a tile of TILE rows belongs to, and the tile's number in it, which may be too large.

    Each part begins with a new tile, and has MORE tiles than its rows need: part i begins with tile i * MORE + (rows in
    all parts before) // TILE, whatever rows the last tile of the part before has.

    before: the rows before each of `count` parts, STEP numbers apart
    """
    begun, first = 0, 0
    for base in range(0, count, 128):
        part = base + tl.arange(0, 128)
        rows = tl.load(before + part * STEP, mask=part < count, other=0)
        is_begun = (part < count) & (rows // TILE + MORE * part <= tile)
        begun += tl.sum(is_begun.to(tl.int32), 0)
        first = tl.maximum(first, tl.max(tl.where(is_begun, rows // TILE + MORE * part, 0), 0))
    return begun - 1, tile - first


@triton.jit
def first_seen(position, window, IS_CHUNKED):
    """The first token that the one at a position sees, in a window or in its chunk, if there is any."""
    if window is None:
        first = position * 0
    elif IS_CHUNKED:
        first = position // window * window
    else:
        first = tl.maximum(position + 1 - window, 0)
    return first


@triton.jit
def kv_rows(block_ids, tokens, there, head, KV_HEADS, BLOCK_SIZE):
    """Rows of the cache, seen as [num_blocks * kv_heads * block_size, dim], that hold tokens of a sequence."""
    page = tl.load(block_ids + tokens // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    return (page * KV_HEADS + head) * BLOCK_SIZE + tokens % BLOCK_SIZE


@triton.jit
def load_kv(cache, rows, there, DIM, TILE, MASKED, dtype, READS_SHARED=False):
    """[tokens, TILE] keys or values, FP8 as numbers of `dtype`; 0 beyond the head's size, and for masked tokens.

    READS_SHARED: the matrix units of 10.0 read them from shared memory
    """
    column = tl.arange(0, TILE)
    place = cache + rows[:, None] * DIM + column[None, :]
    if MASKED:
        found = tl.load(place, mask=there[:, None] & (column < DIM)[None, :], other=0)
    elif DIM != TILE:
        found = tl.load(place, mask=(column < DIM)[None, :], other=0)
    else:
        found = tl.load(place)
    if cache.dtype.element_ty == tl.uint8:
        # If Triton could move it, it would convert after the warps have exchanged what they read: each warp would read
        # the bytes of a whole tile one by one, and convert all of them, instead of its own share. It does not if they
        # go to shared memory, and below 3.9 it does not compile there what it may not move.
        found = from_fp8(found, dtype, READS_SHARED or dtype.primitive_bitwidth != 16)
    return found


@triton.jit
def scaled_scores(q, k, scale, softcap):
    """[queries, tokens] scores in base 2."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if softcap is not None:
        # tanh(x) = 1 - 2 / (exp(2x) + 1) is right at both ends, and exp(2x) is exp2 of twice the score in base 2.
        bend = softcap * 1.4426950408889634
        scores = bend * (1.0 - 2.0 / (tl.exp2(2.0 * scores / softcap) + 1.0))
    return scores


@triton.jit
def online_softmax_update(scores, v, acc, largest, total):
    """Adds a tile to the online softmax: acc [queries, dim], largest and total [queries]."""
    peak = tl.maximum(largest, tl.max(scores, 1))
    # A row that has seen no key yet has no largest score to subtract.
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.exp2(scores - shift[:, None])
    fade = tl.exp2(largest - shift)
    total = total * fade + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return acc, peak, total


def store_kv(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, slots: Tensor) -> None:
    """Stores new_keys [T, kv_heads, key_dim] and new_values by slot; rows with a negative slot are not stored.

    keys, values: [num_blocks, kv_heads, block_size, dim]; uint8 for FP8
    """
    _, heads, block_size, key_dim = keys.shape
    value_dim = values.shape[-1]
    _store_kv_kernel[(len(slots),)](
        keys, values, new_keys, new_values, slots, *new_keys.stride()[:2], *new_values.stride()[:2], HEADS=heads,
        BLOCK_SIZE=block_size, KEY_DIM=key_dim, VALUE_DIM=value_dim, HEADS_TILE=power_of_2(heads),
        KEY_TILE=power_of_2(key_dim), VALUE_TILE=power_of_2(value_dim), **LAUNCH,
    )  # fmt: skip


@triton.jit
def _store_kv_kernel(
    keys, values, new_keys, new_values, slots, key_row, key_head, value_row, value_head, HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, HEADS_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr, VALUE_TILE: tl.constexpr,
):  # fmt: skip
    """One program stores one token."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        head = tl.arange(0, HEADS_TILE)
        there = (slot // BLOCK_SIZE * HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
        _store_heads(keys, new_keys + row * key_row, key_head, there, head, HEADS, KEY_DIM, KEY_TILE)
        _store_heads(values, new_values + row * value_row, value_head, there, head, HEADS, VALUE_DIM, VALUE_TILE)


@triton.jit
def _store_heads(cache, new, step, there, head, HEADS, DIM, TILE):
    column = tl.arange(0, TILE)
    kept = (head < HEADS)[:, None] & (column < DIM)[None, :]
    number = tl.load(new + head[:, None] * step + column[None, :], mask=kept)
    if cache.dtype.element_ty == tl.uint8:
        number = to_fp8(number)
    tl.store(cache + there[:, None] * DIM + column[None, :], number, mask=kept)


@triton.jit
def merge_splits(partials, sums, base, real, step, first, last, VALUE_DIM, VALUE_TILE, CHUNK):
    """[rows, VALUE_TILE] float32: partial results of the splits first to last, CHUNK of them at once, in their order.

    base: [rows] partial result of split 0; that of the next is `step` later. real: which rows exist
    """
    column = tl.arange(0, VALUE_TILE)[None, None, :]
    acc = tl.zeros([base.shape[0], VALUE_TILE], tl.float32)
    largest, total = tl.full([base.shape[0]], float("-inf"), tl.float32), tl.zeros([base.shape[0]], tl.float32)
    for place in range(first, last + 1, CHUNK):
        split = place + tl.arange(0, CHUNK)[:, None]
        there, row = real[None, :] & (split <= last), base[None, :] + split * step
        # Another multiprocessor may have written them during this launch, so they are not read from the L1 cache.
        weight = tl.load(sums + row, mask=there, other=float("-inf"), cache_modifier=".cg")
        of_part = partials + row[:, :, None] * VALUE_DIM + column
        part = tl.load(of_part, mask=there[:, :, None] & (column < VALUE_DIM), other=0.0, cache_modifier=".cg")
        peak = tl.maximum(largest, tl.max(weight, 0))
        # Of a chunk of tokens, a late one may see none of the first splits.
        shift = tl.where(peak == float("-inf"), 0.0, peak)
        weight, fade = tl.exp2(weight - shift[None, :]), tl.exp2(largest - shift)
        acc = acc * fade[:, None] + tl.sum(part * weight[:, :, None], 0)
        total = total * fade + tl.sum(weight, 0)
        largest = peak
    return acc / tl.where(real, total, 1.0)[:, None]


CHUNK = 16
"""Partial results that are merged at once: of one head of a token, or of several in the decode kernel."""

_MERGING_PROGRAMS = 8
"""On each multiprocessor, so that a captured launch may have room for many more merges than a step has."""


class Partials(NamedTuple):
    """Partial results of tokens [P], see `AttentionMetadata.sequences`.

    results  [P, query heads, value_dim] float32
    sums     [P, query heads] float32, logarithms to base 2 of the sums of weights
    """

    results: Tensor
    sums: Tensor

    @classmethod
    def empty(cls, metadata: AttentionMetadata, out: Tensor, window: int | None) -> Partials:
        """Room for the partial results of a layer; none if no sequence can have several splits in its window."""
        decode = metadata.decode
        split = metadata.prefill is not None or (decode is not None and decode.levels(window) > 1)
        shape = metadata.partials if split else 0, *out.shape[1:]
        return cls(out.new_empty(shape, dtype=torch.float32), out.new_empty(shape[:2], dtype=torch.float32))


def combine(
    out: Tensor, parts: Partials, metadata: AttentionMetadata, options: dict[str, Any], group: int, limits: DeviceLimits
) -> None:
    """Writes the rows of out [T, query heads, value_dim] of wide chunks that are split, and no other rows.

    Tiles of such a chunk lie in several programs of the prefill kernel, and each sees other splits.

    group: query heads that share a KV head
    """
    if metadata.prefill is None or not len(parts.results):
        return
    heads, value_dim = out.shape[1:]
    programs = min(len(metadata.merges) * heads, limits.multiprocessors * _MERGING_PROGRAMS)
    _combine_kernel[(programs,)](
        out, *parts, metadata.sequences, metadata.merges, metadata.num_merges, options["window"],
        IS_CHUNKED=options["IS_CHUNKED"], NARROW=narrow_rows(group) // group, HEADS=heads, VALUE_DIM=value_dim,
        VALUE_TILE=max(16, power_of_2(value_dim)), CHUNK=CHUNK, **LAUNCH,
    )  # fmt: skip


@triton.jit(do_not_specialize=["window"])
def _combine_kernel(
    out, partials, sums, sequences, merges, count, window, IS_CHUNKED: tl.constexpr, NARROW: tl.constexpr,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Merges the splits that a token sees, for a head. Program p of P takes pairs p, p + P, ...

    Chunks of up to NARROW tokens have their results already, and so have those whose window lies in one split.
    """
    for turn in range(tl.program_id(0), tl.load(count) * HEADS, tl.num_programs(0)):
        merge, head = merges + turn // HEADS * 2, turn % HEADS
        sequence, token = sequences + tl.load(merge) * 6, tl.load(merge + 1)
        length, tokens, size = tl.load(sequence + 1), tl.load(sequence + 2), tl.load(sequence + 4)
        begin = first_seen(length - tokens, window, IS_CHUNKED)
        if (tokens > NARROW) & (begin // size < (length - 1) // size):
            limit = length - tokens + 1 + token
            first = first_seen(limit - 1, window, IS_CHUNKED) // size
            last = (limit - 1) // size
            base = tl.zeros([1], tl.int64) + ((tl.load(sequence + 5) + token).to(tl.int64) * HEADS + head)
            real = tl.full([1], True, tl.int1)
            merged = merge_splits(partials, sums, base, real, tokens * HEADS, first, last, VALUE_DIM, VALUE_TILE, CHUNK)
            # Read again, so that these numbers need no registers meanwhile.
            target = tl.load(sequences + tl.load(merge) * 6) + tl.load(merge + 1)
            column = tl.arange(0, VALUE_TILE)[None, :]
            there = out + (target.to(tl.int64) * HEADS + head) * VALUE_DIM + column
            tl.store(there, merged.to(out.dtype.element_ty), mask=column < VALUE_DIM)
