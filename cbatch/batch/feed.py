"""Which of the rows that were read the engine gets next, and how long their outputs probably get.

While the input goes on, the oldest goes first: whatever the order, all slots are busy, and nobody waits longer than
needed for the first results. Once the input has ended, the one with the most work goes first, so that the short ones
fill the slots that the long ones leave. (Longest processing time first: Graham, 1969.)

If the KV cache is too small for all that waits and runs, what a prompt begins with may be gone before it is needed
again. So the requests that begin alike follow each other then.

A file may hold tasks of several kinds, such as labels of a word and essays. Rows of the same kind mostly have similar
limits and prompts, so lengths are kept apart by these, in powers of two.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from cbatch.base.outputs import TokenEvent
from cbatch.base.params import SamplingParams
from cbatch.base.request import Request
from cbatch.batch.driver import PROMPT_TOKENS_PER_OUTPUT_TOKEN, WorkAhead
from cbatch.batch.row import Row
from cbatch.engine.thread import EngineThread
from cbatch.schedule.admission import OutputLengths
from cbatch.schedule.limits import SequenceLimits

LEAST_SAMPLES = 8
"""Outputs of a kind that must have ended before their lengths count."""


def output_limit(limits: SequenceLimits, request: Request) -> int:
    """Most tokens of each output of a request; 0 if its prompt is too long, which the engine refuses."""
    room = max(limits.longest - len(request.prompt_ids), 0)
    return room if request.params.max_tokens is None else min(request.params.max_tokens, room)


def ends_by_limit(params: SamplingParams) -> bool:
    """Whether nothing but its limit ends an output."""
    return params.ignore_eos and not (params.stop or params.stop_token_ids) and params.constraint is None


class OutputForecast:
    """The lengths of recent outputs of each kind. May be used by several threads."""

    def __init__(self) -> None:
        self._lengths: dict[tuple[int, ...], OutputLengths] = {}
        self._counts: Counter[tuple[int, ...]] = Counter()
        self._unknown = OutputLengths()
        self._lock = threading.Lock()

    def observe(self, request: Request, limit: int, length: int) -> None:
        """An output of a request has ended with `length` tokens of at most `limit`."""
        with self._lock:
            for kind in _kinds(request, limit):
                self._lengths.setdefault(kind, OutputLengths()).add(length)
                self._counts[kind] += 1

    def remaining(self, request: Request, limit: int, generated: int = 0) -> int:
        """Tokens that an output of `generated` tokens will probably still get, up to `limit` in all."""
        if ends_by_limit(request.params):
            return max(limit - generated, 0)
        with self._lock:
            for kind in _kinds(request, limit):
                if self._counts[kind] >= LEAST_SAMPLES:
                    return self._lengths[kind].remaining(generated, limit)
            return self._unknown.remaining(generated, limit)


def _kinds(request: Request, limit: int) -> tuple[tuple[int, ...], ...]:
    """The kinds of a request, which it shares with others, the narrowest first."""
    by_limit = limit.bit_length()
    return (by_limit, len(request.prompt_ids).bit_length()), (by_limit,)


LEAST_BEGINNING = 64
"""Tokens that prompts must have in common at their beginning, so that their requests follow each other."""


def beginning_of(prompt_ids: Sequence[int]) -> int | None:
    """A hash of a prompt's first tokens, as many as the largest power of two that it has; valid in this process."""
    if len(prompt_ids) < LEAST_BEGINNING:
        return None
    return hash(tuple(prompt_ids[: 1 << (len(prompt_ids).bit_length() - 1)]))


class WorkOrder:
    """Requests that wait. Lower priorities go first, whatever else holds."""

    def __init__(self) -> None:
        self._queues: dict[int, OrderedDict[int, Row]] = {}
        """By priority and position, in their order."""
        self._alike: dict[tuple[int, int | None], OrderedDict[int, Row]] = {}
        """The same of each priority and beginning."""
        self._turn: tuple[int, int | None] = (0, None)
        """The priority and beginning of those that follow each other now."""
        self._in_turn = 0

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    @property
    def first_priority(self) -> int:
        """The priority of the request that goes next."""
        return min(self._queues)

    def add(self, row: Row) -> None:
        for queue in self._queues_of(row):
            queue[row.position] = row

    def take(self, max_turn: int) -> Row:
        """Removes the request that goes next.

        max_turn: most requests that begin alike and follow each other; 1 if beginnings are not to matter
        """
        priority = self.first_priority
        alike = self._alike.get(self._turn) if self._turn[0] == priority else None
        if alike and self._in_turn < max_turn:
            self._in_turn += 1
            row = next(iter(alike.values()))
        else:
            row = next(iter(self._queues[priority].values()))
            self._turn, self._in_turn = (priority, row.beginning), 1
        self.remove(row)
        return row

    def remove(self, row: Row) -> bool:
        """Removes a request that is not to be computed; returns whether it was waiting."""
        priority = row.request.priority
        if priority not in self._queues or self._queues[priority].get(row.position) is not row:
            return False
        for queue in self._queues_of(row):
            del queue[row.position]
        if not self._queues[priority]:
            del self._queues[priority]
        if row.beginning is not None and not self._alike[priority, row.beginning]:
            del self._alike[priority, row.beginning]
        return True

    def sort(self, key: Callable[[Row], Any]) -> None:
        """Lets those that wait go by their keys, the largest first, and in their old order if these are equal."""
        rows = [row for queue in self._queues.values() for row in queue.values()]
        self._queues.clear()
        self._alike.clear()
        for row in sorted(rows, key=key, reverse=True):  # keeps the order of equal ones
            self.add(row)

    def _queues_of(self, row: Row) -> Iterator[OrderedDict[int, Row]]:
        priority = row.request.priority
        yield self._queues.setdefault(priority, OrderedDict())
        if row.beginning is not None:
            yield self._alike.setdefault((priority, row.beginning), OrderedDict())


