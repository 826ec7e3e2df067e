"""`cbatch run` under kills, signals, full disks, slow readers and slow writers: no finished row is lost."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.fork_server import ForkServer, KillPoint, Run
from tests.support.kill_runs import Aim, KillTest
from tests.support.rows import read_rows, write_rows

pytestmark = pytest.mark.slow


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.005)


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


KILLED_BATCHES: list[list[Aim]] = [
    [KillPoint("write", 2), KillPoint("pread", 20), KillPoint("replace")],
    [KillPoint("write"), KillPoint("write"), "any moment"],
    [KillPoint("write", 3), KillPoint("pread"), KillPoint("after replace")],
    ["any moment"],
    [KillPoint("write"), "any moment"],
]
KILLS_WITH_TOKENS: list[list[Aim]] = [
    [KillPoint("rename"), KillPoint("write"), KillPoint("rename"), KillPoint("write", 2), "any moment"],
    [KillPoint("rename"), KillPoint("pread"), KillPoint("replace")],
]
JOURNAL = ("--journal-tokens", "--journal-interval", "0.01")


@pytest.mark.parametrize("place", [0, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(1, 5))])
def test_a_dozen_kills(runs: ForkServer, model_folder: Path, tmp_path: Path, place: int) -> None:
    """Guards every finished row against SIGKILL: in the middle of a write, of the final ordering, and in between."""
    aims = KILLED_BATCHES[place]
    test = KillTest(runs, tmp_path, model_folder, seed=1)
    test.run_batch(aims)
    points = [aim.name for aim in aims if isinstance(aim, KillPoint)]
    assert test.counts.torn >= points.count("write")
    assert test.counts.in_ordering >= len(points) - points.count("write")


@pytest.mark.parametrize("batches", [1, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_kills_with_tries_a_cache_and_tokens(
    runs: ForkServer, model_folder: Path, tmp_path: Path, batches: int
) -> None:
    """Guards tries, the cache and unfinished answers: a resumed run gives the bytes of an undisturbed one."""
    options = ["--validate", "regex=(?s).*[aeiou].*", "--tries", "3", "--cache", tmp_path / "cache", *JOURNAL]
    test = KillTest(runs, tmp_path, model_folder, seed=2, options=options)
    counts = [row["validation"]["tries"] for row in read_rows(tmp_path / "out.jsonl") if "validation" in row]
    assert {1, 2, 3} <= set(counts)
    for aims in [*KILLS_WITH_TOKENS, KILLED_BATCHES[2]][:batches]:
        test.run_batch(aims)
    assert test.counts.torn >= batches and test.counts.unfinished >= 2 + batches


LONG = [{"id": n, "prompt": f"row {n}", "temperature": 1.0, "max_tokens": 3 if n < 4 else 40} for n in range(40)]


def test_a_signal_ends_a_run_gracefully(runs: ForkServer, model_folder: Path, tmp_path: Path) -> None:
    """Guards a batch system's SIGTERM: whole rows, no reordering, 143, and --resume finishes."""
    source, out, stats = write_rows(tmp_path / "in.jsonl", LONG), tmp_path / "out.jsonl", tmp_path / "stats"
    command = ["run", source, "-o", out, "-m", model_folder, "--max-seqs", "2", "--dtype", "float32"]
    run = runs.start(*command, "--stats", stats, stderr=str(tmp_path / "stderr"))
    until(lambda: count_lines(out) >= 5)
    run.send(signal.SIGTERM)
    assert run.code() == 143
    rows = [json.loads(line) for line in out.read_bytes().splitlines()]
    assert 5 <= len(rows) < 40 and not any("error" in row for row in rows)
    assert json.loads(stats.read_text())["rows"] == len(rows)
    message = (tmp_path / "stderr").read_text()
    assert "--resume" in message and "Traceback" not in message
    assert runs.start(*command, "--resume", "--max-seqs", "7").code() == 0
    whole = tmp_path / "whole.jsonl"
    assert runs.start(*command[:2], "-o", whole, *command[4:]).code() == 0
    assert out.read_bytes() == whole.read_bytes()


def test_signals_while_the_model_loads(runs: ForkServer, model_folder: Path, tmp_path: Path) -> None:
    """Guards the exit code, and that no empty file is left, before the first row."""
    source, out = write_rows(tmp_path / "in.jsonl", LONG), tmp_path / "out.jsonl"
    run = runs.start("run", source, "-o", out, "-m", model_folder)
    until(out.exists)
    time.sleep(0.05)
    run.send(signal.SIGTERM)
    assert run.code() == 143 and not out.exists()


@pytest.fixture
def fifo(tmp_path: Path) -> Callable[[str], str]:
    def make(name: str) -> str:
        os.mkfifo(tmp_path / name)
        return str(tmp_path / name)

    return make


