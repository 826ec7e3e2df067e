"""Llama, Gemma and their kin, and models with other norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cbatch.model.families.builder import deinterleaved
from cbatch.model.formats.gguf_architectures import readers as r
from cbatch.model.formats.gguf_architectures.architecture import ABSENT, Config, Metadata, Read, Rule
from cbatch.model.formats.gguf_architectures.readers import declare, value

# Llama and its kin, most with rows of queries and keys permuted.
declare("llama", "mixtral", layer=r.PERMUTED, more=[r.mixture("num_local_experts")],
        when=lambda data: data.has_tensor("blk.0.ffn_gate_exps.weight"))  # fmt: skip
declare("llama", layer=r.PERMUTED)
# Models of text with pictures rotate as one does without them.
declare("qwen2 qwen2vl")
declare("qwen3 qwen3vl")
declare("exaone", "llama")
# llama.cpp rotates in three of four layers of SmolLM 3, whatever the file says, as transformers does by default.
declare("arcee", layer=r.PERMUTED)
declare("smollm3", layer=r.PERMUTED)
declare("seed_oss", attention_out_bias=r.has("attn_output.bias"))


def _scaled_rope(data: Metadata, config: Config) -> Config:
    """Queries grow with the position."""
    rope = r.read_rope(data, config, 1e6)
    if rope["rope_type"] != "yarn":
        raise data.refused("scales queries by position without YaRN, which is not read")
    all_dims = data.number("rope.scaling.yarn_log_multiplier", 1.0)
    beta = data.number("attention.temperature_scale")
    return rope | {"mscale": 1.0, "mscale_all_dim": all_dims, "llama_4_scaling_beta": beta}


declare("mistral3", "ministral3", layer=r.PERMUTED, rope_parameters=_scaled_rope,
        when=lambda data: data.has("attention.temperature_scale"))  # fmt: skip
declare("mistral3", "mistral", layer=r.PERMUTED, sliding_window=None)
# Neighbours are rotated together in transformers, too.
declare("ernie4_5", use_bias=r.has("ffn_down.bias"))
declare("paddleocr", "paddleocr_vl_text", use_bias=r.has("ffn_down.bias"))


def _alphas(data: Metadata, config: Config) -> dict[str, Tensor]:
    """The numbers of each layer's activation."""
    return {
        f"model.layers.{layer}.mlp.act_fn.{name}": torch.tensor(number).view(shape)
        for name, shape in (("alpha_p", (1,)), ("alpha_n", (1,)), ("beta", ()), ("eps", ()))
        for layer, number in enumerate(data.own_numbers(f"xielu.{name}", config["num_hidden_layers"]))
    }


declare("apertus", made=_alphas)
# The base that the file of a HunYuan has is the one that `alpha` has made.
declare("hunyuan-dense", "hunyuan_v1_dense")
declare("phi3", rope_parameters=r.long_rope,
        sliding_window=lambda data, config: data.whole("attention.sliding_window", 0) or None)  # fmt: skip

# OLMo, EXAONE and GLM, most with norms after each part.
declare("olmo", layer=r.PERMUTED,
        clip_qkv=lambda data, config: data.number("attention.clamp_kqv", 0.0) or None)  # fmt: skip
declare("olmo2", "olmo3", rope_parameters=r.local_rope(5e5), **r.windows(4),
        when=lambda data: data.has("attention.sliding_window"))  # fmt: skip
declare("olmo2")
declare("exaone4", more=[r.optional_windows])
declare("chatglm", "glm")


def _halves(heads: int, head_dim: int, config: Config) -> Tensor:
    """Of rotated neighbours, the first ones come first in files of models with pictures."""
    rotated = int(head_dim * config["rope_parameters"]["partial_rotary_factor"])
    return deinterleaved(heads, head_dim, rotated).argsort()


declare("glm4", layer=r.queries_and_keys(_halves), rope_parameters=r.rope(share=1.0),
        when=lambda data: data.has("rope.dimension_sections"))  # fmt: skip
declare("glm4")

# Models with LayerNorm.
declare("command-r", "cohere", logit_scale=value("logit_scale", 1.0), use_qk_norm=r.has("attn_q_norm.weight"))
declare("cohere2", logit_scale=value("logit_scale", 1.0), **r.windows(4))
# Files do not say the window that some of these models have.
declare("starcoder2", use_bias=r.has("attn_q.bias"))
declare("nemotron", rope_parameters=r.rope(share=1.0))
# The width of the feed-forward part is that of its tensors; files of Phi 2 say four times that of the model.
declare("phi2", "phi", rope_parameters=r.rope(share=1.0), intermediate_size=r.rows_of("ffn_up"))
declare("stablelm", rope_parameters=r.rope(share=1.0),
        use_parallel_residual=value("use_parallel_residual", True), use_qkv_bias=r.has("attn_q.bias"),
        qk_layernorm=r.has("attn_q_norm.weight"))  # fmt: skip
declare("jais2")


def _fused(config: Config, rows: int) -> Tensor:
    """A head's query, key and value are side by side in transformers."""
    return torch.arange(rows).view(3, config["num_attention_heads"], -1).transpose(0, 1).flatten()


declare("gptneox", "gpt_neox", layer={"attn_qkv": Rule(rows=_fused)},
        rope_parameters=r.rope(share=1.0), attention_bias=r.has("attn_qkv.bias"),
        use_parallel_residual=value("use_parallel_residual", True))  # fmt: skip


