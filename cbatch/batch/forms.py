"""Forms of files of rows: their names' endings, how they are compressed, and the part of an input that a run takes."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import shutil
import tempfile
import zlib
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast, get_args
from urllib.parse import unquote, urlsplit

from cbatch.base.errors import ConfigError
from cbatch.extras import missing_package

InputForm = Literal["jsonl", "text", "csv", "tsv", "json", "parquet", "xlsx", "sqlite"]
ResultForm = Literal["jsonl", "csv", "tsv", "json", "parquet", "xlsx", "sqlite"]
OutputForm = Literal[ResultForm, "npy"]
Compression = Literal["gz", "zst"]

INPUT_FORMS: tuple[InputForm, ...] = get_args(InputForm)
OUTPUT_FORMS: tuple[OutputForm, ...] = get_args(OutputForm)

TABLES = frozenset(["csv", "tsv", "parquet", "xlsx", "sqlite"])
"""Forms whose rows have columns that the file names once."""

BLANKS = frozenset(["csv", "tsv", "xlsx"])
"""Forms in which null and empty text are the same empty cell."""

_DATABASES: tuple[str, ...] = ("sqlite", "sqlite3", "db")
_RESULTS: dict[str, ResultForm] = {
    **{"jsonl": "jsonl", "ndjson": "jsonl", "csv": "csv", "tsv": "tsv", "tab": "tsv", "json": "json"},
    **{"parquet": "parquet", "pq": "parquet", "xlsx": "xlsx"},
    **dict.fromkeys(_DATABASES, "sqlite"),
}
_FORMS: dict[str, OutputForm] = {**_RESULTS, "npy": "npy"}
_INPUTS: dict[str, InputForm] = {**_RESULTS, "txt": "text"}
_COMPRESSIONS: dict[str, Compression] = {"gz": "gz", "zst": "zst", "zstd": "zst"}


def input_form(name: str) -> InputForm:
    """The form of an input, from its name: `data.csv.gz` is CSV. Other endings are JSON Lines."""
    return _INPUTS.get(_endings(name)[0], "jsonl")


def begins_with_object(path: Path) -> bool:
    """Whether the first line of a file is a JSON object, so that it is no text."""
    with suppress(*READ_ERRORS, RecursionError):
        if path.is_file():  # a pipe could not be read again
            with path.open("rb") as file:
                return isinstance(json.loads(decompressed(file).readline(2**20).decode("utf-8-sig")), dict)
    return False


def output_form(name: str, option: str = "--output-format") -> OutputForm:
    """The form of an output, from its name; without an ending, JSON Lines. Raises ConfigError for another ending.

    option: what says the form otherwise
    """
    ending = _endings(name)[0]
    if ending and ending not in _FORMS:
        known = ", ".join(f".{one}" for one in _FORMS)
        raise ConfigError(
            f"{name}: no form of results ends in .{ending}. Take one of {known}; or say the form ({option})."
        )
    return _FORMS.get(ending, "jsonl")


def compression(name: str) -> Compression | None:
    """How an output is compressed, from its name. How an input is, its first bytes say."""
    return _endings(name)[1]


def unit_of(form: InputForm) -> str:
    """The unit of a row's index, for messages."""
    return "line" if form in ("jsonl", "text") else "row"


RESULTS_TABLE = "results"
"""The table of a database that an output is, unless its name says another."""


def split_table(name: str) -> tuple[str, str | None]:
    """The name of a file, and that of a table of the database or a sheet of the workbook: `shop.db#reviews`.

    The second is None if none is named, and for a file whose own name has the #.
    """
    file, _, table = name.rpartition("#")
    if file and table and _endings(file)[0] in (*_DATABASES, "xlsx") and (is_remote(name) or not Path(name).exists()):
        return file, table
    return name, None


def resolved(name: str) -> Path:
    """The path of a file without links, and the table behind it."""
    file, table = split_table(name)
    path = Path(os.path.realpath(file))
    return path if table is None else path.with_name(f"{path.name}#{table}")


def _endings(name: str) -> tuple[str, Compression | None]:
    name = split_table(name)[0]
    *_, form, ending = ["", "", *(one[1:] for one in Path(file_name(name).lower()).suffixes)]
    found = _COMPRESSIONS.get(ending)
    return (form if found else ending), found


def is_remote(name: str) -> bool:
    """Whether the name of an input or output is an address, such as `s3://bucket/prompts.jsonl`."""
    return re.match(r"[a-z][a-z0-9+.-]+://", name) is not None


def file_name(name: str) -> str:
    """The last part of a path or an address, without what a signed address adds to it."""
    return unquote(urlsplit(name).path).rpartition("/")[2] if is_remote(name) else Path(name).name


GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
"""First bytes of the formats. No text in UTF-8 begins with them."""

