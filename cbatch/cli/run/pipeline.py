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
from cbatch.cli.run.output.writer import Output, OutputRow
from cbatch.cli.run.requests import Job, Preparer
from cbatch.cli.run.stats import Tally
from cbatch.engine import CbatchError, Driver, EngineError, RequestError, Ticket, TokenEvent

POLL_SECONDS = 0.2
MAX_AT_ONCE = 256
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
        self._gone: queue.SimpleQueue[Iterable[int] | None] = queue.SimpleQueue()
        self.waited_s = 0.0

    def enter(self, place: int, size: int) -> bool:
        """Waits until there is room for one row more; a row that is larger than the window goes alone.

        False where the window is closed, and there will be none.
        """
        while self._rows_left <= 0 or (self._bytes_left < size and self._sizes):
            if not self._wait():
                return False
        self._sizes[place] = size
        self._rows_left -= 1
        self._bytes_left -= size
        return True

    def close(self) -> None:
        """Lets nobody wait any more."""
        self._gone.put(None)

    def leave(self, places: Iterable[int]) -> None:
        self._gone.put(places)

    def _wait(self) -> bool:
        since = time.monotonic()
        places = self._gone.get()
        self.waited_s += time.monotonic() - since
        for place in places or ():
            self._rows_left += 1
            self._bytes_left += self._sizes.pop(place)
        return places is not None


@dataclass(eq=False, slots=True)
class Item:
    """A job on its way, the `place`-th of this run in input order; `tickets` are the driver's, one for each output."""

    place: int
    job: Job
    tickets: list[Ticket] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EndOfInput:
    """The reader's last word: how many rows it took, and what stopped it short of the end."""

    rows: int
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Stop:
    """A signal asks the run to end, after what was finished before it."""


