"""Output tokens a second and latency of each strategy, as a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cbatch.cli.bench.render import style, units
from cbatch.cli.bench.results import AnyResult, FailedPeer, PeerMetrics
from cbatch.cli.common.percentiles import Percentiles

TOP, BOTTOM, RIGHT, ROW = 1.3, 0.32, 0.12, 0.3
NUMBER, PAIR = 0.62, 1.32
"""Inches for the figures beside a panel: one of them, or two."""

GAP = 0.16


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """One line of the picture. Times are None if they are not known."""

    title: str
    colour: str
    output_tokens_per_s: float
    ttft_s: Percentiles | None
    tpot_s: Percentiles | None


COLOURS = {
    "continuous batching": style.HIGHLIGHT,
    "other ways on the same engine": style.OTHER,
    "other engines": style.PEER,
}


def speed_rows(results: Sequence[AnyResult]) -> list[SpeedRow]:
    """Strategies and peers in their order, without those that failed."""
    rows = []
    for result in results:
        if isinstance(result, FailedPeer):
            continue
        metrics, colour = result.metrics, style.HIGHLIGHT if result.title == style.SUBJECT else style.OTHER
        if isinstance(metrics, PeerMetrics):
            rows.append(SpeedRow(result.title, style.PEER, metrics.output_tokens_per_s, None, None))
        else:
            rows.append(SpeedRow(result.title, colour, metrics.output_tokens_per_s, metrics.ttft_s, metrics.tpot_s))
    return rows


def plot_speed(rows: Sequence[SpeedRow]) -> Figure:
    """Three panels on logarithmic scales, so that a very slow row leaves space for the others."""
    figure = style.new_figure(
        TOP + BOTTOM + ROW * len(rows),
        "Output speed, and how long a request waits for its first and its next token",
        "Logarithmic scales. Times: dot p50, line p90, ring p99; half, 90% and 99% of the requests are within them.",
    )
    used = {row.colour for row in rows}
    style.add_legend(figure, {label: colour for label, colour in COLOURS.items() if colour in used})
    left = 0.3 + 0.07 * max(len(row.title) for row in rows)
    width = (style.WIDTH - left - RIGHT - NUMBER - 2 * PAIR - 2 * GAP) / 3
    for place, row in enumerate(rows):
        if row.colour == style.HIGHLIGHT:
            style.add_band(figure, TOP + place * ROW, ROW)
    lefts = [left, left + width + NUMBER + GAP, left + 2 * width + NUMBER + PAIR + 2 * GAP]
    panels = [style.add_axes(figure, start, TOP, width, ROW * len(rows)) for start in lefts]
    _draw_rates(panels[0], rows)
    _draw_times(panels[1], rows, "first token (TTFT)", lambda row: row.ttft_s)
    _draw_times(panels[2], rows, "further tokens (TPOT)", lambda row: row.tpot_s)
    return figure


def _draw_rates(axes: Axes, rows: Sequence[SpeedRow]) -> None:
    _finish(axes, "output tokens/s", [row.output_tokens_per_s for row in rows], len(rows), units.plain, most=3)
    for place, row in enumerate(rows):
        axes.plot([row.output_tokens_per_s], [place], "o", color=row.colour, markersize=7, clip_on=False)
        _write(axes, place, units.per_second(row.output_tokens_per_s), row)
    axes.set_yticks(range(len(rows)), [row.title for row in rows])
    for row, label in zip(rows, axes.get_yticklabels(), strict=True):
        label.set_fontweight("bold" if row.colour == style.HIGHLIGHT else "normal")
    axes.tick_params(axis="y", left=False, labelcolor=style.TEXT, labelsize=9)


def _draw_times(axes: Axes, rows: Sequence[SpeedRow], title: str, of: Callable[[SpeedRow], Percentiles | None]) -> None:
    found: list[tuple[int, SpeedRow, tuple[float, float, float]]] = []
    for place, row in enumerate(rows):
        if (times := of(row)) is not None and times.p50:
            found.append((place, row, (times.p50, times.p90 or times.p50, times.p99 or times.p50)))
    values = [time for _, _, times_of_row in found for time in times_of_row]
    _finish(axes, title, values, len(rows), units.round_duration, most=2)
    axes.set_yticks([])
    for place, row, (p50, p90, p99) in found:
        axes.plot([p50, p99], [place, place], color=row.colour, linewidth=1.6)
        axes.plot([p90], [place], "|", color=row.colour, markersize=9, markeredgewidth=1.6)
        axes.plot([p99], [place], "o", color=row.colour, markersize=5.5, markerfacecolor=style.BACKGROUND)
        axes.plot([p50], [place], "o", color=row.colour, markersize=7)
        _write(axes, place, f"{units.duration(p50)} / {units.duration(p99)}", row)
    known = {place for place, _, _ in found}
    for place, row in enumerate(rows):
        if place not in known:
            _write(axes, place, "not known", row)


def _finish(
    axes: Axes, title: str, values: Sequence[float], count: int, words: Callable[[float], str], *, most: int
) -> None:
    style.set_log_scale(axes, "x", style.log_limits(values), words, most)
    axes.set_title(title, pad=6)
    axes.set_ylim(count - 0.5, -0.5)
    axes.spines[["left"]].set_visible(False)


def _write(axes: Axes, place: int, words: str, row: SpeedRow) -> None:
    """The figures of a row to the right of a panel."""
    weight = "bold" if row.colour == style.HIGHLIGHT else "normal"
    axes.annotate(
        words,
        (1, place),
        (6, 0),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        va="center",
        size=8,
        weight=weight,
        color=style.TEXT,
    )
