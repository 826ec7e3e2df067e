"""Shows the curve of the gain over the skew of lengths: as a table, as a picture, and as a page."""

from __future__ import annotations

from pathlib import Path

from cbatch.base.errors import ConfigError
from cbatch.cli.bench.render.report.common import Occasion, html_table, machine_detail, setting
from cbatch.cli.bench.render.report.html import Detail, KeyFigure, Page, Picture, write_page, write_pictures
from cbatch.cli.bench.render.report.html import Table as HtmlTable
from cbatch.cli.bench.render.tables import Table, markdown_lines
from cbatch.cli.bench.skew.curve import REAL_WORK, SkewReport
from cbatch.cli.common.console import emit, safe

TITLE, FILE_NAME = "Skew", "skew.svg"
ALT = "Gain of continuous over static batches by the skew of lengths, measured and by arithmetic, and its factors."


def print_report(report: SkewReport) -> None:
    """Prints a line for each skew, and where real work lies."""
    options, machine = report.options, report.machine
    inputs, outputs = options.mean_lengths
    emit(safe(report.model))
    emit(safe(f"{machine.device}, {machine.threads} threads, torch {machine.torch}"))
    emit(
        f"{options.requests:,} requests with prompts of {inputs} and outputs of {outputs} tokens in the mean, "
        f"{options.batch_size} slots, median of {options.rounds}\n"
    )
    emit("\n".join(markdown_lines(skew_table(report))))
    emit("\nThe gain is the product of the four factors after it; those below 1 eat some of it.")
    for work in REAL_WORK:
        emit(f"Real work, {work.name}: a skew of {work.skews} ({work.source}).")


def skew_table(report: SkewReport) -> Table:
    """The gain by arithmetic, as measured, and its factors, a line for each skew."""
    table: Table = []
    for point in report.points:
        median = point.median
        gain, gains = median.gain, [one.gain.measured for one in point.rounds]
        table.append(
            {
                "skew": f"{point.skew:g}",
                "longest output": f"{point.longest_output:,}",
                "static": f"{median.static_s:.2f} s",
                "continuous": f"{median.continuous_s:.2f} s",
                "gain": f"{gain.measured:.2f}",
                "min – max": f"{min(gains):.2f} – {max(gains):.2f}",
                "slots": f"{gain.slots:.2f}",
                "padding": f"{gain.padding:.2f}",
                "tail": f"{gain.tail:.2f}",
                "step time": f"{gain.step_time:.2f}",
                "by steps": f"{gain.expected.by_steps:.2f}",
                "by tokens": f"{gain.expected.by_tokens:.2f}",
            }
        )
    return table


def write_files(report: SkewReport) -> None:
    """Writes the picture and the page that were asked for. Raises ConfigError if they cannot be written."""
    plot, page = report.options.plot, report.options.report
    if not plot and not page:
        return
    from cbatch.cli.bench.render.dark import dark_variant
    from cbatch.cli.bench.render.skew_plot import draw_skew

    light = draw_skew(report.points, REAL_WORK)
    picture = Picture(TITLE, ALT, light, dark_variant(light))
    try:
        if plot:
            write_pictures(Path(plot), {FILE_NAME: picture})
        if page:
            write_page(Path(page), skew_page(report, picture, Occasion.now()))
    except OSError as error:
        raise ConfigError(f"Cannot write {error.filename}: {error.strerror}.") from error


def skew_page(report: SkewReport, picture: Picture, occasion: Occasion) -> Page:
    """The page of a curve."""
    options, best = report.options, max(report.points, key=lambda point: point.median.gain.measured)
    inputs, outputs = options.mean_lengths
    gain = best.median.gain
    table = html_table(skew_table(report))
    assert table is not None
    short = HtmlTable(table.head[:6], [line[:6] for line in table.lines])
    return Page(
        kicker=f"cbatch bench · {occasion.date}",
        headline=f"Continuous batching: up to {gain.measured:.1f} × as fast as static batches, at skew {best.skew:g}",
        figures=[
            KeyFigure(f"{gain.slots:.1f} ×", "by slots that do not wait", f"at a skew of {best.skew:g}"),
            KeyFigure(f"{gain.tail:.2f} ×", "for empty slots at the end", "what eats some of it"),
            KeyFigure(f"{gain.step_time:.2f} ×", "for the time of a step", f"{gain.padding:.2f} × without padding"),
        ],
        picture=picture,
        table=short,
        method=(
            f"{options.requests:,} requests with prompts of {inputs} and outputs of {outputs} tokens in the mean "
            f"were done with {options.batch_size} slots, by turns. Figures are the median of {options.rounds}. "
            f"{setting(report.machine, report.model, occasion)}"
        ),
        command=occasion.command,
        remarks=[f"Real work, {work.name}: a skew of {work.skews} ({work.source})." for work in REAL_WORK],
        details=[Detail("The factors of the gain", [table]), machine_detail(report.machine, report.model)],
    )
