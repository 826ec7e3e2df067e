"""Reads a JSON array one element at a time, in bounded memory: what stands between its commas is a row."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import IO

from cbatch.batch.forms import CHUNK
from cbatch.batch.lines import BOM, MAX_LINE_BYTES, Line, line_digest

_SIGNS = re.compile(rb'\\.|[][{},"]', re.DOTALL)
_BLANK = b" \t\r\n"
NO_ARRAY = "it is not a JSON array, which begins with [; --format jsonl reads an object a line"


def read_array(stream: IO[bytes]) -> Iterator[Line]:
    """Yields the elements of an array as lines; what is no valid JSON inside an element is an error of its row.

    Finds where they end from brackets, quotes and backslashes alone.

    Raises ValueError if the stream is no array, or ends or goes on in the wrong place.
    """
    read_some = getattr(stream, "read1", stream.read)  # what is there, without waiting for a whole chunk
    chunks: Iterator[bytes] = iter(partial(read_some, CHUNK), b"")
    head = b""
    while len(first := head.removeprefix(BOM).lstrip(_BLANK)) < len(BOM) and (chunk := next(chunks, b"")):
        head += chunk
    if not first.startswith(b"["):
        raise ValueError(NO_ARRAY)
    index, depth, in_string, rest, element = 0, 1, False, b"", _Element()
    for chunk in chain([first[1:]], chunks):
        data, start = rest + chunk, 0
        whole = len(data) - (len(data) - len(data.rstrip(b"\\"))) % 2  # a backslash and what it escapes stay together
        data, rest = data[:whole], data[whole:]
        for found in _SIGNS.finditer(data) if depth else ():
            sign = found[0]
            if sign == b'"':
                in_string = not in_string
            elif not in_string and len(sign) == 1:
                depth += (sign in b"[{") - (sign in b"]}")
                if depth == 0 or (depth == 1 and sign == b","):
                    element.add(data[start : found.start()])
                    start = found.end()
                    line = element.end(index)
                    if index or depth or line.data != b"":  # else the array is empty
                        yield line
                    index += 1
                if depth == 0:
                    break
        if depth:
            element.add(data[start:])
        elif data[start:].strip(_BLANK) or rest:
            raise ValueError("something stands behind the end of the JSON array")
    if depth:
        raise ValueError(f"the JSON array ends in row {index + 1}; the file may be cut off")


class _Element:
    """What was read of an element, or the hash of one that is too long to be kept."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._digest: hashlib.blake2b | None = None

    def add(self, data: bytes) -> None:
        self._data += data
        if self._digest is None and len(self._data) > MAX_LINE_BYTES:
            self._digest = line_digest()
        if self._digest is not None:
            self._digest.update(self._data)
            self._data.clear()

    def end(self, index: int) -> Line:
        """The element as a line; another one begins."""
        data, digest = bytes(self._data).strip(_BLANK), self._digest
        self._data.clear()
        self._digest = None
        return Line(index, data) if digest is None else Line(index, None, digest.digest())
