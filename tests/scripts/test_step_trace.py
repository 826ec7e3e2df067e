"""Traces of steps: their content and their summary."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest

from cbatch.base.outputs import TokenEvent
from cbatch.base.params import SamplingParams
from cbatch.base.request import Request
from cbatch.engine.thread import EngineThread
from cbatch.runtime.spans import span
from scripts.gpu.step_trace import StepTracer, read_summary
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

    engine = make_engine(make_network("llama"))
    with trace.around(engine) if trace is not None else nullcontext(), closing(EngineThread(engine)) as engine_thread:
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
    assert trace.is_written and not trace.error
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


def test_idle_share_of_a_gpu(tmp_path: Path) -> None:
    """Guards the share against overlapping work on several streams, spans of the host, and time without requests."""
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
        ("user_annotation", "wait", 550.0, 250.0),  # for requests, of which 200 are without work
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
    assert summary.num_steps == 2 and summary.waited_s == pytest.approx(200e-6)
    assert summary.seconds == pytest.approx(800e-6)
    assert summary.idle_share == pytest.approx(1 - (250 + 100 + 200) / 800)
