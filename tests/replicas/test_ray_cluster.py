"""Replicas as actors, on a cluster of several nodes on this machine."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cbatch.base.config import EngineConfig
from cbatch.base.errors import ConfigError, RequestError
from cbatch.batch.lines import Line, RowOptions
from cbatch.batch.row import Row
from cbatch.isolate.worker import WorkerDied
from cbatch.replicas.driver import ReplicaDriver
from tests.support.fake_replicas import row_of
from tests.support.faults import wait_until

pytest.importorskip("ray", reason="a cluster needs ray, which is not installed")

from ray.cluster_utils import Cluster

from cbatch.replicas import ray_cluster
from cbatch.replicas.ray_cluster import RayConnection, RayLauncher

pytestmark = pytest.mark.slow

STUBS = "tests.replicas.stubs"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head and a node, of one CPU each."""
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)  # where the workers look for modules
        patch.setenv("RAY_DISABLE_IMPORT_WARNING", "1")
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        try:
            made.add_node(num_cpus=1, include_dashboard=False)
            yield made
        finally:
            made.shutdown()


@pytest.fixture(scope="module")
def launcher(cluster: Any) -> Iterator[RayLauncher]:
    opened = RayLauncher(cluster.address, factory=f"{STUBS}:stub")
    yield opened
    opened.close()


def started(launcher: RayLauncher, number: int = 0, **config: Any) -> RayConnection:
    return launcher.start(number, EngineConfig(**config))


def test_actors_are_called(launcher: RayLauncher) -> None:
    """Guards the way of a call to an actor and back: its arguments, its result, and the errors of a replica."""
    first = started(launcher, 0, model="some")
    config, _, environment = first.call("place", timeout_s=60)
    assert config.model == "some" and environment["OMP_NUM_THREADS"] == "1"
    assert first.call("echo", (b"row", 2), timeout_s=60) == (b"row", 2)
    with pytest.raises(RequestError, match="The row is wrong") as refused:
        first.call("raise_cbatch_error", RequestError("invalid_row", "The row is wrong."), timeout_s=60)
    assert refused.value.code == "invalid_row"
    with pytest.raises(WorkerDied, match="two"):
        first.call("raise_other", timeout_s=60)
    first.kill()


def test_relative_paths_are_those_of_the_command(
    launcher: RayLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards `-m ./model` on a cluster that was started in another folder, and nodes that have not this folder."""
    monkeypatch.chdir(tmp_path)
    first = started(launcher)
    assert first.call("folder", timeout_s=60) == str(tmp_path)
    first.kill()
    monkeypatch.setattr(ray_cluster.Path, "cwd", lambda: tmp_path / "gone")
    other = started(launcher)
    assert other.call("echo", 1, timeout_s=60) == 1
    other.kill()


def test_deaths_are_noticed(
    launcher: RayLauncher, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against waiting for an actor that cannot be made, has died, hangs, was killed or finds no place."""
    monkeypatch.setattr(ray_cluster, "NOTICE_SECONDS", 0.2)
    wrong = RayLauncher("auto", factory=f"{STUBS}:refusing")
    with pytest.raises(ConfigError, match="there is no model missing"):
        (refused := started(wrong, 2, model="missing")).call("echo", 1, timeout_s=60)
    refused.kill()
    wrong.close()
    first, second = started(launcher, 0), started(launcher, 1)
    second.call("echo", 1, timeout_s=60)
    with pytest.raises(WorkerDied, match="has not answered"):  # there are two CPUs
        started(launcher, 2).call("echo", 1, timeout_s=0.5)
    assert "replica 3 waits until a node of the cluster has free what it needs: num_cpus 1" in caplog.text
    with pytest.raises(WorkerDied, match="died"):
        first.call("exit", 3, timeout_s=60)
    with pytest.raises(WorkerDied, match="has not answered for 1 s"):
        second.call("sleep", timeout_s=1)
    started_at = time.monotonic()
    second.kill()
    second.kill()
    assert time.monotonic() - started_at < 2
    with pytest.raises(WorkerDied, match="killed"):
        second.call("echo", 1, timeout_s=60)


def test_what_a_cluster_has(cluster: Any, launcher: RayLauncher, caplog: pytest.LogCaptureFixture) -> None:
    """Guards the number of replicas, and the sentences about a cluster that cannot have them."""
    with pytest.raises(ConfigError, match="No node of the Ray cluster has what a replica needs: num_gpus 1"):
        RayLauncher(cluster.address, resources={"num_gpus": 1})
    half = RayLauncher(cluster.address, resources={"num_cpus": 0.5})
    assert half.num_replicas == 4
    half.close()
    many = RayLauncher(cluster.address, 5)
    assert many.num_replicas == 5 and "resources for 2 replicas now; the other 3 start when nodes join" in caplog.text
    many.close()


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("127.0.0.1:1", "No Ray cluster answers at 127.0.0.1:1"),
        ("nonsense", "must be auto or HOST:PORT"),
        ("ray://127.0.0.1:10001", "must be auto or HOST:PORT"),
    ],
)
def test_addresses_without_a_cluster(address: str, sentence: str) -> None:
    """Guards against Ray's own search for a cluster, which takes minutes."""
    with pytest.raises(ConfigError, match=sentence):
        ray_cluster._connect(address)


def test_rays_messages_stay_out_of_the_rows(cluster: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Guards standard output, where Ray prints the deaths of workers, and rows are written."""
    launcher = RayLauncher(cluster.address, factory=f"{STUBS}:stub")
    with pytest.raises(WorkerDied):
        started(launcher).call("exit", 3, timeout_s=60)
    time.sleep(1)
    print("a row")
    launcher.close()
    print("after it")
    assert capfd.readouterr().out == "a row\nafter it\n"


def test_rows_outlive_the_node_that_ran_them(cluster: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Guards a batch on a cluster: a node goes without grace, and its rows are those of another."""
    lines = [Line(index, b"text %d" % index) for index in range(100)]
    found: list[Row] = []
    with ReplicaDriver(RayLauncher(cluster.address, factory=f"{STUBS}:fake"), EngineConfig(), backoff_s=0.1) as driver:
        wait_until(lambda: [status.state for status in driver.each()] == ["running"] * 2, 60)
        stream = driver.open(RowOptions())
        for rows in stream.finished(iter(lines)):
            found += rows
            stream.window.release([row.position for row in rows])
            if len(found) >= 8 and len(cluster.worker_nodes) > 0:
                cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
        wait_until(lambda: sum(status.deaths for status in driver.each()) == 1, 30)
    assert sorted(row.data for row in found) == sorted(map(row_of, lines)) and "died: " in caplog.text
