"""One load over time, as a picture: how many users had come, and what each answer was like."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cbatch.cli.bench.load.results import LoadResult
from cbatch.cli.bench.load.users import SLO
from cbatch.cli.bench.render import style, units

TOP, BOTTOM, LEFT, RIGHT, GAP, HEIGHT = 1.32, 0.5, 0.62, 0.3, 0.62, 2.0

MOST_DOTS = 600
"""Answers that are drawn, evenly chosen of all of them."""

MET, MISSED = style.HIGHLIGHT, style.KIND_COLOURS["idle"]


def plot_users(result: LoadResult, slo: SLO, asked_for: int) -> Figure:
    """Users who have come, time to the first token and speed, by the time of the question.

    asked_for: users that were to come
    """
    shown = result.timed[:: -(-len(result.timed) // MOST_DOTS)]
    figure = style.new_figure(
        TOP + HEIGHT + BOTTOM, _title(result, asked_for), _subtitle(len(result.timed), len(shown))
    )
    colours = {"answer within the objective": MET, "answer that is not": MISSED, "the objective (SLO)": style.TARGET}
    style.add_legend(figure, colours | {"users": style.TEXT})
    width = (style.WIDTH - LEFT - RIGHT - 2 * GAP) / 3
    panels = [style.add_axes(figure, LEFT + n * (width + GAP), TOP, width, HEIGHT) for n in range(3)]
    _draw_arrivals(panels[0], result, asked_for)
    _draw_answers(
        panels[1],
        [(one.asked_s, one.ttft_s, one.ttft_s <= slo.ttft_s) for one in shown if one.ttft_s],
        slo.ttft_s,
        units.round_duration,
    )
    panels[1].set_title("time to the first token", pad=6)
    _draw_answers(
        panels[2],
        [(one.asked_s, one.tokens_per_s, one.tokens_per_s >= slo.tps) for one in shown if one.tokens_per_s],
        slo.tps,
        units.plain,
    )
    panels[2].set_title("output tokens/s of an answer", pad=6)
    for axes in panels:
        axes.set_xlim(0, result.elapsed_s or 1.0)
        axes.set_xlabel("seconds")
    return figure


def _title(result: LoadResult, asked_for: int) -> str:
    came = f"{result.users:,} user{'s' * (result.users != 1)}"
    return f"{came} and their answers" if result.users >= asked_for else f"{came} of {asked_for:,}, and their answers"


def _subtitle(count: int, shown: int) -> str:
    words = f"A dot for each of {count:,} answers, by the time of its question."
    return words if shown == count else f"Dots for {shown:,} of {count:,} answers, by the time of the question."


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


def _draw_answers(
    axes: Axes, answers: Sequence[tuple[float, float, bool]], target: float, words: Callable[[float], str]
) -> None:
    """answers: when each was asked for, its value, and whether it meets the target"""
    for colour, wanted in ((MET, True), (MISSED, False)):
        dots = [(when, value) for when, value, is_met in answers if is_met is wanted]
        if dots:
            axes.plot(*zip(*dots, strict=True), "o", color=colour, markersize=4, markeredgewidth=0, clip_on=False)
    style.set_log_scale(axes, "y", style.log_limits([target, *(value for _, value, _ in answers)]), words)
    if target > 0:
        axes.axhline(target, color=style.TARGET, linewidth=1.2, linestyle=(0, (4, 3)))
