"""Models with recurrent layers in the engine: the same outputs whatever happens, and nothing computed twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from cbatch.base.config import EngineConfig
from cbatch.base.errors import ConfigError, ModelError
from cbatch.base.outputs import KnownOutput
from cbatch.base.params import SamplingParams
from cbatch.base.request import Request
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.model.hf import recurrent
from cbatch.model.hf.self_check import checked_model
from tests.support.architectures import make_architecture
from tests.support.generation import generate
from tests.support.tiny_models import loaded, make_engine, make_prompts

HYBRID = "qwen3_5_text"
"""Gated delta nets and attention."""
KINDS = [HYBRID, "jamba", *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("bamba", "lfm2"))]
"""With a scan that cannot go on from a state, with one of Mamba 2, and with convolutions only."""


@pytest.fixture(scope="module", params=KINDS)
def network(request: pytest.FixtureRequest) -> Any:
    return make_architecture(request.param)


@pytest.fixture(scope="module")
def hybrid() -> Any:
    return make_architecture(HYBRID)


@pytest.fixture
def engine(hybrid: Any) -> Iterator[SteppingEngine]:
    with make_engine(hybrid, max_batch_tokens=32, kv_blocks=200) as engine:
        yield engine


def outputs(engine: SteppingEngine, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return [list(completion.token_ids) for completion in generate(engine, prompts, params)]


def tokens_of(engine: SteppingEngine, ids: list[int], failures: int = 0) -> list[list[int]]:
    """The tokens of each request. failures: of how many steps"""
    found: dict[int | None, list[int]] = {number: [] for number in ids}
    while engine.has_work:
        try:
            events = engine.step()
        except RuntimeError:
            failures -= 1
            continue
        for event in events:
            if event.token_id is not None:
                found[event.request_id].append(event.token_id)
    assert failures == 0
    return list(found.values())


SAMPLED = SamplingParams(max_tokens=12, temperature=1.0, seed=5)
PROMPTS = make_prompts([40, 3, 25, 1, 17, 40])


@pytest.mark.slow
def test_sampled_outputs_do_not_depend_on_chunks_company_or_overlap(network: Any) -> None:
    """Guards temperature 1: noise must meet the same logits, chunked by 7, preempted, alone, a step ahead."""
    with make_engine(network, max_batch_tokens=512) as engine:
        expected = outputs(engine, PROMPTS, SAMPLED)
    assert len({tuple(output) for output in expected}) > 3
    for settings in (
        {"max_batch_tokens": 7},
        {"max_batch_tokens": 40, "run_ahead": True},
        {"max_seqs": 1},
        {"max_batch_tokens": 24, "kv_blocks": 18},
        {"state_slots": 2},
    ):
        with make_engine(network, **settings) as engine:
            assert outputs(engine, PROMPTS, SAMPLED) == expected, settings
    known = [KnownOutput(tokens[:7]) for tokens in expected]  # an earlier run has begun the answers
    with make_engine(network, max_batch_tokens=32) as engine:
        requests = [
            Request(prompt_ids=prompt, params=SAMPLED, known=[begin])
            for prompt, begin in zip(PROMPTS, known, strict=True)
        ]
        assert tokens_of(engine, [engine.add_request(request) for request in requests]) == expected


def test_a_second_turn_computes_only_what_is_new(engine: SteppingEngine) -> None:
    """Guards the chat: behind a long first turn, the second takes over the state at its end."""
    [prompt] = make_prompts([100])
    [first] = outputs(engine, [prompt], SamplingParams(max_tokens=20))
    second = [*prompt, *first, *make_prompts([6], seed=1)[0]]
    [completion] = generate(engine, [second], SamplingParams(max_tokens=4))
    assert completion.usage.cached_tokens >= 120 - 1 - engine.limits.block_size
    with make_engine(engine.loaded.network, prefix_cache=False, kv_blocks=200) as plain:
        assert outputs(plain, [second], SamplingParams(max_tokens=4)) == [list(completion.token_ids)]


def test_a_common_beginning_is_computed_once(engine: SteppingEngine) -> None:
    """Guards against a hit rate of 0: snapshots must not all fall into what is each row's own, and rows or outputs that
    arrive together wait until the first has computed what they share.
    """
    shared, alone, *tails = make_prompts([64, 40, 5, 5, 5, 5])
    completions = generate(engine, [shared + tail for tail in tails], SAMPLED)
    assert [completion.usage.cached_tokens for completion in completions] == [0, 64, 64, 64]
    for tail in tails[:2]:  # the second that begins so leaves a snapshot at the end of what is shared
        outputs(engine, [alone + tail], SAMPLED)
    for tail in tails[2:]:
        assert generate(engine, [alone + tail], SAMPLED)[0].usage.cached_tokens == 40
    before = engine.scheduler.num_prompt_tokens - engine.scheduler.num_cached_tokens
    [completion] = generate(engine, make_prompts([50], seed=2), replace(SAMPLED, n=4))
    assert len(completion.choices) == 4 and len({tuple(choice.token_ids) for choice in completion.choices}) > 1
    computed = engine.scheduler.num_prompt_tokens - engine.scheduler.num_cached_tokens - before
    assert computed == 50 + 3 * (50 - 48)


def test_what_scored_prompts_share_is_computed_once(engine: SteppingEngine, hybrid: Any) -> None:
    """Guards continuations of one context: they take over its state, up to where the first of them is scored."""
    shared, *tails = make_prompts([70, 5, 1, 9])
    prompts, params = [shared + tail for tail in tails], SamplingParams(max_tokens=0, prompt_logprobs=0)
    row = {"prompt_token_ids": shared, "choices": tails, "score": True, "logprobs": 0}
    before = engine.scheduler.num_prefilled_tokens
    (found,) = generate(engine, [row], SamplingParams())
    assert engine.scheduler.num_prefilled_tokens - before == 70 + 4 + (70 - 68) + (70 - 68) + 8
    with make_engine(hybrid, max_batch_tokens=32, kv_blocks=200, prefix_cache=False) as other:
        for number, whole in enumerate(generate(other, prompts, params)):
            (one,) = [choice for choice in found.choices if choice.index == number]
            assert one.score is not None and whole.prompt_logprobs is not None
            right = [token.logprob for token in whole.prompt_logprobs[70:]]
            assert [token.logprob for token in one.score.tokens] == pytest.approx(right, abs=1e-5)
    (again,) = generate(engine, [prompts[0]], params)
    assert again.usage.cached_tokens == 0 and len(again.prompt_logprobs or ()) == 75


def test_a_step_that_fails_is_computed_from_states_that_it_has_not_touched(
    engine: SteppingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards retries: unlike keys and values, a state that a failed step has changed must not be used again."""
    expected = outputs(engine, PROMPTS[:3], SAMPLED)
    with make_engine(engine.loaded.network, max_batch_tokens=32) as failing:
        forward, count = failing.runner.forward, 0

        def fails_sometimes(batch: Any) -> Any:
            nonlocal count
            count += 1
            logits = forward(batch)
            if count in (2, 5, 6):
                raise RuntimeError("planted")
            return logits

        monkeypatch.setattr(failing.runner, "forward", fails_sometimes)
        assert tokens_of(failing, [failing.add(prompt, SAMPLED) for prompt in PROMPTS[:3]], failures=3) == expected


