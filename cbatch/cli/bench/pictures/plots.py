"""The pictures of a bench: what slots did over time, figures of strategies, and figures over the number of users."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from cbatch.base.units import format_count
from cbatch.cli.bench import timeline, units
from cbatch.cli.bench.pictures import style
from cbatch.cli.bench.recorder import RunRecord
from cbatch.cli.bench.users import SERVED_SHARE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Figures = Mapping[str, Any]
"""Figures of `--json`, by their names."""


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
    axes.barh(range(record.slots), record.elapsed_s, color=style.EMPTY_SLOT)
    axes.barh(
        [one.slot for one in found],
        [one.seconds for one in found],
        left=[one.start for one in found],
        color=[style.KIND_COLOURS[one.kind] for one in found],
        linewidth=0,
    )
    entries = [one for one in found if one.is_entry]
    middles, lefts = np.array([one.slot for one in entries], float), [one.start for one in entries]
    axes.vlines(lefts, middles - 0.4, middles + 0.4, color=style.BACKGROUND, linewidth=1.5 if labels else 0.4)
    decodes = sorted((one for one in found if one.kind == "decode"), key=lambda one: one.seconds)
    for request, longest in {one.request: one for one in decodes}.items():
        if labels and longest.seconds > 0.006 * end * (1 + len(str(request))):
            axes.text(longest.start + 0.004 * end, longest.slot, str(request), size=7, va="center")
    axes.set(xlim=(0, end), ylim=(record.slots - 0.5, -0.5), yticks=[0, record.slots - 1] if record.slots > 1 else [0])
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False)
    axes.set_ylabel("slot", labelpad=3)


WAYS = {
    "continuous batching": style.HIGHLIGHT,
    "other ways on the same engine": style.OTHER,
    "other engines": style.PEER,
}

SPEEDS: tuple[tuple[str, str, Callable[[float], str], int], ...] = (
    ("output tokens/s", "output_tokens_per_s", units.plain, 3),
    ("first token (TTFT)", "ttft_s", units.round_duration, 2),
    ("further tokens (TPOT)", "tpot_s", units.round_duration, 2),
)
"""The title of each panel, the figure of `--json`, and the words for its ticks, of which there are about so many."""


def plot_speed(results: Sequence[Figures]) -> Figure:
    """Three panels on logarithmic scales, so that a very slow row leaves space for the others."""
    colours = [
        style.PEER if "attention" in one else style.HIGHLIGHT if one["title"] == style.SUBJECT else style.OTHER
        for one in results
    ]
    weights = ["bold" if one["title"] == style.SUBJECT else "normal" for one in results]
    figure = style.new_figure(
        0.5 + 0.3 * len(results),
        "Output speed, and how long a request waits for its first and its next token",
        "Logarithmic scales. Times: dot p50, line p90, ring p99; half, 90% and 99% of the requests are within them.",
        {label: colour for label, colour in WAYS.items() if colour in colours},
    )
    panels = figure.subplots(1, 3, sharey=True)
    for axes, (title, name, words, most) in zip(panels, SPEEDS, strict=True):
        found = [_values(one.get(name)) for one in results]
        style.set_log_scale(axes, "x", [value for values in found for value in values], words, most=most)
        axes.set_title(title, pad=6)
        axes.set_ylim(len(results) - 0.5, -0.5)
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", left=False, labelleft=axes is panels[0], labelcolor=style.TEXT, labelsize=9)
        for row, (values, colour, weight) in enumerate(zip(found, colours, weights, strict=True)):
            said = units.number(values[0]) if len(values) == 1 else "not known"
            if len(values) == 3:
                p50, p90, p99 = values
                said = f"{units.duration(p50)} / {units.duration(p99)}"
                axes.plot([p50, p99], [row, row], color=colour, linewidth=1.6)
                axes.plot([p90], [row], "|", color=colour, markersize=9, markeredgewidth=1.6)
                axes.plot([p99], [row], "o", color=colour, markersize=5.5, markerfacecolor=style.BACKGROUND)
            if values:
                axes.plot(values[:1], [row], "o", color=colour, markersize=7, clip_on=False)
            style.write(axes, said, (1, row), (6, 0), xycoords=("axes fraction", "data"), size=8, weight=weight)
            if weight == "bold":
                axes.axhspan(row - 0.5, row + 0.5, color=style.BAND, linewidth=0, zorder=-1)
    panels[0].set_yticks(range(len(results)), [one["title"] for one in results])
    for label, weight in zip(panels[0].get_yticklabels(), weights, strict=True):
        label.set_fontweight(weight)
    return figure


def _values(figure: float | Mapping[str, float | None] | None) -> list[float]:
    """A figure; or the 50th, 90th and 99th percentile; or nothing."""
    if isinstance(figure, Mapping):
        p50 = figure["p50"]
        return [p50, figure["p90"] or p50, figure["p99"] or p50] if p50 else []
    return [] if figure is None else [figure]


HALF, FAR = style.TEXT, style.OTHER
"""Colours of the median and of the users who are served worst."""

DASHED: dict[str, Any] = {"linewidth": 1.2, "linestyle": (0, (4, 3))}


def plot_load(runs: Mapping[int, Sequence[Figures]], work: Figures, capacity: int) -> Figure:
    """Time to the first token, speed of each user, and share of users within the objective.

    runs:     all runs by number of users, in rising order; each is judged
    work:     that of `--json`
    capacity: the most users for whom the objective holds
    """
    repeats = max(map(len, runs.values()))
    figure = style.new_figure(
        2.5,
        "What each user gets as the number of users grows",
        "Logarithmic scales." + (" Lines go through the median of several runs, which are the dots." * (repeats > 1)),
        {
            "half of them get this or better (p50)": HALF,
            "p99 of the times, p10 of the speeds": FAR,
            "the objective (SLO)": style.TARGET,
        },
    )
    first, speed, within = figure.subplots(1, 3)
    first.set_title("time to the first token", pad=6)
    _draw_medians(first, FAR, runs, lambda run: run["ttft_s"]["p99"])
    _draw_medians(first, HALF, runs, lambda run: run["ttft_s"]["p50"])
    _set_target(first, work["slo_ttft_s"], units.round_duration)
    # Nine in ten users have at least the speed p10, for their time per token is at most p90.
    speed.set_title("output tokens/s of a user", pad=6)
    _draw_medians(speed, FAR, runs, lambda run: 1 / run["tpot_s"]["p90"])
    _draw_medians(speed, HALF, runs, lambda run: 1 / run["tpot_s"]["p50"])
    _set_target(speed, work["slo_tps"], units.plain)
    within.set_title("users within the objective", pad=6)
    _draw_medians(within, HALF, runs, lambda run: run["users_served_share"])
    within.axhline(SERVED_SHARE, color=style.TARGET, **DASHED)
    within.set(ylim=(0, 1.05), yticks=[0, 0.5, 1], yticklabels=["0", "50%", "100%"])
    within.grid(axis="y")
    if capacity:
        within.axvline(capacity, color=style.TARGET, linewidth=1.2, linestyle=(0, (1, 2)))
        side, gap = ("right", -5) if capacity > (min(runs) * max(runs)) ** 0.5 else ("left", 5)
        style.write(within, format_count(capacity, "user"), (capacity, 0.06), (gap, 0), ha=side, va="baseline")
    for axes in (first, speed, within):
        _set_users(axes, list(runs))
    return figure


def _draw_medians(
    axes: Axes, colour: str, runs: Mapping[int, Sequence[Figures]], value: Callable[[Figures], float]
) -> None:
    """A line through the medians, and a dot for each run."""
    found = {users: [value(run) for run in same] for users, same in runs.items()}
    axes.plot(list(found), [median(values) for values in found.values()], color=colour, linewidth=1.6, clip_on=False)
    dots = [(users, one) for users, values in found.items() for one in values]
    axes.plot(*zip(*dots, strict=True), "o", color=colour, markersize=3.5, clip_on=False)


def _set_target(axes: Axes, target: float, words: Callable[[float], str]) -> None:
    """A logarithmic scale for what is drawn and its target, and a line at the latter."""
    drawn: list[float] = [value for line in axes.lines for value in np.asarray(line.get_ydata()).tolist()]
    style.set_log_scale(axes, "y", [*drawn, target], words)
    if target > 0:
        axes.axhline(target, color=style.TARGET, **DASHED)


def _set_users(axes: Axes, users: Sequence[int]) -> None:
    if users[-1] > users[0]:
        axes.set_xscale("log", base=2)
        axes.set_xlim(users[0] / 1.15, users[-1] * 1.15)
        axes.xaxis.set_major_formatter("{x:,.0f}")
    else:
        axes.set_xticks(users)
    axes.minorticks_off()
    axes.set_xlabel("users at once")
