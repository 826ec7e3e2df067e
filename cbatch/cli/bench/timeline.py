"""The work of slots over time: as intervals and shares."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from cbatch.cli.bench.recorder import TOKEN_KINDS, RunRecord, TokenKind

KIND_LABELS: dict[TokenKind, str] = {
    "prefill": "prefill (prompt)",
    "decode": "decode (output)",
    "padding": "padding",
    "idle": "idle (past the end)",
}

MAX_GAP = 1 / 500
"""Intervals of the same work with a gap below this share of the whole time are drawn as one."""


@dataclass(slots=True)
class Interval:
    """A stretch of time, in seconds, in which a slot did one kind of work for one request.

    is_entry: whether the request enters the slot here
    """

    slot: int
    request: int
    kind: TokenKind
    start: float
    end: float
    is_entry: bool

    @property
    def seconds(self) -> float:
        return self.end - self.start


def slot_intervals(record: RunRecord) -> list[Interval]:
    """The work of all slots. Consecutive steps of one kind for one request are one interval."""
    found: list[Interval] = []
    latest: dict[int, Interval] = {}
    for step in record.steps:
        ends: dict[int, float] = {}
        for chunk, seconds in step.timed_chunks:
            start = ends.get(chunk.slot, step.start)
            ends[chunk.slot] = end = start + seconds
            before = latest.get(chunk.slot)
            is_entry = before is None or before.request != chunk.request
            is_close = before is not None and start - before.end <= record.elapsed_s * MAX_GAP
            if before and before.kind == chunk.kind and is_close and not is_entry:
                before.end = end
            else:
                latest[chunk.slot] = Interval(chunk.slot, chunk.request, chunk.kind, start, end, is_entry)
                found.append(latest[chunk.slot])
    return found


def time_shares(record: RunRecord) -> dict[str, float]:
    """Shares of all slots' time: useful, on padding, idle (past an end), and empty. They sum to 1."""
    spent = dict.fromkeys(TOKEN_KINDS, 0.0)
    for step in record.steps:
        for chunk, seconds in step.timed_chunks:
            spent[chunk.kind] += seconds
    busy = sum(spent.values())
    whole = max(record.slots * record.elapsed_s, busy) or 1.0
    found = {"useful": spent["prefill"] + spent["decode"], "padding": spent["padding"], "idle": spent["idle"]}
    return {name: seconds / whole for name, seconds in (found | {"empty": whole - busy}).items()}


def whole_percents(shares: Mapping[str, float]) -> dict[str, int]:
    """Shares as whole percents that sum to 100: those that lose most by rounding down are rounded up."""
    percents = {name: math.floor(share * 100) for name, share in shares.items()}
    by_loss = sorted(shares, key=lambda name: percents[name] - shares[name] * 100)
    for name in by_loss[: 100 - sum(percents.values())]:
        percents[name] += 1
    return percents


def share_line(record: RunRecord) -> str:
    return ", ".join(f"{name} {percent}%" for name, percent in whole_percents(time_shares(record)).items())
