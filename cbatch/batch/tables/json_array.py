"""JSON arrays: read one element at a time, in bounded memory, and written. Between the commas stand rows."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from functools import partial
from typing import IO

from cbatch.batch.forms import CHUNK, Compression, compressed
from cbatch.batch.lines import BOM, MAX_LINE_BYTES, Line, line_digest
from cbatch.batch.row import format_row
from cbatch.batch.tables.columns import Column, Rows
from cbatch.batch.tables.restored import with_cells

_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|(\\?)\Z)'
_BETWEEN, _INSIDE = (re.compile(_STRING + rb"|[\[\]{}%s]" % comma, re.DOTALL) for comma in (b",", b""))
"""The next string or bracket, between elements also a comma. The group is set if a string does not end in the text."""

_BLANK = b" \t\r\n"
NO_ARRAY = "it is not a JSON array, which begins with [; --format jsonl reads an object a line"


def read_array(stream: IO[bytes]) -> Iterator[Line]:
    """Yields the elements of an array as lines; what is no valid JSON inside an element is an error of its row.

    Raises ValueError if the stream is no array, or ends or goes on in the wrong place.
    """
    read_some = getattr(stream, "read1", stream.read)  # what is there, without waiting for a whole chunk
    chunks: Iterator[bytes] = iter(partial(read_some, CHUNK), b"")
    first = read = b""
    while len(first) < len(BOM) and (chunk := next(chunks, b"")):
        read += chunk
        first = read.removeprefix(BOM).lstrip(_BLANK)
    if not first.startswith(b"["):
        raise ValueError(NO_ARRAY)
    scanner = _Scanner()
    yield from scanner.take(first[1:])
    for chunk in chunks:
        yield from scanner.take(chunk)
    if not scanner.is_closed:
        raise ValueError(f"the JSON array ends in row {scanner.index + 1}; the file may be cut off")


class _Scanner:
    """Finds where elements end, from brackets, quotes and backslashes alone; a chunk may end anywhere.

    index: of the element that is being read
    """

    def __init__(self) -> None:
        self.index, self._depth, self.is_closed = 0, 1, False
        self._open = b""
        """The beginning of a text that is to be read like the string in which the last chunk has ended."""
        self._kept = bytearray()
        self._digest: hashlib.blake2b | None = None
        """Of an element that is too long to be kept."""

    def take(self, data: bytes) -> Iterator[Line]:
        """Yields the elements that end in the next bytes of the array."""
        text, start, self._open = self._open + data, len(self._open), b""
        place = 0
        while not self.is_closed and (found := (_BETWEEN if self._depth == 1 else _INSIDE).search(text, place)):
            place, sign = found.end(), text[found.start()]
            if found[1] is not None:
                self._open = b'"' + found[1]
            self._depth += (sign in b"[{") - (sign in b"]}")
            if self._depth == 0 or (self._depth == 1 and sign in b","):
                self.is_closed = self._depth == 0
                self._keep(text[start : found.start()])
                start = place
                if (line := self._element()) is not None:
                    yield line
        if not self.is_closed:
            self._keep(text[start:])
        elif text[start:].strip(_BLANK):
            raise ValueError("something stands behind the end of the JSON array")

    def _keep(self, data: bytes) -> None:
        if self._digest is None and len(self._kept) + len(data) > MAX_LINE_BYTES:
            self._digest = line_digest(self._kept)
            self._kept.clear()
        if self._digest is None:
            self._kept += data
        else:
            self._digest.update(data)

    def _element(self) -> Line | None:
        """The element that has ended; None for the nothing of an empty array."""
        data, digest = bytes(self._kept).strip(_BLANK), self._digest
        self._kept.clear()
        self._digest = None
        if self.is_closed and self.index == 0 and not data and digest is None:
            return None
        index, self.index = self.index, self.index + 1
        return Line(index, data) if digest is None else Line(index, None, digest.digest())


def write_array(file: IO[bytes], kind: Compression | None, columns: list[Column], rows: Rows) -> None:
    """Writes an array of flat objects, each with all columns on a line of its own."""
    columns, cells = with_cells(rows, columns, lambda _, value: value, has_blanks=False)
    names, separator = [column.name for column in columns], b"[\n"
    with compressed(file, kind) as target:
        for _, values in cells:
            target.write(separator + format_row(dict(zip(names, values, strict=True))).rstrip())
            separator = b",\n"
        target.write(b"\n]\n" if separator == b",\n" else b"[]\n")
