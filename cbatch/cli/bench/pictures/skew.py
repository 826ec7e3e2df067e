"""The gain of continuous over static batches as a picture: over the skew of lengths, and by what it is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cbatch.cli.bench.gain import Gain
from cbatch.cli.bench.pictures import style
from cbatch.cli.bench.skew import RealWork, SkewPoint

FACTORS: dict[str, tuple[Callable[[Gain], float], str]] = {
    "slots that do not wait": (lambda gain: gain.slots, style.KIND_COLOURS["decode"]),
    "no padding": (lambda gain: gain.padding, style.KIND_COLOURS["padding"]),
    "time of a step": (lambda gain: gain.step_time, style.KIND_COLOURS["idle"]),
    "empty slots (tail)": (lambda gain: gain.tail, style.CHUNK_COLOURS[2]),
}
"""The factors whose product is the gain, and their colours."""

MEASURED = style.KIND_COLOURS["prefill"]


def plot_skew(points: Sequence[SkewPoint], real_work: Sequence[RealWork]) -> Figure:
    """The measured gain beside that of arithmetic, with marks where real work lies; and the factors of the gain."""
    figure = style.new_figure(
        2.75,
        "The more unequal the lengths, the more continuous batching gains",
        "How many times as fast as static batches with the same slots; skew 0: all lengths are equal.",
        {"measured": MEASURED, "by arithmetic": style.MUTED} | {name: colour for name, (_, colour) in FACTORS.items()},
    )
    gain, factors = figure.subplots(1, 2)
    _draw_gain(gain, points, real_work)
    skews = [point.skew for point in points]
    factors.axhline(1, color=style.MUTED, linewidth=0.8)
    for read, colour in FACTORS.values():
        values = [read(point.median.gain) for point in points]
        factors.plot(skews, values, color=colour, marker="o", markersize=3.5, linewidth=1.6)
    factors.set_ylim(bottom=0)
    factors.set_title("the factors of the gain; below 1 they eat some", pad=6)
    for axes in (gain, factors):
        axes.set_xlabel("skew (standard deviation of the logarithm of a length)")
        axes.grid(axis="y")
        axes.margins(x=0.03)
    return figure


def _draw_gain(axes: Axes, points: Sequence[SkewPoint], real_work: Sequence[RealWork]) -> None:
    skews = [point.skew for point in points]
    expected = [point.median.gain.expected for point in points]
    lines = {
        ("measured", "-"): [point.median.gain.measured for point in points],
        ("by steps", "--"): [one.by_steps for one in expected],
        ("by tokens", ":"): [one.by_tokens for one in expected],
    }
    dots = [(point.skew, one.gain.measured) for point in points for one in point.rounds]
    axes.plot(*zip(*dots, strict=True), "o", color=MEASURED, markersize=3)
    top = 1.18 * max(max(values) for values in lines.values())
    lowest = -top
    for (name, dashes), values in sorted(lines.items(), key=lambda line: line[1][-1]):
        colour, width = (MEASURED, 2.0) if name == "measured" else (style.MUTED, 1.2)
        axes.plot(skews, values, dashes, color=colour, linewidth=width)
        lowest = max(values[-1], lowest + 0.08 * top)  # names at the ends of lines, one above the other
        axes.annotate(
            name, (skews[-1], lowest), (8, 0), textcoords="offset points", va="center", size=8.5, color=colour,
            annotation_clip=False,
        )  # fmt: skip
    axes.set_ylim(0, top)
    for work in real_work:
        if is_field := work.high > work.low:
            axes.axvspan(work.low, work.high, color=style.EMPTY_SLOT, linewidth=0, zorder=0)
        else:
            axes.axvline(work.high, color=style.MUTED, linewidth=0.9)
        place, gap, side = (work.low, 2, "left") if is_field else (work.high, -2, "right")
        axes.annotate(
            work.name, (place, 0), (gap, 4), textcoords="offset points", rotation=90, ha=side, va="bottom", size=8
        )
    axes.set_title("gain, measured and by arithmetic", pad=6)
