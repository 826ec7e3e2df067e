"""A simulation around the scheduler: an oracle as the model, and a cache in which every slot tells what it holds.

What must be true of steps and bookkeeping is stated without the scheduler's algorithm. `RandomWalk` acts at random on
small schedulers; each walk is repeatable from a seed and a number.

Tokens are sampled from what is read through the block tables, as attention would read them. So whatever another request
or an earlier owner has left in a slot shows: aliasing, wrong sharing, stale content, a write too many.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cbatch.base.outputs import FinishReason, Sample, TokenEvent
from cbatch.base.params import SamplingParams
from cbatch.base.request import Request
from cbatch.runtime.batch import BlockTables, InFlightTokens, RaggedBatch
from cbatch.sample.output import NAN
from cbatch.schedule.admission import MAX_PREEMPTIONS, priority_key
from cbatch.schedule.block_pool import BlockPool
from cbatch.schedule.limits import StepLimits
from cbatch.schedule.output import ScheduledChunk, SchedulerOutput, StepResult
from cbatch.schedule.scheduler import Scheduler
from cbatch.schedule.sequence import TokenSequence
from cbatch.schedule.state_slots import ZERO, StateSlots

Stamps = NDArray[np.int64]


class CollidingToken(int):
    """A token with the same hash as any other, so that only its value tells it apart."""

    def __hash__(self) -> int:
        return 0


@dataclass(slots=True)
class OracleRequest:
    """A request, with what the oracle knows of it.

    tokens:  prompt and whole output
    stamps:  what each token's slot must hold
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


def stamps_of(tokens: Sequence[int], before: Sequence[int] = (), position_offset: int = 0) -> list[int]:
    """The stamps of tokens; `before` are those of the tokens in front of them.

    A stamp stands for a token, its position id and all tokens before it.
    """
    stamps = list(before)
    for position, token in enumerate(tokens, len(stamps) + position_offset):
        last = stamps[-1] if stamps else 0
        stamps.append(hash((last, position, int(token))) & (2**63 - 1))
    return stamps


def next_token(stamp: int, vocabulary: int) -> int:
    """The token that follows the one with this stamp."""
    return (stamp >> 7) % vocabulary


def make_request(sequence: TokenSequence, stop_after: int | None, vocabulary: int, kind: type[int]) -> OracleRequest:
    """A new request and its output; token number `stop_after` of that, if there is one, becomes a stop token.

    kind: of its tokens, `int` or `CollidingToken`
    """
    prompt, limit = sequence.token_ids, sequence.request.max_new_tokens
    offset = sequence.request.position_offset
    tokens, stamps = list(prompt), stamps_of(prompt, position_offset=offset)
    for _ in range(limit):
        tokens.append(kind(next_token(stamps[-1], vocabulary)))
        stamps = stamps_of(tokens[-1:], stamps, offset)
    output = tokens[len(prompt) :]
    stop = {output[stop_after - 1]} if stop_after is not None and stop_after <= limit else set()
    length = len(prompt) + next((place + 1 for place, token in enumerate(output) if token in stop), limit)
    sequence.request.stop_ids = frozenset(stop)
    return OracleRequest(sequence, tokens[:length], np.array(stamps[:length], np.int64), "stop" if stop else "length")


class Violation(AssertionError):
    """An invariant is broken."""


