"""Models that would be silently wrong are refused when they are loaded, with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from cbatch.engine.errors import ModelError
from cbatch.engine.models.selfcheck import check_ragged
from cbatch.engine.models.transformers import TransformersModel
from tests.tiny import COMMON, make_engine, make_network

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "built-in attention": ("Bloom", {"n_layer": 2, "n_head": 4}, "would be silently wrong"),
    "state space": ("Mamba", {"state_size": 4}, "would be silently wrong|not supported"),
    "recurrent and attention": ("RecurrentGemma", {"head_dim": 16, "lru_width": 48}, "not supported"),
    "convolutions": ("Lfm2", {"layer_types": ["conv", "full_attention"]}, "layers of kind conv"),
    "linear attention": (
        "Qwen3Next",
        {"layer_types": ["linear_attention", "full_attention"], "num_experts": 4, "num_experts_per_tok": 2},
        "layers of kind linear_attention",
    ),
    "an encoder": ("Bert", {"is_decoder": False}, "encoder|not supported"),
    "rope by text length": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
        "changes with the length",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_at_load(kind: str) -> None:
    """Guards against text that is wrong without anyone being told."""
    family, extra, reason = REFUSED[kind]
    config = getattr(transformers, family + "Config")(**COMMON | extra)
    head = "LMHeadModel" if family == "Bert" else "ForCausalLM"
    network = getattr(transformers, family + head)(config).eval()
    with pytest.raises(ModelError, match=reason):
        make_engine(network)


class LooksAcross(torch.nn.Module):
    """A layer that mixes neighbouring tokens outside of attention, as token shift and short convolutions do."""

    def __init__(self, inner: torch.nn.Module, strength: float = 0.1) -> None:
        super().__init__()
        self.inner = inner
        self.strength = strength

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(hidden)
        out[:, 1:] += self.strength * out[:, :-1].clone()
        return out


def test_self_check_sees_what_no_list_names() -> None:
    """Guards against the next architecture: the check is of what a model does, not of what it is called."""
    network = make_network("llama")
    check_ragged(TransformersModel(network))
    network.model.layers[1].mlp = LooksAcross(network.model.layers[1].mlp)
    with pytest.raises(ModelError, match="looks across tokens"):
        make_engine(network)


def test_unknown_attention_options_are_refused() -> None:
    """Guards against swallowing a keyword that would change the result."""
    network = make_network("llama")
    layer = network.model.layers[0].self_attn
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: forward(*args, position_bias=torch.zeros(1), **kwargs)
    with pytest.raises(ModelError, match="position_bias"):
        make_engine(network)


def test_a_window_that_only_the_mask_knows_is_refused() -> None:
    """Guards against models that ask for a sliding window in their config and never pass it on."""
    network = make_network("llama")
    network.config.layer_types = ["sliding_attention", "full_attention"]
    with pytest.raises(ModelError, match=r"layers \[0\] is not what its config says"):
        make_engine(network)


def test_a_window_that_only_the_call_knows_is_refused() -> None:
    """Guards against the reverse: a stray key that the attention call passes on and the model's mask ignores."""
    network = make_network("llama")
    network.config.sliding_window = 4
    make_engine(network)
    layer = network.model.layers[1].self_attn
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: forward(*args, sliding_window=4, **kwargs)
    with pytest.raises(ModelError, match=r"layers \[1\]"):
        make_engine(network)


def test_a_model_that_gives_no_number_is_refused() -> None:
    """Guards the self-check against comparing NaN with anything and finding it small."""
    network = make_network("llama")
    network.lm_head.weight.data[3] = float("nan")
    with pytest.raises(ModelError, match="differs from its own by nan"):
        make_engine(network)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_passes_the_self_check(dtype: torch.dtype) -> None:
    """Guards against refusing good models for rounding, and against a tolerance that lets everything pass."""
    make_engine(make_network("mixtral").to(dtype))
    faulty = make_network("llama").to(dtype)
    faulty.model.layers[0].mlp = LooksAcross(faulty.model.layers[0].mlp, strength=0.5)
    with pytest.raises(ModelError, match="looks across tokens"):
        make_engine(faulty)
