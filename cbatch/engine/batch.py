"""A step's plan as tensors: all slices in one row, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.engine.plan import Slice, StepPlan
from cbatch.engine.request import Request
from cbatch.engine.transfer import to_device


class Coming(NamedTuple):
    """Tokens that are on the device, and not yet known on the host.

    tokens: [R] int64, what the step before has sampled
    rows:   the row of each request's token
    """

    tokens: Tensor
    rows: dict[Request, int]


class BlockTables:
    """Block ids of requests as rows of one array, which is kept from step to step: most steps add few of them."""

    def __init__(self) -> None:
        self._array = np.zeros((0, 0), np.int32)
        self._places: dict[int, int] = {}
        """Row of the array, by the id of the request."""
        self._held: list[list[int]] = []
        """For each row the list that it was written from."""
        self._counts: list[int] = []

    def rows(self, requests: Sequence[Request], blocks: Sequence[list[int]]) -> NDArray[np.int32]:
        """[S, B] block ids of each request; what is behind its last one means nothing.

        A list of blocks may only be added to; where it is another one than the last time, it is written anew.
        """
        if len(self._held) + len(requests) > len(self._array):
            self._begin_anew(len(requests))
        places, held, counts = self._places, self._held, self._counts
        chosen = []
        width = 0
        for request, ids in zip(requests, blocks, strict=True):
            place = places.get(request.id, -1)
            if place < 0 or held[place] is not ids:
                place = places[request.id] = len(held)
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
        """Forgets all; with room for several steps' worth of rows that come and go, this is rare."""
        self._places, self._held, self._counts = {}, [], []
        if 4 * rows > len(self._array):
            self._array = np.zeros((8 * rows, self._array.shape[1]), np.int32)


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """S slices of T tokens in all, concatenated; the logits of R of them are asked for.

    input_ids      [T] int64
    position_ids   [T] int64, place of each token in its own sequence
    slot_mapping   [T] int64, place of each token in the KV cache: block * block_size + offset
    logit_rows     [R] int64, rows of the T whose logits are wanted, to get a next token or to score the prompt's
    block_tables   [S, B] int32, block ids of each sequence; what is after its last means nothing
    tables         the same on the host
    starts, stops  S ints on the host: slice i computes tokens starts[i] .. stops[i]-1 of its sequence,
                   and each of them attends to the tokens of that sequence up to itself, nobody else's
    scored         [R] bool on the host, which of the R rows score a prompt; None where none does
    """

    input_ids: Tensor
    position_ids: Tensor
    slot_mapping: Tensor
    logit_rows: Tensor
    block_tables: Tensor
    tables: NDArray[np.int32]
    starts: Sequence[int]
    stops: Sequence[int]
    scored: NDArray[np.bool_] | None = None

    @classmethod
    def build(
        cls,
        plan: StepPlan,
        block_size: int,
        device: torch.device,
        tables: BlockTables | None = None,
        coming: Coming | None = None,
    ) -> RaggedBatch:
        """
        tables: kept from step to step, so that not all of it is made anew
        coming: tokens of the slices that the host does not know; they go into `input_ids` on the device
        """
        requests, starts, stops, are_last, blocks, _ = zip(*plan.slices, strict=True)
        # numpy, because each small operation of torch lets other threads take the interpreter from this one.
        furthest = np.array(stops)
        lengths = furthest - np.array(starts)
        ends = lengths.cumsum()
        table = (tables or BlockTables()).rows(requests, blocks)
        sequence = np.repeat(np.arange(len(requests)), lengths)
        positions = np.arange(ends[-1]) + (furthest - ends)[sequence]
        slots = table[sequence, positions // block_size] * np.int64(block_size) + positions % block_size
        rows = (ends - 1)[np.array(are_last)]
        scored = _scored_rows(plan)
        if len(scored):
            rows = np.union1d(rows, scored)
        ids, unknown = _token_ids(plan.slices)
        arrays = [ids, positions, slots, rows, table]
        if unknown:
            assert coming is not None, "tokens that nobody knows"
            arrays += [ends[unknown] - 1, np.array([coming.rows[requests[number]] for number in unknown])]
        there = to_device(arrays, device)
        if coming is not None and unknown:
            places, source = there[-2:]
            there[0].index_copy_(0, places, coming.tokens.index_select(0, source))
        is_scored = np.isin(rows, scored) if len(scored) else None
        return cls(there[0], there[1], there[2], there[3], there[4], table, starts, stops, is_scored)


def _token_ids(slices: Sequence[Slice]) -> tuple[NDArray[np.int64], list[int]]:
    """The tokens of all slices as far as the host knows them, and the slices whose last one it does not know."""
    known = [slice_.request.token_ids[slice_.start : slice_.stop] for slice_ in slices]
    unknown = []
    for number, (slice_, tokens) in enumerate(zip(slices, known, strict=True)):
        if len(tokens) < slice_.stop - slice_.start:
            tokens.append(0)
            unknown.append(number)
    return np.fromiter(chain.from_iterable(known), np.int64), unknown


def _scored_rows(plan: StepPlan) -> NDArray[np.int64]:
    """Rows of the ragged batch whose logits score a prompt; most steps have none."""
    rows: list[int] = []
    if any(slice_.request.scores_prompt for slice_ in plan.slices):
        first = 0
        for slice_ in plan.slices:
            rows += [first + place - slice_.start for place in slice_.to_score]
            first += slice_.num_tokens
    return np.array(rows, np.int64)
