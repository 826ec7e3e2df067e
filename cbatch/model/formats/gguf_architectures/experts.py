"""Mixtures of experts."""

from __future__ import annotations

import torch
from torch import Tensor

from cbatch.model.formats.gguf_architectures.architecture import (
    ABSENT,
    BEHIND,
    LAYER,
    Config,
    Metadata,
    Rule,
    Rules,
)
from cbatch.model.formats.gguf_architectures.readers import (
    AFTER_ATTENTION,
    LATE_NORMS,
    QUERY_BIAS,
    biased,
    declare,
    expert_size,
    experts,
    has,
    local_rope,
    mixture,
    optional_windows,
    read_rope,
    rope,
    shared_experts,
    shared_size,
    whole,
    window,
)

declare("hunyuan-moe", "hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", **QUERY_BIAS,
        layer=LAYER | LATE_NORMS | experts() | shared_experts("mlp.shared_mlp.") | {"ffn_gate_inp": "mlp.gate.wg"},
        more=[mixture("num_experts", "moe_topk")])  # fmt: skip
declare("olmoe", "olmoe", "OlmoeForCausalLM", layer=LAYER | experts() | {"ffn_gate_inp": "mlp.gate"},
        more=[mixture("num_experts", size="intermediate_size")], norm_topk_prob=False)  # fmt: skip

_BIASED_EXPERTS = [mixture("n_routed_experts", size="moe_intermediate_size"), biased]
_BIASED: Rules = {
    **LAYER, **experts(), **shared_experts("mlp.shared_experts."), "ffn_gate_inp": "mlp.gate",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}  # fmt: skip
declare("glm4moe", "glm4_moe", "Glm4MoeForCausalLM", layer=_BIASED | AFTER_ATTENTION, more=_BIASED_EXPERTS,
        **QUERY_BIAS, use_qk_norm=has("attn_q_norm.weight"), rope_parameters=rope(share=1.0))  # fmt: skip
declare("exaone-moe", "exaone_moe", "ExaoneMoeForCausalLM",
        layer=_BIASED | {"exp_probs_b.bias": "mlp.e_score_correction_bias"},
        more=[*_BIASED_EXPERTS, optional_windows])  # fmt: skip
declare("dots1", "dots1", "Dots1ForCausalLM", layer=_BIASED, more=_BIASED_EXPERTS, **QUERY_BIAS, sliding_window=None)
# Neighbours are rotated together in transformers, too.
declare("ernie4_5-moe", "ernie4_5_moe", "Ernie4_5_MoeForCausalLM",
        layer=_BIASED
        | {"exp_probs_b.bias": Rule("mlp.moe_statics.e_score_correction_bias", shape=lambda shape: (1, shape[-1]))},
        more=[mixture("moe_num_experts", "moe_k", "moe_intermediate_size")], 
        moe_num_shared_experts=lambda data, config: shared_size(data, config) // expert_size(data),
        moe_layer_interval=whole("interleave_moe_layer_step", 1),
        moe_layer_start_index=whole("leading_dense_block_count", 0), use_bias=has("attn_q.bias"))  # fmt: skip


def _in_turns(config: Config, rows: int) -> Tensor:
    """A row of the first tensor, then one of the second."""
    return torch.arange(rows).view(2, -1).T.flatten()


def _gpt_oss_rope(data: Metadata, config: Config) -> Config:
    rope = read_rope(data, config, 150000.0)
    return {"beta_fast": 32.0, "beta_slow": 1.0} | rope | {"truncate": False} if rope["rope_type"] == "yarn" else rope


_GPT_OSS: Rules = {
    **LAYER, **AFTER_ATTENTION, "ffn_gate_inp": "mlp.router", "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_exps.weight": Rule(
        "mlp.experts.gate_up_proj", parts=("ffn_up_exps.weight",), rows=_in_turns, is_transposed=True
    ),
    "ffn_gate_exps.bias": Rule("mlp.experts.gate_up_proj_bias", parts=("ffn_up_exps.bias",), rows=_in_turns),
    "ffn_up_exps.weight": BEHIND, "ffn_up_exps.bias": BEHIND,
    "ffn_down_exps.weight": Rule("mlp.experts.down_proj", is_transposed=True),
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}  # fmt: skip
declare("gpt-oss", "gpt_oss", "GptOssForCausalLM", layer=_GPT_OSS, rope_parameters=_gpt_oss_rope, hidden_act=ABSENT,
        more=[mixture("num_local_experts")], sliding_window=window, attention_bias=True,
        intermediate_size=lambda data, config: data.shape("blk.0.ffn_gate_exps.weight")[1])  # fmt: skip

