"""Models of which most layers are recurrent, and Qwen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cbatch.model.formats.gguf_architectures import readers as r
from cbatch.model.formats.gguf_architectures.architecture import ABSENT, Config, Metadata, Rule, Rules, Shape
from cbatch.model.formats.gguf_architectures.readers import declare, value

# Models of which most layers are short convolutions or Mamba 2.


def _flat(shape: Shape) -> Shape:
    """That of a vector, whatever the file makes of it."""
    return (math.prod(shape),)


def _with_channel(shape: Shape) -> Shape:
    """That of a convolution's weight: transformers has a dimension of one channel between the others."""
    return (shape[0], 1, shape[1]) if len(shape) == 2 else shape


_LFM = {
    "attn_norm": "operator_norm", "attn_output": "self_attn.out_proj", "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm", "ffn_norm": "ffn_norm", "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2", "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj", "shortconv.conv.weight": Rule("conv.conv.weight", shape=_with_channel),
    "shortconv.conv.bias": "conv.conv.bias",
}  # fmt: skip
_LFM_EXPERTS = r.experts("feed_forward.experts.{}.", "w1", "w3", "w2") | {
    "ffn_gate_inp": "feed_forward.gate", "exp_probs_b.bias": "feed_forward.expert_bias"
}  # fmt: skip


def _lfm(data: Metadata, config: Config) -> Config:
    return {"norm_eps": config.pop("rms_norm_eps"), "conv_L_cache": data.whole("shortconv.l_cache")}


_LFM_SETTINGS: dict[str, Any] = {
    "model": {"token_embd_norm": "model.embedding_norm", "output_norm": "model.embedding_norm"},
    "rope_parameters": r.rope(1e6), "layer_types": r.types("attn_q", "full_attention", "conv"),
    "conv_bias": r.has("shortconv.in_proj.bias"),
}  # fmt: skip
declare("lfm2", layer=_LFM, more=[_lfm], **_LFM_SETTINGS, block_auto_adjust_ff_dim=False)
declare("lfm2moe", "lfm2_moe", layer=_LFM | _LFM_EXPERTS, **_LFM_SETTINGS,
        more=[_lfm, r.mixture("num_experts", size="moe_intermediate_size")],
        num_dense_layers=value("leading_dense_block_count", 0), use_expert_bias=r.has("exp_probs_b.bias"))  # fmt: skip

_MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": value("embedding_scale", 1.0), "residual_multiplier": value("residual_scale", 1.0),
    "attention_multiplier": lambda data, config: data.number("attention.scale", config["head_dim"] ** -0.5),
    "logits_scaling": lambda data, config: data.number("logit_scale", 1.0) or 1.0,
}  # fmt: skip
_MIXTURE = {
    **r.joint_experts("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
    "ffn_gate_inp": "block_sparse_moe.router.layer", "ffn_down_shexp": "shared_mlp.output_linear",
    "ffn_gate_shexp": Rule("shared_mlp.input_linear", parts=("ffn_up_shexp",)),
}  # fmt: skip
_SIZED = r.mixture("num_local_experts", size="intermediate_size")
declare("granite", layer=r.PERMUTED, **_MULTIPLIERS, **r.BIASES)
# Those without shared experts are of the same kind as those with them.
declare("granitemoe", "granitemoeshared", layer=r.PERMUTED | _MIXTURE, more=[_SIZED], **_MULTIPLIERS, **r.QUERY_BIAS,
        shared_intermediate_size=r.shared_size)  # fmt: skip


def _granite_experts(data: Metadata, config: Config) -> Config:
    """Few of the hybrids have experts."""
    if not data.whole("expert_count", 0):
        return {"num_local_experts": 0, "shared_intermediate_size": data.whole("feed_forward_length")}
    return {**_SIZED(data, config), "shared_intermediate_size": data.shape("blk.0.ffn_gate_shexp.weight")[0]}


def _scan_sizes(data: Metadata, config: Config) -> Config:
    """Of Mamba 2."""
    heads, inner = data.whole("ssm.time_step_rank"), data.whole("ssm.inner_size")
    if min(heads, inner) < 1 or inner % heads:
        raise data.refused(f"claims to have {heads} recurrent heads for {inner} numbers")
    return {
        "mamba_n_heads": heads, "mamba_d_head": inner // heads, "mamba_n_groups": data.whole("ssm.group_count"),
        "mamba_d_state": data.whole("ssm.state_size"), "mamba_d_conv": data.whole("ssm.conv_kernel"),
    }  # fmt: skip


def _mamba(data: Metadata, config: Config) -> Config:
    sizes, hidden = _scan_sizes(data, config), config["hidden_size"]
    if (inner := sizes["mamba_n_heads"] * sizes["mamba_d_head"]) % hidden:
        raise data.refused(f"claims to have {inner} recurrent numbers for {hidden} of the model")
    return sizes | {"mamba_expand": inner // hidden, "mamba_conv_bias": bool(data.shapes("ssm_conv1d.bias"))}


def _decay_log(config: Config, parts: Sequence[Tensor]) -> Tensor:
    """Of how fast a state fades: the file has -exp of it."""
    return torch.log(-parts[0].float()).flatten()


def _scan(prefix: str) -> Rules:
    return {
        "ssm_in": f"{prefix}in_proj", "ssm_conv1d.weight": Rule(f"{prefix}conv1d.weight", shape=_with_channel),
        "ssm_conv1d.bias": f"{prefix}conv1d.bias", "ssm_dt.bias": f"{prefix}dt_bias",
        "ssm_a": Rule(f"{prefix}A_log", combine=_decay_log, shape=_flat), "ssm_d": Rule(f"{prefix}D", shape=_flat),
        "ssm_norm": Rule(f"{prefix}norm", shape=_flat), "ssm_out": f"{prefix}out_proj",
    }  # fmt: skip


_MAMBA_MODEL = {"output_norm": "model.final_layernorm"}
_MAMBA = {
    **_scan("mamba."), "ffn_gate": Rule("shared_mlp.input_linear", parts=("ffn_up",)),
    "ffn_down": "shared_mlp.output_linear",
}  # fmt: skip
_GATED = r.feed_forward("feed_forward.") | {"ffn_norm": "pre_ff_layernorm"}
# Bamba is the one that rotates.
declare("granitehybrid", "bamba", layer=r.PERMUTED | _scan("mamba.") | _GATED, model=_MAMBA_MODEL,
        rope_parameters=r.rope(share=1.0), more=[_mamba], **r.BIASES,
        attn_layer_indices=lambda data, config: [
            layer for layer in range(config["num_hidden_layers"]) if data.has_tensor(f"blk.{layer}.attn_q.weight")
        ],
        when=lambda data: data.flag("rope.scaling.finetuned", False))  # fmt: skip
declare("granitehybrid", "granitemoehybrid", layer=r.PERMUTED | _MIXTURE | _MAMBA, **_MULTIPLIERS,
        **r.QUERY_BIAS, more=[_mamba, _granite_experts], position_embedding_type="nope",
        layer_types=r.types("attn_q", "full_attention", "linear_attention"))  # fmt: skip

# All multipliers are in the weights.
declare("falcon-h1", "falcon_h1", model=_MAMBA_MODEL, more=[_scan_sizes], **r.BIASES,
        layer=_scan("mamba.") | _GATED | dict.fromkeys(("ffn_norm", "ffn_norm.weight"), "pre_ff_layernorm.weight"),
        mamba_conv_bias=r.has("ssm_conv1d.bias"), mamba_proj_bias=r.has("ssm_in.bias"),
        projectors_bias=r.has("ssm_out.bias"), mamba_rms_norm=r.has("ssm_norm.weight"),
        mamba_norm_before_gate=False, mamba_d_ssm=lambda data, config: data.whole("ssm.inner_size"))  # fmt: skip

# Layers of Nemotron-H are one part each.
_NEMOTRON_PARTS = {"ssm_in.weight": "linear_attention", "attn_q.weight": "full_attention", "ffn_gate_inp.weight": "moe"}


def _nemotron(data: Metadata, config: Config) -> Config:
    names = "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"
    found = dict(zip(names, _scan_sizes(data, config).values(), strict=True))
    found["layer_norm_epsilon"] = data.number("attention.layer_norm_epsilon", config.pop("rms_norm_eps", None))
    widths = {shape[0] for shape in data.shapes("ffn_up.weight")}
    if len(widths) > 1:
        raise data.refused("has feed-forward layers of different widths, which is not read")
    found["intermediate_size"] = next(iter(widths), None)
    found["layers_block_type"] = kinds = [
        next((kind for name, kind in _NEMOTRON_PARTS.items() if data.has_tensor(f"blk.{layer}.{name}")), "mlp")
        for layer in range(config["num_hidden_layers"])
    ]
    if "moe" in kinds:
        found |= r.mixture("n_routed_experts", size="moe_intermediate_size")(data, config) | r.biased(data, config)
        found["moe_latent_size"] = data.whole("moe_latent_size", 0) or None
        found["moe_shared_expert_intermediate_size"] = data.shapes("ffn_up_shexp.weight")[0][0]
    return found


_NEMOTRON = {
    **_scan("mixer."), **{f"attn_{part}": f"mixer.{part}_proj" for part in "qkv"}, "attn_norm": "norm",
    "attn_output": "mixer.o_proj", "ffn_gate_inp": "mixer.gate", **r.feed_forward("mixer."),
    **r.feed_forward("mixer.experts.{}.", "_exps"), **r.feed_forward("mixer.shared_experts.", "_shexp"),
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias", "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}  # fmt: skip
declare("nemotron_h nemotron_h_moe", layer=_NEMOTRON, more=[_nemotron], rope_parameters=ABSENT,
        model={"token_embd": "model.embeddings", "output_norm": "model.norm_f"}, use_bias=r.has("ssm_in.bias"),
        use_conv_bias=r.has("ssm_conv1d.bias"), mlp_bias=r.has("ffn_up.bias"))  # fmt: skip

# Qwen 2 to 3.5. Gated delta nets have their heads of values in another order.
_EXPERTS = {
    **r.experts(), **r.feed_forward("mlp.shared_expert.", "_shexp"), "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": Rule("mlp.shared_expert_gate", shape=lambda shape: (1, shape[-1])),
}  # fmt: skip


def _shared_expert(data: Metadata, config: Config) -> Config:
    return {"shared_expert_intermediate_size": size} if (size := r.shared_size(data, config)) else {}


_QWEN_EXPERTS = [r.mixture("num_experts", size="moe_intermediate_size"), _shared_expert]
# llama.cpp divides by the sum of a token's weights for Qwen 3, and does not for Qwen 2.
declare("qwen2moe", "qwen2_moe", layer=_EXPERTS, more=_QWEN_EXPERTS)
declare("qwen3moe qwen3vlmoe", "qwen3_moe", layer=_EXPERTS, more=_QWEN_EXPERTS, norm_topk_prob=True)


def _values_by_key(config: Config, width: int) -> Tensor:
    """Where the file has the heads of values, `width` numbers of each: the first ones of all keys come first there."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    return torch.arange(values * width).view(values // keys, keys, width).transpose(0, 1).flatten()


def _values(config: Config, rows: int, *, width: int = 0, with_keys: bool = False) -> Tensor | None:
    """The order of rows of which each head of values has `width`, by default as many as it has numbers.

    with_keys: behind those of queries and keys
    """
    width = width or config["linear_value_head_dim"]
    before = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] if with_keys else 0
    if rows != before + config["linear_num_value_heads"] * width:
        return None
    return torch.cat([torch.arange(before), before + _values_by_key(config, width)])


def _decay_log_by_value(config: Config, parts: Sequence[Tensor]) -> Tensor:
    return _decay_log(config, parts)[_values_by_key(config, 1)]


def _by_key_heads(config: Config, rows: int) -> Tensor | None:
    """Of Qwen 3 Next: queries, keys, values and gates of a head of keys lie together in transformers."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    each = [config["linear_key_head_dim"]] * 2 + [values // keys * config["linear_value_head_dim"]] * 2
    if rows != keys * sum(each):
        return None
    parts = torch.split(torch.arange(rows), [keys * one for one in each])
    return torch.cat([part.view(keys, -1) for part in parts], dim=1).flatten()


def _delta_sizes(data: Metadata, config: Config) -> Config:
    keys, values = data.whole("ssm.group_count"), data.whole("ssm.time_step_rank")
    key_dim, inner = data.whole("ssm.state_size"), data.whole("ssm.inner_size")
    if min(keys, values, key_dim, inner) < 1 or values % keys or inner % values:
        raise data.refused(f"claims to have {values} heads of values for {keys} of keys in its gated delta nets")
    return {
        "full_attention_interval": max(1, data.whole("full_attention_interval", 4)),
        "linear_num_key_heads": keys, "linear_num_value_heads": values, "linear_key_head_dim": key_dim,
        "linear_value_head_dim": inner // values, "linear_conv_kernel_dim": data.whole("ssm.conv_kernel"),
    }  # fmt: skip


_ALL, _ONE_EACH = partial(_values, with_keys=True), partial(_values, width=1)
_ONES = {"ssm_alpha": "in_proj_a", "ssm_beta": "in_proj_b", "ssm_dt.bias": "dt_bias"}
# Heads of values share those of keys in turns in the files of Qwen 3.5, and next to each other in transformers.
_DELTA = {
    **r.AFTER_ATTENTION, **_scan("linear_attn."), "attn_qkv": Rule("linear_attn.in_proj_qkv", rows=_ALL),
    "attn_gate": Rule("linear_attn.in_proj_z", rows=_values), "ssm_out": Rule("linear_attn.out_proj", columns=_values),
    "ssm_conv1d.weight": Rule("linear_attn.conv1d.weight", rows=_ALL, shape=_with_channel),
    **{theirs: Rule(f"linear_attn.{ours}", rows=_ONE_EACH) for theirs, ours in _ONES.items()},
    "ssm_a": Rule("linear_attn.A_log", combine=_decay_log_by_value),
}  # fmt: skip
# Qwen 3 Next has them in the order of transformers.
_NEXT = {
    **r.AFTER_ATTENTION, **_EXPERTS, **_scan("linear_attn."), "ssm_in": "linear_attn.in_proj_qkvz",
    "attn_qkv": Rule("linear_attn.in_proj_qkvz", parts=("attn_gate",), rows=_by_key_heads),
    "ssm_ba": "linear_attn.in_proj_ba",
}  # fmt: skip
_DELTA_NET: dict[str, Any] = {"norm_offset": 1.0, "plain_norms": ("ssm_norm",), "rope_parameters": r.rope(share=1.0)}
declare("qwen35", "qwen3_5_text", layer=_DELTA, more=[_delta_sizes], **_DELTA_NET)
declare("qwen35moe", "qwen3_5_moe_text", layer=_DELTA | _EXPERTS, more=[_delta_sizes, *_QWEN_EXPERTS], **_DELTA_NET)
declare("qwen3next", "qwen3_next", layer=_NEXT, more=[_delta_sizes, *_QWEN_EXPERTS], **_DELTA_NET)
