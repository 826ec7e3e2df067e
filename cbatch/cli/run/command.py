"""`cbatch run`: the command and its options."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import click
from click import option

from cbatch.batch.cache.answer_cache import DEFAULT_CACHE_SIZE
from cbatch.batch.forms import INPUT_FORMS, OUTPUT_FORMS
from cbatch.batch.token_journal import DEFAULT_INTERVAL_S
from cbatch.cli.common.configured_command import ConfiguredCommand, preset_option
from cbatch.cli.common.console import emit, notice, show_progress
from cbatch.cli.common.exits import handle_signals
from cbatch.cli.common.loading import open_engine
from cbatch.cli.common.options import (
    JsonListOption,
    engine_options,
    lora_option,
    make_options,
    replica_options,
    sampling_options,
    template_kwargs_option,
    trace_option,
)
from cbatch.cli.common.tracing import tracing
from cbatch.cli.run.files import open_input, open_output, stats_file
from cbatch.cli.run.options import RunOptions
from cbatch.tools.tool import MAX_TOOL_ROUNDS
from cbatch.validation.validation import CHECK_TIMEOUT_S

if TYPE_CHECKING:
    from cbatch.api import Engine
    from cbatch.batch.driver import BatchDriver
    from cbatch.batch.tables.row_input import RowInput
    from cbatch.cli.run.stats import RunStats
    from cbatch.runtime.tracing.trace import StepTracer


@click.command("run", cls=ConfiguredCommand)
@click.argument("input", default="-", metavar="[INPUT]")
@option("-o", "--output", default="-", metavar="OUT", help="File to write; - is stdout.")
@option("--resume", is_flag=True, help="Continue where an earlier run with this output file ended.")
@option("--retry-errors", is_flag=True, help="With --resume: run error rows again.")
@option("--recompute-changed", is_flag=True, help="With --resume: run rows again whose input or options have changed.")
@option(
    "--continue-truncated",
    is_flag=True,
    help="With --resume and a larger --max-tokens: go on with answers that a lower limit has ended.",
)
@option("--overwrite", is_flag=True, help="Replace the output file if it is not empty.")
@option(
    "--format",
    type=click.Choice(INPUT_FORMS),
    help="Form of the input; text: one prompt per line [default: by the ending of INPUT, else jsonl].",
)
@option(
    "--output-format",
    type=click.Choice(OUTPUT_FORMS),
    help="Form of the output [default: by the ending of OUT, else jsonl].",
)
@option(
    "--template",
    metavar="TEXT|FILE.jinja",
    help="Make prompts of the rows' columns, such as 'Summarise: {text}'.",
)
@option("--shard", metavar="K/N", help="Run only the K-th of N parts of the rows, such as 2/8.")
@option(
    "--order",
    type=click.Choice(["input", "completion"]),
    default="input",
    show_default=True,
    help="Order of the output rows.",
)
@option("--window", type=click.IntRange(1), help="Most rows read but not yet written [default: 16 x --max-seqs].")
@option(
    "--journal-tokens",
    is_flag=True,
    help="Keep the tokens of unfinished answers in OUT.tokens, so that --resume goes on in the middle of them.",
)
@option(
    "--journal-interval",
    type=click.FloatRange(0, min_open=True),
    default=DEFAULT_INTERVAL_S,
    show_default=True,
    metavar="SECONDS",
    help="With --journal-tokens: time between two writes.",
)
@option("--max-errors", type=click.IntRange(1), metavar="N", help="Stop at the Nth error row.")
@option("--check", is_flag=True, help="Only check the input: report bad rows, lengths and KV cache need as JSON.")
@option("--estimate", is_flag=True, help="With --check: try rows for 10 s, and tell what a run would take.")
@option("--date", type=click.DateTime(["%Y-%m-%d"]), metavar="YYYY-MM-DD", help="Date given to the chat template.")
@template_kwargs_option
@option("--raw", is_flag=True, help="Continue prompts as plain text, without the chat template.")
@option("--token-ids", is_flag=True, help="Add the output's token ids to each row.")
@option(
    "--tools", multiple=True, cls=JsonListOption, metavar="FILE", help="Run what the model calls of the tools in FILE."
)
@option(
    "--max-tool-rounds",
    type=click.IntRange(1),
    default=MAX_TOOL_ROUNDS,
    show_default=True,
    metavar="N",
    help="Rounds of calls in a row, after which the model has to answer without tools.",
)
@option(
    "--validate",
    multiple=True,
    cls=JsonListOption,
    metavar="CHECK",
    help="What makes an answer good: json-schema=FILE (or the schema itself), regex=PATTERN, or command=WORDS, which "
    "get it on stdin and exit with 0 (repeatable).",
)
@option(
    "--tries",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="N",
    help="Most answers for a row, with another seed each, until --validate finds one good.",
)
@option("--tell-error", is_flag=True, help="With --tries: show the model its answer and what was wrong with it.")
@option(
    "--validate-timeout",
    type=click.FloatRange(0, min_open=True),
    default=CHECK_TIMEOUT_S,
    show_default=True,
    metavar="SECONDS",
    help="Most time that a check of an answer may take.",
)
@option("--cache", metavar="DIR", help="Keep answers in DIR, and take those that are there instead of computing them.")
@option(
    "--cache-size",
    default=DEFAULT_CACHE_SIZE,
    show_default=True,
    metavar="SIZE",
    help="Most that the cache may take; what was used longest ago leaves first.",
)
@option("--timings", is_flag=True, help="Add times and cached tokens to each row.")
@option(
    "--allow-unknown",
    is_flag=True,
    help="Carry misspelt and unavailable parameters along instead of refusing their row.",
)
@option("--stats", metavar="FILE", help="Write statistics of this run as JSON, however it ends; - is stdout.")
@sampling_options()
@engine_options()
@lora_option
@replica_options
@trace_option
@preset_option
@option("-q", "--quiet", is_flag=True, help="Print only errors on stderr.")
@option("-v", "--verbose", is_flag=True, help="Print more about the engine, and each error row.")
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
                while_running=lambda pipeline: handle_signals(pipeline.interrupt, output.stop_timeout_s),
            )
    return 1 if stats.errors or stats.errors_kept else 0


def _check(options: RunOptions, source: RowInput, stats: RunStats) -> Literal[0, 1]:
    engine = _load(options, stats)

    from cbatch.batch.line_processor import LineProcessor
    from cbatch.batch.pipeline import checked_lines
    from cbatch.cli.run.check import InputCheck
    from cbatch.cli.run.estimate.estimate import estimate_run
    from cbatch.cli.run.estimate.sample_run import ROWS_PER_SLOT, RowSample

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
    """What computes the rows: replicas, or an engine of this process."""
    if options.replicas.are_given:
        from cbatch.cli.common.replicas import open_replicas

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
