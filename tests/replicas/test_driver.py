"""The driver of replicas: nothing is lost, doubled or waited for in vain, whatever happens to them."""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from cbatch.base.config import EngineConfig
from cbatch.base.errors import EngineError, ModelError, RequestError
from cbatch.base.request import RequestDefaults
from cbatch.batch.driver import BatchDriver
from cbatch.batch.lines import Line, RowOptions
from cbatch.batch.row import Row
from cbatch.engine.stats import total_stats
from cbatch.isolate.worker import WorkerDied
from cbatch.replicas import driver as driver_module
from cbatch.replicas import supervisor as supervisor_module
from cbatch.replicas.connection import LINGER_SECONDS, MAX_REPLIES_PER_S, ReplicaInfo, Reply, linger_s
from cbatch.replicas.dispatcher import FAILED
from cbatch.replicas.driver import ReplicaDriver
from cbatch.replicas.stream import ReplicaStream
from cbatch.replicas.supervisor import Life
from tests.support.fake_replicas import INFO, LIMITS, FakeConnection, FakeLauncher, row_of
from tests.support.faults import wait_until

OPTIONS = RowOptions()


def open_driver(launcher: FakeLauncher, **options: Any) -> ReplicaDriver:
    return ReplicaDriver(launcher, EngineConfig(), **{"backoff_s": 0.001, **options})


def lines(number: int, *special: tuple[int, bytes]) -> list[Line]:
    texts = dict(special)
    return [Line(index, texts.get(index, b"text %d" % index)) for index in range(number)]


def taken(stream: ReplicaStream, source: Iterable[Line]) -> Iterator[list[Row]]:
    """The rows of a stream, released as a pipeline does. Raises if they do not come."""
    deadline = time.monotonic() + 20
    with closing(stream.finished(source)) as finished:
        for rows in finished:
            stream.window.release([row.position for row in rows])
            yield rows
            assert time.monotonic() < deadline, "the rows do not come"


def run(driver: ReplicaDriver, source: Iterable[Line]) -> list[Row]:
    """Runs a batch to its end."""
    stream = driver.open(OPTIONS)
    return [row for rows in taken(stream, source) for row in rows]


def check(found: list[Row], given: list[Line]) -> None:
    assert sorted(row.index for row in found) == [line.index for line in given], "lost or doubled"
    data = {line.index: row_of(line) for line in given}
    assert all(row.data == data[row.index] for row in found)
    assert sorted(row.position for row in found) == list(range(len(given)))


def test_rows_run_on_all_replicas() -> None:
    """Guards the common case: each row once, all replicas busy but not overfull, figures of all of them."""
    launcher = FakeLauncher(3, step_s=0.002)
    given = lines(200)
    with open_driver(launcher) as driver:
        as_protocol: BatchDriver = driver
        assert as_protocol.num_engines == 3 and driver.limits == LIMITS and driver.info == INFO
        wait_until(lambda: all(one.state == "running" for one in driver.each()))
        stream = driver.open(OPTIONS)
        check([row for rows in taken(stream, given) for row in rows], given)
        wait_until(lambda: driver.stats().num_tokens >= 400)  # more if rows were copied
        each = driver.each()
    assert stream.output_tokens >= 400 and driver.stats().num_steps >= 200
    assert [one.name for one in each] == ["replica 1", "replica 2", "replica 3"]
    assert sum(one.rows for one in each) == 200 and all(one.rows > 20 for one in each)
    assert max(connection.most_held for connection in launcher.connections) == 8, "as many wait there as run"
    assert launcher.is_closed and all(connection.killed.is_set() for connection in launcher.connections)


class SlowInbox(queue.SimpleQueue[Any]):
    """The consumer always has a message before its sender goes on."""

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        super().put(item, block, timeout)
        time.sleep(0.02)


