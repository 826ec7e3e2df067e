"""Models of which most layers are recurrent, and Qwen."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cbatch.model.formats.gguf_architectures.architecture import (
    ABSENT,
    BEHIND,
    LAYER,
    MODEL,
    Config,
    Metadata,
    Read,
    Rule,
    Rules,
)
from cbatch.model.formats.gguf_architectures.readers import (
    AFTER_ATTENTION,
    BIASES,
    QUERY_BIAS,
    TURNED,
    biased,
    decay_log,
    declare,
    experts,
    flat,
    has_any,
    mixture,
    rope,
    shared_experts,
    shared_size,
    whole,
    with_channel,
)

# Models of which most layers are short convolutions or Mamba 2.
_LFM: Rules = {
    **LAYER, "attn_norm": "operator_norm", "attn_output": "self_attn.out_proj", "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm", "ffn_norm": "ffn_norm", "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2", "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj", "shortconv.conv.weight": Rule("conv.conv.weight", shape=with_channel),
    "shortconv.conv.bias": "conv.conv.bias",
}  # fmt: skip
_LFM_MODEL: Rules = MODEL | {"token_embd_norm": "model.embedding_norm", "output_norm": "model.embedding_norm"}


def _attending(data: Metadata, config: Config) -> list[int]:
    """The layers that have keys."""
    counts = data.wholes("attention.head_count_kv", config["num_hidden_layers"])
    return [layer for layer, heads in enumerate(counts) if heads]


def _types(other: str) -> Read:
    """Types of layers: those without keys are of another type."""

    def read(data: Metadata, config: Config) -> list[str]:
        attending = _attending(data, config)
        return ["full_attention" if layer in attending else other for layer in range(config["num_hidden_layers"])]

    return read


def _lfm(data: Metadata, config: Config) -> Config:
    return {"norm_eps": config.pop("rms_norm_eps"), "conv_L_cache": data.whole("shortconv.l_cache")}


_LFM_SETTINGS: dict[str, Any] = {
    "model": _LFM_MODEL, "hidden_act": ABSENT, "rope_parameters": rope(1e6), "layer_types": _types("conv"),
    "conv_bias": has_any("shortconv.in_proj.bias"),
}  # fmt: skip
declare("lfm2", "lfm2", "Lfm2ForCausalLM", layer=_LFM, **_LFM_SETTINGS, more=[_lfm], block_auto_adjust_ff_dim=False)
declare("lfm2moe", "lfm2_moe", "Lfm2MoeForCausalLM", **_LFM_SETTINGS,
        layer=_LFM | experts("feed_forward.experts.{}.", "w1", "w3", "w2")
        | {"ffn_gate_inp": "feed_forward.gate", "exp_probs_b.bias": "feed_forward.expert_bias"},
        more=[_lfm, mixture("num_experts", size="moe_intermediate_size")],
        num_dense_layers=whole("leading_dense_block_count", 0), use_expert_bias=has_any("exp_probs_b.bias"),
        norm_topk_prob=True)  # fmt: skip


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
    "ffn_gate_up_exps.weight": "block_sparse_moe.input_linear.weight",
    "ffn_down_exps.weight": "block_sparse_moe.output_linear.weight", "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_shexp": Rule("shared_mlp.input_linear", parts=("ffn_up_shexp",)),
    "ffn_down_shexp": "shared_mlp.output_linear",
}  # fmt: skip
_SIZED = mixture("num_local_experts", size="intermediate_size")
declare("granite", "granite", "GraniteForCausalLM", layer=TURNED, more=[_multipliers], **BIASES)
# Those without shared experts are of the same kind as those with them.
declare("granitemoe", "granitemoeshared", "GraniteMoeSharedForCausalLM", layer=TURNED | _MIXTURE,
        more=[_multipliers, _SIZED], **QUERY_BIAS, shared_intermediate_size=shared_size)  # fmt: skip


def _granite_experts(data: Metadata, config: Config) -> Config:
    """Few of the hybrids have experts."""
    if not data.whole("expert_count", 0):
        return {"num_local_experts": 0, "shared_intermediate_size": data.whole("feed_forward_length")}
    return {**_SIZED(data, config), "shared_intermediate_size": data.shape("blk.0.ffn_gate_shexp.weight")[0]}


def _scan_sizes(data: Metadata) -> Config:
    """Of Mamba 2."""
    heads, inner = data.whole("ssm.time_step_rank"), data.whole("ssm.inner_size")
    if min(heads, inner) < 1 or inner % heads:
        raise data.refused(f"claims to have {heads} recurrent heads for {inner} numbers")
    return {
        "mamba_n_heads": heads, "mamba_d_head": inner // heads, "mamba_n_groups": data.whole("ssm.group_count"),
        "mamba_d_state": data.whole("ssm.state_size"), "mamba_d_conv": data.whole("ssm.conv_kernel"),
    }  # fmt: skip


def _mamba(data: Metadata, config: Config) -> Config:
    sizes, hidden = _scan_sizes(data), config["hidden_size"]
    if (inner := sizes["mamba_n_heads"] * sizes["mamba_d_head"]) % hidden:
        raise data.refused(f"claims to have {inner} recurrent numbers for {hidden} of the model")
    return sizes | {"mamba_expand": inner // hidden, "mamba_conv_bias": bool(data.shapes("ssm_conv1d.bias"))}


def _scan(prefix: str) -> Rules:
    return {
        "ssm_in": f"{prefix}in_proj", "ssm_conv1d.weight": Rule(f"{prefix}conv1d.weight", shape=with_channel),
        "ssm_conv1d.bias": f"{prefix}conv1d.bias", "ssm_dt.bias": f"{prefix}dt_bias",
        "ssm_a": Rule(f"{prefix}A_log", combine=decay_log, shape=flat), "ssm_d": Rule(f"{prefix}D", shape=flat),
        "ssm_norm": Rule(f"{prefix}norm", shape=flat), "ssm_out": f"{prefix}out_proj",
    }  # fmt: skip


_MAMBA_MODEL = MODEL | {"output_norm": "model.final_layernorm"}
_MAMBA: Rules = {
    **_scan("mamba."), "ffn_gate": Rule("shared_mlp.input_linear", parts=("ffn_up",)), "ffn_up": BEHIND,
    "ffn_down": "shared_mlp.output_linear",
}  # fmt: skip
_GATED: Rules = {
    **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")}, "ffn_norm": "pre_ff_layernorm"
}  # fmt: skip
# Bamba is the one that rotates.
declare("granitehybrid", "bamba", "BambaForCausalLM", layer=TURNED | _scan("mamba.") | _GATED, model=_MAMBA_MODEL,
        rope_parameters=rope(share=1.0), more=[_mamba], **BIASES, attn_layer_indices=_attending,
        when=lambda data: data.flag("rope.scaling.finetuned", False))  # fmt: skip
declare("granitehybrid", "granitemoehybrid", "GraniteMoeHybridForCausalLM", layer=TURNED | _MIXTURE | _MAMBA,
        more=[_multipliers, _mamba, _granite_experts], layer_types=_types("linear_attention"),
        position_embedding_type="nope", attention_bias=has_any("attn_q.bias"))  # fmt: skip


def _inner(data: Metadata, config: Config) -> Config:
    return _scan_sizes(data) | {"mamba_d_ssm": data.whole("ssm.inner_size")}


# All multipliers are in the weights.
_FALCON: Rules = {
    **LAYER, **_scan("mamba."), **_GATED, "ffn_norm": "pre_ff_layernorm.weight",
    "ffn_norm.weight": "pre_ff_layernorm.weight",
}  # fmt: skip
declare("falcon-h1", "falcon_h1", "FalconH1ForCausalLM", layer=_FALCON, more=[_inner], **BIASES,
        model=_MAMBA_MODEL, mamba_conv_bias=has_any("ssm_conv1d.bias"), mamba_proj_bias=has_any("ssm_in.bias"),
        projectors_bias=has_any("ssm_out.bias"), mamba_rms_norm=has_any("ssm_norm.weight"),
        mamba_norm_before_gate=False)  # fmt: skip

# Layers of Nemotron-H are one part each.
_NEMOTRON_PARTS = {"ssm_in.weight": "linear_attention", "attn_q.weight": "full_attention", "ffn_gate_inp.weight": "moe"}


def _nemotron(data: Metadata, config: Config) -> Config:
    names = "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"
    found = dict(zip(names, _scan_sizes(data).values(), strict=True))
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
        found |= mixture("n_routed_experts", size="moe_intermediate_size")(data, config) | biased(data, config)
        found["moe_latent_size"] = data.whole("moe_latent_size", 0) or None
        found["moe_shared_expert_intermediate_size"] = data.shapes("ffn_up_shexp.weight")[0][0]
    return found


_NEMOTRON: Rules = {
    **_scan("mixer."), "attn_norm": "norm",
    "attn_q": "mixer.q_proj", "attn_k": "mixer.k_proj", "attn_v": "mixer.v_proj", "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj", "ffn_down": "mixer.down_proj", "ffn_up_exps": "mixer.experts.{}.up_proj",
    "ffn_down_exps": "mixer.experts.{}.down_proj", "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj", "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias", "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}  # fmt: skip
for _name in ("nemotron_h", "nemotron_h_moe"):
    declare(_name, "nemotron_h", "NemotronHForCausalLM", layer=_NEMOTRON, more=[_nemotron], rope_parameters=ABSENT,
            hidden_act=ABSENT, mlp_hidden_act="relu2", first_k_dense_replace=ABSENT, use_bias=has_any("ssm_in.bias"),
            use_conv_bias=has_any("ssm_conv1d.bias"), mlp_bias=has_any("ffn_up.bias"),
            model={"token_embd": "model.embeddings", "output_norm": "model.norm_f", "output": "lm_head"})  # fmt: skip

# Qwen 2 to 3.5. Gated delta nets have their heads of values in another order.
_EXPERTS: Rules = {
    **experts(), **shared_experts("mlp.shared_expert."), "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": Rule("mlp.shared_expert_gate", shape=lambda shape: (1, shape[-1])),
}  # fmt: skip


def _shared_expert(data: Metadata, config: Config) -> Config:
    return {"shared_expert_intermediate_size": size} if (size := shared_size(data, config)) else {}


_QWEN_EXPERTS = [mixture("num_experts", size="moe_intermediate_size"), _shared_expert]
_ALL_SPARSE: dict[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": ()}
# llama.cpp divides by the sum of a token's weights for Qwen 3, and does not for Qwen 2.
for _name, _version in (("qwen2moe", 2), ("qwen3moe", 3), ("qwen3vlmoe", 3)):
    declare(_name, f"qwen{_version}_moe", f"Qwen{_version}MoeForCausalLM", layer=LAYER | _EXPERTS, more=_QWEN_EXPERTS,
            norm_topk_prob=_version == 3, **_ALL_SPARSE)  # fmt: skip


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


def _decay_log(config: Config, parts: Sequence[Tensor]) -> Tensor:
    return decay_log(config, parts)[_values_by_key(config, 1)]


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
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": inner // values,
        "linear_conv_kernel_dim": data.whole("ssm.conv_kernel"),
    }


_ONE_EACH, _ALL = partial(_values, width=1), partial(_values, with_keys=True)
# Heads of values share those of keys in turns in the files of Qwen 3.5, and next to each other in transformers.
_DELTA: Rules = {
    **LAYER, **AFTER_ATTENTION, "attn_qkv": Rule("linear_attn.in_proj_qkv", rows=_ALL),
    "attn_gate": Rule("linear_attn.in_proj_z", rows=_values),
    "ssm_conv1d": Rule("linear_attn.conv1d", rows=_ALL, shape=with_channel),
    "ssm_alpha": Rule("linear_attn.in_proj_a", rows=_ONE_EACH),
    "ssm_beta": Rule("linear_attn.in_proj_b", rows=_ONE_EACH),
    "ssm_dt.bias": Rule("linear_attn.dt_bias", rows=_ONE_EACH),
    "ssm_a": Rule("linear_attn.A_log", combine=_decay_log), "ssm_norm": "linear_attn.norm",
    "ssm_out": Rule("linear_attn.out_proj", columns=_values),
}  # fmt: skip
# Qwen 3 Next has them in the order of transformers.
_NEXT: Rules = {
    **LAYER, **AFTER_ATTENTION, **_EXPERTS, "ssm_in": "linear_attn.in_proj_qkvz",
    "attn_qkv": Rule("linear_attn.in_proj_qkvz", parts=("attn_gate",), rows=_by_key_heads), "attn_gate": BEHIND,
    "ssm_conv1d": Rule("linear_attn.conv1d", shape=with_channel), "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_dt.bias": "linear_attn.dt_bias", "ssm_a": Rule("linear_attn.A_log", combine=decay_log),
    "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj",
}  # fmt: skip
_DELTA_NET: dict[str, Any] = {"norm_offset": 1.0, "plain_norms": ("ssm_norm",), "rope_parameters": rope(share=1.0)}
declare("qwen35", "qwen3_5_text", "Qwen3_5ForCausalLM", layer=_DELTA, more=[_delta_sizes], **_DELTA_NET)
declare("qwen35moe", "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", layer=_DELTA | _EXPERTS,
        more=[_delta_sizes, *_QWEN_EXPERTS], **_DELTA_NET)  # fmt: skip
declare("qwen3next", "qwen3_next", "Qwen3NextForCausalLM", layer=_NEXT, more=[_delta_sizes, *_QWEN_EXPERTS],
        norm_topk_prob=True, **_ALL_SPARSE, **_DELTA_NET)  # fmt: skip
