"""Models of which most layers are recurrent, and Qwen."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cbatch.model.formats.gguf_architectures import readers as r
from cbatch.model.formats.gguf_architectures.architecture import ABSENT, Config, Metadata, Rule
from cbatch.model.formats.gguf_architectures.readers import declare, value

# Models of which most layers are short convolutions or Mamba 2.


def _lfm(data: Metadata, config: Config) -> Config:
    return {"conv_L_cache": data.whole("shortconv.l_cache")}


_LFM_SETTINGS: dict[str, Any] = {
    "rope_parameters": r.rope(1e6), "layer_types": r.types("attn_q", "full_attention", "conv"),
    "conv_bias": r.has("shortconv.in_proj.bias"),
}  # fmt: skip
declare("lfm2", more=[_lfm], **_LFM_SETTINGS, block_auto_adjust_ff_dim=False)
declare("lfm2moe", "lfm2_moe", **_LFM_SETTINGS,
        more=[_lfm, r.mixture("num_experts", size="moe_intermediate_size")],
        num_dense_layers=value("leading_dense_block_count", 0), use_expert_bias=r.has("exp_probs_b.bias"))  # fmt: skip

_MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": value("embedding_scale", 1.0), "residual_multiplier": value("residual_scale", 1.0),
    "attention_multiplier": lambda data, config: data.number("attention.scale", config["head_dim"] ** -0.5),
    "logits_scaling": lambda data, config: data.number("logit_scale", 1.0) or 1.0,
}  # fmt: skip
_MIXTURE = r.JOINT_EXPERTS | {"ffn_gate_shexp": Rule(parts=("ffn_up_shexp",))}
_SIZED = r.mixture("num_local_experts", size="intermediate_size")
declare("granite", layer=r.PERMUTED, **_MULTIPLIERS)
# Those without shared experts are of the same kind as those with them.
declare("granitemoe", "granitemoeshared", layer=r.PERMUTED | _MIXTURE, more=[_SIZED], **_MULTIPLIERS,
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


_SCAN = {"ssm_a": Rule(combine=_decay_log)}
_MAMBA = _SCAN | {"ffn_gate": Rule(parts=("ffn_up",))}
# Bamba is the one that rotates.
declare("granitehybrid", "bamba", layer=r.PERMUTED | _SCAN, rope_parameters=r.rope(share=1.0), more=[_mamba],
        attn_layer_indices=lambda data, config: [
            layer for layer in range(config["num_hidden_layers"]) if data.has_tensor(f"blk.{layer}.attn_q.weight")
        ],
        when=lambda data: data.flag("rope.scaling.finetuned", False))  # fmt: skip
declare("granitehybrid", "granitemoehybrid", layer=r.PERMUTED | _MIXTURE | _MAMBA, **_MULTIPLIERS,
        more=[_mamba, _granite_experts], position_embedding_type="nope",
        layer_types=r.types("attn_q", "full_attention", "linear_attention"))  # fmt: skip

# All multipliers are in the weights.
declare("falcon-h1", "falcon_h1", layer=_SCAN, more=[_scan_sizes],
        mamba_conv_bias=r.has("ssm_conv1d.bias"), mamba_proj_bias=r.has("ssm_in.bias"),
        projectors_bias=r.has("ssm_out.bias"), mamba_rms_norm=r.has("ssm_norm.weight"),
        mamba_norm_before_gate=False, mamba_d_ssm=lambda data, config: data.whole("ssm.inner_size"))  # fmt: skip

# Layers of Nemotron-H are one part each.
_NEMOTRON_PARTS = {"ssm_in.weight": "linear_attention", "attn_q.weight": "full_attention", "ffn_gate_inp.weight": "moe"}


def _nemotron(data: Metadata, config: Config) -> Config:
    names = "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"
    found = dict(zip(names, _scan_sizes(data, config).values(), strict=True))
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


declare("nemotron_h nemotron_h_moe", layer=_SCAN, more=[_nemotron], rope_parameters=ABSENT,
        use_bias=r.has("ssm_in.bias"), use_conv_bias=r.has("ssm_conv1d.bias"))  # fmt: skip

# Qwen 2 to 3.5. Gated delta nets have their heads of values in another order.


def _shared_expert(data: Metadata, config: Config) -> Config:
    return {"shared_expert_intermediate_size": size} if (size := r.shared_size(data, config)) else {}


_QWEN_EXPERTS = [r.mixture("num_experts", size="moe_intermediate_size"), _shared_expert]
# llama.cpp divides by the sum of a token's weights for Qwen 3, and does not for Qwen 2.
declare("qwen2moe", "qwen2_moe", more=_QWEN_EXPERTS)
declare("qwen3moe qwen3vlmoe", "qwen3_moe", more=_QWEN_EXPERTS, norm_topk_prob=True)


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
# Heads of values share those of keys in turns in the files of Qwen 3.5, and next to each other in transformers.
_DELTA = {
    "attn_qkv": Rule(rows=_ALL), "attn_gate": Rule(rows=_values), "ssm_out": Rule(columns=_values),
    "ssm_conv1d": Rule(rows=_ALL), "ssm_a": Rule(combine=_decay_log_by_value),
    **dict.fromkeys(("ssm_alpha", "ssm_beta", "ssm_dt"), Rule(rows=_ONE_EACH)),
}  # fmt: skip
# Qwen 3 Next has them in the order of transformers.
_NEXT = _SCAN | {"attn_qkv": Rule(parts=("attn_gate",), rows=_by_key_heads)}
_ROPE = r.rope(share=1.0)
_QWEN_HYBRID = [_delta_sizes, *_QWEN_EXPERTS]
declare("qwen35", "qwen3_5_text", layer=_DELTA, more=[_delta_sizes], rope_parameters=_ROPE)
declare("qwen35moe", "qwen3_5_moe_text", layer=_DELTA, more=_QWEN_HYBRID, rope_parameters=_ROPE)
declare("qwen3next", "qwen3_next", layer=_NEXT, more=_QWEN_HYBRID, rope_parameters=_ROPE)
