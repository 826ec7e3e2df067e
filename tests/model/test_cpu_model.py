"""Guards the fast path on the CPU against the transformers path, on models of the Llama family."""

from __future__ import annotations

import math
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch

from cbatch.base.config import EngineConfig
from cbatch.base.params import SamplingParams
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.model.config import UnsupportedConfig
from cbatch.model.cpu import CpuModel
from cbatch.runtime.batch import Logits, RaggedBatch
from tests.support.generation import generate, generate_greedily
from tests.support.tiny_models import (
    VOCABULARY,
    draw_weights,
    fast,
    generate_alone,
    loaded,
    make_fast_engine,
    make_network,
    make_prompts,
)

pytestmark = pytest.mark.kernels

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "max_position_embeddings": 256}
ROPE = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama 3 places": ("llama", {"rope_parameters": ROPE | {"original_max_position_embeddings": 64}}),
    "stretched places": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}}),
    "one head for all": ("llama", {"num_key_value_heads": 1, "head_dim": 32}),
    "mistral, window": ("mistral", {"sliding_window": 21}),
    "qwen2, biases": ("qwen2", {}),
    "qwen2, windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen3, norms": ("qwen3", {"tie_word_embeddings": True}),
}
LENGTHS = [3, 70, 17, 130, 1, 40]
OUTPUTS = [60, 12, 55, 9, 70, 1]
SCENARIOS: dict[str, dict[str, Any]] = {
    "all at once": {"max_batch_tokens": 512},
    "small steps": {"max_batch_tokens": 7},
}


@cache
def network_of(name: str) -> Any:
    family, overrides = MODELS[name]
    network = make_network(family, **SHAPE | overrides)
    draw_weights(network)
    return network


@cache
def expected_of(name: str) -> list[list[int]]:
    return generate_alone(network_of(name), make_prompts(LENGTHS), OUTPUTS)


def run(engine: SteppingEngine) -> list[list[int]]:
    return generate_greedily(engine, make_prompts(LENGTHS), OUTPUTS)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("name", MODELS)
def test_equals_generate(name: str, scenario: str) -> None:
    """Guards every kind of model and rotary encoding of the fast path, token for token in float32."""
    engine = make_fast_engine(network_of(name), **SCENARIOS[scenario])
    assert run(engine) == expected_of(name)


def test_rows_that_give_way_equal_generate() -> None:
    """Guards sequences whose blocks are taken by a row that goes first, and that are computed again later."""
    engine = make_fast_engine(network_of("llama"), kv_blocks=14)
    prompts, found = make_prompts(LENGTHS), {}
    for number in (0, 1, 2):
        found[engine.add(prompts[number], SamplingParams(max_tokens=OUTPUTS[number]), priority=1)] = number
    outputs: list[list[int]] = [[] for _ in LENGTHS]
    for step in range(400):
        if step == 10:
            found[engine.add(prompts[3], SamplingParams(max_tokens=OUTPUTS[3]))] = 3
        for event in engine.step():
            if event.request_id is not None and event.token_id is not None:
                outputs[found[event.request_id]].append(event.token_id)
    assert outputs[:4] == expected_of("llama")[:4] and engine.stats().num_preemptions > 0


def test_shared_prefixes_equal_generate() -> None:
    """Guards blocks that one sequence writes and another reads in the same step, and later."""
    engine = make_fast_engine(network_of("llama"), kv_blocks=40)
    trunk = make_prompts([40], seed=5)[0]
    prompts = [trunk + tail for tail in make_prompts([3, 9, 1], seed=6)]
    expected = generate_alone(network_of("llama"), prompts, [8] * 3)
    for _ in range(2):
        outputs = generate(engine, prompts, SamplingParams(max_tokens=8))
        assert [output.token_ids for output in outputs] == expected
    assert engine.scheduler.num_cached_tokens >= 5 * 32


@pytest.mark.parametrize("name", ["llama", "qwen2, biases", "qwen3, norms"])
def test_bfloat16_is_near_float32(name: str) -> None:
    """Guards the second kind of numbers: as near to float32 as transformers' own bfloat16 is, or nearer."""
    network = network_of(name)
    prompts = make_prompts([60, 25, 100], seed=2)
    params = SamplingParams(max_tokens=1, logprobs=20)
    halves = make_network(MODELS[name][0], **SHAPE | MODELS[name][1])
    draw_weights(halves)
    halves = halves.bfloat16()
    engine = SteppingEngine(EngineConfig(block_size=16, kv_blocks=40, device="cpu"), fast(network, torch.bfloat16))
    for prompt, output in zip(prompts, generate(engine, prompts, params), strict=True):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            exact = network(ids).logits[0, -1].log_softmax(-1)
            theirs = halves(ids).logits[0, -1].float().log_softmax(-1)
        assert output.logprobs is not None
        top = output.logprobs[0].top
        errors = torch.tensor([one.logprob for one in top]) - exact[[one.token_id for one in top]]
        bound = (theirs - exact).square().mean().sqrt()
        assert errors.square().mean().sqrt() <= 1.2 * bound


