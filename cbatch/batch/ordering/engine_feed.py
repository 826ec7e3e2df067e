"""Gives an engine the requests of a batch: a few more than run at once, so that the order of the others stays open."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from cbatch.batch.ordering.output_forecast import OutputForecast
from cbatch.batch.ordering.work_ahead import PROMPT_TOKENS_PER_OUTPUT_TOKEN, WorkAhead
from cbatch.batch.ordering.work_order import QueuedRequest, WorkOrder
from cbatch.engine.thread import EngineThread

LEAD = 0.25
"""Requests that wait in the engine, as a share of those that run: no slot stays free while an ended one is noticed."""


class EngineFeed:
    """Holds the requests of a batch that the engine cannot run yet. May be used by several threads.

    A request that is more urgent than one in the engine is not held: it may take the other one's place there.
    """

    def __init__(self, engine_thread: EngineThread, forecast: OutputForecast, *, reorders: bool = True) -> None:
        """`reorders`: whether requests may go in another order than they come."""
        self._engine_thread, self._scheduler = engine_thread, engine_thread.engine.scheduler
        self._forecast = forecast
        self._reorders = reorders
        self._order = WorkOrder()
        self._in_engine: dict[int, QueuedRequest] = {}
        self._unfinished: dict[int, int] = {}
        self._num_outputs = 0
        """Unfinished outputs of each request in the engine, and of all of them."""
        self._priorities: Counter[int] = Counter()
        self._tokens = 0
        """That all requests here and in the engine will take in the cache."""
        self._has_ended = self._is_closed = self._is_filling = False
        self._lock = threading.RLock()  # an engine that is closed refuses a request at once, on the same thread

    def put(self, request: QueuedRequest, *, goes_on: bool = False) -> None:
        """Takes a request. `goes_on`: whether its row has begun, so that it does not wait behind others."""
        with self._lock:
            self._tokens += request.tokens
            if goes_on:
                self._submit(request)
                return
            self._order.add(request)
            self._fill()

    def output_ended(self, position: int) -> None:
        """An output of a row's request has ended in the engine. Others of it may go on."""
        with self._lock:
            if position in self._in_engine:
                self._num_outputs -= 1
                self._unfinished[position] -= 1
                if not self._unfinished[position]:
                    self._forget(position)
                self._fill()

    def cancel(self, request: QueuedRequest) -> None:
        """Cancels a request, wherever it is."""
        with self._lock:
            if self._order.remove(request):
                self._tokens -= request.tokens
            elif self._in_engine.get(request.position) is request:
                self._engine_thread.cancel(request.request)
                self._num_outputs -= self._unfinished[request.position]
                self._forget(request.position)
                self._fill()

    def end_input(self) -> None:
        """No further row will come: from now on, the requests with the most work go first."""
        with self._lock:
            self._has_ended = True
            if self._reorders:
                self._order.sort(self._work)

    def ahead(self, requests: Sequence[QueuedRequest]) -> WorkAhead:
        """What is still to be computed of requests that are here and in the engine."""
        prompts = [len(one.request.prompt_ids) for one in requests]
        begun = [any(output.token_ids for output in one.outputs.outputs) for one in requests]
        to_go = [
            (self._forecast.remaining(one.request, one.limit, got), one.limit - got)
            for one in requests
            for output in one.outputs.outputs
            if output.finish_reason is None
            for got in [len(output.token_ids)]
        ]
        return WorkAhead(
            rows=len(requests),
            prompt_tokens=sum(prompts),
            prompts_to_come=sum(tokens for tokens, has_begun in zip(prompts, begun, strict=True) if not has_begun),
            output_tokens=sum(likely for likely, _ in to_go),
            longest_likely=max((likely for likely, _ in to_go), default=0),
            longest=max((most for _, most in to_go), default=0),
            is_last=self._has_ended and not len(self._order),
        )

    def close(self) -> None:
        """Gives the engine nothing more. Takes no lock: a garbage collection may call it in the middle of the rest."""
        self._is_closed = True

    def _work(self, request: QueuedRequest) -> tuple[float, int]:
        asked = request.request
        likely = self._forecast.remaining(asked, request.limit)
        return likely + len(asked.prompt_ids) / PROMPT_TOKENS_PER_OUTPUT_TOKEN, request.limit

    def _fill(self) -> None:
        if self._is_filling:  # by a caller further up, who goes on
            return
        self._is_filling = True
        try:
            while not self._is_closed and len(self._order) and self._may_take():
                is_cache_short = self._tokens > self._scheduler.pool.capacity
                turn = self._scheduler.max_seqs if self._reorders and is_cache_short else 1
                self._submit(self._order.take(turn))
        finally:
            self._is_filling = False

    def _may_take(self) -> bool:
        most = self._scheduler.max_seqs
        if self._num_outputs < most + max(int(LEAD * most), 1):
            return True
        return self._order.first_priority < max(self._priorities)

    def _submit(self, request: QueuedRequest) -> None:
        self._in_engine[request.position] = request
        self._unfinished[request.position] = request.num_outputs
        self._num_outputs += request.num_outputs
        self._priorities[request.priority] += 1
        self._engine_thread.submit(request.request, request.on_event)
        if self._is_closed:  # since the requests in flight may have been cancelled before this one was there
            self._engine_thread.cancel(request.request)

    def _forget(self, position: int) -> None:
        """A request is not in the engine any more."""
        request = self._in_engine.pop(position)
        del self._unfinished[position]
        self._priorities[request.priority] -= 1
        if not self._priorities[request.priority]:
            del self._priorities[request.priority]
        self._tokens -= request.tokens
