"""Load: many users against a level of service, and how many of them there may be."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cbatch.cli.bench.load.generator import Capacity, LoadResult, find_capacity, run_load
from cbatch.cli.bench.load.users import SLO, LoadPoint, Scenario
from cbatch.engine import EngineThread

if TYPE_CHECKING:
    from cbatch.engine import Engine

PROBE_S = 20.0
"""Seconds of each probe of a search at most."""


def serve(
    engine: Engine, scenario: Scenario, slo: SLO, *, search: bool, on_progress: Callable[[str], None]
) -> dict[str, Any]:
    """Runs the load, or searches for the most users that the level holds for."""
    with closing(EngineThread(engine)) as engine_thread:
        if not search:
            on_progress(f"{scenario.users} users for {scenario.duration_s:g} s")
            return {"load": _entry(run_load(engine_thread, scenario, slo))}

        def measure(users: int) -> LoadResult:
            on_progress(f"{users} users")
            return run_load(engine_thread, scenario.probe(users, scenario.duration_s), slo)

        return _searched(find_capacity(measure, most=scenario.users))


def load_points(data: dict[str, Any]) -> list[LoadPoint]:
    """The probes of a search as points of a picture; those in which nothing could be judged are left out."""
    return [
        LoadPoint(
            users=one["users"],
            ttft_p50=one["ttft_s"]["p50"],
            ttft_p99=one["ttft_s"]["p99"],
            tps_p50=1 / one["tpot_s"]["p50"],
            tps_p10=1 / one["tpot_s"]["p90"],
            within=one["users_served_share"],
        )
        for one in data.get("points", [])
        if one["ttft_s"]["p50"] is not None and one["tpot_s"]["p50"] and one["users_served_share"] is not None
    ]


def _searched(capacity: Capacity) -> dict[str, Any]:
    return {
        "capacity_users": capacity.users,
        "capacity_is_limit": capacity.is_limit,
        "points": [_entry(result) | {"users": users} for users, result in capacity.points.items()],
    }


def _entry(result: LoadResult) -> dict[str, Any]:
    """A result with its shares called so, and its throughput."""
    fields = asdict(result)
    served = {f"{name}_share": fields.pop(name) for name in ("users_served", "answers_served")}
    return fields | served | {"output_tokens_per_s": result.output_tokens_per_s}
