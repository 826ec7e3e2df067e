"""The rows of an input on their way through the engine.

Three threads work side by side:

- The reader (`_read_rows`) turns lines into requests, and puts them into the feed of the engine's thread.
- The engine's thread computes them, and calls back (`on_event`) for each token.
- The consumer, which iterates over `finished`, takes the rows that are finished.

An answer need not be the end of its row: the tools that it calls are run, and it may be validated, on further threads,
which submit the row's next request. What a cache of answers has is not submitted. A journal may keep the tokens of rows
that are not finished, for a later run.

The others send what they have done to the consumer's inbox. A window bounds the rows between reader and consumer.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Container, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

from cbatch.base.errors import EngineError, in_short
from cbatch.base.outputs import TokenEvent
from cbatch.base.request import Request
from cbatch.batch.cache.cached_outputs import WaitingRow
from cbatch.batch.driver import StreamObserver
from cbatch.batch.line_processor import LineProcessor
from cbatch.batch.lines import Line
from cbatch.batch.ordering.engine_feed import EngineFeed
from cbatch.batch.ordering.output_forecast import OutputForecast, output_limit
from cbatch.batch.ordering.work_ahead import WorkAhead
from cbatch.batch.ordering.work_order import QueuedRequest
from cbatch.batch.window import BYTES_PER_SCORE, BYTES_PER_TOKEN, WINDOW_BYTES, Window, weight_of
from cbatch.engine.thread import EngineThread
from cbatch.requests.completion import Completion, Timing
from cbatch.requests.output_processor import OutputProcessor

POLL_SECONDS = 0.2
MAX_ROWS_AT_ONCE = 256


class FinishedRow(NamedTuple):
    """A row that is finished, and its position among the rows of this run."""

    position: int
    completion: Completion


@dataclass(frozen=True, slots=True)
class EndOfRow:
    """A row, or a request of it, has ended.

    result:     of the row; or the outputs of the request, on which another one may follow
    is_lost:    because the engine failed or was closed, so that there is no result
    from_cache: the outputs were not computed
    """

    position: int
    result: Completion | OutputProcessor
    is_lost: bool = False
    from_cache: bool = False


@dataclass(frozen=True, slots=True)
class RowCancelled:
    """A row in flight will get no result."""

    position: int


@dataclass(frozen=True, slots=True)
class EndOfInput:
    """The reader's last message: how many rows it took, and the error that ended the input early."""

    rows: int
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Somebody asks the stream to end. Rows that were finished before it are still given."""


@dataclass(frozen=True, slots=True)
class ThreadFailed:
    """A thread could not do its part, so that rows would be waited for in vain."""

    error: BaseException


Message = ThreadFailed | EndOfRow | RowCancelled | EndOfInput | StopRequested


class RowStream:
    """Runs the rows of one input on an engine's thread, and gives them as they finish."""

    def __init__(
        self,
        engine_thread: EngineThread,
        lines: LineProcessor,
        *,
        window: int,
        observer: StreamObserver | None = None,
        reorders: bool = True,
    ) -> None:
        """
        window:   most rows that are read and not yet released
        reorders: whether rows may begin in another order than they are read (see `work_order`)
        """
        self._engine_thread = engine_thread
        self._lines = lines
        self._observer = observer or StreamObserver()
        self._window = Window(window, WINDOW_BYTES)
        self._forecast = OutputForecast()
        self._feed = EngineFeed(engine_thread, self._forecast, reorders=reorders)
        self._in_flight: dict[int, QueuedRequest] = {}
        self._cancelled: set[int] = set()
        self._num_ended = 0
        self._loops = lines.loops(self._ask_again)
        self._cache = lines.open_cache(engine_thread.engine)
        self._token_journal = lines.open_token_journal(engine_thread.engine)
        self._is_stopping = False
        self.poll_s = POLL_SECONDS
        """How long `finished` waits for rows before it gives none."""
        self.has_given_all = False
        """Whether `finished` has given every row of its source; true with the last of them already."""
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def finished(self, source: Iterable[Line], kept: Container[int] = ()) -> Generator[list[FinishedRow]]:
        """Yields the rows that have finished since the last time, now and then none, until all lines have been read.

        kept: indices of lines to leave out

        The consumer releases the rows it is done with. Leaving the iteration cancels what is in flight; `stop` ends it.

        Raises, after all rows that were finished: EngineError if the engine fails or is closed before the last one, and
        what the source raises.
        """
        threading.Thread(target=self._read_rows, args=(source, kept), name="cbatch-reader", daemon=True).start()
        end: EndOfInput | None = None
        num_given = 0
        try:
            while end is None or self._num_ended < end.rows:
                if self._token_journal is not None:
                    self._token_journal.tick()
                messages = self._next_messages()
                finished = self._take_finished(messages)
                num_given += len(finished)
                end = next((message for message in messages if isinstance(message, EndOfInput)), end)
                self.has_given_all = end is not None and end.error is None and num_given == end.rows
                yield finished
                if failure := next((message for message in messages if isinstance(message, ThreadFailed)), None):
                    raise EngineError(f"The run failed: {in_short(failure.error)}.") from failure.error
                if StopRequested() in messages:  # only now: what was finished before it has been given
                    return
                if not messages and self._engine_thread.has_ended:  # and the reader may wait for its source
                    break
        finally:
            self._cancel_unfinished()
        if end is not None and end.error is not None:
            raise end.error
        if not self.has_given_all:
            raise self._engine_error()

    def finished_by_now(self) -> list[FinishedRow]:
        """The rows that have finished since `finished` gave some; for a consumer that leaves its iteration."""
        messages: list[Message] = []
        with suppress(queue.Empty):
            while True:
                messages.append(self._inbox.get_nowait())
        return self._take_finished(messages)

    def release(self, positions: Iterable[int]) -> None:
        """Makes room in the window for as many rows as there are positions."""
        self._window.release(positions)

    def cancel(self, index: int) -> None:
        """Leaves out the row of a line, unless it is finished. Called by the consumer."""
        self._cancelled.add(index)
        for request in list(self._in_flight.values()):
            if request.request.index == index:
                self._cancel(request)

    def stop(self) -> None:
        """Ends `finished` once it has given the rows that are finished by now. May be called in a signal handler."""
        self._inbox.put(StopRequested())

    @property
    def waited_for_consumer_s(self) -> float:
        """Seconds in which the reader waited for room in the window."""
        return self._window.waited_s

    def ahead(self) -> WorkAhead:
        """What is still to be computed of the rows that were read. Called by the consumer."""
        return self._feed.ahead(list(self._in_flight.values()))

    # The reader's thread.

    def _read_rows(self, source: Iterable[Line], kept: Container[int]) -> None:
        position = 0
        error: BaseException | None = None
        try:
            for line in source:
                if line.index in kept or line.index in self._cancelled:
                    continue
                weight = weight_of(line.data)
                if not self._window.acquire(position, weight + self._most_of_prompt(line)) or self._is_stopping:
                    break
                self._window.settle(position, weight + self._start_row(position, line))
                position += 1
        except BaseException as raised:  # the consumer ends with it, also with the SystemExit of a source
            error = raised
        with self._reporting():
            self._feed.end_input()
        self._inbox.put(EndOfInput(position, error))

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Tells the consumer what goes wrong on another thread."""
        try:
            yield
        except BaseException as error:
            self._inbox.put(ThreadFailed(error))
            raise

    def _most_of_prompt(self, line: Line) -> int:
        """Bytes of memory that the tokens of a line's prompt take at most: no token is shorter than a byte."""
        limits = self._engine_thread.engine.scheduler.sequence_limits
        return BYTES_PER_TOKEN * min(len(line.data or b""), limits.context)

    def _start_row(self, position: int, line: Line) -> int:
        """Returns the bytes of memory that its prompt takes as tokens."""
        taken_at = time.monotonic()
        self._observer.start(taken_at)
        request = self._lines.process(line)
        if isinstance(request, Completion):
            request.timing = Timing(taken_at, finished_at=time.monotonic())
            self._inbox.put(EndOfRow(position, request))
            return 0
        self._submit(position, request, taken_at)
        scores = 1 + request.params.prompt_logprobs if request.params.prompt_logprobs is not None else 0
        return (BYTES_PER_TOKEN + BYTES_PER_SCORE * scores) * len(request.prompt_ids)

    def _submit(self, position: int, request: Request, taken_at: float, *, goes_on: bool = False) -> None:
        """Puts a request of a row into the feed. `goes_on`: whether it follows on others of the row."""
        if self._token_journal is not None:
            self._token_journal.continue_(request)
        outputs = self._engine_thread.engine.output_processor(request, taken_at)
        if self._cache is not None:
            if self._cache.replay(outputs):
                self._inbox.put(EndOfRow(position, outputs, from_cache=True))
                return
            if self._cache.defer(WaitingRow(position, request, taken_at)):
                return

        def on_event(event: TokenEvent) -> None:
            """Runs on the engine's thread."""
            try:
                self._take_event(position, outputs, event)
            except BaseException as error:
                self._inbox.put(ThreadFailed(error))
                raise

        limit = output_limit(self._engine_thread.engine.scheduler.sequence_limits, request)
        likely = self._forecast.remaining(request, limit)
        tokens = len(request.prompt_ids) + request.params.n * likely
        queued = QueuedRequest(position, request, on_event, outputs, limit, tokens)
        if self._token_journal is not None:
            self._token_journal.follow(position, outputs)
        self._in_flight[position] = queued
        self._feed.put(queued, goes_on=goes_on)
        if request.index in self._cancelled and not self._is_stopping:  # `cancel` may have run before it was there
            self._cancel(queued)

    def _take_event(self, position: int, outputs: OutputProcessor, event: TokenEvent) -> None:
        outputs.take(event)
        if event.token_id is not None and not event.is_known:
            self._observer.output_tokens += 1
        if event.finish_reason is not None:
            self._feed.output_ended(position)  # before anybody can go on with the row
        if outputs.is_finished:
            is_lost = event.error is not None and self._engine_thread.has_ended
            self._inbox.put(EndOfRow(position, outputs, is_lost))

    def _cancel(self, request: QueuedRequest) -> None:
        self._feed.cancel(request)
        self._inbox.put(RowCancelled(request.position))

    # The consumer's thread.

    def _next_messages(self) -> list[Message]:
        """All messages that have come since the last call. Waits at most `poll_s` for the first one."""
        messages: list[Message] = []
        with suppress(queue.Empty):
            messages.append(self._inbox.get(timeout=self.poll_s))
            while len(messages) < MAX_ROWS_AT_ONCE:
                messages.append(self._inbox.get_nowait())
        return messages

    def _take_finished(self, messages: list[Message]) -> list[FinishedRow]:
        """The finished rows among the messages, but those that the engine has lost.

        Their texts are made here, and not on the engine's thread.
        """
        finished = []
        computed: list[OutputProcessor] = []
        ended: list[Request] = []
        for message in messages:
            if isinstance(message, EndOfRow):
                result = message.result
                queued = self._in_flight.pop(message.position, None)
                if isinstance(result, OutputProcessor) and not message.from_cache:
                    if queued is None:
                        continue  # it was cancelled before it ended
                    self._observe_lengths(queued)
                    computed.append(result)
                    ended.append(result.request)
                completion = None if message.is_lost else self._completion(message)
                if completion is not None and self._goes_on(message.position, result, completion):
                    continue
                self._num_ended += 1
                if completion is not None:
                    self._forget(message.position, completion.index)
                    finished.append(FinishedRow(message.position, completion))
            elif isinstance(message, RowCancelled) and (queued := self._in_flight.pop(message.position, None)):
                ended.append(queued.request)
                self._num_ended += 1
                self._forget(message.position, queued.request.index)
                self._window.release([message.position])
        if self._cache is not None and ended:
            self._cache.keep(computed)
            for row in [row for request in ended for row in self._cache.settle(request)]:
                self._submit(row.position, row.request, row.taken_at)
        return finished

    def _observe_lengths(self, ended: QueuedRequest) -> None:
        for output in ended.outputs.outputs:
            if output.finish_reason in ("stop", "length"):
                self._forecast.observe(ended.request, ended.limit, len(output.token_ids))

    def _forget(self, position: int, index: int) -> None:
        """The tokens of a row are needed no longer; the journal still has them when the row is written."""
        if self._token_journal is not None:
            self._token_journal.forget(position, index)

    def _completion(self, end: EndOfRow) -> Completion:
        if isinstance(end.result, Completion):
            return end.result
        completion = end.result.completion()
        if end.from_cache:
            completion.reused = completion.usage
        return completion

    def _goes_on(self, position: int, result: Completion | OutputProcessor, completion: Completion) -> bool:
        """Whether an answer is not the end of its row, as far as is known yet."""
        return isinstance(result, OutputProcessor) and any(
            loop.take(position, result.request, completion) for loop in self._loops
        )

    def _ask_again(self, position: int, request: Request | Completion, taken_at: float) -> None:
        """Goes on with a row, or ends it, after its tools have run or its answer was checked; on threads of those."""
        with self._reporting():
            if isinstance(request, Completion):
                self._inbox.put(EndOfRow(position, request))
            else:
                self._submit(position, request, taken_at, goes_on=True)

    def _engine_error(self) -> EngineError:
        failure = self._engine_thread.failure
        if failure is None:
            return EngineError("The engine was closed before the last row was finished.")
        error = EngineError(f"The engine failed: {failure}.")
        error.__cause__ = failure
        return error

    def _cancel_unfinished(self) -> None:
        """Stops the reader and cancels the requests in flight, so that other front ends have the engine."""
        self._is_stopping = True
        self._feed.close()
        self._window.close()
        for loop in self._loops:
            loop.close()
        if self._token_journal is not None:
            self._token_journal.close()
        if self._cache is not None:
            self._cache.close()
        for request in list(self._in_flight.values()):
            self._engine_thread.cancel(request.request)
