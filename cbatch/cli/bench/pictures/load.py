"""A load as a picture: what users get as their number grows, or each answer of one load over time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cbatch.cli.bench import units
from cbatch.cli.bench.load.users import SERVED_SHARE, SLO, LoadResult
from cbatch.cli.bench.pictures import style

MOST_DOTS = 600
"""Answers that are drawn, evenly chosen of all of them."""

MET, MISSED = style.HIGHLIGHT, style.KIND_COLOURS["idle"]
HALF, FAR = style.TEXT, style.OTHER
"""Colours of the median and of the users who are served worst."""

HEIGHT = 2.5
OBJECTIVE = {"the objective (SLO)": style.TARGET}

Runs = Mapping[int, Sequence[LoadResult]]
"""All runs by number of users, in rising order; each is judged."""

Value = Callable[[LoadResult], float | None]


def plot_load(runs: Runs, slo: SLO, capacity: int) -> Figure:
    """Time to the first token, speed of each user, and share of users within the objective.

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
    _draw(first, runs, {FAR: lambda run: run.ttft_s.p99, HALF: lambda run: run.ttft_s.p50})
    _set_target(first, slo.ttft_s, units.round_duration)
    # Nine in ten users have at least the speed p10, for their time per token is at most p90.
    speed.set_title("output tokens/s of a user", pad=6)
    _draw(speed, runs, {FAR: lambda run: _inverse(run.tpot_s.p90), HALF: lambda run: _inverse(run.tpot_s.p50)})
    _set_target(speed, slo.tps, units.plain)
    within.set_title("users within the objective", pad=6)
    _draw(within, runs, {HALF: lambda run: run.users_served})
    within.axhline(SERVED_SHARE, color=style.TARGET, linewidth=1.2, linestyle=(0, (4, 3)))
    within.set_ylim(0, 1.05)
    within.set_yticks([0, 0.5, 1], ["0", "50%", "100%"])
    within.grid(axis="y")
    if capacity:
        within.axvline(capacity, color=style.TARGET, linewidth=1.2, linestyle=(0, (1, 2)))
        is_right = capacity > (min(runs) * max(runs)) ** 0.5
        side, gap = ("right", -5) if is_right else ("left", 5)
        within.annotate(
            f"{capacity:,} users", (capacity, 0.06), (gap, 0), textcoords="offset points", ha=side, size=8.5
        )
    for axes in (first, speed, within):
        _set_users(axes, list(runs))
    return figure


def _inverse(seconds: float | None) -> float | None:
    return 1 / seconds if seconds else None


def _draw(axes: Axes, runs: Runs, lines: Mapping[str, Value]) -> None:
    """A line through the medians for each colour, and a dot for each run."""
    for colour, value in lines.items():
        found = {users: [one for run in same if (one := value(run)) is not None] for users, same in runs.items()}
        middles = [(users, median(values)) for users, values in found.items() if values]
        axes.plot(*zip(*middles, strict=True), color=colour, linewidth=1.6, clip_on=False)
        dots = [(users, one) for users, values in found.items() for one in values]
        axes.plot(*zip(*dots, strict=True), "o", color=colour, markersize=3.5, clip_on=False)


def _set_target(axes: Axes, target: float, words: Callable[[float], str]) -> None:
    """A logarithmic scale for what is drawn and its target, and a line at the latter."""
    drawn: list[float] = [value for line in axes.lines for value in np.asarray(line.get_ydata()).tolist()]
    style.set_log_scale(axes, "y", [*drawn, target], words)
    if target > 0:
        axes.axhline(target, color=style.TARGET, linewidth=1.2, linestyle=(0, (4, 3)))


def _set_users(axes: Axes, users: Sequence[int]) -> None:
    if users[-1] > users[0]:
        axes.set_xscale("log", base=2)
        axes.set_xlim(users[0] / 1.15, users[-1] * 1.15)
    powers = [count for count in users if count & (count - 1) == 0] if len(users) > 5 else list(users)
    ticks = powers[(len(powers) - 1) % 2 :: 2] if len(powers) > 6 else powers  # so that the numbers do not overlap
    axes.set_xticks(ticks, [f"{count:,}" for count in ticks])
    axes.minorticks_off()
    axes.set_xlabel("users at once")


def plot_users(result: LoadResult, slo: SLO, asked_for: int) -> Figure:
    """Users who have come, time to the first token and speed, by the time of the question.

    asked_for: users that were to come
    """
    shown = result.timed[:: -(-len(result.timed) // MOST_DOTS)]
    came = f"{result.users:,} user{'s' * (result.users != 1)}"
    count = f"A dot for each of {len(shown):,} answers, by the time of its question."
    if len(shown) < len(result.timed):
        count = f"Dots for {len(shown):,} of {len(result.timed):,} answers, by the time of the question."
    figure = style.new_figure(
        HEIGHT,
        f"{came} and their answers" if result.users >= asked_for else f"{came} of {asked_for:,}, and their answers",
        count,
        {"answer within the objective": MET, "answer that is not": MISSED} | OBJECTIVE | {"users": style.TEXT},
    )
    arrivals, first, speed = figure.subplots(1, 3)
    _draw_arrivals(arrivals, result, asked_for)
    first.set_title("time to the first token", pad=6)
    _draw_answers(first, [(one.asked_s, one.ttft_s, one.ttft_s <= slo.ttft_s) for one in shown if one.ttft_s])
    _set_target(first, slo.ttft_s, units.round_duration)
    speed.set_title("output tokens/s of an answer", pad=6)
    speeds = [(one.asked_s, one.tokens_per_s) for one in shown if one.tokens_per_s]
    _draw_answers(speed, [(asked, value, value >= slo.tps) for asked, value in speeds])
    _set_target(speed, slo.tps, units.plain)
    for axes in (arrivals, first, speed):
        axes.set_xlim(0, result.elapsed_s or 1.0)
        axes.set_xlabel("seconds")
    return figure


def _draw_arrivals(axes: Axes, result: LoadResult, asked_for: int) -> None:
    first: dict[int, float] = {}
    for answer in result.timed:
        first[answer.user] = min(first.get(answer.user, answer.asked_s), answer.asked_s)
    times = sorted(first.values())
    axes.step([0, *times, result.elapsed_s], [0, *range(1, len(times) + 1), len(times)], where="post", color=style.TEXT)
    axes.axhline(asked_for, color=style.MUTED, linewidth=1.0, linestyle=(0, (4, 3)))
    axes.annotate(
        f"{asked_for:,} asked for", (0, asked_for), (4, -3), textcoords="offset points", va="top", size=8.5,
        color=style.MUTED,
    )  # fmt: skip
    axes.set_ylim(0, asked_for * 1.05)
    axes.grid(axis="y")
    axes.set_title("users who have come", pad=6)


def _draw_answers(axes: Axes, answers: Sequence[tuple[float, float, bool]]) -> None:
    """answers: when each was asked for, its value, and whether it meets the target"""
    for colour, wanted in ((MET, True), (MISSED, False)):
        dots = [(when, value) for when, value, is_met in answers if is_met is wanted]
        if dots:
            axes.plot(*zip(*dots, strict=True), "o", color=colour, markersize=4, markeredgewidth=0, clip_on=False)
