"""Gemma, whose files add 1 to the weights of norms."""

from __future__ import annotations

from functools import partial
from typing import Any

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
    BOTH_AFTER,
    declare,
    local_rope,
    mixture,
    number,
    read_layer_types,
    whole,
    window,
)

# Gemma, whose files add 1 to the weights of norms.
_GELU: dict[str, Any] = {"hidden_act": ABSENT, "hidden_activation": "gelu_pytorch_tanh"}


def _largest_scales_by_width(layers: int) -> Read:
    """The largest of a family scales scores by the width of the model, which its file does not say."""

    def read(data: Metadata, config: Config) -> Any:
        by_width = config["hidden_size"] / config["num_attention_heads"]
        return by_width if config["num_hidden_layers"] == layers else config["head_dim"]

    return read


_BOTH_SIDES: Rules = LAYER | BOTH_AFTER | {"ffn_norm": "pre_feedforward_layernorm"}
declare("gemma", "gemma", "GemmaForCausalLM", norm_offset=1.0, hidden_act="gelu_pytorch_tanh")
declare("gemma2", "gemma2", "Gemma2ForCausalLM", layer=_BOTH_SIDES, norm_offset=1.0, **_GELU,
        sliding_window=whole("attention.sliding_window", 4096),
        attn_logit_softcapping=number("attn_logit_softcapping", 50.0),
        final_logit_softcapping=number("final_logit_softcapping", 30.0),
        query_pre_attn_scalar=_largest_scales_by_width(46))  # fmt: skip
declare("gemma3", "gemma3_text", "Gemma3ForCausalLM", layer=_BOTH_SIDES, norm_offset=1.0, **_GELU,
        rope_parameters=local_rope(1e6, 10000.0), sliding_window=window,
        layer_types=partial(read_layer_types, period=6),
        query_pre_attn_scalar=_largest_scales_by_width(62))  # fmt: skip


def _gemma4_kinds(data: Metadata, config: Config) -> list[tuple[str, int]]:
    """The type of each layer, and the size of its heads."""
    sizes = {"sliding_attention": data.whole("attention.key_length_swa"), "full_attention": config["head_dim"]}
    return [(kind, sizes[kind]) for kind in read_layer_types(data, config, 6)]


def _check_gemma4(data: Metadata, config: Config) -> None:
    heads = config["num_attention_heads"]
    for layer, (_, size) in enumerate(_gemma4_kinds(data, config)):
        if data.shape(f"blk.{layer}.attn_output.weight")[-1] != heads * size or heads < 1:
            raise data.refused(f"claims to have {heads} heads of {size} in layer {layer}, and its tensors differ")


def _gemma4(data: Metadata, config: Config) -> Config:
    kinds, layers = _gemma4_kinds(data, config), config["num_hidden_layers"]
    counts = data.wholes("attention.head_count_kv", layers)
    own = [layer for layer in range(layers) if data.has_tensor(f"blk.{layer}.attn_k.weight")]
    widths = data.wholes("feed_forward_length", layers)
    return {
        "layer_types": [kind for kind, _ in kinds],
        "head_dim": kinds[0][1],
        "num_key_value_heads": counts[0],
        "per_layer_config": {
            str(layer): {"head_dim": size, "num_key_value_heads": counts[layer]}
            for layer, (_, size) in enumerate(kinds)
        },
        "num_kv_shared_layers": data.whole("attention.shared_kv_layers", 0),
        "attention_k_eq_v": any(not data.has_tensor(f"blk.{layer}.attn_v.weight") for layer in own),
        "intermediate_size": widths[0],
        "use_double_wide_mlp": len(set(widths)) > 1,
        "hidden_size_per_layer_input": data.whole("embedding_length_per_layer_input", 0),
        "final_logit_softcapping": data.number("final_logit_softcapping", 0.0) or None,
    }


def _gemma4_rope(data: Metadata, config: Config) -> Config:
    """Divisors of frequencies that do not rotate are huge in files."""
    factors = data.factors("rope_freqs.weight", config["head_dim"] // 2) or [1.0]
    return {
        "sliding_attention": {"rope_type": "default", "rope_theta": data.number("rope.freq_base_swa", 10000.0)},
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": data.number("rope.freq_base", 1e6),
            "partial_rotary_factor": factors.count(1.0) / len(factors),
        },
    }


def _gemma4_parts(data: Metadata, config: Config) -> Config:
    """Experts, and embeddings of each layer, if there are any."""
    found: Config = {}
    if data.shapes("ffn_gate_inp.weight"):
        found = {"enable_moe_block": True} | mixture("num_experts", "top_k_experts", "moe_intermediate_size")(
            data, config
        )
    if data.has_tensor("per_layer_token_embd.weight"):
        found["vocab_size_per_layer_input"] = data.shape("per_layer_token_embd.weight")[0]
    return found


_GEMMA4: Rules = {
    **_BOTH_SIDES, "layer_output_scale.weight": "layer_scalar", "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm",
    "post_ffw_norm_1": "post_feedforward_layernorm_1", "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2", "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale", "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj", "ffn_down_exps.weight": "experts.down_proj",
    "ffn_gate_exps.weight": Rule("experts.gate_up_proj", parts=("ffn_up_exps.weight",)),
    "ffn_up_exps.weight": BEHIND,
}  # fmt: skip
_GEMMA4_MODEL: Rules = MODEL | {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
declare("gemma4", "gemma4_text", "Gemma4ForCausalLM", layer=_GEMMA4, model=_GEMMA4_MODEL, check=_check_gemma4, **_GELU,
        sliding_window=window, rope_parameters=_gemma4_rope, more=[_gemma4, _gemma4_parts])  # fmt: skip
