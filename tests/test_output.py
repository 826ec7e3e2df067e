"""Finished rows reach the file at once and end up in order."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from cbatch.cli.output import FileOutput, StreamOutput
from cbatch.engine import ConfigError


def test_a_stream_in_input_order_holds_back_only_what_must_wait() -> None:
    """Guards the order on stdout, and the count that keeps the window moving."""
    stream = io.BytesIO()
    output = StreamOutput(stream, input_order=True)
    assert [output.write(place, b"%d\n" % place) for place in (1, 0, 3, 2)] == [0, 2, 0, 2]
    assert stream.getvalue() == b"0\n1\n2\n3\n"


def test_a_file_is_a_journal_first_and_ordered_at_the_end(tmp_path: Path) -> None:
    """Guards rows against a crash before the end, and the file's permissions through the final replace."""
    path = tmp_path / "out.jsonl"
    path.touch(0o640)
    output = FileOutput(path, input_order=True)
    for place in (2, 0, 1):
        assert output.write(place, b"row %d\n" % place) == 1
    assert path.read_bytes() == b"row 2\nrow 0\nrow 1\n"
    output.close()
    assert path.read_bytes() == b"row 0\nrow 1\nrow 2\n" and path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_a_symlink_stays_one(tmp_path: Path) -> None:
    """Guards against the final replace turning a link into a file and leaving its target stale."""
    target, link = tmp_path / "target", tmp_path / "link"
    target.touch()
    link.symlink_to(target)
    output = FileOutput(link, input_order=True)
    output.write(1, b"b\n")
    output.write(0, b"a\n")
    output.close()
    assert link.is_symlink() and target.read_bytes() == b"a\nb\n"


def test_content_is_not_overwritten_unless_told(tmp_path: Path) -> None:
    """Guards last night's results."""
    path = tmp_path / "out.jsonl"
    FileOutput.check(path, overwrite=False)
    path.write_text("x")
    with pytest.raises(ConfigError, match="not empty"):
        FileOutput.check(path, overwrite=False)
    FileOutput.check(path, overwrite=True)
    assert path.read_text() == "x"


class Dribble(io.BytesIO):
    """A raw stream that takes three bytes at a time."""

    def write(self, data: object) -> int:
        return super().write(bytes(data)[:3])  # type: ignore[call-overload]


def test_short_writes_lose_nothing() -> None:
    """Guards against a pipe that takes only part of a row."""
    stream = Dribble()
    StreamOutput(stream, input_order=False).write(0, b"a longer row\n")
    assert stream.getvalue() == b"a longer row\n"
