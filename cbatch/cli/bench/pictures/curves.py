"""Figures as pictures: of strategies, over the skew of lengths, over the number of users, and of users over time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from cbatch.cli.bench import units
from cbatch.cli.bench.pictures import style
from cbatch.cli.bench.users import SERVED_SHARE, LoadResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Figures = Mapping[str, Any]
"""Figures of `--json`, by their names."""

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


FACTORS = {
    "slots that do not wait": ("slots", style.KIND_COLOURS["decode"]),
    "no padding": ("padding", style.KIND_COLOURS["padding"]),
    "time of a step": ("step_time", style.KIND_COLOURS["idle"]),
    "empty slots (tail)": ("tail", style.CHUNK_COLOURS[2]),
}
"""The factors whose product is the gain, and their colours."""

MEASURED = style.KIND_COLOURS["prefill"]


def plot_skew(points: Sequence[Figures], real_work: Sequence[Figures]) -> Figure:
    """The measured gain beside that of arithmetic, with marks where real work lies; and the factors of the gain."""
    figure = style.new_figure(
        2.75,
        "The more unequal the lengths, the more continuous batching gains",
        "How many times as fast as static batches with the same slots; skew 0: all lengths are equal.",
        {"measured": MEASURED, "by arithmetic": style.MUTED} | {name: colour for name, (_, colour) in FACTORS.items()},
    )
    gain, factors = figure.subplots(1, 2)
    _draw_gain(gain, points, real_work)
    factors.axhline(1, color=style.MUTED, linewidth=0.8)
    for name, colour in FACTORS.values():
        values = [point["gain"][name] for point in points]
        factors.plot([point["skew"] for point in points], values, "o-", color=colour, markersize=3.5, linewidth=1.6)
    factors.set_ylim(bottom=0)
    factors.set_title("the factors of the gain; below 1 they eat some", pad=6)
    for axes in (gain, factors):
        axes.set_xlabel("skew (standard deviation of the logarithm of a length)")
        axes.grid(axis="y")
        axes.margins(x=0.03)
    return figure


def _draw_gain(axes: Axes, points: Sequence[Figures], real_work: Sequence[Figures]) -> None:
    skews = [point["skew"] for point in points]
    lines = {
        ("measured", "-", MEASURED, 2.0): [point["gain"]["measured"] for point in points],
        ("by steps", "--", style.MUTED, 1.2): [point["gain"]["expected"]["by_steps"] for point in points],
        ("by tokens", ":", style.MUTED, 1.2): [point["gain"]["expected"]["by_tokens"] for point in points],
    }
    dots = [(point["skew"], one) for point in points for one in point["gain_of_rounds"]]
    axes.plot(*zip(*dots, strict=True), "o", color=MEASURED, markersize=3)
    top = 1.18 * max(max(values) for values in lines.values())
    lowest = -top
    for (name, dashes, colour, width), values in sorted(lines.items(), key=lambda line: line[1][-1]):
        axes.plot(skews, values, dashes, color=colour, linewidth=width)
        lowest = max(values[-1], lowest + 0.08 * top)  # names at the ends of lines, one above the other
        style.write(axes, name, (skews[-1], lowest), (8, 0), color=colour, annotation_clip=False)
    axes.set_ylim(0, top)
    for work in real_work:
        low, high = work["low"], work["high"]
        if is_field := high > low:
            axes.axvspan(low, high, color=style.EMPTY_SLOT, linewidth=0, zorder=0)
        else:
            axes.axvline(high, color=style.MUTED, linewidth=0.9)
        place, gap, side = (low, 2, "left") if is_field else (high, -2, "right")
        style.write(axes, work["name"], (place, 0), (gap, 4), rotation=90, ha=side, va="bottom", size=8)
    axes.set_title("gain, measured and by arithmetic", pad=6)


MOST_DOTS = 600
"""Answers that are drawn, evenly chosen of all of them."""

MET, MISSED = style.HIGHLIGHT, style.KIND_COLOURS["idle"]
HALF, FAR = style.TEXT, style.OTHER
"""Colours of the median and of the users who are served worst."""

HEIGHT = 2.5
OBJECTIVE = {"the objective (SLO)": style.TARGET}
DASHED: dict[str, Any] = {"linewidth": 1.2, "linestyle": (0, (4, 3))}


def plot_load(runs: Mapping[int, Sequence[Figures]], work: Figures, capacity: int) -> Figure:
    """Time to the first token, speed of each user, and share of users within the objective.

    runs:     all runs by number of users, in rising order; each is judged
    work:     that of `--json`
    capacity: the most users for whom the objective holds
    """
    repeats = max(map(len, runs.values()))
    figure = style.new_figure(
        HEIGHT,
        "What each user gets as the number of users grows",
        "Logarithmic scales." + (" Lines go through the median of several runs, which are the dots." * (repeats > 1)),
        {"half of them get this or better (p50)": HALF, "p99 of the times, p10 of the speeds": FAR} | OBJECTIVE,
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
        style.write(within, f"{capacity:,} users", (capacity, 0.06), (gap, 0), ha=side, va="baseline")
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
    powers = [count for count in users if count & (count - 1) == 0] if len(users) > 5 else list(users)
    ticks = powers[(len(powers) - 1) % 2 :: 2] if len(powers) > 6 else powers  # so that the numbers do not overlap
    axes.set_xticks(ticks, [f"{count:,}" for count in ticks])
    axes.minorticks_off()
    axes.set_xlabel("users at once")


def plot_users(result: LoadResult, work: Figures) -> Figure:
    """Users who have come, time to the first token and speed, by the time of the question.  work: that of `--json`"""
    users, end, asked_for = result.figures["users"], result.figures["elapsed_s"], work["users"][0]
    shown = result.timed[:: -(-len(result.timed) // MOST_DOTS)]
    came = f"{users:,} user{'s' * (users != 1)}"
    count = f"A dot for each of {len(shown):,} answers, by the time of its question."
    if len(shown) < len(result.timed):
        count = f"Dots for {len(shown):,} of {len(result.timed):,} answers, by the time of the question."
    figure = style.new_figure(
        HEIGHT,
        f"{came} and their answers" if users >= asked_for else f"{came} of {asked_for:,}, and their answers",
        count,
        {"answer within the objective": MET, "answer that is not": MISSED} | OBJECTIVE | {"users": style.TEXT},
    )
    arrivals, first, speed = figure.subplots(1, 3)
    times: dict[int, float] = {}
    for answer in result.timed:
        times[answer.user] = min(times.get(answer.user, answer.asked_s), answer.asked_s)
    come = len(times)
    arrivals.step([0, *sorted(times.values()), end], [0, *range(1, come + 1), come], where="post", color=style.TEXT)
    arrivals.axhline(asked_for, color=style.MUTED, linewidth=1.0, linestyle=(0, (4, 3)))
    style.write(arrivals, f"{asked_for:,} asked for", (0, asked_for), (4, -3), va="top", color=style.MUTED)
    arrivals.set_ylim(0, asked_for * 1.05)
    arrivals.grid(axis="y")
    arrivals.set_title("users who have come", pad=6)
    target = work["slo_ttft_s"]
    first.set_title("time to the first token", pad=6)
    _draw_answers(first, [(one.asked_s, one.ttft_s, one.ttft_s <= target) for one in shown if one.ttft_s])
    _set_target(first, target, units.round_duration)
    speed.set_title("output tokens/s of an answer", pad=6)
    speeds = [(one.asked_s, one.tokens_per_s) for one in shown if one.tokens_per_s]
    _draw_answers(speed, [(asked, value, value >= work["slo_tps"]) for asked, value in speeds])
    _set_target(speed, work["slo_tps"], units.plain)
    for axes in (arrivals, first, speed):
        axes.set_xlim(0, end or 1.0)
        axes.set_xlabel("seconds")
    return figure


def _draw_answers(axes: Axes, answers: Sequence[tuple[float, float, bool]]) -> None:
    """answers: when each was asked for, its value, and whether it meets the target"""
    for colour, wanted in ((MET, True), (MISSED, False)):
        dots = [(when, value) for when, value, is_met in answers if is_met is wanted]
        if dots:
            axes.plot(*zip(*dots, strict=True), "o", color=colour, markersize=4, markeredgewidth=0, clip_on=False)
