"""A run in which a thread breaks ends with a sentence, and `--resume` makes of it what it would have been."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from cbatch.batch.driver import RowStream
from cbatch.batch.engine_driver import EngineStream
from cbatch.batch.journal import Journal
from cbatch.batch.line_processor import LineProcessor
from cbatch.batch.writer import FileWriter
from cbatch.cli.main import run_command
from cbatch.cli.run.stats import RunStats
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.engine.thread import EngineThread
from cbatch.requests.output_processor import OutputProcessor
from tests.support.faults import TIMEOUT_S, Fault, Panic
from tests.support.rows import write_rows

ROWS = [{"id": n, "prompt": f"row {n}", "temperature": 1.0, "max_tokens": 1 + n % 5} for n in range(24)]

PLACES: list[tuple[type, str, int]] = [
    (FileWriter, "write", 3),
    (FileWriter, "_append", 3),
    (FileWriter, "_sync", 1),
    (FileWriter, "_complete", 1),
    (Journal, "row", 5),
    (RunStats, "count", 5),
    (RowStream, "release", 3),
    (EngineStream, "_submit", 10),
    (LineProcessor, "process", 10),
    (SteppingEngine, "step", 6),
    (EngineThread, "_deliver", 8),
    (OutputProcessor, "completion", 5),
]


class BatchRun:
    """`cbatch run` in this process: its signal handlers need the main thread. One that hangs fails."""

    def __init__(self, model: Path, folder: Path) -> None:
        source, self.output = write_rows(folder / "in.jsonl", ROWS), folder / "out.jsonl"
        self._command = ["run", str(source), "-o", str(self.output), "-m", str(model), "--dtype", "float32", "-q"]

    def code(self, *options: str) -> int:
        before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it hangs"))
        signal.alarm(TIMEOUT_S)
        try:
            return run_command([*self._command, "--max-seqs", "3", *options])
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def expected(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    run = BatchRun(model_folder, tmp_path_factory.mktemp("whole"))
    assert run.code() == 0
    return run.output.read_bytes()


@pytest.mark.parametrize(("owner", "name", "at"), PLACES, ids=lambda place: getattr(place, "__name__", str(place)))
def test_what_a_thread_breaks_is_resumed(
    owner: type,
    name: str,
    at: int,
    model_folder: Path,
    expected: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Guards finished rows against a panic in the writer, the reader, the engine's thread, and what they call."""
    run = BatchRun(model_folder, tmp_path)
    with monkeypatch.context() as patch:
        Fault(patch, owner, name, Panic("boom"), at=at)
        code = run.code()
    said = capsys.readouterr().err
    assert code in (1, 3) and "Traceback" not in said
    assert code == 1 or "boom" in said
    assert run.code("--resume", "--retry-errors") == 0
    assert run.output.read_bytes() == expected
