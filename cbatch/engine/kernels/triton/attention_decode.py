"""Attention of decode rows: one query token each, over many cached tokens.

It takes as long as reading the cache. A fixed number of programs walk over a list of items, each a split of one
sequence for one KV head. All query heads that share the KV head form one tile. Whatever changes from step to step is
read on the device, so a captured launch is right for the next step.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbatch.engine.kernels.triton.attention_metadata import AttentionMetadata
from cbatch.engine.kernels.triton.attention_tile import (
    LAUNCH,
    cache_layout,
    kv_rows,
    load_kv,
    online_softmax_update,
    scaled_scores,
)
from cbatch.engine.kernels.triton.occupancy import KIB, DeviceLimits, resident_programs


class DecodeTuning(NamedTuple):
    """Tuning parameters. Only `split` and `tile_bytes` can change the bits of a result.

    split            tokens of a split: long enough that starting one is cheap, short enough that few rows fill a GPU
    tile_bytes       bytes of keys that a program reads at once: large enough for full cache lines, small enough that
                     several reads are in flight
    warps            warps of a program; they share the columns of a tile, whose rows are the heads of one group
    stages           depth of the pipeline. Finding a block, reading it and using it are separate stages, so 5 stages
                     have two tiles in flight, and 3 have one
    chunk            partial results that are merged at once
    """

    split: int = 512
    tile_bytes: int = 16384
    warps: int = 4
    stages: int = 5
    chunk: int = 16

    @classmethod
    def for_chip(cls, limits: DeviceLimits) -> DecodeTuning:
        """Smaller tiles if a multiprocessor's shared memory has room for only one program with the usual ones."""
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
        registers = getattr(kernel, "n_regs", None)
        if variant not in self._resident and registers:
            shared, warps = kernel.metadata.shared, kernel.metadata.num_warps
            self._resident[variant] = max(1, resident_programs(registers, shared, warps, self.limits))


