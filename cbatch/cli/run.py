"""`cbatch run`: JSONL rows in, JSONL rows out."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import click

from cbatch.cli.loading import open_engine
from cbatch.cli.options import engine_options, model_options, sampling_options, sampling_overrides
from cbatch.cli.output import FileOutput, Output, StreamOutput
from cbatch.cli.screen import Progress, notice
from cbatch.engine import ConfigError, RequestError, SamplingParams

if TYPE_CHECKING:
    from cbatch.cli.batch import BatchOptions
    from cbatch.engine import Engine


@click.command("run")
@click.argument("input", default="-", metavar="[INPUT]")
@click.option("-o", "--output", default="-", metavar="OUT", help="Output file; - is stdout.")
@click.option("--overwrite", is_flag=True, help="Replace an output file that has content.")
@click.option("--format", type=click.Choice(["jsonl", "text"]), default="jsonl", help="text: one prompt a line.")
@click.option("--order", type=click.Choice(["input", "completion"]), default="input", show_default=True)
@click.option("--window", type=click.IntRange(1), help="Most rows in flight or held back [4 x --max-seqs].")
@click.option("--raw", is_flag=True, help="Prompts are plain text to continue; no chat template.")
@click.option("--token-ids", is_flag=True, help="Add the output's token ids to each row.")
@click.option("--allow-unknown", is_flag=True, help="Carry misspelt parameters along instead of refusing the row.")
@model_options
@sampling_options
@engine_options
@click.option("-q", "--quiet", is_flag=True, help="Nothing on stderr but errors.")
def run(**options: Any) -> Literal[0, 1]:
    """Generate an answer for every row of INPUT (JSON Lines; - is stdin).

    A row is {"prompt": ...}, {"messages": [...]} or {"prompt_token_ids": [...]}, and may carry sampling
    parameters of its own. Each gives one row of output; a bad row gives an error row and stops nothing.
    """
    _check_sampling(options)
    stream = _open_input(options["input"])
    _check_output(options, stream)
    total = None if options["quiet"] else _count_lines(options["input"])
    engine = open_engine(options, quiet=options["quiet"])

    from cbatch.cli.batch import Batch
    from cbatch.engine import Driver

    output = _open_output(options)
    driver = Driver(engine)
    try:
        batch = Batch(driver, output, _batch_options(options, engine))
        with Progress(total, quiet=options["quiet"], describe=batch.describe) as progress:
            tally = batch.run(stream, progress.advance)
    finally:
        driver.close()
    if not options["quiet"]:
        for line in tally.summary():
            notice(line)
    return 1 if tally.errors else 0


def _check_sampling(options: dict[str, Any]) -> None:
    """Defaults that are wrong for every row are a usage error, not a million error rows."""
    try:
        (options["system"] or "").encode()
    except UnicodeEncodeError as error:
        raise ConfigError("--system is not valid UTF-8.") from error
    try:
        SamplingParams().merged(sampling_overrides(options))
    except RequestError as error:
        name, _, rest = str(error).partition(" ")
        raise ConfigError(f"--{name.replace('_', '-')} {rest}") from error


def _batch_options(options: dict[str, Any], engine: Engine) -> BatchOptions:
    from cbatch.cli.batch import BatchOptions

    return BatchOptions(
        params=engine.loaded.defaults.merged(sampling_overrides(options)),
        seed=options["seed"],
        window=options["window"] or 4 * engine.scheduler.max_seqs,
        system=options["system"],
        raw=options["raw"],
        as_text=options["format"] == "text",
        allow_unknown=options["allow_unknown"],
        token_ids=options["token_ids"],
    )


def _open_input(name: str) -> IO[bytes]:
    if name == "-":
        return sys.stdin.buffer
    try:
        return Path(name).open("rb")
    except OSError as error:
        raise ConfigError(f"Cannot read {name}: {error.strerror}.") from error


def _count_lines(name: str) -> int | None:
    """Lines of the input, for the progress display, where they can be known beforehand."""
    path = Path(name)
    if name == "-" or not path.is_file():
        return None
    with path.open("rb") as stream:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: stream.read(2**20), b""))


def _check_output(options: dict[str, Any], stream: IO[bytes]) -> None:
    """Refuses an output that cannot be written, before a model is loaded for it."""
    name, path = options["output"], Path(options["output"])
    if not name or path.is_dir():
        raise ConfigError(f"Cannot write {name!r}: a file is needed.")
    if name == "-" or (path.exists() and not path.is_file()):
        return
    if path.exists() and os.path.samestat(os.fstat(stream.fileno()), path.stat()):
        raise ConfigError(f"{name} is the input; choose another file for the output.")
    FileOutput.check(path, overwrite=options["overwrite"])


def _open_output(options: dict[str, Any]) -> Output:
    """What is no regular file (a pipe, a device) is treated as stdout is."""
    input_order = options["order"] == "input"
    path = Path(options["output"])
    if options["output"] == "-":
        stdout = os.fdopen(sys.stdout.fileno(), "wb", buffering=0, closefd=False)
        return StreamOutput(stdout, input_order=input_order)
    if path.exists() and not path.is_file():
        return StreamOutput(path.open("wb", buffering=0), input_order=input_order)
    return FileOutput(path, input_order=input_order)
