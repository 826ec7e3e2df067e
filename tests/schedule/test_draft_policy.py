"""Whether and how much is drafted, on a scheduler whose steps take as long as the test says."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from cbatch.base.outputs import Sample
from cbatch.base.request import Request
from cbatch.schedule import draft_policy
from cbatch.schedule.block_pool import BlockPool
from cbatch.schedule.draft_policy import AcceptanceRates, StepCost, kind_of
from cbatch.schedule.limits import StepLimits
from cbatch.schedule.output import StepResult
from cbatch.schedule.scheduler import Scheduler
from cbatch.schedule.sequence import TokenSequence
from tests.support.samples import sampled

Text = Callable[[int], int]


class Run:
    """Requests that get a known text, in steps of `fixed + per_token * tokens` milliseconds."""

    def __init__(self, texts: list[Text], fixed: float, per_token: float, monkeypatch: pytest.MonkeyPatch) -> None:
        """texts: the token at each position of a request"""
        monkeypatch.setattr(draft_policy.time, "perf_counter", lambda: 0.0)  # looks cost nothing
        limits = StepLimits(max_seqs=128, max_batch_tokens=512)
        self.scheduler = Scheduler(BlockPool(4000, 16), limits, 2000, speculate="auto")
        self.fixed, self.per_token = fixed, per_token
        self.sequences = [
            TokenSequence(number, [text(0)], Request(max_new_tokens=300)) for number, text in enumerate(texts)
        ]
        self.texts = dict(zip(self.sequences, texts, strict=True))
        for sequence in self.sequences:
            self.scheduler.add(sequence)
        self.seconds, self.steps = 0.0, 0

    def finish(self, most: int = 10**6) -> Run:
        while self.scheduler.has_work and self.steps < most:
            scheduled = self.scheduler.schedule()
            taken = (self.fixed + self.per_token * scheduled.num_tokens) / 1e3
            self.seconds += taken
            self.steps += 1
            self.scheduler.drafts.observe_step(scheduled, None if scheduled.admitted else taken)
            samples = [
                Sample(self.texts[chunk.sequence](chunk.stop - len(chunk.draft) + place))
                for chunk in scheduled.to_sample
                for place in range(1 + len(chunk.draft))
            ]
            self.scheduler.update_from_output(scheduled, StepResult(samples))
            self.scheduler.check_integrity()
        for sequence in self.sequences:
            assert sequence.token_ids == [self.texts[sequence](at) for at in range(len(sequence.token_ids))]
        return self

    @property
    def plain_seconds(self) -> float:
        """Time for the same without drafts."""
        return 300 * (self.fixed + self.per_token * len(self.sequences)) / 1e3


def random_text(seed: int, vocabulary: int = 30_000) -> Text:
    rng = random.Random(seed)
    tokens = [rng.randrange(vocabulary) for _ in range(400)]
    return tokens.__getitem__


def repeating_text(seed: int) -> Text:
    """A few pieces of 30 tokens again and again, in any order."""
    rng = random.Random(seed)
    pieces = [[rng.randrange(30_000) for _ in range(30)] for _ in range(3)]
    return [token for _ in range(14) for token in rng.choice(pieces)].__getitem__


@pytest.mark.parametrize(("sequences", "gain"), [(1, 2.2), (8, 1.4), (32, 1.1)])
def test_text_that_repeats_is_drafted_if_it_pays(sequences: int, gain: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the gain, with the step times of a small model on two cores: 6.3 + 0.36 n milliseconds."""
    run = Run([repeating_text(seed) for seed in range(sequences)], 6.3, 0.36, monkeypatch).finish()
    assert run.plain_seconds / run.seconds > gain


@pytest.mark.parametrize("vocabulary", [30_000, 20])
@pytest.mark.parametrize("sequences", sampled([1, 8, 32, 128], 2, keep=[1]))
def test_random_text_loses_nothing(sequences: int, vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards text that does not repeat, or seems to and does not: at most 2% more time, for any number of requests."""
    run = Run([random_text(seed, vocabulary) for seed in range(sequences)], 6.3, 0.36, monkeypatch).finish()
    assert run.plain_seconds / run.seconds > 0.98


def test_steps_that_are_nothing_but_tokens_have_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards compute-bound steps: where each token costs its part, a draft that may be wrong never pays."""
    run = Run([repeating_text(seed) for seed in range(32)], 0.1, 1.0, monkeypatch).finish()
    assert run.plain_seconds / run.seconds > 0.98
    drafts = run.scheduler.drafts
    assert drafts.num_drafted - drafts.num_accepted < 0.02 * 32 * 300


def test_a_step_with_prompts_has_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards prompts: what a step has left beside them is theirs."""
    run = Run([lambda at: at % 5], 6.3, 0.36, monkeypatch).finish(most=15)
    assert run.scheduler.drafts.num_accepted > 20
    for number in range(1, 4):
        sequence = TokenSequence(number, [7] * 40, Request(max_new_tokens=300))
        run.scheduler.add(sequence)
        scheduled = run.scheduler.schedule()
        assert len(scheduled.chunks) == 2 and not any(chunk.draft for chunk in scheduled.chunks)
        run.scheduler.rollback(scheduled)
        run.scheduler.cancel(sequence)


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


def test_rates_are_learnt_by_length_of_the_match() -> None:
    """Guards the estimate: long matches may be right while short ones are not; the first wrong token ends a draft."""
    rng, rates = random.Random(0), AcceptanceRates()
    for _ in range(2000):
        rates.observe_draft(2, 1, int(rng.random() < 0.3))
        rates.observe_draft(20, 1, int(rng.random() < 0.9))
    assert rates.rate(kind_of(2)) == pytest.approx(0.3, abs=0.15)
    assert rates.rate(kind_of(20)) == pytest.approx(0.9, abs=0.1)


def test_a_request_backs_off_by_itself_and_begins_with_what_others_had() -> None:
    """Guards one request among others: its own rejections count most, and a new one knows the common rates."""
    common = AcceptanceRates()
    wrong, right = AcceptanceRates(common), AcceptanceRates(common)
    for _ in range(60):
        wrong.observe_draft(5, 1, 0)
        right.observe_draft(5, 1, 1)
    assert wrong.rate(kind_of(5)) < 0.2 and right.rate(kind_of(5)) > 0.8
    assert AcceptanceRates(common).rate(kind_of(5)) == pytest.approx(common.rate(kind_of(5)))
    for _ in range(300):
        wrong.observe_draft(5, 1, 0)
    assert AcceptanceRates(common).rate(kind_of(5)) < 0.1


def test_longer_matches_are_expected_to_be_right_as_often() -> None:
    """Guards quick learning: what short matches were right in is expected of longer ones, until those tell more."""
    common = AcceptanceRates()
    for _ in range(100):
        common.observe(kind_of(1), is_right=True)
    assert all(AcceptanceRates(common).rate(kind_of(length)) > 0.9 for length in (1, 2, 5, 40))
    for _ in range(20):
        common.observe(kind_of(5), is_right=False)
    assert common.rate(kind_of(5)) < 0.2 and common.rate(kind_of(2)) > 0.9
    for _ in range(200):
        common.observe(kind_of(1), is_right=False)
    assert common.rate(kind_of(40)) == AcceptanceRates().rate(kind_of(40))


def test_chances_that_cannot_pay_are_left_out() -> None:
    """Guards the time of a look: of the chances of a draft, those that are at least so much, and nothing else."""
    rates = AcceptanceRates()
    every = rates.chances(1, 20)
    for least in (0.0, every[0], every[4], 1.0):
        assert rates.chances(1, 20, least) == [chance for chance in every if chance >= least]
