"""What the slots of an engine did over time: as spans and shares, and drawn in characters for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cbatch.cli.bench.recorder import RecordedStep, RunRecord, TokenKind

KINDS: tuple[TokenKind, ...] = ("prefill", "decode", "padding", "idle")
KIND_LABELS: dict[TokenKind, str] = {
    "prefill": "prefill (prompt)",
    "decode": "decode (output)",
    "padding": "padding",
    "idle": "idle (past a row's end)",
}
"""What people read for a kind of tokens."""

SHARES = ("useful", "padding", "idle", "empty")
MOST_LANES = 32
CLOSE = 1 / 500
"""Of the whole time: what lies closer together than this is one span."""

COLOURS: dict[TokenKind, int] = {"prefill": 34, "decode": 36, "padding": 33, "idle": 31}


@dataclass(frozen=True, slots=True)
class Symbols:
    """The characters for each kind of tokens, and for the place where a row enters a slot."""

    prefill: str
    decode: str
    padding: str
    idle: str
    enters: str
    edge: str

    def of(self, kind: TokenKind) -> str:
        return str(getattr(self, kind))


BLOCKS = Symbols(prefill="█", decode="━", padding="░", idle="·", enters="▐", edge="│")
PLAIN = Symbols(prefill="#", decode="=", padding="x", idle=".", enters="[", edge="|")


@dataclass(slots=True)
class Interval:
    """A stretch of time, in seconds, in which a slot did one kind of work for one row."""

    slot: int
    row: int
    kind: TokenKind
    start: float
    end: float
    enters: bool


def chunk_intervals(step: RecordedStep) -> Iterator[tuple[int, int, TokenKind, float, float]]:
    """Slot, row, kind, start and end of each part of a step; parts of one slot share its time by their tokens."""
    tokens: dict[int, int] = {}
    for chunk in step.chunks:
        tokens[chunk.slot] = tokens.get(chunk.slot, 0) + chunk.tokens
    starts = dict.fromkeys(tokens, step.start)
    for chunk in step.chunks:
        start = starts[chunk.slot]
        starts[chunk.slot] = end = start + (step.end - step.start) * chunk.tokens / tokens[chunk.slot]
        yield chunk.slot, chunk.row, chunk.kind, start, end


def slot_intervals(record: RunRecord) -> list[Interval]:
    """The work of all slots; steps of the same kind for the same row are one span. A row enters a slot once."""
    found: list[Interval] = []
    latest: dict[int, Interval] = {}
    gap = record.elapsed_s * CLOSE
    for step in record.steps:
        for slot, row, kind, start, end in chunk_intervals(step):
            before = latest.get(slot)
            same_row = before is not None and before.row == row
            if before is not None and same_row and before.kind == kind and start - before.end <= gap:
                before.end = end
                continue
            latest[slot] = Interval(slot, row, kind, start, end, enters=not same_row)
            found.append(latest[slot])
    return found


def time_shares(record: RunRecord) -> dict[str, float]:
    """Of the time of all slots: spent on tokens that were wanted, on padding, past a row's end, on nothing; sum 1."""
    seconds = dict.fromkeys(KINDS, 0.0)
    for step in record.steps:
        for _, _, kind, start, end in chunk_intervals(step):
            seconds[kind] += end - start
    busy = sum(seconds.values())
    whole = max(record.slots * record.elapsed_s, busy) or 1.0
    useful = seconds["prefill"] + seconds["decode"]
    chunks = (useful, seconds["padding"], seconds["idle"], whole - busy)
    return dict(zip(SHARES, (chunk / whole for chunk in chunks), strict=True))


def whole_percents(chunks: Mapping[str, float]) -> dict[str, int]:
    """Shares in whole percents that add up to 100: who loses most by being cut off is rounded up."""
    found = {name: math.floor(share * 100) for name, share in chunks.items()}
    by_loss = sorted(chunks, key=lambda name: found[name] - chunks[name] * 100)
    for name in by_loss[: 100 - sum(found.values())]:
        found[name] += 1
    return found


