"""Writers: finished rows are written at once, and end up in order."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from cbatch.base.errors import ConfigError
from cbatch.batch.row import Row
from cbatch.batch.writer import FileWriter, StreamWriter


def fresh(path: Path, *, input_order: bool = True) -> FileWriter:
    output = FileWriter(path, input_order=input_order)
    output.start()
    return output


def test_a_file_is_a_journal_first_and_ordered_at_the_end(tmp_path: Path) -> None:
    """Guards rows against a crash before the end, and the file's permissions through the final replace."""
    path = tmp_path / "out.jsonl"
    path.touch(0o640)
    with fresh(path) as output:
        for position, index in enumerate((5, 0, 3)):
            assert output.write([Row(position, index, b"row %d\n" % index)]) == [position]
        assert path.read_bytes() == b"row 5\nrow 0\nrow 3\n"
        output.finish(lambda: None)
    assert path.read_bytes() == b"row 0\nrow 3\nrow 5\n" and path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_a_symlink_stays_one(tmp_path: Path) -> None:
    """Guards against the final replace turning a link into a file and leaving its target stale."""
    target, link = tmp_path / "target", tmp_path / "link"
    target.touch()
    link.symlink_to(target)
    with fresh(link) as output:
        output.write([Row(0, 1, b"b\n"), Row(1, 0, b"a\n")])
        output.finish(lambda: None)
    assert link.is_symlink() and target.read_bytes() == b"a\nb\n"


def test_two_runs_do_not_share_a_file(tmp_path: Path) -> None:
    """Guards the lock, also for another name of the file and after the final replace."""
    path, link = tmp_path / "out.jsonl", tmp_path / "link"
    with fresh(path) as output:
        os.link(path, link)
        for name in (path, link):
            with pytest.raises(ConfigError, match="Another run"):
                FileWriter(name, input_order=True)
        output.write([Row(0, 1, b"b\n"), Row(1, 0, b"a\n")])
        output.finish(lambda: None)
    FileWriter(path, input_order=True).__exit__()


def test_a_file_that_was_replaced_before_it_was_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the moment between opening a file and locking it, in which another run may replace it."""
    path = tmp_path / "out.jsonl"
    path.touch()
    flock = fcntl.flock

    def late(fd: int, operation: int) -> None:
        path.unlink()
        path.write_text("ordered")
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(ConfigError, match="Another run"):
        FileWriter(path, input_order=True)
    assert path.read_text() == "ordered"


def test_signals_in_the_middle_of_a_write_lose_nothing() -> None:
    """Guards rows against EINTR: signals come every millisecond while a full pipe takes a few bytes at a time."""
    reader, writer = os.pipe()
    rows = [Row(position, position, b"%d " % position * 50_000 + b"\n") for position in range(4)]
    taken, signals = bytearray(), []

    def read() -> None:
        while data := os.read(reader, 20_000):
            taken.extend(data)
            time.sleep(0.001)

    before = signal.signal(signal.SIGALRM, lambda signum, _: signals.append(signum))
    thread = threading.Thread(target=read)
    thread.start()
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        with os.fdopen(writer, "wb", buffering=0) as stream:
            StreamWriter(stream, input_order=True).write(rows)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    thread.join()
    os.close(reader)
    assert bytes(taken) == b"".join(row.data for row in rows) and len(signals) > 5
