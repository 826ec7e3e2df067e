"""Mixtures of experts, and latent attention."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cbatch.model.formats.gguf_architectures import readers as r
from cbatch.model.formats.gguf_architectures.architecture import BEHIND, Config, Metadata, Rule
from cbatch.model.formats.gguf_architectures.readers import declare, value

_MIXTURE = r.mixture("num_experts", size="moe_intermediate_size")
declare("hunyuan-moe", "hunyuan_v1_moe", more=[r.mixture("num_experts", "moe_topk")])
declare("olmoe", more=[r.mixture("num_experts", size="intermediate_size")])

_ROUTED = r.mixture("n_routed_experts", size="moe_intermediate_size")
_BIASED_EXPERTS = [_ROUTED, r.biased]
declare("glm4moe", "glm4_moe", more=_BIASED_EXPERTS, use_qk_norm=r.has("attn_q_norm.weight"),
        rope_parameters=r.rope(share=1.0))  # fmt: skip
declare("exaone-moe", "exaone_moe", more=[*_BIASED_EXPERTS, r.optional_windows])
declare("dots1", more=_BIASED_EXPERTS, sliding_window=None)


def _num_shared(data: Metadata, config: Config) -> int:
    return r.shared_size(data, config) // r.expert_size(data)


# Neighbours are rotated together in transformers, too.
declare("ernie4_5-moe", "ernie4_5_moe", more=[r.mixture("moe_num_experts", "moe_k", "moe_intermediate_size")],
        moe_num_shared_experts=_num_shared,
        moe_layer_interval=value("interleave_moe_layer_step", 1),
        moe_layer_start_index=value("leading_dense_block_count", 0), use_bias=r.has("attn_q.bias"))  # fmt: skip


def _in_turns(config: Config, rows: int) -> Tensor:
    """A row of the first tensor, then one of the second."""
    return torch.arange(rows).view(2, -1).T.flatten()


def _gpt_oss_rope(data: Metadata, config: Config) -> Config:
    rope = r.read_rope(data, config, 150000.0)
    return {"beta_fast": 32.0, "beta_slow": 1.0} | rope | {"truncate": False} if rope["rope_type"] == "yarn" else rope


_GPT_OSS = {"ffn_gate_exps": Rule(parts=("ffn_up_exps",), rows=_in_turns)}
declare("gpt-oss", "gpt_oss", layer=_GPT_OSS, rope_parameters=_gpt_oss_rope, more=[r.mixture("num_local_experts")],
        sliding_window=r.window, intermediate_size=r.rows_of("ffn_gate_exps"))  # fmt: skip

declare("minimax-m2", "minimax_m2", rope_parameters=r.rope(share=1.0),
        more=[r.mixture("num_local_experts", size="intermediate_size")])  # fmt: skip
declare("mellum", rope_parameters=r.local_rope(10000.0), more=[_MIXTURE, r.optional_windows])
declare("afmoe", more=[_MIXTURE, r.optional_windows], mup_enabled=True,
        num_shared_experts=value("expert_shared_count", 0), num_dense_layers=value("leading_dense_block_count", 0),
        route_scale=value("expert_weights_scale", 1.0))  # fmt: skip
# llama.cpp has the numbers of transformers' class for chunks and for how queries grow, and norms in all but the largest
# model.
declare("llama4", "llama4_text", layer=r.JOINT_EXPERTS,
        more=[lambda data, config: {"intermediate_size_mlp": config["intermediate_size"]},
              r.mixture("num_local_experts", size="intermediate_size")],
        interleave_moe_layer_step=value("interleave_moe_layer_step", 1),
        use_qk_norm=lambda data, config: data.whole("expert_count") != 128)  # fmt: skip
declare("hy_v3", more=[_MIXTURE], num_shared_experts=_num_shared,
        router_scaling_factor=value("expert_weights_scale", 1.0),
        mlp_layer_types=r.types("ffn_gate_inp", "sparse", "dense"))  # fmt: skip

# Latent attention: DeepSeek V2 and V3, and their kin.


def _sizes(data: Metadata, config: Config) -> tuple[int, int, int]:
    """Of keys, of what is rotated of them, and of values. Newer files also have those of llama.cpp's own attention."""
    width = data.whole("attention.key_length_mla", config["head_dim"])
    by_width = config["hidden_size"] // max(config["num_attention_heads"], 1)
    values = data.whole("attention.value_length_mla", data.whole("attention.value_length", by_width))
    return width, data.whole("rope.dimension_count"), values


