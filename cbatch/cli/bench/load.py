"""Loads with one or several numbers of users, over rounds, the search for the most of them, and the report of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from cbatch.base.errors import ConfigError
from cbatch.base.units import format_count
from cbatch.cli.bench import units
from cbatch.cli.bench.options import BenchOptions
from cbatch.cli.bench.page import KeyFigure, Page, Picture, Table
from cbatch.cli.bench.pictures.plots import plot_load
from cbatch.cli.bench.roofline import describe
from cbatch.cli.bench.strategies import OnProgress, turns
from cbatch.cli.bench.users import SLO, Clock, Figures, Scenario, holds, run_load
from cbatch.cli.common.console import notice
from cbatch.cli.common.loading import open_engine
from cbatch.engine.thread import EngineThread

MAX_LAG_S = 0.1
"""The longest delay of a question by the program itself that is not told."""

DEFAULT_MAX_USERS, MAX_PROBE_S, WARMUP_S = 1024, 20.0, 1.0
"""Of a search: the most users, and the longest probe, in seconds; and those of the warm-up."""

Rounds = dict[int, list[Figures]]
"""The figures of every round, by number of users."""


def medians(rounds: Rounds) -> dict[int, Figures]:
    """Of each number of users, the run whose first tokens have the median p99; of two in the middle, the later one."""

    def wait(run: Figures) -> float:
        p99 = run["ttft_s"]["p99"]
        return math.inf if p99 is None else float(p99)

    return {users: sorted(rounds[users], key=wait)[len(rounds[users]) // 2] for users in sorted(rounds)}


class Capacity(NamedTuple):
    """The most users for whom the objective was seen to hold, and whether these were the most to be tried."""

    users: int
    is_limit: bool = False


def remarks(scenario: Scenario, rounds: Rounds, *, is_search: bool) -> list[str]:
    """Sentences about a load that was not what was asked for."""
    sentences = []
    runs = [run for same in rounds.values() for run in same]
    worst = max(runs, key=lambda run: run["users_missing"])
    if worst["users_missing"]:
        asked = worst["users"] + worst["users_missing"]
        words = f"Only {worst['users']:,} of {asked:,} users arrived, so these are not the figures of {asked:,} users."
        sentences.append(words if is_search else f"{words} {advice(scenario)}")
    if failed := [run["first_error"] for run in runs if run["first_error"]]:
        sentences.append(f"Some answers failed: {failed[0]}")
    if (lag := max(run["worst_lag_s"] for run in runs)) > MAX_LAG_S:
        sentences.append(f"Questions were asked up to {lag:.2f} s late, so the load was less than intended.")
    return sentences


def advice(scenario: Scenario) -> str:
    """The scenario with a rate at which all users arrive in its first half."""
    rate = math.ceil(2 * scenario.users / max(scenario.duration_s, 0.001))
    duration_s = math.ceil(2 * scenario.users / scenario.rate)
    return f"--rate {rate} or --duration {duration_s}s brings them in time."


def expected_arrivals(scenario: Scenario) -> str:
    """A sentence if the users of a scenario will not all have come when it ends; else nothing."""
    coming, users = scenario.rate * scenario.duration_s, format_count(scenario.users, "user")
    when = f"in {scenario.duration_s:g} s at {scenario.rate:g} a second"
    return "" if coming >= scenario.users else f"about {coming:,.0f} of {users} will arrive {when}. {advice(scenario)}"


def measure(options: BenchOptions, on_progress: OnProgress) -> Page:
    """Runs the load, with one or several numbers of users, or searches for the most of them. Raises ConfigError.

    Every round has prompts, pauses and times of arrival of its own; rounds of several numbers of users take turns.
    """
    slo, duration_s = SLO(options.slo_ttft, options.slo_tps), options.duration
    if options.find_capacity:
        duration_s = min(MAX_PROBE_S, duration_s)
    with open_engine(options.engine, quiet=options.is_silent) as engine:
        inputs, outputs = options.lengths()
        scenario = Scenario(
            users=max(options.users, default=DEFAULT_MAX_USERS),
            rate=options.rate,
            duration_s=duration_s,
            think_s=options.think,
            inputs=inputs,
            outputs=outputs,
            vocabulary=engine.model.vocab_size,
            context=engine.limits.sequence.longest,
            turns=options.turns,
            seed=options.seed,
        )
        is_one_load = not options.find_capacity and len(options.users) == 1
        if is_one_load and not options.quiet and (warning := expected_arrivals(scenario)):
            notice(warning)
        # One user asks for a moment, so that the first run does not pay for what happens only once.
        warm_up = scenario.probe(1, min(WARMUP_S, duration_s)).in_round(options.rounds)
        run_load(engine.thread, warm_up, slo)
        run = partial(run_rounds, engine.thread, slo=slo, rounds=options.rounds, on_progress=on_progress)
        rounds: Rounds = {}
        capacity = None

        def probe(users: int) -> Figures:
            rounds.update(run([scenario.probe(users, duration_s)]))
            return medians(rounds)[users]

        if options.find_capacity:
            capacity = find_capacity(probe, most=scenario.users)
        elif is_one_load:
            rounds = run([scenario])
        else:
            rounds = run([scenario.probe(users, duration_s) for users in options.users])
            capacity = most_served(medians(rounds))
        about = describe(engine)
    return report_of(about, options, scenario, rounds, capacity)


def report_of(
    about: Mapping[str, Any], options: BenchOptions, scenario: Scenario, rounds: Rounds, capacity: Capacity | None
) -> Page:
    """The figures of all rounds.  capacity: None for one load"""
    runs = medians(rounds)
    data = {**about, "load": next(iter(runs.values()))}
    if capacity is not None:
        points = [run | {"users": users} for users, run in runs.items()]
        data = {**about, "capacity_users": capacity.users, "capacity_is_limit": capacity.is_limit, "points": points}
    names = "rate", "turns", "input_len", "output_len", "slo_tps", "rounds", "seed"
    data["work"] = {name: getattr(options, name) for name in names} | {
        "users": list(options.users),
        "users_arrived": max(run["users"] for run in runs.values()),
        "duration_s": scenario.duration_s,
        "think_s": options.think,
        "slo_ttft_s": options.slo_ttft,
    }
    data["rounds"] = [
        run | {"users": users, "round": number} for users, same in rounds.items() for number, run in enumerate(same)
    ]
    return page_of(data | {"remarks": remarks(scenario, rounds, is_search=capacity is not None)}, rounds)


def run_rounds(
    engine_thread: EngineThread,
    scenarios: Sequence[Scenario],
    slo: SLO,
    rounds: int,
    on_progress: OnProgress,
    clock: Clock | None = None,
) -> Rounds:
    """Runs the scenarios by turns."""
    results: Rounds = {one.users: [] for one in scenarios}
    named = {f"{format_count(one.users, 'user')} for {one.duration_s:g} s": one for one in scenarios}
    for number, name in turns(named, rounds, on_progress):
        results[named[name].users].append(run_load(engine_thread, named[name].in_round(number), slo, clock))
    return results


def most_served(probes: Mapping[int, Figures]) -> Capacity:
    """The most of these users for whom, and for all fewer of whom, the objective holds."""
    served = list(itertools.takewhile(lambda users: holds(probes[users]), probes))
    return Capacity(served[-1] if served else 0, len(served) == len(probes))


def find_capacity(measure: Callable[[int], Figures], *, most: int = 4096, precision: float = 0.05) -> Capacity:
    """The most users for whom the objective holds: doubled until it fails, then bisected.

    measure:   runs with this many users; a run in which nothing can be judged fails
    precision: how close to bisect, as a share of the number of users; to one user at the closest
    Raises ConfigError if nothing can be judged with one user.
    """

    def are_served(users: int) -> bool:
        figures = measure(users)
        if users == 1 and figures["users_judged"] == 0:
            raise ConfigError("No answer finished within a probe with one user; use a longer --duration.")
        return holds(figures)

    good, bad = 0, 1
    while bad <= most and are_served(bad):
        good, bad = bad, min(2 * bad, most) if bad < most else most + 1
    is_limit = good == most
    while not is_limit and bad - good > max(1, precision * good):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if are_served(middle) else (good, middle)
    return Capacity(good, is_limit)


def picture_of(data: Mapping[str, Any], rounds: Rounds) -> Picture | None:
    """A picture over the number of users; none of one load, or if nothing can be judged."""
    judged = {users: [run for run in rounds[users] if _is_judged(run)] for users in sorted(rounds)}
    judged = {users: same for users, same in judged.items() if same}
    if "points" not in data or not judged:
        return None
    return Picture("load", partial(plot_load, judged, data["work"], data["capacity_users"]))


def _is_judged(run: Figures) -> bool:
    """Whether there were users to judge, and times of first and further tokens."""
    return run["users_served_share"] is not None and run["ttft_s"]["p50"] is not None and bool(run["tpot_s"]["p50"])


def page_of(data: dict[str, Any], rounds: Rounds) -> Page:
    """data: the object that `--json` prints"""
    work, runs = data["work"], medians(rounds)
    first, tps = units.round_duration(work["slo_ttft_s"]), units.plain(work["slo_tps"])
    objective = f"a first token within {first} and {tps} tokens/s"
    lasts, think = units.round_duration(work["duration_s"]), units.round_duration(work["think_s"])
    strong = None
    if "points" in data:
        most = data["capacity_users"]
        shown = runs.get(most, runs[min(runs)])
        limit = "At least " if data["capacity_is_limit"] else ""
        headline = f"{limit}{f'{most:,} users at once get' if most > 1 else '1 user at a time gets'} {objective}"
        if most in runs:
            strong = list(runs).index(most)
        else:
            headline = f"Not even {'one user gets' if 1 in runs else f'{min(runs):,} users get'} {objective}"
        method = f"Each probe lasts {lasts}; users come in its first quarter."
    else:
        shown = data["load"]
        runs, served = {shown["users"]: shown}, shown["users_served_share"]
        found = f": {units.share(served)} of them get {objective}"
        headline = format_count(shown["users"], "user")
        headline += " came, and none of their answers could be judged" if served is None else found
        method = f"{work['rate']:g} users come a second on average, for {lasts}."
    half, most_wait = (units.duration(shown["ttft_s"][name]) for name in ("p50", "p99"))
    speed, slow = (_speed(shown["tpot_s"][name]) for name in ("p50", "p90"))
    rate, came = units.number(shown["output_tokens_per_s"]), format_count(shown["users"], "user")
    return Page(
        data=data,
        headline=headline,
        figures=[
            KeyFigure(half, "to the first token (median)", f"99% within {most_wait}"),
            KeyFigure(speed, "tokens a second for a user (median)", f"90% get {slow} or more"),
            KeyFigure(rate, "tokens a second for all", came),
        ],
        picture=picture_of(data, rounds),
        table=load_table(runs.items(), strong),
        facts=(
            f"questions of {work['input_len']} and answers of {work['output_len']} tokens, "
            f"{format_count(work['turns'], 'turn')}, {think} of thinking in the mean; the objective (SLO) is "
            f"{objective} for each user"
        ),
        method=f"Users ask, read the answer, think and ask again. {method}",
        remarks=data["remarks"],
    )


def _speed(seconds: float | None) -> str:
    return units.number(1 / seconds if seconds else None)


def load_table(runs: Iterable[tuple[int, Mapping[str, Any]]], strong: int | None = None) -> Table:
    """How users were served, one line a run.  runs: with their numbers of users"""
    lines = [
        {
            "users": f"{users:,}",
            "within SLO": units.share(run["users_served_share"]),
            "answers": f"{run['answers']:,}" + (f", {run['errors']} errors" if run["errors"] else ""),
            "first token p50 / p99": units.pair(run["ttft_s"]),
            "tokens/s of a user p50 / p10": f"{_speed(run['tpot_s']['p50'])} / {_speed(run['tpot_s']['p90'])}",
            "tokens/s of all": units.number(run["output_tokens_per_s"]),
        }
        for users, run in runs
    ]
    return Table.of(lines, strong)
