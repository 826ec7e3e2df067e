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

PEER_SHAPES: dict[str, Config] = {
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

_SMALL_FAMILY: Config = {
    "vocab_size": 32064,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

FAMILY_SHAPES: dict[str, Config] = {
    "phi3": _SMALL_FAMILY
    | {
        "model_type": "phi3",
        "num_key_value_heads": 12,
        "original_max_position_embeddings": 8192,
        "sliding_window": None,
    },
    "gemma3": _SMALL_FAMILY
    | {
        "model_type": "gemma3_text",
        "vocab_size": 65536,
        "hidden_size": 640,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "tie_word_embeddings": True,
    },
    "qwen3-moe": _SMALL_FAMILY
    | {
        "model_type": "qwen3_moe",
        "hidden_size": 1024,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "moe_intermediate_size": 384,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
    },
    "gpt-oss": _SMALL_FAMILY
    | {
        "model_type": "gpt_oss",
        "num_hidden_layers": 12,
        "intermediate_size": 384,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
    },
    "granite": _SMALL_FAMILY
    | {
        "model_type": "granite",
        "num_key_value_heads": 4,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.015625,
        "logits_scaling": 8.0,
    },
    "olmo2": _SMALL_FAMILY | {"model_type": "olmo2", "num_key_value_heads": 12},
    "glm4": _SMALL_FAMILY | {"model_type": "glm4", "num_key_value_heads": 2, "head_dim": 64, "attention_bias": True},
    "starcoder2": _SMALL_FAMILY
    | {
        "model_type": "starcoder2",
        "intermediate_size": 3072,
        "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": 4096,
    },
    "qwen3.5": _SMALL_FAMILY
    | {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "tie_word_embeddings": True,
    },
    "lfm2": {name: value for name, value in _SMALL_FAMILY.items() if name != "hidden_act"}
    | {
        "model_type": "lfm2",
        "vocab_size": 65536,
        "hidden_size": 1024,
        "intermediate_size": 6656,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "layer_types": ["full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)],
        "tie_word_embeddings": True,
    },
    "granite4": _SMALL_FAMILY
    | {
        "model_type": "granitemoehybrid",
        "vocab_size": 100352,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
        "shared_intermediate_size": 2048,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "layer_types": ["full_attention" if layer in (10, 13, 17, 27) else "linear_attention" for layer in range(32)],
        "mamba_n_heads": 48,
        "mamba_d_head": 32,
        "mamba_d_state": 128,
        "tie_word_embeddings": True,
    },
}
"""Small models of 130 to 750 million parameters, in the shapes of families that are not Llamas.

The last three are those of Qwen3.5-0.8B, LFM2-350M and Granite-4.0-H-350M, which have recurrent layers.
"""

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
    "0.8B": FAMILY_SHAPES["qwen3.5"] | {"dtype": "bfloat16", "eos_token_id": 0, "max_position_embeddings": 32768},
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
"""The shapes of Qwen3-0.6B, Qwen3.5-0.8B, which has recurrent layers, and Llama-3.1-8B."""

_WIDE: Config = {
    "model_type": "llama",
    "vocab_size": 32064,
    "intermediate_size": 8192,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}

GRID_SHAPES: dict[str, Config] = {
    "135m": PEER_SHAPES["135m"],
    "qwen3-0.6b": {name: value for name, value in GPU_SHAPES["0.6B"].items() if name not in ("architectures", "dtype")}
    | {"num_hidden_layers": 7, "max_window_layers": 7, "vocab_size": 37984}
    | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
    "llama-1b": _WIDE | {"hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 32, "head_dim": 64},
    "llama-3b": _WIDE | {"hidden_size": 3072, "num_hidden_layers": 3, "num_attention_heads": 24, "head_dim": 128},
    "qwen3-moe": FAMILY_SHAPES["qwen3-moe"],
    "gemma3": FAMILY_SHAPES["gemma3"],
}
"""Models of the grid.

The larger ones keep their widths, but have 7 of 28 layers (Qwen3 0.6B), 4 of 16 and 3 of 28 (Llama 3.2 1B and 3B), and
a quarter of the vocabulary: so the head has about the same share of the weights, and a round takes minutes.
"""

_SMALL = {
    "num_hidden_layers": 6,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

SHAPES: dict[str, Config] = GPU_SHAPES | {
    name: _LLAMA | shape for name, shape in {**PEER_SHAPES, "small": PEER_SHAPES["135m"] | _SMALL}.items()
}
"""Llamas, and those of GPU_SHAPES.

`small` is a model that takes in a prompt of 32,768 tokens in a minute or two on two cores.
"""

ALL_SHAPES = SHAPES | FAMILY_SHAPES

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


def with_layers(config: Config, layers: int) -> Config:
    """The same with so few layers, among them one of each kind."""
    is_hybrid = config["model_type"] == "qwen3_5_text"
    return config | {"num_hidden_layers": layers} | ({"full_attention_interval": layers} if is_hybrid else {})
