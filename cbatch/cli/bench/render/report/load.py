"""What the report of a load says: of one with a given number of users, or of the search for the most users."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cbatch.cli.bench.load.results import Capacity, LoadReport, LoadResult
from cbatch.cli.bench.load.users import SLO
from cbatch.cli.bench.render import tables, units
from cbatch.cli.bench.render.report.common import Occasion, html_table, machine_detail, setting
from cbatch.cli.bench.render.report.html import Detail, KeyFigure, Page, Picture, Table
from cbatch.cli.common.percentiles import Percentiles

MOST_LINES = 5
"""Of the table of a search; the details have all of them."""

ALTS = {
    "Load": "Time to the first token, speed of a user and share of users within the objective, by number of users.",
    "Users": "Users who have come, time to the first token and speed of each answer, over time.",
}


def load_page(report: LoadReport, pictures: Mapping[str, Picture], occasion: Occasion) -> Page:
    """The page of a load.  pictures: by the titles that they have in `plots`"""
    scenario, options, found = report.scenario, report.options, report.found
    is_search = isinstance(found, Capacity)
    result, headline = _searched(found, report.slo) if isinstance(found, Capacity) else _loaded(found, report.slo)
    lasted = f"Each probe lasts {units.round_duration(scenario.duration_s)}; users come in its first quarter."
    came = f"{scenario.rate:g} users come a second on average, for {units.round_duration(scenario.duration_s)}."
    return Page(
        kicker=f"cbatch bench · {occasion.date}",
        headline=headline,
        figures=_figures(result),
        picture=pictures.get("Load" if is_search else "Users"),
        table=_users_table(found) if isinstance(found, Capacity) else _percentile_table(result),
        method=(
            f"Users ask, read the answer, think for {units.round_duration(scenario.think_s)} on average and ask again. "
            f"Questions have {options.input_len} tokens, answers {options.output_len}, conversations "
            f"{scenario.turns:,} turn{'s' * (scenario.turns > 1)}. {lasted if is_search else came} "
            f"{setting(report.machine, report.model, occasion)}"
        ),
        command=occasion.command,
        remarks=report.remarks,
        details=[
            Detail("Every run", [_all_runs(report)]),
            machine_detail(report.machine, report.model),
        ],
    )


def slo_words(slo: SLO) -> str:
    return f"a first token within {units.round_duration(slo.ttft_s)} and {units.plain(slo.tps)} tokens/s"


def _loaded(result: LoadResult, slo: SLO) -> tuple[LoadResult, str]:
    users = f"{result.users:,} user{'s' * (result.users != 1)}"
    if result.users_served is None:
        return result, f"{users} came, and none of their answers could be judged"
    return result, f"{users}: {units.share(result.users_served)} of them get {slo_words(slo)}"


def _searched(found: Capacity, slo: SLO) -> tuple[LoadResult, str]:
    """The probe that figures are taken from, and the headline."""
    if found.users not in found.probes:
        least = min(found.probes)
        users = "one user gets" if least == 1 else f"{least:,} users get"
        return found.probes[least], f"Not even {users} {slo_words(slo)}"
    limit = "At least " if found.is_limit else ""
    many = f"{found.users:,} users at once get" if found.users > 1 else "1 user at a time gets"
    return found.probes[found.users], f"{limit}{many} {slo_words(slo)}"


def _speed(seconds: float | None) -> str:
    return units.per_second(1 / seconds if seconds else None)


def _figures(result: LoadResult) -> list[KeyFigure]:
    users, ttft, tpot = f"{result.users:,} users", result.ttft_s, result.tpot_s
    rate = units.per_second(result.output_tokens_per_s)
    return [
        KeyFigure(units.duration(ttft.p50), "to the first token (median)", f"99% within {units.duration(ttft.p99)}"),
        KeyFigure(_speed(tpot.p50), "tokens a second for a user (median)", f"90% get {_speed(tpot.p90)} or more"),
        KeyFigure(rate, "tokens a second for all", users if result.users != 1 else "1 user"),
    ]


def _percentile_table(result: LoadResult) -> Table:
    shares = {"half of the answers": "p50", "90% of the answers": "p90", "99% of the answers": "p99"}

    def of(times: Percentiles, name: str) -> float | None:
        value: float | None = getattr(times, name)
        return value

    return Table(
        ["", "first token within", "tokens/s at least"],
        [
            [words, units.duration(of(result.ttft_s, name)), _speed(of(result.tpot_s, name))]
            for words, name in shares.items()
        ],
    )


def shown_users(users: Sequence[int], capacity: int) -> list[int]:
    """The numbers of users that the table of a search shows: around the capacity, and the ends."""
    held = max((n for n, count in enumerate(users) if count <= capacity), default=0)
    last = len(users) - 1
    kept = dict.fromkeys((held, min(held + 1, last), 0, last, held // 2, *range(last)))
    return [users[n] for n in sorted(list(kept)[:MOST_LINES])]


def _users_table(found: Capacity) -> Table:
    shown = shown_users(list(found.probes), found.users)
    lines = []
    for users in shown:
        run = found.probes[users]
        lines.append(
            [
                f"{users:,} user{'s' * (users != 1)}",
                units.share(run.users_served),
                units.duration(run.ttft_s.p50),
                units.duration(run.ttft_s.p99),
                _speed(run.tpot_s.p90),
                units.per_second(run.output_tokens_per_s),
            ]
        )
    head = [
        "",
        "within the objective",
        "first token p50",
        "first token p99",
        "tokens/s of a user p10",
        "tokens/s of all",
    ]
    return Table(head, lines, strong=shown.index(found.users) if found.users in shown else None)


def _all_runs(report: LoadReport) -> Table:
    rounds = report.rounds or {users: [run] for users, run in report.runs.items()}
    runs = [(users, run) for users in sorted(rounds) for run in rounds[users]]
    table = html_table([line for users, run in runs for line in tables.load_table({users: run})])
    assert table is not None
    return table
