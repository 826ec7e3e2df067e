"""A small world for the scheduler: an oracle for a model, and a cache in which every slot says what it holds.

Tokens are sampled from what is read through the block tables, as attention would read them. So whatever another
request or another time has left in a slot shows: aliasing, sharing of what is not the same, stale content, a write
too many.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from cbatch.engine.base.outputs import Sample, TokenEvent
from cbatch.engine.base.params import SamplingParams
from cbatch.engine.runtime.batch import BlockTables, InFlightTokens, RaggedBatch
from cbatch.engine.sampling.output import NAN
from cbatch.engine.scheduler.admission import MAX_PREEMPTIONS
from cbatch.engine.scheduler.block_pool import BlockPool
from cbatch.engine.scheduler.output import ScheduledChunk, SchedulerOutput, StepResult
from cbatch.engine.scheduler.request import Request
from cbatch.engine.scheduler.scheduler import Scheduler
from tests.support.oracle import CollidingToken, OracleRequest, Stamps, make_request, next_token
from tests.support.scheduler_invariants import StateBefore, check_between_steps, check_plan, require

UNWRITTEN, GARBAGE, FIRST_NAN = -1, -2, -3
"""What a slot can hold besides stamps, which are not negative. Each planted NaN has a number: -3, -4 and so on."""


@dataclass(frozen=True, slots=True)
class SimulationSizes:
    """The sizes of one world. vocabulary: of generated tokens; colliding: whether all tokens have one hash."""

    block_size: int
    num_blocks: int
    max_seqs: int
    max_batch_tokens: int
    max_model_len: int = 1000
    prefix_cache: bool = True
    vocabulary: int = 50
    colliding: bool = False
    runs_ahead: bool = False


class StepInFlight(NamedTuple):
    """A step that is computed, of which nobody has told the scheduler yet.

    results: tokens, None for those that are no numbers
    nans:    the planted ones that are the reason for that
    """

    scheduled: SchedulerOutput
    results: list[int | None]
    nans: list[int]

    @property
    def in_flight_tokens(self) -> InFlightTokens:
        tokens = torch.tensor([int(token or 0) for token in self.results])
        return InFlightTokens(tokens, {chunk.request: row for row, chunk in enumerate(self.scheduled.to_sample)})


class SchedulerSimulation:
    """A scheduler, its pool, the cache, and all that must be true of them; raises Violation where it is not.

    counts: steps, shared blocks, cancellations and so on, for people
    """

    def __init__(self, shape: SimulationSizes) -> None:
        self.shape = shape
        self.scheduler = Scheduler(
            BlockPool(shape.num_blocks, shape.block_size),
            shape.max_seqs,
            shape.max_batch_tokens,
            shape.max_model_len,
            prefix_cache=shape.prefix_cache,
        )
        self.cache = np.full((shape.num_blocks, shape.block_size), UNWRITTEN, np.int64)
        self.rows: dict[Request, OracleRequest] = {}
        self.past: deque[OracleRequest] = deque(maxlen=8)
        self.counts: Counter[str] = Counter()
        self._flight: StepInFlight | None = None
        self._tables = BlockTables()
        self._unseated: set[Request] = set()
        """Those who left early for a step that was to give them their last token, and was given up."""
        self._token = CollidingToken if shape.colliding else int
        self._next_id = 0
        self._priorities: set[int] = set()
        self._num_nans = 0
        self._seen_nans: dict[int, int] = {}
        """The planted NaNs that a commit was told of, and in which step."""
        self._prompt_tokens = self._cached_tokens = 0

    # What may happen

    def prompt(self, which: int, cut: int, tail: Sequence[int], *, generated: bool = False) -> list[int]:
        """A prompt that begins like another: `cut` tokens of row `which`, or all it has so far, then `tail`."""
        known = [*self.rows.values(), *self.past]
        start: list[int] = []
        if known:
            request = known[which % len(known)].request
            start = list(request.token_ids) if generated else request.token_ids[:cut]
        longest = min(self.scheduler.pool.capacity, self.shape.max_model_len - 1)
        return (start + [self._token(token) for token in tail])[:longest] or [self._token(1)]

    def add(self, prompt: list[int], max_tokens: int, priority: int = 0, stop_after: int | None = None) -> Request:
        """Adds a request; its `stop_after`-th token is a stop token, if it comes to that."""
        limit = min(max_tokens, self.scheduler.sequence_limits.max_new_tokens(len(prompt)))
        params = SamplingParams(max_tokens=limit)
        request = Request(self._next_id, list(prompt), params, max_new_tokens=limit, priority=priority)
        self._next_id += 1
        self._priorities.add(priority)
        self.rows[request] = make_request(request, stop_after, self.shape.vocabulary, self._token)
        self.scheduler.add(request)
        self.counts["requests"] += 1
        self.check()
        return request

    def cancel(self, which: int) -> None:
        """Cancels one of the live requests, waiting or running."""
        if self.rows:
            request = list(self.rows)[which % len(self.rows)]
            self.counts["cancelled running" if request.is_running else "cancelled waiting"] += 1
            self.scheduler.cancel(request)
            self._forget(request)
            self.check()

    def step(self, *, broken: Collection[int] = ()) -> None:
        """One step. The slices whose numbers are in `broken` come out as NaN, in the cache too."""
        scheduled, started = self._schedule(), None
        if scheduled.chunks:
            started = self._compute(scheduled, {scheduled.chunks[n % len(scheduled.chunks)].request for n in broken})
        self._take_in()
        self._flight = started
        if not self.shape.runs_ahead:
            self._take_in()
        self.check()

    def fail_step(self, *, garbage: bool, late: bool = False, shrink: bool = False) -> None:
        """A step that is planned and then given up: nothing was written to the cache, or what nobody can use.

        late: the step before, if one is in flight, fails as well, and that is seen only then
        """
        scheduled = self._schedule()
        if late and self._flight is not None:
            self._unseated |= self.scheduler.finishing
            self._give_up(self._flight.scheduled, garbage=garbage)
            self._flight = None
            self.counts["failed late"] += 1
        self._give_up(scheduled, garbage=garbage)
        self.counts["failed steps"] += 1
        self.check()
        if shrink:
            self.shrink(scheduled.num_tokens)

    def shrink(self, num_tokens: int) -> None:
        """Makes steps half as large as one of `num_tokens`."""
        before = self.scheduler.max_batch_tokens
        size = min(before, num_tokens)
        done = self.scheduler.shrink(num_tokens)
        require(done == (size > 1), "a wrong word of shrink")
        wanted = size // 2 if size > 1 else before
        require(self.scheduler.max_batch_tokens == wanted, "a step that did not shrink, or too far")
        self.counts["shrinks"] += done
        self.check()

    def grow(self) -> bool:
        """Makes steps twice as large again, up to what they were; True when they are that."""
        done = self.scheduler.grow()
        limits = self.shape.max_batch_tokens, min(self.shape.max_seqs, self.shape.max_batch_tokens)
        require(done == ((self.scheduler.max_batch_tokens, self.scheduler.max_seqs) == limits), "a wrong word of grow")
        require(self.scheduler.max_batch_tokens <= limits[0], "a step that grew larger than it was")
        self.check()
        return done

    def limit_prompts(self, limit: int | None) -> None:
        """From now on, so many tokens of prompts beside rows that decode."""
        self.scheduler.prefill_limit = limit
        self.counts["limits"] += limit is not None

    def drain(self) -> None:
        """Steps until all requests are done.

        In every step the oldest of the highest priority advances by a token at least, and it is never preempted.
        So it is done after as many steps as it has tokens in the end, but for the last, which is not computed. One
        step more is needed for each where its end is noticed one step late.
        """
        bound = sum(len(row.tokens) - 1 + self.shape.runs_ahead for row in self.rows.values())
        while self.rows:
            require(bound > 0, f"{len(self.rows)} requests are not done within the bound of steps")
            bound -= 1
            self.step()
        require(self.scheduler.pool.num_used == 0, "blocks are taken, and there are no requests")

    def check(self) -> None:
        """All that must be true between two steps."""
        check_between_steps(self.scheduler, self.rows.keys())
        for request in self.scheduler.running:
            self._compare(self.rows[request], request.blocks, request.num_computed)
        flight = self._flight.scheduled.to_sample if self._flight is not None else []
        in_flight_tokens = {chunk.request for chunk in flight}
        wrong = [
            request.id for request in self.rows if request.num_output_placeholders != (request in in_flight_tokens)
        ]
        require(not wrong, f"requests {wrong} count on other tokens than those that are coming")
        known = [*self.rows.values(), *self.past]
        if known:
            self._probe(known[(self.counts["steps"] + self.counts["requests"]) % len(known)])
        if len(self._priorities) == 1 and not self.counts["shrinks"]:
            often = max((request.num_preemptions for request in self.rows), default=0)
            require(often <= MAX_PREEMPTIONS, "a request was preempted too often by its equals")
        totals = self.scheduler.num_prompt_tokens, self.scheduler.num_cached_tokens
        require(totals == (self._prompt_tokens, self._cached_tokens), "wrong figures of the prefix cache")

    # How it is done

    def _schedule(self) -> SchedulerOutput:
        moment = StateBefore.of(self.scheduler, self._unseated)
        scheduled = self.scheduler.schedule()
        check_plan(self.scheduler, scheduled, moment)
        self.counts["steps"] += 1
        self.counts["tokens"] += scheduled.num_tokens
        self.counts["tokens coming"] += sum(s.stop > len(s.request.token_ids) for s in scheduled.chunks)
        for chunk in scheduled.chunks:
            if chunk.request in scheduled.admitted:
                self._enter(self.rows[chunk.request], chunk.start)
        return scheduled

    def _give_up(self, scheduled: SchedulerOutput, *, garbage: bool) -> None:
        if garbage:
            for chunk in scheduled.chunks:
                places = np.arange(chunk.start, chunk.stop)
                blocks = np.array(chunk.blocks)[places // self.shape.block_size]
                self.cache[blocks, places % self.shape.block_size] = GARBAGE
        self.scheduler.rollback(scheduled)

    def _take_in(self) -> None:
        """Tells the scheduler what the step in flight has given, and looks at what comes of it."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        scheduled, results, nans = flight
        live = [(chunk.request, result) for chunk, result in zip(scheduled.to_sample, results, strict=True)]
        live = [(request, result) for request, result in live if request in self.rows]
        self.counts["dropped tokens"] += len(results) - len(live)
        for nan in nans:
            self._seen_nans.setdefault(nan, self.counts["steps"])
        events = self._commit(scheduled, results)
        require([event.request_id for event in events] == [request.id for request, _ in live], "not an event a token")
        for event, (_, result) in zip(events, live, strict=True):
            self._take(event, is_nan=result is None)

    def _commit(self, scheduled: SchedulerOutput, results: list[int | None]) -> list[TokenEvent]:
        """The only place that knows what form `update_from_output` wants a step's results in."""
        samples = [Sample(0, error=NAN) if token is None else Sample(token) for token in results]
        return self.scheduler.update_from_output(scheduled, StepResult(samples))

    def _batch(self, scheduled: SchedulerOutput) -> RaggedBatch:
        in_flight_tokens = self._flight.in_flight_tokens if self._flight is not None else None
        return RaggedBatch.build(scheduled, self.shape.block_size, torch.device("cpu"), self._tables, in_flight_tokens)

    def _compute(self, scheduled: SchedulerOutput, broken: Collection[Request]) -> StepInFlight:
        """Writes the stamps of a plan, reads what attention would read, and samples from that."""
        batch = self._batch(scheduled)
        slots = batch.slots
        require(len(set(slots.tolist())) == len(slots), "one slot for two tokens of a step")
        ids, positions = batch.ids, batch.positions
        at = 0
        for chunk in scheduled.chunks:
            part = slice(at, at := at + chunk.num_tokens)
            row = self.rows[chunk.request]
            tokens = row.tokens[chunk.start : chunk.stop]
            is_right = tokens == ids[part].tolist() or self._is_doomed(chunk.request)
            require(is_right, "other tokens in the batch than the request has")
            require(list(range(chunk.start, chunk.stop)) == positions[part].tolist(), "wrong positions")
            self.cache.reshape(-1)[slots[part]] = self._values(row, chunk, chunk.request in broken)
        for chunk, table in zip(scheduled.chunks, batch.tables.tolist(), strict=True):
            self._compare(self.rows[chunk.request], table, chunk.stop)
        last = self.cache.reshape(-1)[slots[batch.rows]].tolist()
        results = [self._token(next_token(value, self.shape.vocabulary)) if value >= 0 else None for value in last]
        failed = [chunk for chunk, result in zip(scheduled.to_sample, results, strict=True) if result is None]
        values = [self._read(chunk.blocks, chunk.stop) for chunk in failed]
        return StepInFlight(scheduled, results, [nan for one in values for nan in one[one <= FIRST_NAN].tolist()])

    def _is_doomed(self, request: Request) -> bool:
        """Whether the token that is coming to a request is no number, so that what it is computed from is dropped."""
        if self._flight is None:
            return False
        pairs = zip(self._flight.scheduled.to_sample, self._flight.results, strict=True)
        return any(chunk.request is request and result is None for chunk, result in pairs)

    def _values(self, row: OracleRequest, chunk: ScheduledChunk, is_broken: bool) -> Any:
        """What a slice writes: its stamps, or a NaN where one is planted or comes before them."""
        if is_broken:
            self._num_nans += 1
            return FIRST_NAN + 1 - self._num_nans
        if self._num_nans:
            before = self._read(row.request.blocks, chunk.start)
            if (nans := before[before <= FIRST_NAN]).size:
                return nans[0]
        return row.stamps[chunk.start : chunk.stop]

    def _read(self, table: Sequence[int], stop: int) -> Stamps:
        return self.cache[table].reshape(-1)[:stop]

    def _compare(self, row: OracleRequest, table: Sequence[int], stop: int) -> None:
        """Every slot a request reads holds what belongs there, or a NaN that was there when it entered."""
        values = self._read(table, stop)
        wrong = values[values != row.stamps[:stop]].tolist()
        if wrong:
            require(max(wrong) <= FIRST_NAN, f"request {row.request.id} reads what is not its own: {values}")
            known = [value for value in wrong if self._seen_nans.get(value, row.entered) < row.entered]
            require(not known, f"request {row.request.id} took over what is known to be NaN")

    def _probe(self, row: OracleRequest) -> None:
        """What the pool offers for a sequence holds that sequence, and no NaN that is known."""
        blocks = self.scheduler.pool.get_cached_blocks(row.tokens)
        values = self._read(blocks, len(blocks) * self.shape.block_size)
        wrong = values[values != row.stamps[: len(values)]].tolist()
        if wrong:
            require(max(wrong) <= FIRST_NAN, f"blocks {blocks} are offered and hold something else: {values}")
            require(self._seen_nans.keys().isdisjoint(wrong), f"blocks {blocks} are offered and hold NaN")

    def _enter(self, row: OracleRequest, start: int) -> None:
        row.entered = self.counts["steps"]
        self.counts["shared blocks"] += start // self.shape.block_size
        if row.request.num_generated == 0 and row.request.num_preemptions == 0:
            row.cached = start

    def _take(self, event: TokenEvent, *, is_nan: bool) -> None:
        """Compares an event, and the request's tokens, with the oracle."""
        request = next(request for request in self.rows if request.id == event.request_id)
        row, length = self.rows[request], len(request.token_ids)
        failed = event.error is not None and event.error.code == "nan_logits"
        require(failed == is_nan == (event.finish_reason == "error"), f"request {request.id}: a wrong end: {event}")
        if length == row.request.num_prompt + (not is_nan):
            self._prompt_tokens += request.num_prompt
            self._cached_tokens += row.cached
        if is_nan:
            self.counts["NaN rows"] += 1
            self._forget(request)
            return
        require(request.token_ids == row.tokens[:length], f"request {request.id} has other tokens than alone")
        require(event.token_id == row.tokens[length - 1], f"request {request.id}: a wrong token in its event")
        require(event.cached_tokens == row.cached, f"request {request.id}: wrong count of cached tokens")
        wanted = row.reason if length == len(row.tokens) else None
        require(event.finish_reason == wanted, f"request {request.id} ends by {event.finish_reason}, not {wanted}")
        if wanted is not None:
            self.counts[f"finished by {wanted}"] += 1
            self._forget(request)

    def _forget(self, request: Request) -> None:
        self.past.append(self.rows.pop(request))
