"""Where finished rows go: to a file that is a valid journal at every moment, or to a stream, in either order."""

from __future__ import annotations

import os
import tempfile
from array import array
from pathlib import Path
from typing import IO, Protocol

from cbatch.engine import ConfigError


class Output(Protocol):
    """Takes finished rows. `place` counts the rows of the output from 0, in input order."""

    def write(self, place: int, row: bytes) -> int:
        """Takes one row, and returns how many rows are out of memory since: 0 while it is held back."""

    def close(self) -> None:
        """Puts the rows in their final order, if that is still to do. Only after all rows are written."""


class ReaderGone(Exception):
    """Whoever read the output has closed it. (Click would turn a BrokenPipeError into exit code 1.)"""


class StreamOutput:
    """Rows to an unbuffered stream, each as soon as its turn has come. Raises ReaderGone when nobody reads it."""

    def __init__(self, stream: IO[bytes], *, input_order: bool) -> None:
        self._stream = stream
        self._input_order = input_order
        self._held: dict[int, bytes] = {}
        self._next = 0

    def write(self, place: int, row: bytes) -> int:
        if not self._input_order:
            _write_all(self._stream, row)
            return 1
        self._held[place] = row
        first = self._next
        while self._next in self._held:
            _write_all(self._stream, self._held.pop(self._next))
            self._next += 1
        return self._next - first

    def close(self) -> None:
        self._stream.flush()


class FileOutput:
    """Rows appended to a file as they finish, each in one write; at the end put in input order in one replace."""

    def __init__(self, path: Path, *, input_order: bool) -> None:
        """Empties the file. Raises OSError where it cannot be written."""
        self._path = path.resolve()
        self._input_order = input_order
        self._places = array("q")
        self._file = self._path.open("wb", buffering=0)

    @staticmethod
    def check(path: Path, *, overwrite: bool) -> None:
        """Finds out, before any work is done, whether the file can be written and put in order.

        Raises ConfigError for a file that has content and is not to be overwritten, or cannot be written.
        """
        if not overwrite and path.exists() and path.stat().st_size > 0:
            raise ConfigError(f"{path} exists and is not empty; give --overwrite to replace it.")
        if path.exists() and not os.access(path, os.W_OK):
            raise ConfigError(f"Cannot write {path}: Permission denied.")
        try:
            with tempfile.TemporaryFile(dir=path.resolve().parent):
                pass
        except OSError as error:
            raise ConfigError(f"Cannot write {path}: {error.strerror}.") from error

    def write(self, place: int, row: bytes) -> int:
        _write_all(self._file, row)
        self._places.append(place)
        return 1

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()
        if self._input_order and any(place != number for number, place in enumerate(self._places)):
            self._reorder()

    def _reorder(self) -> None:
        """Writes a second file in input order and puts it in the place of the first, or leaves the first."""
        ordered = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            with self._path.open("rb") as journal, ordered.open("xb") as target:
                starts = array("q", [0])
                for line in journal:
                    starts.append(starts[-1] + len(line))
                for number in sorted(range(len(self._places)), key=self._places.__getitem__):
                    journal.seek(starts[number])
                    target.write(journal.read(starts[number + 1] - starts[number]))
                target.flush()
                os.fchmod(target.fileno(), self._path.stat().st_mode & 0o777)
                os.fsync(target.fileno())
            ordered.replace(self._path)
        finally:
            ordered.unlink(missing_ok=True)


def _write_all(stream: IO[bytes], data: bytes) -> None:
    """Writes to a raw stream, which may take less than it is given."""
    view = memoryview(data)
    try:
        while view:
            view = view[stream.write(view) :]
    except BrokenPipeError as error:
        raise ReaderGone from error
