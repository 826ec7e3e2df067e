"""Metadata of a step for the attention kernels: small integer arrays, made in numpy and sent in one copy.

Each sequence of a step brings a chunk of tokens. Its keys are cut into splits at fixed places that depend on nothing
but itself (`split_tokens`), so its results have the same bits in every batch. Each split gives a partial result for
each token of the chunk. The decode kernel merges its own; a kernel of its own merges those of the prefill kernel.

Which kernel takes a chunk depends on the heads of a layer: the decode kernel takes chunks whose tokens fill one tile,
the prefill kernel the others. Short chunks are in the lists of both, and each kernel passes over what the other takes.
So the metadata of a step serves every layer, and a captured launch finds all that changes at fixed addresses.

The decode kernel has a list of items, each a split of a sequence. They are ordered by their distance from the end of
their sequence: first the last split of every sequence, then the last but one, and so on. So a layer with a sliding
window needs no list of its own: its items are a prefix of the list.

The prefill kernel has a list of pieces: splits of chunks of several tokens. It cuts them into tiles of queries, whose
size depends on the layer. No list has the tiles: a program finds its own from the number of tokens before each piece.

The splits of a chunk depend on its length, and the two kernels round differently. So a token may have other bits if its
sequence is cut into other chunks. If work is `whole`, nothing is split, and the prefill kernel takes every chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.transfer import FixedTensors, padded, to_device

Ints = NDArray[np.integer[Any]]

WHOLE = 1 << 30
"""Tokens of a split of a sequence that is not cut."""
NARROW = 16
"""Tokens of the longest chunk that the decode kernel takes in any layer."""
SHORT = 128
"""Tokens of the longest chunk that is split."""
SPARE_TOKENS, SPARE_PIECES = 4096, 64
"""Room in the buffers of a mixed step for what splits add: 16 turns of chats, 64 tokens in 5 splits each, and so on."""


@dataclass(frozen=True, slots=True)
class DecodeMetadata:
    """Items of the decode kernel, on the device.

    items      [capacity, 2] int32: sequence and split; entries after the last item are never read
    totals     [levels] int32: totals[k] items are at most k splits away from the end of their sequence
    split      tokens of the shortest split
    max_count  most tokens of a chunk in the list
    """

    items: Tensor
    totals: Tensor
    split: int
    max_count: int

    def levels(self, window: int | None) -> int:
        """How many of the totals a layer with this window needs."""
        seen = len(self.totals)
        return seen if window is None else min(seen, -(-(window + self.max_count - 2) // self.split) + 1)


@dataclass(frozen=True, slots=True)
class PrefillMetadata:
    """Pieces of the prefill kernel, on the device.

    pieces      [capacity, 3] int32: sequence, split, and the number of tokens in all pieces before
    count       [1] int32: the number of pieces
    max_tokens  how many tokens all pieces may have
    whole       every chunk is here, as long as it is; see `list_work`
    """

    pieces: Tensor
    count: Tensor
    max_tokens: int
    whole: bool = False

    def max_tiles(self, tokens: int) -> int:
        """How many tiles of that many tokens there may be: the first of piece i is i + (tokens before) // tokens."""
        return self.max_tokens // tokens + len(self.pieces)


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Metadata that the layers of a step share, on the device.

    slots      [T] place of each token in the cache; negative: it is not stored
    sequences  [S, 6] int32: first row in the ragged batch, length including the tokens of the step (0 is padding), how
               many tokens the step has of it, index of its first block in `block_ids`, tokens of a split, and index of
               its first partial result: that of split s and token t is s * tokens + t later
    block_ids  [P] int32
    merges     [capacity, 2] int32: sequence and token, for each token of a chunk of several that has several splits
    num_merges [1] int32: how many of them there are
    partials   how many partial results there may be; 0 if no sequence has more than one split
    """

    slots: Tensor
    sequences: Tensor
    block_ids: Tensor
    merges: Tensor
    num_merges: Tensor
    partials: int
    decode: DecodeMetadata | None
    prefill: PrefillMetadata | None
    _arrivals: dict[int, Tensor] = field(default_factory=dict, init=False)

    def arrivals(self, kv_heads: int) -> Tensor:
        """[S, kv_heads] int32 zeros, in which the decode kernel counts splits that are done, and leaves zeros."""
        if kv_heads not in self._arrivals:
            self._arrivals[kv_heads] = self.sequences.new_zeros(len(self.sequences), kv_heads)
        return self._arrivals[kv_heads]


class Work(NamedTuple):
    """Sequences on the host, as `AttentionMetadata`, `DecodeMetadata` and `PrefillMetadata` have them on the device."""

    sequences: Ints
    items: Ints
    totals: Ints
    merges: Ints
    pieces: Ints
    partials: int
    piece_tokens: int

    @property
    def arrays(self) -> list[Ints]:
        """All that the kernels read, in the order in which buffers have it."""
        merges, pieces = (np.array([len(part)]) for part in (self.merges, self.pieces))
        return [self.sequences, self.items, self.totals, self.merges, merges, self.pieces, pieces]


def split_tokens(counts: Ints, lengths: Ints, unit: int) -> Ints:
    """Tokens of a split of each sequence, from its length and from the number of its tokens in the step.

    A partial result is written and read once: 8 bytes for each of n * group * dim numbers of n tokens, beside 4 * dim
    bytes in 16-bit types for each of the L tokens of a split. So it costs 2 * n * group / L of the bytes of keys and
    values. By this arithmetic, with a unit of 256, groups of 4 and 8 KV heads:

    - A decode row of up to 4,096 tokens is cut every 256, one of up to 8,192 every 384, a longer one every 512: 3.1%,
      2.1% and 1.6%; 2.8% for 256 rows of 256 to 8,192 tokens. A single row of 4,096 tokens is 128 programs, one for
      each multiprocessor of a large GPU; a split of 128 tokens would cost 6%.
    - A chunk of 20 tokens behind 32,768 is one tile for each KV head, so 8 programs would read its past alone. Split
      every 1,280, at 12.5%, there are 208. Longer chunks have more work for each byte, and more tiles: up to 128 tokens
      are split every 2,048 or more, and longer ones, 40 programs at least, are not.
    - Partial results have to fit into memory: a chunk of several tokens has at most 32 splits, and 16 above 32 tokens.
    """
    decode: Ints = unit + unit // 2 * ((lengths > 16 * unit).astype(np.int64) + (lengths > 32 * unit))
    if counts.max(initial=1) == 1:
        return decode
    few = counts <= 32
    even = -(-lengths // (np.where(few, 32, 16) * unit)) * unit
    chunk = np.maximum(even, unit * np.where(few, np.where(counts <= NARROW, 2, 4), 8))
    return np.where(counts == 1, decode, np.where(counts <= SHORT, chunk, WHOLE))


def count_splits(counts: Ints, lengths: Ints, unit: int) -> tuple[Ints, Ints]:
    """The tokens of a split of each sequence, and the number of its splits; a sequence of length 0 has one."""
    size = split_tokens(counts, lengths, unit)
    return size, np.maximum(-(-lengths // size), 1)


def list_work(counts: Ints, lengths: Ints, first_blocks: Ints, unit: int, *, whole: bool = False) -> Work:
    """The work of sequences [S] of these lengths, of which the last `counts` tokens are computed.

    A sequence of length 0 has one decode row, for which zeros are written; none if work is whole.

    first_blocks: [S] index of the first block of each in `block_ids`
    whole:        no sequence is split, and the prefill kernel takes every chunk
    """
    uncut = np.full_like(lengths, WHOLE), np.ones_like(lengths)
    size, splits = uncut if whole else count_splits(counts, lengths, unit)
    is_split = splits > 1
    results = splits * counts * is_split
    ends = results.cumsum()
    sequences = in_columns(counts.cumsum() - counts, lengths, counts, first_blocks, size, ends - results)
    (narrow,) = (counts <= (0 if whole else NARROW)).nonzero()
    last = (lengths - (splits - 1) * size)[narrow]
    items, totals = list_items(narrow, splits[narrow], last)
    (merged,) = (is_split & (counts > 1)).nonzero()
    merges = in_columns(merged.repeat(counts[merged]), positions_in(counts[merged]))
    (wide,) = (lengths > 0 if whole else counts > 1).nonzero()
    pieces, piece_tokens = list_pieces(wide, counts, lengths, size, splits)
    return Work(sequences, items, totals, merges, pieces, int(ends[-1]) if len(ends) else 0, piece_tokens)


def list_items(sequences: Ints, splits: Ints, last: Ints) -> tuple[Ints, Ints]:
    """The items of sequences with so many splits, the last of so many tokens, and the totals of their levels."""
    if not len(sequences):
        return np.empty((0, 2), np.int64), np.zeros(1, np.int64)
    counts = len(splits) - np.bincount(splits).cumsum()[:-1]
    chosen = (-splits).argsort(kind="stable")[positions_in(counts)]
    # The last splits have all sizes. Programs take items in turn, so neighbours in the list should be of similar size.
    chosen[: counts[0]] = (-last).argsort(kind="stable")
    back = np.arange(len(counts)).repeat(counts)
    return in_columns(sequences[chosen], splits[chosen] - 1 - back), counts.cumsum()


def list_pieces(chunks: Ints, counts: Ints, lengths: Ints, size: Ints, splits: Ints) -> tuple[Ints, int]:
    """The pieces of some of the sequences, by their numbers `chunks`, and the number of their tokens."""
    if not len(chunks):
        return np.empty((0, 3), np.int64), 0
    # Programs start in the order of the list: what reads most begins first.
    chunks = chunks[(-np.minimum(lengths, size)[chunks]).argsort(kind="stable")]
    sequence = chunks.repeat(splits[chunks])
    # The last split first: only this one is never before a window.
    split = splits[sequence] - 1 - positions_in(splits[chunks])
    ends = counts[sequence].cumsum()
    return in_columns(sequence, split, ends - counts[sequence]), int(ends[-1])


def positions_in(sizes: Ints) -> Ints:
    """0 .. size - 1 for each of the sizes."""
    ends = sizes.cumsum()
    result: Ints = np.arange(ends[-1] if len(ends) else 0) - (ends - sizes).repeat(sizes)
    return result


def in_columns(*columns: Ints) -> Ints:
    """[N, K] int32 of K columns [N]."""
    result = np.empty((len(columns[0]), len(columns)), np.int32)
    for number, column in enumerate(columns):
        result[:, number] = column
    return result


class StepBuffers:
    """The inputs and the metadata of a step at fixed addresses, for a captured graph.

    A new buffer has a step without tokens. `fill` gives it all that `RaggedBatch` would bring to the device, by one
    copy, the tokens included that only the device knows.

    input_ids     [tokens] int64, tokens; 0 for padding
    position_ids  [tokens] int64, position of each token in its sequence; 0 for padding
    slots         [tokens] int64, see `AttentionMetadata`; negative for padding
    logit_rows    [sequences] int64, which of the tokens need logits; 0 after the last one
    metadata      for `store_kv` and `attend`. Padding belongs to no sequence: `attend` leaves its rows undefined, or 0
                  in a step of decode rows only
    """

    def __init__(
        self, tokens: int, sequences: int, max_blocks: int, block_size: int, split: int, device: torch.device,
        max_tokens: int | None = None, *, decode_only: bool, whole: bool = False,
    ) -> None:  # fmt: skip
        """See `TritonAttention.graph_buffers`, and `list_work` for `whole`."""
        most = sequences * max_blocks * block_size
        self.max_tokens = most if max_tokens is None else min(max_tokens, most)
        self.tokens, self.max_sequences, self.decode_only = tokens, sequences, decode_only
        self.max_blocks, self.block_size, self.split, self.whole = max_blocks, block_size, split, whole
        self._levels = 1 if whole else -(-max_blocks * block_size // split)
        items = 0 if whole else self.max_tokens // split + sequences
        block_ids = self.max_tokens // block_size + sequences
        spare_tokens, spare_pieces = (0, 0) if decode_only or self._levels == 1 else (SPARE_TOKENS, SPARE_PIECES)
        self._max_pieces = 0 if decode_only else min(sequences, tokens // 2) + spare_pieces
        self._max_pieces = sequences if whole else self._max_pieces
        self._max_piece_tokens = tokens + spare_tokens
        self._max_partials = 0 if self._levels == 1 else items + spare_tokens
        # The block ids come last, so that a copy ends with those that are used.
        shapes: list[tuple[int, ...]] = [(tokens,), (sequences, 6), (items, 2), (self._levels,)]
        shapes += [(0 if whole or decode_only else tokens, 2), (1,), (self._max_pieces, 3), (1,), (block_ids,)]
        room: list[Ints] = [np.empty(size, np.int64) for size in (tokens, tokens, *[sequences] * 3)]
        self._fixed = FixedTensors(room + [np.empty(shape, np.int32) for shape in shapes], device)
        self.input_ids, self.position_ids, self.logit_rows, *rest = self._fixed.tensors
        self._unknown_places, self._unknown_rows, slots, records, listed, totals, merges, merged, *rest = rest
        pieces, count, ids = rest
        decode = None if whole else DecodeMetadata(listed, totals, split, 1 if decode_only else NARROW)
        has_pieces = whole or not decode_only
        prefill = PrefillMetadata(pieces, count, self._max_piece_tokens, whole) if has_pieces else None
        self.metadata = AttentionMetadata(slots, records, ids, merges, merged, self._max_partials, decode, prefill)
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
        fits = fits and max(stops, default=0) <= self.max_blocks * self.block_size and sum(stops) <= self.max_tokens
        return fits and (self.decode_only or self.whole or self._holds_splits(batch))

    def _holds_splits(self, batch: RaggedBatch) -> bool:
        counts, lengths = batch.counts, batch.lengths
        splits = count_splits(counts, lengths, self.split)[1]
        is_chunk, tokens = counts > 1, splits * counts
        return bool(
            splits @ is_chunk <= self._max_pieces
            and tokens @ is_chunk <= self._max_piece_tokens
            and tokens @ (splits > 1) <= self._max_partials
        )

    def fill(self, batch: RaggedBatch) -> None:
        """Overwrites the buffers with a step, on the current stream. Raises ValueError if it does not fit."""
        if not self.holds(batch):
            raise ValueError(
                f"{len(batch.stops)} sequences of {sum(batch.stops)} tokens do not fit into the buffers of a graph."
            )
        lengths: Ints = batch.lengths
        if self.decode_only:  # sequences after the last are padding
            lengths = padded(lengths, self.max_sequences)
        counts: Ints = np.ones_like(lengths) if self.decode_only else batch.counts
        blocks = -(-lengths // self.block_size)
        work = list_work(counts, lengths, blocks.cumsum() - blocks, self.split, whole=self.whole)
        block_ids = batch.tables[np.arange(batch.tables.shape[1]) < blocks[: len(batch.stops), None]]
        work = work._replace(totals=padded(work.totals, self._levels, work.totals[-1]))
        unknown, none = batch.device_tokens, np.zeros(0, np.int64)
        self._fixed.fill(
            padded(batch.ids, self.tokens), padded(batch.positions, self.tokens),
            padded(batch.rows, self.max_sequences), none if unknown is None else unknown.places,
            none if unknown is None else unknown.rows, padded(batch.slots, self.tokens, -1), *work.arrays, block_ids,
        )  # fmt: skip
        if unknown is not None:
            places, rows = (part[: len(unknown.rows)] for part in (self._unknown_places, self._unknown_rows))
            self.input_ids.index_copy_(0, places, unknown.tokens.index_select(0, rows))


def build_metadata(batch: RaggedBatch, split: int, *, whole: bool = False) -> AttentionMetadata:
    """Metadata of a step. Chunks of one token are decode rows, longer ones prefill; those that end at 0 are padding.

    For `whole` see `list_work`.
    """
    lengths, tables = batch.lengths, batch.block_tables
    counts = np.where(lengths == 0, 1, batch.counts)
    first_blocks = np.arange(len(lengths)) * tables.shape[1]
    work = list_work(counts, lengths, first_blocks, split, whole=whole)
    there = to_device([array.astype(np.int32) for array in work.arrays], tables.device)
    sequences, items, totals, merges, merged, pieces, count = there
    decode = DecodeMetadata(items, totals, split, int(counts[counts <= NARROW].max())) if len(items) else None
    prefill = PrefillMetadata(pieces, count, work.piece_tokens, whole) if len(pieces) else None
    block_ids = tables.contiguous().view(-1)
    return AttentionMetadata(batch.slot_mapping, sequences, block_ids, merges, merged, work.partials, decode, prefill)
