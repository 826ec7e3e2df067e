"""Speculation against none: the same events whatever is drafted, and planted faults that are seen."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from cbatch.engine.base.outputs import Sample, TokenEvent
from cbatch.engine.base.params import SamplingParams
from cbatch.engine.sampling import output
from cbatch.engine.scheduler.drafts import Drafts
from cbatch.engine.scheduler.output import ScheduledChunk, SchedulerOutput
from cbatch.engine.scheduler.request import Request
from cbatch.engine.scheduler.scheduler import Scheduler
from cbatch.engine.speculation.drafter import Proposal
from cbatch.engine.stepping_engine import SteppingEngine
from tests.support.all_features import SETTINGS, expected, make, run
from tests.support.generation import generate
from tests.support.tiny_models import make_engine, make_fast_engine, make_network, make_prompts


class Prophet:
    """Drafts what requests will get, from their outputs without speculation, with mistakes."""

    def __init__(self, right: float = 0.7) -> None:
        """right: the share of tokens that are not a mistake"""
        self._rng = random.Random(0)
        self._right = right
        self._known = [[event[0] for event in events] for events in expected().values()]

    def propose(self, request: Request, count: int) -> Proposal | None:
        """In place of `Drafts._propose`. Forms are not asked whether they allow it."""
        told = request.token_ids[request.num_prompt :]
        for known in self._known if told else ():
            if known[: len(told)] == told:
                coming = [token for token in known[len(told) :] if token is not None][:count]
                draft = [token if self._rng.random() < self._right else self._rng.randrange(300) for token in coming]
                return Proposal(draft, 20) if draft else None
        return None

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Drafts, "_propose", lambda _, request, count: self.propose(request, count))


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "ahead"), product(SETTINGS, (False, True)), ids=str)
def test_output_is_the_same(settings: dict[str, Any], ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards every feature with drafts that are right, wrong and partly right, with and without overlap."""
    Prophet().install(monkeypatch)
    engine = make(ahead=ahead, speculate=5, **settings)
    assert run(engine) == expected()
    assert run(engine) == expected()
    stats = engine.stats()
    assert 0 <= stats.num_accepted_tokens <= stats.num_drafted_tokens
    if settings.get("max_batch_tokens", 20) >= 20:
        assert stats.num_accepted_tokens > 40 and stats.num_drafted_tokens > stats.num_accepted_tokens + 20