def attend_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    metadata: AttentionMetadata,
    options: dict[str, Any],
    grid: DecodeGrid,
    tuning: DecodeTuning,
) -> None:
    """Writes the decode rows of out [T, query heads, value_dim], and no other rows.

    query         [T, query heads, key_dim], any strides between rows and heads
    keys, values  [num_blocks, kv_heads, block_size, dim]
    options       see `attend_arguments`
    grid          the number of programs. It does not depend on the rows of a step, except that there are never more
                  than the metadata can use
    """
    layer, decode = cache_layout(query, keys, values), metadata.decode
    if decode is None:
        return
    levels = len(decode.totals)
    if options["HAS_WINDOW"]:
        levels = min(levels, -(-(options["window"] - 1) // decode.split) + 1)
    heads, value_dim = out.shape[1:]
    num_parts = decode.partials if levels > 1 else 0
    partials = query.new_empty(num_parts, heads, value_dim, dtype=torch.float32)
    sums = query.new_empty(num_parts, heads, dtype=torch.float32)
    constants = {
        **layer, "ROWS": max(16, triton.next_power_of_2(layer["GROUP"])),
        "TOKENS": tuning.tile_tokens(layer["KEY_TILE"], keys.dtype), "num_warps": tuning.warps,
        "num_stages": tuning.stages, **LAUNCH,
    }  # fmt: skip
    forms = (options[name] for name in ("HAS_WINDOW", "HAS_SOFTCAP", "HAS_SINKS"))
    variant = query.dtype, keys.dtype, *forms, *constants.values()
    programs = min(grid.programs(variant), len(decode.items) * layer["KV_HEADS"])
    kernel = _decode_kernel[(programs,)](
        query, keys, values, out, partials, sums, metadata.sequences, decode.items, decode.totals, metadata.block_ids,
        levels, query.stride(0), query.stride(1), **options, **constants,
    )  # fmt: skip
    grid.launched(variant, kernel)
    if num_parts:
        _combine_kernel[(len(decode.merges), heads)](
            out, partials, sums, metadata.sequences, decode.merges, options["window"],
            HAS_WINDOW=options["HAS_WINDOW"], HEADS=heads, VALUE_DIM=value_dim, VALUE_TILE=layer["VALUE_TILE"],
            CHUNK=tuning.chunk, **LAUNCH,
        )  # fmt: skip


@triton.jit(do_not_specialize=["levels", "window"])
def _decode_kernel(
    query: tl.tensor, keys: tl.tensor, values: tl.tensor, out: tl.tensor, partials: tl.tensor, sums: tl.tensor,
    sequences: tl.tensor, items: tl.tensor, totals: tl.tensor, block_ids: tl.tensor, levels: tl.tensor,
    query_row: tl.tensor, query_head: tl.tensor, scale: tl.tensor, window: tl.tensor, softcap: tl.tensor,
    sinks: tl.tensor, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, KEY_TILE: tl.constexpr, VALUE_TILE: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:  # fmt: skip
    """Program p of P takes pairs p, p + P, ... of an item and a KV head. The heads of an item are neighbours."""
    work = tl.load(totals + levels - 1) * KV_HEADS
    for turn in range(tl.program_id(0), work, tl.num_programs(0)):
        item = items + turn // KV_HEADS * 2
        head = turn % KV_HEADS
        sequence = sequences + tl.load(item) * 6
        split, size = tl.load(item + 1), tl.load(sequence + 4)
        length = tl.load(sequence + 1)
        last = tl.maximum(length - 1, 0) // size
        seen = tl.maximum(length - window, 0) if HAS_WINDOW else 0
        first = seen // size
        begin, end = tl.maximum(split * size, seen), tl.minimum(split * size + size, length)
        result, log_sum = _attend_split(
            query + tl.load(sequence).to(tl.int64) * query_row, keys, values, block_ids + tl.load(sequence + 3), head,
            begin, end, split == first, query_head, scale, softcap, sinks, HAS_SOFTCAP, HAS_SINKS, KV_HEADS, GROUP,
            BLOCK_SIZE, KEY_DIM, VALUE_DIM, KEY_TILE, VALUE_TILE, ROWS, TOKENS,
        )  # fmt: skip
        member, column = tl.arange(0, ROWS), tl.arange(0, VALUE_TILE)
        row = head * GROUP + member
        # The list may have splits before the window, whose results are not stored.
        members = tl.where((begin < end) | (length == 0), GROUP, 0)
        kept = (member < members)[:, None] & (column < VALUE_DIM)[None, :]
        place = row[:, None] * VALUE_DIM + column[None, :]
        if first == last:
            there = out + tl.load(sequence).to(tl.int64) * (KV_HEADS * GROUP * VALUE_DIM)
            tl.store(there + place, result.to(out.dtype.element_ty), mask=kept)
        else:
            part = (tl.load(sequence + 5) + split).to(tl.int64) * (KV_HEADS * GROUP)
            tl.store(partials + part * VALUE_DIM + place, result, mask=kept)
            tl.store(sums + part + row, log_sum, mask=member < members)


@triton.jit
def _attend_split(
    query: tl.tensor, keys: tl.tensor, values: tl.tensor, block_ids: tl.tensor, head: tl.tensor, begin: tl.tensor,
    end: tl.tensor, is_first: tl.tensor, query_head: tl.tensor, scale: tl.tensor, softcap: tl.tensor, sinks: tl.tensor,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Attention of the query heads of one row over tokens begin .. end-1, and the logarithm of the sum of weights.

    The sinks take part in the first split only.
    """
    member, column = tl.arange(0, ROWS), tl.arange(0, KEY_TILE)
    row = head * GROUP + member
    present = (member < GROUP)[:, None] & (column < KEY_DIM)[None, :]
    q = tl.load(query + row[:, None] * query_head + column[None, :], mask=present, other=0.0)
    acc = tl.zeros([ROWS, VALUE_TILE], tl.float32)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + row, mask=member < tl.where(is_first, GROUP, 0), other=float("-inf")).to(tl.float32)
        largest = sink * 1.4426950408889634
        total = tl.where(largest == float("-inf"), 0.0, 1.0)
    for place in range(begin, end, TOKENS):
        tokens = place + tl.arange(0, TOKENS)
        there = tokens < end
        rows = kv_rows(block_ids, tokens, there, head, KV_HEADS, BLOCK_SIZE)
        k = load_kv(keys, rows, there, KEY_DIM, KEY_TILE, True)
        scores = scaled_scores(q, k, scale, softcap, HAS_SOFTCAP)
        scores = tl.where(there[None, :], scores, float("-inf"))
        v = load_kv(values, rows, there, VALUE_DIM, VALUE_TILE, True)
        acc, largest, total = online_softmax_update(scores, v, acc, largest, total)
    total = tl.where(total == 0, 1.0, total)  # padding
    return acc / total[:, None], largest + tl.log2(total)


@triton.jit(do_not_specialize=["window"])
def _combine_kernel(
    out: tl.tensor, partials: tl.tensor, sums: tl.tensor, sequences: tl.tensor, merges: tl.tensor, window: tl.tensor,
    HAS_WINDOW: tl.constexpr, HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_TILE: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """Merges the splits of one row and head, in their order. A row of one split has its result already."""
    number, head = tl.load(merges + tl.program_id(0)), tl.program_id(1)
    sequence = sequences + tl.maximum(number, 0) * 6
    length, size = tl.load(sequence + 1), tl.load(sequence + 4)
    last = tl.maximum(length - 1, 0) // size
    first = tl.maximum(length - window, 0) // size if HAS_WINDOW else 0
    if (number >= 0) & (first < last):
        column = tl.arange(0, VALUE_TILE)
        acc = tl.zeros([VALUE_TILE], tl.float32)
        largest, total = float("-inf"), 0.0
        base = tl.load(sequence + 5).to(tl.int64)
        for place in range(first, last + 1, CHUNK):
            split = place + tl.arange(0, CHUNK)
            row = (base + split) * HEADS + head
            weight = tl.load(sums + row, mask=split <= last, other=float("-inf"))
            kept = (split <= last)[:, None] & (column < VALUE_DIM)[None, :]
            part = tl.load(partials + row[:, None] * VALUE_DIM + column[None, :], mask=kept, other=0.0)
            peak = tl.maximum(largest, tl.max(weight, 0))
            weight = tl.exp2(weight - peak)
            fade = tl.exp2(largest - peak)
            acc = acc * fade + tl.sum(part * weight[:, None], 0)
            total = total * fade + tl.sum(weight, 0)
            largest = peak
        there = out + (tl.load(sequence).to(tl.int64) * HEADS + head) * VALUE_DIM + column
        tl.store(there, (acc / total).to(out.dtype.element_ty), mask=column < VALUE_DIM)
