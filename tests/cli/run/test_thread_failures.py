"""A run in which a thread breaks ends with a sentence, and `--resume` makes of it what it would have been."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from cbatch.batch.driver import Window
from cbatch.batch.journal import Journal
from cbatch.batch.line_processor import LineProcessor
from cbatch.batch.writer import FileWriter
from cbatch.cli.run.stats import RunStats
from cbatch.engine.stepping_engine import SteppingEngine
from tests.support.command import Command
from tests.support.faults import TIMEOUT_S, Fault, Panic

# A window of a third of the rows: they are written in at least three parts.
ROWS = [{"id": n, "prompt": f"row {n}", "temperature": 1.0, "max_tokens": 1 + n % 5} for n in range(24)]

PLACES: list[tuple[type, str, int]] = [
    (FileWriter, "write", 3),
    (FileWriter, "_append", 3),
    (FileWriter, "_sync", 1),
    (FileWriter, "_complete", 1),
    (Journal, "row", 5),
    (RunStats, "count", 3),
    (Window, "release", 3),
    (LineProcessor, "process", 10),
    (SteppingEngine, "step", 6),
]


def code_of(command: Command, *options: str) -> int:
    """The exit code. One that hangs fails; signal handlers of the command need the main thread."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it hangs"))
    signal.alarm(TIMEOUT_S)
    try:
        return command("-q", "--max-seqs", "3", "--window", "8", *options)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def whole(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    command = Command(tmp_path_factory.mktemp("whole"), model_folder, ROWS)
    assert code_of(command) == 0
    return command.data


@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place[0].__name__}.{place[1]}")
def test_what_a_thread_breaks_is_resumed(
    place: tuple[type, str, int], command: Command, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards finished rows against a panic in the writer, the reader, the engine's thread, and what they call."""
    owner, name, at = place
    command.write(ROWS)
    with monkeypatch.context() as patch:
        Fault(patch, owner, name, Panic("boom"), at=at)
        code = code_of(command)
    said = command.said()
    assert code in (1, 3) and "Traceback" not in said
    assert "boom" in said if code == 3 else len(command.lines()) == len(ROWS)
    assert code_of(command, "--resume", "--retry-errors") == 0 and command.data == whole