def _latent(data: Metadata, config: Config) -> Config:
    width, rotated, values = _sizes(data, config)
    shapes = data.shapes("attn_q_a.weight")
    return {
        "qk_rope_head_dim": rotated, "qk_nope_head_dim": width - rotated, "v_head_dim": values,
        "kv_lora_rank": data.whole("attention.kv_lora_rank"), "q_lora_rank": shapes[0][0] if shapes else None,
    }  # fmt: skip


def _rope(data: Metadata, config: Config) -> Config:
    """YaRN scales scores, by a tenth of what other architectures say."""
    rope = r.long_rope(data, config | {"head_dim": data.whole("rope.dimension_count")})
    if rope["rope_type"] == "yarn":
        scale = data.number("rope.scaling.yarn_log_multiplier", 0.0) / 0.1
        rope |= {"mscale": scale, "mscale_all_dim": scale} if scale else {}
    return rope


def _keys_values(config: Config, parts: Sequence[Tensor]) -> Tensor:
    """Newer files have the linears of keys, transposed, and of values by themselves."""
    keys, values = (part.float() for part in parts)
    return torch.cat([keys.transpose(1, 2), values], dim=1).flatten(0, 1)


_LATENT = {"attn_k_b": Rule(parts=("attn_v_b",), combine=_keys_values)}
_SETTINGS: dict[str, Any] = {"rope_parameters": _rope, "attention_bias": r.has("attn_q_a.bias")}


def _softmax(data: Metadata, config: Config) -> Config:
    """Of DeepSeek V2, whose weights of experts are not divided by their sum."""
    if data.has("attention.temperature_scale"):
        raise data.refused("scales queries by position, which is not read in its architecture")
    if data.flag("expert_weights_norm", False):
        raise data.refused("divides weights of experts by their sum, which is not read with softmax")
    found = r.biased(data, config, 1)
    del found["norm_topk_prob"]
    return found | {"topk_method": "group_limited_greedy" if found["n_group"] > 1 else "greedy"}


# Those of A.X K1 and others without experts in all layers have other names in transformers, and compute the same.
declare("deepseek2", "youtu", layer=_LATENT, more=[_latent], **_SETTINGS,
        when=lambda data: not data.whole("expert_count", 0))  # fmt: skip
declare("deepseek2", "deepseek_v3", layer=_LATENT, more=[_latent, *_BIASED_EXPERTS], **_SETTINGS,
        when=lambda data: bool(data.shapes("exp_probs_b.bias")))  # fmt: skip
declare("deepseek2", "deepseek_v2", layer=_LATENT, more=[_latent, _ROUTED, _softmax], **_SETTINGS)

# Weights of the index are not used where it chooses everything.
_INDEX = {f"indexer.{name}": BEHIND for name in ("k_norm", "proj", "attn_k", "attn_q_b")}
for _name, _kind in (("deepseek32", "deepseek_v32"), ("glm-dsa", "glm_moe_dsa")):
    declare(_name, _kind, layer=_LATENT | _INDEX, more=[_latent, *_BIASED_EXPERTS], **_SETTINGS,
            index_topk=lambda data, config: data.whole("attention.indexer.top_k"))  # fmt: skip


def _growing_rope(data: Metadata, config: Config) -> Config:
    """Queries grow with the position."""
    return _rope(data, config) | {"llama_4_scaling_beta": data.number("attention.temperature_scale", 0.0)}


declare("mistral4", layer=_LATENT, more=[_latent, _ROUTED, partial(r.biased, function=1)],
        rope_parameters=_growing_rope)  # fmt: skip
# llama.cpp scales embedding, residual and logits of the one MiniCPM 3 there is by what transformers' class has.
declare("minicpm3", layer=_LATENT, more=[_latent], **_SETTINGS)
