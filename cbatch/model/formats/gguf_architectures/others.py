"""Models whose layers differ from Llama's in their norms, in their feed-forward part, or in their experts."""

from __future__ import annotations

import torch
from torch import Tensor

from cbatch.model.formats.gguf_architectures.architecture import (
    BEHIND,
    LAYER,
    MODEL,
    PERMUTED,
    Config,
    Rule,
    Rules,
    architecture,
    expert_size,
    experts,
    read_experts,
    read_layer_types,
    read_rope,
    shared_experts,
)
from cbatch.model.formats.gguf_architectures.metadata import Metadata

_AFTER: Rules = {
    **LAYER, "post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip


def _rope_and_silu(data: Metadata, config: Config) -> Config:
    return {"rope_parameters": read_rope(data, config), "hidden_act": "silu"}


def _layer_norm(data: Metadata, config: Config, key: str) -> Config:
    """The common settings, of a model with LayerNorm."""
    config.pop("rms_norm_eps", None)
    return {"rope_parameters": read_rope(data, config), key: data.number("attention.layer_norm_epsilon")}


@architecture("olmo", "olmo", "OlmoForCausalLM", layer=LAYER | PERMUTED, model=MODEL)
def olmo(data: Metadata, config: Config) -> Config:
    config.pop("rms_norm_eps", None)
    return _rope_and_silu(data, config) | {"clip_qkv": data.number("attention.clamp_kqv", 0.0) or None}


@architecture(
    "olmo2", "olmo3", "Olmo3ForCausalLM", layer=_AFTER, when=lambda data: data.has("attention.sliding_window")
)
def olmo3(data: Metadata, config: Config) -> Config:
    """Frequencies are scaled in full attention only."""
    rope = read_rope(data, config, 5e5)
    local = {"rope_type": "default", "rope_theta": data.number("rope.freq_base_swa", rope["rope_theta"])}
    return {
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
        "hidden_act": "silu",
        "sliding_window": data.whole("attention.sliding_window"),
        "layer_types": read_layer_types(data, config, 4),
    }


@architecture("olmo2", "olmo2", "Olmo2ForCausalLM", layer=_AFTER)
def olmo2(data: Metadata, config: Config) -> Config:
    return _rope_and_silu(data, config)


@architecture("olmoe", "olmoe", "OlmoeForCausalLM", layer=LAYER | experts() | {"ffn_gate_inp": "mlp.gate"})
def olmoe(data: Metadata, config: Config) -> Config:
    count, top_k = read_experts(data)
    mixture = {"num_experts": count, "num_experts_per_tok": top_k, "norm_topk_prob": False}
    return _rope_and_silu(data, config) | mixture | {"intermediate_size": expert_size(data)}


@architecture("exaone4", "exaone4", "Exaone4ForCausalLM", layer=_AFTER)
def exaone4(data: Metadata, config: Config) -> Config:
    window = data.whole("attention.sliding_window", 0) or None
    kinds = {"layer_types": read_layer_types(data, config, 4)} if window else {}
    return _rope_and_silu(data, config) | {"sliding_window": window, **kinds}


_GLM_NORMS: Rules = {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}


@architecture("glm4", "glm4", "Glm4ForCausalLM", layer=LAYER | _GLM_NORMS | {"ffn_up": "mlp.gate_up_proj"})
def glm4(data: Metadata, config: Config) -> Config:
    """Gate and up are one matrix."""
    return _rope_and_silu(data, config) | {"attention_bias": data.has_tensor("blk.0.attn_q.bias")}


_BIASED: Rules = {
    **LAYER, **experts(), **shared_experts("mlp.shared_experts."), "ffn_gate_inp": "mlp.gate",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}  # fmt: skip


@architecture("glm4moe", "glm4_moe", "Glm4MoeForCausalLM",
              layer=_BIASED | {"post_attention_norm": "post_attention_layernorm"})  # fmt: skip
def glm4_moe(data: Metadata, config: Config) -> Config:
    settings = _rope_and_silu(data, config) | _biased(data)
    return settings | {
        "attention_bias": data.has_tensor("blk.0.attn_q.bias"),
        "use_qk_norm": data.has_tensor("blk.0.attn_q_norm.weight"),
    }


@architecture("dots1", "dots1", "Dots1ForCausalLM", layer=_BIASED)
def dots1(data: Metadata, config: Config) -> Config:
    settings = {"attention_bias": data.has_tensor("blk.0.attn_q.bias"), "sliding_window": None}
    return _rope_and_silu(data, config) | _biased(data) | settings


def _biased(data: Metadata) -> Config:
    """Of experts that are chosen by sigmoids with a bias."""
    count, top_k = read_experts(data)
    if data.whole("expert_gating_func", 2) != 2:
        raise data.refused("chooses experts in another way than its architecture does")
    return {
        "n_routed_experts": count,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": expert_size(data),
        "n_shared_experts": data.whole("expert_shared_count", 0),
        "first_k_dense_replace": data.whole("leading_dense_block_count", 0),
        "routed_scaling_factor": data.number("expert_weights_scale", 1.0),
        "norm_topk_prob": data.flag("expert_weights_norm", False),
        "n_group": data.whole("expert_group_count", 1) or 1,
        "topk_group": data.whole("expert_group_used_count", 1) or 1,
    }


@architecture(
    "ernie4_5-moe", "ernie4_5_moe", "Ernie4_5_MoeForCausalLM",
    layer=_BIASED
    | {"exp_probs_b.bias": Rule("mlp.moe_statics.e_score_correction_bias", shape=lambda shape: (1, shape[-1]))},
)  # fmt: skip
def ernie_moe(data: Metadata, config: Config) -> Config:
    """Neighbours are rotated together in transformers, too."""
    count, top_k = read_experts(data)
    size = expert_size(data)
    shared = [data.file.tensors[name].shape[0] for name in data.file.tensors if name.endswith("ffn_gate_shexp.weight")]
    return _rope_and_silu(data, config) | {
        "moe_num_experts": count,
        "moe_k": top_k,
        "moe_intermediate_size": size,
        "moe_num_shared_experts": shared[0] // size if shared else 0,
        "moe_layer_interval": data.whole("interleave_moe_layer_step", 1),
        "moe_layer_start_index": data.whole("leading_dense_block_count", 0),
        "use_bias": data.has_tensor("blk.0.attn_q.bias"),
    }


@architecture("command-r", "cohere", "CohereForCausalLM")
def cohere(data: Metadata, config: Config) -> Config:
    settings = {"hidden_act": "silu", "logit_scale": data.number("logit_scale", 1.0)}
    return _layer_norm(data, config, "layer_norm_eps") | settings | {
        "use_qk_norm": data.has_tensor("blk.0.attn_q_norm.weight"),
        "attention_bias": data.has_tensor("blk.0.attn_q.bias"),
    }  # fmt: skip


@architecture("cohere2", "cohere2", "Cohere2ForCausalLM")
def cohere2(data: Metadata, config: Config) -> Config:
    settings = cohere(data, config)
    del settings["use_qk_norm"]
    kinds = read_layer_types(data, config, 4)
    return settings | {"sliding_window": data.whole("attention.sliding_window"), "layer_types": kinds}


@architecture("starcoder2", "starcoder2", "Starcoder2ForCausalLM",
              layer=LAYER | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"})  # fmt: skip
def starcoder2(data: Metadata, config: Config) -> Config:
    """Files do not say the window that some of these models have."""
    settings = {"hidden_act": "gelu_pytorch_tanh", "use_bias": data.has_tensor("blk.0.attn_q.bias")}
    return _layer_norm(data, config, "norm_epsilon") | settings | {"sliding_window": None}


@architecture("nemotron", "nemotron", "NemotronForCausalLM", norm_offset=1.0)
def nemotron(data: Metadata, config: Config) -> Config:
    settings = _layer_norm(data, config, "norm_eps")
    settings["rope_parameters"].setdefault("partial_rotary_factor", 1.0)
    return settings | {
        "hidden_act": "relu2",
        "attention_bias": data.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": data.has_tensor("blk.0.ffn_up.bias"),
    }


@architecture(
    "phi2", "phi", "PhiForCausalLM", model=MODEL | {"output_norm": "model.final_layernorm"},
    layer=LAYER | {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
)  # fmt: skip
def phi2(data: Metadata, config: Config) -> Config:
    """The width of the feed-forward part is that of its tensors; files say four times that of the model."""
    settings = _layer_norm(data, config, "layer_norm_eps")
    settings["rope_parameters"].setdefault("partial_rotary_factor", 1.0)
    return settings | {"hidden_act": "gelu_new", "intermediate_size": data.shape("blk.0.ffn_up.weight")[0]}


_STABLE_NORMS: Rules = {
    f"attn_{part}_norm.weight": Rule(f"self_attn.{part}_layernorm.norms.{{}}.weight") for part in ("q", "k")
}


@architecture("stablelm", "stablelm", "StableLmForCausalLM", layer=LAYER | _STABLE_NORMS)
def stablelm(data: Metadata, config: Config) -> Config:
    settings = _layer_norm(data, config, "layer_norm_eps")
    settings["rope_parameters"].setdefault("partial_rotary_factor", 1.0)
    return settings | {
        "hidden_act": "silu",
        "use_qkv_bias": data.has_tensor("blk.0.attn_q.bias"),
        "use_parallel_residual": data.flag("use_parallel_residual", True),
        "qk_layernorm": data.has_tensor("blk.0.attn_q_norm.weight"),
    }


def _in_turns(config: Config, rows: int) -> Tensor:
    """A row of the first tensor, then one of the second."""
    return torch.arange(rows).view(2, -1).T.flatten()


_GPT_OSS: Rules = {
    **LAYER, "post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router",
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_exps.weight": Rule(
        "mlp.experts.gate_up_proj", parts=("ffn_up_exps.weight",), rows=_in_turns, is_transposed=True
    ),
    "ffn_gate_exps.bias": Rule("mlp.experts.gate_up_proj_bias", parts=("ffn_up_exps.bias",), rows=_in_turns),
    "ffn_up_exps.weight": BEHIND, "ffn_up_exps.bias": BEHIND,
    "ffn_down_exps.weight": Rule("mlp.experts.down_proj", is_transposed=True),
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}  # fmt: skip


@architecture("gpt-oss", "gpt_oss", "GptOssForCausalLM", layer=_GPT_OSS)
def gpt_oss(data: Metadata, config: Config) -> Config:
    count, top_k = read_experts(data)
    rope = read_rope(data, config, 150000.0)
    if rope["rope_type"] == "yarn":
        rope |= {"beta_fast": 32.0, "beta_slow": 1.0} | rope | {"truncate": False}
    return {
        "rope_parameters": rope,
        "num_local_experts": count,
        "num_experts_per_tok": top_k,
        "intermediate_size": data.shape("blk.0.ffn_gate_exps.weight")[1],
        "sliding_window": data.whole("attention.sliding_window"),
        "attention_bias": True,
    }
