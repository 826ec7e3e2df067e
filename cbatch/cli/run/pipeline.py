"""A batch: lines of a stream through a driver to an output.

Three threads meet here: a reader turns lines into token ids and submits them, the driver's thread runs the
engine, and the caller's thread writes what is finished. A window bounds what is between reading and writing.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field

from cbatch.cli.common.exits import Interrupted, RunFailed
from cbatch.cli.run.input.jsonl import format_row
from cbatch.cli.run.input.lines import Line
from cbatch.cli.run.output.writer import OutputRow, RowWriter
from cbatch.cli.run.requests import RequestBuilder, RowRequest
from cbatch.cli.run.stats import RunStats
from cbatch.engine import CbatchError, EngineError, EngineThread, RequestError, RequestHandle, TokenEvent

POLL_SECONDS = 0.2
MAX_ROWS_PER_WRITE = 256
"""Most rows that go into one write; each of them is whole in it."""

WINDOW_BYTES = 256 * 2**20
"""Most bytes of input lines between reading and writing, where that is more than one line."""


class Window:
    """Bounds the rows that are in flight or held back, and the bytes of their lines.

    One thread enters them, another one leaves them; a queue between the two is all that they share.
    """

    def __init__(self, rows: int, size: int = WINDOW_BYTES) -> None:
        self._rows_left = rows
        self._bytes_left = size
        self._sizes: dict[int, int] = {}
        self._released: queue.SimpleQueue[Iterable[int] | None] = queue.SimpleQueue()
        self.waited_s = 0.0

    def acquire(self, position: int, size: int) -> bool:
        """Waits until there is room for one row more; a row that is larger than the window goes alone.

        False where the window is closed, and there will be none.
        """
        while self._rows_left <= 0 or (self._bytes_left < size and self._sizes):
            if not self._wait():
                return False
        self._sizes[position] = size
        self._rows_left -= 1
        self._bytes_left -= size
        return True

    def close(self) -> None:
        """Lets nobody wait any more."""
        self._released.put(None)

    def release(self, positions: Iterable[int]) -> None:
        self._released.put(positions)

    def _wait(self) -> bool:
        since = time.monotonic()
        positions = self._released.get()
        self.waited_s += time.monotonic() - since
        for position in positions or ():
            self._rows_left += 1
            self._bytes_left += self._sizes.pop(position)
        return positions is not None


@dataclass(eq=False, slots=True)
class PipelineItem:
    """A row on its way, at its position in input order, with the tickets of its outputs."""

    position: int
    request: RowRequest
    tickets: list[RequestHandle] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EndOfInput:
    """The reader's last word: how many rows it took, and what stopped it short of the end."""

    rows: int
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class StopRequested:
    """A signal asks the run to end, after what was finished before it."""


