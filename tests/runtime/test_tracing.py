"""Traces of steps: their content, their summary, and that they never harm a run."""

from __future__ import annotations

import io
import json
import queue
import re
import resource
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from cbatch.base.errors import ConfigError
from cbatch.base.outputs import TokenEvent
from cbatch.base.params import SamplingParams
from cbatch.base.request import Request
from cbatch.cli.main import run_command
from cbatch.engine.thread import EngineThread
from cbatch.runtime.tracing import StepTracer, span
from scripts.gpu.trace_summary import read_summary
from tests.support.faults import wait_until
from tests.support.rows import write_rows
from tests.support.tiny_models import make_engine, make_network

PHASES = ["schedule", "build", "forward", "sample", "fetch", "update"]


def generate(trace: StepTracer | None, count: int, meanwhile: Callable[[int], None] = lambda place: None) -> list[int]:
    """Tokens for one prompt on an engine thread with a trace; `meanwhile` is called with the number of each."""
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    tokens: list[int] = []

    def take(event: TokenEvent) -> None:
        meanwhile(len(tokens))
        assert event.token_id is not None
        tokens.append(event.token_id)
        events.put(event)

    with closing(EngineThread(make_engine(make_network("llama")), trace)) as engine_thread:
        engine_thread.submit(Request(prompt_ids=[5, 6, 7], params=SamplingParams(max_tokens=count)), take)
        while events.get(timeout=30).finish_reason is None:
            pass
    return tokens


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def spans_in(path: Path) -> list[dict[str, Any]]:
    events = json.loads(path.read_text())["traceEvents"]
    return sorted((event for event in events if event.get("cat") == "user_annotation"), key=lambda one: one["ts"])


def test_a_trace_shows_the_phases_of_each_step(tmp_path: Path) -> None:
    """Guards the purpose of a trace: the spans of the engine's thread, each phase once in each recorded step."""
    trace = StepTracer(tmp_path / "trace.json", warmup=2, steps=3)
    assert generate(trace, 9) == generate(None, 9)
    spans = spans_in(trace.path)
    assert len({(one["pid"], one["tid"]) for one in spans}) == 1
    steps = [one for one in spans if one["name"] == "step"]
    assert len(steps) == 3 and trace.num_steps >= 9
    for step in steps:
        end = step["ts"] + step["dur"]
        inside = [one for one in spans if step["ts"] < one["ts"] and one["ts"] + one["dur"] <= end]
        assert sorted(one["name"] for one in inside) == sorted(PHASES)
    assert trace.num_written == 3 and not trace.error
    summary = read_summary(trace.path, on_device=False)
    forward = sum(one["dur"] for one in spans if one["name"] == "forward")
    wall = steps[-1]["ts"] + steps[-1]["dur"] - steps[0]["ts"]
    assert summary.num_steps == 3 and not summary.on_device
    assert summary.seconds == pytest.approx(wall / 1e6)
    assert summary.idle_share == pytest.approx(1 - forward / wall)


def test_spans_cost_nothing_without_a_trace(tmp_path: Path) -> None:
    """Guards the cost of a step: no object is made for a span before a trace and after it."""
    nothing = span("schedule")
    assert span("forward") is nothing
    during: list[bool] = []
    generate(StepTracer(tmp_path / "t.json", warmup=2, steps=2), 9, lambda place: during.append(span("x") is nothing))
    assert during[0] and not all(during) and during[-1]
    assert span("forward") is nothing


def test_time_without_requests_is_not_idle_time(tmp_path: Path) -> None:
    """Guards a chat's idle share: time without requests does not count."""
    trace = StepTracer(tmp_path / "trace.json", warmup=0)
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    with closing(EngineThread(make_engine(make_network("llama")), trace)) as engine_thread:
        for _ in range(2):
            engine_thread.submit(Request(prompt_ids=[5], params=SamplingParams(max_tokens=1)), events.put)
            events.get(timeout=30)
            wait_until(lambda: engine_thread._idle_since is not None)  # until it waits
    summary = read_summary(trace.path, on_device=False)
    (wait, *_) = (one for one in spans_in(trace.path) if one["name"] == "wait")
    assert summary.waited_s == pytest.approx(wait["dur"] / 1e6, abs=1e-8)
    first, *_, last = (one for one in spans_in(trace.path) if one["name"] == "step")
    wall = last["ts"] + last["dur"] - first["ts"]
    assert summary.seconds == pytest.approx((wall - wait["dur"]) / 1e6, abs=1e-8)


