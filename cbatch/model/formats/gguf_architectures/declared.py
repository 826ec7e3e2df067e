"""The architectures that are read, in the order of llama.cpp's families.

A setting is a value, or a function that reads one. What several settings need together is read by functions whose
results are joined (`more`).
"""

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
    PERMUTED,
    Config,
    Metadata,
    Read,
    Rule,
    Rules,
    decay_log,
    declare,
    expert_size,
    experts,
    flag,
    flat,
    has,
    has_any,
    number,
    read_experts,
    read_layer_types,
    read_rope,
    shared_experts,
    whole,
    with_channel,
)

_PERMUTED = LAYER | PERMUTED
_BIASES: dict[str, Any] = {"attention_bias": has("attn_q.bias"), "mlp_bias": has("ffn_down.bias")}
_AFTER_ATTENTION: Rules = {"post_attention_norm": "post_attention_layernorm"}
_BOTH_AFTER: Rules = _AFTER_ATTENTION | {"post_ffw_norm": "post_feedforward_layernorm"}


def mixture(count: str, top_k: str = "num_experts_per_tok", size: str = "") -> Read:
    """The number of experts and of those that a token has, and the width of each, under the names of a family."""

    def read(data: Metadata, config: Config) -> Config:
        found = dict(zip((count, top_k), read_experts(data), strict=True))
        return found | ({size: expert_size(data)} if size else {})

    return read


def window(data: Metadata, config: Config) -> int:
    return data.whole("attention.sliding_window")


def _layer_norm(key: str) -> Read:
    """Of a model with LayerNorm: what its epsilon is called."""

    def read(data: Metadata, config: Config) -> Config:
        config.pop("rms_norm_eps", None)
        return {key: data.number("attention.layer_norm_epsilon")}

    return read


def _rope(base: float = 10000.0, *, share: float | None = None) -> Read:
    """Rotary settings by other defaults. share: of each head that is rotated if the file does not say it"""

    def read(data: Metadata, config: Config) -> Config:
        rope = read_rope(data, config, base)
        return rope if share is None else {"partial_rotary_factor": share} | rope

    return read


