"""The gain of continuous over static batches as a picture: over the skew of lengths, and by its factors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from cbatch.cli.bench.pictures import style
from cbatch.cli.bench.pictures.plots import Figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class RealWork(NamedTuple):
    """The skew of the lengths of real outputs, from one set of data to another."""

    name: str
    low: float
    high: float


REAL_WORK = (
    RealWork("instructions", 0.47, 0.67),
    RealWork("chat", 0.63, 0.63),
    RealWork("code completion", 1.26, 1.26),
)
"""The 805 instructions of AlpacaEval, answered by GPT-4 1106, Llama 3 8B, GPT-4o and Mistral 7B v0.2
(github.com/tatsu-lab/alpaca_eval), and the Azure LLM inference trace 2023 (github.com/Azure/AzurePublicDataset).

The skew of such lengths is that of log-normal ones from which 8 slots that do not wait would gain as much. Computed
from the published data by `python -m scripts.benchmarks lengths` on 25 November 2026.
"""

FACTORS = {
    "slots that do not wait": ("slots", style.KIND_COLOURS["decode"]),
    "no padding": ("padding", style.KIND_COLOURS["padding"]),
    "time of a step": ("step_time", style.KIND_COLOURS["idle"]),
    "empty slots (tail)": ("tail", style.colour("#117733", "#6fd08c")),
}
"""The factors whose product is the gain, and their colours."""

MEASURED = style.KIND_COLOURS["prefill"]


def plot_skew(points: Sequence[Figures]) -> Figure:
    """The measured gain beside that of arithmetic, with marks where real work lies; and the factors of the gain.

    points: those of `--json`
    """
    figure = style.new_figure(
        2.75,
        "The more unequal the lengths, the more continuous batching gains",
        "How many times as fast as static batches with the same slots; skew 0: all lengths are equal.",
        {"measured": MEASURED, "by arithmetic": style.MUTED} | {name: colour for name, (_, colour) in FACTORS.items()},
    )
    gain, factors = figure.subplots(1, 2)
    _draw_gain(gain, points)
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


def _draw_gain(axes: Axes, points: Sequence[Figures]) -> None:
    skews = [point["skew"] for point in points]
    lines = {
        ("measured", "-", MEASURED, 2.0): [point["gain"]["measured"] for point in points],
        ("by steps", "--", style.MUTED, 1.2): [point["expected"]["by_steps"] for point in points],
        ("by tokens", ":", style.MUTED, 1.2): [point["expected"]["by_tokens"] for point in points],
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
    for name, low, high in REAL_WORK:
        if is_field := high > low:
            axes.axvspan(low, high, color=style.EMPTY_SLOT, linewidth=0, zorder=0)
        else:
            axes.axvline(high, color=style.MUTED, linewidth=0.9)
        place, gap, side = (low, 2, "left") if is_field else (high, -2, "right")
        style.write(axes, name, (place, 0), (gap, 4), rotation=90, ha=side, va="bottom", size=8)
    axes.set_title("gain, measured and by arithmetic", pad=6)