class Pipeline:
    """Feeds rows to a driver and hands finished ones to an output."""

    def __init__(
        self,
        engine_thread: EngineThread,
        output: RowWriter,
        builder: RequestBuilder,
        stats: RunStats,
        *,
        window: int,
        on_error: Callable[[str], None] | None = None,
    ) -> None:
        """`window`: most rows between being read and being written. `on_error`: told what is wrong with bad ones."""
        self._engine_thread = engine_thread
        self._output = output
        self._builder = builder
        self._stats = stats
        self._window = Window(window)
        self._on_error = on_error
        self._signum: int | None = None
        self._in_flight: dict[int, PipelineItem] = {}
        self._is_stopping = False
        self._messages: queue.SimpleQueue[PipelineItem | EndOfInput | StopRequested] = queue.SimpleQueue()

    def run(
        self,
        lines: Iterator[Line],
        on_progress: Callable[[], None],
        *,
        kept: Container[int] = (),
        max_errors: int | None = None,
    ) -> None:
        """Until every line is a row of the output. Rows that are finished are written however it ends.

        kept:        indices of lines whose rows are there already
        on_progress: called whenever rows were written, and now and then while there are none
        Raises EngineError where the engine fails, RunFailed where the input or the output does or there are
        `max_errors` errors, ReaderGone where nobody takes the output, and Interrupted after `interrupt`.
        """
        threading.Thread(target=self._read, args=(lines, kept), name="cbatch-reader", daemon=True).start()
        try:
            end = self._write_until_end(on_progress, max_errors)
        finally:
            self._cancel_unfinished()
        if self._engine_thread.failure is not None:
            raise self._stopped_early(
                EngineError, f"The engine failed: {self._engine_thread.failure}."
            ) from self._engine_thread.failure
        if end is not None and end.error is not None:
            raise self._stopped_early(RunFailed, f"Cannot read the input: {end.error}.") from end.error
        self._raise_if_interrupted()
        self._output.finish(self._raise_if_interrupted)

    def _write_until_end(self, on_progress: Callable[[], None], max_errors: int | None) -> EndOfInput | None:
        """Writes rows until all are handled; None where the engine failed before the reader was done."""
        end: EndOfInput | None = None
        handled = 0
        while end is None or handled < end.rows:
            messages = self._next_messages()
            finished = [item for item in messages if isinstance(item, PipelineItem)]
            handled += len(finished)
            self._write_finished(finished, max_errors)
            self._output.tick()
            on_progress()
            if max_errors is not None and self._stats.errors.total() >= max_errors:
                raise self._stopped_early(RunFailed, f"Stopped at error {max_errors:,}, as --max-errors says.")
            end = next((item for item in messages if isinstance(item, EndOfInput)), end)
            if StopRequested() in messages:  # in its turn: what was finished before it is written
                self._raise_if_interrupted()
            if not messages and self._engine_thread.failure is not None:
                break
        return end

    def _stopped_early(self, kind: type[CbatchError], reason: str) -> CbatchError:
        """The error of a run that ends before its time; what was held back is let out first."""
        self._output.flush_held()
        return kind(reason + self._output.resume_hint)

    def interrupt(self, signum: int) -> None:
        """Ends the run after what is finished by now. May be called in a signal handler."""
        self._signum = signum
        self._messages.put(StopRequested())

    def _raise_if_interrupted(self) -> None:
        if self._signum is not None:
            self._output.flush_held()
            raise Interrupted(self._signum, self._output.resume_hint)

    @property
    def waited_for_output_s(self) -> float:
        """Seconds in which no line could be read because too many rows were not written yet."""
        return self._window.waited_s

    def _next_messages(self) -> list[PipelineItem | EndOfInput | StopRequested]:
        """All that has happened since the last call; waits a while for something, but not for more of it."""
        messages: list[PipelineItem | EndOfInput | StopRequested] = []
        try:
            messages.append(self._messages.get(timeout=POLL_SECONDS))
            while len(messages) < MAX_ROWS_PER_WRITE:
                messages.append(self._messages.get_nowait())
        except queue.Empty:
            pass
        return messages

    def _write_finished(self, finished: list[PipelineItem], max_errors: int | None) -> None:
        """Writes jobs that are done, up to the last error that is allowed, and counts them."""
        errors_left = math.inf if max_errors is None else max_errors - self._stats.errors.total()
        requests, rows = [], []
        for position, request in ((item.position, item.request) for item in finished):
            self._in_flight.pop(position, None)
            self._make_texts(request)
            if not request.is_lost and (request.error is None or errors_left > 0):
                errors_left -= request.error is not None
                requests.append(request)
                rows.append(OutputRow(position, request.row.index, format_row(self._builder.result(request))))
        self._window.release(self._output.write(rows))
        for request in requests:
            self._stats.count(request)
            if request.error is not None and self._on_error is not None:
                self._on_error(str(request.error))

    def _make_texts(self, request: RowRequest) -> None:
        """Makes the texts of a job's outputs, on this thread and not on the engine's; where that fails, so does it."""
        for number, choice in enumerate(request.completion.choices):
            try:
                choice.settle()
            except RequestError as error:
                self._builder.fail(request, error, number)

    def _read(self, lines: Iterator[Line], kept: Container[int]) -> None:
        """Runs on the reader's thread, to the end of the input or the error that stopped it."""
        position = 0
        error: Exception | None = None
        try:
            for line in lines:
                if line.index in kept:
                    continue
                is_closed = not self._window.acquire(position, len(line.data or b""))
                if is_closed or self._is_stopping or self._engine_thread.failure is not None:
                    break
                self._process(position, line)
                position += 1
        except Exception as raised:  # handed to the writing thread, which ends the run with it
            error = raised
        self._messages.put(EndOfInput(position, error))

    def _process(self, position: int, line: Line) -> None:
        taken = time.monotonic()
        self._stats.start(taken)
        request = self._builder.build(line)
        request.taken = taken
        prompt_ids = self._builder.encode(request)
        if prompt_ids is None:
            request.last = time.monotonic()
            self._messages.put(PipelineItem(position, request))
        else:
            self._submit(PipelineItem(position, request), prompt_ids)

    def _submit(self, item: PipelineItem, prompt_ids: list[int]) -> None:
        request = item.request
        request.release_prompt(prompt_ids)
        outputs_left = request.params.n

        def take(event: TokenEvent) -> None:
            nonlocal outputs_left
            request.completion.take(event)
            if event.token_id is not None:
                self._stats.output_tokens += 1
                if request.first is None:
                    request.first = time.monotonic()
            if event.error is not None:
                self._builder.fail(request, event.error, event.sample_index)
            if event.finish_reason is not None:
                outputs_left -= 1
            if outputs_left == 0:
                request.last = time.monotonic()
                request.is_lost = self._engine_thread.failure is not None
                self._messages.put(item)

        self._in_flight[item.position] = item
        for number in range(request.params.n):
            ticket = self._engine_thread.submit(
                prompt_ids,
                request.params.for_sample(number),
                take,
                seed=request.seed,
                priority=request.row.priority,
                sample_index=number,
                tags=request.tags,
            )
            item.tickets.append(ticket)
            if self._is_stopping:  # in the meantime; whoever dropped the others may not have seen this ticket
                self._engine_thread.cancel(ticket)

    def _cancel_unfinished(self) -> None:
        """Ends the reader, and what the engine would compute for nobody; other front ends may go on with it."""
        self._is_stopping = True
        self._window.close()
        for item in list(self._in_flight.values()):
            for ticket in item.tickets:
                self._engine_thread.cancel(ticket)
