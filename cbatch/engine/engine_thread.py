"""A thread that runs an engine, so that front ends can submit requests from any thread and never block a step."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial

from cbatch.engine.base.errors import EngineError, RequestError
from cbatch.engine.base.outputs import TokenEvent
from cbatch.engine.base.params import SamplingParams
from cbatch.engine.engine import Engine
from cbatch.engine.runtime.memory import clear_frames, is_out_of_memory, release_memory
from cbatch.engine.text.tokenizer import Prompt
from cbatch.engine.tracing.phases import span
from cbatch.engine.tracing.trace import StepTracer

EventCallback = Callable[[TokenEvent], None]
"""Receives the events of one request. It is called on the engine's thread, so it must be quick (put into a queue)."""


@dataclass(slots=True)
class RequestHandle:
    """A submitted request. `request_id` is None until the engine has accepted it."""

    add: Callable[[], int]
    on_event: EventCallback
    sample_index: int
    request_id: int | None = None


@dataclass(slots=True)
class _Retries:
    """Failed attempts since the last completed step.

    num_steps:     completed steps at that time
    failures:      attempts that failed for another reason than memory
    out_of_memory: attempts that ran out of memory; `futile` of them could not be made smaller
    """

    num_steps: int = -1
    failures: int = 0
    out_of_memory: int = 0
    futile: int = 0


