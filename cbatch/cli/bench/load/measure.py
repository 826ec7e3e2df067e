"""Loads with one or several numbers of users, over rounds, the search for the most of them, and the report of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cbatch.base.errors import ConfigError
from cbatch.base.units import format_count
from cbatch.cli.bench.load.users import SLO, Clock, LoadResult, Scenario, run_load
from cbatch.cli.bench.options import BenchOptions
from cbatch.cli.bench.results import Machine, describe_model
from cbatch.cli.common.console import notice
from cbatch.cli.common.loading import open_engine
from cbatch.engine.thread import EngineThread

MAX_LAG_S = 0.1
"""The longest delay of a question by the program itself that is not told."""

MAX_PROBE_S = 20.0
"""The longest probe of a search, in seconds."""

DEFAULT_MAX_USERS = 1024

WARMUP_S = 1.0


def median_result(results: Sequence[LoadResult]) -> LoadResult:
    """Of several runs, the one whose first tokens have the median p99; of two in the middle, the later one."""
    waits = [math.inf if result.ttft_s.p99 is None else result.ttft_s.p99 for result in results]
    return results[sorted(range(len(results)), key=waits.__getitem__)[len(results) // 2]]


@dataclass(frozen=True, slots=True)
class Capacity:
    """The most users for whom the objective was seen to hold, and the median runs of all numbers of users.

    is_limit: whether this was the most users to be tried
    """

    users: int
    probes: dict[int, LoadResult]
    is_limit: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "capacity_users": self.users,
            "capacity_is_limit": self.is_limit,
            "points": [result.to_json() | {"users": users} for users, result in self.probes.items()],
        }


@dataclass(frozen=True, slots=True)
class LoadReport:
    """One load, several numbers of users, or the search for the most of them.

    rounds: the results of every round, by number of users; `found` has those of the median rounds
    """

    options: BenchOptions
    machine: Machine
    model: str
    scenario: Scenario
    slo: SLO
    found: LoadResult | Capacity
    rounds: dict[int, list[LoadResult]]

    @property
    def runs(self) -> dict[int, LoadResult]:
        """The results by number of users."""
        return self.found.probes if isinstance(self.found, Capacity) else {self.found.users: self.found}

    @property
    def remarks(self) -> list[str]:
        """Sentences about a load that was not what was asked for."""
        sentences = []
        runs = [run for same in self.rounds.values() for run in same]
        worst = max(runs, key=lambda result: result.users_missing)
        if worst.users_missing:
            asked = worst.users + worst.users_missing
            words = f"Only {worst.users:,} of {asked:,} users arrived, so these are not the figures of {asked:,} users."
            sentences.append(words if isinstance(self.found, Capacity) else f"{words} {advice(self.scenario)}")
        if failed := [result.first_error for result in runs if result.first_error]:
            sentences.append(f"Some answers failed: {failed[0]}")
        if (lag := max(result.worst_lag_s for result in runs)) > MAX_LAG_S:
            sentences.append(f"Questions were asked up to {lag:.2f} s late, so the load was less than intended.")
        return sentences

    def to_json(self) -> dict[str, Any]:
        found, scenario = self.found.to_json(), self.scenario
        return {
            "machine": asdict(self.machine),
            "model": self.model,
            **(found if isinstance(self.found, Capacity) else {"load": found}),
            "work": {
                "users": list(self.options.users),
                "users_arrived": max(result.users for result in self.runs.values()),
                "rate": scenario.rate,
                "duration_s": scenario.duration_s,
                "think_s": scenario.think_s,
                "turns": scenario.turns,
                "input_len": self.options.input_len,
                "output_len": self.options.output_len,
                "slo_ttft_s": self.slo.ttft_s,
                "slo_tps": self.slo.tps,
                "rounds": self.options.rounds,
                "seed": self.options.seed,
            },
            "rounds": [
                run.to_json() | {"users": users, "round": number}
                for users, same in self.rounds.items()
                for number, run in enumerate(same)
            ],
            "remarks": self.remarks,
        }


def advice(scenario: Scenario) -> str:
    """The scenario with a rate at which all users arrive in its first half."""
    rate = math.ceil(2 * scenario.users / max(scenario.duration_s, 0.001))
    duration_s = math.ceil(2 * scenario.users / scenario.rate)
    return f"--rate {rate} or --duration {duration_s}s brings them in time."


def expected_arrivals(scenario: Scenario) -> str:
    """A sentence if the users of a scenario will not all have come when it ends; else nothing."""
    coming = scenario.rate * scenario.duration_s
    if coming >= scenario.users:
        return ""
    return (
        f"about {coming:,.0f} of {format_count(scenario.users, 'user')} will arrive in {scenario.duration_s:g} s at "
        f"{scenario.rate:g} a second. {advice(scenario)}"
    )


def measure_load(options: BenchOptions, on_progress: Callable[[str], None]) -> LoadReport:
    """Runs the load, with one or several numbers of users, or searches for the most of them. Raises ConfigError.

    Every round has prompts, pauses and times of arrival of its own; rounds of several numbers of users take turns.
    """
    slo = SLO(options.slo_ttft, options.slo_tps)
    with open_engine(options.engine, quiet=options.is_silent) as engine:
        inputs, outputs = options.lengths
        scenario = Scenario(
            users=max(options.users, default=DEFAULT_MAX_USERS),
            rate=options.rate,
            duration_s=min(MAX_PROBE_S, options.duration) if options.find_capacity else options.duration,
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
        runs = Runs(engine.thread, scenario, slo, options.rounds, on_progress)
        runs.warm_up()
        found: LoadResult | Capacity
        if options.find_capacity:
            found = find_capacity(lambda users: runs.probe([users])[users], most=scenario.users)
        elif is_one_load:
            found = runs.load()
        else:
            found = most_served(runs.probe(options.users))
        machine, model = Machine.of(engine), describe_model(engine)
        return LoadReport(options, machine, model, scenario, slo, found, runs.results)


class Runs:
    """Runs of a scenario on one engine, and what all of them gave, by number of users."""

    def __init__(
        self,
        engine_thread: EngineThread,
        scenario: Scenario,
        slo: SLO,
        rounds: int,
        on_progress: Callable[[str], None],
        clock: Clock | None = None,
    ) -> None:
        self._engine_thread, self._scenario, self._slo = engine_thread, scenario, slo
        self._rounds, self._on_progress, self._clock = rounds, on_progress, clock
        self.results: dict[int, list[LoadResult]] = {}

    def warm_up(self) -> None:
        """Lets one user ask for a moment, so that the first run does not pay for what happens only once."""
        duration_s = min(WARMUP_S, self._scenario.duration_s)
        run_load(self._engine_thread, self._scenario.probe(1, duration_s).in_round(self._rounds), self._slo)

    def load(self) -> LoadResult:
        """The median run of the scenario as it is."""
        return self._run([self._scenario])[self._scenario.users]

    def probe(self, users: Sequence[int]) -> dict[int, LoadResult]:
        """The median probes with each of these numbers of users, by turns."""
        return self._run([self._scenario.probe(count, self._scenario.duration_s) for count in users])

    def _run(self, scenarios: Sequence[Scenario]) -> dict[int, LoadResult]:
        for number in range(self._rounds):
            for one in scenarios:
                of_rounds = f", round {number + 1} of {self._rounds}" if self._rounds > 1 else ""
                self._on_progress(f"{format_count(one.users, 'user')} for {one.duration_s:g} s{of_rounds}")
                result = run_load(self._engine_thread, one.in_round(number), self._slo, self._clock)
                self.results.setdefault(one.users, []).append(result)
        return {one.users: median_result(self.results[one.users]) for one in scenarios}


def most_served(probes: dict[int, LoadResult]) -> Capacity:
    """The most of these users for whom, and for all fewer of whom, the objective holds."""
    served = list(itertools.takewhile(lambda users: probes[users].holds, probes))
    return Capacity(served[-1] if served else 0, probes, len(served) == len(probes))


def find_capacity(measure: Callable[[int], LoadResult], *, most: int = 4096, precision: float = 0.05) -> Capacity:
    """The most users for whom the objective holds: doubled until it fails, then bisected.

    measure:   runs with this many users; a run in which nothing can be judged fails
    precision: how close to bisect, as a share of the number of users; to one user at the closest
    Raises ConfigError if nothing can be judged with one user.
    """
    probes: dict[int, LoadResult] = {}

    def holds(users: int) -> bool:
        probes[users] = measure(users)
        return probes[users].holds

    good, bad = 0, 1
    while bad <= most and holds(bad):
        good, bad = bad, min(2 * bad, most) if bad < most else most + 1
    if 1 in probes and probes[1].users_judged == 0:
        raise ConfigError("No answer finished within a probe with one user; use a longer --duration.")
    is_limit = good == most
    while not is_limit and bad - good > max(1, precision * good):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if holds(middle) else (good, middle)
    return Capacity(good, dict(sorted(probes.items())), is_limit)