class Batch:
    """Feeds rows to a driver and hands finished ones to an output."""

    def __init__(
        self,
        driver: Driver,
        output: Output,
        preparer: Preparer,
        tally: Tally,
        *,
        window: int,
        on_error: Callable[[str], None] | None = None,
    ) -> None:
        """`window`: most rows between being read and being written. `on_error`: told what is wrong with bad ones."""
        self._driver = driver
        self._output = output
        self._preparer = preparer
        self._tally = tally
        self._window = Window(window)
        self._on_error = on_error
        self._signum: int | None = None
        self._in_flight: dict[int, Item] = {}
        self._is_over = False
        self._done: queue.SimpleQueue[Item | EndOfInput | Stop] = queue.SimpleQueue()

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
            end = self._until_end(on_progress, max_errors)
        finally:
            self._drop_unfinished()
        if self._driver.failure is not None:
            raise self._early(EngineError, f"The engine failed: {self._driver.failure}.") from self._driver.failure
        if end is not None and end.error is not None:
            raise self._early(RunFailed, f"Cannot read the input: {end.error}.") from end.error
        self._check_stop()
        self._output.finish(self._check_stop)

    def _until_end(self, on_progress: Callable[[], None], max_errors: int | None) -> EndOfInput | None:
        """Writes rows until all are handled; None where the engine failed before the reader was done."""
        end: EndOfInput | None = None
        handled = 0
        while end is None or handled < end.rows:
            news = self._next()
            finished = [item for item in news if isinstance(item, Item)]
            handled += len(finished)
            self._finish(finished, max_errors)
            self._output.tick()
            on_progress()
            if max_errors is not None and self._tally.errors.total() >= max_errors:
                raise self._early(RunFailed, f"Stopped at error {max_errors:,}, as --max-errors says.")
            end = next((item for item in news if isinstance(item, EndOfInput)), end)
            if Stop() in news:  # in its turn: what was finished before it is written
                self._check_stop()
            if not news and self._driver.failure is not None:
                break
        return end

    def _early(self, kind: type[CbatchError], reason: str) -> CbatchError:
        """The error of a run that ends before its time; what was held back is let out first."""
        self._output.release()
        return kind(reason + self._output.advice)

    def interrupt(self, signum: int) -> None:
        """Ends the run after what is finished by now. May be called in a signal handler."""
        self._signum = signum
        self._done.put(Stop())

    def _check_stop(self) -> None:
        if self._signum is not None:
            self._output.release()
            raise Interrupted(self._signum, self._output.advice)

    @property
    def waited_for_output_s(self) -> float:
        """Seconds in which no line could be read because too many rows were not written yet."""
        return self._window.waited_s

    def _next(self) -> list[Item | EndOfInput | Stop]:
        """All that has happened since the last call; waits a while for something, but not for more of it."""
        news: list[Item | EndOfInput | Stop] = []
        try:
            news.append(self._done.get(timeout=POLL_SECONDS))
            while len(news) < MAX_AT_ONCE:
                news.append(self._done.get_nowait())
        except queue.Empty:
            pass
        return news

    def _finish(self, finished: list[Item], max_errors: int | None) -> None:
        """Writes jobs that are done, up to the last error that is allowed, and counts them."""
        errors_left = math.inf if max_errors is None else max_errors - self._tally.errors.total()
        jobs, rows = [], []
        for place, job in ((item.place, item.job) for item in finished):
            self._in_flight.pop(place, None)
            self._settle(job)
            if not job.is_lost and (job.error is None or errors_left > 0):
                errors_left -= job.error is not None
                jobs.append(job)
                rows.append(OutputRow(place, job.row.index, format_row(self._preparer.result(job))))
        self._window.leave(self._output.write(rows))
        for job in jobs:
            self._tally.count(job)
            if job.error is not None and self._on_error is not None:
                self._on_error(str(job.error))

    def _settle(self, job: Job) -> None:
        """Makes the texts of a job's outputs, on this thread and not on the engine's; where that fails, so does it."""
        for number, choice in enumerate(job.completion.choices):
            try:
                choice.settle()
            except RequestError as error:
                self._preparer.fail(job, error, number)

    def _read(self, lines: Iterator[Line], kept: Container[int]) -> None:
        """Runs on the reader's thread, to the end of the input or the error that stopped it."""
        place = 0
        error: Exception | None = None
        try:
            for line in lines:
                if line.index in kept:
                    continue
                is_closed = not self._window.enter(place, len(line.data or b""))
                if is_closed or self._is_over or self._driver.failure is not None:
                    break
                self._take(place, line)
                place += 1
        except Exception as raised:  # handed to the writing thread, which ends the run with it
            error = raised
        self._done.put(EndOfInput(place, error))

    def _take(self, place: int, line: Line) -> None:
        taken = time.monotonic()
        self._tally.start(taken)
        job = self._preparer.job(line)
        job.taken = taken
        prompt_ids = self._preparer.encode(job)
        if prompt_ids is None:
            job.last = time.monotonic()
            self._done.put(Item(place, job))
        else:
            self._submit(Item(place, job), prompt_ids)

    def _submit(self, item: Item, prompt_ids: list[int]) -> None:
        job = item.job
        job.let_go(prompt_ids)
        outputs_left = job.params.n

        def take(event: TokenEvent) -> None:
            nonlocal outputs_left
            job.completion.take(event)
            if event.token_id is not None:
                self._tally.output_tokens += 1
                if job.first is None:
                    job.first = time.monotonic()
            if event.error is not None:
                self._preparer.fail(job, event.error, event.sample_index)
            if event.finish_reason is not None:
                outputs_left -= 1
            if outputs_left == 0:
                job.last = time.monotonic()
                job.is_lost = self._driver.failure is not None
                self._done.put(item)

        self._in_flight[item.place] = item
        for number in range(job.params.n):
            ticket = self._driver.submit(
                prompt_ids,
                job.params.for_sample(number),
                take,
                seed=job.seed,
                priority=job.row.priority,
                sample_index=number,
                tags=job.tags,
            )
            item.tickets.append(ticket)
            if self._is_over:  # in the meantime; whoever dropped the others may not have seen this ticket
                self._driver.cancel(ticket)

    def _drop_unfinished(self) -> None:
        """Ends the reader, and what the engine would compute for nobody; other front ends may go on with it."""
        self._is_over = True
        self._window.close()
        for item in list(self._in_flight.values()):
            for ticket in item.tickets:
                self._driver.cancel(ticket)