def test_rows_are_counted_before_they_are_delivered() -> None:
    """Guards the figures of a batch: whoever has its last row finds all rows in them."""
    given = lines(30)
    with open_driver(FakeLauncher(2)) as driver:
        stream = driver.open(OPTIONS)
        stream._inbox = SlowInbox()
        check([row for rows in taken(stream, given) for row in rows], given)
        assert sum(one.rows for one in driver.each()) == 30


@pytest.mark.parametrize("seed", range(4))
def test_deaths_at_any_moment_lose_nothing(seed: int) -> None:
    """Guards rows against deaths before, in and after every call; three deaths of a row, and no fewer, fail it."""
    chance = random.Random(seed)
    lock = threading.Lock()

    def dies(connection: FakeConnection, method: str, after: bool) -> bool:
        with lock:
            return launcher.num_deaths < 25 and chance.random() < 0.06

    launcher, given = FakeLauncher(3, at_once=2, dies=dies), lines(150)
    with open_driver(launcher) as driver:
        found = run(driver, given)
        deaths = sum(one.deaths for one in driver.each())
    check(found, given)
    failed = {row.index for row in found if row.outcome.error_code is not None}
    assert failed == {index for index, count in launcher.deaths_of_rows.items() if count >= 3}
    assert deaths >= launcher.num_deaths - 3 and launcher.num_deaths > 5


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_a_poison_row_fails_alone(num_replicas: int) -> None:
    """Guards good rows against one that kills every replica that runs it."""
    given = lines(40, (5, b"poison"), (20, b"poison"))
    with open_driver(FakeLauncher(num_replicas)) as driver:
        found = run(driver, given)
        deaths = sum(one.deaths for one in driver.each())
        assert all(one.state != "gone" for one in driver.each())
    check(found, given)
    outcomes = {row.index: row.outcome for row in found}
    assert {index for index, outcome in outcomes.items() if outcome.error_code is not None} == {5, 20}
    assert outcomes[5].error_code == "internal_error" and outcomes[5].error_message == FAILED and deaths <= 6


def test_a_replica_that_does_not_answer_is_killed() -> None:
    """Guards the run against a replica that hangs: its rows go to others when its time is over."""
    given = lines(60, (3, b"hang"))
    launcher = FakeLauncher(2)
    with open_driver(launcher, timeout_s=0.3) as driver:
        check(run(driver, given), given)
        assert "no answer for 0.3 s" in " ".join(one.problem for one in driver.each())
    assert any(connection.has_died and connection.killed.is_set() for connection in launcher.connections)


def test_an_idle_replica_takes_a_row_at_once() -> None:
    """Guards an input that comes slowly, line by line, against waiting for a replica that rests."""

    def slow() -> Iterator[Line]:
        for line in lines(20):
            wait_until(lambda at=line.index: len(found) == at)  # type: ignore[misc]
            yield line

    found: list[Row] = []
    with open_driver(FakeLauncher(2)) as driver:
        stream = driver.open(OPTIONS)
        started = time.monotonic()
        for rows in taken(stream, slow()):
            found += rows
    assert len(found) == 20 and time.monotonic() - started < 8


def test_rows_of_a_slow_replica_are_copied_at_the_end() -> None:
    """Guards the end of a run against one replica that is slow: the first answer counts, and the other is cancelled."""
    launcher = FakeLauncher(2)
    given = lines(40, *((index, b"slow %d" % index) for index in range(3)))
    with open_driver(launcher) as driver:
        wait_until(lambda: all(one.state == "running" for one in driver.each()))
        check(run(driver, given), given)
        copies = [one.copies for one in driver.each()]
        if copies[1]:  # the slow rows went to the slow replica first
            wait_until(lambda: launcher.connections[0].calls["close"] or launcher.connections[1].calls["close"])
    assert sum(row.deaths for row in driver.each()) == 0


def test_a_model_that_cannot_be_loaded_ends_the_run_at_once() -> None:
    """Guards a wrong model or option against being tried again and again."""

    launcher = FakeLauncher(2, info=Mock(side_effect=ModelError("There is no such model.")))
    with pytest.raises(ModelError, match="no such model"):
        open_driver(launcher)
    assert launcher.is_closed and max(launcher.lives.values()) == 1


