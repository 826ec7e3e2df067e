"""Forecasts: output lengths from the recent past, and the peak of the blocks that requests hold."""

from __future__ import annotations

import random

from cbatch.schedule.admission import HISTORY, PRIOR, Growth, OutputLengths, projected_peak


def test_remaining_is_the_mean_of_the_longer_ones() -> None:
    """Guards the estimate, its limit, and the default while no output has ended."""
    lengths = OutputLengths()
    assert lengths.remaining(0, 10_000) == PRIOR and lengths.remaining(300, 10_000) == 300
    for length in (10, 20, 60):
        lengths.add(length)
    assert [lengths.remaining(done, 10_000) for done in (0, 10, 20, 60, 100)] == [30, 30, 40, 60, 100]
    assert lengths.remaining(10, 15) == 5 and lengths.remaining(10, 10) == 0


def test_only_recent_outputs_count() -> None:
    """Guards against outdated lengths, and against a history that grows without end."""
    lengths = OutputLengths()
    for length in [1000] * HISTORY + [50] * HISTORY:
        lengths.add(length)
    assert lengths.remaining(0, 10_000) == 50


def simulated_peak(used: int, growing: list[Growth], size: int) -> int:
    """The peak by simulation: each request takes one more block for each `size` tokens, from the first on."""
    most, alive, held = used, list(growing), used
    for step in range(max(one.tokens for one in growing) + 1):
        now = held + sum(-(-step // size) for _ in alive)
        most = max(most, now)
        ending = [one for one in alive if one.tokens == step]
        alive = [one for one in alive if one.tokens != step]
        held -= sum(one.blocks for one in ending)
    return most


def test_peak_is_that_of_a_simulation() -> None:
    """Guards the formula against a simulation."""
    random_ = random.Random(1)
    for _ in range(300):
        growing = [Growth(random_.randint(0, 40), random_.randint(1, 9)) for _ in range(random_.randint(1, 8))]
        used, size = sum(one.blocks for one in growing), random_.randint(1, 16)
        assert projected_peak(used, sorted(growing), size) == simulated_peak(used, growing, size)
    assert projected_peak(7, [], 4) == 7
