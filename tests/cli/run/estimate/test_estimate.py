"""The estimate of a whole run: from fakes with known costs, and from a trial on a small model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cbatch.api import Engine
from cbatch.cli.run.estimate.estimate import RunEstimate, duration, estimate_run
from cbatch.cli.run.estimate.sample_run import RowSample, SampledRow, StepTime, TrialResult, TriedOutput, run_trial
from cbatch.schedule.limits import EngineLimits
from tests.support.queued_requests import encoded

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
    sample = [SampledRow(encoded(prompt, ignore_eos=True), output) for _ in range(rows)]
    state = {"tokens": output, "has_ended": True, **unfinished}
    outputs = [TriedOutput(row, output, False, **state) for row in range(rows)]
    return TrialResult(10.0, sample, outputs, steps(*costs) * 50)  # with more decoding than outputs: no drafts


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
    estimate = RunEstimate(tried, len(tried.rows), limits(cache))
    assert estimate.held_back_by == expected
    assert estimate.sentences()[-1].startswith("held back by ") and words in estimate.sentences()[-1]


def test_prompts_count_once_for_all_outputs_and_without_what_they_share() -> None:
    """Guards rows with `n` and prefixes: neither is computed twice."""
    outputs = [TriedOutput(row, 10, False, 10, True) for row in (0, 0, 0, 1)]
    rows = [SampledRow(encoded(100, n=3), 10, shared=64), SampledRow(encoded(100), 10)]
    tried = TrialResult(1.0, rows, outputs, steps(0.0, 1.0, 0.0))
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


@pytest.fixture(scope="module")
def engine(model_folder: Path) -> Iterator[Engine]:
    with Engine(model_folder, device="cpu", max_seqs=4) as made:
        yield made


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


def test_no_row_can_be_tried(engine: Engine) -> None:
    """Guards an input whose rows are all refused, or that has none."""
    sample = RowSample(4)
    assert estimate_run(engine, sample) is None
    sample.offer(SampledRow(encoded([]), 5))
    assert estimate_run(engine, sample) is None


def test_durations() -> None:
    """Guards units that a person reads."""
    found = [duration(seconds) for seconds in (0.26, 9.94, 45.4, 90, 5000, 5400, 12_000_000)]
    assert found == ["0.3 s", "9.9 s", "45 s", "2 min", "83 min", "1.5 hours", "3,333.3 hours"]
