"""Runs that are played: what steps cost, and how slots and cache hold a run back."""

from __future__ import annotations

import random

import pytest

from cbatch.cli.run.estimate.played_run import PlayedOutput, StepCosts, play
from cbatch.cli.run.estimate.sample_run import StepTime

COSTS = StepCosts(fixed=1.0, prompt=0.5, decoding=0.25)


def test_costs_are_found_again() -> None:
    """Guards the fit, also against the slow first steps and against costs below zero."""
    source = random.Random(0)
    counts = [(source.randrange(0, 200), source.randrange(0, 33)) for _ in range(50)]
    steps = [StepTime(0.01 + 0.0005 * prompt + 0.002 * many, prompt, many) for prompt, many in counts]
    found = StepCosts.fit([StepTime(5.0, 100, 0), StepTime(3.0, 1, 1), *steps])
    assert (found.fixed, found.prompt, found.decoding) == pytest.approx((0.01, 0.0005, 0.002))
    falling = [StepTime(1.0 - 0.02 * many, 0, many) for many in range(20)]
    found = StepCosts.fit(falling)
    assert found.decoding == 0 < found.fixed and found.prompt == 0
    assert StepCosts.fit([]) == StepCosts(0, 0, 0)


def test_steps_that_are_all_alike_keep_their_time() -> None:
    """Guards a trial in which all slots were busy all the time: nobody knows what the parts of a step cost."""
    found = StepCosts.fit([StepTime(0.2, 0, 32)] * 20)
    assert found.fixed + 32 * found.decoding == pytest.approx(0.2)


def test_a_run_in_full_slots() -> None:
    """Guards the time of a run, by hand: two slots, three outputs."""
    run = play([PlayedOutput(10, 4), PlayedOutput(4, 0), PlayedOutput(8, 2)], COSTS, 2, 10**6)
    assert run.prefill_s == 3.0
    assert run.waits == {"slots": 4 * 1.5, "cache": 0.0, "rows": 6 * 1.5 + 2 * 1.25}
    assert run.seconds == 3.0 + 6.0 + 11.5
    assert run.running == pytest.approx((2 * 15 + 2.5) / 17.5)
    assert run.longer(3) == 3 * (run.seconds - 11.5) + 11.5


def test_several_tokens_in_a_step() -> None:
    """Guards models with drafts: outputs need fewer steps."""
    assert play([PlayedOutput(10, 0)], COSTS, 2, 100, tokens_per_step=2.5).seconds == pytest.approx(4 * 1.25)


def test_a_small_cache_holds_outputs_back() -> None:
    """Guards the reason: the cache, if slots are free; and an output that is larger than the cache still runs."""
    outputs = [PlayedOutput(20, 40)] * 12
    small, large = play(outputs, COSTS, 4, 110), play(outputs, COSTS, 4, 1000)
    assert small.wait_share("cache") > 0.5 and small.wait_share("slots") == 0 and small.running == pytest.approx(2)
    assert large.wait_share("cache") == 0 and large.wait_share("slots") > 0.5 and large.running == pytest.approx(4)
    assert small.seconds > large.seconds
    assert play(outputs[:1], COSTS, 4, 10).seconds == 20 + 20 * 1.25


def test_nothing_to_generate() -> None:
    """Guards rows that only score their prompt, and no rows at all."""
    scored = play([PlayedOutput(0, 100)] * 5, COSTS, 2, 10**6)
    assert scored.seconds == scored.prefill_s == 250 and scored.prefill_share == 1 and scored.wait_share("slots") == 0
    assert play([], COSTS, 2, 10).seconds == 0
