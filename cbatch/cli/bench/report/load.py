"""The report of a load with a given number of users, of several numbers, or of the search for the most users."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from cbatch.base.units import format_count
from cbatch.cli.bench import units
from cbatch.cli.bench.load.measure import Capacity, LoadReport
from cbatch.cli.bench.load.users import LoadResult
from cbatch.cli.bench.report.comparison import pair
from cbatch.cli.bench.report.page import Detail, KeyFigure, Page, Picture, Table
from cbatch.cli.common.console import notice

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALTS = {
    "load": "Time to the first token, speed of a user and share of users within the objective, by number of users.",
    "users": "Users who have come, time to the first token and speed of each answer, over time.",
}


def judged_runs(report: LoadReport) -> dict[int, list[LoadResult]]:
    """The results of all rounds by number of users, without those in which nothing could be judged."""
    judged = {users: [run for run in report.rounds[users] if run.is_judged] for users in sorted(report.rounds)}
    return {users: same for users, same in judged.items() if same}


def draw(report: LoadReport) -> dict[str, Picture]:
    """A picture over the number of users after a search, over time otherwise. Says on stderr why there is none."""
    from cbatch.cli.bench.pictures.load import plot_load, plot_users
    from cbatch.cli.bench.pictures.style import svg_texts

    found, slo = report.found, report.slo
    figures: dict[str, Callable[[], Figure]] = {}
    if isinstance(found, Capacity):
        if runs := judged_runs(report):
            figures["load"] = lambda: plot_load(runs, slo, found.users)
    elif any(answer.ttft_s is not None for answer in found.timed):
        figures["users"] = lambda: plot_users(found, slo, report.scenario.users)
    if not figures:
        notice("there is no picture, because no answer came that could be judged; use a longer --duration")
    return {name: Picture(ALTS[name], svg) for name, svg in svg_texts(figures).items()}


def page_of(report: LoadReport, pictures: Mapping[str, Picture]) -> Page:
    """pictures: those of `draw`, or none"""
    scenario, options, found = report.scenario, report.options, report.found
    first, tps = units.round_duration(report.slo.ttft_s), units.plain(report.slo.tps)
    objective = f"a first token within {first} and {tps} tokens/s"
    lasts, think = units.round_duration(scenario.duration_s), units.round_duration(scenario.think_s)
    if isinstance(found, Capacity):
        result, headline = _searched(found, objective)
        method = f"Each probe lasts {lasts}; users come in its first quarter."
        strong = list(found.probes).index(found.users) if found.users in found.probes else None
    else:
        result, headline, strong = found, _loaded(found, objective), None
        method = f"{scenario.rate:g} users come a second on average, for {lasts}."
    every = [(users, run) for users in sorted(report.rounds) for run in report.rounds[users]]
    return Page(
        machine=report.machine,
        model=report.model,
        headline=headline,
        figures=_figures(result),
        picture=next(iter(pictures.values()), None),
        table=load_table(report.runs.items(), strong),
        facts=(
            f"questions of {options.input_len} and answers of {options.output_len} tokens, "
            f"{format_count(scenario.turns, 'turn')}, {think} of thinking in the mean; the objective (SLO) is "
            f"{objective} for each user"
        ),
        method=f"Users ask, read the answer, think and ask again. {method}",
        remarks=report.remarks,
        details=[Detail("Every run", [load_table(every)], is_printed=False)],
    )


def _loaded(result: LoadResult, objective: str) -> str:
    users = format_count(result.users, "user")
    if result.users_served is None:
        return f"{users} came, and none of their answers could be judged"
    return f"{users}: {units.share(result.users_served)} of them get {objective}"


def _searched(found: Capacity, objective: str) -> tuple[LoadResult, str]:
    """The probe that figures are taken from, and the headline."""
    if found.users not in found.probes:
        least = min(found.probes)
        users = "one user gets" if least == 1 else f"{least:,} users get"
        return found.probes[least], f"Not even {users} {objective}"
    limit = "At least " if found.is_limit else ""
    many = f"{found.users:,} users at once get" if found.users > 1 else "1 user at a time gets"
    return found.probes[found.users], f"{limit}{many} {objective}"


def _speed(seconds: float | None) -> str:
    return units.per_second(1 / seconds if seconds else None)


def _figures(result: LoadResult) -> list[KeyFigure]:
    ttft, tpot = result.ttft_s, result.tpot_s
    rate = units.per_second(result.output_tokens_per_s)
    return [
        KeyFigure(units.duration(ttft.p50), "to the first token (median)", f"99% within {units.duration(ttft.p99)}"),
        KeyFigure(_speed(tpot.p50), "tokens a second for a user (median)", f"90% get {_speed(tpot.p90)} or more"),
        KeyFigure(rate, "tokens a second for all", format_count(result.users, "user")),
    ]


def load_table(runs: Iterable[tuple[int, LoadResult]], strong: int | None = None) -> Table:
    """How users were served, one line a run.  runs: with their numbers of users"""
    return Table.of(
        [
            {
                "users": f"{users:,}",
                "within SLO": units.share(result.users_served),
                "answers": f"{result.answers:,}" + (f", {result.errors} errors" if result.errors else ""),
                "first token p50 / p99": pair(result.ttft_s),
                "tokens/s of a user p50 / p10": f"{_speed(result.tpot_s.p50)} / {_speed(result.tpot_s.p90)}",
                "tokens/s of all": units.per_second(result.output_tokens_per_s),
            }
            for users, result in runs
        ],
        strong,
    )
