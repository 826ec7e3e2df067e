"""A thread that runs an engine, so that front ends can submit requests from any thread and never block a step."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from cbatch.base.errors import EngineError, RequestError
from cbatch.base.outputs import TokenEvent
from cbatch.base.request import EventCallback, Request
from cbatch.engine.stats import EngineStats
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.runtime.memory import clear_frames, is_out_of_memory, kernel_too_large, release_memory
from cbatch.runtime.spans import span

CLOSED = "The engine was closed before the request was finished."
FORKED = (
    "This engine belongs to the process that made it, and threads do not survive a fork. "
    "Make an engine in the child, or start the child with the method spawn."
)


class EngineThread:
    """Runs `engine.step()` as long as there is work. Requests and cancellations arrive through an inbox.

    Every output of a request ends with one event that has a finish_reason, unless the request is cancelled. A step that
    raises is retried up to `MAX_RETRIES` times in a row; if the device is out of memory, steps are made smaller for a
    while. If the engine fails nevertheless, `failure` is set, and all requests, later ones too, end with
    `internal_error`.

    num_retries: steps that were retried
    num_shrinks: retries that made the batch smaller
    last_error:  why the latest retry was needed
    num_tokens:  tokens generated so far, of all requests
    """

    MAX_RETRIES = 3
    GROW_AFTER_STEPS = 32

    def __init__(self, engine: SteppingEngine) -> None:
        """Takes the engine over until `close`."""
        self.engine = engine
        self.failure: BaseException | None = None
        self.last_error = ""
        self.num_retries = 0
        self.num_shrinks = 0
        self._idle_s = 0.0
        self._idle_since: float | None = None
        self.num_tokens = 0
        self._is_shrunk = False
        self._good_steps, self._patience = 0, self.GROW_AFTER_STEPS
        self._retries: Counter[str] = Counter()
        """Attempts since the last completed step that ran out of memory (`memory`; `futile` ones could not be made
        smaller) or failed for another reason (`other`), after so many `steps`."""
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._process = os.getpid()
        self._is_closed = False
        self._is_over = False
        """Whether the thread executes no more commands; whoever sends one does that then."""
        self._close_engine = False
        self._requests: dict[int, Request] = {}
        self._thread = threading.Thread(target=self._run, name="cbatch-engine", daemon=True)
        engine.release_thread()
        try:
            self._thread.start()
        except BaseException:  # Ctrl-C, after which nobody would know the thread
            self._inbox.put(None)
            raise

    def check_may_wait(self) -> None:
        """Raises EngineError where waiting for events would never end: on this thread itself, and in a forked child."""
        if os.getpid() != self._process:
            raise EngineError(FORKED)
        if threading.current_thread() is self._thread:
            raise EngineError(
                "This cannot be called on the engine's own thread, in a callback: it would wait for itself."
            )

    @property
    def has_ended(self) -> bool:
        """Whether the engine has failed or is closed, so that unfinished requests get no further token."""
        return self.failure is not None or self._is_closed

    @property
    def is_dead(self) -> bool:
        """Whether nothing can come any more, not even errors of requests that were unfinished."""
        return self.failure is not None or not self._thread.is_alive()

    def submit(self, request: Request, on_event: EventCallback) -> None:
        """Queues a request. Its events go to `on_event`, also the error if it is refused."""
        request.on_event, request.unfinished = on_event, set(range(request.num_outputs))
        self._send(partial(self._add, request))

    def cancel(self, request: Request) -> None:
        """Cancels a request; events of the step in flight may still come."""
        self._send(partial(self._cancel, request))

    def close(self, *, close_engine: bool = False, timeout_s: float | None = None) -> None:
        """Ends the thread after the current step. Unfinished requests end with an error (`cancelled`).

        close_engine: whether the engine is closed too; otherwise its owner may use it again, or close it
        timeout_s:    how long to wait for the end of the thread; None: as long as it takes
        """
        self._close_engine |= close_engine
        self._is_closed = True
        self._inbox.put(None)
        if threading.current_thread() is not self._thread:  # a garbage collection there may close the engine
            self._thread.join(timeout_s)

    def stats(self) -> EngineStats:
        """The present work and the totals so far of the engine and of this thread."""
        since = self._idle_since
        return replace(
            self.engine.stats(),
            num_tokens=self.num_tokens,
            num_retries=self.num_retries,
            num_shrinks=self.num_shrinks,
            last_error=self.last_error,
            idle_s=self._idle_s + (time.monotonic() - since if since is not None else 0.0),
        )

    def _send(self, command: Callable[[], None]) -> None:
        """Takes no lock: a signal handler or a garbage collection may close the engine in the middle of this."""
        self._inbox.put(command)
        if self._is_over:
            self._empty_inbox()

    def _run(self) -> None:
        with suppress(BaseException):  # what fails here fails in a step, too, which is retried
            self.engine.runner.warm_up_thread()
        is_open = True
        while is_open:
            try:
                is_open = self._process_inbox()
                for event in self._step() if is_open else ():
                    self._deliver(event)
            except BaseException as error:  # whatever a kernel, the device or a callback raises: nobody waits for ever
                self._fail(error)
        try:
            self._end_requests()
        finally:
            self.engine.release_thread()
            if self._close_engine:
                self.engine.close()

    def _end_requests(self) -> None:
        requests, self._requests = self._requests, {}
        self._is_over = True
        try:
            self._empty_inbox()
            for request_id in requests:
                self.engine.cancel(request_id)
        finally:
            for request in requests.values():
                self._reject(request, RequestError("cancelled", CLOSED))

    def _empty_inbox(self) -> None:
        """Executes the commands that are there by now; the senders of later ones do it themselves."""
        with suppress(queue.Empty):
            for _ in range(self._inbox.qsize()):
                if (command := self._inbox.get_nowait()) is not None:
                    command()

    def _step(self) -> list[TokenEvent]:
        """A step of the engine, retried if it fails: `SteppingEngine.step` loses nothing when it raises."""
        while True:
            try:
                events = self.engine.step()
            except Exception as error:
                if problem := kernel_too_large(error):  # a smaller step does not help
                    raise EngineError(problem) from error
                if isinstance(error, EngineError):
                    raise
                self.last_error = f"{type(error).__name__}: {error}"
                ran_out_of_memory = is_out_of_memory(error)
                num_steps = self.engine.stats().num_steps
                if self._retries["steps"] != num_steps:  # one has completed since; a launched one may still fail
                    self._retries = Counter(steps=num_steps)
                retries = self._retries
                if not ran_out_of_memory and retries["other"] == self.MAX_RETRIES:
                    raise
            else:
                # Steps are made larger again after a while, which doubles each time that this fails.
                self._good_steps += self._is_shrunk
                if self._is_shrunk and self._good_steps >= self._patience:
                    self._good_steps, self._is_shrunk = 0, not self.engine.scheduler.grow()
                return events
            # Only here, where the exception no longer holds the tensors of the step, can their memory be freed.
            self.num_retries += 1
            retries["memory" if ran_out_of_memory else "other"] += 1
            if ran_out_of_memory:
                self._make_room(retries)

    def _make_room(self, retries: Counter[str]) -> None:
        """Gives memory back and, from the second time on, makes steps smaller. Raises EngineError if neither helps."""
        release_memory(self.engine.device)
        if retries["memory"] == 1:  # another process may have taken the memory for a moment
            return
        if self.engine.shrink():
            self.num_shrinks += 1
            self._good_steps, self._patience, self._is_shrunk = 0, 2 * self._patience, True
            return
        retries["futile"] += 1
        if retries["futile"] > self.MAX_RETRIES:
            raise EngineError(f"not even a step of one token fits in the device's memory ({self.last_error})")

    def _process_inbox(self) -> bool:
        """Executes the commands in the inbox; waits for one when idle. False when the thread is to end."""
        while True:
            try:
                command = self._inbox.get_nowait()
            except queue.Empty:
                if self.failure is None and self.engine.has_work:
                    return True
                self._idle_since = time.monotonic()
                with span("wait"):
                    command = self._inbox.get()
                self._idle_s += time.monotonic() - self._idle_since
                self._idle_since = None
            if command is None:
                return False
            command()
            del command  # it holds its request, and this thread may be idle for long

    def _add(self, request: Request) -> None:
        if self._is_over:
            self._reject(request, RequestError("cancelled", CLOSED))
            return
        if self.failure is not None:
            self._reject(request, _engine_failed(self.failure))
            return
        try:
            request_id = self.engine.add_request(request)
        except RequestError as error:
            self._reject(request, error)
        except BaseException as error:  # an unforeseen failure of one request harms no other
            self._reject(request, RequestError("internal_error", f"The request failed: {error!r}"))
        else:
            self._requests[request_id] = request
            if request.known:
                for event in self.engine.take_events():
                    self._deliver(event)

    def _cancel(self, request: Request) -> None:
        _finish(request)
        if request.request_id is not None and self._requests.pop(request.request_id, None) is not None:
            self.engine.cancel(request.request_id)

    def _deliver(self, event: TokenEvent) -> None:
        assert event.request_id is not None
        request = self._requests.get(event.request_id)
        if request is None or request.on_event is None:  # its reader has failed in this step
            return
        on_event = request.on_event
        if event.finish_reason is not None:
            request.unfinished.discard(event.sample_index)
            if not request.unfinished:
                del self._requests[event.request_id]
                _finish(request)
        self.num_tokens += event.token_id is not None and not event.is_known
        try:
            on_event(event)
        except BaseException as error:  # a reader that fails harms no other
            unfinished = {event.sample_index, *request.unfinished}
            self._cancel(request)
            request.on_event, request.unfinished = on_event, unfinished
            self._reject(request, RequestError("internal_error", f"The reader of the request failed: {error!r}"))

    def _reject(self, request: Request, error: RequestError) -> None:
        """Ends the unfinished outputs of a request with an error."""
        on_event, unfinished = request.on_event, sorted(request.unfinished)
        _finish(request)
        for sample_index in unfinished:
            assert on_event is not None
            event = TokenEvent(request.request_id, None, finish_reason="error", error=error, sample_index=sample_index)
            with suppress(BaseException):  # there is nobody left to tell
                on_event(event)

    def _fail(self, error: BaseException) -> None:
        clear_frames(error)
        with suppress(BaseException):  # deliver what is computed, unless a callback is what failed
            for event in self.engine.flush():
                self._deliver(event)
        self.failure = error
        for request in self._requests.values():  # the engine holds them until the end
            self._reject(request, _engine_failed(error))


def _finish(request: Request) -> None:
    """No event of a request will come any more. What takes them refers to it, so it is let go."""
    request.on_event = None
    request.unfinished.clear()


def _engine_failed(error: BaseException) -> RequestError:
    return RequestError("internal_error", f"The engine failed: {error}")
