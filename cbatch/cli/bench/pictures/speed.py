"""Output tokens a second and latency of each strategy and peer, as a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cbatch.cli.bench import units
from cbatch.cli.bench.peers import PeerMetrics
from cbatch.cli.bench.pictures import style
from cbatch.cli.bench.results import StrategyResult
from cbatch.cli.common.percentiles import Percentiles

LEGEND = {
    "continuous batching": style.HIGHLIGHT,
    "other ways on the same engine": style.OTHER,
    "other engines": style.PEER,
}


def plot_speed(results: Sequence[StrategyResult]) -> Figure:
    """Three panels on logarithmic scales, so that a very slow row leaves space for the others."""
    used = {_colour(result) for result in results}
    figure = style.new_figure(
        0.5 + 0.3 * len(results),
        "Output speed, and how long a request waits for its first and its next token",
        "Logarithmic scales. Times: dot p50, line p90, ring p99; half, 90% and 99% of the requests are within them.",
        {label: colour for label, colour in LEGEND.items() if colour in used},
    )
    panels = figure.subplots(1, 3, sharey=True)
    _draw_rates(panels[0], results)
    _draw_times(panels[1], results, "first token (TTFT)", [_times(result, "ttft_s") for result in results])
    _draw_times(panels[2], results, "further tokens (TPOT)", [_times(result, "tpot_s") for result in results])
    for row, result in enumerate(results):
        if result.title == style.SUBJECT:
            for axes in panels:
                axes.axhspan(row - 0.5, row + 0.5, color=style.BAND, linewidth=0, zorder=-1)
    return figure


def _colour(result: StrategyResult) -> str:
    if isinstance(result.metrics, PeerMetrics):
        return style.PEER
    return style.HIGHLIGHT if result.title == style.SUBJECT else style.OTHER


def _times(result: StrategyResult, name: str) -> tuple[float, float, float] | None:
    times: Percentiles = getattr(result.metrics, name, Percentiles())
    return (times.p50, times.p90 or times.p50, times.p99 or times.p50) if times.p50 else None


def _draw_rates(axes: Axes, results: Sequence[StrategyResult]) -> None:
    rates = [result.metrics.output_tokens_per_s for result in results]
    _finish(axes, "output tokens/s", rates, results, units.plain, most=3)
    for row, (result, rate) in enumerate(zip(results, rates, strict=True)):
        axes.plot([rate], [row], "o", color=_colour(result), markersize=7, clip_on=False)
        _write(axes, row, units.per_second(rate), result)
    axes.set_yticks(range(len(results)), [result.title for result in results])
    for result, label in zip(results, axes.get_yticklabels(), strict=True):
        label.set_fontweight("bold" if result.title == style.SUBJECT else "normal")
    axes.tick_params(axis="y", left=False, labelcolor=style.TEXT, labelsize=9)


def _draw_times(
    axes: Axes, results: Sequence[StrategyResult], title: str, found: Sequence[tuple[float, float, float] | None]
) -> None:
    _finish(axes, title, [time for times in found for time in times or ()], results, units.round_duration, most=2)
    axes.tick_params(axis="y", left=False, labelleft=False)
    for row, (result, times) in enumerate(zip(results, found, strict=True)):
        if times is None:
            _write(axes, row, "not known", result)
            continue
        p50, p90, p99 = times
        colour = _colour(result)
        axes.plot([p50, p99], [row, row], color=colour, linewidth=1.6)
        axes.plot([p90], [row], "|", color=colour, markersize=9, markeredgewidth=1.6)
        axes.plot([p99], [row], "o", color=colour, markersize=5.5, markerfacecolor=style.BACKGROUND)
        axes.plot([p50], [row], "o", color=colour, markersize=7)
        _write(axes, row, f"{units.duration(p50)} / {units.duration(p99)}", result)


def _finish(
    axes: Axes,
    title: str,
    values: Sequence[float],
    results: Sequence[StrategyResult],
    words: Callable[[float], str],
    *,
    most: int,
) -> None:
    style.set_log_scale(axes, "x", values, words, most=most)
    axes.set_title(title, pad=6)
    axes.set_ylim(len(results) - 0.5, -0.5)
    axes.spines["left"].set_visible(False)


def _write(axes: Axes, row: int, words: str, result: StrategyResult) -> None:
    """The figures of a row to the right of a panel."""
    axes.annotate(
        words, (1, row), (6, 0), xycoords=("axes fraction", "data"), textcoords="offset points", va="center", size=8,
        weight="bold" if result.title == style.SUBJECT else "normal",
    )  # fmt: skip
