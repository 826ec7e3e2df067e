"""Reading lines: physical lines, in bounded memory, and a second time."""

from __future__ import annotations

import io

import pytest

from cbatch.base.errors import RequestError
from cbatch.batch import lines
from cbatch.batch.jsonl import parse_line
from cbatch.batch.lines import Line, LineSpool, read_lines


def test_lines_are_physical_and_blank_ones_skipped() -> None:
    """Guards the index: BOM, CRLF, blank lines and a missing last newline change no number."""
    data = b'\xef\xbb\xbf{"a":1}\r\n\n  \r\n{"b":"\xe2\x80\xa8"}\n\nlast'
    assert [(line.index, line.data) for line in read_lines(io.BytesIO(data))] == [
        (0, b'{"a":1}'),
        (3, b'{"b":"\xe2\x80\xa8"}'),
        (5, b"last"),
    ]


def test_a_line_that_is_too_long_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards memory against one endless line, and the lines after it."""
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 10)
    found = list(read_lines(io.BytesIO(b"x" * 57 + b'\n{"a": 1}\n' + b"y" * 30)))
    assert [line.data for line in found] == [None, b'{"a": 1}', None]
    assert found[0].digest != found[2].digest
    error = parse_line(found[0]).error
    assert error is not None and error.code == "line_too_long"
    assert [line.data for line in read_lines(io.BytesIO(b"0123456789\r\nabc\n"))] == [b"0123456789", b"abc"]


def test_the_hash_of_a_long_line_is_of_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the key of a line that is too long: its line end, which may still be missing, changes nothing."""
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 10)
    for text in (b"x" * 29, b"y" * 30, b"z" * 31, b"w" * 32):
        digests = {next(read_lines(io.BytesIO(text + end))).digest for end in (b"", b"\n", b"\r\n")}
        assert len(digests) == 1
    assert len({next(read_lines(io.BytesIO(b"x" * n))).digest for n in range(13, 50)}) == 37


def test_lines_without_a_stream_can_be_taken_twice() -> None:
    """Guards resuming a source that only comes once: all that a line has comes again, then the rest."""
    lines = [
        Line(0, b"\xff{"),
        Line(1, None, b"digest"),
        Line(2, b"{}", error=RequestError("code", "why")),
        Line(3, b""),
    ]
    spool = LineSpool(iter(lines))
    assert [next(spool).index for _ in range(3)] == [0, 1, 2]
    spool.rewind()
    for line, again in zip(lines, spool, strict=True):
        assert (again.index, again.data, again.source) == (line.index, line.data, line.source)
        assert repr(again.error) == repr(line.error)
    assert len({line.source for line in [*lines, Line(2, b"{}"), Line(2, b"{}", error=RequestError("code", "x"))]}) == 6
