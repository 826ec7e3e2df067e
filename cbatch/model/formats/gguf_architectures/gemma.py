"""Gemma: the file adds 1 to the weights of norms."""

from __future__ import annotations

from cbatch.model.formats.gguf_architectures.architecture import (
    LAYER,
    Config,
    Rules,
    architecture,
    read_layer_types,
    read_rope,
)
from cbatch.model.formats.gguf_architectures.metadata import Metadata

_BOTH_SIDES: Rules = {
    **LAYER, "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip


@architecture("gemma", "gemma", "GemmaForCausalLM", norm_offset=1.0)
def gemma(data: Metadata, config: Config) -> Config:
    return {"rope_parameters": read_rope(data, config), "hidden_act": "gelu_pytorch_tanh"}


@architecture("gemma2", "gemma2", "Gemma2ForCausalLM", layer=_BOTH_SIDES, norm_offset=1.0)
def gemma2(data: Metadata, config: Config) -> Config:
    """The largest of them scales scores by the width of the model, which its file does not say."""
    is_largest = config["num_hidden_layers"] == 46
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    return {
        "rope_parameters": read_rope(data, config),
        "sliding_window": data.whole("attention.sliding_window", 4096),
        "attn_logit_softcapping": data.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": data.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": hidden / heads if is_largest else config["head_dim"],
        "hidden_activation": "gelu_pytorch_tanh",
    }


@architecture("gemma3", "gemma3_text", "Gemma3ForCausalLM", layer=_BOTH_SIDES, norm_offset=1.0)
def gemma3(data: Metadata, config: Config) -> Config:
    heads, hidden, layers = (config[f"{name}"] for name in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    full = read_rope(data, config, 1e6)
    local = {"rope_type": "default", "rope_theta": data.number("rope.freq_base_swa", 10000.0)}
    return {
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
        "sliding_window": data.whole("attention.sliding_window"),
        "layer_types": read_layer_types(data, config, 6),
        "query_pre_attn_scalar": hidden / heads if layers == 62 else config["head_dim"],
        "hidden_activation": "gelu_pytorch_tanh",
    }