CHUNK, HEAD_BYTES = 2**16, 4096
"""Bytes that are read at once, and those that tell what a file is."""

READ_ERRORS = (OSError, EOFError, ValueError, zlib.error)
"""Errors of reading a damaged file."""


def first_bytes(stream: IO[bytes], size: int) -> bytes:
    """The next bytes of a stream, at most `size`, without taking them. Waits for the first one."""
    if (peek := getattr(stream, "peek", None)) is not None:
        return bytes(peek(size)[:size])
    start = stream.tell()
    data = stream.read(size)
    stream.seek(start)
    return data


def decompressed(stream: IO[bytes]) -> IO[bytes]:
    """The content of a stream, which may be compressed by gzip or zstd.

    Raises ConfigError if what is needed for zstd is not installed. What is damaged raises while it is read.
    """
    head = first_bytes(stream, len(ZSTD))
    if head.startswith(GZIP):
        import gzip

        return cast(IO[bytes], gzip.GzipFile(fileobj=stream, mode="rb"))
    if not head.startswith(ZSTD):
        return stream
    if (own := _own_zstd()) is not None:
        return cast(IO[bytes], own.ZstdFile(stream, "rb"))
    pyarrow = import_package("pyarrow", "zstd needs")
    source = pyarrow.CompressedInputStream(pyarrow.PythonFile(_Unclosed(stream), "r"), "zstd")
    return io.BufferedReader(source, CHUNK)  # pyarrow's stream knows no lines


_Target = AbstractContextManager[IO[bytes]]


def compressed(file: IO[bytes], kind: Compression | None) -> _Target:
    """A context whose stream writes to a file. Leaving it writes the end of the format, and leaves the file open."""
    if kind == "gz":  # without the time, so that the same rows give the same bytes
        import gzip

        return cast(_Target, gzip.GzipFile(filename="", fileobj=file, mode="wb", compresslevel=6, mtime=0))
    if kind == "zst":
        if (own := _own_zstd()) is not None:
            return cast(_Target, own.ZstdFile(file, "wb"))
        pyarrow = import_package("pyarrow", "zstd needs")
        return cast(_Target, pyarrow.CompressedOutputStream(pyarrow.PythonFile(_Unclosed(file), "w"), "zstd"))
    return nullcontext(file)


def check_output(form: OutputForm, kind: Compression | None) -> None:
    """Raises ConfigError if what is needed to write such a file is not installed, or it is no form at all."""
    if form == "parquet":
        import_package("pyarrow", "Parquet needs")
    if form == "xlsx":
        import_package("openpyxl")
    if form in ("parquet", "xlsx", "sqlite", "npy") and kind is not None:
        others = {"sqlite": "a database cannot be", "npy": "an array is not"}
        why = others.get(form, f"a {form} file is compressed inside")
        raise ConfigError(f"The output is not compressed: {why}; leave out .{kind} in its name.")
    if kind == "zst" and _own_zstd() is None:
        import_package("pyarrow", "zstd needs")


def import_package(package: str, use: str = "") -> Any:
    """A package of `EXTRAS`. Raises ConfigError if it is not installed.  use: see `missing_package`"""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(missing_package(package, use)) from error


def seekable(stream: IO[bytes]) -> IO[bytes]:
    """The stream, or a temporary copy of it: some forms begin with their end."""
    if stream.seekable():
        return stream
    copy = tempfile.TemporaryFile()  # noqa: SIM115  # closed when it is freed
    shutil.copyfileobj(stream, copy)
    copy.seek(0)
    return copy


def _own_zstd() -> Any:
    """Python's own module, from 3.14 on; None before."""
    with suppress(ImportError):
        return importlib.import_module("compression.zstd")
    return None


class _Unclosed(io.RawIOBase):
    """A file that stays open when what reads or writes it is closed or freed."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    writable = readable

    def read(self, size: int = -1, /) -> bytes:
        return self._file.read(size)

    def write(self, data: Any, /) -> int:
        return self._file.write(data)

    def flush(self) -> None:
        if not self.closed:
            self._file.flush()


@dataclass(frozen=True, slots=True)
class Shard:
    """The rows whose index leaves `number - 1` when divided by `count`. All shards together are the whole input."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Reads `2/8`. Raises ConfigError for what is no shard."""
        found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
        shard = cls(int(found[1]), int(found[2])) if found else None
        if shard is None or not 1 <= shard.number <= shard.count:
            raise ConfigError(f"--shard takes K/N, such as 2/8 for the second of eight shards, not {text!r}.")
        return shard

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int) and index % self.count == self.number - 1

    def size(self, rows: int) -> int:
        """How many of the first `rows` indices are in it."""
        return (rows - self.number + self.count) // self.count


WHOLE = Shard(1, 1)
