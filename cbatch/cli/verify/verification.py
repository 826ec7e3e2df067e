"""Runs a sample of the rows of an output file again, and compares them with what the file has."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, closing

from cbatch.base.errors import ConfigError, Interrupted
from cbatch.batch.driver import BatchDriver, RowSource
from cbatch.batch.forms import unit_of
from cbatch.batch.journal import StoredRow, StoredRows
from cbatch.batch.lines import Line
from cbatch.batch.output_row import OutputRow
from cbatch.batch.pipeline import RunObserver, checked_lines
from cbatch.batch.row_options import RowOptions
from cbatch.batch.tables.row_input import RowInput
from cbatch.cli.common.console import ProgressState
from cbatch.cli.verify.options import VerifyOptions
from cbatch.cli.verify.report import COMPANIES, LeftOut, Report
from cbatch.requests.row_keys import explain_difference


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


ShowProgress = Callable[[int, ProgressState], AbstractContextManager[Callable[[], None]]]


def verify_rows(
    driver: BatchDriver,
    options: VerifyOptions,
    source: RowInput,
    stored: StoredRows,
    *,
    progress: ShowProgress,
    while_running: Callable[[Recomputation], AbstractContextManager[object]],
) -> Report:
    """Runs a sample of the rows again, and compares them with the file.

    while_running: a context for the time in which the run may be interrupted

    Raises ConfigError if the file is empty, RunFailed if the input cannot be read, and as `Recomputation` does.
    """
    rows, report = _sampled(options, stored)
    row_options = options.run.row_options()
    lines = _fitting(driver, row_options, _lines_of(source, rows), rows, report)
    recomputation = Recomputation(driver, row_options)
    done = 0
    with (
        while_running(recomputation),
        progress(len(COMPANIES) * len(lines), lambda: (done, "run again")) as tick,
    ):
        for company in COMPANIES:
            for made in recomputation.rows(_in_order(lines, company, options.sample_seed), alone=company == "alone"):
                for row in made:
                    report.compare(company, rows[row.index], json.loads(row.data))
                done += len(made)
                tick()
    return report


def _sampled(options: VerifyOptions, stored: StoredRows) -> tuple[dict[int, StoredRow], Report]:
    """The rows of the sample that can be run again, by their index."""
    damaged = stored.journal.damaged
    if not len(stored) and not damaged:
        raise ConfigError(f"{options.run.output} has no rows.")
    places = options.sample.choose(len(stored), options.sample_seed)
    unit, name = unit_of(options.run.input_form), options.run.output
    report = Report(unit, len(stored), len(places), name=name, damaged=damaged)
    rows = {}
    for row in stored.read(places):
        if (reason := _left_out(row)) is None:
            rows[row.index] = row
        else:
            report.left_out[reason] += 1
    return rows, report


def _left_out(row: StoredRow) -> LeftOut | None:
    """Why a row cannot be run again: what a tool or a command answers may change."""
    if "tool_messages" in row.fields:
        return "tools"
    return "validated" if "validation" in row.fields else None


def _lines_of(source: RowInput, wanted: Collection[int]) -> list[Line]:
    """The lines of the input with these indices. Reads no further than it has to."""
    found: list[Line] = []
    for line in checked_lines(source.lines()) if wanted else ():
        if line.index in wanted:
            found.append(line)
        if len(found) == len(wanted):
            break
    return found


def _fitting(
    driver: BatchDriver, options: RowOptions, lines: list[Line], rows: dict[int, StoredRow], report: Report
) -> list[Line]:
    """The lines whose rows were made with the same options and the same model."""
    report.left_out["no line"] += len(rows) - len(lines)
    fitting = []
    for line, key in driver.keyed(options, lines):
        row = rows[line.index]
        if key == row.key:
            fitting.append(line)
        else:
            report.add_misfit(row, explain_difference(key, row.key))
    return fitting


def _in_order(lines: list[Line], company: str, seed: int) -> list[Line]:
    """In the order of the input alone, and in another one together, so that rows get other neighbours."""
    return lines if company == "alone" else random.Random(seed).sample(lines, len(lines))
