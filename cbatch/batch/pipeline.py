"""The rows of a run from the input through the engine to the output."""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Iterable, Sequence
from contextlib import closing

from cbatch.base.errors import CbatchError, EngineError, Interrupted, RunFailed, as_error, in_short
from cbatch.batch.driver import RowStream
from cbatch.batch.lines import Line, checked_lines
from cbatch.batch.row import Row
from cbatch.batch.writer import RowWriter


class Pipeline:
    """Runs the rows of one input, and writes them as they finish. The thread that calls `run` is the writer."""

    def __init__(self, stream: RowStream, output: RowWriter) -> None:
        self._stream = stream
        self._output = output
        self._signum: int | None = None

    def run(
        self,
        lines: Iterable[Line],
        on_rows: Callable[[Sequence[Row]], None],
        *,
        kept: Container[int] = (),
        max_errors: int | None = None,
    ) -> None:
        """Runs until every line has a row of output. However it ends, finished rows are written.

        on_rows:    called with rows that were written and, now and then, with none
        kept:       indices of lines that have a row of output already
        max_errors: number of error rows that ends the run

        Raises EngineError if the engine fails, RunFailed if the input or the output fails or there are `max_errors`
        error rows, ReaderGone if nobody reads the output any more, and Interrupted after `interrupt`.
        """
        num_errors = 0
        with closing(self._finished(lines, kept)) as finished:
            for rows in finished:
                if max_errors is not None:
                    written = [row for row in rows if row.has_failed][: max_errors - num_errors]
                    rows = [row for row in rows if not row.has_failed or row in written]
                self._stream.release(self._output.write(rows))
                self._output.tick()
                on_rows(rows)
                num_errors += sum(row.has_failed for row in rows)
                if max_errors is not None and num_errors >= max_errors:
                    raise self._ended_early(RunFailed, f"Stopped at error {max_errors:,}, as --max-errors says.")
        self._raise_if_interrupted()
        self._output.finish(self._raise_if_interrupted)

    def interrupt(self, signum: int) -> None:
        """Ends the run after the rows that are finished by now. May be called in a signal handler."""
        self._signum = signum
        self._stream.stop()

    def _finished(self, lines: Iterable[Line], kept: Container[int]) -> Generator[list[Row]]:
        """The stream's finished rows. If it fails, what was held back is written first."""
        try:
            yield from self._stream.finished(checked_lines(lines), kept)
        except (EngineError, RunFailed) as error:
            raise self._ended_early(type(error), str(error)) from error
        except GeneratorExit:
            raise
        except BaseException as raised:  # a bug, or a library that panics
            raise self._ended_early(RunFailed, f"The run failed: {in_short(as_error(raised))}.") from raised

    def _ended_early(self, kind: type[CbatchError], reason: str) -> CbatchError:
        """Writes what was held back, and returns the error of a run that ends early."""
        self._output.flush_held()
        return kind(reason + self._output.resume_hint)

    def _raise_if_interrupted(self) -> None:
        if self._signum is not None:
            self._output.flush_held()
            raise Interrupted(self._signum, self._output.resume_hint)
