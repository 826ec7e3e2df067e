"""The slots' shares of time as a picture, of all strategies one below the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cbatch.cli.bench import timeline, units
from cbatch.cli.bench.pictures import style
from cbatch.cli.bench.recorder import TOKEN_KINDS, RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BINS = 100
"""Points in time across the picture of shares; each is a mean over its stretch."""

MOST_TIMES = 4.0
"""The picture of shares ends with the longest run that takes at most this many times as long as the shortest."""


def slot_seconds(record: RunRecord) -> Any:
    """Seconds that all slots together spent on each of TOKEN_KINDS: an array of a row for each step."""
    found = np.zeros((len(record.steps), len(TOKEN_KINDS)))
    for row, step in zip(found, record.steps, strict=True):
        for chunk, seconds in step.timed_chunks:
            row[TOKEN_KINDS.index(chunk.kind)] += seconds
    return found


def visible_end(seconds: Sequence[float]) -> float:
    """Where the time axis ends: much longer runs are cut, for they would leave no space for the others.

    The two shortest runs are never cut.
    """
    ordered = sorted(seconds) or [0.0]
    return max([*ordered[:2], *(time for time in ordered if time <= MOST_TIMES * ordered[0])]) or 1.0


def plot_utilisation(records: Mapping[str, RunRecord], others: Mapping[str, float]) -> Figure:
    """The share of busy slots over time, a panel for each record.

    others: seconds by name, of runs whose slots are not known
    """
    times = {title: record.elapsed_s for title, record in records.items()} | dict(others)
    heights = [0.62 if title in records else 0.16 for title in times]
    figure = style.new_figure(
        sum(heights) + 0.34 * len(heights) + 0.3,
        "How much of the engine does useful work",
        "Share of the slots that compute, over time; blue is useful work.",
        style.KINDS | ({"only the time is known": style.PEER} if others else {}),
    )
    end = visible_end(list(times.values()))
    panels = figure.subplots(len(times), squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    for axes, (title, seconds) in zip(panels, times.items(), strict=True):
        words = units.duration(seconds)
        if (record := records.get(title)) is not None:
            _draw_shares(axes, record, end)
            words = f"useful {timeline.whole_percents(timeline.time_shares(record))['useful']}% of {words}"
        else:
            axes.barh(0.5, min(seconds, end), height=1, color=style.PEER)
            axes.set_yticks([])
        if seconds > end:
            words += f", of which {units.duration(end)} are shown"
        axes.set_title(title, weight="bold" if title == style.SUBJECT else "normal", pad=4)
        axes.set_title(words, loc="right", pad=4)
        axes.set(xlim=(0, end), ylim=(0, 1))
    panels[-1].set_xlabel("seconds")
    return figure


def _draw_shares(axes: Axes, record: RunRecord, end: float) -> None:
    shown_s = min(record.elapsed_s, end)
    axes.barh(0.5, shown_s, height=1, color=style.EMPTY_SLOT)
    edges = np.linspace(0, shown_s or 1.0, BINS + 1)
    times, floor = [0.0, *(time for step in record.steps for time in (step.start, step.end))], np.zeros(BINS)
    for kind, seconds in zip(TOKEN_KINDS, slot_seconds(record).T, strict=True):
        so_far = np.repeat([0.0, *np.cumsum(seconds)], 2)[:-1]  # it grows during steps, not between them
        share = np.diff(np.interp(edges, times, so_far)) / edges[1] / record.slots
        if share.any():
            colour = style.KIND_COLOURS[kind]
            axes.stairs(floor + share, edges, baseline=floor, fill=True, color=colour, linewidth=0)
        floor = floor + share
    axes.set_yticks([0, 0.5, 1], ["0", "50%", "100%"])
    axes.grid(axis="y")
