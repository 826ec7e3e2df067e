"""Whether and how much is drafted, on a scheduler whose steps take as long as the test says."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from cbatch.base.outputs import Sample
from cbatch.base.request import Request
from cbatch.schedule import draft_policy
from cbatch.schedule.block_pool import BlockPool
from cbatch.schedule.limits import StepLimits
from cbatch.schedule.output import StepResult
from cbatch.schedule.scheduler import Scheduler
from cbatch.schedule.sequence import TokenSequence

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
        """What the same takes without drafts."""
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
@pytest.mark.parametrize("sequences", [1, 8, 32, 128])
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
