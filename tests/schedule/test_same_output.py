"""Speculation against none: the same events whatever is drafted, and planted faults that are seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from cbatch.base.config import EngineConfig
from cbatch.base.outputs import Sample, TokenEvent
from cbatch.base.params import SamplingParams
from cbatch.base.quantization import Quantization
from cbatch.engine.stats import StepRecord
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.model.cpu import CpuModel
from cbatch.model.loader import LoadedModel
from cbatch.sample import output
from cbatch.schedule.draft_sources import Proposal
from cbatch.schedule.drafts import Drafts
from cbatch.schedule.output import ScheduledChunk, SchedulerOutput
from cbatch.schedule.scheduler import Scheduler
from cbatch.schedule.sequence import TokenSequence
from cbatch.schedule.step_time import StepTimeController
from tests.support.all_features import ASKED, SETTINGS, add_all, expected, make, run, steps
from tests.support.architectures import make_architecture
from tests.support.drafts import Prophet, decide_at_random, propose_by
from tests.support.generation import generate
from tests.support.samples import sampled
from tests.support.tiny_models import fast, make_engine, make_network, make_prompts


def prophet() -> Prophet:
    """Knows the outputs of all requests of `ASKED`."""
    return Prophet([[event[0] for event in events if event[0] is not None] for events in expected().values()], 300)


CASES: list[dict[str, Any]] = [{"ahead": ahead, **settings} for settings in SETTINGS for ahead in (False, True)]


@pytest.mark.slow
@pytest.mark.parametrize("case", sampled(CASES, 3), ids=str)
def test_output_is_the_same(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards every feature with drafts that are right, wrong and partly right, with and without overlap."""
    propose_by(monkeypatch, prophet())
    engine = make(speculate=5, **case)
    assert run(engine) == expected()
    assert run(engine) == expected()
    stats = engine.stats()
    assert 0 <= stats.num_accepted_tokens <= stats.num_drafted_tokens
    if case.get("max_batch_tokens", 20) >= 20:
        assert stats.num_accepted_tokens > 40 and stats.num_drafted_tokens > stats.num_accepted_tokens + 20


