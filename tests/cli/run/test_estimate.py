"""Estimates of --check --estimate: a trial, lengths told from it, and a run that is played."""

from __future__ import annotations

import random
from statistics import fmean
from typing import Any

import pytest

from cbatch.api import Engine
from cbatch.cli.run.estimate import (
    RowSample,
    RunEstimate,
    SampledRow,
    Span,
    StepCosts,
    StepTime,
    TrialResult,
    TriedOutput,
    final_lengths,
    play,
    run_trial,
)
from cbatch.schedule.limits import EngineLimits
from tests.support.queued_requests import encoded


def tried(tokens: int, limit: int, *, ended: bool, ends_by_limit: bool = False) -> TriedOutput:
    return TriedOutput(SampledRow(encoded(ignore_eos=ends_by_limit), limit), tokens, ended)


def test_what_has_ended_is_known_and_what_goes_on_has_a_range() -> None:
    """Guards against ranges around what is known, and against a single number for what is not."""
    outputs = [tried(20, 100, ended=True), tried(60, 60, ended=True), tried(20, 100, ended=False)]
    outputs += [tried(5, 80, ended=False, ends_by_limit=True), tried(0, 100, ended=False)]
    ended, _, span, fixed, waiting = final_lengths(outputs)
    assert ended == (20, 20, 20) and fixed == (80, 80, 80)
    assert span.least == 20 and span.most == 100 and 60 < span.likely < 80
    assert waiting.likely == pytest.approx(100 * (1 - 0.99**100))  # one stop in a hundred tokens
    assert 1 <= waiting.least < waiting.likely < waiting.most == 100  # and one stop tells too little for a low chance


def test_outputs_that_only_their_limit_ends_say_nothing_of_others() -> None:
    """Guards a file in which some rows ignore end tokens: their tokens are no chance to end."""
    fixed = [tried(500, 500, ended=True, ends_by_limit=True)] * 5
    free = [tried(10, 100, ended=True)] * 5
    waiting = tried(0, 100, ended=False)
    assert final_lengths([*fixed, *free, waiting])[-1] == final_lengths([*free, waiting])[-1]
    assert final_lengths([*fixed, waiting])[-1] == (1, 100, 100)


@pytest.mark.parametrize(("chance", "limit"), [(0.02, 400), (0.005, 300), (0.3, 50)])
def test_the_range_holds_the_truth_and_the_likely_value_is_near(chance: float, limit: int) -> None:
    """Guards trials that are cut off: the outputs that have ended by then are the short ones."""
    source, held = random.Random(1), 0
    ended: list[int] = []
    every: list[int] = []
    for _ in range(40):
        real = [next((n for n in range(1, limit) if source.random() < chance), limit) for _ in range(64)]
        cut = [tried(min(length, 60), limit, ended=length <= 60) for length in real]
        spans = final_lengths(cut)
        least, likely, most = (sum(span[case] for span in spans) for case in range(3))
        assert least <= sum(real) <= most and least <= likely <= most
        held += sum(real) / 1.5 < likely < sum(real) * 1.5
        ended += [one.tokens for one in cut if one.has_ended]
        every += real
    assert held >= 34
    assert chance == 0.3 or fmean(ended) < 0.6 * fmean(every)  # which would be the answer of the ended ones alone


def test_ranges_in_words_and_rounded() -> None:
    """Guards against a range where there is none, and against digits that nobody knows."""
    assert Span(1, 2, 4).words(str) == "2 (1 to 4)" and Span(3, 3, 3).words(str) == "3"
    assert Span(1.234, 99.96, 1234.5).rounded() == {"least": 1.2, "likely": 100.0, "most": 1234}


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


def test_a_run_in_full_slots() -> None:
    """Guards the time of a run, by hand: two slots, three outputs."""
    run = play([(10, 4), (4, 0), (8, 2)], COSTS, 2, 10**6)
    assert run.prefill_s == 3.0
    assert run.waits == {"slots": 4 * 1.5, "cache": 0.0, "rows": 6 * 1.5 + 2 * 1.25}
    assert run.seconds == 3.0 + 6.0 + 11.5
    assert run.running == pytest.approx((2 * 15 + 2.5) / 17.5)
    assert run.longer(3) == 3 * (run.seconds - 11.5) + 11.5
    drafted = play([(10, 0)], COSTS, 2, 100, tokens_per_step=2.5)  # outputs need fewer steps
    assert drafted.seconds == pytest.approx(4 * 1.25)


