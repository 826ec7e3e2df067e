"""The report of the curve of the gain over the skew of lengths."""

from __future__ import annotations

from collections.abc import Mapping

from cbatch.cli.bench.report.page import KeyFigure, Page, Picture, Table
from cbatch.cli.bench.skew import REAL_WORK, SkewReport

ALT = "Gain of continuous over static batches by the skew of lengths, measured and by arithmetic, and its factors."


def draw(report: SkewReport) -> dict[str, Picture]:
    from cbatch.cli.bench.pictures.skew import plot_skew
    from cbatch.cli.bench.pictures.style import svg_texts

    svgs = svg_texts({"skew": lambda: plot_skew(report.points, REAL_WORK)})
    return {name: Picture(ALT, svg) for name, svg in svgs.items()}


def skew_table(report: SkewReport) -> Table:
    """The gain by arithmetic, as measured, and its factors, a line for each skew."""
    lines = []
    for point in report.points:
        median = point.median
        gain, gains = median.gain, [one.gain.measured for one in point.rounds]
        factors = {"slots": gain.slots, "padding": gain.padding, "tail": gain.tail, "step time": gain.step_time}
        factors |= {"by steps": gain.expected.by_steps, "by tokens": gain.expected.by_tokens}
        line = {
            "skew": f"{point.skew:g}",
            "longest output": f"{point.longest_output:,}",
            "static": f"{median.static_s:.2f} s",
            "continuous": f"{median.continuous_s:.2f} s",
            "gain": f"{gain.measured:.2f}",
            "min – max": f"{min(gains):.2f} – {max(gains):.2f}",
        }
        lines.append(line | {name: f"{factor:.2f}" for name, factor in factors.items()})
    return Table.of(lines)


def page_of(report: SkewReport, pictures: Mapping[str, Picture]) -> Page:
    """pictures: that of `draw`, or none"""
    options, best = report.options, max(report.points, key=lambda point: point.median.gain.measured)
    inputs, outputs = options.mean_lengths
    gain = best.median.gain
    return Page(
        machine=report.machine,
        model=report.model,
        headline=f"Continuous batching: up to {gain.measured:.1f} × as fast as static batches, at skew {best.skew:g}",
        figures=[
            KeyFigure(f"{gain.slots:.1f} ×", "by slots that do not wait", f"at a skew of {best.skew:g}"),
            KeyFigure(f"{gain.tail:.2f} ×", "for empty slots at the end", "what eats some of it"),
            KeyFigure(f"{gain.step_time:.2f} ×", "for the time of a step", f"{gain.padding:.2f} × without padding"),
        ],
        picture=pictures.get("skew"),
        table=skew_table(report),
        facts=(
            f"{options.requests:,} requests with prompts of {inputs} and outputs of {outputs} tokens in the mean, "
            f"{options.batch_size} slots, median of {options.rounds}"
        ),
        method="Static and continuous batching were run by turns.",
        remarks=[
            "The gain is the product of the four factors after it; those below 1 eat some of it.",
            *(f"Real work, {work.name}: a skew of {work.skews} ({work.source})." for work in REAL_WORK),
        ],
        details=[],
    )
