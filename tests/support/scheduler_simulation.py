"""Random walks of the scheduler: an oracle as the model, and a cache in which every slot tells what it holds.

Tokens are sampled from what is read through the block tables, as attention would read them. So whatever another request
or an earlier owner has left in a slot shows: aliasing, wrong sharing, stale content, a write too many.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cbatch.base.outputs import FinishReason, Sample, TokenEvent
from cbatch.base.request import Request, ScoredTail
from cbatch.runtime.batch import BlockTables, InFlightTokens, RaggedBatch
from cbatch.schedule.block_pool import BlockPool
from cbatch.schedule.limits import StepLimits
from cbatch.schedule.output import ScheduledChunk, SchedulerOutput, StepResult
from cbatch.schedule.scheduler import Scheduler
from cbatch.schedule.sequence import NAN, TokenSequence
from cbatch.schedule.state_slots import ZERO, StateSlots

Stamps = NDArray[np.int64]

UNWRITTEN, GARBAGE, FIRST_NAN = -1, -2, -3
"""Values of a slot besides stamps, which are not negative. Each planted NaN has a number: -3, -4 and so on."""

ACTIONS = {
    "step": 60, "add": 16, "share": 14, "fork": 3, "choices": 4, "urgent": 4, "evict": 1, "cancel": 5, "fail": 6,
    "nan": 2, "shrink": 1, "grow": 15, "limit": 4,
}  # fmt: skip
"""How often each of them is drawn."""

MOST_LIVE = 20
SHORT_CONTEXT = 30
"""Requests of more tokens have other position ids."""


class Violation(AssertionError):
    """An invariant is broken."""


def require(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise Violation(otherwise)


@dataclass(slots=True)
class OracleRequest:
    """A request, with what the oracle knows of it.

    tokens:  prompt and whole output
    stamps:  what each token's slot must hold: a number for the token, its position id and all tokens before it
    reason:  why the output ends there
    entered: number of the step that last admitted it
    cached:  tokens of it that were cached when it was first admitted to a step that was not rolled back
    """

    sequence: TokenSequence
    tokens: list[int]
    stamps: Stamps
    reason: FinishReason
    entered: int = 0
    cached: int = 0

    @classmethod
    def of(cls, sequence: TokenSequence, stop_after: int | None, vocabulary: int) -> OracleRequest:
        """A new request and its output; token number `stop_after` of that, if there is one, becomes a stop token."""
        limit, offset = sequence.request.max_new_tokens, sequence.request.position_offset
        tokens, stamps, count = list(sequence.token_ids), list[int](), len(sequence.token_ids)
        for position in range(count + limit):
            if position >= count:
                tokens.append(next_token(stamps[-1], vocabulary))
            before = stamps[-1] if stamps else 0
            stamps.append(hash((before, position + offset, tokens[position])) & (2**63 - 1))
        output = tokens[count:]
        stop = {output[stop_after - 1]} if stop_after is not None and stop_after <= limit else set()
        length = count + next((place + 1 for place, token in enumerate(output) if token in stop), limit)
        sequence.request.stop_ids = frozenset(stop)
        return cls(sequence, tokens[:length], np.array(stamps[:length], np.int64), "stop" if stop else "length")


def next_token(stamp: int, vocabulary: int) -> int:
    """The token that follows the one with this stamp."""
    return (stamp >> 7) % vocabulary


class Sizes(NamedTuple):
    """The sizes of a walk.

    vocabulary: number of different generated tokens
    overlap:    whether a step is scheduled before the tokens of the previous one are known
    state_slots, chunk_multiple: of a model with recurrent layers; None for one without
    """

    block_size: int
    num_blocks: int
    max_seqs: int
    max_batch_tokens: int
    max_model_len: int
    prefix_cache: bool
    overlap: bool
    vocabulary: int
    state_slots: int | None
    chunk_multiple: int


class StepInFlight(NamedTuple):
    """A step that is computed, and whose tokens the scheduler does not know yet.

    results: tokens; None if the logits are NaN
    nans:    the planted NaNs that are the reason for that
    """

    scheduled: SchedulerOutput
    results: list[int | None]
    nans: list[int]

    @property
    def in_flight_tokens(self) -> InFlightTokens:
        tokens = torch.tensor([token or 0 for token in self.results])
        return InFlightTokens(tokens, {chunk.sequence: row for row, chunk in enumerate(self.scheduled.to_sample)})


class RandomWalk:
    """Random actions on a small scheduler; repeatable from a seed and a number. Raises Violation.

    live:   the requests that have not ended
    past:   the last ones that have
    counts: steps, shared blocks, cancellations and so on, for reports
    """

    def __init__(self, seed: int, number: int, *, recurrent: bool = False, spans: bool = False) -> None:
        """
        recurrent: of a model with recurrent layers
        spans:     prompts have parts that a step computes whole
        """
        self._has_spans = spans
        self._random = random.Random(f"{seed}/{number}")
        draw, below, choice = self._random.randint, self._random.random, self._random.choice
        self._longest_suffix, self._most_tokens = choice((2, 3, 5, 16)), choice((3, 10, 24))
        self.sizes = sizes = Sizes(
            block_size=draw(1, 8),
            num_blocks=draw(2, 24),
            max_seqs=draw(1, 8),
            max_batch_tokens=draw(1, 32),
            max_model_len=choice((1000, 1000, 20)),
            prefix_cache=below() < 0.9,
            overlap=below() < 0.7,
            vocabulary=choice((3, 50)),
            state_slots=draw(1, 16) if recurrent else None,
            chunk_multiple=choice((1, 1, 2, 4, 6)) if recurrent else 1,
        )
        self.scheduler = Scheduler(
            BlockPool(sizes.num_blocks, sizes.block_size),
            StepLimits(sizes.max_seqs, sizes.max_batch_tokens),
            sizes.max_model_len,
            prefix_cache=sizes.prefix_cache,
            state_slots=None if sizes.state_slots is None else StateSlots(sizes.state_slots),
            chunk_multiple=sizes.chunk_multiple,
        )
        self.cache = np.full((sizes.num_blocks, sizes.block_size), UNWRITTEN, np.int64)
        self.states = np.full(sizes.state_slots or 0, UNWRITTEN, np.int64)
        """Content of each slot of state: the stamp of the last token that it has taken in, 0 before the first."""
        self.live: dict[TokenSequence, OracleRequest] = {}
        self.past: deque[OracleRequest] = deque(maxlen=8)
        self.counts: Counter[str] = Counter()
        self._in_flight: StepInFlight | None = None
        self._tables = BlockTables()
        self._num_nans = 0
        self._seen_nans: dict[int, int] = {}
        """The planted NaNs that the scheduler was told of, and in which step."""

    def run(self, actions: int) -> RandomWalk:
        """Does so many random actions, then steps until all requests are done."""
        for name in self._random.choices(list(ACTIONS), list(ACTIONS.values()), k=actions):
            self._act(name)
            self.check()
        for _ in range(5 if self._random.random() < 0.75 else 0):  # doubling 1 so often makes 32
            self.scheduler.grow()
        self.drain()
        return self

    def drain(self) -> None:
        """Steps until all requests are finished.

        In every step the oldest request of the highest priority advances by at least one token, and it is never
        preempted. So it takes at most as many steps as it has tokens, without the last one, which is not computed; with
        overlap one more, since its end is noticed one step late.
        """
        bound = sum(len(expected.tokens) - 1 + self.sizes.overlap for expected in self.live.values())
        while self.live:
            require(bound > 0, f"{len(self.live)} requests are not done within the bound of steps")
            bound -= 1
            self.step()
            self.check()
        require(self.scheduler.pool.num_used == 0, "blocks are used, and there are no requests")

    # Actions

    def _act(self, name: str) -> None:
        scheduler, draw = self.scheduler, self._random.randrange
        if name == "step":
            self.step()
        elif name == "nan":
            self.step(broken=draw(8))
        elif name == "cancel":
            self._cancel(draw(MOST_LIVE))
        elif name == "fail":
            self._fail_step(garbage=draw(2) == 0, late=draw(2) == 0)
        elif name == "shrink":
            size = min(scheduler.max_batch_tokens, draw(1, scheduler.max_batch_tokens + 1))
            require(scheduler.shrink(size) == (size > 1), "shrink returns the wrong value")
            require(size == 1 or scheduler.max_batch_tokens == size // 2, "a step that did not shrink, or too far")
            self.counts["shrinks"] += size > 1
        elif name == "grow":
            scheduler.grow()
            require(scheduler.max_batch_tokens <= self.sizes.max_batch_tokens, "a step that grew larger than it was")
        elif name == "limit":
            scheduler.prefill_limit = self._random.choice((None, 1, 2, 3, 8))
            self.counts["limits"] += scheduler.prefill_limit is not None
        elif len(self.live) < MOST_LIVE:
            self._add(name)

    def _add(self, name: str) -> None:
        draw, longest = self._random.randrange, min(self.scheduler.pool.capacity, self.sizes.max_model_len - 1)
        if name == "evict":
            for _ in range(draw(1, 4)):
                self._add_request(self._suffix(longest // 2 + 1, longest), 1, draw(1, 4))
            return
        if name == "choices":
            prompt, count, priority = self._suffix(2, min(12, longest)), draw(2, 5), draw(1, 4)
            for _ in range(count):
                whole = ([*prompt, *self._suffix(1, 3)])[:longest]
                self._add_request(whole, draw(1, 3), priority, choices=count, scored_from=min(len(prompt), len(whole)))
            return
        suffix = self._suffix(0, 3) if name == "fork" else self._suffix(1, min(self._longest_suffix, longest))
        known, start = [*self.live.values(), *self.past], list[int]()
        if known and name != "add":  # begins like another prompt, or like its output
            other = known[draw(len(known))].sequence.token_ids
            start = other if name == "fork" else other[: draw(3 * self._longest_suffix)]
        stop_after = draw(1, self._most_tokens + 1) if draw(3) == 0 else None
        priority = 0 if name == "urgent" else draw(1, 4)
        self._add_request(([*start, *suffix])[:longest] or [1], draw(1, self._most_tokens + 1), priority, stop_after)

    def _suffix(self, least: int, most: int) -> list[int]:
        return [self._random.randrange(3) for _ in range(self._random.randint(least, most))]

    def _add_request(
        self,
        prompt: list[int],
        tokens: int,
        priority: int,
        stop_after: int | None = None,
        choices: int = 0,
        scored_from: int = 1,
    ) -> None:
        limit = min(tokens, self.scheduler.sequence_limits.max_new_tokens(len(prompt)))
        offset = self.sizes.max_model_len if len(prompt) + limit > SHORT_CONTEXT else 0
        tails = [ScoredTail((), scored_from, (), ())] * choices
        request = Request(max_new_tokens=limit, priority=priority, position_offset=offset, tails=tails)
        if self._has_spans and not choices:
            request.two_way_spans = self._spans(len(prompt))
        sequence = TokenSequence(self.counts["requests"], prompt, request, scored_from=scored_from)
        self.live[sequence] = OracleRequest.of(sequence, stop_after, self.sizes.vocabulary)
        self.scheduler.add(sequence)
        self.counts["requests"] += 1

    def _spans(self, length: int) -> list[tuple[int, int]]:
        borders = sorted(self._random.sample(range(length + 1), min(length + 1, self._random.choice((2, 4)))))
        return list(zip(borders[::2], borders[1::2], strict=False))

    def _cancel(self, which: int) -> None:
        """Cancels one of the live requests, waiting or running."""
        if self.live:
            sequence = list(self.live)[which % len(self.live)]
            self.counts["cancelled running" if sequence.is_running else "cancelled waiting"] += 1
            self.scheduler.cancel(sequence)
            self._forget(sequence)

    def step(self, *, broken: int | None = None) -> None:
        """One step. The chunk of this number becomes NaN, in the cache too."""
        scheduled, started = self._schedule(), None
        if scheduled.chunks:
            chunk = None if broken is None else scheduled.chunks[broken % len(scheduled.chunks)]
            started = self._compute(scheduled, chunk)
        self._update()
        self._in_flight = started
        if not self.sizes.overlap:
            self._update()

    def _fail_step(self, *, garbage: bool, late: bool) -> None:
        """A step that is scheduled and rolled back.

        garbage: it has written to the cache before it failed
        late:    the previous step, if it is in flight, fails as well, which is noticed only now
        """
        scheduled = self._schedule()
        if late and self._in_flight is not None:
            self._roll_back(self._in_flight.scheduled, garbage)
            self._in_flight = None
            self.counts["failed late"] += 1
        self._roll_back(scheduled, garbage)
        self.counts["failed steps"] += 1

    # How they are done

    def check(self) -> None:
        """Checks what must be true between two steps."""
        scheduler = self.scheduler
        scheduler.check_integrity()
        places = [*scheduler.running, *scheduler.waiting, *scheduler.finishing]
        require(len(places) == len(self.live) and {*places} == {*self.live}, "a request is lost, or in two places")
        held = Counter(block for sequence in scheduler.running for block in sequence.blocks)
        for sequence in scheduler.running:
            waits = sequence.num_shared > 0 or bool(sequence.request.two_way_spans)  # for another choice, or its turn
            require(
                (sequence.num_computed > 0 or waits) and sequence.num_computed < sequence.num_tokens,
                "nothing computed, or nothing left",
            )
            unwritten = sequence.blocks[sequence.num_computed // self.sizes.block_size :]
            require(all(held[block] == 1 for block in unwritten), "a block will be written and has two owners")
        in_flight = self._in_flight.scheduled.to_sample if self._in_flight is not None else []
        coming = {chunk.sequence for chunk in in_flight}
        is_right = all(sequence.num_output_placeholders == (sequence in coming) for sequence in self.live)
        require(is_right, "a request counts on other tokens than those in flight")
        if known := [*self.live.values(), *self.past]:
            self._probe(known[(self.counts["steps"] + self.counts["requests"]) % len(known)])

    def _schedule(self) -> SchedulerOutput:
        """Schedules a step, and checks its limits and chunks."""
        scheduler = self.scheduler
        before = {sequence: sequence.num_computed for sequence in scheduler.running if not sequence.is_finishing}
        scheduled = scheduler.schedule()
        self.counts["steps"] += 1
        planned, admitted = {chunk.sequence for chunk in scheduled.chunks}, set(scheduled.admitted)
        require(len(scheduled.chunks) == len(planned) <= scheduler.max_seqs, "too many chunks, or two for one request")
        beyond = scheduled.num_tokens - scheduler.max_batch_tokens
        if beyond > 0:
            last = scheduled.chunks[-1]
            ends_span = any(last.stop == end for _, end in last.sequence.request.two_way_spans)
            require(ends_span and beyond < last.num_tokens, "more tokens than a step may have")
        self.counts["spans beyond the budget"] += beyond > 0
        require(planned <= set(scheduler.running), "a chunk of a request that does not run")
        took = {chunk.sequence for chunk in scheduled.chunks if before.get(chunk.sequence, -1) != chunk.start}
        require(took == admitted & planned, "the admitted requests are not those that take over something")
        late = {one for one in scheduler.running if self._waits_for_a_copy(one, scheduled)}
        late |= {one for one in scheduler.running if one.request.two_way_spans and one not in planned}
        require(admitted - planned <= late and not late & planned, "an admitted request without a chunk")
        for chunk in scheduled.chunks:
            sequence, end = chunk.sequence, chunk.stop
            wanted = sequence.num_tokens - chunk.is_last  # the placeholder of this step's token
            require(before.get(sequence, 0) <= chunk.start < end <= wanted, "a chunk that does not fit")
            self.counts["copied blocks"] += chunk.source is not None
            cut = any(first < end < stop for first, stop in sequence.request.two_way_spans)
            require(not cut, "a chunk that ends within a part that is computed whole")
            require(sequence.num_computed == end, "a chunk that does not count as computed")
            require(chunk.is_last == (end == wanted), "a wrong is_last")
            coming = sequence.num_generated + sequence.num_output_placeholders
            require(coming <= sequence.request.max_new_tokens, "a token too many is coming")
            require(end <= len(sequence.blocks) * self.sizes.block_size, "a token that has no place in the cache")
        is_limited = scheduler.states.slots is not None or scheduler.prefill_limit is not None or self._has_spans
        spares = bool(late) or bool(took & before.keys())  # what was kept for them
        if scheduled.num_tokens < scheduler.max_batch_tokens and not is_limited and not spares:
            whole = {chunk.sequence for chunk in scheduled.chunks if chunk.is_last}
            require(whole == set(scheduler.running), "budget is left, and a request did not get all it needs")
        starts = {chunk.sequence: chunk.start for chunk in scheduled.chunks}
        for sequence in admitted:
            expected, start = self.live[sequence], starts.get(sequence, sequence.num_computed)
            expected.entered = self.counts["steps"]
            self.counts["shared blocks"] += start // self.sizes.block_size
            if sequence.num_generated == 0 and sequence.num_preemptions == 0:
                expected.cached = start - before[sequence] + expected.cached if sequence in before else start
        return scheduled

    def _waits_for_a_copy(self, sequence: TokenSequence, scheduled: SchedulerOutput) -> bool:
        """Whether a choice has no chunk, and all that it shares with another one is computed by this step."""
        end = sequence.num_shared
        return any(
            chunk.sequence.num_shared == end and chunk.start < end <= chunk.stop
            and chunk.sequence.token_ids[:end] == sequence.token_ids[:end]
            for chunk in scheduled.chunks
        ) and sequence not in {chunk.sequence for chunk in scheduled.chunks}  # fmt: skip

    def _roll_back(self, scheduled: SchedulerOutput, garbage: bool) -> None:
        for chunk in scheduled.chunks if garbage else ():
            places = np.arange(chunk.start, chunk.stop)
            blocks = np.array(chunk.blocks)[places // self.sizes.block_size]
            self.cache[blocks, places % self.sizes.block_size] = GARBAGE
            if chunk.state is not None:
                self.states[chunk.state.slot] = GARBAGE
                if chunk.state.snapshot is not None:
                    self.states[chunk.state.snapshot.slot] = GARBAGE
        self.scheduler.rollback(scheduled)

    def _update(self) -> None:
        """Gives the scheduler the tokens of the step in flight, and checks the events."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is None:
            return
        pairs = zip(in_flight.scheduled.to_sample, in_flight.results, strict=True)
        live = [(chunk.sequence, result) for chunk, result in pairs if chunk.sequence in self.live]
        for nan in in_flight.nans:
            self._seen_nans.setdefault(nan, self.counts["steps"])
        samples = [Sample(0, error=NAN) if token is None else Sample(token) for token in in_flight.results]
        events = self.scheduler.update_from_output(in_flight.scheduled, StepResult(samples))
        require([event.request_id for event in events] == [sequence.id for sequence, _ in live], "not an event a token")
        for event, (sequence, result) in zip(events, live, strict=True):
            self._check_event(sequence, event, is_nan=result is None)

    def _check_event(self, sequence: TokenSequence, event: TokenEvent, *, is_nan: bool) -> None:
        """Compares an event, and the request's tokens, with the oracle."""
        expected, length, name = self.live[sequence], len(sequence.token_ids), f"request {sequence.id}"
        failed = event.error is not None and event.error.code == "nan_logits"
        require(failed == is_nan == (event.finish_reason == "error"), f"{name}: a wrong end: {event}")
        if is_nan:
            self.counts["NaN requests"] += 1
            self._forget(sequence)
            return
        require(sequence.token_ids == expected.tokens[:length], f"{name} has other tokens than alone")
        require(event.token_id == expected.tokens[length - 1], f"{name}: a wrong token in its event")
        require(event.cached_tokens == expected.cached, f"{name}: wrong count of cached tokens")
        wanted = expected.reason if length == len(expected.tokens) else None
        require(event.finish_reason == wanted, f"{name} ends by {event.finish_reason}, not {wanted}")
        if wanted is not None:
            self.counts[f"finished by {wanted}"] += 1
            self._forget(sequence)

    def _forget(self, sequence: TokenSequence) -> None:
        self.past.append(self.live.pop(sequence))

    def _compute(self, scheduled: SchedulerOutput, broken: ScheduledChunk | None) -> StepInFlight:
        """Writes the stamps of a step, reads what attention would read, and samples from that."""
        in_flight = self._in_flight.in_flight_tokens if self._in_flight is not None else None
        batch = RaggedBatch.build(scheduled, self.sizes.block_size, torch.device("cpu"), self._tables, in_flight)
        slots, flat, at = batch.slots, self.cache.reshape(-1), 0
        require(len(set(slots.tolist())) == len(slots), "two tokens of a step in one slot")
        self._prepare_states(scheduled)
        for source, target in () if batch.copies is None else batch.copies.tolist():
            self.cache[target] = self.cache[source]
        for chunk in scheduled.chunks:
            part = slice(at, at := at + chunk.num_tokens)
            expected, offset = self.live[chunk.sequence], chunk.sequence.request.position_offset
            is_right = expected.tokens[chunk.start : chunk.stop] == batch.ids[part].tolist()
            require(is_right or self._will_be_nan(chunk.sequence), "other tokens in the batch than the request has")
            places = list(range(chunk.start + offset, chunk.stop + offset))
            require(places == batch.positions[part].tolist(), "wrong positions")
            values = self._values(expected, chunk, chunk is broken)
            flat[slots[part]] = values
            self._write_states(expected, chunk, values)
        for chunk, table in zip(scheduled.chunks, batch.tables.tolist(), strict=True):
            expected = self.live[chunk.sequence]
            self._compare(self._read(table, chunk.stop), expected, f"what request {chunk.sequence.id} reads")
        last = flat[slots[batch.rows]].tolist()
        results = [next_token(value, self.sizes.vocabulary) if value >= 0 else None for value in last]
        failed = [chunk for chunk, result in zip(scheduled.to_sample, results, strict=True) if result is None]
        read = [self._read(chunk.blocks, chunk.stop) for chunk in failed]
        return StepInFlight(scheduled, results, [nan for one in read for nan in one[one <= FIRST_NAN].tolist()])

    def _prepare_states(self, scheduled: SchedulerOutput) -> None:
        """Zeroes slots and copies snapshots, as a step does before it computes."""
        chunks = [chunk.state for chunk in scheduled.chunks if chunk.state is not None]
        written = [state.slot for state in chunks]
        written += [state.snapshot.slot for state in chunks if state.snapshot is not None]
        require(len(set(written)) == len(written), "two owners write to a slot of state")
        sources = {state.slot: state.source for state in chunks if state.source is not None}
        require(not set(sources.values()) & set(written), "a slot of state is copied and overwritten in one step")
        for slot, source in sources.items():
            self.states[slot] = 0 if source == ZERO else self.states[source]

    def _write_states(self, expected: OracleRequest, chunk: ScheduledChunk, values: Stamps) -> None:
        """Compares a slot with what the chunk is to go on from, and leaves there what the chunk makes of it."""
        if (state := chunk.state) is None:
            return
        name = f"the state that request {expected.sequence.id} goes on from"
        self._compare(self.states[[state.slot]], expected, name, chunk.start)
        self.states[state.slot] = values[-1]
        if state.snapshot is not None:
            tokens = state.snapshot.tokens - chunk.start
            require(0 < tokens <= chunk.num_tokens, "a snapshot outside of its chunk")
            self.states[state.snapshot.slot] = values[tokens - 1]
            self.counts["snapshots"] += 1

    def _will_be_nan(self, sequence: TokenSequence) -> bool:
        """Whether the request's token in flight is NaN, so that what is computed from it is dropped."""
        if self._in_flight is None:
            return False
        pairs = zip(self._in_flight.scheduled.to_sample, self._in_flight.results, strict=True)
        return any(chunk.sequence is sequence and result is None for chunk, result in pairs)

    def _values(self, expected: OracleRequest, chunk: ScheduledChunk, is_broken: bool) -> Stamps:
        """A chunk's values: its stamps, or a NaN if one is planted in it or before it."""
        stamps = expected.stamps[chunk.start : chunk.stop]
        if is_broken:
            self._num_nans += 1
            return np.full_like(stamps, FIRST_NAN + 1 - self._num_nans)
        before = self._read(expected.sequence.blocks, chunk.start)
        if chunk.state is not None:
            before = np.append(before, self.states[chunk.state.slot])
        nans = before[before <= FIRST_NAN]
        return np.full_like(stamps, nans[0]) if nans.size else stamps

    def _read(self, table: Sequence[int], stop: int) -> Stamps:
        return self.cache[table].reshape(-1)[:stop]

    def _compare(
        self, values: Stamps, expected: OracleRequest, what: str, state_of: int | None = None, *, offered: bool = False
    ) -> None:
        """Slots hold what belongs there, or a NaN that nobody knew of when the request entered.

        values:  of the tokens from the first on, or the state after `state_of` tokens
        offered: to requests that enter now
        """
        stamps = expected.stamps[: len(values)]
        if state_of is not None:
            stamps = expected.stamps[state_of - 1 : state_of] if state_of else np.zeros(1, np.int64)
        since = math.inf if offered else expected.entered
        for wrong in values[values != stamps].tolist():
            require(wrong <= FIRST_NAN, f"{what} is not its own: {values}")
            require(self._seen_nans.get(wrong, since) >= since, f"{what} is known to be NaN")

    def _probe(self, expected: OracleRequest) -> None:
        """The cached blocks of a sequence hold that sequence, and no known NaN."""
        pool, slots = self.scheduler.pool, self.scheduler.states.slots
        blocks = pool.get_cached_blocks(expected.tokens, expected.sequence.cache_kind)
        values = self._read(blocks, len(blocks) * self.sizes.block_size)
        self._compare(values, expected, f"what blocks {blocks} offer", offered=True)
        snapshot = slots.find(pool.contents(blocks)) if slots is not None else None
        if snapshot is not None:
            state = self.states[[snapshot.slot]]
            self._compare(state, expected, "a snapshot that is offered", snapshot.tokens, offered=True)
