"""Replicas as actors, on a cluster of several nodes on this machine."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cbatch.api import Engine
from cbatch.base.config import EngineConfig
from cbatch.base.errors import ConfigError, RequestError
from cbatch.base.request import RequestDefaults
from cbatch.batch.driver import BatchDriver
from cbatch.batch.engine_driver import EngineDriver
from cbatch.batch.lines import Line, RowOptions
from cbatch.isolate.worker import WorkerDied
from cbatch.replicas.driver import ReplicaDriver
from tests.support.fake_replicas import wait_until

pytest.importorskip("ray", reason="a cluster needs ray, which is not installed")

from ray.cluster_utils import Cluster

from cbatch.replicas import ray_cluster
from cbatch.replicas.ray_cluster import RayConnection, RayLauncher

pytestmark = pytest.mark.slow

OPTIONS = RowOptions(RequestDefaults(params={"max_tokens": 24, "ignore_eos": True, "temperature": 0.8}))

ROOT = Path(__file__).parents[2]
FAKE = "tests.support.ray_replica:open_fake"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without CPUs, and two nodes of one each."""
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)  # where the workers look for modules
        patch.setenv("RAY_DISABLE_IMPORT_WARNING", "1")
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        try:
            for _ in range(2):
                made.add_node(num_cpus=1, include_dashboard=False)
            yield made
        finally:
            made.shutdown()


@pytest.fixture
def launcher(cluster: Any) -> Iterator[RayLauncher]:
    opened = RayLauncher(cluster.address, factory=FAKE)
    yield opened
    opened.close()


def started(launcher: RayLauncher, number: int = 0, **config: Any) -> RayConnection:
    return launcher.start(number, EngineConfig(**config))


def test_actors_are_called(launcher: RayLauncher) -> None:
    """Guards the way of a call to an actor and back: its arguments, its result, and the errors of a replica."""
    first, second = started(launcher, 0, model="some"), started(launcher, 1)
    pid, model, threads = first.call("settings", timeout_s=60)
    assert pid != os.getpid() and model == "some" and threads == "1"
    assert second.call("echo", b"row", 2, timeout_s=60) == (b"row", 2)
    with pytest.raises(RequestError, match="The row is wrong") as refused:
        first.call("refuse", timeout_s=60)
    assert refused.value.code == "invalid_row"
    with pytest.raises(WorkerDied, match="something is wrong"):
        first.call("break_down", timeout_s=60)
    with pytest.raises(ConfigError, match="no such model"):
        second.kill()
        started(launcher, 2, model="missing").call("echo", timeout_s=60)


def test_deaths_are_noticed(launcher: RayLauncher, caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    """Guards against waiting for an actor that has died, hangs, was killed or finds no place."""
    monkeypatch.setattr(ray_cluster, "NOTICE_SECONDS", 0.2)
    first, second = started(launcher, 0), started(launcher, 1)
    second.call("echo", timeout_s=60)
    with pytest.raises(WorkerDied, match="died"):
        first.call("die", timeout_s=60)
    with pytest.raises(WorkerDied, match="has not answered for 1 s"):
        second.call("hang", timeout_s=1)
    started_at = time.monotonic()
    second.kill()
    second.kill()
    assert time.monotonic() - started_at < 2
    with pytest.raises(WorkerDied, match="killed"):
        second.call("echo", timeout_s=60)
    both = started(launcher, 0), started(launcher, 1)
    for connection in both:
        connection.call("echo", timeout_s=60)
    with pytest.raises(WorkerDied, match="has not answered"):  # there are two CPUs
        started(launcher, 2).call("echo", timeout_s=0.5)
    assert "replica 3 waits until a node of the cluster has free what it needs: num_cpus 1" in caplog.text


def test_what_a_cluster_has(cluster: Any, caplog: pytest.LogCaptureFixture) -> None:
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
        RayLauncher(address)


def test_rays_messages_stay_out_of_the_rows(cluster: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Guards standard output, where Ray prints the deaths of workers, and rows are written."""
    launcher = RayLauncher(cluster.address, factory=FAKE)
    with pytest.raises(WorkerDied):
        started(launcher).call("die", timeout_s=60)
    time.sleep(1)
    print("a row")
    launcher.close()
    print("after it")
    assert capfd.readouterr().out == "a row\nafter it\n"


def rows_of(driver: BatchDriver, lines: list[Line], on_rows: Callable[[int], None] = lambda _: None) -> list[bytes]:
    """Rows of output by the order of their lines. on_rows: called with the number of rows that have finished"""
    stream = driver.open(OPTIONS)
    found: dict[int, bytes] = {}
    for rows in stream.finished(iter(lines)):
        stream.release([row.position for row in rows])
        for row in rows:
            assert row.index not in found, "a row was given twice"
            found[row.index] = row.data
        on_rows(len(found))
    return [found[line.index] for line in lines]


def test_rows_outlive_the_node_that_ran_them(
    cluster: Any, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards a batch on a cluster: a node goes without grace, and the bytes are those of one engine."""
    config = EngineConfig(dtype="float32", device="cpu", max_seqs=8, kv_blocks=512)
    lines = [Line(index, b'{"prompt": "Tell me about the number %d."}' % index) for index in range(100)]
    with Engine(config) as engine:
        expected = rows_of(EngineDriver(engine.thread), lines)
    nodes = [cluster.add_node(num_cpus=1, include_dashboard=False)]

    def take_the_node(num_rows: int) -> None:
        if num_rows >= 8 and nodes:
            cluster.remove_node(nodes.pop(), allow_graceful=False)

    with ReplicaDriver(RayLauncher(cluster.address), config, backoff_s=0.1) as driver:
        wait_until(lambda: [status.state for status in driver.each()] == ["running"] * 3, 60)
        assert rows_of(driver, lines, take_the_node) == expected
        wait_until(lambda: sum(status.deaths for status in driver.each()) == 1, 30)
    assert "died: " in caplog.text
    assert "raylet" not in capsys.readouterr().out
