"""`cbatch run`: JSONL rows in, JSONL rows out."""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from collections.abc import Container, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import click

from cbatch.cli.exits import ReaderGone
from cbatch.cli.loading import open_engine
from cbatch.cli.options import engine_options, model_options, sampling_options, sampling_overrides
from cbatch.cli.screen import Progress, emit, notice
from cbatch.cli.signals import stopping
from cbatch.engine import ConfigError, RequestError, SamplingParams

if TYPE_CHECKING:
    from cbatch.cli.job import Preparer
    from cbatch.cli.journal import Comparison
    from cbatch.cli.lines import Line, Source
    from cbatch.cli.output import FileOutput, Output
    from cbatch.cli.tally import Tally
    from cbatch.engine import Driver, Engine


@click.command("run")
@click.argument("input", default="-", metavar="[INPUT]")
@click.option("-o", "--output", default="-", metavar="OUT", help="Output file; - is stdout.")
@click.option("--resume", is_flag=True, help="Go on where an earlier run on this output file ended.")
@click.option("--retry-errors", is_flag=True, help="With --resume: run rows again that were errors.")
@click.option("--recompute-changed", is_flag=True, help="With --resume: run rows again that no longer fit.")
@click.option("--overwrite", is_flag=True, help="Replace an output file that has content.")
@click.option("--format", type=click.Choice(["jsonl", "text"]), default="jsonl", help="text: one prompt a line.")
@click.option("--order", type=click.Choice(["input", "completion"]), default="input", show_default=True)
@click.option("--window", type=click.IntRange(1), help="Most rows in flight or held back [4 x --max-seqs].")
@click.option("--max-errors", type=click.IntRange(1), metavar="N", help="Stop at the Nth error row.")
@click.option("--check", is_flag=True, help="Run nothing; report bad rows, lengths and KV need as JSON.")
@click.option("--date", type=click.DateTime(["%Y-%m-%d"]), help="Of today, for templates that tell the model.")
@click.option("--raw", is_flag=True, help="Prompts are plain text to continue; no chat template.")
@click.option("--token-ids", is_flag=True, help="Add the output's token ids to each row.")
@click.option("--timings", is_flag=True, help="Add seconds and cached tokens to each row.")
@click.option("--allow-unknown", is_flag=True, help="Carry misspelt parameters along instead of refusing the row.")
@click.option("--stats", metavar="FILE", help="Write this run's figures as JSON, however it ends.")
@model_options
@sampling_options
@engine_options
@click.option("-q", "--quiet", is_flag=True, help="Nothing on stderr but errors.")
@click.option("-v", "--verbose", is_flag=True, help="Tell more about the engine, and each error row.")
def run(**options: Any) -> Literal[0, 1]:
    """Generate an answer for every row of INPUT (JSON Lines; - is stdin).

    A row is {"prompt": ...}, {"messages": [...]}, {"prompt_token_ids": [...]} or an OpenAI Batch request, and may
    carry sampling parameters of its own. Each gives one row of output; a bad row gives an error row and stops
    nothing. Interrupt it when you like: with -o, --resume goes on from there.
    """
    from cbatch.cli.tally import Tally

    tally = Tally()
    with _stats_written(options, tally):
        _check_usage(options)
        source = _open_input(options)
        if options["check"]:
            return _check(options, source, tally)
        with _open_output(options, source) as output:
            if not (options["resume"] or options["overwrite"]):
                output.check_is_empty()
            _run(options, source, output, tally)
    return 1 if tally.has_errors else 0


def _run(options: dict[str, Any], source: IO[bytes], output: Output, tally: Tally) -> None:
    from cbatch.cli.batch import Batch, tune_process
    from cbatch.cli.lines import read_lines
    from cbatch.cli.output import FileOutput
    from cbatch.engine import Driver

    total = _count_lines(options)
    tally.engine, preparer = _load(options, tally)
    lines: Source = source
    kept: Container[int] = ()
    if isinstance(output, FileOutput):
        lines, done = _start_file(output, options, source, preparer)
        tally.rows_kept, tally.errors_kept, kept = done.rows, done.errors, done
    tune_process()
    with closing(Driver(tally.engine)) as driver:
        window = options["window"] or 4 * tally.engine.scheduler.max_seqs
        batch = Batch(driver, output, preparer, tally, window=window, on_error=notice if options["verbose"] else None)
        progress = Progress(total, quiet=options["quiet"], state=lambda: _state(tally, driver, total))
        try:
            with stopping(batch.interrupt, output.patience), progress:
                batch.run(read_lines(lines), progress.tick, kept=kept, max_errors=options["max_errors"])
        finally:
            tally.retried_steps = driver.num_retries
            if not options["quiet"] and not isinstance(sys.exception(), ReaderGone):
                for line in tally.summary(driver, batch.waited_for_output_s):
                    notice(line)


