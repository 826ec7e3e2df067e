"""An output file after a power loss: at every moment, what was synced is still there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from cbatch.batch import writer as writer_module
from cbatch.batch.journal import Journal
from cbatch.batch.lines import Line
from cbatch.batch.resume import ResumePlan, plan_resume
from cbatch.batch.row import Row, format_result
from cbatch.batch.writer import FileWriter
from cbatch.requests.row_keys import KEY_LENGTH

FINISHED = [3, 0, 1, 5, 4, 2]
"""The order in which the rows are finished."""


def make_key(index: int) -> str:
    return f"{index:0{KEY_LENGTH}x}"


ROWS = [format_result({"index": n, "text": f"answer {n}", "key": make_key(n)}) for n in range(len(FINISHED))]
EXPECTED = b"".join(ROWS)


def run(path: Path, until: int = len(FINISHED)) -> int:
    """Does as `cbatch run --resume`, with rows finished in the order of FINISHED. Returns how many it kept."""
    lines = (Line(index, b"") for index in range(len(FINISHED)))
    with FileWriter(path, input_order=True) as output:
        journal, kept = Journal(), ResumePlan()
        if output.has_content:
            journal = output.journal()
            kept = plan_resume(journal, lines, lambda some: ((line, make_key(line.index)) for line in some))
            assert kept.fits
        output.start(journal)
        for position, index in enumerate(FINISHED[:until]):
            if index not in kept:
                output.write([Row(position, index, ROWS[index])])
        if until == len(FINISHED):
            output.finish(lambda: None)
    return kept.rows


@dataclass(frozen=True)
class Disk:
    """The bytes on a disk for certain, and those that were only written.

    synced:  content of the output file at its last sync
    pending: what was appended to it or cut off since, a (place, data) each
    sorted:  content of the ordered file at its last sync; None before that
    renamed: whether it was put in place, and whether the folder was synced after that
    """

    synced: bytes = b""
    pending: tuple[tuple[int, bytes], ...] = ()
    ordered: bytes | None = None
    is_renamed: bool = False
    is_renamed_for_sure: bool = False

    def after_power_loss(self) -> Iterator[bytes]:
        """Every content that the output file may have then."""
        if self.is_renamed:
            assert self.ordered is not None, "a file was put in place before its content was synced"
            yield self.ordered
        if self.is_renamed_for_sure:
            return
        content = self.synced
        yield content
        for position, data in self.pending:
            for length in range(1, len(data), 7):
                arrived = content[:position] + data[:length]
                yield arrived
                yield arrived + bytes(len(data) - length)  # the size arrived, the data did not
            content = content[:position] + data
            yield content


class Recorder:
    """Stands in for `os` in the writer's module, and records every state of the disk."""

    def __init__(self) -> None:
        self.states = [Disk()]
        self._files: dict[int, Path] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def note(self, **changes: Any) -> None:
        self.states.append(replace(self.states[-1], **changes))

    def write(self, fd: int, data: bytes) -> int:
        now, position = self.states[-1], os.fstat(fd).st_size
        self.note(pending=(*now.pending, (position, bytes(data))))
        return os.write(fd, data)

    def ftruncate(self, fd: int, size: int) -> None:
        now = self.states[-1]
        self.note(pending=(*now.pending, (size, b"")))
        os.ftruncate(fd, size)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)
        path = Path(f"/proc/self/fd/{fd}").readlink()
        if path.is_dir():
            self.note(is_renamed_for_sure=self.states[-1].is_renamed)
        elif path.name.endswith(".cbatch-sorting"):
            self.note(ordered=path.read_bytes())
        else:
            self.note(synced=path.read_bytes(), pending=())


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made, rename = Recorder(), Path.replace

    def renaming(self: Path, target: Path) -> Path:
        new = rename(self, target)
        made.note(is_renamed=True)
        return new

    monkeypatch.setattr(writer_module, "os", made)
    monkeypatch.setattr(Path, "replace", renaming)
    return made


def test_synced_rows_survive_a_power_loss_at_any_moment(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards synced rows: they survive in every state that the disk may be in, and --resume finishes."""
    path = tmp_path / "out.jsonl"
    monkeypatch.setattr(writer_module, "SYNC_SECONDS", 0)
    run(path, until=2)
    monkeypatch.setattr(writer_module, "SYNC_SECONDS", 1000)
    run(path)
    monkeypatch.undo()
    states = recorder.states
    assert path.read_bytes() == EXPECTED and states[-1].is_renamed_for_sure
    contents = {(content, disk.synced.count(b"\n")) for disk in states for content in disk.after_power_loss()}
    assert len(contents) > 100
    for number, (content, synced) in enumerate(sorted(contents)):
        left = tmp_path / f"{number}.jsonl"
        left.write_bytes(content)
        assert run(left) >= synced
        assert left.read_bytes() == EXPECTED
        left.unlink()


def test_rows_are_synced_at_least_once_a_second(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the contract's second: a row that is written is on the disk half a second later."""
    now = [100.0]
    monkeypatch.setattr(writer_module.time, "monotonic", lambda: now[0])
    with FileWriter(tmp_path / "out.jsonl", input_order=True) as output:
        output.start()
        output.write([Row(0, 0, ROWS[0])])
        assert recorder.states[-1].synced == b""
        now[0] += 0.4
        output.write([Row(1, 1, ROWS[1])])
        assert recorder.states[-1].synced == b""
        now[0] += 0.2
        output.write([])
        assert recorder.states[-1].synced == ROWS[0] + ROWS[1]
