"""Opens and checks the files of a run, before a model is loaded for it."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING

from cbatch.base.errors import ConfigError
from cbatch.cli.common.console import OutputStream, emit, notice, safe_json
from cbatch.cli.common.options import check_distinct_file
from cbatch.cli.common.stdout import own_stdout, without_library_output
from cbatch.cli.run.options import RunOptions

if TYPE_CHECKING:
    from cbatch.batch.tables.row_input import RowInput
    from cbatch.batch.writer import RowWriter
    from cbatch.cli.run.stats import RunStats


def open_input(options: RunOptions) -> RowInput:
    """Opens the input, and looks at its beginning if it is a table or a file. Raises ConfigError."""
    from cbatch.batch.forms import WHOLE, Shard
    from cbatch.batch.tables.row_input import RowInput

    template = options.row_template()
    shard = Shard.parse(options.shard) if options.shard is not None else WHOLE
    name = options.input
    if name != "-":
        try:
            stream: IO[bytes] = Path(name).open("rb")  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"Cannot read {name}: {error.strerror}.") from error
    elif sys.stdin is None:
        raise ConfigError("There is no input: stdin is closed.")
    else:
        if sys.stdin.isatty() and not options.quiet:
            notice("reading rows from the terminal; Ctrl-D ends them.")
        name, stream = "The input", sys.stdin.buffer
    is_sure = options.format is not None
    return RowInput(stream, name, options.input_form, template=template, shard=shard, is_sure=is_sure)


@contextmanager
def open_output(options: RunOptions, source: RowInput) -> Iterator[RowWriter]:
    """Opens the output. One that has rows is refused unless the options say what to do with them.

    Anything but a regular file (a pipe, a device) is treated like stdout.
    """
    from cbatch.batch.writer import StreamWriter

    try:
        opened = _open_writer(options, source)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of symlinks
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"Cannot write {options.output}: {reason}.") from error
    with opened as output, without_library_output() if isinstance(opened, StreamWriter) else nullcontext():
        if not (options.resume or options.overwrite):
            output.check_empty()
        yield output


def _open_writer(options: RunOptions, source: RowInput) -> RowWriter:
    from cbatch.batch.forms import compression
    from cbatch.batch.tables.table_writer import TableWriter, journal_of
    from cbatch.batch.writer import FileWriter, StreamWriter

    name, path = options.output, Path(options.output)
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
        if options.output_format not in (None, "jsonl"):
            raise ConfigError(f"--output-format {options.output_format} needs a file, and {name} is none.")
        stream = OutputStream(own_stdout() if name == "-" else name, "wb")
        _check_not_input(source.stream, os.fstat(stream.fileno()), "stdout" if name == "-" else name)
        return StreamWriter(stream, input_order=input_order, escape=safe_json if stream.isatty() else None)
    form, kind = options.output_form, compression(name)
    is_table = form != "jsonl" or kind is not None
    for written in (path, journal_of(path.resolve())) if is_table else (path,):
        if written.exists():
            _check_not_input(source.stream, written.stat(), str(written))
    if not is_table:
        return FileWriter(path, input_order=input_order)
    return TableWriter(path, form, kind, input_order=input_order, types=source.types)


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
    try:
        if name not in (None, "-"):
            check_distinct_file("--stats", name, {"the input": options.input, "the output": options.output})
            Path(name).open("a").close()
    except OSError as error:
        raise ConfigError(f"Cannot write {name}: {error.strerror}.") from error
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
