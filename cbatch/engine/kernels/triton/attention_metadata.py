"""What the attention kernels read about a step: small integer arrays, made in numpy and sent to the device in one copy.

Each sequence of a step brings a chunk of tokens. A sequence is cut into splits at fixed places that depend on nothing
but itself (`split_tokens`), so its results have the same bits in every batch.

Decode rows are listed split by split. These items are ordered by their distance from the end of their sequence: first
the last split of every sequence, then the last but one, and so on. So a layer with a sliding window needs no list of
its own: its items are a prefix of the list.

Chunks of several tokens are cut into tiles of queries, whose size depends on the heads of a layer. No list has them:
a program finds its tile by itself, from the number of tokens before each chunk. So the metadata of a step serves every
layer, and a captured launch finds all that changes at fixed addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.engine.runtime.batch import RaggedBatch
from cbatch.engine.runtime.device import pins_memory
from cbatch.engine.runtime.transfer import pack, packed_size, to_device, unpack

Ints = NDArray[np.integer[Any]]

WHOLE = 1 << 30
"""Tokens of a split of a sequence that is not cut."""


@dataclass(frozen=True, slots=True)
class DecodeMetadata:
    """Decode rows, on the device.

    items     [capacity, 2] int32: sequence and split; entries after the last item are never read
    totals    [levels] int32: totals[k] items are at most k splits away from the end of their sequence
    merges    [capacity] int32: sequences that may have several splits, whose results are merged; -1: none
    partials  how many partial results there may be; 0 if no sequence has more than one split
    split     tokens of the shortest split
    """

    items: Tensor
    totals: Tensor
    merges: Tensor
    partials: int
    split: int


@dataclass(frozen=True, slots=True)
class PrefillMetadata:
    """Chunks of several tokens, on the device.

    pieces      [capacity, 2] int32: sequence, and the number of tokens in all pieces before
    count       [1] int32: the number of pieces
    max_tokens  how many tokens all pieces may have
    """

    pieces: Tensor
    count: Tensor
    max_tokens: int

    def max_tiles(self, tokens: int) -> int:
        """How many tiles of that many tokens there may be: the first of piece i is i + (tokens before) // tokens."""
        return self.max_tokens // tokens + len(self.pieces)


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """What the layers of a step share, on the device.

    slots      [T] place of each token in the cache; negative: it is not stored
    sequences  [S, 6] int32: first row in the ragged batch, length including the tokens of the step (0 is padding), how
               many tokens the step has of it, index of its first block in `block_ids`, tokens of a split, and index of
               its first partial result
    block_ids  [P] int32
    """

    slots: Tensor
    sequences: Tensor
    block_ids: Tensor
    decode: DecodeMetadata | None
    prefill: PrefillMetadata | None


class Work(NamedTuple):
    """Sequences on the host, as `AttentionMetadata`, `DecodeMetadata` and `PrefillMetadata` have them on the device."""

    sequences: Ints
    items: Ints
    totals: Ints
    merges: Ints
    pieces: Ints
    partials: int


def split_tokens(counts: Ints, lengths: Ints, split: int) -> Ints:
    """Tokens of a split of each sequence, from its length and from the number of its tokens in the step."""
    return np.where(counts == 1, split, WHOLE)


