"""Shows the results of a bench: on the screen, as pictures, and as a page."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from cbatch.base.errors import ConfigError
from cbatch.base.units import format_count
from cbatch.cli.bench.load.results import Capacity, LoadReport
from cbatch.cli.bench.render import tables
from cbatch.cli.bench.render.report import comparison, load
from cbatch.cli.bench.render.report.common import Occasion
from cbatch.cli.bench.render.report.html import Picture, write_page, write_pictures
from cbatch.cli.bench.render.tables import markdown_lines, seconds
from cbatch.cli.bench.render.timeline import draw_timeline, side_by_side
from cbatch.cli.bench.results import ComparisonReport
from cbatch.cli.common.console import emit, notice, safe

Report = ComparisonReport | LoadReport

ALTS = comparison.ALTS | load.ALTS

WIDTH = 100
"""Columns of the timeline if stdout is not a terminal."""


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
    work, techniques, options = report.work, report.techniques, report.options
    emit(
        f"{len(work.prompts)} requests ({safe(work.source)}), {work.prompt_tokens:,} prompt and "
        f"{work.output_tokens:,} output tokens, {options.batch_size} slots, median of {options.rounds}"
    )
    _print_block(markdown_lines(tables.strategy_table(report.strategies)))
    emit("\n" + tables.roofline_sentence(report.bound, report.rates))
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
        f"prompts of {options.input_len} and answers of {options.output_len} tokens, "
        f"{format_count(scenario.turns, 'turn')}, "
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
    from cbatch.cli.bench.render.plots import FILE_NAMES

    try:
        pictures = _draw_pictures(report)
        if plot:
            write_pictures(Path(plot), {FILE_NAMES[title]: picture for title, picture in pictures.items()})
        if page:
            _write_page(Path(page), report, pictures)
    except OSError as error:
        raise ConfigError(f"Cannot write {error.filename}: {error.strerror}.") from error


def _draw_pictures(report: Report) -> dict[str, Picture]:
    """All pictures by title. Says on stderr why there are none."""
    from cbatch.cli.bench.render.dark import dark_variant
    from cbatch.cli.bench.render.plots import draw_comparison, draw_load

    if isinstance(report, ComparisonReport):
        drawn = draw_comparison(report.records, report.strategies)
    else:
        drawn = draw_load(report)
    if not drawn:
        notice("there is no picture, because no answer came that could be judged; use a longer --duration")
    return {title: Picture(title, ALTS[title], svg, dark_variant(svg)) for title, svg in drawn.items()}


def _write_page(path: Path, report: Report, pictures: Mapping[str, Picture]) -> None:
    occasion = Occasion.now()
    if isinstance(report, ComparisonReport):
        page = comparison.comparison_page(report, pictures, occasion)
    else:
        page = load.load_page(report, pictures, occasion)
    write_page(path, page)
