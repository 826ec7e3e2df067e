"""Traces of an engine's steps by torch's profiler, for Perfetto, and how long the device was idle in them.

Chrome's format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from cbatch.base.outputs import TokenEvent
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.runtime.spans import record_spans, span

STEP, FORWARD, WAIT = "step", "forward", "wait"
"""The spans that count: a call of `SteppingEngine.step`, the model in it, and waiting for requests."""

_DEVICE = "device"
_CATEGORIES = {"kernel": _DEVICE, "gpu_memcpy": _DEVICE, "gpu_memset": _DEVICE, "user_annotation": ""}
"""The events that count, by their category in torch's profiler."""


class StepTracer:
    """Records steps of an engine, and writes the trace after enough of them. If that fails, the steps go on.

    The profiler records the thread that makes the steps, and all work of the device.

    num_steps:  steps so far, recorded or not
    is_written: whether the trace is there
    error:      why there is none; empty if nothing has failed
    """

    def __init__(self, path: Path, *, warmup: int, steps: int) -> None:
        """Records `steps` steps after `warmup` others."""
        self.path, self.warmup, self.last = path, warmup, warmup + steps
        self.num_steps, self.is_written, self.error = 0, False, ""
        self._profiler: profile | None = None

    @contextmanager
    def around(self, engine: SteppingEngine) -> Iterator[None]:
        """Counts the engine's steps meanwhile. Use it on the thread that imported torch, or the profiler complains."""
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it logs every start and stop on stderr
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        with self._attempt():
            self._profiler = profile(activities=kinds)
            self._profiler.prepare_trace()
        make_step = engine.step

        def step() -> list[TokenEvent]:
            with self._step():
                return make_step()

        engine.step = step  # type: ignore[method-assign]
        try:
            yield
        finally:
            engine.step = make_step  # type: ignore[method-assign]

    @contextmanager
    def _step(self) -> Iterator[None]:
        if self.num_steps == self.warmup and self._profiler is not None:
            with self._attempt():
                self._profiler.start_trace()
                record_spans(record_function)
        try:
            with span(STEP):
                yield
        finally:
            self.num_steps += 1
            if self.num_steps == self.last and self._profiler is not None:
                record_spans(None)
                with self._attempt():
                    self._profiler.stop_trace()
                    self._profiler.export_chrome_trace(str(self.path))
                    self.is_written = True

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        """Whatever is raised within ends the recording, and the steps go on."""
        try:
            yield
        except Exception as error:
            record_spans(None)
            self._profiler, self.error = None, str(error) or repr(error)


Interval = tuple[float, float]
"""Begin and end, in µs."""


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """Times of the steps in a trace.

    num_steps:  calls of `SteppingEngine.step`
    seconds:    on a GPU from the begin of its first to the end of its last work, on a CPU from the first to the last
                step; without `waited_s`
    waited_s:   seconds without a request
    idle_share: share of `seconds` in which the GPU did nothing, or the CPU something other than the model; None if
                their work is not in the trace
    on_device:  whether the steps ran on a GPU
    """

    num_steps: int
    seconds: float
    waited_s: float
    idle_share: float | None
    on_device: bool


def read_summary(path: Path, *, on_device: bool) -> TraceSummary:
    """The summary of a trace written by torch's profiler.

    on_device: whether the steps ran on a GPU

    Raises OSError if the file cannot be read, and ValueError if it is incomplete.
    """
    with path.open(encoding="utf-8") as stream:
        events: list[tuple[str, Interval] | None] = json.load(stream, object_hook=_kept)
    found: dict[str, list[Interval]] = {}
    for name, interval in filter(None, events):
        found.setdefault(name, []).append(interval)
    steps, work = found.get(STEP, []), found.get(_DEVICE if on_device else FORWARD, [])
    whole = work if on_device and work else steps
    first = min((begin for begin, _ in whole), default=0.0)
    last = max((end for _, end in whole), default=0.0)
    waits = [(max(begin, first), min(end, last)) for begin, end in found.get(WAIT, [])]
    busy = union_length(work)
    waited = union_length([*work, *waits]) - busy
    length = last - first - waited
    return TraceSummary(
        num_steps=len(steps),
        seconds=length / 1e6,
        waited_s=waited / 1e6,
        idle_share=1 - busy / length if work and length > 0 else None,
        on_device=on_device,
    )


def union_length(intervals: Iterable[Interval]) -> float:
    """Length of the union of intervals: simultaneous work of several streams counts once."""
    total, until = 0.0, -math.inf
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def _kept(fields: dict[str, Any]) -> Any:
    """The name and interval of a span; all that is kept of a JSON object of a trace, which may have a million.

    Work of the device has the name `device`.
    """
    if "traceEvents" in fields:
        return fields["traceEvents"]
    name = _CATEGORIES.get(fields.get("cat", "")) if fields.get("ph") == "X" else None
    if name is None:
        return None
    return name or fields["name"], (fields["ts"], fields["ts"] + fields["dur"])
