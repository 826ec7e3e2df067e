"""The work of slots over time: as intervals and shares, and drawn in characters for a terminal."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
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
    is_entry: bool = False

    @property
    def seconds(self) -> float:
        return self.end - self.start


def side_by_side(records: Mapping[str, RunRecord]) -> dict[str, RunRecord]:
    """Those of the records, by title, whose timelines are drawn one below the other."""
    return {title: records[title] for title in ("static batches", "continuous") if title in records}


def chunk_intervals(record: RunRecord) -> Iterator[Interval]:
    """An interval for each chunk of each step. Chunks of one slot share the step's time by their tokens."""
    for step in record.steps:
        tokens: Counter[int] = Counter()
        for chunk in step.chunks:
            tokens[chunk.slot] += chunk.tokens
        starts = dict.fromkeys(tokens, step.start)
        for chunk in step.chunks:
            start = starts[chunk.slot]
            starts[chunk.slot] = end = start + (step.end - step.start) * chunk.tokens / tokens[chunk.slot]
            yield Interval(chunk.slot, chunk.request, chunk.kind, start, end)


def binned(record: RunRecord, bin_s: float, bins: int) -> Iterator[tuple[Interval, int, float]]:
    """Cuts the intervals of all chunks into bins of `bin_s` seconds: yields interval, bin and seconds in it."""
    for interval in chunk_intervals(record):
        for n in range(int(interval.start / bin_s), min(int(interval.end / bin_s), bins - 1) + 1):
            yield interval, n, min(interval.end, (n + 1) * bin_s) - max(interval.start, n * bin_s)


def slot_intervals(record: RunRecord) -> list[Interval]:
    """The work of all slots. Consecutive steps of one kind for one request are one interval."""
    found: list[Interval] = []
    latest: dict[int, Interval] = {}
    max_gap = record.elapsed_s * MAX_GAP
    for interval in chunk_intervals(record):
        before = latest.get(interval.slot)
        interval.is_entry = before is None or before.request != interval.request
        if before and not interval.is_entry and before.kind == interval.kind and interval.start - before.end <= max_gap:
            before.end = interval.end
        else:
            latest[interval.slot] = interval
            found.append(interval)
    return found


def time_shares(record: RunRecord) -> dict[str, float]:
    """Shares of all slots' time: useful, on padding, idle (past an end), and empty. They sum to 1."""
    seconds: dict[str, float] = dict.fromkeys(TOKEN_KINDS, 0.0)
    for interval in chunk_intervals(record):
        seconds[interval.kind] += interval.seconds
    busy = sum(seconds.values())
    whole = max(record.slots * record.elapsed_s, busy) or 1.0
    useful = seconds.pop("prefill") + seconds.pop("decode")
    return {name: part / whole for name, part in {"useful": useful, **seconds, "empty": whole - busy}.items()}


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
        lines += _wrapped([f"{title}: {record.elapsed_s:.2f} s", share_line(record)], "; ", width)
        symbols = _symbols(record, columns, end)
        last = math.ceil(record.elapsed_s / end * columns)
        for slot in range(min(record.slots, MAX_LANES)):
            lane = "".join(symbols.get((slot, n), " ") for n in range(last))
            lines.append(f"{slot:>{number_width}} {EDGE}{lane}{EDGE}")
        if record.slots > MAX_LANES:
            lines.append(f"{record.slots - MAX_LANES} of {record.slots} slots are not shown"[:width])
    middle, right = f"{end / 2:.2f}" if columns >= 30 else "", f"{end:.2f} s"
    axis = ("0".ljust(columns // 2) + middle).ljust(columns - len(right)) + right
    legend = [*(f"{SYMBOLS[kind]} {label}" for kind, label in KIND_LABELS.items()), f"{ENTRY} a request enters"]
    return [*lines, " " * (number_width + 2) + axis, *_wrapped(legend, "   ", width)]


def _symbols(record: RunRecord, columns: int, end: float) -> dict[tuple[int, int], str]:
    """For each slot and column, an entry or the kind that took most of the time, unless it was empty for longer."""
    bin_s = end / columns
    seconds: dict[tuple[int, int], dict[TokenKind, float]] = defaultdict(lambda: defaultdict(float))
    for interval, n, overlap in binned(record, bin_s, columns):
        seconds[interval.slot, n][interval.kind] += overlap
    found = {}
    for place, times in seconds.items():
        kind, most = max(times.items(), key=lambda item: item[1])
        if most > bin_s - sum(times.values()):
            found[place] = SYMBOLS[kind]
    entries = [one for one in slot_intervals(record) if one.is_entry]
    return found | {(one.slot, min(int(one.start / end * columns), columns - 1)): ENTRY for one in entries}


def _wrapped(texts: list[str], between: str, width: int) -> list[str]:
    """The texts joined into as few lines as the width allows."""
    lines = texts[:1]
    for text in texts[1:]:
        joined = lines[-1] + between + text
        if len(joined) <= width:
            lines[-1] = joined
        else:
            lines.append(text)
    return [line[:width] for line in lines]
