"""Runs a sample of the rows of an output file again, and compares them with what the file has."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

from cbatch.base.errors import ConfigError
from cbatch.batch.driver import BatchDriver
from cbatch.batch.forms import resolved, unit_of
from cbatch.batch.journal import StoredRows
from cbatch.batch.lines import Line, RowOptions, checked_lines
from cbatch.batch.origin import origin_of
from cbatch.batch.row import Row
from cbatch.batch.run_record import read_record
from cbatch.batch.tables.row_input import RowInput
from cbatch.batch.writer import RowWriter, run_stream
from cbatch.cli.common.console import show_progress
from cbatch.cli.common.exits import handle_signals
from cbatch.cli.verify.options import VerifyOptions
from cbatch.cli.verify.report import COMPANIES, Report
from cbatch.requests.row_keys import explain_difference


def verify_rows(driver: BatchDriver, options: VerifyOptions, source: RowInput, stored: StoredRows) -> Report:
    """Runs a sample of the rows again, and compares them with the file. A signal interrupts it.

    Raises ConfigError if the file is empty, RunFailed if the input cannot be read, and as `run_stream` does.
    """
    rows, report = _sampled(options, stored)
    row_options = options.run.row_options()
    wanted = (line for line in checked_lines(source.lines()) if line.index in rows)
    origin = origin_of(driver.model_parts, driver.limits.sequence, row_options, options.run.template)
    then = read_record(resolved(options.run.output)).get("keys")
    explain = partial(explain_difference, now=origin, then=then)
    lines = _fitting(driver, row_options, list(islice(wanted, len(rows))), rows, report, explain)
    alone, together = (driver.open(row_options, window=window) for window in (1, None))
    mixed = random.Random(options.sample_seed).sample(lines, len(lines))  # rows get other neighbours
    done = 0

    def interrupt(signum: int) -> None:
        for stream in (alone, together):  # also one that has not begun
            stream.interrupt(signum)

    def take(company: str, made: Sequence[Row]) -> None:
        nonlocal done
        for row in made:
            report.compare(company, rows[row.index], json.loads(row.data))
        done += len(made)
        tick()

    total, quiet = len(COMPANIES) * len(lines), options.run.quiet
    with handle_signals(interrupt), show_progress(total, lambda: (done, "run again"), quiet=quiet) as tick:
        run_stream(alone, RowWriter(), lines, partial(take, "alone"))
        run_stream(together, RowWriter(), mixed, partial(take, "together"))
    return report


def _sampled(options: VerifyOptions, stored: StoredRows) -> tuple[dict[int, dict[str, Any]], Report]:
    damaged = stored.journal.damaged
    if not len(stored) and not damaged:
        raise ConfigError(f"{options.run.output} has no rows.")
    places = options.sample.choose(len(stored), options.sample_seed)
    unit, name = unit_of(options.run.input_form), options.run.output
    report = Report(unit, len(stored), len(places), name=name, damaged=damaged)
    rows = {}
    for row in stored.read(places):
        if "tool_messages" in row:  # what a tool or a command answers may change
            report.left_out["tools"] += 1
        elif "validation" in row:
            report.left_out["validated"] += 1
        else:
            rows[row["index"]] = row
    return rows, report


def _fitting(
    driver: BatchDriver,
    options: RowOptions,
    lines: list[Line],
    rows: Mapping[int, Mapping[str, Any]],
    report: Report,
    explain: Callable[[str, str], str],
) -> list[Line]:
    report.left_out["no line"] += len(rows) - len(lines)
    fitting = []
    for line, key in driver.keyed(options, lines):
        row = rows[line.index]
        if key == row["key"]:
            fitting.append(line)
        else:
            reason = explain(key, row["key"])
            report.misfits[reason] += 1
            report.first_misfit.setdefault(reason, row)
    return fitting