ASKED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "bias": {"logit_bias": {"5": 40.0}},
    "allowed": {"allowed_token_ids": list(range(0, VOCABULARY, 3))},
    "repetition": {"repetition_penalty": 1.9},
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": -2.0},
    "no end": {"min_tokens": 9, "stop_token_ids": list(range(0, VOCABULARY, 2))},
    "drawn": {"temperature": 1.2, "seed": 4},
    "scored": {"prompt_logprobs": 0},
}


@pytest.mark.parametrize("name", ASKED)
def test_requests_get_what_they_ask_for(name: str) -> None:
    """Guards rows that want more than the likeliest token, which the fast path finds by itself: alike and mixed."""
    network, prompts = network_of("llama"), make_prompts([9, 30, 17])
    config = EngineConfig(block_size=16, kv_blocks=40, device="cpu", attention="reference")
    theirs = SteppingEngine(config, loaded(deepcopy(network)))  # it changes the model's attention for good
    ours = make_fast_engine(network)
    for mixed in ([ASKED[name]] * 3, [ASKED[name], {}, ASKED["drawn"]]):
        params = [SamplingParams(max_tokens=12, **asked) for asked in mixed]
        outputs = generate(theirs, prompts, params)
        expected = [output.token_ids for output in outputs]
        assert [output.token_ids for output in generate(ours, prompts, params)] == expected
        assert not any(output.error for output in outputs)
    plain = generate(theirs, prompts[:1], SamplingParams(max_tokens=12))[0].token_ids
    assert (expected[0] == plain) == (name in ("nothing", "scored")), "the case shows nothing"
    assert name != "no end" or all(token % 2 for token in expected[0][:8])
    assert name != "allowed" or not any(token % 3 for token in expected[0])


def test_more_rows_than_memory_is_kept_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards steps whose logits exceed the memory that is kept: scored prompts, and very many rows."""
    monkeypatch.setattr("cbatch.model.cpu._KEPT_LOGIT_ROWS", 2)
    assert run(make_fast_engine(network_of("llama"))) == expected_of("llama")


def test_the_likeliest_tokens_are_those_of_the_logits() -> None:
    """Guards greedy rows against another order of rows, in steps of prompts, of decoding rows and of both."""
    engine, seen = make_fast_engine(network_of("llama"), max_batch_tokens=40), 0
    forward = engine.runner.forward

    def checked(batch: RaggedBatch) -> Logits:
        nonlocal seen
        values, argmax, _ = logits = forward(batch)
        assert argmax is not None and argmax.tokens.tolist() == values.argmax(-1).tolist()
        assert argmax.logits.tolist() == values.max(-1).values.tolist() if len(values) else True
        seen += len(values)
        return logits

    engine.runner.forward = checked  # type: ignore[method-assign]
    generate(engine, make_prompts(LENGTHS), SamplingParams(max_tokens=5))
    assert seen == 5 * len(LENGTHS)


def test_a_row_of_nan_fails_alone() -> None:
    """Guards the neighbours of a row whose past has turned NaN, on the path that finds the likeliest by itself."""
    engine = make_fast_engine(network_of("llama"))
    prompts = make_prompts([20, 33])
    broken, other = (engine.add(prompt, SamplingParams(max_tokens=6)) for prompt in prompts)
    events = engine.step()
    for values in engine.runner.kv_cache.values:
        values[engine._requests[broken][0].blocks[0]] = math.nan
    while engine.has_work:
        events += engine.step()
    (error,) = (event.error for event in events if event.error is not None)
    assert error.code == "nan_logits" and [event.error for event in events if event.request_id == other] == [None] * 6


def test_what_is_not_of_the_family_is_refused() -> None:
    """Guards against a model that would be computed wrongly: every deviation sends it to transformers."""
    network = network_of("llama")
    config, tensors = network.config.to_dict(), network.state_dict()
    CpuModel(config, tensors, torch.float32)
    deviations: list[dict[str, Any]] = [
        {"model_type": "bloom"},
        {"hidden_act": "mish"},
        {"quantization_config": {"bits": 4}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}},
        {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1.0}},
        {"some_other_scale": 2.0},
        {"num_key_value_heads": 4},
        {"layer_types": ["chunked_attention"] * 2},
        {"layer_types": ["sliding_attention"] * 2},
        {"num_attention_heads": 3},
        {"num_attention_heads": 0},
        {"rms_norm_eps": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
        {"architectures": 5, "hidden_size": "many"},
    ]
    mistral = network_of("mistral, window").config.to_dict()
    del mistral["sliding_window"]  # which is 4,096 then
    with pytest.raises(UnsupportedConfig, match="no sliding_window"):
        CpuModel(mistral, network_of("mistral, window").state_dict(), torch.float32)
    tied = network_of("llama, tied").state_dict()
    with pytest.raises(UnsupportedConfig, match="differ"):
        CpuModel(
            config | {"tie_word_embeddings": True}, tied | {"lm_head.weight": tied["lm_head.weight"] + 1}, torch.float32
        )
    for deviation in deviations:
        with pytest.raises(UnsupportedConfig):
            CpuModel(config | deviation, tensors, torch.float32)
    for spare in ("model.layers.0.self_attn.q_proj.bias", "model.layers.1.mlp.down_proj.scale"):
        with pytest.raises(UnsupportedConfig):
            CpuModel(config, tensors | {spare: torch.zeros(64)}, torch.float32)
    with pytest.raises(UnsupportedConfig):
        CpuModel(config, tensors, torch.float16)
