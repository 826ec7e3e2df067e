"""No thread of the driver of replicas that fails leaves a batch waiting: all rows come, or an error that says why."""

from __future__ import annotations

from contextlib import closing

import pytest

from cbatch.base.config import EngineConfig
from cbatch.base.errors import CbatchError
from cbatch.base.request import RequestDefaults
from cbatch.batch.lines import Line, RowOptions
from cbatch.batch.row import Row
from cbatch.replicas import supervisor as supervisor_module
from cbatch.replicas.dispatcher import Dispatcher
from cbatch.replicas.driver import KeyMaking, ReplicaDriver
from cbatch.replicas.stream import ReplicaStream
from cbatch.replicas.supervisor import Life, Supervisor
from tests.support.fake_replicas import FakeConnection, FakeLauncher
from tests.support.faults import Fault, Panic, in_time

ROWS = 40

PLACES: list[tuple[type, str]] = [
    (FakeLauncher, "start"),
    (FakeConnection, "call"),
    (FakeConnection, "kill"),
    (Life, "__init__"),
    (Life, "exchange"),
    (Life, "check"),
    (Supervisor, "_serve"),
    (Supervisor, "_after_death"),
    (Supervisor, "_end_life"),
    (ReplicaStream, "run"),
    (ReplicaStream, "_exchange"),
    (ReplicaStream, "_deliver"),
    (ReplicaStream, "_start"),
    (Dispatcher, "add"),
    (Dispatcher, "end_input"),
    (Dispatcher, "join"),
    (Dispatcher, "leave"),
    (Dispatcher, "take"),
    (Dispatcher, "_choose"),
    (Dispatcher, "finish"),
    (Dispatcher, "num_held"),
    (KeyMaking, "run"),
    (KeyMaking, "_make"),
]


@pytest.mark.parametrize("always", [False, True], ids=["once", "always"])
@pytest.mark.parametrize(("owner", "name"), PLACES, ids=lambda place: getattr(place, "__name__", place))
def test_a_batch_ends_whatever_fails(owner: type, name: str, always: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica dies in the middle, so that what comes after a death is reached too."""
    monkeypatch.setattr(supervisor_module, "IDLE_SECONDS", 0.05)
    Fault(monkeypatch, owner, name, Panic("boom"), always=always)
    found: list[Row] = []

    def dies(connection: FakeConnection, method: str, after: bool) -> bool:
        return connection.life == 1 and connection.number == 0 and connection.calls["exchange"] == 3 and after

    source = [Line(index, b"text %d" % index) for index in range(ROWS)]

    def work() -> None:
        with ReplicaDriver(FakeLauncher(dies=dies), EngineConfig(), timeout_s=1.0, backoff_s=0.001) as driver:
            assert [key for _, key in driver.keyed(RowOptions(), source)] == [f"key of {n}" for n in range(ROWS)]
            stream = driver.open(RowOptions(RequestDefaults()))
            with closing(stream.finished(source)) as finished:
                for rows in finished:
                    stream.window.release([row.position for row in rows])
                    found.extend(rows)

    error = in_time(work)
    assert error is None or (isinstance(error, CbatchError | Panic) and "boom" in str(error)), repr(error)
    assert error is not None or sorted(row.index for row in found) == list(range(ROWS))
