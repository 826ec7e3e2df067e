"""The rows of a run on their way from the input through the engine to the output.

Three threads work side by side:

- The reader (`_read_rows`) turns lines into requests, and submits them to the engine's thread.
- The engine's thread computes them, and calls back (`on_event`) for each token.
- The writer (`_write_rows`), which is the thread that called `run`, writes finished rows.

Both others send what they have done to the writer's inbox. A window bounds the rows between reader and writer.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from cbatch.engine.base.errors import CbatchError, EngineError, Interrupted, RequestError, RunFailed
from cbatch.engine.base.outputs import TokenEvent
from cbatch.engine.batch.jsonl import LineProcessor, format_row
from cbatch.engine.batch.lines import Line
from cbatch.engine.batch.window import Window
from cbatch.engine.batch.writer import OutputRow, RowWriter
from cbatch.engine.engine_thread import EngineThread, RequestHandle
from cbatch.engine.requests.input_processor import RowRequest
from cbatch.engine.requests.result_row import ResultFormatter

POLL_SECONDS = 0.2
MAX_ROWS_PER_WRITE = 256


@dataclass(frozen=True, slots=True)
class EndOfInput:
    """The reader's last message: how many rows it took, and the error that ended the input early."""

    rows: int
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class StopRequested:
    """A signal asks the run to end. Rows that were finished before it are still written."""


Message = RowRequest | EndOfInput | StopRequested


class RunObserver(Protocol):
    """Counts what a run does.

    output_tokens: tokens generated so far; the pipeline adds to it on the engine's thread
    """

    output_tokens: int

    def start(self, now: float) -> None:
        """A row was taken at the time `now`; called for each row, on the reader's thread."""

    def count(self, request: RowRequest) -> None:
        """A row is finished and written; called on the writer's thread."""


