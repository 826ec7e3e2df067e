"""Pictures of the slots of an engine over time: a lane for each of them, or their shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from cbatch.cli.bench import timeline, units
from cbatch.cli.bench.pictures import style
from cbatch.cli.bench.recorder import TOKEN_KINDS, RunRecord, TokenKind
from cbatch.cli.bench.timeline import Interval

BINS = 100
"""Points in time across the picture of shares; each is a mean over its stretch."""

MOST_TIMES = 4.0
"""The picture of shares ends with the longest run that takes at most this many times as long as the shortest."""


def plot_timeline(records: Mapping[str, RunRecord]) -> Figure:
    """A lane for each slot, with all strategies on the same time scale."""
    slots = [record.slots for record in records.values()]
    lane = min(0.2, 5 / max(sum(slots), 1))
    figure = style.new_figure(
        sum(slots) * lane + 0.4 * len(slots) + 0.4,
        "Static batches wait for their slowest request; continuous batching admits the next one"
        if len(records) > 1
        else "What each slot did",
        "One lane for each slot; the numbers are those of the requests.",
        style.KINDS,
    )
    panels = figure.subplots(len(slots), squeeze=False, sharex=True, height_ratios=slots)[:, 0]
    end = max(record.elapsed_s for record in records.values()) or 1.0
    for axes, (title, record) in zip(panels, records.items(), strict=True):
        _draw_lanes(axes, record, end, labels=lane > 0.12)
        axes.set_title(f"{title}: {record.elapsed_s:.2f} s", weight="bold", pad=5)
        axes.set_title(timeline.share_line(record), loc="right", color=style.MUTED, pad=5)
    panels[-1].set_xlabel("seconds")
    return figure


def _draw_lanes(axes: Axes, record: RunRecord, end: float, *, labels: bool) -> None:
    found = timeline.slot_intervals(record)
    axes.barh(range(record.slots), record.elapsed_s, height=0.8, color=style.EMPTY_SLOT)
    for kind, colour in style.KIND_COLOURS.items():
        boxes = [_box(interval) for interval in found if interval.kind == kind]
        axes.add_collection(PolyCollection(boxes, facecolors=colour, linewidths=0), autolim=False)
    entries = [interval for interval in found if interval.is_entry]
    lefts, tops = [one.start for one in entries], [one.slot - 0.4 for one in entries]
    axes.vlines(lefts, tops, [top + 0.8 for top in tops], color=style.BACKGROUND, linewidth=1.5 if labels else 0.4)
    longest: dict[int, Interval] = {}
    for interval in found:
        if interval.kind == "decode":
            before = longest.get(interval.request, interval)
            longest[interval.request] = max(before, interval, key=lambda one: one.seconds)
    for request, interval in longest.items():
        if labels and interval.seconds > 0.006 * end * (1 + len(str(request))):
            axes.text(interval.start + 0.004 * end, interval.slot, str(request), size=7, va="center")
    axes.set(xlim=(0, end), ylim=(record.slots - 0.5, -0.5), yticks=[0, record.slots - 1] if record.slots > 1 else [0])
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False)
    axes.set_ylabel("slot", labelpad=3)


def _box(interval: Interval) -> list[tuple[float, float]]:
    top, bottom = interval.slot - 0.4, interval.slot + 0.4
    return [(interval.start, top), (interval.end, top), (interval.end, bottom), (interval.start, bottom)]


def visible_end(seconds: Sequence[float]) -> float:
    """Where the time axis ends: much longer runs are cut, for they would leave no space for the others.

    The two shortest runs are never cut.
    """
    ordered = sorted(seconds) or [0.0]
    least = ordered[min(1, len(ordered) - 1)]
    return max([least, *(time for time in ordered if time <= MOST_TIMES * ordered[0])]) or 1.0


def plot_utilisation(records: Mapping[str, RunRecord], peers: Mapping[str, float]) -> Figure:
    """The share of busy slots over time, a panel for each record.

    peers: seconds by name, of runs whose slots are not known
    """
    times = {title: record.elapsed_s for title, record in records.items()} | dict(peers)
    heights = [0.62 if title in records else 0.16 for title in times]
    figure = style.new_figure(
        sum(heights) + 0.34 * len(heights) + 0.3,
        "How much of the engine does useful work",
        "Share of the slots that compute, over time; blue is useful work.",
        style.KINDS | ({"only the time is known": style.PEER} if peers else {}),
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
    edges, busy = utilisation(record, min(record.elapsed_s, end) / BINS)
    axes.barh(0.5, min(record.elapsed_s, end), height=1, color=style.EMPTY_SLOT)
    floor = [0.0] * len(edges[1:])
    for kind, shares in busy.items():
        top = [below + part for below, part in zip(floor, shares, strict=True)]
        if top != floor:
            axes.stairs(top, edges, baseline=floor, fill=True, color=style.KIND_COLOURS[kind], linewidth=0)
        floor = top
    axes.set_yticks([0, 0.5, 1], ["0", "50%", "100%"])
    axes.grid(axis="y")


def utilisation(record: RunRecord, bin_s: float) -> tuple[list[float], dict[TokenKind, list[float]]]:
    """The edges of the first BINS stretches of `bin_s` seconds, and the mean share of slots in each of them by kind."""
    edges = [n * bin_s for n in range(BINS + 1)]
    busy: dict[TokenKind, list[float]] = {kind: [0.0] * BINS for kind in TOKEN_KINDS}
    for interval, n, seconds in timeline.binned(record, bin_s or 1.0, BINS):
        busy[interval.kind][n] += seconds / (bin_s or 1.0) / record.slots
    return edges, busy
