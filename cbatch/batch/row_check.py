"""The check that each row of output ends with, so that a byte of it that has changed since is noticed."""

from __future__ import annotations

from zlib import crc32

CHECK = "check"
"""Name of the field: the last one of a row."""

_BEGINNING = b', "check": "'
_SIZE = len(_BEGINNING) + len(b'01234567"}\n')


def with_check(row: bytes) -> bytes:
    """A row as it is written: with the CRC-32 of all bytes before the check, as eight hexadecimal digits.

    row: a JSON object with fields, as a line
    """
    content = row.rstrip()[:-1]
    return content + _end(content)


def fits_check(line: bytes) -> bool | None:
    """Whether a line, with its line end, has the bytes that its check was made of. None if it ends with no check."""
    end = line[-_SIZE:]
    if not end.startswith(_BEGINNING):
        return None
    return end == _end(memoryview(line)[:-_SIZE])


def _end(content: bytes | memoryview) -> bytes:
    return b'%s%08x"}\n' % (_BEGINNING, crc32(content))
