"""`cbatch run`: the command, and the files of a run, which are opened and checked before a model is loaded for it."""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import click

from cbatch.base.errors import ConfigError, os_errors_as, reason_of
from cbatch.cli.common.configured_command import preset_option
from cbatch.cli.common.console import OutputStream, emit, notice, safe_json, show_progress
from cbatch.cli.common.exits import handle_signals
from cbatch.cli.common.loading import open_engine, open_replicas
from cbatch.cli.common.options import (
    check_distinct_file,
    engine_options,
    lora_option,
    make_options,
    record_options,
    replica_options,
    sampling_options,
)
from cbatch.cli.common.stdout import own_stdout, without_library_output
from cbatch.cli.run.options import STREAMED, RunOptions
from cbatch.cli.run.saved_options import SavedOptionsCommand, save_options, tell_taken_options

if TYPE_CHECKING:
    from cbatch.api import Engine
    from cbatch.batch.driver import BatchDriver
    from cbatch.batch.tables.row_input import RowInput
    from cbatch.batch.writer import RowWriter
    from cbatch.cli.run.stats import RunStats


MAIN = "output model resume max_tokens temperature system template json_schema replicas check".split()


@click.command("run", cls=SavedOptionsCommand, main=MAIN)
@click.argument("input", default="-", metavar="[INPUT]")
@record_options(RunOptions)
@sampling_options()
@engine_options()
@lora_option
@replica_options
@preset_option
def run(**values: Any) -> Literal[0, 1]:
    """Generate an answer for every row of INPUT (JSON Lines, CSV, TSV, JSON, Parquet, xlsx, FILE.db#TABLE; - is stdin).

    A row is {"prompt": ...}, {"messages": [...]}, {"prompt_token_ids": [...]} or an OpenAI Batch request, and may
    set sampling parameters. Each gives one row of output; a bad one gives an error row, and the others still run.
    You can interrupt a run at any time: with -o, --resume continues it.
    """
    from cbatch.cli.run.stats import RunStats

    options = make_options(RunOptions, values)
    if not options.quiet:
        tell_taken_options()
    stats = RunStats()
    with stats_file(options, stats), ExitStack() as opened:
        options.check_usage()
        source = opened.enter_context(closing(open_input(options)))
        if options.check:
            return _check(options, source, stats)
        with open_output(options, source) as output, _open_driver(options, stats) as driver:
            from cbatch.cli.run.batch_run import run_batch

            run_batch(
                driver,
                options,
                source,
                output,
                stats,
                progress=partial(show_progress, quiet=options.quiet),
                while_running=partial(_while_running, options, output.stop_timeout_s),
                in_lines=sys.stderr is not None and sys.stderr.isatty(),
            )
    return 1 if stats.errors or stats.errors_kept else 0


@contextmanager
def _while_running(
    options: RunOptions, stop_timeout_s: float | None, interrupt: Callable[[int], None]
) -> Iterator[None]:
    save_options(options.output)  # now that the output is that of this run
    with handle_signals(interrupt, stop_timeout_s=stop_timeout_s):
        yield


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
def _open_driver(options: RunOptions, stats: RunStats) -> Iterator[BatchDriver]:
    if options.replicas.are_given:
        started = time.monotonic()
        with open_replicas(options.replicas, options.engine, quiet=options.quiet, verbose=options.verbose) as driver:
            stats.load_s = time.monotonic() - started
            yield driver
        return
    with _load(options, stats) as engine:
        from cbatch.batch.engine_driver import EngineDriver

        yield EngineDriver(engine.thread)


def _load(options: RunOptions, stats: RunStats) -> Engine:
    started = time.monotonic()
    engine = open_engine(options.engine, quiet=options.quiet, verbose=options.verbose)
    stats.load_s = time.monotonic() - started
    return engine


def open_input(options: RunOptions) -> RowInput:
    """Opens the input, and looks at its beginning if it is a table or a file. Raises ConfigError."""
    from cbatch.batch.forms import WHOLE, Shard, input_form, is_remote, split_table
    from cbatch.batch.remote import fetch
    from cbatch.batch.tables.row_input import RowInput
    from cbatch.batch.templates import read_template

    given, form = options.template, options.input_form
    template = read_template(given, may_be_constant=options.constant_template) if given is not None else None
    shard = Shard.parse(options.shard) if options.shard is not None else WHOLE
    name = options.input
    if is_remote(name):
        if not options.quiet:
            notice(f"fetching {name}")
        stream: IO[bytes] = fetch(split_table(name)[0])
    elif name != "-":
        with os_errors_as(ConfigError, f"Cannot read {name}"):
            stream = Path(split_table(name)[0]).open("rb")  # noqa: SIM115
        if options.format is None and input_form(name) == "text" and not options.quiet:
            what = "text, one prompt a line" if form == "text" else "JSON Lines, as its first line is a JSON object"
            notice(f"{name} is read as {what}; --format names another form")
    elif sys.stdin is None:
        raise ConfigError("There is no input: stdin is closed.")
    else:
        if sys.stdin.isatty() and not options.quiet:
            notice("reading rows from the terminal; Ctrl-D ends them.")
        name, stream = "The input", sys.stdin.buffer
    is_sure = options.format is not None
    return RowInput(stream, name, form, template=template, shard=shard, is_sure=is_sure)


