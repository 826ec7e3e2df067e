"""Qwen 2 to 3.5. Gated delta nets have their heads of values in another order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from cbatch.model.formats.gguf_architectures.architecture import (
    BEHIND,
    LAYER,
    Config,
    Rule,
    Rules,
    architecture,
    decay_log,
    expert_size,
    experts,
    read_experts,
    read_rope,
    with_channel,
)
from cbatch.model.formats.gguf_architectures.metadata import Metadata

_EXPERTS: Rules = {
    **experts(), "ffn_gate_inp": "mlp.gate", "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj", "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": Rule("mlp.shared_expert_gate", shape=lambda shape: (1, shape[-1])),
}  # fmt: skip


@architecture("qwen2", "qwen2", "Qwen2ForCausalLM")
@architecture("qwen3", "qwen3", "Qwen3ForCausalLM")
def qwen(data: Metadata, config: Config) -> Config:
    return {"rope_parameters": read_rope(data, config), "hidden_act": "silu"}


def _experts(data: Metadata) -> Config:
    count, top_k = read_experts(data)
    settings = {"num_experts": count, "num_experts_per_tok": top_k, "moe_intermediate_size": expert_size(data)}
    if data.any_tensor("ffn_gate_shexp.weight"):
        settings["shared_expert_intermediate_size"] = data.shape("blk.0.ffn_gate_shexp.weight")[0]
    return settings


@architecture("qwen2moe", "qwen2_moe", "Qwen2MoeForCausalLM", layer=LAYER | _EXPERTS)
@architecture("qwen3moe", "qwen3_moe", "Qwen3MoeForCausalLM", layer=LAYER | _EXPERTS)
def qwen_moe(data: Metadata, config: Config) -> Config:
    """llama.cpp divides by the sum of a token's weights for Qwen 3, and does not for Qwen 2."""
    normalizes = config["model_type"] == "qwen3_moe"
    settings = {"norm_topk_prob": normalizes, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return qwen(data, config) | _experts(data) | settings


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


_ONE_EACH, _ALL = partial(_values, width=1), partial(_values, with_keys=True)
_AFTER_ATTENTION: Rules = {"post_attention_norm": "post_attention_layernorm"}
_DELTA: Rules = {
    **LAYER, **_AFTER_ATTENTION, "attn_qkv": Rule("linear_attn.in_proj_qkv", rows=_ALL),
    "attn_gate": Rule("linear_attn.in_proj_z", rows=_values),
    "ssm_conv1d": Rule("linear_attn.conv1d", rows=_ALL, shape=with_channel),
    "ssm_alpha": Rule("linear_attn.in_proj_a", rows=_ONE_EACH),
    "ssm_beta": Rule("linear_attn.in_proj_b", rows=_ONE_EACH),
    "ssm_dt.bias": Rule("linear_attn.dt_bias", rows=_ONE_EACH),
    "ssm_a": Rule("linear_attn.A_log", combine=_decay_log), "ssm_norm": "linear_attn.norm",
    "ssm_out": Rule("linear_attn.out_proj", columns=_values),
}  # fmt: skip


@architecture("qwen35", "qwen3_5_text", "Qwen3_5ForCausalLM", layer=_DELTA, norm_offset=1.0, plain_norms=("ssm_norm",))
def qwen35(data: Metadata, config: Config) -> Config:
    """Heads of values share those of keys in turns in the file, and next to each other in transformers."""
    rope = read_rope(data, config)
    rope.setdefault("partial_rotary_factor", 1.0)
    return {"rope_parameters": rope, "hidden_act": "silu"} | _delta_sizes(data)


def _delta_sizes(data: Metadata) -> Config:
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


@architecture("qwen35moe", "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", layer=_DELTA | _EXPERTS, norm_offset=1.0,
              plain_norms=("ssm_norm",))  # fmt: skip
def qwen35_moe(data: Metadata, config: Config) -> Config:
    return qwen35(data, config) | _experts(data)


def _by_key_heads(config: Config, rows: int) -> Tensor | None:
    """Of Qwen 3 Next: queries, keys, values and gates of a head of keys lie together in transformers."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    each = [config["linear_key_head_dim"]] * 2 + [values // keys * config["linear_value_head_dim"]] * 2
    if rows != keys * sum(each):
        return None
    parts = torch.split(torch.arange(rows), [keys * one for one in each])
    return torch.cat([part.view(keys, -1) for part in parts], dim=1).flatten()


_NEXT: Rules = {
    **LAYER, **_AFTER_ATTENTION, **_EXPERTS, "ssm_in": "linear_attn.in_proj_qkvz",
    "attn_qkv": Rule("linear_attn.in_proj_qkvz", parts=("attn_gate",), rows=_by_key_heads),
    "attn_gate": BEHIND,
    "ssm_conv1d": Rule("linear_attn.conv1d", shape=with_channel), "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_dt.bias": "linear_attn.dt_bias", "ssm_a": Rule("linear_attn.A_log", combine=decay_log),
    "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj",
}  # fmt: skip


@architecture("qwen3next", "qwen3_next", "Qwen3NextForCausalLM", layer=_NEXT, norm_offset=1.0,
              plain_norms=("ssm_norm",))  # fmt: skip
def qwen3_next(data: Metadata, config: Config) -> Config:
    """Here heads of values are in the order of transformers."""
    return qwen35_moe(data, config) | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
