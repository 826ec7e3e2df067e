"""Replicas of the demo model on this machine: rows are those of one engine, whatever happens to the replicas."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from cbatch.api import Engine
from cbatch.base.config import EngineConfig
from cbatch.base.errors import Interrupted, ModelError
from cbatch.batch.engine_driver import EngineDriver
from cbatch.replicas import dispatcher, supervisor
from cbatch.replicas.driver import ReplicaDriver
from cbatch.replicas.local import LocalLauncher, Place
from tests.support.faults import wait_until
from tests.support.replica_runs import (
    CONFIG,
    ROWS_OF_KILL,
    KillableLauncher,
    RowCounter,
    forked_replicas,
    killing,
    run_to_file,
    write_rows,
)

KILLS, FEW_ROWS, ATTEMPTS = 8, 60, 20


class Batch:
    """Rows, and the output that one engine gives them."""

    def __init__(self, folder: Path) -> None:
        self.all, self.few = folder / "all.jsonl", folder / "few.jsonl"
        write_rows(self.all, KILLS * ROWS_OF_KILL)
        self.few.write_text("".join(self.all.read_text().splitlines(keepends=True)[:FEW_ROWS]))
        with Engine(CONFIG) as engine:
            run_to_file(EngineDriver(engine.thread), self.all, folder / "expected.jsonl")
        self.expected = (folder / "expected.jsonl").read_bytes().splitlines(keepends=True)


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Batch:
    return Batch(tmp_path_factory.mktemp("batch"))


Replicas = Callable[[int], tuple[KillableLauncher, ReplicaDriver]]


@pytest.fixture(scope="module")
def replicas(batch: Batch) -> Iterator[Replicas]:
    """So many replicas, the same ones each time."""
    with forked_replicas(), ExitStack() as stack:

        @cache
        def start(number: int) -> tuple[KillableLauncher, ReplicaDriver]:
            launcher = KillableLauncher(number)
            return launcher, stack.enter_context(ReplicaDriver(launcher, CONFIG, backoff_s=0.01))

        yield start


@pytest.mark.slow
def test_resume_with_another_number_of_replicas(batch: Batch, replicas: Replicas, tmp_path: Path) -> None:
    """Guards the bytes of rows and their keys against depending on the number of replicas."""
    output, counter = tmp_path / "out.jsonl", RowCounter()
    with pytest.raises(Interrupted):
        run_to_file(replicas(3)[1], batch.few, output, stop_at=FEW_ROWS // 3)
    kept = output.read_bytes().splitlines(keepends=True)
    assert FEW_ROWS // 3 <= len(kept) < FEW_ROWS and set(kept) < set(batch.expected)
    run_to_file(replicas(2)[1], batch.few, output, counter=counter, resume=True)
    assert counter.rows == FEW_ROWS - len(kept)
    assert output.read_bytes() == b"".join(batch.expected[:FEW_ROWS])


@pytest.mark.slow
def test_kills_at_random_moments_change_nothing(
    batch: Batch, replicas: Replicas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system kills what takes too much memory at any moment: in a step, while loading, in an answer."""
    monkeypatch.setattr(dispatcher, "MAX_DEATHS", KILLS)  # three of these kills may hit the same row by chance
    monkeypatch.setattr(supervisor, "MAX_FUTILE_LIVES", KILLS)  # and five the same replica
    launcher, driver = replicas(3)
    wait_until(lambda: all(status.state == "running" for status in driver.each()))
    counter = RowCounter()
    with killing(launcher, counter, KILLS, random.Random(1)) as kills:
        for attempt in range(ATTEMPTS):  # on a busy machine, a batch may end before the last kill
            output = tmp_path / f"out{attempt}.jsonl"
            run_to_file(driver, batch.all, output, counter=counter)
            assert output.read_bytes() == b"".join(batch.expected)
            if kills.total() == KILLS:
                break
    assert kills.total() == KILLS and all(status.rows for status in driver.each())
    wait_until(lambda: sum(status.deaths for status in driver.each()) == KILLS)  # that of an idle one is noticed later


def test_model_that_is_not_there_ends_the_start(batch: Batch, tmp_path: Path) -> None:
    """Guards that a model's fault is said in its own sentence, not five times as a death."""
    config = EngineConfig(model=str(tmp_path / "none"), device="cpu")
    (tmp_path / "none").mkdir()
    with forked_replicas(), pytest.raises(ModelError, match=r"config\.json"):
        ReplicaDriver(LocalLauncher([Place("cpu")] * 2), config)
