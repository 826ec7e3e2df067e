"""The thread that owns an engine, so that front ends can submit from any thread and never block a step."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass

from cbatch.engine.base.errors import EngineError, RequestError
from cbatch.engine.base.outputs import TokenEvent
from cbatch.engine.base.params import SamplingParams
from cbatch.engine.engine import Engine
from cbatch.engine.runtime.memory import is_shortage, let_go
from cbatch.engine.text.tokenizer import Prompt
from cbatch.engine.tracing.spans import span
from cbatch.engine.tracing.trace import Trace

Sink = Callable[[TokenEvent], None]
"""Takes the events of one request; called on the driver's thread, so it must be quick (a queue's put is)."""


@dataclass(slots=True)
class Ticket:
    """One submitted request, as the front end holds it; `request_id` is the engine's once it is queued there."""

    prompt: Prompt
    params: SamplingParams
    sink: Sink
    seed: int = 0
    priority: int = 0
    sample_index: int = 0
    tags: Sequence[str] = ()
    request_id: int | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """What the engine is doing at this moment."""

    running: int
    waiting: int
    cache_used: float


@dataclass(slots=True)
class _Tries:
    """What failed since a step was taken in last; num_steps: how many were, then. futile: in vain also when smaller."""

    num_steps: int = -1
    failures: int = 0
    shortages: int = 0
    futile: int = 0