@contextmanager
def open_output(options: RunOptions, source: RowInput) -> Iterator[RowWriter]:
    """Opens the output. One that has rows is refused unless the options say what to do with them.

    Anything but a regular file (a pipe, a device) is treated like stdout.
    """
    from cbatch.batch.forms import is_remote
    from cbatch.batch.remote import RemoteOutput
    from cbatch.batch.writer import StreamWriter

    remote = RemoteOutput(options.output) if is_remote(options.output) else None
    if remote is not None:
        is_database = options.output_form == "sqlite"
        remote.prepare(resume=options.resume, overwrite=options.overwrite, has_others=is_database)
        options = replace(options, output=remote.name)
    try:
        opened = _open_writer(options, source)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of symlinks
        raise ConfigError(f"Cannot write {options.output}: {reason_of(error)}.") from error
    with opened as output, without_library_output() if isinstance(opened, StreamWriter) else nullcontext():
        if not (options.resume or options.overwrite):
            output.check_empty()
        yield output
    if remote is not None:
        remote.upload()


def _open_writer(options: RunOptions, source: RowInput) -> RowWriter:
    from cbatch.batch.forms import compression, resolved, split_table
    from cbatch.batch.tables.csv_table import CsvStream
    from cbatch.batch.tables.table_writer import TableWriter, journal_of, table_of
    from cbatch.batch.writer import FileWriter, StreamWriter

    name, path = options.output, Path(split_table(options.output)[0])
    input_order = options.order == "input"
    if not name or path.is_dir():
        raise ConfigError(f"Cannot write {name!r}: a file is needed.")
    if name == "-" or (path.exists() and not path.is_file()):
        if options.resume:
            raise ConfigError("--resume needs an output file (-o FILE): a pipe cannot be read again.")
        if options.journal_tokens:
            raise ConfigError("--journal-tokens needs an output file (-o FILE), which the tokens lie beside.")
        if name == "-" and sys.stdout is None:
            raise ConfigError("There is no output: stdout is closed.")
        if options.output_format not in STREAMED:
            raise ConfigError(f"--output-format {options.output_format} needs a file, and {name} is none.")
        stream = OutputStream(own_stdout() if name == "-" else name, "wb")
        _check_not_input(source.stream, os.fstat(stream.fileno()), "stdout" if name == "-" else name)
        changes: list[Callable[[bytes], bytes]] = []
        if options.output_format not in (None, "jsonl"):
            changes.append(CsvStream(options.output_format, source.names, options.expanded))
        if stream.isatty():  # no text of a model is to control the terminal
            changes.append(safe_json)
        return StreamWriter(stream, input_order=input_order, changes=changes)
    form, kind = options.output_form, compression(name)
    is_table = form != "jsonl" or kind is not None
    whole = resolved(name)
    is_other = form == "sqlite" and source.table.lower() != table_of(whole).lower()
    for written in filter(None, (None if is_other else path, journal_of(whole) if is_table else None)):
        if written.exists():
            _check_not_input(source.stream, written.stat(), str(written))
    if not is_table:
        return FileWriter(path, input_order=input_order)
    return TableWriter(Path(name), form, kind, input_order=input_order, types=source.types, expand=options.expanded)


def _check_not_input(source: IO[bytes], target: os.stat_result, name: str) -> None:
    if stat.S_ISREG(target.st_mode) and os.path.samestat(os.fstat(source.fileno()), target):
        raise ConfigError(f"{name} is the input; choose another file for the output.")


@contextmanager
def stats_file(options: RunOptions, stats: RunStats) -> Iterator[None]:
    """Writes the statistics of a run to the file of --stats, or to stdout, however it ends.

    Tries at the start that it can.
    """
    name = options.stats
    if name == "-" and (options.output == "-" or options.check):
        raise ConfigError("--stats - writes to stdout, where other output goes; name a file with -o, or for --stats.")
    if name not in (None, "-"):
        with os_errors_as(ConfigError, f"Cannot write {name}"):
            check_distinct_file("--stats", name, {"the input": options.input, "the output": options.output})
            Path(name).open("a").close()
    try:
        yield
    finally:
        if name is not None:
            text = json.dumps(stats.as_dict(), indent=2)
            try:
                if name == "-":
                    emit(text)
                else:
                    Path(name).write_text(text + "\n")
            except OSError as error:
                notice(f"Cannot write {name}: {error.strerror}.")
