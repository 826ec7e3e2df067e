"""What a power loss can leave of an output file: at every moment, what was synced is still there."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from cbatch.batch import writer as writer_module
from cbatch.batch.journal import Journal
from cbatch.batch.lines import Line, read_lines
from cbatch.batch.resume import ResumePlan, plan_resume
from cbatch.batch.row import Row, format_result
from cbatch.batch.writer import FileWriter
from cbatch.requests.row_keys import KEY_LENGTH

INPUT = [f"line {number}" for number in range(6)]
FINISHED = [3, 0, 1, 5, 4, 2]
"""The order in which the rows are finished."""


def keyed(lines: Iterable[Line]) -> Iterator[tuple[Line, str]]:
    return ((line, make_key(line)) for line in lines)


def make_key(line: Line) -> str:
    return f"{line.index:0{KEY_LENGTH}x}"


def row_of(index: int) -> bytes:
    return format_result({"index": index, "text": f"answer {index}", "key": make_key(Line(index, b""))})


EXPECTED = b"".join(row_of(index) for index in range(len(INPUT)))


def lines() -> Iterator[Line]:
    return read_lines(io.BytesIO("\n".join(INPUT).encode()))


@dataclass(frozen=True)
class Disk:
    """What is on a disk for certain, and what was only written.

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
                yield content[:position] + data[:length]
                yield (
                    content[:position] + data[:length] + bytes(len(data) - length)
                )  # the size arrived, the data did not
            content = content[:position] + data
            yield content


class Recorder:
    """Stands in for `os` in the writer's module, and records every state of the disk."""

    def __init__(self) -> None:
        self.states = [Disk()]
        self._files: dict[int, Path] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _note(self, **changes: Any) -> None:
        self.states.append(replace(self.states[-1], **changes))

    def write(self, fd: int, data: bytes) -> int:
        now, position = self.states[-1], os.fstat(fd).st_size
        self._note(pending=(*now.pending, (position, bytes(data))))
        return os.write(fd, data)

    def ftruncate(self, fd: int, size: int) -> None:
        now = self.states[-1]
        self._note(pending=(*now.pending, (size, b"")))
        os.ftruncate(fd, size)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)
        path = Path(f"/proc/self/fd/{fd}").readlink()
        if path.is_dir():
            self._note(is_renamed_for_sure=self.states[-1].is_renamed)
        elif path.name.endswith(".cbatch-sorting"):
            self._note(ordered=path.read_bytes())
        else:
            self._note(synced=path.read_bytes(), pending=())

    def renamed(self) -> None:
        self._note(is_renamed=True)


def watch(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.replace

    def renaming(self: Path, target: Path) -> Path:
        new = rename(self, target)
        recorder.renamed()
        return new

    monkeypatch.setattr(writer_module, "os", recorder)
    monkeypatch.setattr(Path, "replace", renaming)


def run(path: Path, until: int = len(FINISHED)) -> int:
    """What `cbatch run --resume` does, with rows finished in the order of FINISHED. Returns how many it kept."""
    with FileWriter(path, input_order=True) as output:
        journal, kept = Journal(), ResumePlan()
        if output.has_content:
            journal = output.journal()
            kept = plan_resume(journal, lines(), keyed)
            assert kept.fits
        output.start(journal)
        for position, index in enumerate(FINISHED[:until]):
            if index not in kept:
                output.write([Row(position, index, row_of(index))])
        if until == len(FINISHED):
            output.finish(lambda: None)
    return kept.rows


def test_synced_rows_survive_a_power_loss_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards synced rows: they survive in every state that the disk may be in, and --resume finishes."""
    recorder = Recorder()
    path = tmp_path / "out.jsonl"
    watch(recorder, monkeypatch)
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


def test_rows_are_synced_at_least_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the contract's second: a row that is written is on the disk half a second later."""
    now = [100.0]
    recorder = Recorder()
    watch(recorder, monkeypatch)
    monkeypatch.setattr(writer_module.time, "monotonic", lambda: now[0])
    with FileWriter(tmp_path / "out.jsonl", input_order=True) as output:
        output.start()
        output.write([Row(0, 0, row_of(0))])
        assert recorder.states[-1].synced == b""
        now[0] += 0.4
        output.write([Row(1, 1, row_of(1))])
        assert recorder.states[-1].synced == b""
        now[0] += 0.2
        output.write([])
        assert recorder.states[-1].synced == row_of(0) + row_of(1)


def test_rows_of_the_test_are_rows_of_ours() -> None:
    """Guards this file's own rows: the journal accepts them, and a missing one would be noticed."""
    journal = Journal.read(io.BytesIO(row_of(3) + row_of(1)), "rows")
    assert list(journal.indices) == [3, 1] and journal.key(1) == make_key(Line(1, b""))
