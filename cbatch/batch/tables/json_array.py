"""JSON arrays: read one element at a time, in bounded memory, and written. Between the commas stand rows."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import IO, Any

from cbatch.batch.forms import CHUNK, Compression, compressed
from cbatch.batch.lines import BOM, MAX_LINE_BYTES, Line, line_digest
from cbatch.batch.row import format_row
from cbatch.batch.tables.columns import Column, Rows
from cbatch.batch.tables.restored import rows_of_cells, with_rest

_OTHER, _OPENING, _CLOSING, _COMMA, _QUOTE = range(5)
_KINDS = bytes.maketrans(
    bytes(range(256)),
    bytes(
        _OPENING if sign in b"[{" else _CLOSING if sign in b"]}" else {44: _COMMA, 34: _QUOTE}.get(sign, _OTHER)
        for sign in range(256)
    ),
)
_ESCAPE = re.compile(rb"\\.", re.DOTALL)
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
        self.index, self._depth = 0, 1
        self.is_closed = self._in_string = self._is_escaped = False
        self._kept = bytearray()
        self._digest: hashlib.blake2b | None = None
        """Of an element that is too long to be kept."""

    def take(self, data: bytes) -> Iterator[Line]:
        """Yields the elements that end in the next bytes of the array."""
        start = 0
        ends, is_last = ([], False) if self.is_closed else self._ends(data)
        for end in ends:
            self._keep(data[start:end])
            self.is_closed = is_last and end == ends[-1]
            if (line := self._element()) is not None:
                yield line
            start = end + 1
        if not self.is_closed:
            self._keep(data[start:])
        elif data[start:].strip(_BLANK):
            raise ValueError("something stands behind the end of the JSON array")

    def _ends(self, data: bytes) -> tuple[list[int], bool]:
        """Where elements end in the next bytes, and whether the last of them ends the array."""
        import numpy as np

        if self._is_escaped:
            data = b" " + data[1:]
        data = _ESCAPE.sub(b"  ", data)  # a backslash and what it escapes, which may be in the next bytes
        self._is_escaped = data.endswith(b"\\")
        kinds = np.frombuffer(data.translate(_KINDS), np.uint8)
        quotes = np.flatnonzero(kinds == _QUOTE)
        places = np.flatnonzero((kinds != _OTHER) & (kinds != _QUOTE))
        places = places[(np.searchsorted(quotes, places) + self._in_string) % 2 == 0]
        self._in_string = bool((len(quotes) + self._in_string) % 2)
        kinds = kinds[places]
        depths = self._depth + np.cumsum((kinds == _OPENING).astype(np.int64) - (kinds == _CLOSING))
        self._depth = int(depths[-1]) if len(depths) else self._depth
        closing = np.flatnonzero(depths == 0)[:1]
        places, depths, kinds = (one[: closing[0] + 1] if len(closing) else one for one in (places, depths, kinds))
        found: list[int] = places[((kinds == _COMMA) & (depths == 1)) | (depths == 0)].tolist()
        return found, bool(len(closing))

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
    columns = with_rest(rows, columns, _stored, has_blanks=False)
    names, separator = [column.name for column in columns], b"[\n"
    with closing(compressed(file, kind)) as target:
        for _, values in rows_of_cells(rows, columns, _stored, has_blanks=False):
            target.write(separator + format_row(dict(zip(names, values, strict=True))).rstrip())
            separator = b",\n"
        target.write(b"\n]\n" if separator == b",\n" else b"[]\n")


def _stored(_: Column, value: Any) -> Any:
    return value
