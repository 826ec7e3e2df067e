"""`cbatch run --replicas` with real processes, when it is told to end or is killed: none of them stays."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.fork_server import ForkServer, Run

SOON_S = 60.0
ROWS = 20_000


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def replicas_of(run: Run) -> list[psutil.Process]:
    """The processes of the replicas, once both are there."""
    wait_until(lambda: run.is_over() or len(psutil.Process(run.pid).children()) == 2)
    return psutil.Process(run.pid).children()


def are_over(processes: list[psutil.Process]) -> bool:
    return not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes)


@pytest.mark.slow
def test_signals_end_replicas(runs: ForkServer, model_folder: Path, tmp_path: Path) -> None:
    """Processes that stay keep their memory and their GPU; rows that are not written are computed again."""
    source, out, errors = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "stderr"
    source.write_text("".join(json.dumps({"prompt": f"row {n}", "max_tokens": 20}) + "\n" for n in range(ROWS)))
    command = ["run", source, "-o", out, "-m", model_folder, "--dtype", "float32", "--replicas", "2"]

    run = runs.start(*command)
    while_loading = replicas_of(run)
    run.send(signal.SIGKILL)
    assert run.code() == -signal.SIGKILL and len(while_loading) == 2
    wait_until(lambda: are_over(while_loading))

    run = runs.start(*command, "--overwrite", stderr=str(errors))
    replicas = replicas_of(run)
    wait_until(lambda: run.is_over() or out.stat().st_size > 0)
    started = time.monotonic()
    run.send(signal.SIGINT)
    assert run.code() == 128 + signal.SIGINT
    assert time.monotonic() - started < 2
    assert len(replicas) == 2 and are_over(replicas)
    rows = [json.loads(line) for line in out.read_bytes().splitlines()]
    assert 0 < len(rows) < ROWS and not any("error" in row for row in rows)
    assert "--resume continues from there" in errors.read_text()