def test_a_small_cache_holds_outputs_back() -> None:
    """Guards the reason: the cache, if slots are free; and an output that is larger than the cache still runs."""
    outputs = [(20, 40)] * 12
    small, large = play(outputs, COSTS, 4, 110), play(outputs, COSTS, 4, 1000)
    assert small.wait_share("cache") > 0.5 and small.wait_share("slots") == 0 and small.running == pytest.approx(2)
    assert large.wait_share("cache") == 0 and large.wait_share("slots") > 0.5 and large.running == pytest.approx(4)
    assert small.seconds > large.seconds
    assert play(outputs[:1], COSTS, 4, 10).seconds == 20 + 20 * 1.25


SLOTS = 8


def limits(cache_tokens: int = 10**6) -> EngineLimits:
    return EngineLimits(SLOTS, 512, 4096, 16, cache_tokens // 16, 100)


def steps(fixed: float, prompt: float, decoding: float) -> list[StepTime]:
    """Steps with these costs, which differ in what they compute."""
    return [
        StepTime(fixed + prompt * tokens + decoding * many, tokens, many)
        for tokens in (0, 10, 200)
        for many in range(9)
    ]


def trial(
    costs: tuple[float, float, float], rows: int = 40, prompt: int = 10, output: int = 50, **unfinished: Any
) -> TrialResult:
    """A trial with outputs that have all ended, or are as `unfinished` says."""
    state = {"tokens": output, "has_ended": True, **unfinished}
    outputs = [TriedOutput(SampledRow(encoded(prompt), output), **state) for _ in range(rows)]
    return TrialResult(10.0, outputs, steps(*costs) * 50)  # with more decoding than outputs: no drafts


@pytest.mark.parametrize("rows", [40, 400, 40_000])
def test_a_whole_run_takes_what_its_steps_cost(rows: int) -> None:
    """Guards the scaling from a sample to all rows, also to more than are played."""
    estimate = RunEstimate(trial((0.02, 0.001, 0.005)), rows, limits())
    expected = rows / SLOTS * 50 * (0.02 + SLOTS * 0.005) + rows * 10 * 0.001
    assert estimate.seconds.likely == pytest.approx(expected, rel=0.01)
    assert estimate.seconds.least == pytest.approx(expected, rel=0.01)  # all ended, and all alike
    assert estimate.output_tokens == pytest.approx((50 * rows,) * 3)
    assert estimate.cache_tokens.likely == SLOTS * (10 + 25)


def test_the_range_is_that_of_the_lengths() -> None:
    """Guards honesty: outputs that go on may end at once or go on to their limit, and so may the run."""
    tried = trial((0.02, 0.001, 0.005), output=100, tokens=20, has_ended=False)
    estimate = RunEstimate(tried, 4000, limits())
    assert estimate.output_tokens == pytest.approx((80_000, 400_000, 400_000))
    assert estimate.seconds.most / estimate.seconds.least == pytest.approx(5, rel=0.1)
    report = estimate.as_dict()
    assert report["trial"] == {"seconds": 10.0, "rows": 40, "outputs": 40, "ended": 0, "output_tokens": 800}
    assert report["seconds"]["least"] < report["seconds"]["likely"] and report["mean_running"] == SLOTS
    first, second, _ = estimate.sentences()
    assert "400,000 (80,000 to 400,000) output tokens" in first
    assert second == "in a trial of 10 s, 0 of 40 outputs ended; the range is what is known of the others"


def test_the_chance_of_a_sample_is_in_the_range() -> None:
    """Guards a sample of rows of very different lengths, all of which have ended."""
    tried = trial((0.02, 0.001, 0.005))
    for number, output in enumerate(tried.outputs):
        output.tokens = 5 if number % 4 else 200
    known, sampled = RunEstimate(tried, 40, limits()), RunEstimate(tried, 4000, limits())
    assert known.output_tokens.least == known.output_tokens.most == 30 * 5 + 10 * 200
    least, likely, most = sampled.output_tokens
    assert likely == 100 * known.output_tokens.likely and least < 0.6 * likely and most > 1.4 * likely


@pytest.mark.parametrize(
    ("costs", "changes", "cache", "expected", "words"),
    [
        ((0.1, 0.0001, 0.001), {}, 10**6, "slots", "all 8 are taken (--max-seqs); with 16, perhaps "),
        ((0.01, 0.0001, 0.01), {}, 10**6, "decode", "more than 8 at once help little"),
        ((0.01, 0.01, 0.001), {"prompt": 900}, 10**6, "prefill", "whose tokens take 9"),
        ((0.1, 0.0001, 0.001), {"prompt": 400}, 1600, "cache", "need about 3,400 tokens, and it holds 1,600"),
        ((0.1, 0.0001, 0.001), {"rows": 5}, 10**6, "rows", "seldom fills all 8 slots"),
    ],
)
def test_what_holds_a_run_back(
    costs: tuple[float, float, float], changes: dict[str, int], cache: int, expected: str, words: str
) -> None:
    """Guards the advice: each reason, where nothing else would explain the time."""
    tried = trial(costs, **changes)
    estimate = RunEstimate(tried, len(tried.outputs), limits(cache))
    assert estimate.held_back_by == expected
    assert estimate.sentences()[-1].startswith("held back by ") and words in estimate.sentences()[-1]


def test_prompts_count_once_for_all_outputs_and_without_what_they_share() -> None:
    """Guards rows with `n` and prefixes: neither is computed twice."""
    several, one = SampledRow(encoded(100, n=3), 10, shared=64), SampledRow(encoded(100), 10)
    outputs = [TriedOutput(row, 10, True) for row in (several, several, several, one)]
    tried = TrialResult(1.0, outputs, steps(0.0, 1.0, 0.0))
    assert RunEstimate(tried, 2, limits()).seconds.likely == pytest.approx(36 + 100)


def test_a_sample_is_spread_over_the_input() -> None:
    """Guards files that are sorted: early and late rows must be in the sample, and among the first that are tried."""
    sample = RowSample(100)
    for number in range(10_000):
        sample.offer(SampledRow(encoded([number]), 1))
    places = [row.request.prompt_ids[0] for row in sample.rows()]
    assert len(set(places)) == 100 and sample.num_offered == 10_000
    for some in (places, places[:30]):
        assert 3500 < sum(some) / len(some) < 6500
    assert [row.request.prompt_ids[0] for row in sample.rows()] == places


def test_a_trial_on_a_model(engine: Engine) -> None:
    """Guards what is measured: tokens of each output, ends, refusals, steps; and nothing is left in the engine."""
    rows = [SampledRow(encoded(6, max_tokens=5, ignore_eos=True, n=2), 5), SampledRow(encoded([]), 5)]
    tried = run_trial(engine, rows, 20.0)
    assert tried.seconds < 20 and engine.on_step is None
    assert [(one.tokens, one.has_ended, one.is_failed) for one in tried.outputs] == [(5, True, False)] * 2 + [
        (0, True, True)
    ]
    assert [(step.prompt_tokens, step.decoding) for step in tried.steps] == [(12, 0)] + [(0, 2)] * 4
    assert tried.tokens_per_step == 1 and all(step.seconds > 0 for step in tried.steps)


def test_a_trial_ends_in_time_and_leaves_nothing(engine: Engine) -> None:
    """Guards the ten seconds against rows that would take hours, and the engine against going on with them."""
    rows = [SampledRow(encoded(6, max_tokens=80, ignore_eos=True), 80) for _ in range(200)]
    tried = run_trial(engine, rows, 0.05)
    assert tried.seconds < 5 and not all(one.has_ended for one in tried.outputs)
    engine.generate([5, 6], {"max_tokens": 1})  # after all cancellations
    assert engine.stats().num_running == 0 == engine.stats().num_waiting
