"""Tiny random models whose output depends on the whole context, and engines over them.

Default initialisation (std 0.02) makes greedy output nearly independent of the context, so that broken
attention goes unseen. Linears get std 1.5/sqrt(fan_in), embeddings 0.4, and the head is not tied.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import transformers
from torch import nn

from cbatch.base.config import EngineConfig
from cbatch.base.params import SamplingParams
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.model.cpu import CpuModel
from cbatch.model.loader import LoadedModel

VOCABULARY = 89
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 12}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 12, "query_pre_attn_scalar": 16}),
    "phi3": ("Phi3", {"sliding_window": 12}),
    "gpt2": (
        "GPT2",
        {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 160, "n_inner": 64},
    ),
    "olmo2": ("Olmo2", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "gpt_oss": (
        "GptOss",
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 12},
    ),
}


_ROPE = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama 3 places, tied": (
        "llama", {"rope_parameters": _ROPE | {"original_max_position_embeddings": 32}, "tie_word_embeddings": True}
    ),
    "stretched places": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}}),
    "odd sizes": ("llama", {"num_attention_heads": 6, "head_dim": 10, "intermediate_size": 70}),
    "one head for all": ("llama", {"num_key_value_heads": 1}),
    "mistral, window": ("mistral", {"sliding_window": 9}),
    "qwen2, biases": ("qwen2", {}),
    "qwen2, windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen3, norms": ("qwen3", {"tie_word_embeddings": True}),
}  # fmt: skip
"""Models of the Llama family in all its forms, for the CPU and for devices."""


@cache
def network_of(name: str, **sizes: int) -> Any:
    """One of MODELS, with other sizes than it has there."""
    family, overrides = MODELS[name]
    return make_network(family, **overrides | sizes)


def draw_weights(network: nn.Module, seed: int = 0) -> None:
    """Fills a network so that every part of the context matters to its output."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.dim() < 2:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(0.1 * noise if name.endswith("bias") else 1 + 0.1 * noise)
            elif "embed" in name or "wte" in name or "wpe" in name:
                parameter.normal_(std=0.4, generator=generator)
            else:
                fan_in = parameter.shape[0] if "GPT2" in type(network).__name__ else parameter.shape[-1]
                parameter.normal_(std=1.5 / fan_in**0.5, generator=generator)


def make_network(family: str, **overrides: Any) -> Any:
    """A float32 causal language model of a family of FAMILIES, the same one every time."""
    prefix, extra = FAMILIES[family]
    head = "LMHeadModel" if family == "gpt2" else "ForCausalLM"
    config = getattr(transformers, prefix + "Config")(**COMMON | extra | overrides)
    network = getattr(transformers, prefix + head)(config).eval()
    draw_weights(network)
    return network


def loaded(
    network: Any, tokenizer: Any = None, eos_ids: frozenset[int] = frozenset(), fast_model: Any = None
) -> LoadedModel:
    return LoadedModel("tiny", lambda: network, tokenizer, SamplingParams(), eos_ids, fast_model=fast_model)


def fast(network: Any, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """A model of the Llama family on the fast path, with the weights of a network."""
    return loaded(network, fast_model=CpuModel(network.config.to_dict(), network.state_dict(), dtype))


def make_fast_engine(network: Any, **config: Any) -> SteppingEngine:
    """An engine on the fast path with a small cache: 24 blocks of 16 tokens unless said otherwise."""
    settings: dict[str, Any] = {"block_size": 16, "kv_blocks": 24, "max_seqs": 8, "device": "cpu"} | config
    return SteppingEngine(EngineConfig(**settings), fast(network))


def make_engine(network: Any, **config: Any) -> SteppingEngine:
    """An engine on the CPU with a small cache: 64 blocks of 4 tokens unless said otherwise."""
    settings: dict[str, Any] = {"block_size": 4, "kv_blocks": 64, "max_seqs": 8, "device": "cpu"} | config
    return SteppingEngine(EngineConfig(**settings), loaded(network))


def make_prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


@contextmanager
def eager_attention(network: Any) -> Iterator[None]:
    before = network.config.get_text_config()._attn_implementation
    network.set_attn_implementation("eager")
    try:
        yield
    finally:
        network.set_attn_implementation(before)


def generate_alone(network: Any, prompts: list[list[int]], lengths: list[int], **options: Any) -> list[list[int]]:
    """Greedy outputs of transformers' own `generate`, one prompt at a time."""
    outputs = []
    for prompt, length in zip(prompts, lengths, strict=True):
        ids = torch.tensor([prompt])
        options |= {"max_new_tokens": length, "min_new_tokens": length, "do_sample": False, "pad_token_id": 0}
        with eager_attention(network):
            full = network.generate(ids, attention_mask=torch.ones_like(ids), **options)
        outputs.append(full[0, len(prompt) :].tolist())
    return outputs


@contextmanager
def no_collector() -> Iterator[None]:
    """Turns the collector of cycles off: what is freed in here was freed because nobody held it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