def require(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise Violation(otherwise)


@dataclass(frozen=True, slots=True)
class StateBefore:
    """The state before a step, of the requests that need more than the tokens in flight.

    first:    the request that has to advance in any case
    running:  the running requests; `decoding` those of them that were decoding
    computed: number of computed or scheduled tokens of each
    excused:  requests that need not advance as long as others run, and neither do those that wait after them
    """

    first: TokenSequence | None
    running: frozenset[TokenSequence]
    decoding: tuple[TokenSequence, ...]
    computed: dict[TokenSequence, int]
    excused: frozenset[TokenSequence]

    @classmethod
    def of(cls, scheduler: Scheduler, excused: Collection[TokenSequence] = ()) -> StateBefore:
        running = [sequence for sequence in scheduler.running if not sequence.is_finishing]
        unfinished = running + [sequence for sequence in scheduler.waiting if not sequence.is_finishing]
        competing = unfinished
        if running and (held := [priority_key(sequence) for sequence in scheduler.waiting if sequence in excused]):
            competing = [
                sequence for sequence in unfinished if sequence.is_running or priority_key(sequence) < min(held)
            ]
        first = min(competing, key=priority_key, default=None)
        decoding = tuple(sequence for sequence in running if sequence.is_decoding)
        computed = {sequence: sequence.num_computed for sequence in running}
        return cls(first, frozenset(running), decoding, computed, frozenset(excused))


def check_scheduled(scheduler: Scheduler, scheduled: SchedulerOutput, before: StateBefore) -> None:
    """Checks limits, chunks, progress and order of one step, before it is computed."""
    sequences = [chunk.sequence for chunk in scheduled.chunks]
    planned, admitted = set(sequences), set(scheduled.admitted)
    require(len(sequences) == len(planned) <= scheduler.max_seqs, "more chunks than slots, or two for one request")
    require(scheduled.num_tokens <= scheduler.max_batch_tokens, "more tokens than a step may have")
    require(planned <= set(scheduler.running), "a chunk of a request that does not run")
    require(admitted == planned - before.running, "the admitted requests are not those that did not run before")
    for chunk in scheduled.chunks:
        sequence, end = chunk.sequence, chunk.stop
        wanted = sequence.num_tokens - chunk.is_last  # the placeholder of this step's token
        require(before.computed.get(sequence, chunk.start) == chunk.start < end <= wanted, "a chunk that does not fit")
        require(sequence.num_computed == end, "a chunk that does not count as computed")
        require(chunk.is_last == (end == wanted), "a wrong is_last")
        require(
            sequence.num_generated + sequence.num_output_placeholders <= sequence.request.max_new_tokens,
            "a token too many is coming",
        )
        require(end <= len(sequence.blocks) * scheduler.pool.block_size, "a token that has no place in the cache")
    first = before.first
    if first is not None and not any(
        priority_key(sequence) < priority_key(first) for sequence in admitted & before.excused
    ):
        require(first in planned, "the oldest of the highest priority does not advance")
    is_limited = scheduler.states.slots is not None or scheduler.prefill_limit is not None
    if scheduled.num_tokens < scheduler.max_batch_tokens and not is_limited:
        whole = {chunk.sequence for chunk in scheduled.chunks if chunk.is_last}
        require(whole == set(scheduler.running), "budget is left, and a request did not get all it needs")
    for sequence in before.decoding:
        if sequence.is_running and sequence not in planned:
            _check_passed_over(scheduler, scheduled, sequence)


def _check_passed_over(scheduler: Scheduler, scheduled: SchedulerOutput, sequence: TokenSequence) -> None:
    """A decoding request gets no token only if higher priorities, and older requests of its own, took all of them."""
    higher = sum(chunk.num_tokens for chunk in scheduled.chunks if chunk.sequence.priority < sequence.priority)
    beside = [s for s in scheduled.chunks if s.sequence.priority == sequence.priority and s.sequence.id < sequence.id]
    taken = higher + sum(chunk.num_tokens for chunk in beside if chunk.num_tokens == 1)
    require(
        higher > 0 and taken == scheduler.max_batch_tokens, f"request {sequence.id} is decoding and was passed over"
    )


def check_between_steps(scheduler: Scheduler, live: Collection[TokenSequence]) -> None:
    """Every live request is in one place, every block is free or held, and blocks to be written have one owner."""
    scheduler.check_integrity()
    running, waiting, finishing = scheduler.running, scheduler.waiting, scheduler.finishing
    require(len(running) + len(waiting) + len(finishing) == len(live), "a request is in two places, or in none")
    require({*running, *waiting, *finishing} == set(live), "a request is lost, or is there and should not be")
    require(all(sequence.is_finishing for sequence in finishing), "a finishing request needs more tokens")
    held = Counter(block for sequence in running for block in sequence.blocks)
    for sequence in running:
        require(0 < sequence.num_computed < sequence.num_tokens, "nothing computed, or nothing left to compute")
        for block in sequence.blocks[sequence.num_computed // scheduler.pool.block_size :]:
            require(held[block] == 1, f"block {block} will be written and has two owners")


UNWRITTEN, GARBAGE, FIRST_NAN = -1, -2, -3
"""What a slot can hold besides stamps, which are not negative. Each planted NaN has a number: -3, -4 and so on."""


@dataclass(frozen=True, slots=True)
class SimulationSizes:
    """The sizes of a simulation.

    vocabulary: number of different generated tokens
    colliding:  whether all tokens have the same hash
    state_slots, chunk_multiple: of a model with recurrent layers; None for one without
    overlap:    whether a step is scheduled before the tokens of the previous one are known
    """

    block_size: int
    num_blocks: int
    max_seqs: int
    max_batch_tokens: int
    max_model_len: int = 1000
    short_context: int = 30
    prefix_cache: bool = True
    vocabulary: int = 50
    colliding: bool = False
    overlap: bool = False
    state_slots: int | None = None
    chunk_multiple: int = 1


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
        tokens = torch.tensor([int(token or 0) for token in self.results])
        return InFlightTokens(tokens, {chunk.sequence: row for row, chunk in enumerate(self.scheduled.to_sample)})


class SchedulerSimulation:
    """A scheduler, its block pool and the cache, and all that must be true of them; raises Violation otherwise.

    sequences: the live ones, with what the oracle expects of them
    past:     the last ones that have ended
    counts:   steps, shared blocks, cancellations and so on, for reports
    """

    def __init__(self, sizes: SimulationSizes) -> None:
        self.sizes = sizes
        self.scheduler = Scheduler(
            BlockPool(sizes.num_blocks, sizes.block_size),
            StepLimits(sizes.max_seqs, sizes.max_batch_tokens),
            sizes.max_model_len,
            prefix_cache=sizes.prefix_cache,
            state_slots=None if sizes.state_slots is None else StateSlots(sizes.state_slots),
            chunk_multiple=sizes.chunk_multiple,
        )
        self.states = np.full(sizes.state_slots or 0, UNWRITTEN, np.int64)
        """What each slot of state holds: the stamp of the last token that it has taken in, 0 before the first."""
        self.cache = np.full((sizes.num_blocks, sizes.block_size), UNWRITTEN, np.int64)
        self.sequences: dict[TokenSequence, OracleRequest] = {}
        self.past: deque[OracleRequest] = deque(maxlen=8)
        self.counts: Counter[str] = Counter()
        self._in_flight: StepInFlight | None = None
        self._tables = BlockTables()
        self._lost_finishing: set[TokenSequence] = set()
        """Requests that only waited for the last token of a step, and the step was rolled back."""
        self._lost_running: set[TokenSequence] = set()
        """Requests whose state was lost because a step was rolled back, while younger ones may have kept theirs."""
        self._token = CollidingToken if sizes.colliding else int
        self._next_id = 0
        self._priorities: set[int] = set()
        self._num_nans = 0
        self._seen_nans: dict[int, int] = {}
        """The planted NaNs that the scheduler was told of, and in which step."""
        self._prompt_tokens = self._cached_tokens = 0

    # Actions

    def prompt(self, which: int, cut: int, suffix: Sequence[int], *, generated: bool = False) -> list[int]:
        """A prompt that begins like another: `cut` tokens of request `which`, or all its tokens, then `suffix`."""
        known = [*self.sequences.values(), *self.past]
        start: list[int] = []
        if known:
            sequence = known[which % len(known)].sequence
            start = list(sequence.token_ids) if generated else sequence.token_ids[:cut]
        longest = min(self.scheduler.pool.capacity, self.sizes.max_model_len - 1)
        return (start + [self._token(token) for token in suffix])[:longest] or [self._token(1)]

    def add(
        self, prompt: list[int], max_tokens: int, priority: int = 0, stop_after: int | None = None
    ) -> TokenSequence:
        """Adds a request; its token number `stop_after` is a stop token, if it gets that far.

        Requests of more than `short_context` tokens have other position ids.
        """
        sizes = self.sizes
        limit = min(max_tokens, self.scheduler.sequence_limits.max_new_tokens(len(prompt)))
        params = SamplingParams(max_tokens=limit)
        offset = sizes.max_model_len if len(prompt) + limit > sizes.short_context else 0
        sequence = TokenSequence(
            self._next_id,
            list(prompt),
            Request(params=params, max_new_tokens=limit, priority=priority, position_offset=offset),
        )
        self._next_id += 1
        self._priorities.add(priority)
        self.sequences[sequence] = make_request(sequence, stop_after, sizes.vocabulary, self._token)
        self.scheduler.add(sequence)
        self.counts["requests"] += 1
        self.check()
        return sequence

    def cancel(self, which: int) -> None:
        """Cancels one of the live requests, waiting or running."""
        if self.sequences:
            sequence = list(self.sequences)[which % len(self.sequences)]
            self.counts["cancelled running" if sequence.is_running else "cancelled waiting"] += 1
            self.scheduler.cancel(sequence)
            self._forget(sequence)
            self.check()

    def step(self, *, broken: Collection[int] = ()) -> None:
        """One step. The chunks whose numbers are in `broken` become NaN, in the cache too."""
        scheduled, started = self._schedule(), None
        if scheduled.chunks:
            started = self._compute(scheduled, {scheduled.chunks[n % len(scheduled.chunks)].sequence for n in broken})
        self._update()
        self._in_flight = started
        if not self.sizes.overlap:
            self._update()
        self.check()

    def fail_step(self, *, garbage: bool, late: bool = False, shrink: bool = False) -> None:
        """A step that is scheduled and rolled back.

        garbage: it has written to the cache before it failed
        late:    the previous step, if it is in flight, fails as well, which is noticed only now
        """
        scheduled = self._schedule()
        if late and self._in_flight is not None:
            self._lost_finishing |= self.scheduler.finishing
            self._roll_back(self._in_flight.scheduled, garbage=garbage)
            self._in_flight = None
            self.counts["failed late"] += 1
        self._roll_back(scheduled, garbage=garbage)
        self.counts["failed steps"] += 1
        self.check()
        if shrink:
            self.shrink(scheduled.num_tokens)

    def shrink(self, num_tokens: int) -> None:
        """Halves the size of steps, from `num_tokens`."""
        before = self.scheduler.max_batch_tokens
        size = min(before, num_tokens)
        done = self.scheduler.shrink(num_tokens)
        require(done == (size > 1), "shrink returns the wrong value")
        wanted = size // 2 if size > 1 else before
        require(self.scheduler.max_batch_tokens == wanted, "a step that did not shrink, or too far")
        self.counts["shrinks"] += done
        self.check()

    def grow(self) -> bool:
        """Doubles the size of steps, up to the original one; True if that is reached."""
        done, sizes = self.scheduler.grow(), self.sizes
        seqs = min(sizes.max_seqs, sizes.max_batch_tokens, sizes.state_slots or sizes.max_seqs)
        is_reached = (self.scheduler.max_batch_tokens, self.scheduler.max_seqs) == (sizes.max_batch_tokens, seqs)
        require(done == is_reached, "grow returns the wrong value")
        require(self.scheduler.max_batch_tokens <= sizes.max_batch_tokens, "a step that grew larger than it was")
        self.check()
        return done

    def limit_prefill(self, limit: int | None) -> None:
        """Limits the prompt tokens of steps with decoding requests."""
        self.scheduler.prefill_limit = limit
        self.counts["limits"] += limit is not None

    def drain(self) -> None:
        """Steps until all requests are finished.

        In every step the oldest request of the highest priority advances by at least one token, and it is never
        preempted. So it takes at most as many steps as it has tokens, without the last one, which is not computed; with
        overlap one more, since its end is noticed one step late.
        """
        bound = sum(len(expected.tokens) - 1 + self.sizes.overlap for expected in self.sequences.values())
        while self.sequences:
            require(bound > 0, f"{len(self.sequences)} requests are not done within the bound of steps")
            bound -= 1
            self.step()
        require(self.scheduler.pool.num_used == 0, "blocks are used, and there are no requests")

    def check(self) -> None:
        """Checks what must be true between two steps."""
        check_between_steps(self.scheduler, self.sequences.keys())
        for sequence in self.scheduler.running:
            self._compare(self.sequences[sequence], sequence.blocks, sequence.num_computed)
            if sequence.state is not None:
                self._compare_state(self.sequences[sequence], sequence.state.slot, sequence.num_computed)
        in_flight = self._in_flight.scheduled.to_sample if self._in_flight is not None else []
        in_flight_tokens = {chunk.sequence for chunk in in_flight}
        wrong = [
            sequence.id
            for sequence in self.sequences
            if sequence.num_output_placeholders != (sequence in in_flight_tokens)
        ]
        require(not wrong, f"requests {wrong} count on other tokens than those in flight")
        known = [*self.sequences.values(), *self.past]
        if known:
            self._probe(known[(self.counts["steps"] + self.counts["requests"]) % len(known)])
        if len(self._priorities) == 1 and not self.counts["shrinks"]:
            often = max((sequence.num_preemptions for sequence in self.sequences), default=0)
            require(often <= MAX_PREEMPTIONS, "a request was preempted too often by its peers")
        totals = self.scheduler.num_prompt_tokens, self.scheduler.num_cached_tokens
        require(totals == (self._prompt_tokens, self._cached_tokens), "wrong figures of the prefix cache")

    # How they are done

    def _schedule(self) -> SchedulerOutput:
        before = StateBefore.of(self.scheduler, self._lost_finishing | self._lost_running)
        scheduled = self.scheduler.schedule()
        check_scheduled(self.scheduler, scheduled, before)
        self.counts["steps"] += 1
        self.counts["tokens"] += scheduled.num_tokens
        self.counts["tokens coming"] += sum(s.stop > len(s.sequence.token_ids) for s in scheduled.chunks)
        for chunk in scheduled.chunks:
            if chunk.sequence in scheduled.admitted:
                self._enter(self.sequences[chunk.sequence], chunk.start)
        return scheduled

    def _roll_back(self, scheduled: SchedulerOutput, *, garbage: bool) -> None:
        if garbage:
            for chunk in scheduled.chunks:
                places = np.arange(chunk.start, chunk.stop)
                blocks = np.array(chunk.blocks)[places // self.sizes.block_size]
                self.cache[blocks, places % self.sizes.block_size] = GARBAGE
                if chunk.state is not None:
                    self.states[chunk.state.slot] = GARBAGE
                    if chunk.state.snapshot is not None:
                        self.states[chunk.state.snapshot.slot] = GARBAGE
        self.scheduler.rollback(scheduled)
        if self.scheduler.states.slots is not None:
            self._lost_running |= {chunk.sequence for chunk in scheduled.chunks if not chunk.sequence.is_running}

    def _update(self) -> None:
        """Gives the scheduler the tokens of the step in flight, and checks the events."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is None:
            return
        scheduled, results, nans = in_flight
        live = [(chunk.sequence, result) for chunk, result in zip(scheduled.to_sample, results, strict=True)]
        live = [(sequence, result) for sequence, result in live if sequence in self.sequences]
        self.counts["dropped tokens"] += len(results) - len(live)
        for nan in nans:
            self._seen_nans.setdefault(nan, self.counts["steps"])
        samples = [Sample(0, error=NAN) if token is None else Sample(token) for token in results]
        events = self.scheduler.update_from_output(scheduled, StepResult(samples))
        require([event.request_id for event in events] == [sequence.id for sequence, _ in live], "not an event a token")
        for event, (_, result) in zip(events, live, strict=True):
            self._check_event(event, is_nan=result is None)

    def _compute(self, scheduled: SchedulerOutput, broken: Collection[TokenSequence]) -> StepInFlight:
        """Writes the stamps of a step, reads what attention would read, and samples from that."""
        in_flight = self._in_flight.in_flight_tokens if self._in_flight is not None else None
        batch = RaggedBatch.build(scheduled, self.sizes.block_size, torch.device("cpu"), self._tables, in_flight)
        slots = batch.slots
        require(len(set(slots.tolist())) == len(slots), "two tokens of a step in one slot")
        ids, positions = batch.ids, batch.positions
        self._prepare_states(scheduled)
        at = 0
        for chunk in scheduled.chunks:
            part = slice(at, at := at + chunk.num_tokens)
            expected = self.sequences[chunk.sequence]
            tokens = expected.tokens[chunk.start : chunk.stop]
            is_right = tokens == ids[part].tolist() or self._will_be_nan(chunk.sequence)
            require(is_right, "other tokens in the batch than the request has")
            offset = chunk.sequence.request.position_offset
            places = list(range(chunk.start + offset, chunk.stop + offset))
            require(places == positions[part].tolist(), "wrong positions")
            values = self._values(expected, chunk, chunk.sequence in broken)
            self.cache.reshape(-1)[slots[part]] = values
            self._write_states(chunk, values)
        for chunk, table in zip(scheduled.chunks, batch.tables.tolist(), strict=True):
            self._compare(self.sequences[chunk.sequence], table, chunk.stop)
        last = self.cache.reshape(-1)[slots[batch.rows]].tolist()
        results = [self._token(next_token(value, self.sizes.vocabulary)) if value >= 0 else None for value in last]
        failed = [chunk for chunk, result in zip(scheduled.to_sample, results, strict=True) if result is None]
        values = [self._read(chunk.blocks, chunk.stop) for chunk in failed]
        return StepInFlight(scheduled, results, [nan for one in values for nan in one[one <= FIRST_NAN].tolist()])

    def _prepare_states(self, scheduled: SchedulerOutput) -> None:
        """Zeroes slots and copies snapshots, as a step does before it computes."""
        chunks = [chunk.state for chunk in scheduled.chunks if chunk.state is not None]
        snapshots = [state.snapshot.slot for state in chunks if state.snapshot is not None]
        written = [state.slot for state in chunks] + snapshots
        require(len(set(written)) == len(written), "two owners write to a slot of state")
        sources = {state.slot: state.source for state in chunks if state.source is not None}
        require(not set(sources.values()) & set(written), "a slot of state is copied and overwritten in one step")
        found = {slot: 0 if source == ZERO else self.states[source] for slot, source in sources.items()}
        for slot, value in found.items():
            self.states[slot] = value

    def _write_states(self, chunk: ScheduledChunk, values: Any) -> None:
        """Compares a slot with what the chunk is to go on from, and leaves there what the chunk makes of it."""
        state = chunk.state
        if state is None:
            return
        expected = self.sequences[chunk.sequence]
        self._compare_state(expected, state.slot, chunk.start)
        is_nan = np.ndim(values) == 0
        self.states[state.slot] = values if is_nan else values[-1]
        if state.snapshot is not None:
            tokens = state.snapshot.tokens - chunk.start
            require(0 < tokens <= chunk.num_tokens, "a snapshot outside of its chunk")
            self.states[state.snapshot.slot] = values if is_nan else values[tokens - 1]
            self.counts["snapshots"] += 1

    def _compare_state(self, expected: OracleRequest, slot: int, tokens: int) -> None:
        """A slot holds the state after so many tokens of a request, or a NaN that nobody knew of."""
        value = int(self.states[slot])
        if value == (expected.stamps[tokens - 1] if tokens else 0):
            return
        require(value <= FIRST_NAN, f"request {expected.sequence.id} goes on from a state that is not its own: {value}")
        known = self._seen_nans.get(value, expected.entered) < expected.entered
        require(not known, f"request {expected.sequence.id} took over a state that is known to be NaN")

    def _will_be_nan(self, sequence: TokenSequence) -> bool:
        """Whether the request's token in flight is NaN, so that what is computed from it is dropped."""
        if self._in_flight is None:
            return False
        pairs = zip(self._in_flight.scheduled.to_sample, self._in_flight.results, strict=True)
        return any(chunk.sequence is sequence and result is None for chunk, result in pairs)

    def _values(self, expected: OracleRequest, chunk: ScheduledChunk, is_broken: bool) -> Any:
        """What a chunk writes: its stamps, or a NaN if one is planted in it or before it."""
        if is_broken:
            self._num_nans += 1
            return FIRST_NAN + 1 - self._num_nans
        if self._num_nans:
            before = self._read(expected.sequence.blocks, chunk.start)
            if chunk.state is not None:
                before = np.append(before, self.states[chunk.state.slot])
            if (nans := before[before <= FIRST_NAN]).size:
                return nans[0]
        return expected.stamps[chunk.start : chunk.stop]

    def _read(self, table: Sequence[int], stop: int) -> Stamps:
        return self.cache[table].reshape(-1)[:stop]

    def _compare(self, expected: OracleRequest, table: Sequence[int], stop: int) -> None:
        """Every slot that a request reads holds what belongs there, or a NaN that was there when it was admitted."""
        values = self._read(table, stop)
        wrong = values[values != expected.stamps[:stop]].tolist()
        if wrong:
            require(max(wrong) <= FIRST_NAN, f"request {expected.sequence.id} reads what is not its own: {values}")
            known = [value for value in wrong if self._seen_nans.get(value, expected.entered) < expected.entered]
            require(not known, f"request {expected.sequence.id} took over what is known to be NaN")

    def _probe(self, expected: OracleRequest) -> None:
        """The cached blocks of a sequence hold that sequence, and no known NaN."""
        blocks = self.scheduler.pool.get_cached_blocks(expected.tokens, expected.sequence.cache_kind)
        values = self._read(blocks, len(blocks) * self.sizes.block_size)
        wrong = values[values != expected.stamps[: len(values)]].tolist()
        if wrong:
            require(max(wrong) <= FIRST_NAN, f"blocks {blocks} are offered and hold something else: {values}")
            require(self._seen_nans.keys().isdisjoint(wrong), f"blocks {blocks} are offered and hold NaN")
        slots = self.scheduler.states.slots
        snapshot = slots.find(self.scheduler.pool.contents(blocks)) if slots is not None else None
        if snapshot is not None and self.states[snapshot.slot] != expected.stamps[snapshot.tokens - 1]:
            value = int(self.states[snapshot.slot])
            require(value <= FIRST_NAN, f"a snapshot is offered and holds something else: {value}")
            require(value not in self._seen_nans, "a snapshot is offered and holds NaN")

    def _enter(self, expected: OracleRequest, start: int) -> None:
        expected.entered = self.counts["steps"]
        self.counts["shared blocks"] += start // self.sizes.block_size
        if expected.sequence.num_generated == 0 and expected.sequence.num_preemptions == 0:
            expected.cached = start

    def _check_event(self, event: TokenEvent, *, is_nan: bool) -> None:
        """Compares an event, and the request's tokens, with the oracle."""
        sequence = next(sequence for sequence in self.sequences if sequence.id == event.request_id)
        expected, length = self.sequences[sequence], len(sequence.token_ids)
        failed = event.error is not None and event.error.code == "nan_logits"
        require(failed == is_nan == (event.finish_reason == "error"), f"request {sequence.id}: a wrong end: {event}")
        if length == expected.sequence.num_prompt + (not is_nan):
            self._prompt_tokens += sequence.num_prompt
            self._cached_tokens += expected.cached
        if is_nan:
            self.counts["NaN requests"] += 1
            self._forget(sequence)
            return
        require(sequence.token_ids == expected.tokens[:length], f"request {sequence.id} has other tokens than alone")
        require(event.token_id == expected.tokens[length - 1], f"request {sequence.id}: a wrong token in its event")
        require(event.cached_tokens == expected.cached, f"request {sequence.id}: wrong count of cached tokens")
        wanted = expected.reason if length == len(expected.tokens) else None
        require(event.finish_reason == wanted, f"request {sequence.id} ends by {event.finish_reason}, not {wanted}")
        if wanted is not None:
            self.counts[f"finished by {wanted}"] += 1
            self._forget(sequence)

    def _forget(self, sequence: TokenSequence) -> None:
        self.past.append(self.sequences.pop(sequence))


ACTIONS = {
    "step": 60, "add": 16, "share": 14, "fork": 3, "urgent": 4, "evict": 1, "cancel": 5, "fail": 6, "nan": 2,
    "shrink": 1, "grow": 15, "limit": 4,
}  # fmt: skip
"""How often each of them is drawn."""
MOST_LIVE = 20


class RandomWalk:
    """One simulation, and the random actions on it."""

    def __init__(self, seed: int, number: int, *, recurrent: bool = False) -> None:
        """recurrent: of a model with recurrent layers"""
        self._random = random.Random(f"{seed}/{number}")
        below = self._random.random
        self._has_one_priority = below() < 0.3
        """If all requests have one priority and steps keep their size, preemption is bounded."""
        self._longest_suffix = self._random.choice((2, 3, 5, 16))
        self._most_tokens = self._random.choice((3, 10, 24))
        self.simulation = SchedulerSimulation(
            SimulationSizes(
                block_size=self._random.randint(1, 8),
                num_blocks=self._random.randint(2, 24),
                max_seqs=self._random.randint(1, 8),
                max_batch_tokens=self._random.randint(1, 32),
                prefix_cache=below() < 0.9,
                colliding=below() < 0.2,
                overlap=below() < 0.7,
                vocabulary=self._random.choice((3, 50)),
                state_slots=self._random.randint(1, 16) if recurrent else None,
                chunk_multiple=self._random.choice((1, 1, 2, 4, 6)) if recurrent else 1,
                max_model_len=self._random.choice((1000, 1000, 20)),
            )
        )

    def run(self, actions: int) -> SchedulerSimulation:
        """Does so many random actions, then steps until all requests are done."""
        names, weights = list(ACTIONS), list(ACTIONS.values())
        for name in self._random.choices(names, weights, k=actions):
            self._act(name)
        if self._random.random() < 0.75:
            for _ in range(5):  # doubling 1 so often makes 32
                self.simulation.grow()
        self.simulation.drain()
        return self.simulation

    def _act(self, name: str) -> None:
        simulation, draw = self.simulation, self._random.randrange
        if self._has_one_priority and name in ("urgent", "shrink"):
            name = "add" if name == "urgent" else "step"
        if name == "step":
            simulation.step()
        elif name == "cancel":
            simulation.cancel(draw(MOST_LIVE))
        elif name == "fail":
            simulation.fail_step(
                garbage=draw(2) == 0, late=draw(2) == 0, shrink=draw(16) == 0 and not self._has_one_priority
            )
        elif name == "nan":
            simulation.step(broken=[draw(8)])
        elif name == "shrink":
            simulation.shrink(draw(1, simulation.scheduler.max_batch_tokens + 1))
        elif name == "grow":
            simulation.grow()
        elif name == "limit":
            simulation.limit_prefill(self._random.choice((None, 1, 2, 3, 8)))
        elif len(simulation.sequences) < MOST_LIVE:
            self._add(name)

    def _add(self, name: str) -> None:
        simulation, draw = self.simulation, self._random.randrange
        capacity = min(simulation.scheduler.pool.capacity, simulation.sizes.max_model_len - 1)
        priority = 1 if self._has_one_priority else draw(1, 4)
        if name == "evict":
            for _ in range(draw(1, 4)):
                simulation.add(self._suffix(capacity // 2 + 1, capacity), 1, priority)
            return
        start = 0 if name == "add" else draw(3 * self._longest_suffix)
        suffix = self._suffix(0, 3) if name == "fork" else self._suffix(1, min(self._longest_suffix, capacity))
        prompt = simulation.prompt(draw(MOST_LIVE), start, suffix, generated=name == "fork")
        stop_after = draw(1, self._most_tokens + 1) if draw(3) == 0 else None
        simulation.add(prompt, draw(1, self._most_tokens + 1), 0 if name == "urgent" else priority, stop_after)

    def _suffix(self, least: int, most: int) -> list[int]:
        return [self._random.randrange(3) for _ in range(self._random.randint(least, most))]