LEAD = 0.25
"""Requests that wait in the engine, as a share of those that run: no slot stays free while an ended one is noticed."""


class EngineFeed:
    """Holds the requests of a batch that the engine cannot run yet. May be used by several threads.

    A request that is more urgent than one in the engine is not held: it may take the other one's place there.
    """

    def __init__(
        self,
        engine_thread: EngineThread,
        forecast: OutputForecast,
        on_event: Callable[[Row, TokenEvent], None],
        *,
        reorders: bool = True,
    ) -> None:
        """
        on_event: gets a row and what the engine tells of its request, on the engine's thread
        reorders: whether requests may go in another order than they come
        """
        self._engine_thread, self._scheduler = engine_thread, engine_thread.engine.scheduler
        self._forecast, self._on_event, self._reorders = forecast, on_event, reorders
        self._order = WorkOrder()
        self._in_engine: dict[int, Row] = {}
        self._outputs: Counter[int] = Counter()
        """Unfinished outputs in the engine, by the priority of their request."""
        self._tokens = 0
        """That all requests here and in the engine will take in the cache."""
        self._has_ended = self._is_closed = self._is_filling = False
        self._lock = threading.RLock()  # an engine that is closed refuses a request at once, on the same thread

    def put(self, row: Row, *, goes_on: bool = False) -> None:
        """Takes a request. `goes_on`: whether its row has begun, so that it does not wait behind others."""
        with self._lock:
            self._tokens += row.tokens
            if goes_on:
                self._submit(row)
                return
            self._order.add(row)
            self._fill()

    def output_ended(self, position: int) -> None:
        """An output of a row's request has ended in the engine. Others of it may go on."""
        with self._lock:
            if (row := self._in_engine.get(position)) is not None:
                self._forget(row, 1)
                self._fill()

    def cancel(self, row: Row) -> None:
        with self._lock:
            if self._order.remove(row):
                self._tokens -= row.tokens
            elif self._in_engine.get(row.position) is row:
                self._engine_thread.cancel(row.request)
                self._forget(row, row.unfinished)
                self._fill()

    def end_input(self) -> None:
        """No further row will come: from now on, the requests with the most work go first."""
        with self._lock:
            self._has_ended = True
            if self._reorders:
                self._order.sort(self._work)

    def ahead(self, rows: Sequence[Row]) -> WorkAhead:
        """The work that is left of requests that are here and in the engine."""
        to_come = [one for one in rows if not any(output.token_ids for output in one.outputs.outputs)]
        to_go = [
            (self._forecast.remaining(one.request, one.limit, got), one.limit - got)
            for one in rows
            for output in one.outputs.outputs
            if output.finish_reason is None
            for got in [len(output.token_ids)]
        ]
        return WorkAhead(
            rows=len(rows),
            prompt_tokens=sum(one.request.num_prompt_tokens for one in rows),
            prompts_to_come=sum(one.request.num_prompt_tokens for one in to_come),
            output_tokens=sum(likely for likely, _ in to_go),
            longest_likely=max((likely for likely, _ in to_go), default=0),
            longest=max((most for _, most in to_go), default=0),
            is_last=self._has_ended and not len(self._order),
        )

    def close(self) -> None:
        """Gives the engine nothing more. Takes no lock: a garbage collection may call it in the middle of the rest."""
        self._is_closed = True

    def _work(self, row: Row) -> tuple[float, int]:
        likely = self._forecast.remaining(row.request, row.limit)
        return likely + row.request.num_prompt_tokens / PROMPT_TOKENS_PER_OUTPUT_TOKEN, row.limit

    def _fill(self) -> None:
        if self._is_filling:  # by a caller further up, who goes on
            return
        self._is_filling, slots = True, self._scheduler.max_seqs
        most = slots + max(int(LEAD * slots), 1)
        try:
            while not self._is_closed and len(self._order):
                if self._outputs.total() >= most and self._order.first_priority >= max(self._outputs):
                    break
                is_cache_short = self._tokens > self._scheduler.pool.capacity
                self._submit(self._order.take(slots if self._reorders and is_cache_short else 1))
        finally:
            self._is_filling = False

    def _submit(self, row: Row) -> None:
        self._in_engine[row.position] = row
        row.unfinished = row.request.num_outputs
        self._outputs[row.request.priority] += row.unfinished
        self._engine_thread.submit(row.request, partial(self._on_event, row))
        if self._is_closed:  # since the requests in flight may have been cancelled before this one was there
            self._engine_thread.cancel(row.request)

    def _forget(self, row: Row, num_outputs: int) -> None:
        priority = row.request.priority
        row.unfinished -= num_outputs
        self._outputs[priority] -= num_outputs
        if not self._outputs[priority]:
            del self._outputs[priority]
        if not row.unfinished:
            del self._in_engine[row.position]
            self._tokens -= row.tokens