class EngineThread:
    """Runs `engine.step()` as long as there is work. Requests and cancellations arrive through an inbox.

    Every request ends with one event that has a finish_reason, unless it is cancelled or the thread is closed. A step
    that raises is retried up to `MAX_RETRIES` times in a row; if the device is out of memory, steps are made smaller
    for a while. If the engine fails nevertheless, `failure` is set, and all requests, later ones too, end with
    `internal_error`.

    num_retries: steps that were retried
    num_shrinks: retries that made the batch smaller
    last_error:  why the latest retry was needed
    num_tokens:  tokens generated so far, of all requests
    """

    MAX_RETRIES = 3
    GROW_AFTER_STEPS = 32

    def __init__(self, engine: Engine, trace: StepTracer | None = None) -> None:
        """`trace`: records some of the steps; it is complete after `close`."""
        self.engine = engine
        self._trace = trace
        if trace is not None:
            trace.prepare()
        self.failure: Exception | None = None
        self.last_error = ""
        self.num_retries = 0
        self.num_shrinks = 0
        self._idle_s = 0.0
        self._idle_since: float | None = None
        self.num_tokens = 0
        self._is_shrunk = False
        self._good_steps, self._patience = 0, self.GROW_AFTER_STEPS
        self._retries = _Retries()
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._handles: dict[int, RequestHandle] = {}
        self._orphaned: list[int] = []
        """Requests that ended when the engine failed, and that the engine still holds."""
        self._thread = threading.Thread(target=self._run, name="cbatch-engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        on_event: EventCallback,
        *,
        seed: int = 0,
        priority: int = 0,
        sample_index: int = 0,
        tags: Sequence[str] = (),
    ) -> RequestHandle:
        """Queues a request, with the parameters of `Engine.add`; its events go to `on_event`."""
        add = partial(
            self.engine.add, prompt, params, seed=seed, priority=priority, sample_index=sample_index, tags=tags
        )
        handle = RequestHandle(add, on_event, sample_index)
        self._inbox.put(lambda: self._add(handle))
        return handle

    def cancel(self, handle: RequestHandle) -> None:
        """Cancels a request; events of the step in flight may still come."""
        self._inbox.put(lambda: self._cancel(handle))

    def close(self) -> None:
        """Ends the thread after the current step. Unfinished requests are cancelled and get no further event.

        The engine stays open: its owner may start another thread for it, or close it.
        """
        self._inbox.put(None)
        self._thread.join()
        for request_id in (*self._handles, *self._orphaned):
            self.engine.cancel(request_id)
        self._handles, self._orphaned = {}, []

    @property
    def idle_s(self) -> float:
        """Seconds so far in which there was nothing to compute."""
        since = self._idle_since
        return self._idle_s + (time.monotonic() - since if since is not None else 0.0)

    def _run(self) -> None:
        while self._process_inbox():
            try:
                for event in self._step():
                    self._deliver(event)
            except Exception as error:  # whatever a kernel or the device raises: no request waits for ever
                self._fail(error)
        if self._trace is not None:
            self._trace.finish()

    def _step(self) -> list[TokenEvent]:
        """A step of the engine, retried if it fails: `Engine.step` loses nothing when it raises."""
        while True:
            try:
                with self._trace.step() if self._trace is not None else nullcontext():
                    events = self.engine.step()
            except Exception as error:
                self.last_error = f"{type(error).__name__}: {error}"
                ran_out_of_memory = is_out_of_memory(error)
                num_steps = self.engine.stats().num_steps
                if self._retries.num_steps != num_steps:  # one has completed since; a launched one may still fail
                    self._retries = _Retries(num_steps)
                retries = self._retries
                if not ran_out_of_memory and retries.failures == self.MAX_RETRIES:
                    raise
            else:
                self._after_good_step()
                return events
            # Only here, where the exception no longer holds the tensors of the step, can their memory be freed.
            self.num_retries += 1
            if not ran_out_of_memory:
                retries.failures += 1
                continue
            retries.out_of_memory += 1
            release_memory(self.engine.device)
            # The first time, another process may have taken the memory for a moment.
            if retries.out_of_memory > 1 and not self._shrink():
                retries.futile += 1
                if retries.futile > self.MAX_RETRIES:
                    raise EngineError(f"not even a step of one token fits in the device's memory ({self.last_error})")

    def _shrink(self) -> bool:
        if not self.engine.shrink():
            return False
        self.num_shrinks += 1
        self._good_steps, self._patience, self._is_shrunk = 0, 2 * self._patience, True
        return True

    def _after_good_step(self) -> None:
        """Makes steps larger again after a while, which doubles each time that this fails."""
        if self._is_shrunk:
            self._good_steps += 1
            if self._good_steps >= self._patience:
                self._good_steps = 0
                self._is_shrunk = not self.engine.grow()

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

    def _add(self, handle: RequestHandle) -> None:
        if self.failure is not None:
            self._reject(handle, _engine_failed(self.failure))
            return
        try:
            handle.request_id = handle.add()
        except RequestError as error:
            self._reject(handle, error)
        except Exception as error:  # an unforeseen failure of one request harms no other
            self._reject(handle, RequestError("internal_error", f"The request failed: {error!r}"))
        else:
            self._handles[handle.request_id] = handle

    def _cancel(self, handle: RequestHandle) -> None:
        if handle.request_id in self._handles:
            del self._handles[handle.request_id]
            self.engine.cancel(handle.request_id)

    def _deliver(self, event: TokenEvent) -> None:
        assert event.request_id is not None
        handle = self._handles[event.request_id]
        if event.finish_reason is not None:
            del self._handles[event.request_id]
        self.num_tokens += event.token_id is not None
        handle.on_event(event)

    def _reject(self, handle: RequestHandle, error: RequestError) -> None:
        request_id, index = handle.request_id, handle.sample_index
        handle.on_event(TokenEvent(request_id, None, finish_reason="error", error=error, sample_index=index))

    def _fail(self, error: Exception) -> None:
        clear_frames(error)
        with suppress(Exception):  # deliver what is computed, unless a callback is what failed
            for event in self.engine.flush():
                self._deliver(event)
        self.failure = error
        handles, self._handles = self._handles, {}
        self._orphaned = list(handles)
        for handle in handles.values():
            self._reject(handle, _engine_failed(error))


def _engine_failed(error: Exception) -> RequestError:
    return RequestError("internal_error", f"The engine failed: {error}")
