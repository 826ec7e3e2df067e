"""What the cost of one more token is taken to be, on steps whose time is known."""

from __future__ import annotations

import random

import pytest

from cbatch.schedule.step_cost import StepCost


def learnt(fixed: float, per_token: float, sizes: list[int], steps: int = 200, noise: float = 0.0) -> StepCost:
    rng, cost = random.Random(0), StepCost()
    for step in range(steps):
        tokens = sizes[step % len(sizes)]
        cost.observe(tokens, (fixed + per_token * tokens) * (1 + noise * rng.random()))
    return cost


@pytest.mark.parametrize(("fixed", "per_token"), [(6.0, 0.36), (0.2, 1.0), (10.0, 0.01)])
def test_the_line_is_learnt(fixed: float, per_token: float) -> None:
    """Guards the slope, for steps that the weights rule and for those that tokens rule, with noise."""
    cost = learnt(fixed, per_token, [1, 1, 5, 1, 9], noise=0.05)
    for tokens in (1, 5, 9):
        assert cost.seconds(tokens) == pytest.approx(fixed + per_token * tokens, rel=0.15)


def test_one_slow_step_changes_little() -> None:
    """Guards drafts against a pause of the machine: one step of ten times the time."""
    cost = learnt(6.0, 0.36, [1, 5])
    cost.observe(5, 78.0)
    assert cost.seconds(5) < 2.5 * 7.8


def test_what_was_too_dear_is_tried_again() -> None:
    """Guards against a decision for ever: the slope fades if no step tells of it."""
    cost = learnt(1.0, 1.0, [1, 5])
    dear = cost.seconds(5) - cost.seconds(1)
    for _ in range(2000):
        cost.observe(1, 2.0)
    assert cost.seconds(5) - cost.seconds(1) < 0.2 * dear


def test_the_number_that_pays_is_the_best_of_all() -> None:
    """Guards the decision: tokens per second against each other number of drafted tokens; drafts may only double."""
    rng = random.Random(1)
    for _ in range(50):
        fixed, per_token, rows = rng.uniform(1, 10), rng.uniform(0, 1), rng.randint(1, 20)
        cost = learnt(fixed, per_token, [rows, rows + 12], steps=400)
        chances = sorted((rng.random() for _ in range(11)), reverse=True)
        rates = [(rows + sum(chances[:count])) / cost.seconds(rows + count) for count in range(12)]
        count, saved = cost.num_worth(rows, chances)
        assert rates[count] >= max(rates) / 1.02
        assert saved >= 0 and (count > 0) == (saved > 0)
    assert learnt(9.0, 0.0, [1]).num_worth(1, [0.9] * 20)[0] == 4


def test_a_chance_below_the_least_never_pays() -> None:
    """Guards what is left out before the decision: it is the same with and without such tokens."""
    rng = random.Random(2)
    for _ in range(100):
        rows, weight = rng.randint(1, 20), rng.choice([1.0, 1.5])
        cost = learnt(rng.uniform(1, 10), rng.uniform(0, 1), [rows, rows + 12])
        chances = sorted((rng.random() for _ in range(11)), reverse=True)
        least = cost.least_chance(rows, weight)
        kept = [chance for chance in chances if chance >= least]
        assert cost.num_worth(rows, chances, weight) == cost.num_worth(rows, kept, weight)
    assert StepCost().least_chance(3) == 0


def test_dear_tokens_are_not_looked_for() -> None:
    """Guards the host's time: no look in steps that are nothing but tokens, or of which nothing is known."""
    assert not StepCost().is_worth_looking(4)
    assert learnt(6.0, 0.36, [8, 12]).is_worth_looking(8)
    assert not learnt(0.2, 0.36, [100, 110]).is_worth_looking(100)
