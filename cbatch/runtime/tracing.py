"""Traces of an engine's steps by torch's profiler, for Perfetto or chrome://tracing, and how long the device was idle.

Chrome's format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbatch.base.errors import ConfigError, EngineError

if TYPE_CHECKING:
    import torch.profiler

WARMUP_STEPS = 8
"""Steps before the first recorded one: they compile kernels."""

MAX_STEPS = 64
"""Recorded steps. A step of a large model has thousands of events."""

_profiler_is_taken = threading.Lock()
"""torch has one profiler for the process, and may crash if two are nested."""

STEP, FORWARD, WAIT = "step", "forward", "wait"
"""The spans that count: a call of `SteppingEngine.step`, the model in it, and waiting for requests."""

_DEVICE = "device"
_CATEGORIES = {"kernel": _DEVICE, "gpu_memcpy": _DEVICE, "gpu_memset": _DEVICE, "user_annotation": ""}
"""The events that count, by their category in torch's profiler."""

OpenSpan = Callable[[str], AbstractContextManager[object]]

_NOTHING = nullcontext()
_open: OpenSpan | None = None


def span(name: str) -> AbstractContextManager[object]:
    """A context that a trace shows under this name, on the current thread."""
    return _NOTHING if _open is None else _open(name)


def record_spans(open_span: OpenSpan | None) -> None:
    """Makes `span` use `open_span` on all threads from now on; None turns spans off."""
    global _open
    _open = open_span


class StepTracer:
    """Records steps of an `EngineThread`, and writes the trace after enough of them or at the end.

    The profiler records the thread that starts it, and all work of the device. If it fails, the recording ends, and
    the steps go on.

    path:      file of the trace; an existing one is replaced
    num_steps: steps so far, recorded or not
    summary:   of the written trace; None before
    error:     why no trace will be written; empty if nothing has failed
    """

    def __init__(self, path: str | Path, *, warmup: int = WARMUP_STEPS, steps: int = MAX_STEPS) -> None:
        """Records `steps` steps after `warmup` others. Raises ConfigError if the file cannot be written."""
        self.path = Path(path)
        self.warmup = warmup
        self.num_steps = 0
        self.summary: TraceSummary | None = None
        self.error = ""
        self._last = warmup + steps
        self._profiler: torch.profiler.profile | None = None
        self._on_device = False
        try:
            self._target = Path(os.path.realpath(path))
            self._temporary = self._target.with_name(f".cbatch-trace-{os.getpid()}-{id(self):x}")
            if self._target.exists() and not self._target.is_file():
                raise ConfigError(f"Cannot write the trace {path}: it must be a regular file.")
            self._temporary.touch()
            self._temporary.unlink()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise ConfigError(f"Cannot write the trace {path}: {reason}.") from error

    def prepare(self, *, on_device: bool = False) -> None:
        """Sets up the profiler. Call it on the thread that imported torch, or the profiler complains on stderr.

        on_device: whether the steps run on a GPU
        """
        with self._attempt():
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it logs every start and stop on stderr
            from torch.autograd import profiler
            from torch.profiler import ProfilerActivity, profile

            made = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])])
            if getattr(profiler, "_is_profiler_enabled", False) or not _profiler_is_taken.acquire(blocking=False):
                raise EngineError("torch's profiler is already in use")
            self._profiler, self._on_device = made, on_device
            made.prepare_trace()

    @contextmanager
    def step(self) -> Iterator[None]:
        """A context for one step. All steps belong to the same thread."""
        if self.num_steps == self.warmup and self._profiler is not None:
            with self._attempt():
                from torch.profiler import record_function

                self._profiler.start_trace()
                record_spans(record_function)
        try:
            with span(STEP):
                yield
        finally:
            self.num_steps += 1
            if self.num_steps == self._last:
                self.finish()

    def finish(self) -> None:
        """Ends a recording and writes it, if that has not been done; on the thread of the steps."""
        if (profiler := self._profiler) is not None:
            with self._attempt():
                was_recording = self.num_steps > self.warmup
                if not was_recording:
                    profiler.start_trace()  # a prepared profiler can only stop after it was started
                profiler.stop_trace()
                self._release_profiler()
                if was_recording:
                    self._write(profiler)

    def _write(self, profiler: torch.profiler.profile) -> None:
        try:
            profiler.export_chrome_trace(str(self._temporary))
            if not self._temporary.exists():  # the profiler fails silently
                self._temporary.touch()  # raises the reason, if it persists
                raise ValueError("it is incomplete; the disk may be full")
            summary = read_summary(self._temporary, on_device=self._on_device)
            self._temporary.replace(self._target)
            self.summary = summary
        finally:
            self._temporary.unlink(missing_ok=True)
            self._temporary.with_name(f"{self._temporary.name}.tmp").unlink(missing_ok=True)  # the profiler's

    def _release_profiler(self) -> None:
        if self._profiler is not None:
            self._profiler = None
            record_spans(None)
            _profiler_is_taken.release()

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        """Whatever is raised within ends the recording, and the steps go on."""
        try:
            yield
        except Exception as error:
            self._release_profiler()
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self.error = f"Cannot write the trace {self.path}: {reason or repr(error)}."


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

    def __str__(self) -> str:
        waited = f", and {self.waited_s:.2f} s without a request" if self.waited_s >= 0.005 else ""
        if self.idle_share is None:
            return f"{self.seconds:.2f} s{waited}, but nothing of what the device did in them"
        if self.on_device:
            return f"the device was idle {self.idle_share:.1%} of {self.seconds:.2f} s{waited}"
        return f"{self.idle_share:.1%} of {self.seconds:.2f} s outside the model{waited}"


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
