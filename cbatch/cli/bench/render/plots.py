"""The pictures of a bench: which there are, what they are called, and which of them there is data for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from cbatch.cli.bench.load.results import Capacity, LoadReport
from cbatch.cli.bench.load.users import SERVED_SHARE
from cbatch.cli.bench.recorder import RunRecord
from cbatch.cli.bench.render import style, timeline
from cbatch.cli.bench.render.load_plot import judged_runs, plot_load
from cbatch.cli.bench.render.speculation_plot import plot_speculation, record_with_drafts
from cbatch.cli.bench.render.speed_plot import plot_speed, speed_rows
from cbatch.cli.bench.render.step_plot import plot_step
from cbatch.cli.bench.render.timeline_plot import plot_timeline
from cbatch.cli.bench.render.users_plot import plot_users
from cbatch.cli.bench.render.utilisation_plot import plot_utilisation
from cbatch.cli.bench.results import AnyResult, FailedPeer, RunMetrics

FILE_NAMES = {
    "Timeline": "timeline.svg",
    "Utilisation": "utilisation.svg",
    "Speed": "speed.svg",
    "Load": "load.svg",
    "Users": "users.svg",
    "One step": "step.svg",
    "Speculation": "speculation.svg",
}
"""Of all pictures, by title."""


@style.picture_style()
def draw_comparison(records: Mapping[str, RunRecord], results: Sequence[AnyResult]) -> dict[str, str]:
    """The SVG text of all pictures that there is data for, by the titles of FILE_NAMES.

    records: by the titles of the strategies; a step of the last of `side_by_side` is drawn too
    results: of strategies and peers
    """
    pair = timeline.side_by_side(records)
    figures: dict[str, Figure] = {}
    if pair:
        figures["Timeline"] = plot_timeline(pair)
    done = [result for result in results if not isinstance(result, FailedPeer)]
    peers = {one.title: one.metrics.elapsed_s for one in done if not isinstance(one.metrics, RunMetrics)}
    if records:
        figures["Utilisation"] = plot_utilisation(records, peers)
    if rows := speed_rows(results):
        figures["Speed"] = plot_speed(rows)
    if pair and (example := (record := list(pair.values())[-1]).example) is not None:
        figures["One step"] = plot_step(record, example)
    if (drafted := record_with_drafts(records)) is not None:
        figures["Speculation"] = plot_speculation(drafted)
    return _drawn(figures)


@style.picture_style()
def draw_load(report: LoadReport) -> dict[str, str]:
    """The same for a load: over the number of users after a search, over time otherwise."""
    found = report.found
    if not isinstance(found, Capacity):
        has_answers = any(answer.ttft_s is not None for answer in found.timed)
        return _drawn({"Users": plot_users(found, report.slo, report.scenario.users)} if has_answers else {})
    runs = judged_runs(report)
    return _drawn({"Load": plot_load(runs, report.slo, found.users, SERVED_SHARE)} if runs else {})


def _drawn(figures: Mapping[str, Figure]) -> dict[str, str]:
    return {title: style.svg_text(figure, title) for title, figure in figures.items()}
