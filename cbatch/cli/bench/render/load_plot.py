"""What users get as their number grows, as a picture, beside what they were to get."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cbatch.cli.bench.load.results import LoadReport, LoadResult
from cbatch.cli.bench.load.users import SLO
from cbatch.cli.bench.render import style, units

TOP, BOTTOM, LEFT, RIGHT, GAP, HEIGHT = 1.32, 0.5, 0.62, 0.3, 0.62, 2.0
FAR = style.OTHER
"""Colour of the users who are served worst."""

Runs = Mapping[int, Sequence[LoadResult]]
"""All runs by number of users, in rising order; each is judged."""


def judged_runs(report: LoadReport) -> dict[int, list[LoadResult]]:
    """The results of all rounds by number of users, without those in which nothing could be judged."""
    runs = report.rounds or {users: [run] for users, run in report.runs.items()}
    judged = {users: [run for run in runs[users] if run.is_judged] for users in sorted(runs)}
    return {users: same for users, same in judged.items() if same}


def plot_load(runs: Runs, slo: SLO, capacity: int, served_share: float) -> Figure:
    """Time to the first token, speed of each user, and share of users within the objective.

    capacity:     the most users for whom the objective holds
    served_share: of the users that have to be within it
    """
    repeats = max(map(len, runs.values()))
    figure = style.new_figure(
        TOP + HEIGHT + BOTTOM,
        "What each user gets as the number of users grows",
        "Logarithmic scales." + (" Lines go through the median of several runs, which are the dots." * (repeats > 1)),
    )
    style.add_legend(
        figure,
        {"half of them get this or better (p50)": style.TEXT, "p99 of the times, p10 of the speeds": FAR}
        | {"the objective (SLO)": style.TARGET},
    )
    width = (style.WIDTH - LEFT - RIGHT - 2 * GAP) / 3
    first, speed, within = (style.add_axes(figure, LEFT + n * (width + GAP), TOP, width, HEIGHT) for n in range(3))
    _draw(first, runs, {FAR: lambda run: run.ttft_s.p99, style.TEXT: lambda run: run.ttft_s.p50})
    _scale(first, runs, lambda run: [run.ttft_s.p50, run.ttft_s.p99], slo.ttft_s, units.round_duration)
    first.set_title("time to the first token", pad=6)
    # Nine in ten users have at least the speed p10, for their time per token is at most p90.
    _draw(speed, runs, {FAR: lambda run: _inverse(run.tpot_s.p90), style.TEXT: lambda run: _inverse(run.tpot_s.p50)})
    _scale(speed, runs, lambda run: [_inverse(run.tpot_s.p90), _inverse(run.tpot_s.p50)], slo.tps, units.plain)
    speed.set_title("output tokens/s of a user", pad=6)
    _draw(within, runs, {style.TEXT: lambda run: run.users_served})
    within.axhline(served_share, color=style.TARGET, linewidth=1.2, linestyle=(0, (4, 3)))
    within.set_ylim(0, 1.05)
    within.set_yticks([0, 0.5, 1], ["0", "50%", "100%"])
    within.grid(axis="y")
    within.set_title("users within the objective", pad=6)
    if capacity:
        within.axvline(capacity, color=style.TARGET, linewidth=1.2, linestyle=(0, (1, 2)))
        is_right = capacity > (min(runs) * max(runs)) ** 0.5
        within.annotate(
            f"{capacity:,} users", (capacity, 0.06), (-5 if is_right else 5, 0), textcoords="offset points",
            ha="right" if is_right else "left", size=8.5, color=style.TEXT,
        )  # fmt: skip
    for axes in (first, speed, within):
        _finish(axes, list(runs))
    return figure


def _inverse(seconds: float | None) -> float | None:
    return 1 / seconds if seconds else None


Value = Callable[[LoadResult], float | None]


def _draw(axes: Axes, runs: Runs, lines: Mapping[str, Value]) -> None:
    """A line through the medians for each colour, and a dot for each run."""
    for colour, value in lines.items():
        found = {users: [one for run in same if (one := value(run)) is not None] for users, same in runs.items()}
        middles = [(users, median(values)) for users, values in found.items() if values]
        axes.plot(*zip(*middles, strict=True), color=colour, linewidth=1.6, clip_on=False)
        dots = [(users, one) for users, values in found.items() for one in values]
        axes.plot(*zip(*dots, strict=True), "o", color=colour, markersize=3.5, clip_on=False)


def _scale(
    axes: Axes,
    runs: Runs,
    values: Callable[[LoadResult], list[float | None]],
    target: float,
    words: Callable[[float], str],
) -> None:
    found = [one for same in runs.values() for run in same for one in values(run) if one]
    style.set_log_scale(axes, "y", style.log_limits([*found, target]), words)
    if target > 0:
        axes.axhline(target, color=style.TARGET, linewidth=1.2, linestyle=(0, (4, 3)))


def _finish(axes: Axes, users: Sequence[int]) -> None:
    if users[-1] > users[0]:
        axes.set_xscale("log", base=2)
        axes.set_xlim(users[0] / 1.15, users[-1] * 1.15)
    powers = [count for count in users if count & (count - 1) == 0] if len(users) > 5 else list(users)
    ticks = powers[(len(powers) - 1) % 2 :: 2] if len(powers) > 6 else powers  # so that the numbers do not overlap
    axes.set_xticks(ticks, [f"{count:,}" for count in ticks])
    axes.minorticks_off()
    axes.set_xlabel("users at once")