@pytest.mark.parametrize("ahead", [False, True])
def test_forced_text_costs_no_steps_and_changes_nothing(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards text that a form forces: it comes in fewer steps, and is the same as if each token had a step."""
    engine = make(ahead=ahead)
    assert run(engine) == expected()
    name, quick = "form that forces text", engine.stats().num_steps
    asked = SamplingParams(**ASKED[name])
    alone = make(ahead=ahead)
    generate(alone, ["Hi"], asked)
    monkeypatch.setattr(TokenSequence, "forced_token", None)
    slow = make(ahead=ahead)
    assert run(slow) == expected() and slow.stats().num_steps >= quick
    step_by_step = make(ahead=ahead)
    generate(step_by_step, ["Hi"], asked)
    assert step_by_step.stats().num_steps > 1.7 * alone.stats().num_steps


def test_forced_text_counts_as_decoding() -> None:
    """Guards the order of a step and its limit of prompt tokens: what catches up with a form is no prompt."""
    engine, caught_up = make(ahead=False), 0

    def note(record: StepRecord) -> None:
        nonlocal caught_up
        caught_up += sum(chunk.caught_up for chunk in record.scheduled.chunks)
        assert record.scheduled.num_decoding == sum(chunk.is_decode for chunk in record.scheduled.chunks)

    engine.on_step = note
    generate(engine, ["Hi"], SamplingParams(**ASKED["form that forces text"]))
    assert caught_up > 5


def test_a_draft_ends_where_a_form_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards tokens behind a draft: they were sampled before the engine decided to close the form."""
    form = {"regex": "[0-9]{1,60}, and so on, and so forth", "logit_bias": dict.fromkeys(range(18, 28), 20)}
    (long,) = generate(make(ahead=False), ["Hi"], SamplingParams(max_tokens=80, close_forms=False, **form))
    for most in range(14, 40):
        params = SamplingParams(max_tokens=most, **form)
        (wanted,) = generate(make(ahead=False), ["Hi"], params)
        with monkeypatch.context() as patched:
            propose_by(patched, Prophet([list(long.token_ids)], 300))
            (found,) = generate(make(ahead=False, speculate=6), ["Hi"], params)
        assert found.error is None and found.token_ids == wanted.token_ids
        assert found.choices[0].closed and found.text.endswith("and so forth")


@pytest.mark.parametrize("case", sampled(CASES[:4], 2), ids=str)
def test_output_is_the_same_after_preemption(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards requests that lose their blocks while a draft is in flight."""
    propose_by(monkeypatch, prophet())
    engine = make(max_batch_tokens=100, speculate=4, **case)
    assert run(engine, shaken=True) == expected()
    assert engine.stats().num_preemptions > 15 and engine.stats().num_accepted_tokens > 10


@pytest.mark.slow
@pytest.mark.parametrize("case", sampled(CASES, 3, seed=1), ids=str)
def test_the_decision_changes_no_output(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `auto` with its own sources (texts, finished outputs, forms), whatever part of a draft is tried."""
    decide_at_random(monkeypatch)
    engine = make(speculate="auto", **case)
    assert run(engine) == expected()
    assert run(engine, shaken=True) == expected()
    if case.get("max_batch_tokens", 20) >= 20:
        stats = engine.stats()
        assert stats.num_accepted_tokens > 40, "the second round finds the outputs of the first"
        assert stats.num_drafted_tokens > stats.num_accepted_tokens


def accept_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants: drafted tokens count as right whatever was sampled."""
    accept = Scheduler._accept

    def planted(self: Scheduler, chunk: ScheduledChunk, samples: Sequence[Sample]) -> list[TokenEvent]:
        return accept(self, chunk._replace(draft=tuple(sample.token_id for sample in samples[:-1])), samples)

    monkeypatch.setattr(Scheduler, "_accept", planted)


def shift_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants: the noise of tokens after a draft's first is that of the next position."""
    rows = output._sampled_rows

    def planted(scheduled: SchedulerOutput) -> tuple[list[TokenSequence], list[int]]:
        sequences, positions = rows(scheduled)
        is_first = [place == 0 or positions[place - 1] + 1 != at for place, at in enumerate(positions)]
        return sequences, [at + (not first) for at, first in zip(positions, is_first, strict=True)]

    monkeypatch.setattr(output, "_sampled_rows", planted)


def test_what_is_kept_of_a_request_ends_with_it() -> None:
    """Guards indexes against growing for ever, and against a request that was cancelled or preempted."""
    engine = make(ahead=False, speculate="auto", kv_blocks=11)
    names = add_all(engine)
    for number, _ in enumerate(steps(engine, shaken=True)):
        if number == 9:
            for request_id in list(names)[::2]:
                engine.cancel(request_id)
        sources = engine.scheduler.drafts._sources  # type: ignore[union-attr]
        for sequence, text in sources._texts.items():
            assert text.index.tokens == sequence.token_ids[: len(text.index)] and not sequence.has_ended
        assert sources._num_indexed == sum(len(text.index) for text in sources._texts.values())
    assert not sources._texts and not engine.scheduler.drafts._policy._records  # type: ignore[union-attr]


@pytest.mark.parametrize("fault", [accept_all, shift_positions])
def test_planted_faults_are_seen(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards these tests: with a fault, outputs differ, or the engine notices."""
    wanted = expected()
    propose_by(monkeypatch, prophet())
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
    propose_by(monkeypatch, lambda sequence, count: Proposal(wanted[len(sequence.token_ids) - 3 :][:count], 20))
    assert penalized(5) == wanted
    monkeypatch.setattr(TokenSequence, "followed_by", lambda self, tokens: self)
    assert penalized(5) != wanted


def outputs_after_rejected(monkeypatch: pytest.MonkeyPatch, *, speculate: bool) -> list[list[int]]:
    """A request with drafts that are wrong, and one whose prompt goes on like its draft."""
    (prompt,), wrong = make_prompts([7], seed=3), [3, 3, 3, 3, 3, 3]
    propose_by(monkeypatch, lambda _, count: Proposal(wrong[:count], 20))
    engine = make_engine(make_network("llama"), speculate=6 if speculate else "off")
    (first,) = generate(engine, [prompt], SamplingParams(max_tokens=9))
    (second,) = generate(engine, [[*prompt, first.token_ids[0], *wrong, 5]], SamplingParams(max_tokens=9))
    return [list(first.token_ids), list(second.token_ids)]


def test_rejected_tokens_are_not_in_the_prefix_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards later prompts against keys and values of rejected tokens, which have been overwritten meanwhile."""
    wanted = outputs_after_rejected(monkeypatch, speculate=False)
    assert outputs_after_rejected(monkeypatch, speculate=True) == wanted
    extended = Drafts._extended

    def planted(self: Drafts, chunk: ScheduledChunk, draft: list[int]) -> ScheduledChunk:
        found, sequence = extended(self, chunk, draft), chunk.sequence
        self._pool.cache_full_blocks(sequence.blocks, [*sequence.token_ids, *draft], chunk.start, found.stop)
        return found

    monkeypatch.setattr(Drafts, "_extended", planted)
    assert outputs_after_rejected(monkeypatch, speculate=True) != wanted, "the fault is not seen"


def logprobs_of(engine: SteppingEngine, prompts: list[list[int]]) -> list[Any]:
    return [one.logprobs for one in generate(engine, prompts, SamplingParams(max_tokens=40, logprobs=5))]


KINDS = ["float32", "bfloat16", "int8", "int4", "u8 cache", "lfm2", "qwen3_5_text"]


@pytest.mark.kernels
@pytest.mark.parametrize("kind", sampled(KINDS, 4, keep=["int4", "u8 cache", "qwen3_5_text"]))
def test_drafts_change_no_bit_on_the_fast_path(kind: str) -> None:
    """Guards the CPU's kernels: the logits of a chunk's row are those of the same token alone, to the last bit."""
    prompts = [[5, 6, 7, 8, 9] * 6, [1, 2] * 9, *make_prompts([20, 11])]
    made, settings = exact_model(kind), {"kv_dtype": "u8"} if kind == "u8 cache" else {}
    config = EngineConfig(block_size=16, kv_blocks=24, max_seqs=8, device="cpu", **settings)
    wanted = logprobs_of(SteppingEngine(replace(config, speculate="off"), made), prompts)
    engine = SteppingEngine(replace(config, speculate=5), made)
    assert logprobs_of(engine, prompts) == wanted and engine.stats().num_drafted_tokens > 10


def exact_model(kind: str) -> LoadedModel:
    """A model on the fast path."""
    if kind in ("lfm2", "qwen3_5_text"):
        return fast(make_architecture(kind))
    network = make_network("llama", hidden_size=64, intermediate_size=96, head_dim=16)
    if kind == "float32":
        return fast(network)
    quantize = Quantization(kind, "int8") if kind.startswith("int") else None
    model = CpuModel(network.config.to_dict(), network.state_dict(), torch.bfloat16, quantize=quantize)
    return LoadedModel("tiny", lambda: network, None, SamplingParams(), frozenset(), fast_model=model)


def test_a_draft_takes_no_more_than_a_step_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards step-time targets and prompts: all tokens that are not the one of a decoding request keep to the limit."""
    propose_by(monkeypatch, lambda _, count: Proposal([3] * count, 20))
    monkeypatch.setattr(StepTimeController, "step_completed", lambda self, scheduled: 5)
    engine = make_engine(make_network("llama"), speculate=9, max_batch_tokens=24, target_step_ms=50.0)
    beyond: list[int] = []

    def note(record: StepRecord) -> None:
        if record.scheduled.num_decoding and engine.scheduler.prefill_limit is not None:
            beyond.append(record.scheduled.num_tokens - record.scheduled.num_decoding)

    engine.on_step = note
    generate(engine, make_prompts([7, 40, 30, 3, 60]), SamplingParams(max_tokens=20))
    assert max(beyond) == 5 and beyond.count(5) > 10, "drafts and prompts together"
