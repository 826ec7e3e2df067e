"""The gain of continuous over static batches as a picture: over the skew of lengths, and by what it is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cbatch.cli.bench.gain import Gain
from cbatch.cli.bench.render import style
from cbatch.cli.bench.skew.curve import RealWork, SkewPoint

FACTORS: dict[str, tuple[Callable[[Gain], float], str]] = {
    "slots that do not wait": (lambda gain: gain.slots, style.KIND_COLOURS["decode"]),
    "no padding": (lambda gain: gain.padding, style.KIND_COLOURS["padding"]),
    "time of a step": (lambda gain: gain.step_time, style.KIND_COLOURS["idle"]),
    "empty slots (tail)": (lambda gain: gain.tail, style.CHUNK_COLOURS[2]),
}
"""The factors whose product is the gain, and their colours."""

MEASURED_COLOUR = style.KIND_COLOURS["prefill"]

LABEL_GAP = 0.08
"""Least distance between the names of two lines, as a share of the axis."""


def plot_skew(points: Sequence[SkewPoint], real_work: Sequence[RealWork]) -> Figure:
    """The measured gain beside that of arithmetic, with marks where real work lies; and the factors of the gain."""
    figure = style.new_figure(
        3.7,
        "The more unequal the lengths, the more continuous batching gains",
        "How many times as fast as static batches with the same slots; skew 0: all lengths are equal.",
    )
    style.add_legend(figure, {name: colour for name, (_, colour) in FACTORS.items()})
    gain, factors = style.axes_grid(figure, [1], 2, left=0.45, right=0.25, top=1.25, bottom=0.5, wspace=0.3)
    _draw_gain(gain, points, real_work)
    _draw_factors(factors, points)
    for axes in (gain, factors):
        axes.set_xlabel("skew (standard deviation of the logarithm of a length)")
        axes.grid(axis="y")
        axes.margins(x=0.03)
    return figure


def _draw_gain(axes: Axes, points: Sequence[SkewPoint], real_work: Sequence[RealWork]) -> None:
    skews = [point.skew for point in points]
    expected = [point.median.gain.expected for point in points]
    by_steps, by_tokens = [one.by_steps for one in expected], [one.by_tokens for one in expected]
    axes.plot(skews, by_steps, color=style.MUTED, linewidth=1.2, linestyle="dashed")
    axes.plot(skews, by_tokens, color=style.MUTED, linewidth=1.2, linestyle="dotted")
    measured = [point.median.gain.measured for point in points]
    axes.plot(skews, measured, color=MEASURED_COLOUR, linewidth=2)
    dots = [(point.skew, one.gain.measured) for point in points for one in point.rounds]
    axes.plot(*zip(*dots, strict=True), color=MEASURED_COLOUR, marker="o", markersize=3, linestyle="none")
    top = 1.18 * max(*measured, *by_steps, *by_tokens)
    axes.set_ylim(0, top)
    ends = {"measured": measured[-1], "by steps": by_steps[-1], "by tokens": by_tokens[-1]}
    _name_lines(axes, skews[-1], ends, gap=LABEL_GAP * top)
    for work in real_work:
        _mark(axes, work)
    axes.set_title("gain, measured and by arithmetic", pad=6)


def _mark(axes: Axes, work: RealWork) -> None:
    """A line, or a field between two, with its name at the lower end."""
    is_field = work.high > work.low
    if is_field:
        axes.axvspan(work.low, work.high, color=style.EMPTY_SLOT, linewidth=0, zorder=0)
    else:
        axes.axvline(work.high, color=style.MUTED, linewidth=0.9)
    place, gap, side = (work.low, 2, "left") if is_field else (work.high, -2, "right")
    axes.annotate(
        work.name, (place, 0), (gap, 4), textcoords="offset points", rotation=90, ha=side, va="bottom", size=8,
        color=style.TEXT,
    )  # fmt: skip


def _name_lines(axes: Axes, end: float, heights: dict[str, float], gap: float) -> None:
    """The names of lines at their right ends, at least `gap` apart."""
    lowest = -gap
    for name, height in sorted(heights.items(), key=lambda item: item[1]):
        lowest = max(height, lowest + gap)
        colour = MEASURED_COLOUR if name == "measured" else style.MUTED
        axes.annotate(
            name, (end, lowest), (8, 0), textcoords="offset points", va="center", size=8.5, color=colour,
            annotation_clip=False,
        )  # fmt: skip


def _draw_factors(axes: Axes, points: Sequence[SkewPoint]) -> None:
    skews = [point.skew for point in points]
    axes.axhline(1, color=style.MUTED, linewidth=0.8)
    for read, colour in FACTORS.values():
        values = [read(point.median.gain) for point in points]
        axes.plot(skews, values, color=colour, marker="o", markersize=3.5, linewidth=1.6)
    axes.set_ylim(bottom=0)
    axes.set_title("the factors of the gain; below 1 they eat some", pad=6)


@style.picture_style()
def draw_skew(points: Sequence[SkewPoint], real_work: Sequence[RealWork]) -> str:
    """The picture as SVG text."""
    return style.svg_text(plot_skew(points, real_work), "Skew")
