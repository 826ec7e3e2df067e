"""A replica's own side: an engine behind an exchange."""

from __future__ import annotations

import itertools
import json
import pickle
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cbatch.api import Engine
from cbatch.base.config import EngineConfig
from cbatch.base.errors import RequestError, ToolError
from cbatch.base.request import RequestDefaults
from cbatch.batch.engine_driver import EngineDriver
from cbatch.batch.lines import Line, RowOptions
from cbatch.batch.row import Row
from cbatch.replicas import replica as replica_module
from cbatch.replicas.connection import FinishedRow
from cbatch.replicas.driver import ReplicaDriver
from cbatch.replicas.replica import InProcessConnection, Replica
from cbatch.tools.tool import Tool
from tests.support.faults import slow_steps, wait_until
from tests.support.in_process_replicas import InProcessLauncher
from tests.support.model_folder import save_model
from tests.support.tool_rounds import ADD_CALL, ROUNDS

OPTIONS = RowOptions(RequestDefaults(params={"max_tokens": 3, "ignore_eos": True}))
LONG = RowOptions(RequestDefaults(params={"max_tokens": 90, "ignore_eos": True}))


@pytest.fixture
def replica(engine: Engine) -> Iterator[Replica]:
    made = Replica(engine)
    yield made
    made.close()
    wait_until_idle(engine)
    assert engine.core.scheduler.pool.num_used == 0


def lines(*indices: int) -> list[Line]:
    return [Line(index, b'{"prompt": "row %d"}' % index) for index in indices]


def wait_until_idle(engine: Engine) -> None:
    for _ in range(1000):
        if engine.stats().num_running == 0 == engine.stats().num_waiting:
            return
        time.sleep(0.005)
    raise AssertionError("requests still run")


def exchange_until(
    replica: Replica, count: int, rows: Sequence[Line] = (), cancelled: Sequence[int] = ()
) -> list[FinishedRow]:
    """Rows that finish from the exchange that gives these on: a quick row may come back at once."""
    found = replica.exchange(list(rows), list(cancelled), 0.0).finished
    for _ in range(600):
        if len(found) >= count:
            return found
        found += replica.exchange([], [], 0.1).finished
    raise AssertionError(f"only {len(found)} rows finished")


class PicklingConnection(InProcessConnection):
    """All that goes to another process and comes from there is pickled."""

    def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        answer = super().call(method, *pickle.loads(pickle.dumps(arguments)), timeout_s=timeout_s)
        return pickle.loads(pickle.dumps(answer))


class PicklingLauncher(InProcessLauncher):
    def start(self, number: int, config: EngineConfig) -> Any:
        return PicklingConnection(self._engine)


def test_tools_run_in_the_process_that_has_loaded_them(tmp_path: Path) -> None:
    """Guards tools that cannot be sent, such as servers: a replica asks for their results, and a slow one ends."""
    model, num_calls = save_model(tmp_path / "model", context=1500), itertools.count()
    release, is_cancelled = threading.Event(), threading.Event()

    def add(arguments: dict[str, Any], cancelled: threading.Event) -> str:
        if next(num_calls) < 8:
            return f"{arguments['a'] + arguments['b']}!"
        release.set()
        if cancelled.wait(60):
            is_cancelled.set()
        raise ToolError("cancelled.")

    (model / "chat_template.jinja").write_text(ROUNDS)
    row = json.dumps({"prompt": "a", "choice": [ADD_CALL]}).encode()
    options = RowOptions(tools=(Tool("add", "Adds.", {}, add),), max_tool_rounds=2)
    with Engine(str(model), device="cpu", dtype="float32") as engine:
        with ReplicaDriver(PicklingLauncher(engine, 1), EngineConfig()) as driver:
            (own, replicas) = (
                {
                    row.index: row.data
                    for rows in each.open(options).finished([Line(0, row), Line(1, row)])
                    for row in rows
                }
                for each in (EngineDriver(engine.thread), driver)
            )
            assert own == replicas and own[1].count(b'"5!"') == 2
            stream = driver.open(options)
            threading.Thread(target=lambda: (release.wait(60), stream.interrupt(signal.SIGINT))).start()
            assert [rows for rows in stream.finished([Line(0, row)]) if rows] == []
        assert is_cancelled.wait(20)
        wait_until_idle(engine)


def test_rows_and_keys_are_those_of_the_engine_itself(engine: Engine, replica: Replica) -> None:
    """Guards the bytes of rows and their keys: a replica makes the same ones as an engine of this process."""
    given = [*lines(0, 1, 5), Line(7, b"{bad"), Line(9, b"{}", error=RequestError("invalid_row", "no text"))]
    driver = EngineDriver(engine.thread)
    source = driver.open(OPTIONS)
    wanted: dict[int, Row] = {row.index: row for rows in source.finished(given) for row in rows}
    replica.begin(OPTIONS)
    found = {index: (data, outcome) for index, data, outcome in exchange_until(replica, 5, given)}
    assert {index: data for index, (data, _) in found.items()} == {index: row.data for index, row in wanted.items()}
    assert {index: outcome[:5] for index, (_, outcome) in found.items()} == {
        index: row.outcome[:5] for index, row in wanted.items()
    }
    assert replica.keys(OPTIONS, given) == [key for _, key in driver.keyed(OPTIONS, given)]
    last = replica.exchange([], [], 0.0)
    assert (last.num_tokens, last.failure) == (9, "")


