"""Replicas of the demo model on this machine: rows are those of one engine, whatever happens to the replicas."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from cbatch.api import Engine
from cbatch.base.config import EngineConfig
from cbatch.base.errors import Interrupted, ModelError
from cbatch.batch.engine_driver import EngineDriver
from cbatch.replicas import dispatcher, supervisor
from cbatch.replicas.driver import ReplicaDriver
from cbatch.replicas.local import LocalLauncher, Place
from tests.support.fake_replicas import wait_until
from tests.support.forked_replicas import forked_replicas
from tests.support.replica_runs import (
    CONFIG,
    ROWS_OF_KILL,
    Comparison,
    KillableLauncher,
    RowCounter,
    killing,
    run_to_file,
    write_rows,
)

KILLS, FEW_ROWS, ATTEMPTS = 20, 120, 20


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


class Replicas:
    def __init__(self, number: int) -> None:
        self.launcher = KillableLauncher(number)
        self.driver = ReplicaDriver(self.launcher, CONFIG, backoff_s=0.01)

    @property
    def deaths(self) -> int:
        return sum(status.deaths for status in self.driver.each())


@pytest.fixture(scope="module")
def two(batch: Batch) -> Iterator[Replicas]:
    with forked_replicas():
        replicas = Replicas(2)
        with replicas.driver:
            yield replicas


@pytest.fixture(scope="module")
def three(batch: Batch) -> Iterator[Replicas]:
    with forked_replicas():
        replicas = Replicas(3)
        with replicas.driver:
            yield replicas


@pytest.mark.slow
def test_rows_are_those_of_one_engine(batch: Batch, two: Replicas, three: Replicas, tmp_path: Path) -> None:
    """A row whose bytes depend on the number of replicas could not be resumed with another one."""
    for replicas in (two, three):
        for attempt in range(ATTEMPTS):  # on a busy machine, the others may be done before one has started
            output = tmp_path / f"{replicas.driver.num_engines}.{attempt}"
            run_to_file(replicas.driver, batch.few, output)
            assert output.read_bytes() == b"".join(batch.expected[:FEW_ROWS])
            if all(status.rows for status in replicas.driver.each()):
                break
        else:
            pytest.fail(f"one of {replicas.driver.num_engines} replicas never had a row")


@pytest.mark.slow
def test_resume_with_another_number_of_replicas(batch: Batch, two: Replicas, three: Replicas, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with pytest.raises(Interrupted):
        run_to_file(two.driver, batch.few, output, stop_at=FEW_ROWS // 3)
    kept = output.read_bytes().splitlines(keepends=True)
    assert FEW_ROWS // 3 <= len(kept) < FEW_ROWS and set(kept) < set(batch.expected)
    counter = RowCounter()
    run_to_file(three.driver, batch.few, output, counter=counter, resume=True)
    assert counter.rows == FEW_ROWS - len(kept)
    assert output.read_bytes() == b"".join(batch.expected[:FEW_ROWS])


@pytest.mark.slow
def test_kills_at_random_moments_change_nothing(
    batch: Batch, three: Replicas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system kills what takes too much memory at any moment: in a step, while loading, in an answer."""
    monkeypatch.setattr(dispatcher, "MAX_DEATHS", KILLS)  # three of these kills may hit the same row by chance
    monkeypatch.setattr(supervisor, "MAX_FUTILE_LIVES", KILLS)  # and five the same replica
    before, counter = three.deaths, RowCounter()
    with killing(three.launcher, counter, KILLS, random.Random(1)) as kills:
        for attempt in range(ATTEMPTS):  # on a busy machine, a batch may end before the last kill
            output = tmp_path / f"out{attempt}.jsonl"
            run_to_file(three.driver, batch.all, output, counter=counter)
            assert Comparison.of(output.read_bytes(), b"".join(batch.expected)) == Comparison()
            assert output.read_bytes() == b"".join(batch.expected)
            if kills.total() == KILLS:
                break
    assert kills.total() == KILLS
    wait_until(lambda: three.deaths - before == KILLS)  # that of an idle replica is noticed later


def test_model_that_is_not_there_ends_the_start(batch: Batch, tmp_path: Path) -> None:
    """What is wrong with a model is said in its own sentence, and not five times as a death."""
    config = EngineConfig(model=str(tmp_path / "none"), device="cpu")
    (tmp_path / "none").mkdir()
    with forked_replicas(), pytest.raises(ModelError, match=r"config\.json"):
        ReplicaDriver(LocalLauncher([Place("cpu")] * 2), config)
