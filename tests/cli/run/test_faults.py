"""`cbatch run` under kills, signals, full disks, slow readers and slow writers: no finished row is lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.command import Command
from tests.support.faults import wait_until
from tests.support.fork_server import ForkServer, KillPoint, Run
from tests.support.kill_runs import Aim, KillTest
from tests.support.rows import read_rows

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("rows_written")]


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


ROWS = [{"id": n, "prompt": f"row {n}", "temperature": 1.0, "max_tokens": 3 if n < 4 else 40} for n in range(40)]


def test_a_signal_ends_a_run_gracefully(runs: ForkServer, command: Command) -> None:
    """Guards a batch system's SIGTERM: whole rows, no reordering, 143, and --resume finishes."""
    stderr = command.folder / "stderr"
    run = runs.start(*command.words("--max-seqs", "2"), stderr=str(stderr))
    wait_until(lambda: command.out.exists() and command.data.count(b"\n") >= 5)
    run.send(signal.SIGTERM)
    assert run.code() == 143
    rows, message = command.rows(), stderr.read_text()
    assert 5 <= len(rows) < 40 and not any("error" in row for row in rows)
    assert command.figures()["rows"] == len(rows)
    assert "--resume" in message and "Traceback" not in message
    assert command("--resume", "--max-seqs", "7") == 0
    found = command.data
    assert command("--overwrite", "--max-seqs", "2") == 0 and command.data == found


def test_signals_while_the_model_loads(runs: ForkServer, command: Command) -> None:
    """Guards the exit code, and that no empty file is left, before the first row."""
    run = runs.start(*command.words())
    wait_until(command.out.exists)
    time.sleep(0.01)
    run.send(signal.SIGTERM)
    assert run.code() == 143 and not command.out.exists()


@pytest.fixture
def pipe(tmp_path: Path) -> str:
    os.mkfifo(tmp_path / "pipe")
    return str(tmp_path / "pipe")


@pytest.fixture
def stalled(runs: ForkServer, command: Command, pipe: str) -> Iterator[tuple[Run, int, Path]]:
    """A run that hangs because nobody reads its output, the reading end of its pipe, and its input."""
    command.write([{"prompt": "a", "max_tokens": 2, "column": "x" * 1000}] * 10_000)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    run = runs.start(*command.words("-q", "-o", "-"), stdout=pipe, stderr=str(command.folder / "stderr"))
    wait_until(lambda: bool(_peek(reader)))
    wait_until(lambda: not _grows(run))
    yield run, reader, command.source
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
    """Guards memory: only a window of rows is read for a slow reader of the output; a silent 141 when it goes."""
    run, reader, source = stalled
    before, taken = run.rss_mib(), 0
    for _ in range(20):
        taken += len(os.read(reader, 100))
        time.sleep(0.1)
    assert taken == 2000 and run.rss_mib() - before < 10
    assert _position(run, source) < source.stat().st_size / 10
    os.close(reader)
    assert run.code() == 141 and not source.with_name("stderr").read_bytes()


def _position(run: Run, path: Path) -> int:
    """How far a process has read a file."""
    for fd in Path(f"/proc/{run.pid}/fd").iterdir():
        if fd.resolve() == path.resolve():
            info = Path(f"/proc/{run.pid}/fdinfo/{fd.name}").read_text().splitlines()
            return int(next(line for line in info if line.startswith("pos")).split()[1])
    raise AssertionError(f"{path} is not open")


def test_messages_that_nobody_can_read_cost_nothing(runs: ForkServer, command: Command) -> None:
    """Guards a run against a full disk of its log: the rows are there, and the exit code is theirs."""
    command.write([*ROWS[:4], {"prompt": ""}])
    assert runs.start(*command.words("-v"), stderr="/dev/full").code() == 1
    assert len(command.lines()) == 5


def test_the_reader_of_a_report_that_goes_away(runs: ForkServer, command: Command, pipe: str) -> None:
    """Guards `cbatch run --check | head -1`: 141, not the exit code that means bad rows."""
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    run = runs.start(*command.words("--check", "-q"), stdout=pipe)
    wait_until(lambda: Path(f"/proc/{run.pid}/fd/1").readlink() == Path(pipe))
    os.close(reader)
    assert run.code() == 141


def test_a_full_device_is_exit_3(runs: ForkServer, command: Command) -> None:
    """Guards an output that cannot be written: a message, and exit code 3."""
    stderr = command.folder / "stderr"
    assert runs.start(*command.words("-q", "-o", "-"), stdout="/dev/full", stderr=str(stderr)).code() == 3
    assert stderr.read_text() == "cbatch: Cannot write the output: No space left on device.\n"


MANY_ROWS = 20_000


def replicas_of(run: Run) -> list[psutil.Process]:
    """The processes of the replicas, once both are there."""
    wait_until(lambda: run.is_over() or len(psutil.Process(run.pid).children()) == 2, 60)
    return psutil.Process(run.pid).children()


def are_over(processes: list[psutil.Process]) -> bool:
    return not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes)


def test_signals_end_replicas(runs: ForkServer, command: Command) -> None:
    """Processes that stay keep their memory and their GPU; rows that are not written are computed again."""
    command.write([{"prompt": f"row {n}", "max_tokens": 20} for n in range(MANY_ROWS)])
    run = runs.start(*command.words("--replicas", "2"))
    while_loading = replicas_of(run)
    run.send(signal.SIGKILL)
    assert run.code() == -signal.SIGKILL and len(while_loading) == 2
    wait_until(lambda: are_over(while_loading))

    stderr = command.folder / "stderr"
    run = runs.start(*command.words("--replicas", "2", "--overwrite"), stderr=str(stderr))
    replicas = replicas_of(run)
    wait_until(lambda: run.is_over() or command.out.stat().st_size > 0, 60)
    started = time.monotonic()
    run.send(signal.SIGINT)
    assert run.code() == 128 + signal.SIGINT and time.monotonic() - started < 2
    assert len(replicas) == 2 and are_over(replicas)
    rows = command.rows()
    assert 0 < len(rows) < MANY_ROWS and not any("error" in row for row in rows)
    assert "--resume continues from there" in stderr.read_text()
