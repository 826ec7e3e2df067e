"""The share of slots that are busy over time, by kind of work, as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cbatch.cli.bench.recorder import RunRecord, TokenKind
from cbatch.cli.bench.render import style, timeline, units

BINS = 200
"""Points in time across the picture; each is a mean over its stretch."""

SMALLEST_STEP = 0.004
"""Share of the slots below which nobody sees a difference."""

MOST_TIMES = 4.0
"""The picture ends with the longest run that takes at most this many times as long as the shortest."""

TOP, BOTTOM, LEFT, RIGHT = 1.2, 0.45, 0.6, 0.2
PANEL, PEER_PANEL, GAP = 0.62, 0.16, 0.34


def visible_end(seconds: Sequence[float]) -> float:
    """Where the time axis ends: much longer runs are cut, for they would leave no space for the others.

    The two shortest runs are never cut.
    """
    ordered = sorted(seconds) or [0.0]
    least = ordered[min(1, len(ordered) - 1)]
    return max([least, *(time for time in ordered if time <= MOST_TIMES * ordered[0])]) or 1.0


def plot_utilisation(records: Mapping[str, RunRecord], peers: Mapping[str, float] | None = None) -> Figure:
    """A panel for each record.  peers: seconds by name, of runs whose slots are not known"""
    peers = peers or {}
    heights = [PANEL] * len(records) + [PEER_PANEL] * len(peers)
    figure = style.new_figure(
        TOP + BOTTOM + sum(heights) + GAP * (len(heights) - 1),
        "How much of the engine does useful work",
        "Share of the slots that compute, over time; blue is useful work.",
    )
    style.add_legend(figure, style.KINDS_BY_LABEL | ({"only the time is known": style.PEER} if peers else {}))
    times = {title: record.elapsed_s for title, record in records.items()} | dict(peers)
    end = visible_end(list(times.values()))
    top = TOP
    for (title, seconds), height in zip(times.items(), heights, strict=True):
        if title == style.SUBJECT:
            style.add_band(figure, top - 0.26, height + 0.33)
        axes = style.add_axes(figure, LEFT, top, style.WIDTH - LEFT - RIGHT, height)
        if title in records:
            _draw_shares(axes, records[title], end)
        else:
            axes.barh(0.5, min(seconds, end), height=1, color=style.PEER)
            axes.set_yticks([])
        axes.set_title(title, weight="bold" if title == style.SUBJECT else "normal", pad=4)
        axes.set_title(_summary(records.get(title), seconds, end), loc="right", pad=4)
        axes.set_ylim(0, 1)
        axes.set_xlim(0, end)
        axes.tick_params(labelbottom=False)
        if seconds > end:
            _draw_break(axes)
        top += height + GAP
    axes.tick_params(labelbottom=True)
    axes.set_xlabel("seconds")
    return figure


def _summary(record: RunRecord | None, seconds: float, end: float) -> str:
    words = units.duration(seconds)
    if record is not None:
        words = f"useful {timeline.whole_percents(timeline.time_shares(record))['useful']}% of {words}"
    return f"{words}, of which {units.duration(end)} are shown" if seconds > end else words


def _draw_shares(axes: Axes, record: RunRecord, end: float) -> None:
    bins = max(round(BINS * record.elapsed_s / end), 20)
    edges, busy = utilisation(record, bins)
    shown = min(bins, math.ceil(bins * end / (record.elapsed_s or 1.0)))
    axes.barh(0.5, min(record.elapsed_s, end), height=1, color=style.EMPTY_SLOT)
    floor = [0.0] * shown
    for kind in timeline.KINDS:
        shares = busy[kind][:shown]
        if any(shares):
            top = [below + part for below, part in zip(floor, shares, strict=True)]
            places, lows, highs = without_repeats(edges[: shown + 1], floor, top)
            axes.stairs(highs, places, baseline=lows, fill=True, color=style.KIND_COLOURS[kind], linewidth=0)
            floor = top
    axes.set_yticks([0, 0.5, 1], ["0", "50%", "100%"])
    axes.grid(axis="y")


def without_repeats(
    edges: Sequence[float], lows: Sequence[float], highs: Sequence[float]
) -> tuple[list[float], list[float], list[float]]:
    """The same stairs with fewer steps: one that nearly repeats the one before it becomes part of that one."""
    kept = [0]
    for n in range(1, len(lows)):
        if max(abs(lows[n] - lows[kept[-1]]), abs(highs[n] - highs[kept[-1]])) > SMALLEST_STEP:
            kept.append(n)
    return [*(edges[n] for n in kept), edges[-1]], [lows[n] for n in kept], [highs[n] for n in kept]


def _draw_break(axes: Axes) -> None:
    """Two slanted gaps near the right end of a run that goes on beyond it."""
    for left in (0.972, 0.984):
        axes.plot(
            [left, left + 0.008],
            [-0.12, 1.12],
            transform=axes.transAxes,
            color=style.BACKGROUND,
            linewidth=3,
            clip_on=False,
            solid_capstyle="butt",
        )


def utilisation(record: RunRecord, bins: int) -> tuple[list[float], dict[TokenKind, list[float]]]:
    """The edges of equal stretches of a run, in seconds, and the mean share of slots in each of them by kind."""
    width = record.elapsed_s / bins or 1.0
    busy: dict[TokenKind, list[float]] = {kind: [0.0] * bins for kind in timeline.KINDS}
    for interval, n, overlap in timeline.binned(record, width, bins):
        busy[interval.kind][n] += overlap / width / record.slots
    return [n * width for n in range(bins + 1)], busy
