"""A tiny random model of every causal architecture that the installed transformers has.

`tiny_config` takes the defaults of a configuration class and makes every size in it small, below every name that
the libraries use for it. Windows, chunks and thresholds are set so low that a prompt of 60 tokens passes them all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

from tests.support.tiny_models import VOCABULARY

CLASSES: dict[str, str] = {name: str(cls) for name, cls in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())}
"""Every model type of which AutoModelForCausalLM makes a model, and the class that it makes."""
WITHOUT_CAUSAL_CLASS: dict[str, str] = {
    "ernie4_5_vl_moe_text": "Ernie4_5_VLMoeForConditionalGeneration",
    "glm4v_moe_text": "Glm4vMoeForConditionalGeneration",
    "glm4v_text": "Glm4vForConditionalGeneration",
    "glm_ocr_text": "GlmOcrForConditionalGeneration",
    "granite4_vision_text": "Granite4VisionForConditionalGeneration",
    "granite_docling_text": "GraniteDoclingForConditionalGeneration",
    "hunyuan_vl_text": "HunYuanVLForConditionalGeneration",
    "minimax_m3_vl_text": "MiniMaxM3SparseForConditionalGeneration",
    "mistral4": "Mistral4ForCausalLM",
    "mllama_text_model": "MllamaForCausalLM",
    "molmo2_text": "Molmo2ForConditionalGeneration",
    "muse_glimmer_text": "MuseGlimmerForConditionalGeneration",
    "paddleocr_vl_text": "PaddleOCRVLForConditionalGeneration",
    "qwen2_5_omni_text": "Qwen2_5OmniThinkerForConditionalGeneration",
    "qwen2_5_vl_text": "Qwen2_5_VLForConditionalGeneration",
    "qwen2_vl_text": "Qwen2VLForConditionalGeneration",
    "qwen3_omni_moe_text": "Qwen3OmniMoeThinkerForConditionalGeneration",
    "qwen3_vl_moe_text": "Qwen3VLMoeForConditionalGeneration",
    "qwen3_vl_text": "Qwen3VLForConditionalGeneration",
    "step3p5": "Step3p7ForConditionalGeneration",
}
"""Text models that AutoModelForCausalLM does not make, or not as published files name their weights, and the class of
another kind that is run on text instead."""
LAYERS = 2
WINDOW = 12
CHUNK = 16
CONTEXT = 160
SPECIAL = VOCABULARY - 1
"""The id of every special token, which no prompt contains."""

# Whole names, as regular expressions; the first that fits decides. None means: leave it out, or set nothing.
SIZES: list[tuple[str, Any]] = [
    (r".*vocab_size(_per_layer_input)?", VOCABULARY),
    (r".*codebook_size", 64),
    (r"hidden_size_per_layer_input", 16),
    (r"tie_word_embeddings|tie_encoder_decoder", False),
    (r"(n|max)_positions?(_embeddings)?|max_(seq_len|target_positions|source_positions)|n_ctx", CONTEXT),
    (r"original_max_position_embeddings", 32),
    (r"sliding_window(_size)?|.*attention_window(_size|_len)?|window_size|local_attention", WINDOW),
    (r"use_sliding_window", True),
    (r"max_window_layers", 1),
    (r"attention_chunk_size|floor_scale|log_scaling_n_floor|keep_window_size", CHUNK),
    (r"hidden_size|d_model|n_embd|emb_dim|embedding_dim|word_embed_proj_dim|embedding_size|.*d_inner|lru_width", 64),
    (r".*hidden_size|adapter_(in|out)_dim|adapter_input_size", 64),
    (r".*(intermediate_size|ffn_dim|ffn_hidden_size|d_ff|dff|dim_ff|n_inner)(_mlp)?", 64),
    (r"(num_)?(hidden_|decoder_|encoder_)?layers|n_layers?|num_blocks|num_layers_per_stack", LAYERS),
    (r"num_(encoder|decoder)_layers", LAYERS),
    (r"(num_|swa_num_)?((de|en)coder_)?attention_heads|n_heads?|num_heads", 4),
    (r"num_(de|en)coder_attention_heads", 4),
    (r".*(key_value_heads|kv_heads|kv_n_heads)", 2),
    (r"qk_head_dim", 24),
    (r"qk_rope_head_dim", 8),
    (r"rotary_dim", 8),
    (r".*head_dim|d_head|dim_head|d_kv|kv_channels|attention_head_size|mamba_d_head|mamba_headdim", 16),
    (r"q_lora_rank|kv_lora_rank|o_lora_rank|.*lora_rank", 16),
    (r"(num_local|moe_num|num|n_routed)_experts", 4),
    (r".*(num_experts_per_tok|num_experts_per_token|moe_k|moe_topk|moe_top_k|top_k_experts)", 2),
    (r"(n|num_expert)_groups?|topk_group", 1),
    (r"(n|num|moe_num)_shared_experts", 1),
    (r"first_k_dense_replace|num_dense_layers", 1),
    (r"depth|moe_latent_size", 1),
    (r"mamba_(n|num)_heads", 8),
    (r"linear_num_heads", 4),
    (r"mamba_d_ssm", 128),
    (r"zero_expert_num", 2),
    (r"(shape|pronunciation)_embed_dim|encoder_hash_byte_group_vocab", 32),
    (r"is_decoder", True),
    (r"mamba_chunk_size|chunk_size", 8),
    (r"index_topk", 8),
    (r"num_kv_shared_layers", 2),
    (r"index_block_size", 4),
    (r"index_topk_blocks", 2),
    (r".*_pdrop|.*dropout.*|.*layerdrop", 0.0),
]


def _mrope(theta: float, *sections: int, **others: Any) -> dict[str, Any]:
    """Positions in three dimensions, which are one for text. sections: pairs of a head for each of them"""
    rope = {"rope_type": "default", "rope_theta": theta, "mrope_section": list(sections)}
    return {"rope_parameters": rope | others}


# What one family needs beyond that: fields that the table above cannot know.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("sliding_attention", "full_attention")
        },
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "dory": {
        "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp", "sliding_attention", "mlp"],
        "num_hidden_layers": 6,
        "n_input_layers": 2,
        "n_recurrent_layers": 2,
        "n_output_layers": 2,
    },
    "dots3_note_text": {
        "layer_types": ["indexed_attention", "sliding_attention"],
        "per_layer_config": {1: {"head_dim": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}},
    },
    "dots3_note_vision_encoder": {"mlp_layer_types": ["dense"] * 2, "per_layer_config": {}},
    "ernie4_5_vl_moe_text": _mrope(5e5, 3, 3, 2) | {"moe_intermediate_size": [64, 32]},
    "falcon_h1": {"attention_out_multiplier": 4.0, "ssm_out_multiplier": 0.5},
    "flint": {"mlp_only_layers": [0]},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.5] * 4,
        "intermediate_size": 64,
    },
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "per_layer_config": {1: {"head_dim": 32}, 3: {"head_dim": 32}},
    },
    "gemma4_unified_text": {"per_layer_config": {1: {"head_dim": 32}}},
    "glm4v_moe_text": _mrope(1e4, 1, 1, 2, partial_rotary_factor=0.5),
    "glm4v_text": _mrope(1e4, 1, 1, 2, partial_rotary_factor=0.5),
    "glm_ocr_text": _mrope(1e4, 2, 3, 3) | {"head_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "downsample_rate": "1/2"},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hrm_text": {"num_hidden_layers": 16},
    "hunyuan_vl_text": {
        "rope_parameters": {
            "rope_type": "dynamic",
            "rope_theta": 1e4,
            "alpha": 8.0,
            "factor": 1.0,
            "mrope_section": [2, 2, 2, 2],
        }
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": {"num_attention_heads_per_layer": [4, 8]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "mamba2": {"num_heads": 8},
    "mimo_v2_flash": {"head_dim": 24},
    "minimax": {"block_size": 8, "sliding_window": None},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "mistral4": {
        "head_dim": 24,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "llama_4_scaling_beta": 0.5}
        | {"original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0},
    },
    "mllama_text_model": {"cross_attention_layers": [1]},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "molmo2_text": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        "rope_scaling_layers": [1],
        "additional_vocab_size": VOCABULARY,  # transformers saves both tables as one, cut in halves
    },
    "muse_glimmer": {"image_token_id": 0, "video_token_id": 0},
    "nemotron_h": {"moe_latent_size": None},
    "paddleocr_vl_text": _mrope(5e5, 2, 3, 3),
    "phimoe": {"router_jitter_noise": 0.1},
    "qwen2_5_omni_text": _mrope(1e6, 2, 3, 3),
    "qwen2_5_vl_text": _mrope(1e6, 2, 3, 3),
    "qwen2_vl_text": _mrope(1e6, 2, 3, 3),
    "qwen3_omni_moe_text": _mrope(1e6, 4, 2, 2),
    "qwen3_vl_moe_text": _mrope(5e5, 4, 2, 2) | {"moe_intermediate_size": 48},
    "qwen3_vl_text": _mrope(5e5, 4, 2, 2),
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "indexer_head_dim": 16,
        "indexer_kv_heads": 1,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {"axial_pos_embds": False},
    "step3p5": {
        "layer_types": ["sliding_attention", "full_attention"],
        "per_layer_config": {0: {"num_attention_heads": 6}},
        "query_pre_attn_scalar": 16,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
        "share_expert_dim": 32,
        "swiglu_limits": [None, 1.5],
        "swiglu_limits_shared": [0.5, 1.0],
        "moe_router_scaling_factor": 3.0,
    },
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32},
    "zamba2": {"attention_hidden_size": 128, "attention_head_dim": 32, "hybrid_layer_ids": [1]},
    "zaya": {"num_experts_per_tok": 1},
}
_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 20, "attention_factor": 1.3,
         "beta_fast": 32.0, "beta_slow": 1.0}  # fmt: skip
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere2_moe, dense layers and shared experts": ("cohere2_moe", {
        "mlp_layer_types": ["dense", "sparse"], "layer_types": ["full_attention", "sliding_attention"],
        "num_shared_experts": 1, "expert_selection_fn": "sigmoid", "rms_norm_eps": 1e-6,
    }),
    "falcon, two norms": ("falcon", {"new_decoder_architecture": True, "bias": True}),
    "falcon, one norm": ("falcon", {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}),
    "falcon, in turn": ("falcon", {"parallel_attn": False, "multi_query": False, "num_kv_heads": 4, "bias": True}),
    "laguna, gates of numbers": ("laguna", {"gating": "per-element", "attention_bias": True}),
    "nemotron_h, latent experts": ("nemotron_h", {"moe_latent_size": 32}),
    "olmo3, stretched full attention": ("olmo3", {"rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
        "full_attention": {"rope_theta": 5e5, **_YARN},
    }}),
    "phimoe, stretched positions": ("phimoe", {
        "attention_bias": True, "lm_head_bias": True, "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.5] * 8, "long_factor": [3.0] * 8,
            "short_mscale": 1.2, "long_mscale": 1.2, "original_max_position_embeddings": CONTEXT,
        },
    }),
}  # fmt: skip
"""Models of a type that has several forms: the type, and settings beside those that the tables above give."""
FADING = ("A_log", "time_decay")
"""Logarithms of how fast a state fades: it does so over some twenty tokens."""
NOT_BUILT_HERE: dict[str, str] = {
    "gemma3n": "its vision tower needs the package timm",
    "gemma4_assistant": "a draft model, which reads the keys and values of the model it drafts for",
    "musicgen": "a decoder of audio codes, which AutoModelForCausalLM does not build from this configuration",
    "musicgen_melody": "a decoder of audio codes, which AutoModelForCausalLM does not build from this configuration",
}
"""Types for which building fails here, and why."""


def tiny_config(model_type: str) -> Any:
    """A small configuration of a model type, or of one of VARIANTS, with its windows and thresholds in use."""
    model_type, own = VARIANTS.get(model_type, (model_type, {}))
    name = WITHOUT_CAUSAL_CLASS.get(model_type)
    kind = getattr(transformers, name).config_class if name else CONFIG_MAPPING[model_type]
    return kind(**shrunk(kind().to_dict()) | own)


def make_architecture(model_type: str, gain: float = 1.5, **sizes: Any) -> Any:
    """A float32 model of a type, built as `from_pretrained` builds it, with weights that make its context matter.

    sizes: keys of its configuration that are to be different
    """
    torch.manual_seed(0)
    config = tiny_config(model_type)
    for key, value in sizes.items():
        setattr(config.get_text_config(), key, value)
    name = WITHOUT_CAUSAL_CLASS.get(model_type)
    make = getattr(transformers, name)._from_config if name else AutoModelForCausalLM.from_config
    network = make(config).eval()
    draw(network, gain)
    return network


def draw(network: nn.Module, gain: float) -> None:
    """Weights of std gain / sqrt(fan_in), embeddings of 0.4, vectors near 1 and biases near 0."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for path, module in network.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                if name in FADING:
                    parameter.uniform_(0.02, 0.1, generator=generator).log_()
                elif name.startswith("time_mix_"):  # shares of two tokens
                    parameter.uniform_(0.2, 0.8, generator=generator)
                elif path.endswith("fgate_preact") and name == "bias":
                    parameter.fill_(4.0)
                elif parameter.dim() < 2:
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.copy_(0.1 * noise + ("bias" not in name))
                elif isinstance(module, nn.Embedding):
                    parameter.normal_(std=0.4, generator=generator)
                else:
                    fan_in = parameter.shape[0] if isinstance(module, Conv1D) else parameter.shape[-1]
                    parameter.normal_(std=gain / fan_in**0.5, generator=generator)


