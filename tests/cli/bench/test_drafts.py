"""Runs with drafts: what is recorded of steps in which a request gets several tokens, and the run without them."""

from __future__ import annotations

import json
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from cbatch.base.config import EngineConfig
from cbatch.base.params import SamplingParams
from cbatch.cli.bench import techniques
from cbatch.cli.bench.recorder import RunRecord, RunRecorder
from cbatch.cli.bench.results import run_metrics
from cbatch.cli.bench.strategies import ABLATIONS, STRATEGIES, Experiment
from cbatch.cli.bench.workload import Workload
from cbatch.cli.main import run_command
from tests.support.tiny_models import generate_alone, loaded, make_engine, make_network

ALL = STRATEGIES | ABLATIONS
WORK = Workload([[1, 2, 3], [4, 5, 6, 7, 0, 1], [2, 4]], [30, 12, 24], "by hand")


@cache
def network() -> Any:
    """Of so few tokens that its outputs repeat themselves."""
    return make_network("llama", vocab_size=8)


@cache
def expected() -> list[list[int]]:
    return generate_alone(network(), WORK.prompts, WORK.output_lengths)


def experiment(work: Workload = WORK) -> Experiment:
    config = EngineConfig(device="cpu", block_size=4, max_batch_tokens=64, speculate=4)
    return Experiment(loaded(network()), config, work, 3)


@cache
def measure(name: str) -> RunRecord:
    return experiment().measure(ALL[name])


@pytest.mark.parametrize("name", ["none", "static", "continuous", "ragged", "dynamic"])
def test_drafted_tokens_are_accounted_for(name: str) -> None:
    """Guards the counts: a chunk with a draft is output and no prompt, and it gives one token and those accepted."""
    record = measure(name)
    assert record.outputs == expected() and 0 < record.accepted < record.drafted
    assert record.tokens("prefill") == WORK.prompt_tokens
    chunks = [chunk for step in record.steps for chunk in step.chunks if chunk.kind == "decode"]
    for index, request in enumerate(record.requests):
        own = [chunk for chunk in chunks if chunk.request == index]
        assert all(chunk.tokens == 1 + chunk.drafted for chunk in own)
        assert 1 + sum(1 + chunk.accepted for chunk in own) >= request.wanted
        if name != "static":  # where requests run on past their ends
            assert 1 + sum(1 + chunk.accepted for chunk in own) == request.wanted == len(request.tokens)
    metrics = run_metrics(record, WORK)
    assert (metrics.drafted_tokens, metrics.accepted_tokens) == (record.drafted, record.accepted)


def test_the_ablation_drafts_nothing() -> None:
    """Guards `without speculation`: the same work and outputs in more steps, each with one token of a request."""
    record = measure("speculation")
    assert record.outputs == expected() and record.drafted == record.accepted == 0
    assert record.tokens("decode") == WORK.output_tokens - len(WORK.prompts)
    assert len(record.steps) > len(measure("continuous").steps)


def test_tokens_of_one_step_have_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards times on a clock that moves one second whenever it is read, and the figures of the engine itself."""
    ticks = count()
    monkeypatch.setattr("cbatch.engine.loop.clock", lambda: float(next(ticks)))
    engine = make_engine(network(), speculate=4)
    recorder = RunRecorder(engine, [30], 1, clock=lambda: float(next(ticks)))
    recorder.add(0, WORK.prompts[0], 30)
    recorder.run()
    record = recorder.finish()
    steps, request = len(record.steps), record.requests[0]
    assert steps == 30 - record.accepted < 30
    assert (request.first, request.last) == (4, 4 * steps)  # the clock is read four times a step
    assert run_metrics(record, Workload(WORK.prompts[:1], [30], "")).tpot_s.p50 == 4 * (steps - 1) / 29
    stats = engine.stats()
    assert (record.drafted, record.accepted) == (stats.num_drafted_tokens, stats.num_accepted_tokens)


def test_the_time_of_a_token_is_that_of_a_step() -> None:
    """Guards `--ablate kv-cache`: it times steps of one token each, so its engines may not draft."""
    with techniques._engine(experiment(), 100, 100) as engine:
        engine.add([1] * 64, SamplingParams(max_tokens=20, ignore_eos=True))
        steps = [engine.step() for _ in range(20)]
    assert [len(events) for events in steps] == [1] * 20


def test_the_command_switches_drafts_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards `--speculate` and `--ablate speculation` of the command, and their figures in JSON and in the tables."""
    network().save_pretrained(tmp_path)
    options = ["--speculate", "6", "--ablate", "speculation", "--strategies", "continuous", "--rounds", "1"]
    options += ["--requests", "3", "--input-len", "9:20", "--output-len", "60", "-m", str(tmp_path)]
    assert run_command(["bench", "--json", *options]) == 0
    found = {one["strategy"]: one for one in json.loads(capsys.readouterr().out)["strategies"]}
    with_drafts, without = found["continuous"], found["no-speculation"]
    assert 0 < with_drafts["accepted_tokens"] <= with_drafts["drafted_tokens"]
    assert without["drafted_tokens"] == without["accepted_tokens"] == 0 and without["equal_rows_share"] == 1.0
    assert with_drafts["steps"] < without["steps"] and without["title"] == "without speculation"
    assert run_command(["bench", "-q", *options]) == 0
    shown = capsys.readouterr().out
    assert f"{with_drafts['accepted_tokens']:,} of {with_drafts['drafted_tokens']:,}, " in shown
