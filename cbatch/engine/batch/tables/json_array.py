"""Reads a JSON array one element at a time, in bounded memory: what stands between its commas is a row."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import IO

from cbatch.engine.batch.lines import BOM, MAX_LINE_BYTES, Line
from cbatch.engine.batch.tables.compression import CHUNK

_STRUCTURE = re.compile(rb'["\[\]{},]')
_STRING_END = re.compile(rb'["\\]')
_BLANK = b" \t\r\n"
NO_ARRAY = "it is not a JSON array, which begins with [; --format jsonl reads an object a line"


def read_array(stream: IO[bytes]) -> Iterator[Line]:
    """Yields the elements of an array as lines; what is no valid JSON inside an element is an error of its row.

    Raises ValueError if the stream is no array, or ends or goes on in the wrong place.
    """
    chunks = _chunks(stream)
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


def _chunks(stream: IO[bytes]) -> Iterator[bytes]:
    read = getattr(stream, "read1", stream.read)  # what is there, without waiting for a whole chunk
    while data := read(CHUNK):
        yield data


class _Scanner:
    """Finds where elements end, from brackets and quotes alone; a chunk may end anywhere.

    index: of the element that is being read
    """

    def __init__(self) -> None:
        self.index = 0
        self.is_closed = False
        self._depth = 1
        self._in_string = False
        self._is_escaped = False
        self._kept = bytearray()
        self._digest: hashlib.blake2b | None = None
        """Of an element that is too long to be kept."""

    def take(self, data: bytes) -> Iterator[Line]:
        """Yields the elements that end in the next bytes of the array."""
        if self.is_closed:
            self._check_rest(data)
            return
        start = place = 0
        while (end := self._next_end(data, place)) is not None:
            self._keep(data[start:end])
            if (line := self._element()) is not None:
                yield line
            start = place = end + 1
            if self.is_closed:
                self._check_rest(data[start:])
                return
        self._keep(data[start:])

    def _next_end(self, data: bytes, place: int) -> int | None:
        """Where the element ends; None if not in these bytes."""
        if self._is_escaped and data:
            self._is_escaped, place = False, place + 1
        while found := (_STRING_END if self._in_string else _STRUCTURE).search(data, place):
            sign, place = found[0], found.end()
            if self._in_string:
                if sign == b"\\":
                    self._is_escaped = place == len(data)
                    place += 1
                else:
                    self._in_string = False
            elif sign == b'"':
                self._in_string = True
            elif sign in b"[{":
                self._depth += 1
            elif sign in b"]}":
                self._depth -= 1
                if self._depth == 0:
                    self.is_closed = True
                    return found.start()
            elif self._depth == 1:
                return found.start()
        return None

    def _keep(self, data: bytes) -> None:
        if self._digest is None and len(self._kept) + len(data) > MAX_LINE_BYTES:
            self._digest = hashlib.blake2b(self._kept, digest_size=16)
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

    def _check_rest(self, data: bytes) -> None:
        if data.strip(_BLANK):
            raise ValueError("something stands behind the end of the JSON array")
