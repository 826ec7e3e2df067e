"""Runs a batch on what computes its rows: for `cbatch run`, and for `/run` in a chat."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial

from tqdm import tqdm

from cbatch.cli.common.console import Details, ProgressState, no_details, notice
from cbatch.cli.run.options import RunOptions
from cbatch.cli.run.stats import RunStats
from cbatch.engine import (
    BatchDriver,
    FileWriter,
    Journal,
    Line,
    Pipeline,
    ReaderGone,
    ResumePlan,
    RowInput,
    RowOptions,
    RowWriter,
    format_count,
)

ShowProgress = Callable[[int | None, ProgressState, Details], AbstractContextManager[Callable[[], None]]]
"""Opens a display of progress, with the number of rows if it is known; see `show_progress`."""


def run_batch(
    driver: BatchDriver,
    options: RunOptions,
    source: RowInput,
    output: RowWriter,
    stats: RunStats,
    *,
    progress: ShowProgress,
    while_running: Callable[[Pipeline], AbstractContextManager[object]],
) -> None:
    """Runs every row of `source`, and prints a summary on stderr. Raises as `Pipeline.run` does.

    while_running: a context for the time in which the run may be interrupted
    """
    quiet, total = options.quiet, None if options.quiet else source.count()
    stats.attach(driver)
    row_options = options.row_options()
    rows = driver.open(row_options, window=options.window, observer=stats)  # raises before the output changes
    plan = ResumePlan()
    if isinstance(output, FileWriter):
        lines, plan = _prepare_file(output, options, source, driver, row_options, progress)
        stats.rows_kept, stats.errors_kept = plan.rows, plan.errors
    else:
        lines = source.lines()
    pipeline = Pipeline(rows, output, stats, on_error=notice if options.verbose else None)
    details = partial(replica_lines, stats, driver) if options.verbose else no_details
    display = progress(total, lambda: _progress_state(stats, driver, total), details)
    try:
        with while_running(pipeline), display as tick:
            pipeline.run(plan.with_tries(lines), tick, kept=plan, max_errors=options.max_errors)
    finally:
        stats.detach()
        if not quiet and not isinstance(sys.exception(), ReaderGone):
            for line in stats.summary(driver, pipeline.waited_for_output_s):
                notice(line)
            if output.note:
                notice(output.note)


def _prepare_file(
    output: FileWriter,
    options: RunOptions,
    source: RowInput,
    driver: BatchDriver,
    row_options: RowOptions,
    progress: ShowProgress,
) -> tuple[Iterator[Line], ResumePlan]:
    """Prepares the output file for this run. Returns the input, at its beginning, and the rows that are kept."""
    if not (options.resume and output.has_content):
        output.start(Journal())
        return source.lines(), ResumePlan()
    journal = output.journal()
    first, again = source.read_twice()
    compared = 0

    def keyed(lines: Iterable[Line]) -> Iterator[tuple[Line, str]]:
        nonlocal compared
        for pair in driver.keyed(row_options, lines):
            compared += 1
            tick()
            yield pair

    rows = len(journal.indices)
    with progress(rows, lambda: (compared, "compared with the input"), no_details) as tick:
        plan = output.resume(
            journal,
            first,
            keyed,
            retry_errors=options.retry_errors,
            recompute_changed=options.recompute_changed,
        )
    if not plan.fits:
        output.resume_with = "--resume --recompute-changed"
    if not options.quiet:
        are = "is" if plan.rows == 1 else "are"
        notice(f"resuming: {format_count(plan.rows, 'row')} {are} kept" + ("" if plan.fits else f"; not kept: {plan}"))
    return again(), plan


def _progress_state(stats: RunStats, driver: BatchDriver, total: int | None) -> tuple[int, str]:
    """The number of rows that are done, and the text that follows it in a display."""
    done, now = stats.rows + stats.rows_kept, driver.stats()
    left = stats.seconds_left(total - done) if total else None
    each = driver.each()
    running = sum(one.state == "running" for one in each)
    parts = [  # the most important part comes first, because a narrow terminal cuts off the rest
        f"{stats.output_tokens / max(stats.running_s, 1e-9):,.0f} tok/s",
        f"{tqdm.format_interval(left)} left" if left is not None else "",
        format_count(stats.errors.total(), "error") if stats.errors else "",
        f"{running} of {len(each)} replicas" if running < len(each) else "",
        f"{now.num_running} run, {now.num_waiting} wait",
        f"KV {now.cache_used:.0%}",
        format_count(stats.output_tokens, "token"),
    ]
    return done, ", ".join(part for part in parts if part)


def replica_lines(stats: RunStats, driver: BatchDriver) -> list[str]:
    """A line for each replica: what it does now, and what it has done in this run."""
    lines = []
    for one, now in zip(stats.replicas, driver.each(), strict=True):
        engine = now.stats
        doing = f"{engine.num_running} run, {engine.num_waiting} wait, KV {engine.cache_used:.0%}"
        parts = [
            f"{one.name}: {doing if one.state == 'running' else one.state}",
            f"{format_count(one.rows, 'row')}, {format_count(one.output_tokens, 'token')}",
            f"{one.copies:,} copies" if one.copies else "",
            one.death_words() if one.deaths else "",
        ]
        lines.append(", ".join(part for part in parts if part))
    return lines
