"""Shows the results of a bench: on the screen, as pictures, and as a page."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbatch.cli.bench.load.results import Capacity, LoadReport
from cbatch.cli.bench.render.tables import (
    Table,
    cost_table,
    load_table,
    markdown_lines,
    memory_table,
    seconds,
    strategy_table,
    waste_table,
)
from cbatch.cli.bench.render.timeline import SIDE_BY_SIDE, draw_timeline
from cbatch.cli.bench.results import ComparisonReport
from cbatch.cli.common.console import emit, notice, safe

if TYPE_CHECKING:
    from cbatch.cli.bench.recorder import RunRecord

Report = ComparisonReport | LoadReport

WIDTH = 100
"""Columns of the timeline if stdout is not a terminal."""

NOT_ON_PAGE = ("strategy", "title", "elapsed_s_of_rounds", "first_error", "first_difference")


def print_comparison(report: ComparisonReport, records: Mapping[str, RunRecord]) -> None:
    """Prints tables, and the timeline in characters."""
    work, roofline, techniques = report.work, report.roofline, report.techniques
    _print_head(report)
    emit(
        f"{work.requests} requests ({safe(work.source)}), {work.prompt_tokens:,} prompt and "
        f"{work.output_tokens:,} output tokens, {work.slots} slots, median of {work.rounds}"
    )
    _print_table(strategy_table(report.strategies))
    emit(
        f"\nThe roofline allows {seconds(roofline.floor_s)}: this device copies "
        f"{roofline.copy_bytes_per_s / 1e9:,.0f} GB/s and multiplies "
        f"{roofline.matrix_flops_per_s / 1e12:,.2f} TFLOP/s."
    )
    for sentence in roofline.assumed:
        emit(sentence)
    _print_table(waste_table(report.runs))
    if techniques.prompt_memory is not None:
        _print_table(memory_table(techniques.prompt_memory))
    if techniques.token_costs is not None:
        _print_table(cost_table(techniques.token_costs))
    pair = {title: records[title] for title in SIDE_BY_SIDE if title in records}
    if pair:
        is_terminal = sys.stdout is not None and sys.stdout.isatty()
        width = shutil.get_terminal_size((WIDTH, 24)).columns if is_terminal else WIDTH
        emit("")
        for line in draw_timeline(pair, width):
            emit(line)


def print_load(report: LoadReport) -> None:
    settings = report.settings
    _print_head(report)
    emit(
        f"prompts of {settings.input_len} and answers of {settings.output_len} tokens, {settings.turns} turns, "
        f"{settings.think_s:g} s of thinking; SLO: first token in {seconds(settings.slo_ttft_s)}, "
        f"{settings.slo_tps:g} tokens/s for each user"
    )
    _print_table(load_table(report.runs))
    if isinstance(report.found, Capacity):
        limit = ", the most that were tried" if report.found.is_limit else ""
        emit(f"\nThe SLO holds for {report.found.users:,} users at once{limit}.")
    lag = max(result.worst_lag_s for result in report.runs.values())
    if lag > 0.1:
        emit(f"Questions were asked up to {seconds(lag)} late, so the load was less than intended.")


def draw_pictures(report: Report, records: Mapping[str, RunRecord], folder: Path | None) -> list[tuple[str, str]]:
    """Draws all pictures, writes them into the folder, if any, and returns the title and SVG of each."""
    from cbatch.cli.bench.render.plots import draw_all, load_points

    if isinstance(report, ComparisonReport):
        pictures = draw_all(records, report.runs)
    else:
        settings = report.settings
        points = load_points(report.runs) if isinstance(report.found, Capacity) else []
        objective = f"TTFT {seconds(settings.slo_ttft_s)}, {settings.slo_tps:g} tokens/s"
        pictures = draw_all({}, {}, points, objective)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for picture in pictures.values():
            (folder / picture.file_name).write_text(picture.svg, encoding="utf-8")
        notice(f"{len(pictures)} pictures are in {safe(str(folder))}")
    return [(title, picture.svg) for title, picture in pictures.items()]


def write_page(path: Path, report: Report, pictures: list[tuple[str, str]]) -> None:
    """Writes the report as one HTML page."""
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


def _print_head(report: Report) -> None:
    machine = report.machine
    emit(safe(report.model))
    emit(safe(f"{machine.device}, {machine.threads} threads, torch {machine.torch}"))


def _print_table(table: Table) -> None:
    emit("")
    for line in markdown_lines(table):
        emit(line)