def list_work(counts: Ints, lengths: Ints, first_pages: Ints, split: int) -> Work:
    """The work of sequences [S] of these lengths, of which the last `counts` tokens are computed.

    A sequence of length 0 has one decode row, for which zeros are written.
    """
    size = split_tokens(counts, lengths, split)
    splits = np.maximum(-(-lengths // size), 1)
    results = np.where(splits > 1, splits * counts, 0)
    first_rows = counts.cumsum() - counts
    sequences = np.stack([first_rows, lengths, counts, first_pages, size, results.cumsum() - results], 1)
    (decoding,) = np.nonzero(counts == 1)
    items, totals = list_items(decoding, splits[decoding], lengths[decoding] - (splits[decoding] - 1) * split)
    (chunks,) = np.nonzero(counts > 1)
    # Programs start in the order of the list: what takes longest begins first.
    chunks = chunks[np.argsort(-lengths[chunks], kind="stable")]
    before = counts[chunks].cumsum() - counts[chunks]
    pieces = np.stack([chunks, before], 1)
    (merges,) = np.nonzero(results)
    return Work(sequences, items, totals, merges, pieces, int(results.sum()))


def list_items(sequences: Ints, splits: Ints, last: Ints) -> tuple[Ints, Ints]:
    """The items of sequences with so many splits, the last of so many tokens, and the totals of their levels."""
    if not len(sequences):
        return np.empty((0, 2), np.int32), np.zeros(1, np.int32)
    counts = len(splits) - np.searchsorted(np.sort(splits), np.arange(splits.max()), side="right")
    totals = counts.cumsum()
    back = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(totals[-1]) - np.repeat(totals - counts, counts)
    chosen = np.argsort(-splits, kind="stable")[place]
    # The last splits have all sizes. Programs take items in turn, so neighbours in the list should be of similar size.
    chosen[: counts[0]] = np.argsort(-last, kind="stable")
    return np.stack([sequences[chosen], splits[chosen] - 1 - back], 1), totals


class StepBuffers:
    """The inputs and the metadata of a step at fixed addresses, for a captured graph; `fill` gives them the next step.

    All of it comes to the device in one copy.

    input_ids     [tokens] int64, tokens; 0 for padding
    position_ids  [tokens] int64, position of each token in its sequence
    logit_rows    [sequences] int64, which of the tokens need logits; 0 after the last one
    metadata      its `slots` [tokens] are negative for padding, which belongs to no sequence
    """

    def __init__(
        self,
        tokens: int,
        sequences: int,
        max_blocks: int,
        block_size: int,
        split: int,
        device: torch.device,
        max_tokens: int | None = None,
        *,
        decode_only: bool,
    ) -> None:
        """See `CapturableAttention.graph_buffers`."""
        most = sequences * max_blocks * block_size
        self.max_tokens = most if max_tokens is None else min(max_tokens, most)
        self.tokens, self.max_sequences, self.decode_only = tokens, sequences, decode_only
        self.max_blocks, self.block_size, self.split = max_blocks, block_size, split
        self._levels = -(-max_blocks * block_size // split)
        items, block_ids = self.max_tokens // split + sequences, self.max_tokens // block_size + sequences
        pieces = 0 if decode_only else min(sequences, tokens // 2)
        # The block ids come last, so that a copy ends with those that are used.
        numbers: list[tuple[int, ...]] = [(tokens,), (sequences, 6), (items, 2), (self._levels,), (sequences,)]
        numbers += [(pieces, 2), (1,), (block_ids,)]
        self._room: list[Ints] = [np.empty(size, np.int64) for size in (tokens, tokens, *[sequences] * 3)]
        self._room += [np.empty(shape, np.int32) for shape in numbers]
        self._packed = torch.zeros(packed_size(self._room), dtype=torch.uint8, device=device)
        self.input_ids, self.position_ids, self.logit_rows, *rest = unpack(self._packed, self._room)
        self._unknown_places, self._unknown_rows, slots, records, listed, totals, merges, begins, count, ids = rest
        decode = DecodeMetadata(listed, totals, merges, 0 if self._levels == 1 else items, split)
        prefill = None if decode_only else PrefillMetadata(begins, count, tokens)
        self.metadata = AttentionMetadata(slots, records, ids, decode, prefill)
        none = np.zeros(0, np.int64)
        self.fill(RaggedBatch(none, none, none, none, np.zeros((0, 1), np.int32), [], [], device))

    @property
    def slots(self) -> Tensor:
        return self.metadata.slots

    def holds(self, batch: RaggedBatch) -> bool:
        """Whether a step fits."""
        sequences, stops = len(batch.stops), batch.stops
        if self.decode_only and len(batch.ids) != sequences:
            return False
        fits = sequences <= self.max_sequences and len(batch.ids) <= self.tokens
        fits = fits and len(batch.rows) <= self.max_sequences
        return fits and max(stops, default=0) <= self.max_blocks * self.block_size and sum(stops) <= self.max_tokens

    def fill(self, batch: RaggedBatch) -> None:
        """Overwrites the buffers with a step by one copy, on the current stream.

        Tokens that only the device knows are gathered there.

        Raises ValueError if the step does not fit.
        """
        if not self.holds(batch):
            raise ValueError(
                f"{len(batch.stops)} sequences of {sum(batch.stops)} tokens do not fit into the buffers of a graph."
            )
        lengths: Ints = np.array(batch.stops, np.int64)
        counts: Ints = lengths - np.array(batch.starts, np.int64)
        if self.decode_only:  # sequences after the last are padding
            counts, lengths = np.ones(self.max_sequences, np.int64), padded(lengths, self.max_sequences)
        blocks = -(-lengths // self.block_size)
        work = list_work(counts, lengths, blocks.cumsum() - blocks, self.split)
        block_ids = batch.tables[np.arange(batch.tables.shape[1]) < blocks[: len(batch.stops), None]]
        unknown = batch.device_tokens
        none = np.zeros(0, np.int64)
        arrays = [
            padded(batch.ids, self.tokens), padded(batch.positions, self.tokens),
            padded(batch.rows, self.max_sequences), none if unknown is None else unknown.places,
            none if unknown is None else unknown.rows, padded(batch.slots, self.tokens, -1), work.sequences,
            work.items, np.pad(work.totals, (0, self._levels - len(work.totals)), mode="edge"),
            padded(work.merges, self.max_sequences, -1), work.pieces, np.array([len(work.pieces)]), block_ids,
        ]  # fmt: skip
        arrays = [array.astype(room.dtype, copy=False) for array, room in zip(arrays, self._room, strict=True)]
        filled = pack(arrays, self._room, pin=pins_memory(self._packed.device))
        self._packed[: len(filled)].copy_(filled, non_blocking=True)
        if unknown is not None:
            places, rows = (part[: len(unknown.rows)] for part in (self._unknown_places, self._unknown_rows))
            self.input_ids.index_copy_(0, places, unknown.tokens.index_select(0, rows))


def padded(values: Ints, size: int, padding: int = 0) -> Ints:
    """The values, then the padding, `size` in all."""
    result = np.full(size, padding, values.dtype)
    result[: len(values)] = values
    return result


def build_metadata(
    slots: Tensor, tables: Tensor, starts: Sequence[int], stops: Sequence[int], split: int
) -> AttentionMetadata:
    """Metadata of a step. Chunks of one token are decode rows, longer ones prefill; those that end at 0 are padding.

    slots [T] and tables [S, B] int32 are on the device.
    """
    lengths = np.array(stops, np.int64)
    counts = np.where(lengths == 0, 1, lengths - np.array(starts, np.int64))
    work = list_work(counts, lengths, np.arange(len(lengths)) * tables.shape[1], split)
    arrays = [work.sequences, work.items, work.totals, work.merges, work.pieces, np.array([len(work.pieces)])]
    there = to_device([array.astype(np.int32) for array in arrays], tables.device)
    sequences, items, totals, merges, pieces, count = there
    decode = DecodeMetadata(items, totals, merges, work.partials, split) if len(items) else None
    prefill = PrefillMetadata(pieces, count, int(counts[counts > 1].sum())) if len(pieces) else None
    return AttentionMetadata(slots, sequences, tables.contiguous().view(-1), decode, prefill)
