"""Guards the fast path on the CPU against the transformers path, on models of the Llama family."""

from __future__ import annotations

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
from tests.support.generation import generate, generate_greedily
from tests.support.tiny_models import (
    MODELS,
    VOCABULARY,
    generate_alone,
    loaded,
    make_fast_engine,
    make_prompts,
    network_of,
)

pytestmark = pytest.mark.kernels

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
LENGTHS = [3, 70, 17, 130, 1, 40]
OUTPUTS = [60, 12, 55, 9, 70, 1]
SCENARIOS: dict[str, dict[str, Any]] = {
    "all at once": {"max_batch_tokens": 512},
    "small steps": {"max_batch_tokens": 7},
}


def cpu_network(name: str) -> Any:
    """Of sizes that the kernels support."""
    return network_of(name, **SIZES)


@cache
def expected_of(name: str) -> list[list[int]]:
    return generate_alone(cpu_network(name), make_prompts(LENGTHS), OUTPUTS)


def run(engine: SteppingEngine) -> list[list[int]]:
    return generate_greedily(engine, make_prompts(LENGTHS), OUTPUTS)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "odd sizes"])
def test_equals_generate(name: str, scenario: str) -> None:
    """Guards every kind of model and rotary encoding of the fast path, token for token in float32."""
    engine = make_fast_engine(cpu_network(name), **SCENARIOS[scenario])
    assert run(engine) == expected_of(name)


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
    network, prompts = cpu_network("llama"), make_prompts([9, 30, 17])
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
    assert run(make_fast_engine(cpu_network("llama"))) == expected_of("llama")


def test_what_is_not_of_the_family_is_refused() -> None:
    """Guards against a model that would be computed wrongly: every deviation sends it to transformers."""
    network = cpu_network("llama")
    config, tensors = network.config.to_dict(), network.state_dict()
    CpuModel(config, tensors, torch.float32)
    deviations: list[dict[str, Any]] = [
        {"model_type": "bloom"},
        {"hidden_act": "mish"},
        {"quantization_config": {"bits": 4}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}},
        {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1.0}},
        {"num_key_value_heads": 4},
        {"layer_types": ["chunked_attention"] * 2},
        {"layer_types": ["sliding_attention"] * 2},
        {"num_attention_heads": 3},
        {"num_attention_heads": 0},
        {"rms_norm_eps": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
        {"architectures": 5, "hidden_size": "many"},
    ]
    for deviation in deviations:
        with pytest.raises(UnsupportedConfig):
            CpuModel(config | deviation, tensors, torch.float32)
    for spare in ("model.layers.0.self_attn.q_proj.bias", "model.layers.1.mlp.down_proj.scale"):
        with pytest.raises(UnsupportedConfig):
            CpuModel(config, tensors | {spare: torch.zeros(64)}, torch.float32)
    with pytest.raises(UnsupportedConfig):
        CpuModel(config, tensors, torch.float16)