class Driver:
    """Runs `engine.step()` for as long as there is work. Submissions and cancellations come through an inbox.

    Every submitted request ends with one event that has a finish_reason, unless it is cancelled or the driver
    is closed. A step that raises is tried again, `MAX_RETRIES` times in a row, and made smaller for a while where
    the device's memory does not suffice. When the engine fails all the same, `failure` is set, and all requests,
    later ones too, end with `internal_error`.

    num_retries, num_shrinks: steps that were tried again, and those of them that made the batch smaller
    last_trouble: why the last of them was
    num_tokens:   tokens generated so far, of all requests
    """

    MAX_RETRIES = 3
    CALM_STEPS = 32

    def __init__(self, engine: Engine, trace: Trace | None = None) -> None:
        """`trace`: records some of the steps; it is whole after `close`."""
        self.engine = engine
        self._trace = trace
        if trace is not None:
            trace.prepare()
        self.failure: Exception | None = None
        self.last_trouble = ""
        self.num_retries = 0
        self.num_shrinks = 0
        self._idle_s = 0.0
        self._idle_since: float | None = None
        self.num_tokens = 0
        self._is_shrunk = False
        self._calm_steps, self._patience = 0, self.CALM_STEPS
        self._tries = _Tries()
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._tickets: dict[int, Ticket] = {}
        self._left_behind: list[int] = []
        """Requests that the engine still has, and that were told that it failed."""
        self._thread = threading.Thread(target=self._run, name="cbatch-engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        sink: Sink,
        *,
        seed: int = 0,
        priority: int = 0,
        sample_index: int = 0,
        tags: Sequence[str] = (),
    ) -> Ticket:
        """Queues a request as `Engine.add` does; its events go to `sink`."""
        ticket = Ticket(prompt, params, sink, seed, priority, sample_index, tags)
        self._inbox.put(lambda: self._add(ticket))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Stops a request; at most the events of the step in flight still come."""
        self._inbox.put(lambda: self._drop(ticket))

    def close(self) -> None:
        """Stops after the step in flight and waits for the thread to end. Unfinished requests get no event.

        The engine stays as it is, without these requests: another driver may follow, or whoever made it closes it.
        """
        self._inbox.put(None)
        self._thread.join()
        for request_id in (*self._tickets, *self._left_behind):
            self.engine.cancel(request_id)
        self._tickets, self._left_behind = {}, []

    @property
    def idle_s(self) -> float:
        """Seconds in which there was nothing to compute, up to now."""
        since = self._idle_since
        return self._idle_s + (time.monotonic() - since if since is not None else 0.0)

    @property
    def load(self) -> Load:
        """A snapshot for progress displays; taken without a lock, each number right on its own."""
        scheduler = self.engine.scheduler
        used = scheduler.pool.num_used / scheduler.pool.num_blocks
        return Load(len(scheduler.running), len(scheduler.waiting), used)

    def _run(self) -> None:
        while self._take_orders():
            try:
                for event in self._step():
                    self._deliver(event)
            except Exception as error:  # whatever a kernel or the device raises ends all requests, visibly
                self._fail(error)
        if self._trace is not None:
            self._trace.finish()

    def _step(self) -> list[TokenEvent]:
        """A step of the engine, which loses nothing where it raises, and so may be tried again."""
        while True:
            try:
                with self._trace.step() if self._trace is not None else nullcontext():
                    events = self.engine.step()
            except Exception as error:
                self.last_trouble = f"{type(error).__name__}: {error}"
                is_memory = is_shortage(error)
                tried = self._tries_since(self.engine.num_steps)
                if not is_memory and tried.failures == self.MAX_RETRIES:
                    raise
            else:
                self._after_calm_step()
                return events
            # Only here, where the exception no longer holds the tensors of the step, can their memory be freed.
            self.num_retries += 1
            if not is_memory:
                tried.failures += 1
                continue
            tried.shortages += 1
            self.engine.free_memory()
            if tried.shortages > 1 and not self._shrink():  # the first may have been somebody else's moment
                tried.futile += 1
                if tried.futile > self.MAX_RETRIES:
                    raise EngineError(f"the device's memory does not suffice for one token ({self.last_trouble})")

    def _tries_since(self, num_steps: int) -> _Tries:
        """Counted anew where a step was taken in since the last failure: that one could be begun says too little."""
        if self._tries.num_steps != num_steps:
            self._tries = _Tries(num_steps)
        return self._tries

    def _shrink(self) -> bool:
        if not self.engine.shrink():
            return False
        self.num_shrinks += 1
        self._calm_steps, self._patience = 0, 2 * self._patience
        self._is_shrunk = True
        return True

    def _after_calm_step(self) -> None:
        """Tries larger steps again after a while, which is longer each time that did not go well."""
        if self._is_shrunk:
            self._calm_steps += 1
            if self._calm_steps >= self._patience:
                self._calm_steps = 0
                self._is_shrunk = not self.engine.grow()

    def _take_orders(self) -> bool:
        """Carries out what is in the inbox, and waits there when idle. False when it is time to end."""
        while True:
            try:
                order = self._inbox.get_nowait()
            except queue.Empty:
                if self.failure is None and self.engine.has_work:
                    return True
                self._idle_since = time.monotonic()
                with span("wait"):
                    order = self._inbox.get()
                self._idle_s += time.monotonic() - self._idle_since
                self._idle_since = None
            if order is None:
                return False
            order()

    def _add(self, ticket: Ticket) -> None:
        if self.failure is not None:
            self._refuse(ticket, _lost(self.failure))
            return
        try:
            request_id = self.engine.add(
                ticket.prompt,
                ticket.params,
                seed=ticket.seed,
                priority=ticket.priority,
                sample_index=ticket.sample_index,
                tags=ticket.tags,
            )
        except RequestError as error:
            self._refuse(ticket, error)
        except Exception as error:  # one request that breaks in a way nobody foresaw harms no other
            self._refuse(ticket, RequestError("internal_error", f"The request failed: {error!r}"))
        else:
            ticket.request_id = request_id
            self._tickets[request_id] = ticket

    def _drop(self, ticket: Ticket) -> None:
        if ticket.request_id in self._tickets:
            del self._tickets[ticket.request_id]
            self.engine.cancel(ticket.request_id)

    def _deliver(self, event: TokenEvent) -> None:
        assert event.request_id is not None
        ticket = self._tickets[event.request_id]
        if event.finish_reason is not None:
            del self._tickets[event.request_id]
        self.num_tokens += event.token_id is not None
        ticket.sink(event)

    def _refuse(self, ticket: Ticket, error: RequestError) -> None:
        event = TokenEvent(
            ticket.request_id, None, finish_reason="error", error=error, sample_index=ticket.sample_index
        )
        ticket.sink(event)

    def _fail(self, error: Exception) -> None:
        let_go(error)
        with suppress(Exception):  # what is finished is told as such, unless it is a sink that failed
            for event in self.engine.finish():
                self._deliver(event)
        self.failure = error
        tickets, self._tickets = self._tickets, {}
        self._left_behind = list(tickets)
        for ticket in tickets.values():
            self._refuse(ticket, _lost(error))


def _lost(error: Exception) -> RequestError:
    return RequestError("internal_error", f"The engine failed: {error}")
