"""The lines of an input stream, read one at a time, and more than once where that is asked for."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Protocol

MAX_LINE_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Line:
    """One physical line of the input, without its end.

    data:   None where it was longer than MAX_LINE_BYTES
    digest: of a line that was, so that it can be told from another
    """

    index: int
    data: bytes | None
    digest: bytes = b""


class LineSource(Protocol):
    """What lines are read from: a binary file, or a Spool over one."""

    def readline(self, limit: int, /) -> bytes: ...


class Spool:
    """A stream that can be read twice: `rewind` starts it again from where it was, once, and at the end of a line.

    What is read of a pipe before that is kept in a temporary file, which no crash leaves behind.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._start = stream.tell() if stream.seekable() else None
        self._kept = tempfile.TemporaryFile() if self._start is None else None  # noqa: SIM115
        self._is_replayed = False

    def readline(self, limit: int = -1, /) -> bytes:
        if self._kept is None:
            return self._stream.readline(limit)
        if self._is_replayed:
            return self._kept.readline(limit) or self._stream.readline(limit)
        data = self._stream.readline(limit)
        self._kept.write(data)
        return data

    def rewind(self) -> None:
        if self._kept is None:
            self._stream.seek(self._start or 0)
        else:
            self._kept.seek(0)
            self._is_replayed = True


def read_lines(stream: LineSource) -> Iterator[Line]:
    """Lines ended by `\\n` only, blank ones left out, a BOM at the start and CRs at the ends removed.

    Reads no more than one line ahead; of a line that is too long it keeps a hash.
    """
    index = 0
    limit = MAX_LINE_BYTES + 2  # room for a line end of two bytes
    while data := stream.readline(limit):
        text = data.rstrip(b"\r\n")
        if len(text) > MAX_LINE_BYTES or (len(data) == limit and not data.endswith(b"\n")):
            yield Line(index, None, _skip(stream, data))
        else:
            if index == 0:
                text = text.removeprefix(b"\xef\xbb\xbf")
            if text.strip():
                yield Line(index, text)
        index += 1


def _skip(stream: LineSource, data: bytes) -> bytes:
    """Reads on to the end of a line that begins with `data`, and returns its hash."""
    digest = hashlib.blake2b(digest_size=16)
    while not data.endswith(b"\n") and (more := stream.readline(MAX_LINE_BYTES)):
        if len(more) > 2:
            digest.update(data)
            data = more
        else:  # perhaps no more than the line's end, of which the CR has come already
            data += more
    digest.update(data.rstrip(b"\r\n"))
    return digest.digest()
