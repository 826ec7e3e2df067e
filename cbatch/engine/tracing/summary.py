"""What a trace in Chrome's format says of the steps in it: how long the device had nothing to do.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

STEP, FORWARD, WAIT = "step", "forward", "wait"
"""Spans that are counted here: a call of the engine's step, the model in it, and waiting for requests."""

_DEVICE = "device"
_CATEGORIES = {"kernel": _DEVICE, "gpu_memcpy": _DEVICE, "gpu_memset": _DEVICE, "user_annotation": ""}
"""Events that matter, by the name that torch's profiler gives their kind."""


class Interval(NamedTuple):
    """A time from `begin` to `end`, in µs."""

    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """What came out of some steps.

    num_steps:  calls of the engine's step
    seconds:    on a GPU from its first work to the end of its last, on a CPU from the first step to the end of the
                last; the time in which there was no request is not in it
    waited_s:   that time
    idle_share: of `seconds`, in which the GPU did nothing, or the CPU something else than the model; None where
                their work is not in the trace
    on_device:  whether it is about a GPU
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
    """The summary of a trace that torch's profiler has written.

    on_device: whether the steps ran on a GPU
    Raises OSError where it cannot be read, and ValueError where it is not whole.
    """
    with path.open(encoding="utf-8") as stream:
        return summarize(json.load(stream, object_hook=_kept), on_device=on_device)


def summarize(events: Iterable[tuple[str, Interval] | None], *, on_device: bool) -> TraceSummary:
    """The summary of the spans of a trace by their names, and of the device's work, which is called `device`."""
    found: dict[str, list[Interval]] = {name: [] for name in (STEP, FORWARD, WAIT, _DEVICE)}
    for name, interval in filter(None, events):
        if name in found:
            found[name].append(interval)
    work = found[_DEVICE if on_device else FORWARD]
    whole = work if on_device and work else found[STEP]
    first = min((interval.begin for interval in whole), default=0.0)
    last = max((interval.end for interval in whole), default=0.0)
    waits = [Interval(max(begin, first), min(end, last)) for begin, end in found[WAIT]]
    busy = union_length(work)
    waited = union_length([*work, *waits]) - busy
    length = last - first - waited
    return TraceSummary(
        num_steps=len(found[STEP]),
        seconds=length / 1e6,
        waited_s=waited / 1e6,
        idle_share=1 - busy / length if work and length > 0 else None,
        on_device=on_device,
    )


def union_length(intervals: Iterable[Interval]) -> float:
    """How long at least one of the intervals lasts: what several streams do at once counts once."""
    total, until = 0.0, -math.inf
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def _kept(fields: dict[str, Any]) -> Any:
    """What is kept of a JSON object while a trace is read, which may have a million of them."""
    if "traceEvents" in fields:
        return fields["traceEvents"]
    name = _CATEGORIES.get(fields.get("cat", "")) if fields.get("ph") == "X" else None
    if name is None:
        return None
    return name or fields["name"], Interval(fields["ts"], fields["ts"] + fields["dur"])
