"""Runs lines of an input again, in the company that is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing

from cbatch.base.errors import Interrupted
from cbatch.batch.driver import BatchDriver, RowSource
from cbatch.batch.lines import Line
from cbatch.batch.output_row import OutputRow
from cbatch.batch.pipeline import RunObserver
from cbatch.batch.row_options import RowOptions


class Recomputation:
    """Gives rows of output of one engine, one pass over lines after the other."""

    def __init__(self, driver: BatchDriver, options: RowOptions) -> None:
        self._driver, self._options = driver, options
        self._source: RowSource | None = None
        self._signum: int | None = None

    def rows(self, lines: Sequence[Line], *, alone: bool) -> Iterator[list[OutputRow]]:
        """Yields finished rows, now and then none.

        alone: each line waits until the one before is finished; else as many run at once as the engine takes

        Raises EngineError if the engine fails, and Interrupted after `interrupt`.
        """
        window = 1 if alone else None
        self._source = source = self._driver.open(self._options, window=window, observer=RunObserver())
        self._raise_if_interrupted()
        with closing(source.finished(lines)) as finished:
            for rows in finished:
                source.release([row.position for row in rows])
                yield rows
        self._raise_if_interrupted()

    def interrupt(self, signum: int) -> None:
        """Ends the pass. May be called in a signal handler."""
        self._signum = signum
        if self._source is not None:
            self._source.stop()

    def _raise_if_interrupted(self) -> None:
        if self._signum is not None:
            raise Interrupted(self._signum)