@pytest.fixture
def stalled(
    runs: ForkServer, model_folder: Path, tmp_path: Path, fifo: Callable[[str], str]
) -> Iterator[tuple[Run, int, Path]]:
    """A run that hangs because nobody reads its output, the reading end of its pipe, and its input."""
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "a", "max_tokens": 2, "column": "x" * 1000}] * 10_000)
    pipe = fifo("stdout")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    run = runs.start("run", source, "-q", "-m", model_folder, stdout=pipe)
    until(lambda: bool(_peek(reader)))
    until(lambda: not _grows(run))
    yield run, reader, source
    with suppress(OSError):  # a test may have closed it
        os.close(reader)


def _peek(fd: int) -> bytes:
    try:
        return os.read(fd, 1)
    except BlockingIOError:
        return b""


def _grows(run: Run) -> bool:
    before = run.rss_mib()
    time.sleep(0.3)
    return run.rss_mib() - before > 0.5


def test_a_second_signal_ends_at_once(stalled: tuple[Run, int, Path]) -> None:
    """Guards against a run that cannot be stopped because nobody reads its output."""
    run, _, _ = stalled
    started = time.monotonic()
    run.send(signal.SIGINT)
    time.sleep(0.1)
    assert not run.is_over(), "the first signal did not wait for the row that is being written"
    run.send(signal.SIGINT)
    assert run.code() == 130 and time.monotonic() - started < 1.5


def test_one_signal_suffices_when_nobody_reads(stalled: tuple[Run, int, Path]) -> None:
    """Guards `cbatch run | less`: one SIGTERM ends a run that hangs in its output, after a few seconds."""
    run, _, _ = stalled
    run.send(signal.SIGTERM)
    assert run.code() == 143


def test_a_slow_reader_holds_the_run_back(stalled: tuple[Run, int, Path]) -> None:
    """Guards memory: with a slow reader of the output, only a window of rows is read; 141 when the reader goes."""
    run, reader, source = stalled
    before, taken = run.rss_mib(), 0
    for _ in range(20):
        taken += len(os.read(reader, 100))
        time.sleep(0.1)
    assert taken == 2000 and run.rss_mib() - before < 10
    assert _position(run, source) < source.stat().st_size / 10
    os.close(reader)
    assert run.code() == 141


def test_lines_of_a_slow_writer_are_answered_one_by_one(
    runs: ForkServer, model_folder: Path, fifo: Callable[[str], str]
) -> None:
    """Guards `tail -f questions | cbatch run`: no line waits for the next one."""
    stdin, stdout = fifo("stdin"), fifo("stdout")
    started: list[Run] = []
    command = ["run", "-q", "-m", model_folder, "--max-tokens", "3"]
    starter = threading.Thread(target=lambda: started.append(runs.start(*command, stdin=stdin, stdout=stdout)))
    starter.start()
    with open(stdin, "wb", buffering=0) as writer, open(stdout, "rb", buffering=0) as answers:  # noqa: PTH123
        for number in range(3):
            writer.write(b'{"prompt": "a"}\n')
            assert json.loads(answers.readline())["index"] == number
    starter.join()
    assert started[0].code() == 0


def _position(run: Run, path: Path) -> int:
    """How far a process has read a file."""
    for fd in Path(f"/proc/{run.pid}/fd").iterdir():
        if fd.resolve() == path.resolve():
            info = Path(f"/proc/{run.pid}/fdinfo/{fd.name}").read_text().splitlines()
            return int(next(line for line in info if line.startswith("pos")).split()[1])
    raise AssertionError(f"{path} is not open")


def test_messages_that_nobody_can_read_cost_nothing(runs: ForkServer, model_folder: Path, tmp_path: Path) -> None:
    """Guards a run against a full disk of its log: the rows are there, and the exit code is theirs."""
    source, out = write_rows(tmp_path / "in.jsonl", [*LONG[:4], {"prompt": ""}]), tmp_path / "out.jsonl"
    assert runs.start("run", source, "-v", "-m", model_folder, "-o", out, stderr="/dev/full").code() == 1
    assert count_lines(out) == 5


def test_the_reader_of_a_report_that_goes_away(
    runs: ForkServer, model_folder: Path, tmp_path: Path, fifo: Callable[[str], str]
) -> None:
    """Guards `cbatch run --check | head -1`: 141, not the exit code that means bad rows."""
    source, pipe = write_rows(tmp_path / "in.jsonl", LONG[:3]), fifo("stdout")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    run = runs.start("run", source, "--check", "-q", "-m", model_folder, stdout=pipe)
    until(lambda: Path(f"/proc/{run.pid}/fd/1").readlink() == Path(pipe))
    os.close(reader)
    assert run.code() == 141


def test_a_full_device_is_exit_3(runs: ForkServer, model_folder: Path, tmp_path: Path) -> None:
    """Guards an output that cannot be written: a message, and exit code 3."""
    source, stderr = write_rows(tmp_path / "in.jsonl", LONG[:3]), str(tmp_path / "stderr")
    run = runs.start("run", source, "-q", "-m", model_folder, stdout="/dev/full", stderr=stderr)
    assert run.code() == 3
    assert Path(stderr).read_text() == "cbatch: Cannot write the output: No space left on device.\n"
    assert runs.start("run", source, "-q", "-m", model_folder, "-o", "/dev/full").code() == 3