def _grouped(config: Config, rows: int) -> Tensor | None:
    """Queries that share a key and a value are before these in transformers."""
    heads, shared, size = config["num_attention_heads"], config["num_kv_heads"], config["hidden_size"]
    dim = size // heads
    if rows != (heads + 2 * shared) * dim:
        return None
    parts = torch.split(torch.arange(rows), [size, shared * dim, shared * dim])
    return torch.cat([part.view(shared, -1) for part in parts], dim=1).flatten()


def _falcon(data: Metadata, config: Config) -> Config:
    count = config.pop("num_key_value_heads")
    return {"num_kv_heads": count, "multi_query": count == 1, "new_decoder_architecture": count > 1}


_FALCON: dict[str, Any] = {
    "layer": {"attn_qkv": Rule(rows=_grouped)}, "more": [_falcon],
    "intermediate_size": ABSENT, "ffn_hidden_size": r.rows_of("ffn_up"), "bias": r.has("attn_qkv.bias"),
}  # fmt: skip
declare("falcon", num_ln_in_parallel_attn=2, when=lambda data: data.has_tensor("blk.0.attn_norm_2.weight"), **_FALCON)
declare("falcon", num_ln_in_parallel_attn=1, **_FALCON)

# Files say four times the width of the model.
_GPT: dict[str, Any] = {
    "rope_parameters": ABSENT, "head_dim": ABSENT, "intermediate_size": ABSENT, "n_inner": r.rows_of("ffn_up"),
}  # fmt: skip
declare("gpt2", **_GPT)
declare("starcoder", "gpt_bigcode", **_GPT, num_key_value_heads=ABSENT,
        multi_query=lambda data, config: config["num_key_value_heads"] == 1)  # fmt: skip


def _largest_scales_by_width(layers: int) -> Read:
    """The largest of a family scales scores by the width of the model, which its file does not say."""

    def read(data: Metadata, config: Config) -> Any:
        by_width = config["hidden_size"] / config["num_attention_heads"]
        return by_width if config["num_hidden_layers"] == layers else config["head_dim"]

    return read


declare("gemma")
declare("gemma2", sliding_window=value("attention.sliding_window", 4096),
        attn_logit_softcapping=value("attn_logit_softcapping", 50.0),
        final_logit_softcapping=value("final_logit_softcapping", 30.0),
        query_pre_attn_scalar=_largest_scales_by_width(46))  # fmt: skip
declare("gemma3", "gemma3_text", rope_parameters=r.local_rope(1e6, 10000.0),
        **r.windows(6), query_pre_attn_scalar=_largest_scales_by_width(62))  # fmt: skip


def _gemma4_kinds(data: Metadata, config: Config) -> list[tuple[str, int]]:
    """The type of each layer, and the size of its heads."""
    sizes = {"sliding_attention": data.whole("attention.key_length_swa"), "full_attention": config["head_dim"]}
    return [(kind, sizes[kind]) for kind in r.read_layer_types(data, config, 6)]


def _gemma4(data: Metadata, config: Config) -> Config:
    kinds, layers = _gemma4_kinds(data, config), config["num_hidden_layers"]
    counts = data.wholes("attention.head_count_kv", layers)
    with_keys = [layer for layer in range(layers) if data.has_tensor(f"blk.{layer}.attn_k.weight")]
    widths = data.wholes("feed_forward_length", layers)
    own = [{"head_dim": size, "num_key_value_heads": count} for (_, size), count in zip(kinds, counts, strict=True)]
    found: Config = {
        "layer_types": [kind for kind, _ in kinds], "per_layer_config": {str(i): one for i, one in enumerate(own)},
        "attention_k_eq_v": any(not data.has_tensor(f"blk.{layer}.attn_v.weight") for layer in with_keys),
        "intermediate_size": widths[0], "use_double_wide_mlp": len(set(widths)) > 1, **own[0],
    }  # fmt: skip
    if data.shapes("ffn_gate_inp.weight"):
        found |= r.mixture("num_experts", "top_k_experts", "moe_intermediate_size")(data, config)
        found["enable_moe_block"] = True
    if data.has_tensor("per_layer_token_embd.weight"):
        found["vocab_size_per_layer_input"] = data.shape("per_layer_token_embd.weight")[0]
    return found


def _gemma4_rope(data: Metadata, config: Config) -> Config:
    """Divisors of frequencies that do not rotate are huge in files."""
    factors = data.factors("rope_freqs.weight", config["head_dim"] // 2) or [1.0]
    return {
        "sliding_attention": {"rope_type": "default", "rope_theta": data.number("rope.freq_base_swa", 10000.0)},
        "full_attention": {"rope_type": "proportional", "rope_theta": data.number("rope.freq_base", 1e6),
                           "partial_rotary_factor": factors.count(1.0) / len(factors)},
    }  # fmt: skip


declare("gemma4", "gemma4_text", layer=r.JOINT_EXPERTS, more=[_gemma4],
        sliding_window=r.window, rope_parameters=_gemma4_rope,
        num_kv_shared_layers=value("attention.shared_kv_layers", 0),
        hidden_size_per_layer_input=value("embedding_length_per_layer_input", 0),
        final_logit_softcapping=lambda data, config: data.number("final_logit_softcapping", 0.0) or None)  # fmt: skip
