"""Shows the results of a bench: on the screen, as pictures, and as a page."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cbatch.cli.bench.load.results import Capacity, LoadReport
from cbatch.cli.bench.render import tables
from cbatch.cli.bench.render.tables import markdown_lines, seconds
from cbatch.cli.bench.render.timeline import draw_timeline, side_by_side
from cbatch.cli.bench.results import ComparisonReport
from cbatch.cli.common.console import emit, notice, safe
from cbatch.engine import ConfigError

Report = ComparisonReport | LoadReport

WIDTH = 100
"""Columns of the timeline if stdout is not a terminal."""

NOT_ON_PAGE = ("strategy", "title", "elapsed_s_of_rounds", "first_error", "first_difference")


def print_report(report: Report) -> None:
    """Prints tables, and the timeline in characters."""
    machine = report.machine
    emit(safe(report.model))
    emit(safe(f"{machine.device}, {machine.threads} threads, torch {machine.torch}"))
    if isinstance(report, ComparisonReport):
        _print_comparison(report)
    else:
        _print_load(report)


def _print_comparison(report: ComparisonReport) -> None:
    work, rates, techniques, options = report.work, report.rates, report.techniques, report.options
    emit(
        f"{len(work.prompts)} requests ({safe(work.source)}), {work.prompt_tokens:,} prompt and "
        f"{work.output_tokens:,} output tokens, {options.batch_size} slots, median of {options.rounds}"
    )
    _print_block(markdown_lines(tables.strategy_table(report.strategies)))
    emit(
        f"\nThe roofline allows {seconds(report.bound.seconds)}: this device copies "
        f"{rates.bytes_per_s / 1e9:,.0f} GB/s and multiplies {rates.flops_per_s / 1e12:,.2f} TFLOP/s."
    )
    for sentence in report.assumed:
        emit(sentence)
    if (gain := report.gain) is not None:
        emit(f"\n{gain.sentence}")
    _print_block(markdown_lines(tables.waste_table(report.runs)))
    _print_block(markdown_lines(tables.replica_table(report.replicas)))
    _print_block(markdown_lines(tables.memory_table(techniques.prompt_memory or [])))
    _print_block(markdown_lines(tables.cost_table(techniques.token_costs or [])))
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    width = shutil.get_terminal_size((WIDTH, 24)).columns if is_terminal else WIDTH
    _print_block(draw_timeline(side_by_side(report.records), width))


def _print_load(report: LoadReport) -> None:
    scenario, found, options = report.scenario, report.found, report.options
    emit(
        f"prompts of {options.input_len} and answers of {options.output_len} tokens, {scenario.turns} turns, "
        f"{scenario.think_s:g} s of thinking; SLO: first token in {seconds(report.slo.ttft_s)}, "
        f"{report.slo.tps:g} tokens/s for each user"
    )
    _print_block(markdown_lines(tables.load_table(report.runs)))
    if isinstance(found, Capacity):
        limit = ", the most that were tried" if found.is_limit else ""
        emit(f"\nThe SLO holds for {found.users:,} users at once{limit}.")
    for sentence in report.remarks:
        emit(sentence)


def _print_block(lines: list[str]) -> None:
    if lines:
        emit("\n".join(["", *lines]))


def write_files(report: Report) -> None:
    """Writes the pictures and the page that were asked for. Raises ConfigError if they cannot be written."""
    plot, page = report.options.plot, report.options.report
    if not plot and not page:
        return
    try:
        pictures = _draw_pictures(report, Path(plot) if plot else None)
        if page:
            _write_page(Path(page), report, pictures)
    except OSError as error:
        raise ConfigError(f"Cannot write {error.filename}: {error.strerror}.") from error


def _draw_pictures(report: Report, folder: Path | None) -> dict[str, str]:
    """Draws all pictures, writes them into the folder, if any, and returns the SVG texts by title."""
    from cbatch.cli.bench.render.plots import FILE_NAMES, draw_all

    if isinstance(report, ComparisonReport):
        pictures = draw_all(report.records, report.runs, {}, "")
    else:
        loads = report.runs if isinstance(report.found, Capacity) else {}
        pictures = draw_all({}, {}, loads, f"TTFT {seconds(report.slo.ttft_s)}, {report.slo.tps:g} tokens/s")
    if folder is not None:
        for title, svg in pictures.items():
            (folder / FILE_NAMES[title]).write_text(svg, encoding="utf-8")
        notice(f"{len(pictures)} pictures are in {safe(str(folder))}")
    return pictures


def _write_page(path: Path, report: Report, pictures: Mapping[str, str]) -> None:
    from cbatch.cli.bench.render.report import html_report

    data = report.to_json()
    sections: dict[str, Any] = {"title": "cbatch bench"} | {name: data[name] for name in ("model", "machine", "work")}
    if isinstance(report, ComparisonReport):
        sections["strategies"] = {entry["title"]: _on_page(entry) for entry in data["strategies"]}
        sections["roofline"] = {name: value for name, value in data["roofline"].items() if name != "assumed"}
        sections |= data.get("techniques", {})
    elif isinstance(report.found, Capacity):
        sections["load"] = [_on_page(entry) for entry in data["points"]]
    else:
        sections["load"] = _on_page(data["load"])
    path.write_text(html_report(sections, pictures), encoding="utf-8")
    notice(f"the report is {safe(str(path))}")


def _on_page(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name not in NOT_ON_PAGE}
