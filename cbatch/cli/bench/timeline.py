"""The work of slots over time: as intervals and shares, and drawn in characters for a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import wrap

from cbatch.cli.bench.recorder import TOKEN_KINDS, RunRecord, TokenKind

KIND_LABELS: dict[TokenKind, str] = {
    "prefill": "prefill (prompt)",
    "decode": "decode (output)",
    "padding": "padding",
    "idle": "idle (past the end)",
}

MAX_GAP = 1 / 500
"""Intervals of the same work with a gap below this share of the whole time are drawn as one."""

MAX_LANES = 32
"""Slots that a terminal shows of each record."""

SYMBOLS = dict(zip(TOKEN_KINDS, "█━░·", strict=True))
ENTRY, EDGE = "▐", "│"


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


def draw_timeline(records: Mapping[str, RunRecord], width: int) -> list[str]:
    """Lines for a terminal of this width: under each title a lane for each slot, all on the same time scale."""
    if not records:
        return []
    number_width = max(len(str(record.slots - 1)) for record in records.values())
    columns = max(width - number_width - 3, 10)
    end = max(record.elapsed_s for record in records.values()) or 1.0
    lines = []
    for title, record in records.items():
        lines += wrap(f"{title}: {record.elapsed_s:.2f} s; {share_line(record)}", width)
        lanes = [[" "] * math.ceil(record.elapsed_s / end * columns) for _ in range(record.slots)]
        intervals = slot_intervals(record)
        for one in intervals:
            first, stop = round(one.start / end * columns), round(one.end / end * columns)
            lanes[one.slot][first:stop] = SYMBOLS[one.kind] * (stop - first)
        for one in intervals:
            if one.is_entry:
                lanes[one.slot][min(int(one.start / end * columns), len(lanes[one.slot]) - 1)] = ENTRY
        shown = enumerate(lanes[:MAX_LANES])
        lines += [f"{slot:>{number_width}} {EDGE}{''.join(lane)}{EDGE}" for slot, lane in shown]
        if record.slots > MAX_LANES:
            lines.append(f"{record.slots - MAX_LANES} of {record.slots} slots are not shown"[:width])
    middle, right = f"{end / 2:.2f}" if columns >= 30 else "", f"{end:.2f} s"
    axis = ("0".ljust(columns // 2) + middle).ljust(columns - len(right)) + right
    legend = "   ".join(
        [*(f"{SYMBOLS[kind]} {label}" for kind, label in KIND_LABELS.items()), f"{ENTRY} a request enters"]
    )
    return [*lines, " " * (number_width + 2) + axis, *wrap(legend, width)]
