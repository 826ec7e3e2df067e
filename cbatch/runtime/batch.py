"""A scheduled step as arrays, on the host and on the device: all chunks in one row, without padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.runtime.device import samples_on
from cbatch.runtime.state_pool import StatePool, StepStates
from cbatch.runtime.transfer import to_device
from cbatch.schedule.output import ScheduledChunk, SchedulerOutput
from cbatch.schedule.sequence import TokenSequence


class InFlightTokens(NamedTuple):
    """Tokens of the step in flight, which the host does not know yet.

    tokens: [R] int64, sampled by that step
    rows:   the row of each request's token
    """

    tokens: Tensor
    rows: dict[TokenSequence, int]


class BlockTables:
    """Block ids of requests as rows of one array, which is kept from step to step, since most steps add few ids."""

    def __init__(self) -> None:
        self._array = np.zeros((0, 0), np.int32)
        self._places: dict[int, int] = {}
        """Row of the array by the id of the request."""
        self._held: list[list[int]] = []
        """For each row, the list that it was written from."""
        self._counts: list[int] = []

    def rows(self, sequences: Sequence[TokenSequence], blocks: Sequence[list[int]]) -> NDArray[np.int32]:
        """[S, B] block ids of each request; entries after its last one are undefined.

        A list of blocks may only grow; another list for the same request is written anew.
        """
        if len(self._held) + len(sequences) > len(self._array):
            self._begin_anew(len(sequences))
        places, held, counts = self._places, self._held, self._counts
        chosen = []
        width = 0
        for sequence, ids in zip(sequences, blocks, strict=True):
            place = places.get(sequence.id, -1)
            if place < 0 or held[place] is not ids:
                place = places[sequence.id] = len(held)
                held.append(ids)
                counts.append(0)
            count = len(ids)
            if counts[place] < count:
                self._extend(place, ids)
            if count > width:
                width = count
            chosen.append(place)
        return self._array[chosen, :width]

    def _extend(self, place: int, blocks: list[int]) -> None:
        if len(blocks) > self._array.shape[1]:
            wider = np.zeros((len(self._array), 2 * len(blocks)), np.int32)
            wider[:, : self._array.shape[1]] = self._array
            self._array = wider
        count = self._counts[place]
        self._array[place, count : len(blocks)] = blocks[count:]
        self._counts[place] = len(blocks)

    def _begin_anew(self, rows: int) -> None:
        """Forgets all rows. This is rare, since the array has room for the requests of several steps."""
        self._places, self._held, self._counts = {}, [], []
        if 4 * rows > len(self._array):
            self._array = np.zeros((8 * rows, self._array.shape[1]), np.int32)


Values = TypeVar("Values", bound=Tensor | NDArray[Any])


class SampledTokens(NamedTuple, Generic[Values]):
    """A token of each of R rows: tensors on the device of the logits, or arrays if a CPU has found them.

    They remain arrays of numpy, because the first operations of torch after a step are slow.

    tokens:  [R] int64
    largest: [R] float32, the largest logit of each row. If it is not finite, the token has no meaning: the row's logits
             are no numbers, or nothing is allowed
    """

    tokens: Values
    largest: Values

    def get(self) -> tuple[list[int], list[float]]:
        """Both as lists. Waits for the device."""
        return self.tokens.tolist(), self.largest.tolist()


class Logits(NamedTuple):
    """The output of a model for R rows.

    values:  [R, V]
    argmax:  the likeliest token of each row, the first of equal ones, if the model has computed it on the host
    sampled: tokens of the rows as they are, if sampling was part of a captured step
    sums:    [E, hidden size], of each chunk that is pooled (see `PooledRows`)
    """

    values: Tensor
    argmax: SampledTokens[NDArray[Any]] | None = None
    sampled: SampledTokens[Tensor] | None = None
    sums: Tensor | None = None


class PooledRows(NamedTuple):
    """Tokens of a step whose hidden states, after the last norm, are summed for embeddings.

    rows:   [P] int64, their rows in the batch, one chunk after the other
    counts: [E] int64, how many of them each of the E chunks has
    """

    rows: NDArray[np.int64]
    counts: NDArray[np.int64]

    def sums(self, device: torch.device, hidden: Callable[[Tensor], Tensor]) -> Tensor:
        """[E, hidden size] where the model is, in float64 if it has that: so it does not matter how a text was cut.

        hidden: gives the hidden states [P, hidden size] of rows
        """
        rows, counts = to_device([self.rows, self.counts], device)
        exact = torch.float64 if samples_on(device) else torch.float32
        return torch.segment_reduce(hidden(rows).to(exact), "sum", lengths=counts, unsafe=True)


class ImageRows(NamedTuple):
    """Tokens of a step that images replace.

    places: [E] int64, their rows in the batch
    values: [E, hidden size], what is embedded there, on the device of the model. Further columns, as many for each of
            the first layers, are added to what the layer has made there (DeepStack)
    positions: [3, E] int64, in time, rows and columns, if the model distinguishes these
    ends:   [E] int64, how many tokens of its sequence each one sees, if not those up to itself
    only_in_windows: whether `ends` holds only for layers with a window
    """

    places: NDArray[np.int64]
    values: Tensor
    positions: NDArray[np.int64] | None = None
    ends: NDArray[np.int64] | None = None
    only_in_windows: bool = False


class ScoringRows(NamedTuple):
    """Of the R rows of logits, which are sampled from, and which score a token: numbers of rows, int64.

    sampled: [S], one for each request that gets a token, and more after its draft
    scored:  [N], one for each token that is scored
    """

    sampled: NDArray[np.int64]
    scored: NDArray[np.int64]


class DeviceTokens(NamedTuple):
    """Input tokens that only the device knows: [N] their places in the batch, and their rows of `tokens` [R]."""

    tokens: Tensor
    places: NDArray[np.int64]
    rows: NDArray[np.int64]


@dataclass(frozen=True)
class RaggedBatch:
    """S chunks with T tokens in all, concatenated; R of the tokens need logits.

    On the host:
    ids            [T] int64, tokens; 0 for those that only the device knows
    positions      [T] int64, position of each token in its sequence, plus the offset of its request
    slots          [T] int64, place of each token in the KV cache: block * block_size + offset
    rows           [R] int64, which of the T tokens need logits, to sample the next token or to score the prompt
    tables         [S, B] int32, block ids of each sequence; entries after its last one are undefined
    starts, stops  S ints: chunk i computes tokens starts[i] .. stops[i]-1 of its sequence; each attends to the tokens
                   of that sequence up to itself (but see `ends_seen`)
    scoring        which of the R rows score tokens of prompts; None if none does
    device_tokens  tokens that only the device knows; None if there are none, which is so whenever the host samples
    states         where the chunks have the states of recurrent layers; None for a model without such layers
    adapters       [T] int64, number of each token's LoRA adapter, 0 for none; None if no token has one
    pooled         tokens that are summed for embeddings; None if there are none
    images         tokens that images replace, whose ids are 0; None if there are none
    copies         [N, 2] int64, blocks to copy before the step, and where to; None if there are none

    sampling_params returns the parameters of the requests that get a token, packed (`sampler.pack_sampling_params`),
    for a step that samples by itself; None if something changes the logits before.

    On the device the arrays are the tensors `input_ids`, `position_ids`, `slot_mapping`, `logit_rows` and
    `block_tables`; one copy brings all of them there when the first one is used.
    """

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    rows: NDArray[np.int64]
    tables: NDArray[np.int32]
    starts: Sequence[int]
    stops: Sequence[int]
    device: torch.device
    scoring: ScoringRows | None = None
    device_tokens: DeviceTokens | None = None
    sampling_params: Callable[[], NDArray[np.int32] | None] | None = None
    states: StepStates | None = None
    adapters: NDArray[np.int64] | None = None
    pooled: PooledRows | None = None
    copies: NDArray[np.int64] | None = None
    images: ImageRows | None = None

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """`stops` as an array."""
        return np.array(self.stops, np.int64)

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """How many tokens each chunk has."""
        return self.lengths - np.array(self.starts, np.int64)

    @cached_property
    def ends_seen(self) -> NDArray[np.int64] | None:
        """[T] int64, how many tokens of its sequence each one sees; None if each sees those up to itself."""
        if self.images is None or self.images.ends is None:
            return None
        seen = np.concatenate([np.arange(start, stop) for start, stop in zip(self.starts, self.stops, strict=True)]) + 1
        seen[self.images.places] = self.images.ends
        return seen

    @property
    def only_in_windows(self) -> bool:
        """Whether `ends_seen` holds only for layers with a window."""
        return self.images is not None and self.images.only_in_windows

    @property
    def input_ids(self) -> Tensor:
        return self._on_device[0]

    @property
    def position_ids(self) -> Tensor:
        return self._on_device[1]

    @property
    def slot_mapping(self) -> Tensor:
        return self._on_device[2]

    @property
    def logit_rows(self) -> Tensor:
        return self._on_device[3]

    @property
    def block_tables(self) -> Tensor:
        return self._on_device[4]

    def on(self, device: torch.device) -> RaggedBatch:
        """The same step for layers on another device, which need no token ids."""
        return self if device == self.device else replace(self, device=device, device_tokens=None)

    def for_others(self) -> tuple[RaggedBatch, Sequence[Any]]:
        """The same step for another process that computes it, and what `StepStates` has beside its pool.

        Tokens that only the device of this process knows are 0 there.
        """
        states = () if self.states is None else self.states.beside_pool
        cpu = torch.device("cpu")
        images = None if self.images is None else self.images._replace(values=self.images.values.cpu())
        return replace(self, device=cpu, device_tokens=None, sampling_params=None, states=None, images=images), states

    @cached_property
    def _on_device(self) -> list[Tensor]:
        arrays: list[NDArray[Any]] = [self.ids, self.positions, self.slots, self.rows, self.tables]
        if self.device_tokens is None:
            return to_device(arrays, self.device)
        *tensors, places, rows = to_device([*arrays, self.device_tokens.places, self.device_tokens.rows], self.device)
        tensors[0].index_copy_(0, places, self.device_tokens.tokens.index_select(0, rows))
        return tensors

    @classmethod
    def build(
        cls,
        scheduled: SchedulerOutput,
        block_size: int,
        device: torch.device,
        tables: BlockTables | None = None,
        in_flight_tokens: InFlightTokens | None = None,
        sampling_params: Callable[[], NDArray[np.int32] | None] | None = None,
        state_pool: StatePool | None = None,
        images: ImageRows | None = None,
    ) -> RaggedBatch:
        """The batch of a scheduled step.

        tables:           kept from step to step, so that they need not be rebuilt
        in_flight_tokens: tokens that the host does not know yet; on a CPU they are put into `ids` at once
        sampling_params:  see `RaggedBatch`
        state_pool:       of a model with recurrent layers
        images:           of the step's chunks
        """
        sequences, starts, stops, _, blocks, _, states, drafts, _, _, sources = zip(*scheduled.chunks, strict=True)
        are_sampled = [chunk.is_sampled for chunk in scheduled.chunks]
        # numpy: torch takes longer, and each of its operations lets other threads take the interpreter.
        furthest = np.array(stops)
        lengths = furthest - np.array(starts)
        ends = lengths.cumsum()
        to_places = ends - furthest  # what a position of a sequence is added to for its place in the batch
        table = (tables or BlockTables()).rows(sequences, blocks)
        chunk_of = np.repeat(np.arange(len(sequences)), lengths)
        positions = np.arange(ends[-1]) - to_places[chunk_of]
        slots = table[chunk_of, positions // block_size] * np.int64(block_size) + positions % block_size
        axes = [sequence.request.positions for sequence in sequences]
        if any(one is not None for one in axes):
            three = _positions_on_axes(positions, axes, ends - lengths, ends)
            positions = three[0]
            images = None if images is None else images._replace(positions=three[:, images.places])
        offsets = [sequence.request.position_offset for sequence in sequences]
        if any(offsets):
            positions += np.array(offsets)[chunk_of]
        rows = (ends - 1)[np.array(are_sampled)]
        if any(drafts):
            first = [end - len(draft) for end, draft, is_last in zip(ends, drafts, are_sampled, strict=True) if is_last]
            rows = np.concatenate([np.arange(one - 1, last + 1) for one, last in zip(first, rows, strict=True)])
        scoring, scored = None, _scored_places(scheduled.chunks, to_places)
        if len(scored):
            sampled, rows = rows, np.union1d(rows, scored)
            scoring = ScoringRows(np.searchsorted(rows, sampled), np.searchsorted(rows, scored))
        ids, unknown = _token_ids(scheduled.chunks)
        device_tokens = None
        if unknown:
            assert in_flight_tokens is not None, "a token that is not in flight is unknown"
            token_rows = np.array([in_flight_tokens.rows[sequences[one]] for one in unknown])
            device_tokens = DeviceTokens(in_flight_tokens.tokens, ends[unknown] - 1, token_rows)
            if in_flight_tokens.tokens.device.type == "cpu":
                ids[device_tokens.places], device_tokens = in_flight_tokens.tokens.numpy()[device_tokens.rows], None
        copies = None if sources.count(None) == len(sources) else _copied_blocks(scheduled.chunks, block_size)
        if images is not None:
            ids[images.places] = 0
        adapters = [sequence.request.adapter_number for sequence in sequences]
        token_adapters = np.array(adapters)[chunk_of] if any(adapters) else None
        step_states = None if state_pool is None else StepStates.of(state_pool, starts, states)
        return cls(
            ids, positions, slots, rows, table, starts, stops, device, scoring, device_tokens, sampling_params,
            step_states, token_adapters, _pooled_rows(scheduled.chunks, to_places),
            copies, images,
        )  # fmt: skip


def _token_ids(chunks: Sequence[ScheduledChunk]) -> tuple[NDArray[np.int64], list[int]]:
    """The tokens of all chunks, 0 for those the host does not know, and the numbers of the chunks that end with one."""
    known = [chunk.sequence.token_ids[chunk.start : chunk.stop] for chunk in chunks]
    unknown = []
    for number, (chunk, tokens) in enumerate(zip(chunks, known, strict=True)):
        tokens += chunk.draft
        if len(tokens) < chunk.stop - chunk.start:
            tokens.append(0)
            unknown.append(number)
    return np.fromiter(chain.from_iterable(known), np.int64), unknown


def _copied_blocks(chunks: Sequence[ScheduledChunk], block_size: int) -> NDArray[np.int64]:
    """`RaggedBatch.copies` of these chunks, some of which have a source."""
    pairs = [(one.source, one.blocks[one.start // block_size]) for one in chunks if one.source is not None]
    return np.array(pairs, np.int64)


def _positions_on_axes(
    numbers: NDArray[np.int64], axes: Sequence[NDArray[np.int64] | None], begins: Sequence[int], ends: Sequence[int]
) -> NDArray[np.int64]:
    """[3, T] positions of tokens, of which `numbers` [T] are those in their sequences.  axes: of each one's prompt"""
    found = np.tile(numbers, (3, 1))
    for given, begin, end in zip(axes, begins, ends, strict=True):
        if given is not None:
            count, part = given.shape[1], numbers[begin:end]
            later = part + (given.max() + 1 - count)
            found[:, begin:end] = np.where(part < count, given[:, np.minimum(part, count - 1)], later)
    return found


def _scored_places(chunks: Sequence[ScheduledChunk], to_places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Places in the batch whose logits score a token, once for each such token; most steps have none."""
    scoring = [row for row, chunk in enumerate(chunks) if chunk.to_score]
    return np.array([at + to_places[row] for row in scoring for at, _ in chunks[row].scored_tokens], np.int64)


def _pooled_rows(chunks: Sequence[ScheduledChunk], to_places: NDArray[np.int64]) -> PooledRows | None:
    """Tokens of the batch that are summed for embeddings; most steps have none."""
    pooled = [(row, chunk.to_pool) for row, chunk in enumerate(chunks) if chunk.to_pool]
    if not pooled:
        return None
    rows = np.concatenate([np.array(positions, np.int64) + to_places[row] for row, positions in pooled])
    return PooledRows(rows, np.array([len(positions) for _, positions in pooled], np.int64))
