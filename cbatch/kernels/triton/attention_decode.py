"""Attention of few query tokens over many cached ones: decode rows, and chunks whose tokens fit into one tile.

It takes as long as reading the cache. A fixed number of programs walk over a list of items, each a split of one
sequence for one KV head. All tokens of a sequence and all query heads that share the KV head form one tile. The program
that is the last to finish a split of a sequence merges all of them, always in their order. Whatever changes from step
to step is read on the device, so a captured launch is right for the next step.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbatch.kernels.triton.attention_metadata import AttentionMetadata
from cbatch.kernels.triton.attention_tile import (
    CHUNK,
    LAUNCH,
    Heads,
    Partials,
    cache_layout,
    early_launch,
    first_seen,
    kv_rows,
    load_kv,
    merge_splits,
    narrow_rows,
    online_softmax_update,
    power_of_2,
    scaled_scores,
    wait_for_last_launch,
)
from cbatch.kernels.triton.occupancy import KIB, DeviceLimits, resident_programs


class DecodeTuning(NamedTuple):
    """Tuning parameters. Only `split` and `tile_bytes` can change the bits of a result.

    split            tokens of the shortest split; see `split_tokens`
    tile_bytes       bytes of keys that a program reads at once: large enough for full cache lines, small enough that
                     several reads are in flight
    warps            warps of a program; they share the columns of a tile, whose rows are the heads of one group
    stages           depth of the pipeline. Finding a block, reading it and using it are separate stages: 5 stages have
                     two buffers, one tile in flight while another is used; 3 ask for a tile and wait for it at once
    """

    split: int = 256
    tile_bytes: int = 16384
    warps: int = 4
    stages: int = 5

    @classmethod
    def for_chip(cls, limits: DeviceLimits) -> DecodeTuning:
        """Smaller tiles if a multiprocessor's shared memory has room for only one program with the usual ones, and
        smaller ones still below 8.0, where tiles are multiplied in registers (see `PrefillTuning.fitted`).
        """
        if limits.capability < 80:
            return cls(tile_bytes=4096)
        return cls() if limits.shared >= 160 * KIB else cls(tile_bytes=8192)

    def tile_tokens(self, key_tile: int, dtype: torch.dtype) -> int:
        """Tokens of a tile, a power of 2, for heads of a padded size."""
        return min(max(16, self.tile_bytes // (key_tile * dtype.itemsize)), 128)


class DecodeGrid:
    """How many programs a launch has: as many as the device runs at once, by what their kernel takes.

    A kernel is known once it was launched; a launch before has two programs on each multiprocessor. Results do not
    depend on it.
    """

    def __init__(self, limits: DeviceLimits) -> None:
        self.limits = limits
        self._resident: dict[Hashable, int] = {}

    def programs(self, variant: Hashable) -> int:
        return self.limits.multiprocessors * self._resident.get(variant, 2)

    def launched(self, variant: Hashable, kernel: Any) -> None:
        """Learns from a `CompiledKernel` how many of its programs a multiprocessor runs; the interpreter has none."""
        if variant in self._resident:
            return
        if registers := getattr(kernel, "n_regs", None):
            shared, warps = kernel.metadata.shared, kernel.metadata.num_warps
            self._resident[variant] = max(1, resident_programs(registers, shared, warps, self.limits))


def max_registers(heads: Heads, has_window: bool, limits: DeviceLimits) -> dict[str, int]:
    """An option of the compiler: for a cache in 2 bytes, if it can save registers without spilling (168 let three
    programs of 4 warps run); for FP8, if the compiler would spill some of padded heads to save as many.
    """
    layer = cache_layout(heads)
    head, tile = max(heads.block[-1], heads.value_dim), max(layer["KEY_TILE"], layer["VALUE_TILE"])
    if not 64 < tile <= 128:
        return {}
    if heads.cache_dtype.itemsize == 1:
        return {"maxnreg": 208} if head < tile and limits.capability == 90 else {}
    fits = heads.cache_dtype.itemsize == 2 and not has_window and limits.capability >= 80
    return {"maxnreg": 168} if fits else {}


def attend_decode(
    query: Tensor, keys: Tensor, values: Tensor, out: Tensor, parts: Partials, metadata: AttentionMetadata, options:
    dict[str, Any], grid: DecodeGrid, tuning: DecodeTuning,
) -> None:  # fmt: skip
    """Writes the rows of out [T, query heads, value_dim] that belong to narrow chunks.

    query         [T, query heads, key_dim], any strides between rows and heads
    keys, values  [num_blocks, kv_heads, block_size, dim]; uint8 for FP8
    options       see `attend_arguments`
    grid          the number of programs. It does not depend on the rows of a step, except that there are never more
                  than the metadata can use
    """
    decode, heads = metadata.decode, Heads.of(query, keys, values)
    if decode is None:
        return
    levels, has_window = decode.levels(options["window"]), options["window"] is not None
    constants = _constants(heads, has_window, tuning, grid.limits)
    absent = tuple(option is None for option in options.values())
    variant = heads, options["IS_CHUNKED"], absent, tuning
    programs = min(grid.programs(variant), len(decode.items) * heads.block[0])
    kernel = _decode_kernel[(programs,)](
        query, keys, values, out, *parts, metadata.sequences, decode.items, decode.totals, metadata.block_ids,
        metadata.arrivals(heads.block[0]), levels, query.stride(0), query.stride(1), **options, **constants,
    )  # fmt: skip
    grid.launched(variant, kernel)


@cache
def _constants(heads: Heads, has_window: bool, tuning: DecodeTuning, limits: DeviceLimits) -> dict[str, Any]:
    layer = cache_layout(heads)
    return {
        **layer, "ROWS": narrow_rows(layer["GROUP"]), "MERGED": min(power_of_2(layer["GROUP"]), 4), "CHUNK": CHUNK,
        "TOKENS": tuning.tile_tokens(layer["KEY_TILE"], heads.dtype),
        "num_warps": tuning.warps, "num_stages": tuning.stages,
        **max_registers(heads, has_window, limits), **early_launch(limits.capability), **LAUNCH,
    }  # fmt: skip


@triton.jit(do_not_specialize=["levels", "window"])
def _decode_kernel(
    query, keys, values, out, partials, sums, sequences, items, totals, block_ids, arrivals, levels, query_row,
    query_head, scale, window, softcap, sinks, IS_CHUNKED: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr, ROWS: tl.constexpr, MERGED: tl.constexpr, TOKENS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program p of P takes pairs p, p + P, ... of an item and a KV head. The heads of an item are neighbours."""
    wait_for_last_launch()
    work = tl.load(totals + levels - 1) * KV_HEADS
    for turn in range(tl.program_id(0), work, tl.num_programs(0)):
        item = items + turn // KV_HEADS * 2
        head = turn % KV_HEADS
        sequence = sequences + tl.load(item) * 6
        split, size = tl.load(item + 1), tl.load(sequence + 4)
        length, count = tl.load(sequence + 1), tl.load(sequence + 2)
        # The first token of the chunk sees the tokens from here on.
        seen = first_seen(length - count, window, IS_CHUNKED)
        begin, end = tl.maximum(split * size, seen), tl.minimum(split * size + size, length)
        # The prefill kernel takes wider chunks, and the list may have splits before the window.
        rows = tl.where((begin < end) | (length == 0), count * GROUP, 0)
        rows = tl.where(count * GROUP <= ROWS, rows, 0)
        end = tl.where(rows > 0, end, begin)
        r, column = tl.arange(0, ROWS), tl.arange(0, VALUE_TILE)
        key_column = tl.arange(0, KEY_TILE)
        token, row = r // GROUP, head * GROUP + r % GROUP
        # Each token sees the tokens before this one.
        limit = tl.minimum(length - count + 1 + token, length)
        first_row = tl.load(sequence).to(tl.int64)
        there_is = (r < rows)[:, None] & (key_column < KEY_DIM)[None, :]
        of_query = query + first_row * query_row + token[:, None] * query_row + row[:, None] * query_head
        q = tl.load(of_query + key_column[None, :], mask=there_is, other=0.0)
        acc, total = tl.zeros([ROWS, VALUE_TILE], tl.float32), tl.zeros([ROWS], tl.float32)
        largest = tl.full([ROWS], float("-inf"), tl.float32)
        if sinks is not None:  # they take part in the first split that a token sees
            first = first_seen(limit - 1, window, IS_CHUNKED) // size
            sink = tl.load(sinks + row, mask=(r < rows) & (split == first), other=float("-inf")).to(tl.float32)
            largest = sink * 1.4426950408889634
            total = tl.where(largest == float("-inf"), 0.0, 1.0)
        blocks = block_ids + tl.load(sequence + 3)
        for key in range(begin, end, TOKENS):
            tokens = key + tl.arange(0, TOKENS)
            there = tokens < end
            cells = kv_rows(blocks, tokens, there, head, KV_HEADS, BLOCK_SIZE)
            k = load_kv(keys, cells, there, KEY_DIM, KEY_TILE, True, q.dtype)
            scores = scaled_scores(q, k, scale, softcap)
            visible = tokens[None, :] < tl.minimum(limit, end)[:, None]
            if window is not None:
                visible = visible & (tokens[None, :] >= first_seen(limit - 1, window, IS_CHUNKED)[:, None])
            scores = tl.where(visible, scores, float("-inf"))
            v = load_kv(values, cells, there, VALUE_DIM, VALUE_TILE, True, q.dtype)
            acc, largest, total = online_softmax_update(scores, v, acc, largest, total)
        total = tl.where(total == 0, 1.0, total)  # padding, and tokens that see none of these
        result, log_sum = acc / total[:, None], largest + tl.log2(total)
        kept = (r < rows)[:, None] & (column < VALUE_DIM)[None, :]
        place = token * (KV_HEADS * GROUP) + row
        first, last = seen // size, tl.maximum(length - 1, 0) // size
        if first == last:
            results = out + first_row * (KV_HEADS * GROUP * VALUE_DIM)
            tl.store(results + place[:, None] * VALUE_DIM + column[None, :], result.to(out.dtype.element_ty), mask=kept)
        elif rows > 0:
            part = (tl.load(sequence + 5) + split * count).to(tl.int64) * (KV_HEADS * GROUP)
            to = partials + part * VALUE_DIM
            tl.store(to + place[:, None] * VALUE_DIM + column[None, :], result, mask=kept)
            tl.store(sums + part + place, log_sum, mask=r < rows)
            tl.debug_barrier()  # all of the program has stored what the arrival announces
            arrived = arrivals + tl.load(item) * KV_HEADS + head
            if tl.atomic_add(arrived, 1) == last - first:
                _merge_rows(
                    out, partials, sums, sequence, rows, count, first, last, head, KV_HEADS, GROUP, VALUE_DIM,
                    VALUE_TILE, MERGED, CHUNK,
                )  # fmt: skip
                tl.store(arrived, 0)  # for the next launch


@triton.jit
def _merge_rows(
    out, partials, sums, sequence, rows, count, first, last, head, KV_HEADS, GROUP, VALUE_DIM, VALUE_TILE, MERGED, CHUNK
):
    """Writes the results of a tile whose splits are all done, MERGED rows at once, so that few splits are one read."""
    column = tl.arange(0, VALUE_TILE)[None, :]
    for begin in range(0, rows, MERGED):
        r = begin + tl.arange(0, MERGED)
        place = r // GROUP * (KV_HEADS * GROUP) + head * GROUP + r % GROUP
        base = tl.load(sequence + 5).to(tl.int64) * (KV_HEADS * GROUP) + place
        step = count * (KV_HEADS * GROUP)
        merged = merge_splits(partials, sums, base, r < rows, step, first, last, VALUE_DIM, VALUE_TILE, CHUNK // MERGED)
        to = out + (tl.load(sequence).to(tl.int64) * (KV_HEADS * GROUP) + place)[:, None] * VALUE_DIM + column
        tl.store(to, merged.to(out.dtype.element_ty), mask=(r < rows)[:, None] & (column < VALUE_DIM))