class Pipeline:
    """Runs the rows of one input on an engine's thread."""

    def __init__(
        self,
        engine_thread: EngineThread,
        output: RowWriter,
        lines: LineProcessor,
        results: ResultFormatter,
        observer: RunObserver,
        *,
        window: int,
        on_error: Callable[[str], None] | None = None,
    ) -> None:
        """
        window:   most rows between reading and writing
        on_error: called with the message of each error row
        """
        self._engine_thread = engine_thread
        self._output = output
        self._lines = lines
        self._results = results
        self._observer = observer
        self._num_errors = 0
        self.window = Window(window)
        self._on_error = on_error
        self._signum: int | None = None
        self._in_flight: dict[int, list[RequestHandle]] = {}
        self._is_stopping = False
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def run(
        self,
        lines: Iterator[Line],
        on_progress: Callable[[], None],
        *,
        kept: Container[int] = (),
        max_errors: int | None = None,
    ) -> None:
        """Runs until every line has a row of output. However it ends, finished rows are written.

        on_progress: called after each write, and now and then between writes
        kept:        indices of lines that have a row of output already
        max_errors:  number of error rows that ends the run

        Raises EngineError if the engine fails, RunFailed if the input or the output fails or there are `max_errors`
        error rows, ReaderGone if nobody reads the output any more, and Interrupted after `interrupt`.
        """
        threading.Thread(target=self._read_rows, args=(lines, kept), name="cbatch-reader", daemon=True).start()
        try:
            end = self._write_rows(on_progress, max_errors)
        finally:
            self._cancel_unfinished()
        if (failure := self._engine_thread.failure) is not None:
            raise self._ended_early(EngineError, f"The engine failed: {failure}.") from failure
        if end is not None and end.error is not None:
            raise self._ended_early(RunFailed, f"Cannot read the input: {end.error}.") from end.error
        self._raise_if_interrupted()
        self._output.finish(self._raise_if_interrupted)

    def interrupt(self, signum: int) -> None:
        """Ends the run after the rows that are finished by now. May be called in a signal handler."""
        self._signum = signum
        self._inbox.put(StopRequested())

    # The reader's thread.

    def _read_rows(self, lines: Iterator[Line], kept: Container[int]) -> None:
        position = 0
        error: Exception | None = None
        try:
            for line in lines:
                if line.index in kept:
                    continue
                is_closed = not self.window.acquire(position, len(line.data or b""))
                if is_closed or self._is_stopping or self._engine_thread.failure is not None:
                    break
                self._start_row(position, line)
                position += 1
        except Exception as raised:  # the writer ends the run with it
            error = raised
        self._inbox.put(EndOfInput(position, error))

    def _start_row(self, position: int, line: Line) -> None:
        taken_at = time.monotonic()
        self._observer.start(taken_at)
        request = self._lines.build(line)
        request.position, request.taken_at = position, taken_at
        prompt_ids = self._lines.inputs.encode(request)
        if prompt_ids is None:
            request.finished_at = time.monotonic()
            self._inbox.put(request)
        else:
            self._submit(request, prompt_ids)

    def _submit(self, request: RowRequest, prompt_ids: list[int]) -> None:
        """Submits a row to the engine, once for each of its outputs."""
        request.detokenizer = self._engine_thread.engine.detokenizer(prompt_ids, request.params, request.tags)
        request.release_prompt(prompt_ids)
        outputs_left = request.params.n

        def on_event(event: TokenEvent) -> None:
            """Runs on the engine's thread."""
            nonlocal outputs_left
            request.completion.take(event)
            if event.token_id is not None:
                self._observer.output_tokens += 1
                if request.first_token_at is None:
                    request.first_token_at = time.monotonic()
            if event.error is not None:
                request.fail(event.error, event.sample_index)
            if event.finish_reason is not None:
                outputs_left -= 1
            if outputs_left == 0:
                request.finished_at = time.monotonic()
                request.is_lost = self._engine_thread.failure is not None
                self._inbox.put(request)

        handles = self._in_flight[request.position] = []
        for number in range(request.params.n):
            handle = self._engine_thread.submit(
                prompt_ids,
                request.params.for_sample(number),
                on_event,
                seed=request.seed,
                priority=request.row.priority,
                sample_index=number,
                tags=request.tags,
            )
            handles.append(handle)
            if self._is_stopping:  # `_cancel_unfinished` may have run before this handle was there
                self._engine_thread.cancel(handle)

    # The writer's thread.

    def _write_rows(self, on_progress: Callable[[], None], max_errors: int | None) -> EndOfInput | None:
        """Writes rows until all are written. Returns None if the engine failed before the reader was done."""
        end: EndOfInput | None = None
        num_done = 0
        while end is None or num_done < end.rows:
            messages = self._next_messages()
            finished = [message for message in messages if isinstance(message, RowRequest)]
            num_done += len(finished)
            self._write_finished(finished, max_errors)
            self._output.tick()
            on_progress()
            if max_errors is not None and self._num_errors >= max_errors:
                raise self._ended_early(RunFailed, f"Stopped at error {max_errors:,}, as --max-errors says.")
            end = next((message for message in messages if isinstance(message, EndOfInput)), end)
            if StopRequested() in messages:  # only now: what was finished before the signal is written
                self._raise_if_interrupted()
            if not messages and self._engine_thread.failure is not None:
                break
        return end

    def _next_messages(self) -> list[Message]:
        """All messages that have come since the last call. Waits at most POLL_SECONDS for the first one."""
        messages: list[Message] = []
        with suppress(queue.Empty):
            messages.append(self._inbox.get(timeout=POLL_SECONDS))
            while len(messages) < MAX_ROWS_PER_WRITE:
                messages.append(self._inbox.get_nowait())
        return messages

    def _write_finished(self, finished: list[RowRequest], max_errors: int | None) -> None:
        """Writes finished rows in one write, up to the last error that is allowed, and counts them."""
        errors_left = math.inf if max_errors is None else max_errors - self._num_errors
        requests, rows = [], []
        for request in finished:
            self._in_flight.pop(request.position, None)
            self._make_texts(request)
            if not request.is_lost and (request.error is None or errors_left > 0):
                errors_left -= request.error is not None
                requests.append(request)
                rows.append(OutputRow(request.position, request.row.index, format_row(self._results.row(request))))
        self.window.release(self._output.write(rows))
        for request in requests:
            self._observer.count(request)
            if request.error is not None:
                self._num_errors += 1
                if self._on_error is not None:
                    self._on_error(str(request.error))

    def _make_texts(self, request: RowRequest) -> None:
        """Makes the texts of all outputs here, and not on the engine's thread; the row fails if one cannot be made."""
        for number, choice in enumerate(request.completion.choices):
            try:
                choice.text = request.detokenizer.text_of(choice)
            except RequestError as error:
                request.fail(error, number)

    def _ended_early(self, kind: type[CbatchError], reason: str) -> CbatchError:
        """Writes what was held back, and returns the error of a run that ends early."""
        self._output.flush_held()
        return kind(reason + self._output.resume_hint)

    def _raise_if_interrupted(self) -> None:
        if self._signum is not None:
            self._output.flush_held()
            raise Interrupted(self._signum, self._output.resume_hint)

    def _cancel_unfinished(self) -> None:
        """Stops the reader and cancels the requests in flight, so that other front ends have the engine."""
        self._is_stopping = True
        self.window.close()
        for handles in list(self._in_flight.values()):
            for handle in list(handles):
                self._engine_thread.cancel(handle)
