"""`cbatch run`: the command and its options."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import click

from cbatch.cli.common.configured_command import ConfiguredCommand, preset_option
from cbatch.cli.common.console import emit, notice, show_progress
from cbatch.cli.common.exits import handle_signals
from cbatch.cli.common.loading import open_engine, tracing
from cbatch.cli.common.options import (
    engine_options,
    lora_option,
    make_options,
    record_options,
    replica_options,
    sampling_options,
)
from cbatch.cli.run.files import open_input, open_output, stats_file
from cbatch.cli.run.options import RunOptions

if TYPE_CHECKING:
    from cbatch.api import Engine
    from cbatch.batch.driver import BatchDriver
    from cbatch.batch.tables.row_input import RowInput
    from cbatch.cli.run.stats import RunStats
    from cbatch.runtime.tracing import StepTracer


@click.command("run", cls=ConfiguredCommand)
@click.argument("input", default="-", metavar="[INPUT]")
@record_options(RunOptions)
@sampling_options()
@engine_options()
@lora_option
@replica_options
@preset_option
def run(**values: Any) -> Literal[0, 1]:
    """Generate an answer for every row of INPUT (JSON Lines, CSV, TSV, a JSON array, Parquet; - is stdin).

    A row is {"prompt": ...}, {"messages": [...]}, {"prompt_token_ids": [...]} or an OpenAI Batch request, and may
    set sampling parameters of its own. Every row gives one row of output; a bad row gives an error row, and the
    others still run. You can interrupt a run at any time: with -o, --resume continues it.
    """
    from cbatch.cli.run.stats import RunStats

    options = make_options(RunOptions, values)
    stats = RunStats()
    with stats_file(options, stats), ExitStack() as opened:
        options.check_usage()
        source = opened.enter_context(closing(open_input(options)))
        if options.check:
            return _check(options, source, stats)
        others = {"the input": options.input, "the output": options.output, "the file of --stats": options.stats}
        tracer = tracing(options.trace, others, quiet=options.quiet)
        with tracer as trace, open_output(options, source) as output, _open_driver(options, stats, trace) as driver:
            from cbatch.cli.run.batch_run import run_batch

            run_batch(
                driver,
                options,
                source,
                output,
                stats,
                progress=partial(show_progress, quiet=options.quiet),
                while_running=partial(handle_signals, stop_timeout_s=output.stop_timeout_s),
            )
    return 1 if stats.errors or stats.errors_kept else 0


def _check(options: RunOptions, source: RowInput, stats: RunStats) -> Literal[0, 1]:
    engine = _load(options, stats)

    from cbatch.batch.line_processor import LineProcessor
    from cbatch.batch.lines import checked_lines
    from cbatch.cli.run.check import InputCheck
    from cbatch.cli.run.estimate import ROWS_PER_SLOT, RowSample, estimate_run

    sample = RowSample(ROWS_PER_SLOT * engine.limits.max_seqs) if options.estimate else None
    check = InputCheck(engine, LineProcessor.of(engine.core, options.row_options()), sample)
    total = None if options.quiet else source.count()
    with engine:
        with show_progress(total, lambda: (check.rows, "read"), quiet=options.quiet) as tick:
            report = check.report(checked_lines(source.lines()), tick)
        if sample is not None:
            estimate = estimate_run(engine, sample)
            report["estimate"] = estimate.as_dict() if estimate is not None else None
            for sentence in estimate.sentences() if estimate is not None and not options.quiet else ():
                notice(sentence)
    emit(json.dumps(report, indent=2))
    return 1 if check.errors else 0


@contextmanager
def _open_driver(options: RunOptions, stats: RunStats, trace: StepTracer | None) -> Iterator[BatchDriver]:
    if options.replicas.are_given:
        from cbatch.cli.common.loading import open_replicas

        started = time.monotonic()
        with open_replicas(options.replicas, options.engine, quiet=options.quiet, verbose=options.verbose) as driver:
            stats.load_s = time.monotonic() - started
            yield driver
        return
    with _load(options, stats, trace) as engine:
        from cbatch.batch.engine_driver import EngineDriver

        yield EngineDriver(engine.thread)


def _load(options: RunOptions, stats: RunStats, trace: StepTracer | None = None) -> Engine:
    started = time.monotonic()
    engine = open_engine(options.engine, quiet=options.quiet, verbose=options.verbose, trace=trace)
    stats.load_s = time.monotonic() - started
    return engine
