"""The results of requests as they come: for a loop, and for a loop of asyncio."""

from __future__ import annotations

import asyncio
import queue
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from typing import TypeVar

from cbatch.base.errors import EngineError, in_short
from cbatch.base.outputs import TokenEvent
from cbatch.base.request import Request
from cbatch.engine.thread import CLOSED, EngineThread
from cbatch.requests.completion import Completion
from cbatch.requests.output_processor import OutputProcessor, StreamEvent

POLL_SECONDS = 1.0
"""How often somebody who waits looks whether the engine's thread has ended."""

T = TypeVar("T")
Received = tuple[OutputProcessor, TokenEvent]


class RequestGroup:
    """The requests of one call on an engine's thread. `close` cancels what is unfinished."""

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread
        self._submitted: set[Request] = set()
        self._failure: BaseException | None = None
        """The error that kept an event from being taken, after which its request may never end."""
        self.num_unread = 0
        """Requests whose completion was not read."""

    def submit_all(
        self, requests: Sequence[Request | Completion], put: Callable[[Received | StreamEvent], None]
    ) -> None:
        """Submits requests. A Completion is the result of a prompt that was refused, whose only event comes first."""
        for one in requests:
            if isinstance(one, Completion):
                self.num_unread += 1
                put(StreamEvent(one.index, finish_reason="error", error=one.error, completion=one))
        for one in requests:
            if isinstance(one, Request):
                self.submit(one, put)

    def submit(
        self, request: Request, on_event: Callable[[Received], None], *, only_last: bool = False
    ) -> OutputProcessor:
        """Submits a request. `on_event` runs on the engine's thread, after the request's OutputProcessor.

        only_last: whether it is called for the last event alone
        """
        outputs = self._thread.engine.output_processor(request)

        def take(event: TokenEvent) -> None:
            try:
                outputs.take(event)
                if outputs.is_finished or not only_last:
                    on_event((outputs, event))
            except BaseException as error:
                self._failure = error
                raise

        self._submitted.add(request)
        self.num_unread += 1
        self._thread.submit(request, take)
        return outputs

    def read(self, received: Received | StreamEvent | None) -> StreamEvent | None:
        """The event that somebody reads; None if there is none, or if its request has failed before."""
        if received is None:
            return None
        if isinstance(received, StreamEvent):
            self.num_unread -= 1
            return received
        outputs, event = received
        if outputs.is_read:
            return None
        read = outputs.read(event)
        if outputs.is_read:
            self.num_unread -= 1
            self.cancel(outputs.request)
        return read

    def next_of(self, received: queue.SimpleQueue[T]) -> T:
        """Waits for what `on_event` puts into a queue. Raises EngineError if nothing can come any more."""
        while True:
            is_over = self.is_over
            with suppress(queue.Empty):
                return received.get(timeout=POLL_SECONDS)
            if is_over:
                raise self.error()

    @property
    def is_over(self) -> bool:
        """Whether no event may come any more, after those that are there."""
        return self._thread.is_dead or self._failure is not None

    def error(self) -> EngineError:
        """Why nothing comes any more."""
        reason = self._failure or self._thread.failure
        error = EngineError(f"The engine failed: {in_short(reason)}." if reason else CLOSED)
        error.__cause__ = reason
        return error

    def cancel(self, request: Request) -> None:
        """Cancels a request, unless it is finished."""
        self._submitted.discard(request)
        if request.unfinished:
            self._thread.cancel(request)

    def close(self) -> None:
        """Cancels what is unfinished. May be called twice."""
        for request in list(self._submitted):
            self.cancel(request)


