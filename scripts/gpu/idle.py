"""How long a device waits for the host: by events around what each step gives it, and between the kernels of a step.

A step of a large model is a few hundred kernels, and a captured one leaves a microsecond between each two of them. An
idle share that counts such gaps says nothing about the host, which has nothing to do with them. So the two are measured
apart: the first by events before and after the work of a step, the second by the profiler.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch

from cbatch.runtime.spans import record_spans
from scripts.gpu.step_trace import TraceSummary

LAUNCHES = ("forward", "sample")
"""The spans of a step in which the host gives the device something to do; a step begins with the first."""


class Event(Protocol):
    """A point in the queue of a device."""

    def record(self) -> object: ...

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds from when the device reached this one until it reached `end`."""
        ...


class HostEvent:
    """The same on a CPU, which has done what came before as soon as it gets to the next."""

    def __init__(self) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: HostEvent) -> float:
        return 1e3 * (end.at - self.at)


def event_maker(device: torch.device) -> Callable[[], Event]:
    """Makes events with times. Those of a GPU are recorded on the current stream of the thread that records them."""
    if device.type == "cuda":
        return lambda: torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return HostEvent


@dataclass(frozen=True, slots=True)
class Idle:
    """Idle time of a device in steps.

    num_steps: steps, from the first work of the first to the last work of the last
    seconds:   their time, as the device saw it
    share:     share of it in which everything that it was given was done
    """

    num_steps: int
    seconds: float
    share: float


class StepEvents:
    """Events before and after the work of steps: time between the end of one and the begin of the next is idle time.

    An event takes its time when the device gets to it. So the begin of work that is queued behind other work comes
    right after the end of that, and the begin of work that the host was late with comes when the host gives it.
    """

    def __init__(self, make_event: Callable[[], Event], skip: int = 0) -> None:
        """skip: steps at the beginning that do not count"""
        self._make_event = make_event
        self._skip = skip
        self._num_steps = 0
        self._work: list[tuple[int, Event, Event]] = []
        """For each launch: the number of its step, and the events before and after it."""

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """All steps of the process within this context are recorded; only one engine may make some."""
        record_spans(self._open)
        try:
            yield
        finally:
            record_spans(None)

    def _open(self, name: str) -> AbstractContextManager[object]:
        if name not in LAUNCHES:
            return nullcontext()
        self._num_steps += name == LAUNCHES[0]
        return self._around() if self._num_steps > self._skip else nullcontext()

    @contextmanager
    def _around(self) -> Iterator[None]:
        begin, end = self._make_event(), self._make_event()
        begin.record()
        try:
            yield
        finally:
            end.record()
            self._work.append((self._num_steps, begin, end))

    def idle(self, last: int = 0) -> Idle | None:
        """Idle time, once the device has done everything; None if there were no two steps.

        last: steps at the end that do not count
        """
        work = [(begin, end) for step, begin, end in self._work if step <= self._num_steps - last]
        num_steps = self._num_steps - last - self._skip
        if num_steps < 2:
            return None
        gaps = sum(max(end.elapsed_time(begin), 0.0) for (_, end), (begin, _) in pairwise(work))
        whole = work[0][0].elapsed_time(work[-1][1])
        return Idle(num_steps, whole / 1e3, gaps / whole if whole > 0 else 0.0)


def gap_share(idle: Idle, trace: TraceSummary) -> float | None:
    """Share of the time of steps in which none of their kernels ran although the device had been given all of them.

    It is what is left beside idle time and kernels. Steps take longer while they are traced, but their kernels do not,
    so only these come from the trace. None if the trace has no kernels, as on a CPU.
    """
    if trace.idle_share is None or not trace.on_device or not trace.num_steps:
        return None
    busy = (1 - trace.idle_share) * trace.seconds / trace.num_steps
    return max(0.0, 1 - idle.share - busy * idle.num_steps / idle.seconds)
