"""The search for the most users that can be served within an objective."""

from __future__ import annotations

from collections.abc import Callable

from cbatch.cli.bench.load.results import Capacity, LoadResult
from cbatch.engine import ConfigError


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