def test_idle_share_of_a_gpu(tmp_path: Path) -> None:
    """Guards the share against overlapping work on several streams, and against spans of the host."""
    spans = [
        ("user_annotation", "step", 0.0, 500.0),
        ("user_annotation", "forward", 10.0, 400.0),
        ("gpu_user_annotation", "forward", 100.0, 900.0),
        ("cuda_runtime", "cudaGraphLaunch", 20.0, 900.0),
        ("kernel", "gemm", 100.0, 200.0),  # 100 .. 300
        ("kernel", "attention", 250.0, 100.0),  # .. 350, on another stream
        ("kernel", "norm", 260.0, 10.0),  # within both
        ("gpu_memcpy", "Memcpy DtoH", 500.0, 50.0),  # .. 550
        ("gpu_memset", "Memset", 550.0, 50.0),  # .. 600, right behind it
        ("user_annotation", "step", 520.0, 400.0),
        ("kernel", "gemm", 900.0, 200.0),  # .. 1100
    ]
    listed: list[dict[str, Any]] = [
        {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": duration, "pid": 0, "tid": 7, "args": {"a": 1}}
        for category, name, begin, duration in spans
    ]
    listed.append({"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 9e9})
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": listed}))
    summary = read_summary(path, on_device=True)
    assert summary.num_steps == 2 and summary.seconds == pytest.approx(1000e-6)
    assert summary.idle_share == pytest.approx(1 - (250 + 100 + 200) / 1000)


def test_a_disk_that_is_full_harms_no_run(tmp_path: Path) -> None:
    """Guards a run and an existing trace against a disk that becomes full."""
    path = tmp_path / "trace.json"
    path.write_text("older")
    trace = StepTracer(path, warmup=1, steps=3)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        tokens = generate(trace, 8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert tokens == generate(None, 8)
    assert not trace.num_written and "the disk may be full" in trace.error
    assert path.read_text() == "older" and names(tmp_path) == ["trace.json"]


def test_one_profiler_for_a_process(tmp_path: Path) -> None:
    """Guards against a crash of torch, whose profilers cannot be nested: the second one reports an error."""
    first = StepTracer(tmp_path / "first", warmup=3, steps=3)
    others: dict[int, StepTracer] = {place: StepTracer(tmp_path / f"beside{place}") for place in (0, 3)}
    generate(first, 12, lambda place: others[place].prepare() if place in others else None)
    assert first.num_written == 3 and not first.error
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        others[5] = StepTracer(tmp_path / "third")
        others[5].prepare()
    assert all("already in use" in other.error for other in others.values()) and names(tmp_path) == ["first"]


@pytest.mark.parametrize("name", ["none/trace.json", ".", "x" * 300, "a\0b"])
def test_a_path_that_cannot_be_written_is_refused_at_once(tmp_path: Path, name: str) -> None:
    """Guards against loading a model for a trace that cannot be written."""
    with pytest.raises(ConfigError, match="Cannot write the trace"):
        StepTracer(tmp_path / name)


@pytest.mark.slow
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Guards the option end to end on the demo model, in `cbatch chat` too, and against messages of the profiler."""

    def cbatch(*arguments: str) -> list[str]:
        assert run_command(list(arguments)) == 0
        lines = capfd.readouterr().err.splitlines()
        return [line for line in lines if "trace" in line or line[:8] != "cbatch: "]

    path, out = tmp_path / "trace.json", tmp_path / "out.jsonl"
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "Tell me a story."}])
    to_run = ["run", str(source), "-o", str(out), "--overwrite", "--max-tokens"]
    (line,) = cbatch(*to_run, "20", "--trace", str(path))
    assert json.loads(out.read_text())["usage"]["completion_tokens"] == 20
    steps = Counter(one["name"] for one in spans_in(path))["step"]
    assert 0 < steps < 20
    assert line == f"cbatch: trace of {steps} steps in {path}"
    (line,) = cbatch(*to_run, "3", "--trace", str(tmp_path / "none"))
    assert re.fullmatch(r"cbatch: no trace was written: recording begins after 8 steps, and there were \d steps", line)
    assert not (tmp_path / "none").exists()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Tell me a story.")))
    (line,) = cbatch("chat", "--max-tokens", "20", "--trace", str(path))
    assert line.startswith("cbatch: trace of ") and {*PHASES, "step"} <= {one["name"] for one in spans_in(path)}