def test_a_cancelled_row_is_not_given(engine: Engine, replica: Replica) -> None:
    """Guards slots against rows that another replica has finished, running here, waiting, or not even read."""
    replica.begin(LONG)
    with slow_steps():
        replica.exchange(lines(*range(8)), [], 0.0)
        wait_until(lambda: engine.stats().num_running >= 4)
        found = exchange_until(replica, 6, lines(8), [0, 5, 8])
    assert sorted(index for index, _, _ in found) == [1, 2, 3, 4, 6, 7]
    assert replica.exchange([], [1, 2, 77], 0.05).finished == []


def test_a_new_batch_ends_the_one_before(engine: Engine, replica: Replica) -> None:
    """Guards a chat's second batch against rows and options of the first."""
    replica.begin(LONG)
    replica.exchange(lines(*range(8)), [], 0.0)
    replica.begin(OPTIONS)
    ((index, data, outcome),) = exchange_until(replica, 1, lines(3))
    assert (index, outcome.completion_tokens) == (3, 3) and json.loads(data)["usage"]["completion_tokens"] == 3
    replica.close()
    wait_until_idle(engine)


def test_an_idle_replica_answers_in_time(replica: Replica) -> None:
    """Guards the hang detection: a replica with nothing to say says so when it is asked to."""
    assert replica.exchange([], [], 0.0).finished == []
    replica.begin(OPTIONS)
    for wait_s in (0.0, 0.1):
        started = time.monotonic()
        assert replica.exchange([], [], wait_s).finished == []
        assert wait_s <= time.monotonic() - started < wait_s + 0.15


def test_replies_are_bounded(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the memory of both sides against one reply with everything that has finished."""
    monkeypatch.setattr(replica_module, "MAX_REPLY_ROWS", 3)
    replica.begin(OPTIONS)
    replies = [replica.exchange([Line(index, b"{bad") for index in range(8)], [], 0.2)]
    while sum(len(reply.finished) for reply in replies) < 8:
        replies.append(replica.exchange([], [], 0.2))
    assert max(len(reply.finished) for reply in replies) == 3
    monkeypatch.setattr(replica_module, "MAX_MESSAGE_BYTES", 1)
    replica.exchange([Line(index, b"{bad") for index in range(8, 12)], [], 0.2)
    for _ in range(3):
        assert len(replica.exchange([], [], 0.2).finished) == 1


def test_a_failed_row_has_the_key_that_it_would_have_had(replica: Replica) -> None:
    """Guards --resume --retry-errors: the error row of a row that killed its replicas belongs to the same line."""
    given = [Line(4, b'{"id": "x", "prompt": "a"}')]
    replica.begin(OPTIONS)
    ((index, data, outcome),) = replica.exchange([replace(given[0], failure="it died")], [], 5.0).finished
    row = json.loads(data)
    assert (index, row["id"], row["error"]["code"]) == (4, "x", "internal_error") and "died" in row["error"]["message"]
    assert [row["key"]] == replica.keys(OPTIONS, given) and outcome.error_code == "internal_error"


def test_a_failed_engine_says_so_after_its_rows(model_folder: Path) -> None:
    """Guards a replica whose engine has failed against being asked for ever, and finished rows against being lost."""
    with slow_steps(), Engine(EngineConfig(model=str(model_folder), device="cpu", max_seqs=4)) as engine:
        replica = Replica(engine)
        replica.begin(LONG)
        replies = [replica.exchange([*lines(0, 1), Line(2, b"{bad")], [], 0.0)]

        def fail(*arguments: object) -> None:
            raise RuntimeError("the device is lost")

        engine.core.step = fail  # type: ignore[method-assign]
        while not replies[-1].failure:
            replies.append(replica.exchange([], [], 0.5))
        replica.close()
    assert "the device is lost" in replies[-1].failure
    assert [index for reply in replies for index, _, _ in reply.finished] == [2]


def test_replicas_give_the_bytes_of_one_engine(engine: Engine) -> None:
    """Guards the promise of every row's bytes, also when replicas die, and from one batch to the next."""
    options = RowOptions(RequestDefaults(params={"max_tokens": 12, "temperature": 1.0}, seed=3))
    given = [Line(index, b'{"id": "r%d", "prompt": "row %d"}' % (index, index * index)) for index in range(0, 120, 2)]
    given[7] = Line(14, b'{"prompt": 7}')
    source = EngineDriver(engine.thread).open(options, window=999)
    wanted = {row.index: row.data for rows in source.finished(given) for row in rows}
    found: list[Row] = []
    with ReplicaDriver(InProcessLauncher(engine, 2, deaths={0: 1, 1: 1}), engine.config, backoff_s=0.001) as driver:
        assert driver.info.description["model"] == engine.core.describe()["model"]
        for _ in range(2):
            found.clear()
            replicas = driver.open(options)
            for rows in replicas.finished(given):
                found += rows
                replicas.window.release([row.position for row in rows])
            assert len(found) == len(given) and {row.index: row.data for row in found} == wanted
        assert sum(one.deaths for one in driver.each()) == 2
        assert list(driver.keyed(options, given)) == list(EngineDriver(engine.thread).keyed(options, given))
    wait_until_idle(engine)
    assert sum(row.outcome.completion_tokens for row in found) <= replicas.output_tokens