class Mailbox:
    """Takes what was received from the engine's thread to a loop of asyncio.

    It does not know its reader, so that a reader that nobody holds any more is freed.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._received: asyncio.Queue[Received | StreamEvent | None] = asyncio.Queue()

    def put(self, received: Received | StreamEvent | None) -> None:
        """Called on any thread. Raises RuntimeError if the loop is closed, which cancels the request.

        None only wakes the reader.
        """
        self._loop.call_soon_threadsafe(self._received.put_nowait, received)

    async def get(self, group: RequestGroup) -> Received | StreamEvent | None:
        """Raises EngineError if nothing of these requests can come any more."""
        while True:
            is_over = group.is_over
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    return await self._received.get()
            if is_over:
                raise group.error()


class Stream(Iterator[StreamEvent], AbstractContextManager["Stream"]):
    """Events of one or several requests, as they come. Leaving it early cancels what is unfinished.

    The requests run whether somebody reads or not. Threads that read the same stream share its events.
    """

    def __init__(self, thread: EngineThread, requests: Sequence[Request | Completion], owner: object = None) -> None:
        """
        requests: to run; a Completion among them is the result of a prompt that was refused
        owner:    kept until the stream ends: an Engine that nobody holds is closed
        """
        self._group = RequestGroup(thread)
        self._received: queue.SimpleQueue[Received | StreamEvent | None] = queue.SimpleQueue()
        self._thread = thread
        self._owner = owner
        self._reading = threading.Lock()
        self._is_closed = False
        weakref.finalize(self, self._group.close)  # when it is freed, or the program ends
        try:
            self._group.submit_all(requests, self._received.put)
        except BaseException:
            self.close()
            raise

    def __next__(self) -> StreamEvent:
        self._thread.check_may_wait()
        try:
            with self._reading:
                event = None
                while event is None and self._group.num_unread and not self._is_closed:
                    event = self._group.read(self._group.next_of(self._received))
        except BaseException:  # such as Ctrl-C: whoever keeps its traceback keeps the stream
            self.close()
            raise
        if event is None:
            self.close()
            raise StopIteration
        return event

    def close(self) -> None:
        """Ends the iteration, also where another thread waits for an event, and cancels what is unfinished."""
        self._is_closed = True
        self._owner = None
        self._group.close()
        self._received.put(None)

    def __exit__(self, *error: object) -> None:
        self.close()


class AsyncStream(AsyncIterator[StreamEvent], AbstractAsyncContextManager["AsyncStream"]):
    """Events of one or several requests, for `async for`. It begins with the first event that is asked for.

    Leaving it early cancels what is unfinished: at once in an `async with` block, by `aclose`, or when the task that
    waits for an event is cancelled; otherwise when the object is freed. Tasks that read the same stream share its
    events.
    """

    def __init__(
        self, thread: EngineThread, encode: Callable[[], Sequence[Request | Completion]], owner: object = None
    ) -> None:
        """
        encode: makes the requests; it is called on another thread, since it may take long
        owner:  kept until the stream ends: an Engine that nobody holds is closed
        """
        self._thread = thread
        self._owner = owner
        self._group = RequestGroup(thread)
        self._encode = encode
        self._reading = asyncio.Lock()
        self._mailbox: Mailbox | None = None
        self._is_closed = False
        weakref.finalize(self, self._group.close)  # when it is freed, or the program ends

    async def __anext__(self) -> StreamEvent:
        self._thread.check_may_wait()
        try:
            async with self._reading:
                event, mailbox = None, await self._start()
                while event is None and self._group.num_unread and not self._is_closed:
                    event = self._group.read(await mailbox.get(self._group))
        except BaseException:  # such as a cancelled task: whoever keeps its traceback keeps the stream
            self._close()
            raise
        if event is None:
            self._close()
            raise StopAsyncIteration
        return event

    async def aclose(self) -> None:
        """Ends the iteration, also where another task waits for an event, and cancels what is unfinished."""
        self._close()

    async def __aexit__(self, *error: object) -> None:
        self._close()

    async def _start(self) -> Mailbox:
        if self._mailbox is None:
            requests = await asyncio.to_thread(self._encode)
            self._mailbox = Mailbox()
            self._group.submit_all(requests if not self._is_closed else (), self._mailbox.put)
        return self._mailbox

    def _close(self) -> None:
        self._is_closed = True
        self._owner = None
        self._encode = list
        self._group.close()
        if self._mailbox is not None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                self._mailbox.put(None)