def test_states_can_be_kept_in_half_the_memory(hybrid: Any) -> None:
    """Guards `--state-dtype`: it halves what the reference keeps in float32, and changes the key of a result."""
    with make_engine(hybrid) as whole, make_engine(hybrid, state_dtype="bfloat16") as half:
        assert half.limits.state_bytes * 2 == whole.limits.state_bytes
        assert half.fingerprint != whole.fingerprint
        assert "slots for sequences and snapshots" in half.describe()["states"]
        assert [len(output) for output in outputs(half, PROMPTS, SAMPLED)] == [12] * 6


def test_a_model_of_recurrent_layers_needs_no_pages() -> None:
    """Guards Mamba: no byte for keys and values, and prompts as long as the context all the same."""
    with make_engine(make_architecture("mamba2")) as engine:
        assert engine.limits.kv_bytes_per_token == 0 and engine.limits.state_slots > 0
        assert engine.describe()["KV cache"].startswith("none")
        assert [len(output) for output in outputs(engine, PROMPTS, SAMPLED)] == [12] * 6


def test_slots_are_paid_by_the_memory_of_the_cache(hybrid: Any) -> None:
    """Guards `--kv-cache-memory`: pages and states together take no more than it says."""
    settings: dict[str, Any] = {"block_size": 4, "device": "cpu", "max_seqs": 8}
    with SteppingEngine(EngineConfig(kv_cache_memory="1MiB", **settings), loaded(hybrid)) as engine:
        limits = engine.limits
        pages = limits.cache_tokens * limits.kv_bytes_per_token
        assert limits.state_slots >= 8
        assert pages + limits.state_slots * limits.state_bytes <= 2**20
    with pytest.raises(ConfigError, match=r"does not hold .*states of one sequence"):
        SteppingEngine(EngineConfig(kv_cache_memory="4KiB", **settings), loaded(hybrid))


def test_fewer_slots_than_sequences_make_requests_wait(hybrid: Any) -> None:
    """Guards admission: a slot is counted like a seat, so two slots run two requests."""
    with make_engine(hybrid, state_slots=2, max_seqs=8, max_batch_tokens=64) as engine:
        assert engine.limits.max_seqs == 2
        for prompt in PROMPTS:
            engine.add(prompt, SAMPLED)
        while engine.has_work:
            engine.step()
            engine.scheduler.check_integrity()
            assert engine.stats().num_running <= 2


def test_old_versions_of_transformers_are_named(hybrid: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the message: with a transformers whose caches have no such methods, the user learns which one has."""
    from transformers.cache_utils import Cache

    monkeypatch.delattr(Cache, "get_conv_state")
    with pytest.raises(ModelError, match=r"need transformers 5\.21 or newer"):
        checked_model(make_architecture("lfm2"))


def test_a_model_that_ignores_its_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the check at load: what does not go on from the state in its slot is noticed, whatever it is called."""
    monkeypatch.setattr(recurrent.StateView, "get_recurrent_state", lambda self, layer_idx, state_idx=0: None)
    with pytest.raises(ModelError, match="differs from its own"):
        checked_model(make_architecture(HYBRID))