def _check(options: dict[str, Any], source: IO[bytes], tally: Tally) -> Literal[0, 1]:
    from cbatch.cli.check import Check
    from cbatch.cli.lines import read_lines

    engine, preparer = _load(options, tally)
    check = Check(engine, preparer)
    total = _count_lines(options)
    with Progress(total, quiet=options["quiet"], state=lambda: (check.rows, "read")) as progress:
        report = check.run(read_lines(source), progress.tick)
    emit(json.dumps(report, indent=2))
    return 1 if report["bad_rows"] else 0


def _load(options: dict[str, Any], tally: Tally) -> tuple[Engine, Preparer]:
    started = time.monotonic()
    engine = open_engine(options, quiet=options["quiet"], verbose=options["verbose"])
    tally.load_s = time.monotonic() - started

    from cbatch.cli.job import Preparer, RowOptions
    from cbatch.engine import FIXED_DATE

    given = sampling_overrides(options)
    row_options = RowOptions(
        params=engine.loaded.defaults.merged(given),
        has_max_tokens="max_tokens" in given,
        seed=options["seed"],
        system=options["system"],
        today=options["date"].date() if options["date"] else FIXED_DATE,
        raw=options["raw"],
        as_text=options["format"] == "text",
        allow_unknown=options["allow_unknown"],
        token_ids=options["token_ids"],
        timings=options["timings"],
    )
    return engine, Preparer(engine, row_options)


def _start_file(
    output: FileOutput, options: dict[str, Any], source: IO[bytes], preparer: Preparer
) -> tuple[Source, Comparison]:
    """Makes the file ready for this run's rows. Returns the input from its beginning, and what is done of it."""
    from cbatch.cli.journal import Comparison, Journal, compare
    from cbatch.cli.lines import Spool, read_lines

    if not (options["resume"] and output.has_content):
        output.start(Journal())
        return source, Comparison()
    journal = output.journal()
    spool, compared = Spool(source), 0

    def key_of(line: Line) -> str:
        nonlocal compared
        compared += 1
        progress.tick()
        return preparer.job(line).key

    rows = len(journal.indices)
    with Progress(rows, quiet=options["quiet"], state=lambda: (compared, "compared with the input")) as progress:
        done = compare(journal, read_lines(spool), key_of, retry_errors=options["retry_errors"])
    if not done.fits and not options["recompute_changed"]:
        raise ConfigError(
            f"{options['output']} holds rows that do not fit this run: {done}. The file is left as it is. "
            "--recompute-changed runs changed rows again and drops those without a line; --overwrite starts anew."
        )
    output.start(journal)
    if not done.fits:
        output.resume_with = "--resume --recompute-changed"
    if not options["quiet"]:
        notice(f"resuming: {done.rows:,} rows are kept" + ("" if done.fits else f"; not kept: {done}"))
    spool.rewind()
    return spool, done


def _state(tally: Tally, driver: Driver, total: int | None) -> tuple[int, str]:
    """How many rows are done, and what stands behind that in a progress display."""
    from tqdm import tqdm

    done, load = tally.rows + tally.rows_kept, driver.load
    left = tally.seconds_left(total - done) if total else None
    parts = [  # what matters most comes first: a narrow terminal shows no more
        f"{tally.output_tokens / max(tally.running_s, 1e-9):,.0f} tok/s",
        f"{tqdm.format_interval(left)} left" if left is not None else "",
        f"{tally.errors.total():,} errors" if tally.errors else "",
        f"{load.running} run, {load.waiting} wait",
        f"KV {load.cache_used:.0%}",
        f"{tally.output_tokens:,} tokens",
    ]
    return done, ", ".join(part for part in parts if part)


