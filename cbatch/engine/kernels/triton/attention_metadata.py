"""What the attention kernels read about a step: small int32 arrays, made in numpy and sent to the device in one copy.

A decode row is cut into splits of a fixed number of tokens, at fixed positions of its sequence, so its result has the
same bits in every batch. An item is one split of one sequence. Items are listed by their distance from the end of the
sequence: first the last split of every row, then the last but one, and so on. So a layer with a sliding window needs no
list of its own: its items are a prefix of the list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.engine.runtime.transfer import pack, packed_size, to_device, unpack

Ints = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class DecodeMetadata:
    """Decode rows, on the device.

    sequences  [S, 4] int32: row in the ragged batch, length including the row's own token (0 is padding), index of its
               first block in `block_ids`, and of its first partial result
    items      [capacity, 2] int32: sequence and split; entries after the last item are never read
    totals     [levels] int32: totals[k] items are at most k splits away from the end of their sequence
    block_ids  [P] int32
    partials   how many partial results there may be; 0 if no sequence has more than one split
    split      tokens of a split
    """

    sequences: Tensor
    items: Tensor
    totals: Tensor
    block_ids: Tensor
    partials: int
    split: int


@dataclass(slots=True)
class PrefillMetadata:
    """Chunks of several tokens.

    sequences  [S, 4] int32 on the device: first row in the ragged batch, first token, end of the chunk's tokens, and
               index of its first block in `block_ids`
    block_ids  [P] int32
    ranges     [S, 2] int32 on the host: first token and end of each chunk
    """

    sequences: Tensor
    block_ids: Tensor
    ranges: Ints
    _tiles: dict[int, Tensor] = field(default_factory=dict)

    def tiles(self, tokens: int) -> Tensor:
        """Tiles of that many tokens, [N, 2] int32 on the device: sequence, and first token within its chunk."""
        if tokens not in self._tiles:
            self._tiles[tokens] = to_device([list_query_tiles(self.ranges, tokens)], self.block_ids.device)[0]
        return self._tiles[tokens]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """What the layers of a step share. slots [T]: place of each token in the cache; negative: it is not stored."""

    slots: Tensor
    decode: DecodeMetadata | None
    prefill: PrefillMetadata | None


class DecodeSplits(NamedTuple):
    """Decode rows on the host, as `DecodeMetadata` has them on the device."""

    sequences: Ints
    items: Ints
    totals: Ints

    @property
    def partials(self) -> int:
        """The number of partial results: one for each split of a sequence that has several."""
        return len(self.items) - int(2 * self.totals[0] - self.totals[1]) if len(self.totals) > 1 else 0


def list_splits(rows: Ints, lengths: Ints, first_pages: Ints, split: int) -> DecodeSplits:
    """The splits of decode rows [S]. A row of length 0 has one split, which writes zeros."""
    splits = np.maximum(-(-lengths // split), 1)
    partials = np.where(splits > 1, splits, 0)
    sequences = np.stack([rows, lengths, first_pages, partials.cumsum() - partials], 1)
    counts = len(splits) - np.searchsorted(np.sort(splits), np.arange(splits.max()), side="right")
    totals = counts.cumsum()
    back = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(totals[-1]) - np.repeat(totals - counts, counts)
    sequence = np.argsort(-splits, kind="stable")[place]
    # The last splits have all sizes. Programs take items in turn, so neighbours in the list should be of similar size.
    sequence[: counts[0]] = np.argsort((splits - 1) * split - lengths, kind="stable")
    items = np.stack([sequence, splits[sequence] - 1 - back], 1)
    return DecodeSplits(sequences.astype(np.int32), items.astype(np.int32), totals.astype(np.int32))


def list_query_tiles(ranges: Ints, tokens: int) -> Ints:
    """Tiles of query tokens [N, 2], sequence and first token; those that see the most tokens come first."""
    counts = -(-(ranges[:, 1] - ranges[:, 0]) // tokens)
    sequence = np.repeat(np.arange(len(counts)), counts)
    first = (np.arange(len(sequence)) - np.repeat(counts.cumsum() - counts, counts)) * tokens
    order = np.argsort(-(ranges[sequence, 0] + first), kind="stable")
    return np.stack([sequence, first], 1)[order].astype(np.int32)


class DecodeBuffers:
    """Metadata of decode rows at fixed addresses, for a captured graph: `fill` gives it the rows of the next step.

    rows        rows of the graph
    max_blocks  limit of the blocks of one row
    max_tokens  limit of the tokens of all rows; None: every row may fill its blocks
    """

    def __init__(
        self,
        rows: int,
        max_blocks: int,
        block_size: int,
        split: int,
        device: torch.device,
        max_tokens: int | None = None,
    ) -> None:
        most = rows * max_blocks * block_size
        self.max_tokens = most if max_tokens is None else min(max_tokens, most)
        self.rows, self.max_blocks, self.block_size, self.split = rows, max_blocks, block_size, split
        self._levels = -(-max_blocks * block_size // split)
        items, block_ids = self.max_tokens // split + rows, self.max_tokens // block_size + rows
        # The block ids come last, so that a copy ends with those that are used.
        shapes: list[tuple[int, ...]] = [(rows, 4), (items, 2), (self._levels,), (rows,), (block_ids,)]
        self._room = [np.empty(shape, np.int32) for shape in shapes]
        self._packed = torch.zeros(packed_size(self._room), dtype=torch.uint8, device=device)
        sequences, listed, totals, slots, ids = unpack(self._packed, self._room)
        decode = DecodeMetadata(sequences, listed, totals, ids, 0 if self._levels == 1 else items, split)
        self.metadata = AttentionMetadata(slots, decode, None)
        self.fill(np.zeros((0, 1), np.int32), [])

    def holds(self, stops: Sequence[int]) -> bool:
        """Whether rows of these lengths fit."""
        longest = max(stops, default=0)
        fits = len(stops) <= self.rows and longest <= self.max_blocks * self.block_size
        return fits and sum(stops) <= self.max_tokens

    def fill(self, tables: Ints, stops: Sequence[int]) -> None:
        """Overwrites the metadata by one copy, on the current stream. Rows after the last are padding.

        tables: [S, B] int32 on the host, block ids of each row
        stops:  [S] lengths including the row's own token

        Raises ValueError if the rows do not fit.
        """
        if not self.holds(stops):
            raise ValueError(f"{len(stops)} rows of {sum(stops)} tokens do not fit into the buffers of a graph.")
        lengths = np.zeros(self.rows, np.int32)
        lengths[: len(stops)] = stops
        blocks = -(-lengths // self.block_size)
        work = list_splits(np.arange(self.rows), lengths, blocks.cumsum() - blocks, self.split)
        totals = np.pad(work.totals, (0, self._levels - len(work.totals)), mode="edge")
        block_ids = tables[np.arange(tables.shape[1]) < blocks[: len(stops), None]]
        arrays = [work.sequences, work.items, totals, self._slots(tables, lengths), block_ids]
        arrays = [array.astype(np.int32, copy=False) for array in arrays]
        filled = pack(arrays, self._room, pin=self._packed.device.type == "cuda")
        self._packed[: len(filled)].copy_(filled, non_blocking=True)

    def _slots(self, tables: Ints, lengths: Ints) -> Ints:
        """The place of each row's own token in the cache; negative for padding."""
        slots = np.full(self.rows, -1, np.int32)
        (real,) = np.nonzero(lengths)
        last = lengths[real] - 1
        slots[real] = tables[real, last // self.block_size] * self.block_size + last % self.block_size
        return slots


def build_metadata(
    slots: Tensor, tables: Tensor, starts: Sequence[int], stops: Sequence[int], split: int
) -> AttentionMetadata:
    """Metadata of a step. Chunks of one token are decode rows, longer ones prefill; those that end at 0 are padding.

    slots [T] and tables [S, B] int32 are on the device.
    """
    ends = np.array(stops, np.int32)
    counts = np.where(ends == 0, 1, ends - np.array(starts, np.int32))
    rows = counts.cumsum() - counts
    first_pages = np.arange(len(ends)) * tables.shape[1]
    block_ids = tables.contiguous().view(-1)
    one = counts == 1
    arrays: list[Ints] = []
    if one.any():
        work = list_splits(rows[one], ends[one], first_pages[one], split)
        arrays += work
    if not one.all():
        ranges = np.stack([ends - counts, ends], 1)[~one]
        arrays.append(np.stack([rows[~one], ranges[:, 0], ranges[:, 1], first_pages[~one]], 1).astype(np.int32))
    there = to_device(arrays, tables.device)
    decode = DecodeMetadata(there[0], there[1], there[2], block_ids, work.partials, split) if one.any() else None
    prefill = None if one.all() else PrefillMetadata(there[-1], block_ids, ranges.astype(np.int32))
    return AttentionMetadata(slots, decode, prefill)
