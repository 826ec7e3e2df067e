"""Runs a batch on an engine that is loaded: for `cbatch run`, and for `/run` in a chat."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container
from contextlib import AbstractContextManager
from typing import IO

from tqdm import tqdm

from cbatch.cli.common.console import ProgressState, notice
from cbatch.cli.run.files import count_lines
from cbatch.cli.run.options import RunOptions
from cbatch.cli.run.stats import RunStats
from cbatch.engine import (
    FIXED_DATE,
    Engine,
    FileWriter,
    Journal,
    Line,
    LineProcessor,
    LineSource,
    Pipeline,
    ReaderGone,
    RequestDefaults,
    ResumePlan,
    RowWriter,
    Spool,
    TemplateOptions,
    read_lines,
)

ShowProgress = Callable[[int | None, ProgressState], AbstractContextManager[Callable[[], None]]]
"""Opens a display of progress, with the number of rows if it is known; see `show_progress`."""


def run_batch(
    engine: Engine,
    options: RunOptions,
    source: IO[bytes],
    output: RowWriter,
    stats: RunStats,
    *,
    progress: ShowProgress,
    while_running: Callable[[Pipeline], AbstractContextManager[object]],
) -> None:
    """Runs every row of `source`, and prints a summary on stderr. Raises as `Pipeline.run` does.

    while_running: a context for the time in which the run may be interrupted
    """
    quiet, total = options.quiet, count_lines(options)
    stats.attach(engine)
    processor = line_processor(engine, options)
    lines: LineSource = source
    kept: Container[int] = ()
    if isinstance(output, FileWriter):
        lines, plan = _prepare_file(output, options, source, processor, progress)
        stats.rows_kept, stats.errors_kept, kept = plan.rows, plan.errors, plan
    pipeline = Pipeline(
        engine.thread,
        output,
        processor,
        stats,
        window=options.window or 4 * engine.limits.max_seqs,
        timings=options.timings,
        on_error=notice if options.verbose else None,
    )
    display = progress(total, lambda: _progress_state(stats, engine, total))
    try:
        with while_running(pipeline), display as tick:
            pipeline.run(read_lines(lines), tick, kept=kept, max_errors=options.max_errors)
    finally:
        if not quiet and not isinstance(sys.exception(), ReaderGone):
            for line in stats.summary(engine, pipeline.waited_for_output_s):
                notice(line)


def line_processor(engine: Engine, options: RunOptions) -> LineProcessor:
    """What makes requests of the lines of a run."""
    defaults = RequestDefaults(
        params=options.sampling.params,
        system=options.sampling.system,
        seed=options.sampling.seed,
        raw=options.raw,
        template=TemplateOptions(
            kwargs=options.template_kwargs, today=options.date.date() if options.date else FIXED_DATE
        ),
        with_token_ids=options.token_ids,
    )
    inputs = engine.core.input_processor(defaults)
    return LineProcessor(inputs, is_text=options.format == "text", allow_unknown=options.allow_unknown)


def _prepare_file(
    output: FileWriter, options: RunOptions, source: IO[bytes], processor: LineProcessor, progress: ShowProgress
) -> tuple[LineSource, ResumePlan]:
    """Prepares the output file for this run. Returns the input, at its beginning, and the rows that are kept."""
    if not (options.resume and output.has_content):
        output.start(Journal())
        return source, ResumePlan()
    journal = output.journal()
    spool, compared = Spool(source), 0

    def make_key(line: Line) -> str:
        nonlocal compared
        compared += 1
        tick()
        return processor.key(line)

    rows = len(journal.indices)
    with progress(rows, lambda: (compared, "compared with the input")) as tick:
        plan = output.resume(
            journal,
            read_lines(spool),
            make_key,
            retry_errors=options.retry_errors,
            recompute_changed=options.recompute_changed,
        )
    if not plan.fits:
        output.resume_with = "--resume --recompute-changed"
    if not options.quiet:
        notice(f"resuming: {plan.rows:,} rows are kept" + ("" if plan.fits else f"; not kept: {plan}"))
    spool.rewind()
    return spool, plan


def _progress_state(stats: RunStats, engine: Engine, total: int | None) -> tuple[int, str]:
    """The number of rows that are done, and the text that follows it in a display."""
    done, now = stats.rows + stats.rows_kept, engine.stats()
    left = stats.seconds_left(total - done) if total else None
    parts = [  # the most important part comes first, because a narrow terminal cuts off the rest
        f"{stats.output_tokens / max(stats.running_s, 1e-9):,.0f} tok/s",
        f"{tqdm.format_interval(left)} left" if left is not None else "",
        f"{stats.errors.total():,} errors" if stats.errors else "",
        f"{now.num_running} run, {now.num_waiting} wait",
        f"KV {now.cache_used:.0%}",
        f"{stats.output_tokens:,} tokens",
    ]
    return done, ", ".join(part for part in parts if part)