def shrunk(fields: dict[str, Any], exceptions: Mapping[str, dict[str, Any]] = EXCEPTIONS) -> dict[str, Any]:
    """Settings with every size made small. exceptions: what models of a type have besides"""
    layers = next((fields[name] for name in ("num_hidden_layers", "n_layer", "num_layers") if fields.get(name)), 0)
    names = [name for name in fields if isinstance(name, str) and not name.startswith("_")]
    small = {
        name: _small(name, fields[name], layers, exceptions) for name in names if name not in ("id2label", "label2id")
    }
    if "qk_rope_head_dim" in small and "head_dim" in small:
        small["head_dim"] = small["qk_rope_head_dim"]
    if "kv_lora_rank" in small and "num_key_value_heads" in small:
        small["num_key_value_heads"] = small["num_attention_heads"]
    if "sliding_window" in small and set(small.get("layer_types") or ()) == {"full_attention"}:
        small["layer_types"] = ["sliding_attention", "full_attention"]
    return small | exceptions.get(fields.get("model_type", ""), {})


def _small(name: str, value: Any, layers: int, exceptions: Mapping[str, dict[str, Any]]) -> Any:
    if isinstance(value, dict):
        return shrunk(value, exceptions)
    if value == 0 and value is not False and "window" not in name:  # a part that this family does not have by default
        return value
    if isinstance(value, list) and layers and len(value) == layers:
        kinds = list(dict.fromkeys(map(repr, value)))  # the first layers are of as many kinds as there are
        return [next(v for v in value if repr(v) == kind) for kind in (kinds * LAYERS)[:LAYERS]]
    if name.endswith(("_token_id", "_token_index", "_token_ids")):
        return [SPECIAL] if isinstance(value, list) else SPECIAL if isinstance(value, int) else None
    small = next((small for pattern, small in SIZES if re.fullmatch(pattern, name)), value)
    return type(value)(small) if isinstance(value, int | float) and small is not None else small
