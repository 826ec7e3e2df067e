"""The engines of a chat's batches: its own engine, and replicas beside it from the first batch on."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cbatch.api import Engine
from cbatch.base.config import EngineConfig
from cbatch.base.errors import ModelError
from cbatch.cli.chat.background_run import BackgroundRun, BatchEngines
from cbatch.cli.common.replica_options import ReplicaOptions
from cbatch.replicas.driver import ReplicaDriver
from cbatch.replicas.local import Place
from tests.support.chat_harness import ChatHarness
from tests.support.faults import TIMEOUT_S, wait_until
from tests.support.in_process_replicas import InProcessLauncher
from tests.support.rows import read_rows, write_rows


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(EngineConfig(device="cpu", dtype="float32", max_seqs=4)) as made:
        yield made


@pytest.fixture
def launched(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[InProcessLauncher]:
    """The launchers of the other replicas, of which there is one. No place of the machine is taken."""
    made: list[InProcessLauncher] = []

    def launch(engines: BatchEngines) -> InProcessLauncher:
        made.append(InProcessLauncher(engine, 1))
        return made[-1]

    monkeypatch.setattr(BatchEngines, "launch_others", launch)
    monkeypatch.setattr("cbatch.replicas.local.find_places", lambda config, number: [Place("cpu")] * number)
    return made


def test_a_batch_runs_on_all_and_replies_go_on(
    engine: Engine, launched: list[InProcessLauncher], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards /run with replicas: the chat's engine is one of them, and the others start once."""
    harness = ChatHarness(engine)
    controller = harness.make()
    engines = BatchEngines(EngineConfig(), ReplicaOptions(2))
    background = BackgroundRun(engines)
    assert harness.ask(controller, "What is the capital of France?") and not launched
    rows = [{"prompt": f"Count to {n}.", "max_tokens": 5 + n % 9, "ignore_eos": True} for n in range(60)]
    source = write_rows(tmp_path / "in.jsonl", rows)
    for name in ("a", "b"):
        background.start(engine, f"{source} -o {tmp_path / name}.jsonl --stats {tmp_path / name}.json")
        assert harness.ask(controller, "Name a fruit.")
        wait_until(lambda: not background.is_running, TIMEOUT_S)
        stats = json.loads((tmp_path / f"{name}.json").read_text())
        assert [one["name"] for one in stats["replicas"]] == ["replica 1", "this chat"]
        assert all(one["rows"] > 0 for one in stats["replicas"]) and stats["rows"] == 60
    assert len(launched) == 1 and launched[0].lives == {0: 1}
    assert read_rows(tmp_path / "a.jsonl") == read_rows(tmp_path / "b.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cbatch.cli.chat.background_run.CLOSE_SECONDS", TIMEOUT_S)
        background.start(engine, f"{source} -o {tmp_path / 'c.jsonl'} --max-tokens 500")
        background.close()
    assert launched[0].is_closed
    assert harness.ask(controller, "What is 2 plus 3?")
    harness.wait_idle()
    assert engine.failure is None and engine.core.scheduler.pool.num_used == 0
    assert "is done" in capsys.readouterr().err


def test_the_engine_of_the_chat_takes_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the cores and the memory of the other replicas, and their sequence limits, which must be its own."""
    share = Place("cpu", (1,), "12345", {"OMP_NUM_THREADS": "1"})
    monkeypatch.setattr("cbatch.replicas.local.find_places", lambda config, number: [share] * number)
    bound: list[Any] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: bound.append((pid, cores)), raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "9")
    engines = BatchEngines(EngineConfig(), ReplicaOptions(3))
    assert engines.config == EngineConfig(device="cpu", kv_cache_memory="12345")
    assert bound == [(0, (1,))] and os.environ["OMP_NUM_THREADS"] == "1"
    others = engines.launch_others()
    assert others is not None and others.num_replicas == 2
    assert BatchEngines(EngineConfig(), ReplicaOptions(1, ray="auto")).launch_others() is None


@pytest.mark.parametrize(("target", "of_others"), [("auto", None), (20.0, 20.0), (None, None)])
def test_only_the_engine_of_the_chat_keeps_its_steps_short(
    engine: Engine, launched: list[InProcessLauncher], target: Any, of_others: Any
) -> None:
    """Guards the speed of the others, which give no replies; a time that the user asks for holds for all."""
    engines = BatchEngines(EngineConfig(target_step_ms=target), ReplicaOptions(2))
    assert engines.config.target_step_ms == target
    engines.driver(engine)
    wait_until(lambda: launched[0].configs)
    engines.close()
    assert [config.target_step_ms for config in launched[0].configs] == [of_others]


def test_replicas_that_could_not_be_started_are_tried_again(
    engine: Engine, launched: list[InProcessLauncher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards all later batches of a chat against a model that was out of reach, or out of memory, once."""

    may_fail = threading.Event()

    def fail(*_: object) -> None:
        may_fail.wait()
        raise ModelError("There is no memory for it now.")

    engines = BatchEngines(EngineConfig(), ReplicaOptions(2))
    with monkeypatch.context() as patch:
        patch.setattr(InProcessLauncher, "start", fail)
        failed = engines.driver(engine)
        assert isinstance(failed, ReplicaDriver)
        may_fail.set()
        wait_until(lambda: failed.has_failed)
    driver = engines.driver(engine)
    wait_until(lambda: all(one.state == "running" for one in driver.each()))
    assert engines.driver(engine) is driver and [launcher.is_closed for launcher in launched] == [True, False]
    engines.close()
