"""The thread that owns an engine, so that front ends can submit from any thread and never block a step."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from cbatch.engine.engine import Engine, Prompt
from cbatch.engine.errors import RequestError
from cbatch.engine.params import SamplingParams
from cbatch.engine.request import TokenEvent

Sink = Callable[[TokenEvent], None]
"""Takes the events of one request; called on the driver's thread, so it must be quick (a queue's put is)."""


@dataclass(slots=True)
class Ticket:
    """One submitted request, as the front end holds it; `request_id` is the engine's once it is queued there."""

    prompt: Prompt
    params: SamplingParams
    sink: Sink
    priority: int = 0
    sample_index: int = 0
    request_id: int | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """What the engine is doing at this moment."""

    running: int
    waiting: int
    cache_used: float


class Driver:
    """Runs `engine.step()` for as long as there is work. Submissions and cancellations come through an inbox.

    Every submitted request ends with one event that has a finish_reason, unless it is cancelled or the driver
    is closed. When the engine itself fails, `failure` is set, and all requests, later ones too, end with
    `internal_error`.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.failure: Exception | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._tickets: dict[int, Ticket] = {}
        self._thread = threading.Thread(target=self._run, name="cbatch-engine", daemon=True)
        self._thread.start()

    def submit(
        self, prompt: Prompt, params: SamplingParams, sink: Sink, *, priority: int = 0, sample_index: int = 0
    ) -> Ticket:
        """Queues a request; its events go to `sink`."""
        ticket = Ticket(prompt, params, sink, priority, sample_index)
        self._inbox.put(lambda: self._add(ticket))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Stops a request; at most the events of the step in flight still come."""
        self._inbox.put(lambda: self._drop(ticket))

    def close(self) -> None:
        """Stops after the step in flight and waits for the thread to end. Unfinished requests get no event."""
        self._inbox.put(None)
        self._thread.join()

    @property
    def load(self) -> Load:
        """A snapshot for progress displays; taken without a lock, each number right on its own."""
        scheduler = self.engine.scheduler
        used = scheduler.pool.num_used / scheduler.pool.num_blocks
        return Load(len(scheduler.running), len(scheduler.waiting), used)

    def _run(self) -> None:
        while self._take_orders():
            try:
                for event in self.engine.step():
                    self._deliver(event)
            except Exception as error:  # whatever a kernel or the device raises ends all requests, visibly
                self._fail(error)

    def _take_orders(self) -> bool:
        """Carries out what is in the inbox, and waits there when idle. False when it is time to end."""
        while True:
            idle = self.failure is not None or not self.engine.has_work
            try:
                order = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            if order is None:
                return False
            order()

    def _add(self, ticket: Ticket) -> None:
        if self.failure is not None:
            self._refuse(ticket, _lost(self.failure))
            return
        try:
            request_id = self.engine.add(
                ticket.prompt, ticket.params, priority=ticket.priority, sample_index=ticket.sample_index
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
        ticket.sink(event)

    def _refuse(self, ticket: Ticket, error: RequestError) -> None:
        ticket.sink(TokenEvent(ticket.request_id, None, finish_reason="error", error=error))

    def _fail(self, error: Exception) -> None:
        self.failure = error
        tickets, self._tickets = list(self._tickets.values()), {}
        for ticket in tickets:
            self._refuse(ticket, _lost(error))


def _lost(error: Exception) -> RequestError:
    return RequestError("internal_error", f"The engine failed: {error}")