def share_line(record: RunRecord) -> str:
    return ", ".join(f"{name} {percent}%" for name, percent in whole_percents(time_shares(record)).items())


def timeline(
    records: Mapping[str, RunRecord], width: int, *, plain: bool = False, colour: bool = False, lanes: int = MOST_LANES
) -> list[str]:
    """Lines for a terminal: under each title a lane for each slot, all on the same scale of time.

    width:  columns of the terminal
    plain:  ASCII only
    colour: with colour codes
    lanes:  most slots to draw of each trace
    """
    if not records:
        return []
    marks = PLAIN if plain else BLOCKS
    number_width = max(len(str(record.slots - 1)) for record in records.values())
    columns = max(width - number_width - 3, 10)
    end = max(record.elapsed_s for record in records.values()) or 1.0
    lines = []
    for title, record in records.items():
        lines += _wrapped([f"{title}: {record.elapsed_s:.2f} s", share_line(record)], "; ", width)
        chosen = _dominant(record, columns, end)
        enters = {(span.slot, _column(span.start, columns, end)) for span in slot_intervals(record) if span.enters}
        last = math.ceil(record.elapsed_s / end * columns)
        for slot in range(min(record.slots, lanes)):
            cells = [_cell(chosen.get((slot, n)), (slot, n) in enters, marks, colour) for n in range(last)]
            lane = "".join(cells) + marks.edge + " " * (columns - last)
            lines.append(f"{slot:>{number_width}} {marks.edge}{lane}".rstrip())
        if record.slots > lanes:
            lines.append(f"{record.slots - lanes} of {record.slots} slots are not shown"[:width])
    legend = [f"{marks.of(kind)} {KIND_LABELS[kind]}" for kind in KINDS] + [f"{marks.enters} a row enters"]
    return [*lines, _axis(number_width + 2, columns, end), *_wrapped(legend, "   ", width)]


def _column(moment: float, columns: int, end: float) -> int:
    return min(int(moment / end * columns), columns - 1)


def _dominant(record: RunRecord, columns: int, end: float) -> dict[tuple[int, int], TokenKind]:
    """For each slot and column what took most of its time, nothing included."""
    bin_s = end / columns
    seconds: dict[tuple[int, int], dict[TokenKind, float]] = {}
    for step in record.steps:
        for slot, _, kind, start, stop in chunk_intervals(step):
            for n in range(_column(start, columns, end), _column(stop, columns, end) + 1):
                overlap = min(stop, (n + 1) * bin_s) - max(start, n * bin_s)
                cell = seconds.setdefault((slot, n), {})
                cell[kind] = cell.get(kind, 0.0) + overlap
    chosen: dict[tuple[int, int], TokenKind] = {}
    for place, cell in seconds.items():
        kind = max(cell, key=lambda kind: cell[kind])
        if cell[kind] > bin_s - sum(cell.values()):
            chosen[place] = kind
    return chosen


def _cell(kind: TokenKind | None, enters: bool, marks: Symbols, colour: bool) -> str:
    mark = marks.enters if enters else marks.of(kind) if kind else " "
    if not colour or kind is None:
        return mark
    return f"\x1b[{COLOURS[kind]}m{mark}\x1b[0m"


def _axis(indent: int, columns: int, end: float) -> str:
    """A line with the time in seconds at its beginning, in its middle where there is room, and at its end."""
    middle, last = f"{end / 2:.2f}" if columns >= 30 else "", f"{end:.2f} s"
    line = "0".ljust(columns // 2) + middle
    return " " * indent + line.ljust(columns - len(last)) + last


def _wrapped(texts: list[str], between: str, width: int) -> list[str]:
    """The texts one after the other, in as many lines as the width asks for."""
    lines = texts[:1]
    for text in texts[1:]:
        joined = lines[-1] + between + text
        if len(joined) <= width:
            lines[-1] = joined
        else:
            lines.append(text)
    return [line[:width] for line in lines]