def test_a_replica_that_never_starts_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    """Guards the run against one place where replicas cannot live: it goes on with the others."""

    def info(number: int, life: int) -> ReplicaInfo:
        if number == 1:
            raise WorkerDied("exit code 1")
        return INFO

    launcher, given = FakeLauncher(2, info=info), lines(30)
    with caplog.at_level(logging.WARNING, "cbatch"), open_driver(launcher) as driver:
        check(run(driver, given), given)
        wait_until(lambda: driver.each()[1].state == "gone")
    assert launcher.lives[1] == 5
    assert "replica 2 died: exit code 1; it is started again in 0.001 s" in caplog.text
    assert "it finished no row in 5 lives; it is not started again" in caplog.text


def test_many_replicas_answer_less_often() -> None:
    """Guards the process that drives replicas against more answers than it can take in."""
    assert linger_s(8) == LINGER_SECONDS and linger_s(100) == 100 / MAX_REPLIES_PER_S
    given, launcher = lines(60), FakeLauncher(40)
    with open_driver(launcher) as driver:
        check(run(driver, given), given)
    asked = set().union(*(connection.lingered_s for connection in launcher.connections))
    assert 40 / MAX_REPLIES_PER_S in asked and not asked & {LINGER_SECONDS}


def test_what_is_finished_is_given_before_the_last_replica_is_gone() -> None:
    """Guards finished rows against the error that ends the run when no replica is left."""
    given = lines(300)

    def dies(connection: FakeConnection, method: str, after: bool) -> bool:
        return method == "exchange" and not after and len(found) >= 20

    found: list[Row] = []
    launcher = FakeLauncher(2, dies=dies)
    with open_driver(launcher) as driver:
        stream = driver.open(OPTIONS)
        with pytest.raises(EngineError, match=r"No replica is left: replica . died: exit code 3"):
            for rows in taken(stream, given):
                found += rows
        with pytest.raises(EngineError, match="No replica is left"):
            driver.open(OPTIONS)
    assert len({row.index for row in found}) == len(found) < 300
    good = sum(row.outcome.error_code is None for row in found)
    assert good == sum(one.rows for one in driver.each()) == sum(c.stats.num_steps for c in launcher.connections) >= 20


def test_a_machine_on_which_every_row_dies_ends_the_run() -> None:
    """Guards an input against error rows for all of it, if it is the machine that kills replicas and not the rows."""

    info = replace(INFO, limits=replace(LIMITS, max_seqs=128))  # so that many rows are left to run alone
    launcher, found = FakeLauncher(2, info=lambda number, life: info), list[Row]()
    with open_driver(launcher) as driver:
        stream = driver.open(OPTIONS)
        with pytest.raises(EngineError, match="it finished no row in 15 lives"):
            for rows in taken(stream, (Line(index, b"poison") for index in count())):
                found += rows
    assert len(found) <= launcher.num_deaths == 30


