"""The file of unfinished answers: what it gives back, whatever kills, damage and full disks leave of it."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest

from cbatch.base.errors import ConfigError
from cbatch.base.outputs import KnownOutput, TokenLogprobs
from cbatch.batch import token_journal
from cbatch.batch.token_journal import (
    TokenJournal,
    TokenRecord,
    format_record,
    is_token_journal,
    parse_record,
    remove_token_journal,
)

SCORED = TokenRecord(
    7,
    "k" * 32,
    "r" * 32,
    1,
    4,
    KnownOutput([5, 6], [TokenLogprobs(token, -0.1, [(token, -0.1), (8, -3.0000002)]) for token in (5, 6)]),
)


def record(index: int, start: int, *tokens: int, output: int = 0, request: str = "first") -> TokenRecord:
    return TokenRecord(index, f"key of {index}", request, output, start, KnownOutput(tokens))


def opened(path: Path, *, model: str = "model", resume: bool = True, writes: bool = True) -> TokenJournal:
    return TokenJournal(path, model, resume=resume, writes=writes)


def tokens(journal: TokenJournal) -> dict[tuple[int, str, int], list[int]]:
    return {
        (index, request, number): list(record.tokens.token_ids)
        for index, row in journal.unfinished.items()
        for (request, number), record in row.items()
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A journal of two rows, one of them with two outputs and two requests, in several records."""
    journal = opened(tmp_path / "out.tokens", resume=False)
    journal.append([record(3, 0, 1, 2), record(5, 0, 9), record(3, 0, 4, output=1)])
    journal.append([record(3, 2, 3), record(3, 1, 5, 6, output=1), record(3, 0, 8, request="second")])
    journal.close()
    return tmp_path / "out.tokens"


WHOLE = {(3, "first", 0): [1, 2, 3], (3, "first", 1): [4, 5, 6], (3, "second", 0): [8], (5, "first", 0): [9]}


def test_a_record_survives_being_written() -> None:
    """Guards log-probabilities, to the last bit, and their places."""
    assert parse_record(format_record(SCORED)) == SCORED


@pytest.mark.parametrize("place", range(0, len(format_record(SCORED)) - 1, 9))
def test_a_damaged_record_is_none(place: int) -> None:
    """Guards rows against tokens that a disk has changed: one wrong bit is noticed, wherever it is."""
    line = bytearray(format_record(SCORED))
    line[place] ^= 1
    with pytest.raises(ValueError, match="checksum"):
        parse_record(bytes(line))


def test_what_was_appended_comes_back(path: Path) -> None:
    """Guards tries, outputs and pieces against being taken for each other; twice, since the file is then rewritten."""
    for _ in range(2):
        journal = opened(path)
        assert tokens(journal) == WHOLE and journal.unfinished[3]["first", 0].row_key == "key of 3"
        journal.close()
    journal = opened(path)
    journal.append([record(5, 1, 10)])
    journal.close()
    assert tokens(opened(path, writes=False)) == WHOLE | {(5, "first", 0): [9, 10]}


def test_any_torn_file_is_a_beginning(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a kill or a power loss in the middle of a write: each output has a beginning of its tokens."""
    data = path.read_bytes()
    for length in range(data.index(b"\n") + 1, len(data), 11):
        path.write_bytes(data[:length])
        journal = opened(path)
        assert all(WHOLE[name][: len(known)] == known for name, known in tokens(journal).items())
        journal.append([record(6, 0, 1)])
        journal.close()
        assert (6, "first", 0) in tokens(opened(path, writes=False)), "what follows a torn line can be read"
    assert not caplog.records, "a torn end is no damage"


def test_damage_costs_what_it_hits_and_is_said(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Guards the other rows, and later tokens of the same output, which would come after a gap."""
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b"[1,2]", b"[1,7]")
    path.write_bytes(b"".join([*lines[:3], b"\xff\n", *lines[3:]]))
    assert tokens(opened(path)) == {name: known for name, known in WHOLE.items() if name != (3, "first", 0)}
    assert "3 records are damaged" in caplog.text
    caplog.clear()
    opened(path)
    assert not caplog.records, "it is said once"


def test_another_model_is_not_gone_on_with(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against half of an answer by each of two models."""
    journal = opened(path, model="other")
    assert tokens(journal) == {} and "of another model" in caplog.text and not path.exists()
    journal.append([record(0, 0, 1)])
    journal.close()
    assert tokens(opened(path, model="other")) == {(0, "first", 0): [1]}


def test_a_damaged_beginning_is_told_from_a_file_of_others(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Guards a run against being refused because of a few bytes: the records tell whose file it is."""
    path.write_bytes(b"#" + path.read_bytes()[9:])
    assert is_token_journal(path)
    assert tokens(opened(path)) == {} and "is damaged at its beginning" in caplog.text and not path.exists()


@pytest.mark.parametrize("content", [b"", b"mine", b"cbatch"])
def test_files_of_others_stay(tmp_path: Path, content: bytes) -> None:
    """Guards a file that happens to have this name: it is never removed nor written to."""
    path = tmp_path / "out.tokens"
    path.write_bytes(content)
    for resume in (False, True):
        with pytest.raises(ConfigError, match="something else"):
            opened(path, resume=resume)
    assert tokens(opened(path, writes=False)) == {} and not is_token_journal(path)
    remove_token_journal(path)
    assert path.read_bytes() == content


def test_finished_rows_leave_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the disk: the file of a long run stays about as large as what is unfinished, and loses none of that."""
    monkeypatch.setattr(token_journal, "SLACK_BYTES", 1000)
    path = tmp_path / "out.tokens"
    journal, largest = opened(path, resume=False), 0
    for index in range(200):
        journal.append([record(index, 0, *range(20)), record(1000, index, index)])
        journal.drop(index)
        largest = max(largest, path.stat().st_size)
    journal.close()
    assert tokens(opened(path, writes=False))[1000, "first", 0] == list(range(200))
    alone = opened(tmp_path / "alone.tokens", resume=False)
    alone.append([record(1000, index, index) for index in range(200)])
    assert largest < 2 * (tmp_path / "alone.tokens").stat().st_size + 2000
    assert not list(tmp_path.glob(".*"))


def test_a_full_disk_ends_no_run(path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Guards finished rows: tokens are left out with one warning, and what was written before can be read."""
    journal, write = opened(path), os.write

    def full(fd: int, data: memoryview) -> int:
        if len(data) <= 30:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data[:30])

    monkeypatch.setattr(os, "write", full)
    with caplog.at_level(logging.WARNING):
        for index in (6, 7):
            journal.append([record(index, 0, 1)])
            journal.drop(index)
    monkeypatch.undo()
    assert [entry.getMessage() for entry in caplog.records] == [
        f"Tokens are not written to {path} any more: No space left on device."
    ]
    assert tokens(opened(path, writes=False)) == WHOLE
