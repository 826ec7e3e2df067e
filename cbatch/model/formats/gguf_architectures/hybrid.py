"""Granite, and models of which most layers are short convolutions or Mamba 2."""

from __future__ import annotations

from cbatch.model.formats.gguf_architectures.architecture import (
    BEHIND,
    LAYER,
    PERMUTED,
    Config,
    Rule,
    Rules,
    architecture,
    decay_log,
    expert_size,
    experts,
    flat,
    read_experts,
    read_rope,
    with_channel,
)
from cbatch.model.formats.gguf_architectures.metadata import Metadata

_LFM: Rules = {
    **LAYER, "attn_norm": "operator_norm", "attn_output": "self_attn.out_proj", "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm", "ffn_norm": "ffn_norm", "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2", "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj", "shortconv.conv.weight": Rule("conv.conv.weight", shape=with_channel),
    "shortconv.conv.bias": "conv.conv.bias",
}  # fmt: skip
_LFM_MODEL: Rules = {
    "token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm",
    "output_norm": "model.embedding_norm", "output": "lm_head",
}  # fmt: skip
_LFM_EXPERTS: Rules = {
    **experts("feed_forward.experts.{}.", "w1", "w3", "w2"), "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b.bias": "feed_forward.expert_bias",
}  # fmt: skip


@architecture("lfm2", "lfm2", "Lfm2ForCausalLM", layer=_LFM, model=_LFM_MODEL)
def lfm2(data: Metadata, config: Config) -> Config:
    """Layers without keys are convolutions."""
    layers = config["num_hidden_layers"]
    return {
        "rope_parameters": read_rope(data, config, 1e6),
        "layer_types": [
            "full_attention" if heads else "conv" for heads in data.wholes("attention.head_count_kv", layers)
        ],
        "norm_eps": config.pop("rms_norm_eps"),
        "conv_L_cache": data.whole("shortconv.l_cache"),
        "conv_bias": data.any_tensor("shortconv.in_proj.bias"),
        "block_auto_adjust_ff_dim": False,
    }


@architecture("lfm2moe", "lfm2_moe", "Lfm2MoeForCausalLM", layer=_LFM | _LFM_EXPERTS, model=_LFM_MODEL)
def lfm2_moe(data: Metadata, config: Config) -> Config:
    count, top_k = read_experts(data)
    settings = lfm2(data, config)
    del settings["block_auto_adjust_ff_dim"]
    return settings | {
        "num_experts": count,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": expert_size(data),
        "num_dense_layers": data.whole("leading_dense_block_count", 0),
        "use_expert_bias": data.any_tensor("exp_probs_b.bias"),
        "norm_topk_prob": True,
    }


@architecture("granite", "granite", "GraniteForCausalLM", layer=LAYER | PERMUTED)
def granite(data: Metadata, config: Config) -> Config:
    return _multipliers(data, config) | {
        "rope_parameters": read_rope(data, config),
        "hidden_act": "silu",
        "attention_bias": data.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": data.has_tensor("blk.0.ffn_down.bias"),
    }


def _multipliers(data: Metadata, config: Config) -> Config:
    return {
        "embedding_multiplier": data.number("embedding_scale", 1.0),
        "residual_multiplier": data.number("residual_scale", 1.0),
        "attention_multiplier": data.number("attention.scale", config["head_dim"] ** -0.5),
        "logits_scaling": data.number("logit_scale", 1.0) or 1.0,
    }


_MIXTURE: Rules = {
    "ffn_gate_exps.weight": Rule("block_sparse_moe.input_linear.weight", parts=("ffn_up_exps.weight",)),
    "ffn_up_exps.weight": BEHIND, "ffn_up_shexp": BEHIND,
    "ffn_down_exps.weight": "block_sparse_moe.output_linear.weight", "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_shexp": Rule("shared_mlp.input_linear", parts=("ffn_up_shexp",)),
    "ffn_down_shexp": "shared_mlp.output_linear",
}  # fmt: skip


@architecture("granitemoe", "granitemoeshared", "GraniteMoeSharedForCausalLM", layer=LAYER | PERMUTED | _MIXTURE)
def granite_moe(data: Metadata, config: Config) -> Config:
    """Those without shared experts are of the same kind as those with them."""
    settings = granite(data, config)
    del settings["mlp_bias"]
    count, top_k = read_experts(data)
    shared = data.shape("blk.0.ffn_gate_shexp.weight")[0] if data.any_tensor("ffn_gate_shexp.weight") else 0
    sizes = {"intermediate_size": expert_size(data), "shared_intermediate_size": shared}
    return settings | sizes | {"num_local_experts": count, "num_experts_per_tok": top_k}


MAMBA: Rules = {
    "ssm_in": "mamba.in_proj", "ssm_conv1d.weight": Rule("mamba.conv1d.weight", shape=with_channel),
    "ssm_conv1d.bias": "mamba.conv1d.bias", "ssm_dt.bias": "mamba.dt_bias",
    "ssm_a": Rule("mamba.A_log", combine=decay_log, shape=flat), "ssm_d": Rule("mamba.D", shape=flat),
    "ssm_norm": Rule("mamba.norm", shape=flat), "ssm_out": "mamba.out_proj",
}  # fmt: skip
_SHARED_ONLY: Rules = {
    "ffn_gate": Rule("shared_mlp.input_linear", parts=("ffn_up",)), "ffn_up": BEHIND,
    "ffn_down": "shared_mlp.output_linear",
}  # fmt: skip


@architecture("granitehybrid", "granitemoehybrid", "GraniteMoeHybridForCausalLM",
              layer=LAYER | PERMUTED | _MIXTURE | MAMBA | _SHARED_ONLY)  # fmt: skip
def granite_hybrid(data: Metadata, config: Config) -> Config:
    """Layers without keys are of Mamba 2. Few of these models have experts."""
    kv_heads = data.wholes("attention.head_count_kv", config["num_hidden_layers"])
    settings = _multipliers(data, config) | mamba_sizes(data, config) | {
        "layer_types": ["full_attention" if heads else "linear_attention" for heads in kv_heads],
        "position_embedding_type": "rope" if data.flag("rope.scaling.finetuned", False) else "nope",
        "rope_parameters": read_rope(data, config),
        "hidden_act": "silu",
        "attention_bias": data.any_tensor("attn_q.bias"),
    }  # fmt: skip
    if not data.whole("expert_count", 0):
        return settings | {"num_local_experts": 0, "shared_intermediate_size": data.whole("feed_forward_length")}
    count, top_k = read_experts(data)
    shared = data.shape("blk.0.ffn_gate_shexp.weight")[0]
    sizes = {"intermediate_size": expert_size(data), "shared_intermediate_size": shared}
    return settings | sizes | {"num_local_experts": count, "num_experts_per_tok": top_k}


def mamba_sizes(data: Metadata, config: Config) -> Config:
    heads, inner = data.whole("ssm.time_step_rank"), data.whole("ssm.inner_size")
    if min(heads, inner) < 1 or inner % heads or inner % config["hidden_size"]:
        raise data.refused(f"claims to have {heads} recurrent heads for {inner} numbers")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // config["hidden_size"],
        "mamba_n_groups": data.whole("ssm.group_count"),
        "mamba_d_state": data.whole("ssm.state_size"),
        "mamba_d_conv": data.whole("ssm.conv_kernel"),
        "mamba_conv_bias": data.any_tensor("ssm_conv1d.bias"),
    }
