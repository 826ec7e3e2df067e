"""Measures one load, or searches for the most users that can be served within an objective."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

from cbatch.cli.bench.load.generator import run_load
from cbatch.cli.bench.load.results import Capacity, LoadReport, LoadResult
from cbatch.cli.bench.load.users import SLO, Scenario
from cbatch.cli.bench.options import BenchOptions, parse_duration
from cbatch.cli.bench.results import Machine, describe_model
from cbatch.cli.common.loading import open_engine
from cbatch.engine import ConfigError, EngineThread

MAX_PROBE_S = 20.0
"""The longest probe of a search, in seconds."""

DEFAULT_MAX_USERS = 1024


def measure_load(options: BenchOptions, on_progress: Callable[[str], None]) -> LoadReport:
    """Runs the load, or searches for the most users for whom the objective holds. Raises ConfigError."""
    inputs, outputs = options.lengths
    duration_s, slo = parse_duration(options.duration), SLO(parse_duration(options.slo_ttft), options.slo_tps)
    with open_engine(options.engine, quiet=options.is_silent) as engine, closing(EngineThread(engine)) as engine_thread:
        scenario = Scenario(
            users=options.users or DEFAULT_MAX_USERS,
            rate=options.rate,
            duration_s=min(MAX_PROBE_S, duration_s) if options.find_capacity else duration_s,
            think_s=parse_duration(options.think),
            inputs=inputs,
            outputs=outputs,
            vocabulary=engine.model.vocab_size,
            context=engine.limits.sequence.longest,
            turns=options.turns,
            seed=options.seed,
        )

        def probe(users: int) -> LoadResult:
            on_progress(f"{users} users")
            return run_load(engine_thread, scenario.probe(users, scenario.duration_s), slo)

        found: LoadResult | Capacity
        if options.find_capacity:
            found = find_capacity(probe, most=scenario.users)
        else:
            on_progress(f"{scenario.users} users for {scenario.duration_s:g} s")
            found = run_load(engine_thread, scenario, slo)
        return LoadReport(options, Machine.of(engine), describe_model(engine), scenario, slo, found)


def find_capacity(
    measure: Callable[[int], LoadResult], *, share: float = 0.99, most: int = 4096, precision: float = 0.05
) -> Capacity:
    """The most users of whom at least a share is served within the objective: doubled until it fails, then bisected.

    measure:   runs with this many users; a run in which nothing can be judged fails
    precision: how close to bisect, as a share of the number of users; to one user at the closest
    Raises ConfigError if nothing can be judged with one user.
    """
    probes: dict[int, LoadResult] = {}

    def holds(users: int) -> bool:
        probes[users] = measure(users)
        served = probes[users].users_served
        return served is not None and served >= share

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