def test_another_model_is_refused(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the output against rows of two models, or cut off at two lengths."""
    monkeypatch.setattr(supervisor_module, "IDLE_SECONDS", 0.01)
    others = {
        1: replace(INFO, fingerprint="another"),
        2: replace(INFO, limits=replace(LIMITS, num_blocks=5)),
        3: replace(INFO, limits=replace(LIMITS, num_blocks=51)),
    }

    def info(number: int, life: int) -> ReplicaInfo:
        if number:
            wait_until(lambda: launcher.connections[0].calls["exchange"])
        return others.get(number, INFO)

    launcher = FakeLauncher(4, info=info)
    with caplog.at_level(logging.WARNING, "cbatch"), open_driver(launcher) as driver:
        wait_until(lambda: all(one.state != "starting" for one in driver.each()))
        assert [one.state for one in driver.each()] == ["running", "gone", "gone", "running"]
    assert "replica 2 on here (process 7) has another model" in caplog.text
    assert "replica 3 on here (process 7) has room for 50 tokens" in caplog.text


@pytest.mark.parametrize("hangs", [False, True])
def test_stop_gives_what_is_finished_within_two_seconds(hangs: bool) -> None:
    """Guards the end after a signal: what replicas have finished is fetched, a hanging one is not waited for."""
    launcher = FakeLauncher(2, step_s=0.05)
    source = (Line(index, b"hang" if hangs and index == 10 else b"text") for index in count())
    found: list[Row] = []
    with open_driver(launcher) as driver:
        stream = driver.open(OPTIONS)
        stopped_at = 0.0
        for rows in taken(stream, source):
            found += rows
            if len(found) > 20 and not stopped_at:
                stopped_at = time.monotonic()
                stream.interrupt(2)
        computed = sum(connection.stats.num_steps for connection in launcher.connections)
    assert time.monotonic() - stopped_at < 1.9
    assert len(found) == len({row.index for row in found}) and computed - len(found) <= (4 if hangs else 0)


def test_leaving_the_iteration_frees_the_replicas() -> None:
    """Guards the next batch of a chat: replicas forget the rows of one that was left, and no thread stays."""
    launcher = FakeLauncher(2)
    with open_driver(launcher) as driver:
        stream = driver.open(OPTIONS)
        with closing(stream.finished(lines(10**4))) as finished:
            next(finished)
        given = lines(30)
        check(run(driver, given), given)
        wait_until(lambda: all(one.calls["close"] == one.calls["begin"] for one in launcher.connections))
    assert all(not connection.held for connection in launcher.connections)
    wait_until(lambda: all(thread.name != "cbatch-reader" for thread in threading.enumerate()))


def test_times_and_stats_survive_a_death() -> None:
    """Guards the figures of a run: times are those of the replica, and what a dead one has computed counts."""

    def dies(connection: FakeConnection, method: str, after: bool) -> bool:
        return connection.life == 1 and not after and connection.calls["exchange"] == 4 and method == "exchange"

    given = lines(60)
    launcher = FakeLauncher(1, dies=dies)
    with open_driver(launcher, backoff_s=0.2) as driver:
        found = run(driver, given)
        stats, (one,) = driver.stats(), driver.each()
    check(found, given)
    assert stats.num_tokens == one.stats.num_tokens == sum(c.stats.num_tokens for c in launcher.connections)
    assert stats.num_running == 1 and (one.rows, one.deaths, one.state) == (60, 1, "running")
    assert {row.outcome.ttft_s for row in found} == {0.25}
    assert all(row.finished_at <= time.monotonic() for row in found)


def test_keys_are_made_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards --resume: keys in the order of the lines, from all replicas, in bounded memory, whatever dies."""
    monkeypatch.setattr(driver_module, "PIECE_LINES", 10)
    taken = list[Line]()
    source = (line for line in lines(205) if not taken.append(line))  # type: ignore[func-returns-value]
    chance = random.Random(1)

    def dies(connection: FakeConnection, method: str, after: bool) -> bool:
        return method == "keys" and connection.life == 1 and chance.random() < 0.3

    launcher = FakeLauncher(2, dies=dies)
    with open_driver(launcher) as driver:
        deadline = threading.Timer(20, driver.close)  # so that it does not wait for ever
        deadline.start()
        pairs = driver.keyed(OPTIONS, source)
        found = [next(pairs)]
        assert len(taken) <= 40
        found += pairs
        deadline.cancel()
        given = lines(12)
        check(run(driver, given), given)  # after keys come rows
    keys = [(line.index, key) for line, key in found]
    assert keys == [(index, f"key of {index}") for index in range(205)] and launcher.num_deaths >= 1


def test_wrong_defaults_are_refused_before_a_batch_begins() -> None:
    """Guards the output file against options that no row can have."""
    options = RowOptions(RequestDefaults(seed=-1))
    with open_driver(FakeLauncher(1)) as driver:
        with pytest.raises(RequestError, match="seed"):
            driver.open(options)
        with pytest.raises(RequestError, match="seed"):
            list(driver.keyed(options, lines(3)))
        stream = driver.open(RowOptions(RequestDefaults(seed=13)))
        with pytest.raises(RequestError, match="13"):  # `begin` sees more than the keys
            list(taken(stream, lines(3)))
        given = lines(5)
        check(run(driver, given), given)
        assert driver.each()[0].deaths == 0


def test_deaths_over_the_options_of_a_batch_end_it() -> None:
    """Guards the caller of `open` against a wait for ever: no line is there yet whose keys could be at fault."""
    launcher = FakeLauncher(1, dies=lambda connection, method, after: method == "keys")
    with open_driver(launcher) as driver, pytest.raises(EngineError, match="3 times over the options of the batch"):
        driver.open(OPTIONS)


def test_an_engine_that_makes_no_step_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the run against a replica that computes nothing; one without rows may, and one whose parent was stopped.

    Ctrl-Z stops both: what a replica in the middle of a long step says then is no reason.
    """
    now = 0.0
    monkeypatch.setattr(supervisor_module, "time", SimpleNamespace(monotonic=lambda: now))
    life = Life(0, FakeConnection(FakeLauncher(1), 0, 1), INFO, timeout_s=300)

    def check_at(moment: float, num_held: int) -> None:
        nonlocal now
        now = moment
        life.check(Reply([], total_stats(())), num_held)

    for moment, num_held in ((1000, 1), (1100, 1), (1200, 0), (1350, 0), (1400, 1), (1500, 1), (1600, 1)):
        check_at(moment, num_held)
    with pytest.raises(WorkerDied, match="no step for 300 s"):
        check_at(1700, 1)


def test_closing_the_driver_ends_the_batch() -> None:
    """Guards a batch in the background of a chat that ends: nobody waits for rows that will not come."""
    launcher, found = FakeLauncher(2, step_s=0.01), list[Row]()
    driver = open_driver(launcher)
    stream = driver.open(OPTIONS)
    closer = threading.Thread(target=driver.close)
    with pytest.raises(EngineError, match="closed before the last row"):
        for rows in taken(stream, lines(10**5)):
            found += rows
            if found and not closer.ident:
                closer.start()
    closer.join()
    assert found and all(row.outcome.error_code is None for row in found)


def test_one_batch_at_a_time() -> None:
    """Guards the rows of a batch against another one on the same replicas."""
    with open_driver(FakeLauncher(1)) as driver:
        first, second = (driver.open(OPTIONS) for _ in range(2))
        with closing(first.finished(lines(100))) as finished:
            next(finished)
            with pytest.raises(EngineError, match="another batch"):
                next(second.finished(lines(1)))


def test_an_idle_replica_that_dies_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a chat that rests: a replica that died meanwhile is there for the next batch."""
    monkeypatch.setattr(supervisor_module, "IDLE_SECONDS", 0.01)

    def dies(connection: FakeConnection, method: str, after: bool) -> bool:
        return connection.life == 1 and connection.calls["exchange"] == 3

    with open_driver(FakeLauncher(1, dies=dies)) as driver:
        wait_until(lambda: driver.each()[0].deaths == 1 and driver.each()[0].state == "running")


def test_a_replica_that_hangs_while_it_loads_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a run that would work with half of its replicas for an hour."""
    monkeypatch.setattr(FakeLauncher, "least_load_s", 0.2)

    def info(number: int, life: int) -> ReplicaInfo:
        if (number, life) == (1, 1):
            hanging = next(one for one in launcher.connections if one.number == 1)
            assert hanging.killed.wait(20)
            raise WorkerDied("killed")
        return INFO

    launcher = FakeLauncher(2, info=info)
    with open_driver(launcher) as driver:
        wait_until(lambda: driver.each()[1].state == "running")
        assert driver.each()[1].problem.startswith("died: it still loaded its model after ")
        assert "the first one was ready after" in driver.each()[1].problem and not driver.each()[0].deaths
