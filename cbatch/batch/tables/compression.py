"""Compressed files: read whatever their names are, because their first bytes say how they are compressed."""

from __future__ import annotations

import gzip
import importlib
import io
import zlib
from contextlib import suppress
from typing import IO, Any, cast

from cbatch.base.errors import ConfigError
from cbatch.batch.tables.forms import Compression
from cbatch.extras import missing_package

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
"""First bytes of the formats. No text in UTF-8 begins with them."""

CHUNK = 2**16

READ_ERRORS = (OSError, EOFError, ValueError, zlib.error)
"""What reading a damaged file raises."""


def first_bytes(stream: IO[bytes], size: int) -> bytes:
    """What a stream holds next, at most `size` bytes, without taking it. Waits for the first byte."""
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
        return cast(IO[bytes], gzip.GzipFile(fileobj=stream, mode="rb"))
    if head.startswith(ZSTD):
        return _zstd_reader(stream)
    return stream


def compressed(file: IO[bytes], kind: Compression | None) -> IO[bytes]:
    """A stream that writes to a file. Closing it writes the end of the format, and leaves the file open."""
    if kind == "gz":  # without the time, so that the same rows give the same bytes
        return cast(IO[bytes], gzip.GzipFile(filename="", fileobj=file, mode="wb", compresslevel=6, mtime=0))
    if kind == "zst":
        if (own := _own_zstd()) is not None:
            return cast(IO[bytes], own.ZstdFile(file, "wb"))
        pyarrow = import_pyarrow("zstd")
        return cast(IO[bytes], pyarrow.CompressedOutputStream(pyarrow.PythonFile(_Unclosed(file), "w"), "zstd"))
    return cast(IO[bytes], io.BufferedWriter(cast(io.RawIOBase, _Unclosed(file)), 2**20))


def check_compression(kind: Compression | None) -> None:
    """Raises ConfigError if what is needed to write such a file is not installed."""
    if kind == "zst" and _own_zstd() is None:
        import_pyarrow("zstd")


def import_pyarrow(what: str) -> Any:
    """The package pyarrow, for `what`. Raises ConfigError if it is not installed."""
    try:
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise ConfigError(missing_package("pyarrow", f"{what} needs")) from error


def _own_zstd() -> Any:
    """Python's own module, from 3.14 on; None before."""
    with suppress(ImportError):
        return importlib.import_module("compression.zstd")
    return None


def _zstd_reader(stream: IO[bytes]) -> IO[bytes]:
    if (own := _own_zstd()) is not None:
        return cast(IO[bytes], own.ZstdFile(stream, "rb"))
    pyarrow = import_pyarrow("zstd")
    source = pyarrow.CompressedInputStream(pyarrow.PythonFile(_Unclosed(stream), "r"), "zstd")
    return io.BufferedReader(_RawReader(source), CHUNK)


class _RawReader(io.RawIOBase):
    """Lets a stream of pyarrow, which knows no lines, be read through a buffer of Python."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        data = self._source.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class _Unclosed(io.RawIOBase):
    """A file that stays open when what reads or writes it is closed or freed."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        return self._file.read(size)

    def write(self, data: Any, /) -> int:
        return self._file.write(data)

    def flush(self) -> None:
        if not self.closed:
            self._file.flush()
