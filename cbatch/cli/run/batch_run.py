"""Runs a batch on what computes its rows: for `cbatch run`, and for `/run` in a chat."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

from cbatch.base.errors import ConfigError, ReaderGone
from cbatch.base.units import format_count, word_for
from cbatch.batch.driver import BatchDriver
from cbatch.batch.lines import LATIN1_HINT, Line, RowOptions, parse_line
from cbatch.batch.origin import origin_of
from cbatch.batch.resume import ResumePlan, Resuming
from cbatch.batch.row import Row
from cbatch.batch.run_record import read_record, write_record
from cbatch.batch.tables.row_input import RowInput
from cbatch.batch.writer import FileWriter, RowWriter, run_stream
from cbatch.cli.common.console import Details, ProgressState, notice
from cbatch.cli.run.options import RunOptions
from cbatch.cli.run.stats import RunProgress, RunStats
from cbatch.requests.row_keys import Origin, explain_difference

ShowProgress = Callable[[int | None, ProgressState, Details], AbstractContextManager[Callable[[], None]]]
"""Opens a display of progress, with the number of rows if it is known; see `show_progress`."""

WhileRunning = Callable[[Callable[[int], None]], AbstractContextManager[object]]
"""A context for the time in which a run may be interrupted. Gets what interrupts it, by a number of a signal."""


def run_batch(
    driver: BatchDriver,
    options: RunOptions,
    source: RowInput,
    output: RowWriter,
    stats: RunStats,
    *,
    progress: ShowProgress,
    while_running: WhileRunning,
    in_lines: bool = False,
) -> None:
    """Runs every row of `source`, and prints a summary on stderr. Raises as `run_stream` does.

    in_lines: whether `progress` has a terminal for several lines
    """
    total = None if options.quiet else source.count()
    row_options = _row_options(options, output, driver)
    stream = driver.open(row_options, window=options.window)  # raises before the output changes
    stats.attach(driver, stream)
    plan = ResumePlan()
    if isinstance(output, FileWriter):
        lines, plan = _prepare_file(output, options, source, driver, row_options, progress)
        stats.rows_kept, stats.errors_kept = plan.rows, plan.errors
    else:
        lines = source.lines()
    if options.tries > 1 and not (options.tell_error or options.param("temperature") or options.quiet):
        notice("a row at temperature 0 has one try, as another would give the same; see --temperature, --tell-error")
    now = RunProgress(stats, driver, stream, total, in_lines=in_lines)
    display = progress(
        total, now.state, lambda: [*now.details(), *(replica_lines(stats, driver) if options.verbose else ())]
    )

    def on_rows(rows: Sequence[Row]) -> None:
        stats.count(rows)
        now.finished(rows)
        if options.verbose:
            for row in rows:
                if row.has_failed:
                    notice(row.outcome.error_message)
        tick()

    try:
        with while_running(stream.interrupt), display as tick:
            most = {"max_errors": options.max_errors, "max_truncated": options.max_truncated}
            run_stream(stream, output, plan.with_history(lines), on_rows, kept=plan, **most)
    finally:
        stats.detach()
        if not options.quiet and not isinstance(sys.exception(), ReaderGone):
            advice = stats.prefix_advice(source.template) if options.engine.prefix_cache else ""
            hint = f"{source.name} has rows that are not valid UTF-8{LATIN1_HINT}"
            others = hint if stats.errors["invalid_utf8"] else "", stats.prompts.sentence(row_options.unit), advice
            for line in (*stats.summary(driver), *others, output.note):
                if line:
                    notice(line)


def _row_options(options: RunOptions, output: RowWriter, driver: BatchDriver) -> RowOptions:
    """The options of every row, with where tokens are kept. Raises ConfigError if they are to be and cannot."""
    row_options = options.row_options()
    if not isinstance(output, FileWriter):
        return row_options
    if driver.each():
        if options.journal_tokens:
            raise ConfigError("--journal-tokens is for one engine; it does not go with replicas.")
        return row_options
    if not options.resume:
        output.drop_tokens()
    return replace(row_options, token_journal=options.token_journal(output.tokens_path))


def _prepare_file(
    output: FileWriter,
    options: RunOptions,
    source: RowInput,
    driver: BatchDriver,
    row_options: RowOptions,
    progress: ShowProgress,
) -> tuple[Iterator[Line], ResumePlan]:
    """Prepares the output file for this run. Returns the input, at its beginning, and the rows that are kept."""
    origin = origin_of(driver.model_parts, driver.limits.sequence, row_options, options.template)
    if not (options.resume and output.has_content):
        output.start()
        write_record(output.final_path, keys=origin)
        return source.lines(), ResumePlan()
    journal = output.journal()
    first, again = source.read_twice()
    compared = 0

    def keyed(lines: Iterable[Line]) -> Iterator[tuple[Line, str]]:
        nonlocal compared
        for pair in driver.keyed(row_options, lines):
            compared += pair[0].max_tokens is None and pair[0].carried is None  # else it is the same line again
            tick()
            yield pair

    rows = len(journal.indices)
    with progress(rows, lambda: (compared, "compared with the input"), tuple) as tick:
        limit = options.param("max_tokens") if options.continue_truncated else None
        before: Origin = read_record(output.final_path).get("keys", {})
        then, now = (one.get("sampling", {}).get("--max-tokens", "") for one in (before, origin))
        if then.isdecimal() and now.isdecimal() and int(then) < int(now):
            output.if_changed = f"--continue-truncated goes on with what {then} tokens cut off; {output.if_changed}"
        how = Resuming(
            options.retry_errors,
            options.recompute_changed,
            limit,
            lambda line: parse_line(line, row_options).extra,
            partial(explain_difference, now=origin, then=before),
            row_options.unit,
        )
        plan = output.resume(journal, first, keyed, how)
        write_record(output.final_path, keys=origin)
    if not plan.fits:
        output.resume_with = "--resume --recompute-changed"
    if options.quiet:
        return again(), plan
    truncated, anew = len(plan.truncated), plan.restarted
    parts = [
        f"{format_count(plan.rows, 'row')} {word_for(plan.rows, 'is', 'are')} kept",
        f"{truncated:,} that --max-tokens ended {word_for(truncated, 'goes', 'go')} on" if truncated else "",
        f"{anew:,} of a run with fewer --max-tokens {word_for(anew, 'begins', 'begin')} anew" if anew else "",
        f"{plan.carried:,} of them with changed columns" if plan.carried else "",
        f"{plan.errors:,} of them failed (see --retry-errors)" if plan.errors else "",
        "" if plan.fits else f"not kept: {plan}",
    ]
    notice(f"resuming: {'; '.join(filter(None, parts))}")
    return again(), plan


def replica_lines(stats: RunStats, driver: BatchDriver) -> list[str]:
    """A line for each replica: what it does now, and what it has done in this run."""
    lines = []
    for one, now in zip(stats.replicas, driver.each(), strict=True):
        engine = now.stats
        doing = f"{engine.num_running} run, {engine.num_waiting} wait, KV {engine.cache_used:.0%}"
        parts = [
            f"{one.name}: {doing if one.state == 'running' else one.state}",
            f"{format_count(one.rows, 'row')}, {format_count(one.stats.num_tokens, 'token')}",
            f"{one.copies:,} copies" if one.copies else "",
            one.death_words() if one.deaths else "",
        ]
        lines.append(", ".join(filter(None, parts)))
    return lines