def _local_rope(base: float, local: float | None = None) -> Read:
    """Frequencies are scaled in full attention only. local: base in windows; None: that of full attention"""

    def read(data: Metadata, config: Config) -> Config:
        full = read_rope(data, config, base)
        theta = data.number("rope.freq_base_swa", local or full["rope_theta"])
        return {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": theta}}

    return read


# Llama and its kin, most with rows of queries and keys permuted.
declare("llama", "mixtral", "MixtralForCausalLM", when=lambda data: data.has_tensor("blk.0.ffn_gate_exps.weight"),
        layer=_PERMUTED | experts("block_sparse_moe.experts.{}.", "w1", "w3", "w2")
        | {"ffn_gate_inp": "block_sparse_moe.gate"}, more=[mixture("num_local_experts")])  # fmt: skip
declare("llama", "llama", "LlamaForCausalLM", layer=_PERMUTED, **_BIASES)
declare("arcee", "arcee", "ArceeForCausalLM", layer=_PERMUTED, **_BIASES, hidden_act="relu2")
# llama.cpp rotates in three of four layers, whatever the file says.
declare("smollm3", "smollm3", "SmolLM3ForCausalLM", layer=_PERMUTED, **_BIASES, no_rope_layer_interval=4)
declare("seed_oss", "seed_oss", "SeedOssForCausalLM", layer=LAYER | _AFTER_ATTENTION, **_BIASES,
        attention_out_bias=has("attn_output.bias"))  # fmt: skip


def _scaled_rope(data: Metadata, config: Config) -> Config:
    """Queries grow with the position."""
    rope = read_rope(data, config, 1e6)
    if rope["rope_type"] != "yarn":
        raise data.refused("scales queries by position without YaRN, which is not read")
    all_dims = data.number("rope.scaling.yarn_log_multiplier", 1.0)
    beta = data.number("attention.temperature_scale")
    return rope | {"mscale": 1.0, "mscale_all_dim": all_dims, "llama_4_scaling_beta": beta}


declare("mistral3", "ministral3", "Ministral3ForCausalLM", layer=_PERMUTED, rope_parameters=_scaled_rope,
        sliding_window=None, when=lambda data: data.has("attention.temperature_scale"))  # fmt: skip
declare("mistral3", "mistral", "MistralForCausalLM", layer=_PERMUTED, sliding_window=None)
# Neighbours are rotated together in transformers, too.
declare("ernie4_5", "ernie4_5", "Ernie4_5ForCausalLM", use_bias=has("ffn_down.bias"))
_LATE_NORMS: Rules = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
_QUERY_BIAS: dict[str, Any] = {"attention_bias": has("attn_q.bias")}
# The base that the file of a HunYuan has is the one that `alpha` has made.
declare("hunyuan-dense", "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", layer=LAYER | _LATE_NORMS, **_QUERY_BIAS)
declare("hunyuan-moe", "hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", **_QUERY_BIAS,
        layer=LAYER | _LATE_NORMS | experts() | shared_experts("mlp.shared_mlp.") | {"ffn_gate_inp": "mlp.gate.wg"},
        more=[mixture("num_experts", "moe_topk")])  # fmt: skip


def _long_rope(data: Metadata, config: Config) -> Config:
    rope, rotated = read_rope(data, config), data.whole("rope.dimension_count", config["head_dim"])
    short, long = (data.factors(f"rope_factors_{name}.weight", rotated // 2) for name in ("short", "long"))
    if short is not None and long is not None:
        rope |= {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        rope["original_max_position_embeddings"] = data.whole("rope.scaling.original_context_length")
        if data.has("rope.scaling.attn_factor"):
            rope["attention_factor"] = data.number("rope.scaling.attn_factor")
    return rope


declare("phi3", "phi3", "Phi3ForCausalLM", rope_parameters=_long_rope,
        layer=LAYER | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        sliding_window=lambda data, config: data.whole("attention.sliding_window", 0) or None)  # fmt: skip

# Gemma, whose files add 1 to the weights of norms.
_GELU: dict[str, Any] = {"hidden_act": ABSENT, "hidden_activation": "gelu_pytorch_tanh"}


def _largest_scales_by_width(layers: int) -> Read:
    """The largest of a family scales scores by the width of the model, which its file does not say."""

    def read(data: Metadata, config: Config) -> Any:
        by_width = config["hidden_size"] / config["num_attention_heads"]
        return by_width if config["num_hidden_layers"] == layers else config["head_dim"]

    return read


_BOTH_SIDES: Rules = LAYER | _BOTH_AFTER | {"ffn_norm": "pre_feedforward_layernorm"}
declare("gemma", "gemma", "GemmaForCausalLM", norm_offset=1.0, hidden_act="gelu_pytorch_tanh")
declare("gemma2", "gemma2", "Gemma2ForCausalLM", layer=_BOTH_SIDES, norm_offset=1.0, **_GELU,
        sliding_window=whole("attention.sliding_window", 4096),
        attn_logit_softcapping=number("attn_logit_softcapping", 50.0),
        final_logit_softcapping=number("final_logit_softcapping", 30.0),
        query_pre_attn_scalar=_largest_scales_by_width(46))  # fmt: skip
declare("gemma3", "gemma3_text", "Gemma3ForCausalLM", layer=_BOTH_SIDES, norm_offset=1.0, **_GELU,
        rope_parameters=_local_rope(1e6, 10000.0), sliding_window=window,
        layer_types=partial(read_layer_types, period=6),
        query_pre_attn_scalar=_largest_scales_by_width(62))  # fmt: skip

# OLMo, EXAONE and GLM, most with norms after each part.
declare("olmo", "olmo", "OlmoForCausalLM", layer=_PERMUTED, rms_norm_eps=ABSENT,
        clip_qkv=lambda data, config: data.number("attention.clamp_kqv", 0.0) or None)  # fmt: skip
declare("olmo2", "olmo3", "Olmo3ForCausalLM", layer=LAYER | _BOTH_AFTER, rope_parameters=_local_rope(5e5),
        sliding_window=window, layer_types=partial(read_layer_types, period=4),
        when=lambda data: data.has("attention.sliding_window"))  # fmt: skip
declare("olmo2", "olmo2", "Olmo2ForCausalLM", layer=LAYER | _BOTH_AFTER)
declare("olmoe", "olmoe", "OlmoeForCausalLM", layer=LAYER | experts() | {"ffn_gate_inp": "mlp.gate"},
        more=[mixture("num_experts", size="intermediate_size")], norm_topk_prob=False)  # fmt: skip


def _optional_windows(data: Metadata, config: Config) -> Config:
    size = data.whole("attention.sliding_window", 0) or None
    return {"sliding_window": size} | ({"layer_types": read_layer_types(data, config, 4)} if size else {})


declare("exaone4", "exaone4", "Exaone4ForCausalLM", layer=LAYER | _BOTH_AFTER, more=[_optional_windows])
declare("glm4", "glm4", "Glm4ForCausalLM", **_QUERY_BIAS,
        layer=LAYER | {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm",
                       "ffn_up": "mlp.gate_up_proj"})  # fmt: skip


def _biased(data: Metadata, config: Config) -> Config:
    """Of experts that are chosen by sigmoids with a bias."""
    if data.whole("expert_gating_func", 2) != 2:
        raise data.refused("chooses experts in another way than its architecture does")
    return {
        "n_shared_experts": data.whole("expert_shared_count", 0),
        "first_k_dense_replace": data.whole("leading_dense_block_count", 0),
        "routed_scaling_factor": data.number("expert_weights_scale", 1.0),
        "norm_topk_prob": data.flag("expert_weights_norm", False),
        "n_group": data.whole("expert_group_count", 1) or 1,
        "topk_group": data.whole("expert_group_used_count", 1) or 1,
    }


_BIASED_EXPERTS = [mixture("n_routed_experts", size="moe_intermediate_size"), _biased]
_BIASED: Rules = {
    **LAYER, **experts(), **shared_experts("mlp.shared_experts."), "ffn_gate_inp": "mlp.gate",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}  # fmt: skip
declare("glm4moe", "glm4_moe", "Glm4MoeForCausalLM", layer=_BIASED | _AFTER_ATTENTION, more=_BIASED_EXPERTS,
        **_QUERY_BIAS, use_qk_norm=has("attn_q_norm.weight"))  # fmt: skip
declare("dots1", "dots1", "Dots1ForCausalLM", layer=_BIASED, more=_BIASED_EXPERTS, **_QUERY_BIAS, sliding_window=None)


def _shared_size(data: Metadata, config: Config) -> int:
    shapes = data.shapes("ffn_gate_shexp.weight")
    return shapes[0][0] if shapes else 0


# Neighbours are rotated together in transformers, too.
declare("ernie4_5-moe", "ernie4_5_moe", "Ernie4_5_MoeForCausalLM",
        layer=_BIASED
        | {"exp_probs_b.bias": Rule("mlp.moe_statics.e_score_correction_bias", shape=lambda shape: (1, shape[-1]))},
        more=[mixture("moe_num_experts", "moe_k", "moe_intermediate_size")], 
        moe_num_shared_experts=lambda data, config: _shared_size(data, config) // expert_size(data),
        moe_layer_interval=whole("interleave_moe_layer_step", 1),
        moe_layer_start_index=whole("leading_dense_block_count", 0), use_bias=has("attn_q.bias"))  # fmt: skip

# Models with LayerNorm.
_COHERE: dict[str, Any] = {
    "more": [_layer_norm("layer_norm_eps")],
    "logit_scale": number("logit_scale", 1.0),
    **_QUERY_BIAS,
}
declare("command-r", "cohere", "CohereForCausalLM", **_COHERE, use_qk_norm=has("attn_q_norm.weight"))
declare("cohere2", "cohere2", "Cohere2ForCausalLM", **_COHERE, layer_types=partial(read_layer_types, period=4),
        sliding_window=window)  # fmt: skip
# Files do not say the window that some of these models have.
declare("starcoder2", "starcoder2", "Starcoder2ForCausalLM",
        layer=LAYER | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        more=[_layer_norm("norm_epsilon")], hidden_act="gelu_pytorch_tanh", use_bias=has("attn_q.bias"),
        sliding_window=None)  # fmt: skip
declare("nemotron", "nemotron", "NemotronForCausalLM", norm_offset=1.0, more=[_layer_norm("norm_eps")],
        rope_parameters=_rope(share=1.0), hidden_act="relu2", **_QUERY_BIAS, mlp_bias=has("ffn_up.bias"))  # fmt: skip
# The width of the feed-forward part is that of its tensors; files of Phi 2 say four times that of the model.
declare("phi2", "phi", "PhiForCausalLM", model=MODEL | {"output_norm": "model.final_layernorm"},
        layer=LAYER | {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        more=[_layer_norm("layer_norm_eps")], rope_parameters=_rope(share=1.0), hidden_act="gelu_new",
        intermediate_size=lambda data, config: data.shape("blk.0.ffn_up.weight")[0])  # fmt: skip
_STABLE_NORMS: Rules = {
    f"attn_{part}_norm.weight": Rule(f"self_attn.{part}_layernorm.norms.{{}}.weight") for part in ("q", "k")
}
declare("stablelm", "stablelm", "StableLmForCausalLM", layer=LAYER | _STABLE_NORMS, rope_parameters=_rope(share=1.0),
        more=[_layer_norm("layer_norm_eps")], use_qkv_bias=has("attn_q.bias"),
        use_parallel_residual=flag("use_parallel_residual", True), qk_layernorm=has("attn_q_norm.weight"))  # fmt: skip


def _in_turns(config: Config, rows: int) -> Tensor:
    """A row of the first tensor, then one of the second."""
    return torch.arange(rows).view(2, -1).T.flatten()


def _gpt_oss_rope(data: Metadata, config: Config) -> Config:
    rope = read_rope(data, config, 150000.0)
    return {"beta_fast": 32.0, "beta_slow": 1.0} | rope | {"truncate": False} if rope["rope_type"] == "yarn" else rope


_GPT_OSS: Rules = {
    **LAYER, **_AFTER_ATTENTION, "ffn_gate_inp": "mlp.router", "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_exps.weight": Rule(
        "mlp.experts.gate_up_proj", parts=("ffn_up_exps.weight",), rows=_in_turns, is_transposed=True
    ),
    "ffn_gate_exps.bias": Rule("mlp.experts.gate_up_proj_bias", parts=("ffn_up_exps.bias",), rows=_in_turns),
    "ffn_up_exps.weight": BEHIND, "ffn_up_exps.bias": BEHIND,
    "ffn_down_exps.weight": Rule("mlp.experts.down_proj", is_transposed=True),
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}  # fmt: skip
declare("gpt-oss", "gpt_oss", "GptOssForCausalLM", layer=_GPT_OSS, rope_parameters=_gpt_oss_rope, hidden_act=ABSENT,
        more=[mixture("num_local_experts")], sliding_window=window, attention_bias=True,
        intermediate_size=lambda data, config: data.shape("blk.0.ffn_gate_exps.weight")[1])  # fmt: skip

# Models of which most layers are short convolutions or Mamba 2.
_LFM: Rules = {
    **LAYER, "attn_norm": "operator_norm", "attn_output": "self_attn.out_proj", "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm", "ffn_norm": "ffn_norm", "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2", "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj", "shortconv.conv.weight": Rule("conv.conv.weight", shape=with_channel),
    "shortconv.conv.bias": "conv.conv.bias",
}  # fmt: skip
_LFM_MODEL: Rules = MODEL | {"token_embd_norm": "model.embedding_norm", "output_norm": "model.embedding_norm"}


def _attending(other: str) -> Read:
    """Types of layers: those without keys are of another type."""

    def read(data: Metadata, config: Config) -> list[str]:
        counts = data.wholes("attention.head_count_kv", config["num_hidden_layers"])
        return ["full_attention" if heads else other for heads in counts]

    return read


def _lfm(data: Metadata, config: Config) -> Config:
    return {"norm_eps": config.pop("rms_norm_eps"), "conv_L_cache": data.whole("shortconv.l_cache")}


_LFM_SETTINGS: dict[str, Any] = {
    "model": _LFM_MODEL, "hidden_act": ABSENT, "rope_parameters": _rope(1e6), "layer_types": _attending("conv"),
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
    "ffn_down_exps.weight": "block_sparse_moe.output_linear.weight", "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_shexp": Rule("shared_mlp.input_linear", parts=("ffn_up_shexp",)),
    "ffn_down_shexp": "shared_mlp.output_linear",
}  # fmt: skip
_SIZED = mixture("num_local_experts", size="intermediate_size")
declare("granite", "granite", "GraniteForCausalLM", layer=_PERMUTED, more=[_multipliers], **_BIASES)
# Those without shared experts are of the same kind as those with them.
declare("granitemoe", "granitemoeshared", "GraniteMoeSharedForCausalLM", layer=_PERMUTED | _MIXTURE,
        more=[_multipliers, _SIZED], **_QUERY_BIAS, shared_intermediate_size=_shared_size)  # fmt: skip


def _granite_experts(data: Metadata, config: Config) -> Config:
    """Few of the hybrids have experts."""
    if not data.whole("expert_count", 0):
        return {"num_local_experts": 0, "shared_intermediate_size": data.whole("feed_forward_length")}
    return {**_SIZED(data, config), "shared_intermediate_size": data.shape("blk.0.ffn_gate_shexp.weight")[0]}


def _mamba(data: Metadata, config: Config) -> Config:
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
        "mamba_conv_bias": bool(data.shapes("ssm_conv1d.bias")),
    }


_MAMBA: Rules = {
    "ssm_in": "mamba.in_proj", "ssm_conv1d.weight": Rule("mamba.conv1d.weight", shape=with_channel),
    "ssm_conv1d.bias": "mamba.conv1d.bias", "ssm_dt.bias": "mamba.dt_bias",
    "ssm_a": Rule("mamba.A_log", combine=decay_log, shape=flat), "ssm_d": Rule("mamba.D", shape=flat),
    "ssm_norm": Rule("mamba.norm", shape=flat), "ssm_out": "mamba.out_proj",
    "ffn_gate": Rule("shared_mlp.input_linear", parts=("ffn_up",)), "ffn_up": BEHIND,
    "ffn_down": "shared_mlp.output_linear",
}  # fmt: skip
declare("granitehybrid", "granitemoehybrid", "GraniteMoeHybridForCausalLM", layer=_PERMUTED | _MIXTURE | _MAMBA,
        more=[_multipliers, _mamba, _granite_experts], layer_types=_attending("linear_attention"),
        position_embedding_type=lambda data, config: "rope" if data.flag("rope.scaling.finetuned", False) else "nope",
        attention_bias=has_any("attn_q.bias"))  # fmt: skip

# Qwen 2 to 3.5. Gated delta nets have their heads of values in another order.
_EXPERTS: Rules = {
    **experts(), **shared_experts("mlp.shared_expert."), "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": Rule("mlp.shared_expert_gate", shape=lambda shape: (1, shape[-1])),
}  # fmt: skip


def _shared_expert(data: Metadata, config: Config) -> Config:
    return {"shared_expert_intermediate_size": size} if (size := _shared_size(data, config)) else {}


_QWEN_EXPERTS = [mixture("num_experts", size="moe_intermediate_size"), _shared_expert]
_ALL_SPARSE: dict[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": ()}
declare("qwen2", "qwen2", "Qwen2ForCausalLM")
declare("qwen3", "qwen3", "Qwen3ForCausalLM")
# llama.cpp divides by the sum of a token's weights for Qwen 3, and does not for Qwen 2.
for _version, _normalizes in ((2, False), (3, True)):
    declare(f"qwen{_version}moe", f"qwen{_version}_moe", f"Qwen{_version}MoeForCausalLM", layer=LAYER | _EXPERTS,
            more=_QWEN_EXPERTS, norm_topk_prob=_normalizes, **_ALL_SPARSE)  # fmt: skip


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
    **LAYER, **_AFTER_ATTENTION, "attn_qkv": Rule("linear_attn.in_proj_qkv", rows=_ALL),
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
    **LAYER, **_AFTER_ATTENTION, **_EXPERTS, "ssm_in": "linear_attn.in_proj_qkvz",
    "attn_qkv": Rule("linear_attn.in_proj_qkvz", parts=("attn_gate",), rows=_by_key_heads), "attn_gate": BEHIND,
    "ssm_conv1d": Rule("linear_attn.conv1d", shape=with_channel), "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_dt.bias": "linear_attn.dt_bias", "ssm_a": Rule("linear_attn.A_log", combine=decay_log),
    "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj",
}  # fmt: skip
_DELTA_NET: dict[str, Any] = {"norm_offset": 1.0, "plain_norms": ("ssm_norm",), "rope_parameters": _rope(share=1.0)}
declare("qwen35", "qwen3_5_text", "Qwen3_5ForCausalLM", layer=_DELTA, more=[_delta_sizes], **_DELTA_NET)
declare("qwen35moe", "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", layer=_DELTA | _EXPERTS,
        more=[_delta_sizes, *_QWEN_EXPERTS], **_DELTA_NET)  # fmt: skip
declare("qwen3next", "qwen3_next", "Qwen3NextForCausalLM", layer=_NEXT, more=[_delta_sizes, *_QWEN_EXPERTS],
        norm_topk_prob=True, **_ALL_SPARSE, **_DELTA_NET)  # fmt: skip