@pytest.mark.parametrize(("prefix_cache", "ahead"), product((True, False), (False, True)))
def test_output_is_the_same_after_preemption(prefix_cache: bool, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards requests that lose their blocks while a draft is in flight."""
    Prophet().install(monkeypatch)
    engine = make(ahead=ahead, prefix_cache=prefix_cache, max_batch_tokens=100, speculate=4)
    assert run(engine, shaken=True) == expected()
    assert engine.stats().num_preemptions > 15 and engine.stats().num_accepted_tokens > 10


def accept_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants: drafted tokens count as right whatever was sampled."""
    accept = Scheduler._accept

    def planted(self: Scheduler, chunk: ScheduledChunk, samples: Sequence[Sample]) -> list[TokenEvent]:
        return accept(self, chunk._replace(draft=tuple(sample.token_id for sample in samples[:-1])), samples)

    monkeypatch.setattr(Scheduler, "_accept", planted)


def shift_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants: the noise of tokens after a draft's first is that of the next position."""
    rows = output._sampled_rows

    def planted(scheduled: SchedulerOutput) -> tuple[list[Request], list[int]]:
        requests, positions = rows(scheduled)
        is_first = [place == 0 or positions[place - 1] + 1 != at for place, at in enumerate(positions)]
        return requests, [at + (not first) for at, first in zip(positions, is_first, strict=True)]

    monkeypatch.setattr(output, "_sampled_rows", planted)


def forget_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants: penalties and the like do not see the tokens of the draft."""
    monkeypatch.setattr(Request, "followed_by", lambda self, tokens: self)


@pytest.mark.parametrize("fault", [accept_all, shift_positions])
def test_planted_faults_are_seen(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards these tests: with a fault, outputs differ, or the engine notices."""
    wanted = expected()
    Prophet().install(monkeypatch)
    fault(monkeypatch)
    try:
        found = run(make(ahead=False, speculate=5))
    except (AssertionError, IndexError):
        return
    assert found != wanted


def penalized(speculate: int | str) -> list[int]:
    """The output of a request that takes turns between four tokens because each makes itself less likely."""
    bias = tuple((token, 100.0) for token in (5, 6, 7, 8))
    params = SamplingParams(max_tokens=40, logit_bias=bias, frequency_penalty=2.0)
    return list(generate(make_engine(make_network("llama"), speculate=speculate), [[1, 2, 3]], params)[0].token_ids)


def test_penalties_see_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards rows after a drafted token: penalties count the draft before them. The fault is seen."""
    wanted = penalized("off")
    monkeypatch.setattr(
        Drafts, "_propose", lambda _, request, count: Proposal(wanted[len(request.token_ids) - 3 :][:count], 20)
    )
    assert penalized(5) == wanted
    forget_the_draft(monkeypatch)
    assert penalized(5) != wanted


def rejecting(monkeypatch: pytest.MonkeyPatch, wrong: list[int]) -> None:
    """Always drafts the same tokens."""
    monkeypatch.setattr(Drafts, "_propose", lambda _, request, count: Proposal(wrong[:count], 20))


def outputs_after_rejected(monkeypatch: pytest.MonkeyPatch, *, speculate: bool) -> list[list[int]]:
    """A request with drafts that are wrong, and one whose prompt goes on like its draft."""
    (prompt,), wrong = make_prompts([7], seed=3), [3, 3, 3, 3, 3, 3]
    rejecting(monkeypatch, wrong)
    engine = make_engine(make_network("llama"), **({"speculate": 6} if speculate else {}))
    (first,) = generate(engine, [prompt], SamplingParams(max_tokens=9))
    (second,) = generate(engine, [[*prompt, first.token_ids[0], *wrong, 5]], SamplingParams(max_tokens=9))
    return [list(first.token_ids), list(second.token_ids)]


def test_rejected_tokens_are_not_in_the_prefix_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards later prompts against keys and values of rejected tokens, which have been overwritten meanwhile."""
    wanted = outputs_after_rejected(monkeypatch, speculate=False)
    assert outputs_after_rejected(monkeypatch, speculate=True) == wanted
    extended = Drafts._extended

    def planted(self: Drafts, chunk: ScheduledChunk, draft: list[int]) -> ScheduledChunk:
        found, request = extended(self, chunk, draft), chunk.request
        self._pool.cache_full_blocks(request.blocks, [*request.token_ids, *draft], chunk.start, found.stop)
        return found

    monkeypatch.setattr(Drafts, "_extended", planted)
    assert outputs_after_rejected(monkeypatch, speculate=True) != wanted, "the fault is not seen"


def logprobs_of(engine: SteppingEngine, prompts: list[list[int]]) -> list[Any]:
    return [one.logprobs for one in generate(engine, prompts, SamplingParams(max_tokens=40, logprobs=5))]


@pytest.mark.kernels
def test_drafts_change_no_bit_on_the_fast_path() -> None:
    """Guards the CPU's kernels: the logits of a chunk's row are those of the same token alone, to the last bit."""
    prompts = [[5, 6, 7, 8, 9] * 6, [1, 2] * 9, *make_prompts([20, 11])]
    network = make_network("llama", hidden_size=64, intermediate_size=96, head_dim=16)
    wanted = logprobs_of(make_fast_engine(network), prompts)
    engine = make_fast_engine(network, speculate=5)
    assert logprobs_of(engine, prompts) == wanted and engine.stats().num_drafted_tokens > 10


def test_repeated_text_takes_fewer_steps() -> None:
    """Guards the gain: an output that goes in circles takes less than half of the steps."""
    network = make_network("llama")
    prompt, params = make_prompts([6], seed=1)[0], SamplingParams(max_tokens=120, allowed_token_ids=(5,))
    plain, drafting = (make_engine(network, **config) for config in ({}, {"speculate": 6}))
    assert generate(plain, [prompt], params)[0].token_ids == generate(drafting, [prompt], params)[0].token_ids
    assert 2 * drafting.stats().num_steps < plain.stats().num_steps == 120
