"""Shows the curve of the gain over the skew of lengths: as a table, as a picture, and as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cbatch.cli.bench.render.tables import Table, markdown_lines
from cbatch.cli.bench.skew.curve import REAL_WORK, SkewReport
from cbatch.cli.common.console import emit, notice, safe
from cbatch.engine import ConfigError

TITLE, FILE_NAME = "Skew", "skew.svg"


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
    from cbatch.cli.bench.render.skew_plot import draw_skew

    picture = draw_skew(report.points, REAL_WORK)
    try:
        if plot:
            (Path(plot) / FILE_NAME).write_text(picture, encoding="utf-8")
            notice(f"the picture is {safe(str(Path(plot) / FILE_NAME))}")
        if page:
            _write_page(Path(page), report, picture)
    except OSError as error:
        raise ConfigError(f"Cannot write {error.filename}: {error.strerror}.") from error


def _write_page(path: Path, report: SkewReport, picture: str) -> None:
    from cbatch.cli.bench.render.report import html_report

    data = report.to_json()
    sections: dict[str, Any] = {"title": "cbatch bench: the gain over the skew of lengths"}
    sections |= {name: data[name] for name in ("model", "machine", "work")}
    sections["gain of continuous over static batches"] = skew_table(report)
    sections["real work"] = data["real_work"]
    path.write_text(html_report(sections, {TITLE: picture}), encoding="utf-8")
    notice(f"the report is {safe(str(path))}")