declare("minimax-m2", "minimax_m2", "MiniMaxM2ForCausalLM", rope_parameters=rope(share=1.0),
        layer=LAYER | experts("block_sparse_moe.experts.{}.", "w1", "w3", "w2")
        | {"ffn_gate_inp": "block_sparse_moe.gate",
           "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"},
        more=[mixture("num_local_experts", size="intermediate_size")])  # fmt: skip
declare("mellum", "mellum", "MellumForCausalLM", layer=LAYER | experts() | {"ffn_gate_inp": "mlp.gate"},
        rope_parameters=local_rope(10000.0), norm_topk_prob=True,
        more=[mixture("num_experts", size="moe_intermediate_size"), optional_windows])  # fmt: skip


def _gated(data: Metadata, config: Config) -> Config:
    """Of AFMoE, whose weights are of sigmoids and sum up to a number."""
    if not data.flag("expert_weights_norm", True):
        raise data.refused("does not divide weights of experts by their sum, which is not read")
    return {
        "num_shared_experts": data.whole("expert_shared_count", 0),
        "num_dense_layers": data.whole("leading_dense_block_count", 0),
        "route_scale": data.number("expert_weights_scale", 1.0),
        "mup_enabled": True,
    }


_AFMOE: Rules = {
    **LAYER, **experts(), **shared_experts("mlp.shared_experts."), **AFTER_ATTENTION, "ffn_norm": "pre_mlp_layernorm",
    "post_ffw_norm": "post_mlp_layernorm", "attn_gate": "self_attn.gate_proj", "ffn_gate_inp": "mlp.router.gate",
    "exp_probs_b.bias": "mlp.expert_bias",
}  # fmt: skip
declare("afmoe", "afmoe", "AfmoeForCausalLM", layer=_AFMOE, **QUERY_BIAS,
        more=[mixture("num_experts", size="moe_intermediate_size"), _gated, optional_windows])  # fmt: skip


def _llama4(data: Metadata, config: Config) -> Config:
    """llama.cpp has numbers of its own for chunks and for how queries grow, and norms in all but the largest model."""
    layers = config["num_hidden_layers"]
    return {
        "intermediate_size_mlp": config["intermediate_size"],
        "interleave_moe_layer_step": data.whole("interleave_moe_layer_step"),
        "no_rope_layers": [int((layer + 1) % 4 > 0) for layer in range(layers)],
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "use_qk_norm": data.whole("expert_count") != 128,
    }


_LLAMA4: Rules = {
    **LAYER, **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    **shared_experts("feed_forward.shared_expert."), "ffn_gate_inp": "feed_forward.router",
    "ffn_gate_exps.weight": Rule(
        "feed_forward.experts.gate_up_proj", parts=("ffn_up_exps.weight",), is_transposed=True
    ),
    "ffn_up_exps.weight": BEHIND,
    "ffn_gate_up_exps.weight": Rule("feed_forward.experts.gate_up_proj", is_transposed=True),
    "ffn_down_exps.weight": Rule("feed_forward.experts.down_proj", is_transposed=True),
}  # fmt: skip
declare("llama4", "llama4_text", "Llama4ForCausalLM", layer=_LLAMA4, **QUERY_BIAS,
        more=[_llama4, mixture("num_local_experts", size="intermediate_size")])  # fmt: skip


def _hy(data: Metadata, config: Config) -> Config:
    is_sparse = [data.has_tensor(f"blk.{layer}.ffn_gate_inp.weight") for layer in range(config["num_hidden_layers"])]
    return {
        "mlp_layer_types": ["sparse" if one else "dense" for one in is_sparse],
        "num_shared_experts": shared_size(data, config) // expert_size(data),
        "router_scaling_factor": data.number("expert_weights_scale", 1.0),
    }


declare("hy_v3", "hy_v3", "HYV3ForCausalLM", **QUERY_BIAS,
        layer=LAYER | experts() | shared_experts("mlp.shared_mlp.")
        | {"ffn_gate_inp": "mlp.router.gate", "exp_probs_b.bias": "mlp.expert_bias", "exp_probs_b": "mlp.expert_bias"},
        more=[mixture("num_experts", size="moe_intermediate_size"), _hy])  # fmt: skip
