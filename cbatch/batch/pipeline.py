"""The rows of a run from the input through the engine to the output."""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Iterable, Iterator
from contextlib import closing

from cbatch.base.errors import CbatchError, EngineError, Interrupted, RunFailed, as_error, in_short
from cbatch.batch.driver import RowSource, StreamObserver
from cbatch.batch.lines import Line
from cbatch.batch.output_row import OutputRow
from cbatch.batch.writer import RowWriter


class RunObserver(StreamObserver):
    """Follows the rows of a run; this one does nothing."""

    def count(self, row: OutputRow) -> None:
        """A row is finished and written. Called on the writer's thread."""


class Pipeline:
    """Runs the rows of one input, and writes them as they finish. The thread that calls `run` is the writer."""

    def __init__(
        self,
        source: RowSource,
        output: RowWriter,
        observer: RunObserver,
        *,
        on_error: Callable[[str], None] | None = None,
    ) -> None:
        """
        source:   computes the rows
        on_error: called with the message of each error row
        """
        self._source = source
        self._output = output
        self._observer = observer
        self._on_error = on_error
        self._signum: int | None = None

    def run(
        self,
        lines: Iterable[Line],
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
        num_errors = 0
        with closing(self._finished(lines, kept)) as finished:
            for rows in finished:
                if max_errors is not None:
                    rows = _up_to_error(rows, max_errors - num_errors)
                self._write(rows)
                on_progress()
                num_errors += sum(row.outcome.error_code is not None for row in rows)
                if max_errors is not None and num_errors >= max_errors:
                    raise self._ended_early(RunFailed, f"Stopped at error {max_errors:,}, as --max-errors says.")
        self._raise_if_interrupted()
        self._output.finish(self._raise_if_interrupted)

    def interrupt(self, signum: int) -> None:
        """Ends the run after the rows that are finished by now. May be called in a signal handler."""
        self._signum = signum
        self._source.stop()

    @property
    def waited_for_output_s(self) -> float:
        """Seconds in which the reader waited until rows were written."""
        return self._source.waited_for_consumer_s

    def _finished(self, lines: Iterable[Line], kept: Container[int]) -> Generator[list[OutputRow]]:
        """The source's finished rows. If it fails, what was held back is written first."""
        try:
            yield from self._source.finished(checked_lines(lines), kept)
        except (EngineError, RunFailed) as error:
            raise self._ended_early(type(error), str(error)) from error
        except GeneratorExit:
            raise
        except BaseException as raised:  # a bug, or a library that panics
            raise self._ended_early(RunFailed, f"The run failed: {in_short(as_error(raised))}.") from raised

    def _write(self, rows: list[OutputRow]) -> None:
        """Writes finished rows in one write, and counts them."""
        written = self._output.write(rows)
        self._source.release(written)
        self._output.tick()
        for row in rows:
            self._observer.count(row)
            if self._on_error is not None and row.outcome.error_code is not None:
                self._on_error(row.outcome.error_message)

    def _ended_early(self, kind: type[CbatchError], reason: str) -> CbatchError:
        """Writes what was held back, and returns the error of a run that ends early."""
        self._output.flush_held()
        return kind(reason + self._output.resume_hint)

    def _raise_if_interrupted(self) -> None:
        if self._signum is not None:
            self._output.flush_held()
            raise Interrupted(self._signum, self._output.resume_hint)


def checked_lines(lines: Iterable[Line]) -> Iterator[Line]:
    """The lines. Raises RunFailed, with a sentence, for what reading them raises."""
    try:
        yield from lines
    except GeneratorExit:
        raise
    except BaseException as raised:
        error = as_error(raised)
        raise RunFailed(f"Cannot read the input: {str(error).rstrip('.')}.") from raised


def _up_to_error(rows: list[OutputRow], errors_left: int) -> list[OutputRow]:
    """The good ones of finished rows, and as many error rows as are left until the run stops."""
    kept = []
    for row in rows:
        has_failed = row.outcome.error_code is not None
        if not has_failed or errors_left > 0:
            errors_left -= has_failed
            kept.append(row)
    return kept
