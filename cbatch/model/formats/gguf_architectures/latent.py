"""Models with latent attention: DeepSeek V2 and V3, and their kin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cbatch.base.model_files import InvalidFile
from cbatch.model.formats.gguf_architectures.architecture import BEHIND, LAYER, Config, Metadata, Rule, Rules, Shape
from cbatch.model.formats.gguf_architectures.readers import (
    biased,
    declare,
    experts,
    has_any,
    long_rope,
    mixture,
    shared_experts,
)


def _sizes(data: Metadata, config: Config) -> tuple[int, int, int]:
    """Of keys, of what is rotated of them, and of values. Newer files also have those of llama.cpp's own attention."""
    width = data.whole("attention.key_length_mla", config["head_dim"])
    by_width = config["hidden_size"] // max(config["num_attention_heads"], 1)
    values = data.whole("attention.value_length_mla", data.whole("attention.value_length", by_width))
    return width, data.whole("rope.dimension_count"), values


def _check(data: Metadata, config: Config) -> None:
    heads, (width, rotated, values) = config["num_attention_heads"], _sizes(data, config)
    queries = data.shapes("attn_q_b.weight") or data.shapes("attn_q.weight")
    found = [(first[0], last[-1]) for first, last in zip(queries, data.shapes("attn_output.weight"), strict=False)]
    if heads < 1 or found[:1] != [(heads * width, heads * values)] or rotated > width:
        raise data.refused(
            f"claims to have {heads} heads of {width} and {values}, of which {rotated} rotate; its tensors differ"
        )


def _latent(data: Metadata, config: Config) -> Config:
    width, rotated, values = _sizes(data, config)
    shapes = data.shapes("attn_q_a.weight")
    return {
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": width - rotated,
        "v_head_dim": values,
        "kv_lora_rank": data.whole("attention.kv_lora_rank"),
        "q_lora_rank": shapes[0][0] if shapes else None,
    }


def _rope(data: Metadata, config: Config) -> Config:
    """YaRN scales scores, by a tenth of what other architectures say."""
    rope = long_rope(data, config | {"head_dim": data.whole("rope.dimension_count")})
    if rope["rope_type"] == "yarn":
        scale = data.number("rope.scaling.yarn_log_multiplier", 0.0) / 0.1
        rope |= {"mscale": scale, "mscale_all_dim": scale} if scale else {}
    return rope


def _keys_values(config: Config, parts: Sequence[Tensor]) -> Tensor:
    """Newer files have the linears of keys, transposed, and of values by themselves."""
    keys, values = (part.float() for part in parts)
    return torch.cat([keys.transpose(1, 2), values], dim=1).flatten(0, 1)


def _keys_values_shape(keys: Shape, values: Shape) -> Shape:
    if len(keys) != 3 or len(values) != 3 or (keys[0], keys[1]) != (values[0], values[2]):
        raise InvalidFile(f"The tensors attn_k_b and attn_v_b have the shapes {keys} and {values}.")
    return keys[0] * (keys[2] + values[1]), keys[1]


_LATENT: Rules = {
    **LAYER, "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj", "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm", "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b.weight": Rule(
        "self_attn.kv_b_proj.weight", parts=("attn_v_b.weight",), combine=_keys_values, shape=_keys_values_shape
    ),
    "attn_v_b.weight": BEHIND,
}  # fmt: skip
_EXPERTS: Rules = {
    **_LATENT, **experts(), **shared_experts("mlp.shared_experts."), "ffn_gate_inp": "mlp.gate",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}  # fmt: skip
_SETTINGS: dict[str, Any] = {"check": _check, "rope_parameters": _rope, "attention_bias": has_any("attn_q_a.bias")}


def _softmax(data: Metadata, config: Config) -> Config:
    """Of DeepSeek V2, whose weights of experts are not divided by their sum."""
    if data.has("attention.temperature_scale"):
        raise data.refused("scales queries by position, which is not read in its architecture")
    if data.flag("expert_weights_norm", False):
        raise data.refused("divides weights of experts by their sum, which is not read with softmax")
    found = biased(data, config, 1)
    del found["norm_topk_prob"]
    return found | {"topk_method": "group_limited_greedy" if found["n_group"] > 1 else "greedy"}


_MIXTURE = mixture("n_routed_experts", size="moe_intermediate_size")
# Those of A.X K1 and others without experts in all layers have other names in transformers, and compute the same.
declare("deepseek2", "youtu", "YoutuForCausalLM", layer=_LATENT, more=[_latent], **_SETTINGS,
        when=lambda data: not data.whole("expert_count", 0))  # fmt: skip
declare("deepseek2", "deepseek_v3", "DeepseekV3ForCausalLM", layer=_EXPERTS, more=[_latent, _MIXTURE, biased],
        **_SETTINGS, when=lambda data: bool(data.shapes("exp_probs_b.bias")))  # fmt: skip
declare("deepseek2", "deepseek_v2", "DeepseekV2ForCausalLM", layer=_EXPERTS, more=[_latent, _MIXTURE, _softmax],
        **_SETTINGS)  # fmt: skip


def _indexed(data: Metadata, config: Config) -> Config:
    return {"index_topk": data.whole("attention.indexer.top_k")}


# Weights of the index are not used where it chooses everything.
_INDEX: Rules = {f"indexer.{name}": BEHIND for name in ("k_norm", "proj", "attn_k", "attn_q_b")}
for _name, _kind, _class in (("deepseek32", "deepseek_v32", "DeepseekV32ForCausalLM"),
                             ("glm-dsa", "glm_moe_dsa", "GlmMoeDsaForCausalLM")):  # fmt: skip
    declare(_name, _kind, _class, layer=_EXPERTS | _INDEX, more=[_latent, _MIXTURE, biased, _indexed], **_SETTINGS)


def _growing_rope(data: Metadata, config: Config) -> Config:
    """Queries grow with the position."""
    return _rope(data, config) | {"llama_4_scaling_beta": data.number("attention.temperature_scale", 0.0)}


def _softmax_mixture(data: Metadata, config: Config) -> Config:
    return biased(data, config, 1)


declare("mistral4", "mistral4", "Mistral4ForCausalLM", layer=_EXPERTS, more=[_latent, _MIXTURE, _softmax_mixture],
        check=_check, rope_parameters=_growing_rope)  # fmt: skip
# llama.cpp scales embedding, residual and logits of the one MiniCPM 3 there is, which its file does not say.
declare("minicpm3", "minicpm3", "MiniCPM3ForCausalLM", layer=_LATENT, more=[_latent], **_SETTINGS,
        scale_emb=12, scale_depth=1.4, dim_model_base=256)  # fmt: skip
