"""Llama and its kin. Rows of queries and keys are permuted in most of them."""

from __future__ import annotations

from cbatch.model.formats.gguf_architectures.architecture import (
    LAYER,
    PERMUTED,
    Config,
    Rules,
    architecture,
    experts,
    read_experts,
    read_rope,
)
from cbatch.model.formats.gguf_architectures.metadata import Metadata

_PERMUTED = LAYER | PERMUTED


def _has_experts(data: Metadata) -> bool:
    return data.has_tensor("blk.0.ffn_gate_exps.weight")


@architecture(
    "llama", "mixtral", "MixtralForCausalLM", when=_has_experts,
    layer=_PERMUTED | experts("block_sparse_moe.experts.{}.", "w1", "w3", "w2")
    | {"ffn_gate_inp": "block_sparse_moe.gate"},
)  # fmt: skip
def mixtral(data: Metadata, config: Config) -> Config:
    count, top_k = read_experts(data)
    return _rope_and_silu(data, config) | {"num_local_experts": count, "num_experts_per_tok": top_k}


def _rope_and_silu(data: Metadata, config: Config) -> Config:
    return {"rope_parameters": read_rope(data, config), "hidden_act": "silu"}


@architecture("llama", "llama", "LlamaForCausalLM", layer=_PERMUTED)
def llama(data: Metadata, config: Config) -> Config:
    return _rope_and_silu(data, config) | _biases(data)


def _biases(data: Metadata) -> Config:
    return {
        "attention_bias": data.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": data.has_tensor("blk.0.ffn_down.bias"),
    }


@architecture("arcee", "arcee", "ArceeForCausalLM", layer=_PERMUTED)
def arcee(data: Metadata, config: Config) -> Config:
    return llama(data, config) | {"hidden_act": "relu2"}


@architecture("smollm3", "smollm3", "SmolLM3ForCausalLM", layer=_PERMUTED)
def smollm3(data: Metadata, config: Config) -> Config:
    """llama.cpp rotates in three of four layers, whatever the file says."""
    return llama(data, config) | {"no_rope_layer_interval": 4}


@architecture("seed_oss", "seed_oss", "SeedOssForCausalLM",
              layer=LAYER | {"post_attention_norm": "post_attention_layernorm"})  # fmt: skip
def seed_oss(data: Metadata, config: Config) -> Config:
    return llama(data, config) | {"attention_out_bias": data.has_tensor("blk.0.attn_output.bias")}


@architecture("mistral3", "ministral3", "Ministral3ForCausalLM", layer=_PERMUTED,
              when=lambda data: data.has("attention.temperature_scale"))  # fmt: skip
def ministral3(data: Metadata, config: Config) -> Config:
    """Queries grow with the position."""
    rope = read_rope(data, config, 1e6)
    if rope["rope_type"] != "yarn":
        raise data.refused("scales queries by position without YaRN, which is not read")
    scaled = {
        "mscale": 1.0,
        "mscale_all_dim": data.number("rope.scaling.yarn_log_multiplier", 1.0),
        "llama_4_scaling_beta": data.number("attention.temperature_scale"),
    }
    return {"rope_parameters": rope | scaled, "hidden_act": "silu", "sliding_window": None}


@architecture("mistral3", "mistral", "MistralForCausalLM", layer=_PERMUTED)
def mistral3(data: Metadata, config: Config) -> Config:
    return _rope_and_silu(data, config) | {"sliding_window": None}


@architecture("ernie4_5", "ernie4_5", "Ernie4_5ForCausalLM")
def ernie(data: Metadata, config: Config) -> Config:
    """Neighbours are rotated together in transformers, too."""
    return _rope_and_silu(data, config) | {"use_bias": data.has_tensor("blk.0.ffn_down.bias")}


_LATE_NORMS: Rules = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}


@architecture("hunyuan-dense", "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", layer=LAYER | _LATE_NORMS)
def hunyuan(data: Metadata, config: Config) -> Config:
    """The base that the file has is the one that `alpha` has made."""
    return _rope_and_silu(data, config) | {"attention_bias": data.has_tensor("blk.0.attn_q.bias")}


_SHARED_MLP: Rules = {f"ffn_{part}_shexp": f"mlp.shared_mlp.{part}_proj" for part in ("gate", "up", "down")}


@architecture("hunyuan-moe", "hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM",
              layer=LAYER | _LATE_NORMS | experts() | _SHARED_MLP | {"ffn_gate_inp": "mlp.gate.wg"})  # fmt: skip
def hunyuan_moe(data: Metadata, config: Config) -> Config:
    count, top_k = read_experts(data)
    return hunyuan(data, config) | {"num_experts": count, "moe_topk": top_k}


@architecture(
    "phi3", "phi3", "Phi3ForCausalLM",
    layer=LAYER | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
)  # fmt: skip
def phi3(data: Metadata, config: Config) -> Config:
    rope = read_rope(data, config)
    rotated = data.whole("rope.dimension_count", config["head_dim"])
    short, long = (data.factors(f"rope_factors_{name}.weight", rotated // 2) for name in ("short", "long"))
    if short is not None and long is not None:
        rope |= {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        rope["original_max_position_embeddings"] = data.whole("rope.scaling.original_context_length")
        if data.has("rope.scaling.attn_factor"):
            rope["attention_factor"] = data.number("rope.scaling.attn_factor")
    window = data.whole("attention.sliding_window", 0)
    return {"rope_parameters": rope, "sliding_window": window or None, "hidden_act": "silu"}