@contextmanager
def _stats_written(options: dict[str, Any], tally: Tally) -> Iterator[None]:
    """Writes the figures to a file at the end, whatever that is. That it can be written is tried at the start."""
    name = options["stats"]
    try:
        if name is not None:
            _check_is_another(name, options)
            Path(name).open("a").close()
    except OSError as error:
        raise ConfigError(f"Cannot write {name}: {error.strerror}.") from error
    try:
        yield
    finally:
        if name is not None:
            try:
                Path(name).write_text(json.dumps(tally.figures(), indent=2) + "\n")
            except OSError as error:
                notice(f"Cannot write {name}: {error.strerror}.")


def _check_is_another(name: str, options: dict[str, Any]) -> None:
    path = Path(name)
    for other in (Path(options[side]) for side in ("input", "output") if options[side] != "-"):
        if os.path.realpath(path) == os.path.realpath(other) or (
            path.is_file() and other.is_file() and path.samefile(other)
        ):
            raise ConfigError(f"--stats {name} is the input or the output; choose another file.")


def _check_usage(options: dict[str, Any]) -> None:
    """Refuses what is wrong for every row: a usage error, not a million error rows."""
    try:
        (options["system"] or "").encode()
    except UnicodeEncodeError as error:
        raise ConfigError("--system is not valid UTF-8.") from error
    try:
        SamplingParams().merged(sampling_overrides(options))
    except RequestError as error:
        name, _, rest = str(error).partition(" ")
        raise ConfigError(f"--{name.replace('_', '-')} {rest}") from error
    for name in ("retry_errors", "recompute_changed"):
        if options[name] and not options["resume"]:
            raise ConfigError(f"--{name.replace('_', '-')} goes with --resume.")
    if options["resume"] and options["overwrite"]:
        raise ConfigError("--resume keeps what is in the output file, --overwrite does not; give one of them.")


def _open_input(options: dict[str, Any]) -> IO[bytes]:
    name = options["input"]
    if name == "-":
        if sys.stdin is None:
            raise ConfigError("There is no input: stdin is closed.")
        if sys.stdin.isatty() and not options["quiet"]:
            notice("reading rows from the terminal; Ctrl-D ends them.")
        return sys.stdin.buffer
    try:
        return Path(name).open("rb")
    except OSError as error:
        raise ConfigError(f"Cannot read {name}: {error.strerror}.") from error


def _count_lines(options: dict[str, Any]) -> int | None:
    """Lines of the input, for the progress display, where there is one and they can be known beforehand."""
    path = Path(options["input"])
    if options["quiet"] or options["input"] == "-" or not path.is_file():
        return None
    with path.open("rb") as stream:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: stream.read(2**20), b""))


def _open_output(options: dict[str, Any], source: IO[bytes]) -> Output:
    """Before a model is loaded for it. What is no regular file (a pipe, a device) is treated as stdout is."""
    try:
        return _opened(options, source)
    except (OSError, RuntimeError) as error:  # RuntimeError: links that lead in a circle
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"Cannot write {options['output']}: {reason}.") from error


def _opened(options: dict[str, Any], source: IO[bytes]) -> Output:
    from cbatch.cli.output import FileOutput, StreamOutput

    name, path = options["output"], Path(options["output"])
    input_order = options["order"] == "input"
    if not name or path.is_dir():
        raise ConfigError(f"Cannot write {name!r}: a file is needed.")
    if name == "-" or (path.exists() and not path.is_file()):
        if options["resume"]:
            raise ConfigError("--resume needs an output file (-o FILE): what went down a pipe cannot be read again.")
        if name == "-" and sys.stdout is None:
            raise ConfigError("There is no output: stdout is closed.")
        stream = os.fdopen(sys.stdout.fileno(), "wb", 0, closefd=False) if name == "-" else path.open("wb", 0)
        _check_not_input(source, os.fstat(stream.fileno()), "stdout" if name == "-" else name)
        return StreamOutput(stream, input_order=input_order)
    if path.exists():
        _check_not_input(source, path.stat(), name)
    return FileOutput(path, input_order=input_order)


def _check_not_input(source: IO[bytes], target: os.stat_result, name: str) -> None:
    if stat.S_ISREG(target.st_mode) and os.path.samestat(os.fstat(source.fileno()), target):
        raise ConfigError(f"{name} is the input; choose another file for the output.")
