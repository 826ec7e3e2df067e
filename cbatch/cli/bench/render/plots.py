"""The pictures of a bench: what the slots did, how busy they were, how fast each strategy was, load, and drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from numpy.typing import NDArray

from cbatch.cli.bench.load.results import LoadResult
from cbatch.cli.bench.recorder import RunRecord, TokenKind
from cbatch.cli.bench.render import style, timeline
from cbatch.cli.bench.render.speculation_plot import plot_speculation, record_with_drafts
from cbatch.cli.bench.render.step_plot import plot_step
from cbatch.cli.bench.render.timeline import Interval
from cbatch.cli.bench.results import RunMetrics
from cbatch.cli.common.percentiles import Percentiles

FILE_NAMES = {
    "Timeline": "timeline.svg",
    "Utilisation": "utilisation.svg",
    "Speed": "speed.svg",
    "Load": "load.svg",
    "One step": "step.svg",
    "Speculation": "speculation.svg",
}
"""Of all pictures, by title."""

BINS = 200
"""Points in time of the utilisation of the longest run; each is a mean over its stretch."""

SHADES = {"p50": style.TEXT, "p90": "#8c959f", "p99": "#d0d7de"}


def plot_timeline(records: Mapping[str, RunRecord]) -> Figure:
    """A lane for each slot, with all strategies on the same time scale."""
    slots = [record.slots for record in records.values()]
    lane = min(0.2, 5 / max(sum(slots), 1))
    height = 1.45 + sum(slots) * lane + 0.38 * len(slots)
    figure = style.new_figure(
        height,
        "Static batches wait for their slowest request; continuous batching admits the next one",
        "One lane for each slot; the numbers are those of the requests.",
    )
    style.add_legend(figure)
    hspace = 0.38 * len(slots) / max(sum(slots) * lane, 0.1)
    panels = style.axes_grid(figure, slots, left=0.5, top=1.1, bottom=0.45, hspace=hspace)
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
    for kind in timeline.KINDS:
        boxes = [_box(interval) for interval in found if interval.kind == kind]
        axes.add_collection(PolyCollection(boxes, facecolors=style.KIND_COLOURS[kind], linewidths=0), autolim=False)
    entries = [interval for interval in found if interval.is_entry]
    starts, slots = [interval.start for interval in entries], [interval.slot for interval in entries]
    tops, bottoms = [slot - 0.4 for slot in slots], [slot + 0.4 for slot in slots]
    axes.vlines(starts, tops, bottoms, color=style.BACKGROUND, linewidth=1.5 if labels else 0.4)
    longest: dict[int, Interval] = {}
    for interval in found:
        if interval.kind == "decode":
            before = longest.get(interval.request, interval)
            longest[interval.request] = max(before, interval, key=lambda one: one.seconds)
    for request, interval in longest.items():
        if labels and interval.seconds > 0.006 * end * (1 + len(str(request))):
            axes.text(interval.start + 0.004 * end, interval.slot, str(request), size=7, va="center", color=style.TEXT)
    axes.set_ylim(record.slots - 0.5, -0.5)
    axes.set_xlim(0, end)
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False)
    axes.set_yticks([0, record.slots - 1] if record.slots > 1 else [0])
    axes.set_ylabel("slot", labelpad=-2)


def _box(interval: Interval) -> list[tuple[float, float]]:
    top, bottom = interval.slot - 0.4, interval.slot + 0.4
    return [(interval.start, top), (interval.end, top), (interval.end, bottom), (interval.start, bottom)]


def plot_utilisation(records: Mapping[str, RunRecord]) -> Figure:
    """The share of slots that are busy over time, by kind of work."""
    height = 1.52 + 0.95 * len(records)
    figure = style.new_figure(
        height,
        "How much of the engine does useful work",
        "Share of the slots that compute, over time; blue is useful work.",
    )
    style.add_legend(figure)
    panels = style.axes_grid(figure, [1] * len(records), left=0.6, top=1.12, bottom=0.45, hspace=0.45)
    end = max(record.elapsed_s for record in records.values()) or 1.0
    for axes, (title, record) in zip(panels, records.items(), strict=True):
        edges, busy = utilisation(record, max(round(BINS * record.elapsed_s / end), 20))
        axes.barh(0.5, record.elapsed_s, height=1, color=style.EMPTY_SLOT)
        floor = [0.0] * (len(edges) - 1)
        for kind in timeline.KINDS:
            if any(busy[kind]):
                top = [below + share for below, share in zip(floor, busy[kind], strict=True)]
                axes.stairs(top, edges, baseline=floor, fill=True, color=style.KIND_COLOURS[kind], linewidth=0)
                floor = top
        axes.set_title(title, weight="bold", pad=4)
        useful = timeline.whole_percents(timeline.time_shares(record))["useful"]
        axes.set_title(f"useful {useful}% of {record.elapsed_s:.2f} s", loc="right", pad=4)
        axes.set_ylim(0, 1)
        axes.set_xlim(0, end)
        axes.set_yticks([0, 0.5, 1], ["0", "50%", "100%"])
        axes.grid(axis="y")
    panels[-1].set_xlabel("seconds")
    return figure


def utilisation(record: RunRecord, bins: int) -> tuple[list[float], dict[TokenKind, list[float]]]:
    """The edges of equal stretches of a run, in seconds, and the mean share of slots in each of them by kind."""
    width = record.elapsed_s / bins or 1.0
    busy: dict[TokenKind, list[float]] = {kind: [0.0] * bins for kind in timeline.KINDS}
    for interval, n, overlap in timeline.binned(record, width, bins):
        busy[interval.kind][n] += overlap / width / record.slots
    return [n * width for n in range(bins + 1)], busy


def plot_speed(metrics: Mapping[str, RunMetrics]) -> Figure:
    """Output tokens a second, time to first token and time per further token of each strategy."""
    figure = style.new_figure(
        1.25 + 0.32 * len(metrics),
        "Output speed, and how long a request waits for its first and its next token",
        "Times are p50 / p90 / p99, dark to light: half, 90% and 99% of the requests are within them.",
    )
    names = list(metrics)
    left = 0.4 + 0.075 * max(map(len, names))
    speed, first, per_token = style.axes_grid(figure, [1], 3, left=left, right=0.1, top=1.0, bottom=0.15, wspace=0.15)
    rates = [metrics[name].output_tokens_per_s for name in names]
    speed.barh(names, rates, height=0.6, color=style.KIND_COLOURS["decode"])
    for place, rate in enumerate(rates):
        speed.text(rate, place, f" {rate:,.0f}", va="center")
    _finish_bars(speed, "output tokens/s", max(rates), len(names))
    _percentile_bars(first, "first token (TTFT)", [metrics[name].ttft_s for name in names])
    _percentile_bars(per_token, "further tokens (TPOT)", [metrics[name].tpot_s for name in names])
    return figure


def _percentile_bars(axes: Axes, title: str, values: Sequence[Percentiles]) -> None:
    longest = max((value.p99 or 0.0 for value in values), default=0.0)
    factor, unit = (1000, "ms") if longest < 1 else (1, "s")
    for place, value in enumerate(values):
        times = [(time or 0.0) * factor for time in (value.p50, value.p90, value.p99)]
        for time, shade in reversed(list(zip(times, SHADES.values(), strict=True))):
            axes.barh(place, time, height=0.6, color=shade)
        words = " / ".join(f"{time:#.3g}".rstrip(".") for time in times) if value.p50 is not None else "none"
        axes.text(times[-1], place, f" {words}", va="center", size=8)
    _finish_bars(axes, f"{title}, {unit}", longest * factor, len(values), space=1.9)
    axes.set_yticks([])


def _finish_bars(axes: Axes, title: str, longest: float, count: int, space: float = 1.3) -> None:
    axes.set_title(title, pad=4)
    axes.set_ylim(count - 0.5, -0.5)
    axes.set_xlim(0, longest * space or 1)
    axes.set_xticks([])
    axes.tick_params(left=False, labelcolor=style.TEXT, labelsize=9)
    axes.spines[["bottom"]].set_visible(False)


def plot_load(runs: Mapping[int, LoadResult], objective: str) -> Figure:
    """Time to first token, speed of each user, and share of users within the objective, by number of users.

    objective: in words, such as "TTFT under 1 s, 10 tokens/s"
    """
    subtitle = f"The objective (SLO) is {objective}."
    figure = style.new_figure(3.1, "What each user gets as the number of users grows", subtitle)
    first, speed, within = style.axes_grid(figure, [1], 3, left=0.5, right=0.35, top=0.98, bottom=0.5, wspace=0.36)
    users, results = list(runs), runs.values()
    ttft_p50, ttft_p99 = np.array([(result.ttft_s.p50, result.ttft_s.p99) for result in results], float).T
    _line(first, users, ttft_p99, "p99", SHADES["p90"], "bottom")
    _line(first, users, ttft_p50, "p50", style.TEXT, "top")
    first.set_title("time to first token, s", pad=6)
    # Nine in ten users have at least the speed p10, for their time per token is at most p90.
    tps_p50, tps_p10 = 1 / np.array([(result.tpot_s.p50, result.tpot_s.p90) for result in results], float).T
    _line(speed, users, tps_p50, "p50", style.TEXT, "bottom")
    _line(speed, users, tps_p10, "p10", SHADES["p90"], "top")
    speed.set_title("output tokens/s of a user", pad=6)
    served = np.array([result.users_served for result in results], float)
    _line(within, users, served * 100, "", style.TEXT, "bottom")
    within.set_title("users within the objective, %", pad=6)
    within.set_ylim(0, 105)
    ticks = [count for count in users if count & (count - 1) == 0] if len(users) > 6 else users
    ticks = ticks[(len(ticks) - 1) % 2 :: 2] if len(ticks) > 7 else ticks  # so that the numbers do not overlap
    for axes in (first, speed, within):
        axes.set_ylim(bottom=0)
        if users[-1] > 8 * users[0]:
            axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(count) for count in ticks])
        axes.minorticks_off()
        axes.grid(axis="y")
        axes.set_xlabel("users at once")
    return figure


def _line(axes: Axes, users: Sequence[int], values: NDArray[np.float64], name: str, colour: str, side: str) -> None:
    """A line with a dot for each measurement, and its name beside the last one."""
    axes.plot(users, values, color=colour, marker="o", markersize=4, linewidth=1.6, clip_on=False)
    axes.annotate(name, (users[-1], values[-1]), (13, 0), textcoords="offset points", va=side, color=colour)


@style.picture_style()
def draw_all(
    records: Mapping[str, RunRecord], metrics: Mapping[str, RunMetrics], loads: Mapping[int, LoadResult], objective: str
) -> dict[str, str]:
    """The SVG text of all pictures that there is data for, by the titles of FILE_NAMES.

    records: by the titles of the strategies; a step of the last of `side_by_side` is drawn too
    metrics: by the same titles
    loads:   by number of users; runs in which nothing could be judged are left out
    """
    pair = timeline.side_by_side(records)
    figures: dict[str, Figure] = {}
    if pair:
        figures["Timeline"] = plot_timeline(pair)
    if records:
        figures["Utilisation"] = plot_utilisation(records)
    if metrics:
        figures["Speed"] = plot_speed(metrics)
    if judged := {users: result for users, result in loads.items() if result.is_judged}:
        figures["Load"] = plot_load(judged, objective)
    if pair and (example := (record := list(pair.values())[-1]).example) is not None:
        figures["One step"] = plot_step(record, example)
    if (drafted := record_with_drafts(records)) is not None:
        figures["Speculation"] = plot_speculation(drafted)
    return {title: style.svg_text(figure, title) for title, figure in figures.items()}
