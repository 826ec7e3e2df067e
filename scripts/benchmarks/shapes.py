"""Sizes of the models that are measured, as entries of a `config.json`. Imports nothing."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

_LLAMA_AND_QWEN: Config = {"hidden_act": "silu", "attention_bias": False, "dtype": "bfloat16", "eos_token_id": 0}
_LLAMA: Config = _LLAMA_AND_QWEN | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}

PEER_SHAPES: dict[str, dict[str, int]] = {
    "135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
}
"""Llamas that a CPU computes."""

GPU_SHAPES: dict[str, Config] = {
    "0.6B": _LLAMA_AND_QWEN
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": 28,
    },
    "8B": _LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    },
}
"""The shapes of Qwen3-0.6B and Llama-3.1-8B."""

_SMALL = {
    "num_hidden_layers": 6,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

SHAPES: dict[str, Config] = GPU_SHAPES | {
    name: _LLAMA | {"max_position_embeddings": 40960} | shape
    for name, shape in {**PEER_SHAPES, "small": PEER_SHAPES["135m"] | _SMALL}.items()
}
"""All of them. `small` is a model that takes in a prompt of 32,768 tokens in a minute or two on two cores."""

TINY: Config = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 512,
}
"""Overrides with which a script can be tried anywhere."""
