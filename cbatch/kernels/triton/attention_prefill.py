"""Attention of chunks of prompts, over themselves and the part of the prompt that is cached already.

A program takes a tile of query tokens with all query heads that share a KV head, and walks over the tokens before them,
or over a split of them, with the online softmax. Tiles of keys that all of its queries see are not masked.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbatch.kernels.triton.attention_metadata import AttentionMetadata
from cbatch.kernels.triton.attention_tile import (
    LAUNCH,
    Heads,
    Partials,
    cache_layout,
    find_tile,
    first_seen,
    kv_rows,
    load_kv,
    narrow_rows,
    online_softmax_update,
    power_of_2,
    scaled_scores,
)
from cbatch.kernels.triton.occupancy import KIB, DeviceLimits


class PrefillTuning(NamedTuple):
    """Tuning parameters.

    rows           rows of a query tile, tokens times heads: each key is read once for all of them
    tokens         keys of a tile
    warps          warps of a program
    stages         depth of the pipeline. Finding a block, reading it and using it are separate stages: with fewer than
                   5, the next tile is only read when the one before was used
    """

    rows: int = 128
    tokens: int = 64
    warps: int = 8
    stages: int = 5

    def fitted(
        self, head_tile: int, dtype: torch.dtype, cache_dtype: torch.dtype, group: int, limits: DeviceLimits, *,
        has_window: bool = False,
    ) -> PrefillTuning:  # fmt: skip
        """Parameters for heads of a padded size in a type on a chip, so that tiles fit into a multiprocessor.

        The matrix units of 9.0 and 10.0 read operands from shared memory; those of 8.x and 12.0 take all of them from
        registers, which would overflow: tiles are smaller there, and smaller still with windows, which take masks.
        Without matrix units tiles are the smallest: in float32, and below 8.0, where Triton does not use them. To
        convert FP8 takes registers too, and a tile of it needs twice as many keys for each thread to read 16 bytes at
        once.
        """
        is_fp8 = cache_dtype.itemsize == 1
        if dtype == torch.float32 or limits.capability < 80:
            rows, tokens, stages = min(self.rows, 32), self.tokens // 4, min(self.stages, 2)
            rows = min(rows, 16) if group >= 8 and 64 < head_tile <= 128 else rows
            tokens *= 2 if is_fp8 and head_tile <= 64 else 1
            warps = min(self.warps, 4 if head_tile <= 128 else 8)
        else:
            rows, tokens, warps, stages = self
            if not 90 <= limits.capability < 120:
                rows = min(rows, 64) if head_tile > (64 if has_window else 128) else rows
                tokens = min(tokens, 32) if head_tile > 64 else tokens
                if head_tile > 128 and is_fp8:
                    rows = min(rows, 32)
                elif head_tile > 128 and limits.shared_of_block < 128 * KIB:
                    tokens = min(tokens, 16)
            elif head_tile > 128:
                tokens //= 2
            if head_tile > 256:
                most = {100: 64, 120: 16}.get(limits.capability, 32)
                rows, tokens = min(rows, 16 if is_fp8 else most), 16
        return PrefillTuning(max(rows, power_of_2(group)), max(16, tokens), warps, stages)


def attend_prefill(
    query: Tensor, keys: Tensor, values: Tensor, out: Tensor, parts: Partials, metadata: AttentionMetadata, options:
    dict[str, Any], tuning: PrefillTuning, limits: DeviceLimits,
) -> None:  # fmt: skip
    """Writes the rows of out [T, query heads, value_dim] or of the partial results that belong to wider chunks.

    query         [T, query heads, key_dim], any strides between rows and heads
    keys, values  [num_blocks, kv_heads, block_size, dim]; uint8 for FP8
    options       see `attend_arguments`
    """
    prefill = metadata.prefill
    if prefill is None:
        return
    heads, has_window = Heads.of(query, keys, values), options["window"] is not None
    constants = _constants(heads, has_window, prefill.whole, tuning, limits)
    tiles = prefill.max_tiles(constants["ROWS"] // constants["GROUP"])
    _prefill_kernel[(tiles * constants["KV_HEADS"],)](
        query, keys, values, out, *parts, prefill.pieces, prefill.count, metadata.sequences, metadata.block_ids,
        query.stride(0), query.stride(1), **options, **constants,
    )  # fmt: skip


@cache
def _constants(
    heads: Heads, has_window: bool, takes_all: bool, tuning: PrefillTuning, limits: DeviceLimits
) -> dict[str, Any]:
    layer = cache_layout(heads)
    head_tile = max(layer["KEY_TILE"], layer["VALUE_TILE"])
    tuning = tuning.fitted(head_tile, heads.dtype, heads.cache_dtype, layer["GROUP"], limits, has_window=has_window)
    return {
        **layer, "NARROW": 0 if takes_all else narrow_rows(layer["GROUP"]), "ROWS": tuning.rows,
        "TOKENS": tuning.tokens, "MASKS_ALL": takes_all,
        "READS_SHARED": tuning.rows >= 64 and 100 <= limits.capability < 120, "num_warps": tuning.warps,
        "num_stages": tuning.stages, **LAUNCH,
    }  # fmt: skip


@triton.jit(do_not_specialize=["window"])
def _prefill_kernel(
    query, keys, values, out, partials, sums, pieces, count, sequences, block_ids, query_row, query_head, scale, window,
    softcap, sinks, IS_CHUNKED: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_TILE: tl.constexpr, VALUE_TILE: tl.constexpr,
    NARROW: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, MASKS_ALL: tl.constexpr, READS_SHARED: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one KV head: row r holds query head r % GROUP of token r // GROUP.

    MASKS_ALL: which tiles of keys need no mask depends on all queries of the tile, and a compiler may round without a
    mask as it does not with one. A mask changes nothing for a token that sees the tile, and a tile that it does not see
    adds exact zeros: so a token has the same bits whichever queries share its tile.
    """
    head = tl.program_id(0) % KV_HEADS
    # A piece has one tile more at most than its tokens need.
    piece, number = find_tile(pieces + 2, 3, 1, tl.load(count), tl.program_id(0) // KV_HEADS, ROWS // GROUP)
    if piece < 0:
        return
    sequence, split = sequences + tl.load(pieces + piece * 3) * 6, tl.load(pieces + piece * 3 + 1)
    length, num_tokens, size = tl.load(sequence + 1), tl.load(sequence + 2), tl.load(sequence + 4)
    begin = (tl.cdiv(num_tokens, ROWS // GROUP) - 1 - number) * (ROWS // GROUP)
    if (begin < 0) | (num_tokens * GROUP <= NARROW):
        return
    start, end = length - num_tokens, tl.minimum(begin + ROWS // GROUP, num_tokens)
    low = split * size
    high = tl.minimum(low + size, length)
    seen = first_seen(start, window, IS_CHUNKED)
    if (split < seen // size) | (low >= start + end):
        return  # no token of the tile sees this split
    r, column = tl.arange(0, ROWS), tl.arange(0, KEY_TILE)
    token, q_head = begin + r // GROUP, head * GROUP + r % GROUP
    row, real = (tl.load(sequence) + token).to(tl.int64), token < end
    place = query + row[:, None] * query_row + q_head[:, None] * query_head + column[None, :]
    q = tl.load(place, mask=real[:, None] & (column < KEY_DIM)[None, :], other=0.0)
    position = start + tl.minimum(token, end - 1)
    acc, total = tl.zeros([ROWS, VALUE_TILE], tl.float32), tl.zeros([ROWS], tl.float32)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    if sinks is not None:  # they take part in the first split that a token sees
        first = first_seen(position, window, IS_CHUNKED) // size
        largest = tl.load(sinks + q_head).to(tl.float32) * 1.4426950408889634
        largest, total = tl.where(split == first, largest, float("-inf")), tl.where(split == first, 1.0, 0.0)
    # Tiles at the start of the window, tiles that all queries see in full, and tiles at the end; all within the split.
    stop, whole = start + end, (start + begin + 1) // TOKENS * TOKENS
    visited = first_seen(start + begin, window, IS_CHUNKED) // TOKENS * TOKENS
    shared = tl.cdiv(first_seen(stop - 1, window, IS_CHUNKED), TOKENS) * TOKENS
    stop, whole = tl.minimum(stop, high), tl.maximum(tl.minimum(whole, high), low)
    visited, shared = tl.maximum(visited, low), tl.maximum(tl.minimum(shared, whole), low)
    if MASKS_ALL:
        whole = visited
    edges = (visited, shared, whole, stop)
    blocks = block_ids + tl.load(sequence + 3)
    for phase in tl.static_range(2 if MASKS_ALL else (1 if window is None else 0), 3):
        for key in range(edges[phase], edges[phase + 1], TOKENS):
            tokens = key + tl.arange(0, TOKENS)
            there = tokens < stop
            rows = kv_rows(blocks, tokens, there, head, KV_HEADS, BLOCK_SIZE)
            k = load_kv(keys, rows, there, KEY_DIM, KEY_TILE, phase != 1, q.dtype, READS_SHARED)
            scores = scaled_scores(q, k, scale, softcap)
            if phase != 1:
                sees = tokens[None, :] <= position[:, None]
                if window is not None:
                    sees = sees & (tokens[None, :] >= first_seen(position, window, IS_CHUNKED)[:, None])
                scores = tl.where(sees, scores, float("-inf"))
            v = load_kv(values, rows, there, VALUE_DIM, VALUE_TILE, phase != 1, q.dtype, READS_SHARED)
            acc, largest, total = online_softmax_update(scores, v, acc, largest, total)
    total = tl.where(total == 0, 1.0, total)  # tokens that see nothing of the split
    column = tl.arange(0, VALUE_TILE)
    kept = real[:, None] & (column < VALUE_DIM)[None, :]
    if seen // size == (length - 1) // size:
        place = out + (row[:, None] * (KV_HEADS * GROUP) + q_head[:, None]) * VALUE_DIM + column[None, :]
        tl.store(place, (acc / total[:, None]).to(out.dtype.element_ty), mask=kept)
    else:
        part = (tl.load(sequence + 5) + split * num_tokens + token).to(tl.int64) * (KV_HEADS * GROUP) + q_head
        tl.store(partials + part[:, None] * VALUE_DIM + column[None, :], acc / total[:, None], mask=kept)
        tl.store(sums + part, largest + tl.log2(total), mask=real)
