"""The weights that tensors of GGUF files may be, by their names in transformers. The program of a model has one.

The ending of a tensor, such as `weight`, follows a name unless transformers has none there; `{}` is the number of an
expert, or of a head.
"""

from __future__ import annotations

_JOINT = "mlp.experts.gate_up_proj experts.gate_up_proj feed_forward.experts.gate_up_proj block_sparse_moe.input_linear"
"""Gate and up of all experts in one weight."""

_SHARED = (
    "mlp.shared_experts", "mlp.shared_expert", "mlp.shared_mlp", "feed_forward.shared_expert", "mixer.shared_experts"
)  # fmt: skip
_RECURRENT = "mamba", "mixer", "linear_attn"

NAMES = {
    "token_embd": "model.embed_tokens gpt_neox.embed_in transformer.word_embeddings transformer.wte model.embeddings",
    "position_embd": "transformer.wpe",
    "token_embd_norm": "model.embedding_norm",
    "output_norm": "model.norm model.final_layernorm gpt_neox.final_layer_norm transformer.ln_f model.embedding_norm "
    "model.norm_f",
    "output": "lm_head embed_out",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "attn_norm": "input_layernorm attention_layernorm operator_norm ln_mlp ln_1 norm",
    "attn_norm_2": "ln_attn",
    "attn_q": "self_attn.q_proj mixer.q_proj",
    "attn_k": "self_attn.k_proj mixer.k_proj",
    "attn_v": "self_attn.v_proj mixer.v_proj",
    "attn_qkv": "self_attn.qkv_proj attention.query_key_value self_attention.query_key_value attn.c_attn "
    "linear_attn.in_proj_qkv linear_attn.in_proj_qkvz",
    "attn_gate": "self_attn.gate_proj linear_attn.in_proj_z",
    "attn_q_norm": "self_attn.q_norm self_attn.query_layernorm self_attn.q_layernorm self_attn.q_layernorm.norms.{}",
    "attn_k_norm": "self_attn.k_norm self_attn.key_layernorm self_attn.k_layernorm self_attn.k_layernorm.norms.{}",
    "attn_sinks": "self_attn.sinks",
    "attn_output": "self_attn.o_proj self_attn.dense attention.dense self_attention.dense attn.c_proj "
    "self_attn.out_proj mixer.o_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.kv_b_proj",
    "post_attention_norm": "post_self_attn_layernorm post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm pre_mlp_layernorm pre_ff_layernorm feedforward_layernorm ffn_norm ln_2 "
    "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj feed_forward.gate_proj feed_forward.w1 mixer.gate_proj shared_mlp.input_linear",
    "ffn_up": "mlp.up_proj mlp.gate_up_proj mlp.c_fc mlp.fc1 mlp.dense_h_to_4h feed_forward.up_proj feed_forward.w3 "
    "mixer.up_proj",
    "ffn_down": "mlp.down_proj mlp.c_proj mlp.fc2 mlp.dense_4h_to_h feed_forward.down_proj feed_forward.w2 "
    "mixer.down_proj shared_mlp.output_linear",
    "post_ffw_norm": "post_mlp_layernorm post_feedforward_layernorm",
    "ffn_gate_inp": "mlp.gate mlp.gate.wg mlp.router mlp.router.gate block_sparse_moe.gate "
    "block_sparse_moe.router.layer feed_forward.router feed_forward.gate router.proj mixer.gate",
    "exp_probs_b": "mlp.gate.e_score_correction_bias mlp.e_score_correction_bias mlp.expert_bias "
    "mlp.moe_statics.e_score_correction_bias block_sparse_moe.e_score_correction_bias feed_forward.expert_bias "
    "mixer.gate.e_score_correction_bias",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj block_sparse_moe.experts.{}.w1 feed_forward.experts.{}.w1 "
    f"mixer.experts.{{}}.gate_proj {_JOINT}",
    "ffn_up_exps": "mlp.experts.{}.up_proj block_sparse_moe.experts.{}.w3 feed_forward.experts.{}.w3 "
    "mixer.experts.{}.up_proj",
    "ffn_gate_up_exps": _JOINT,
    "ffn_down_exps": "mlp.experts.{}.down_proj block_sparse_moe.experts.{}.w2 feed_forward.experts.{}.w2 "
    "mixer.experts.{}.down_proj mlp.experts.down_proj experts.down_proj feed_forward.experts.down_proj "
    "block_sparse_moe.output_linear",
    **{
        f"ffn_{part}_shexp": " ".join([*(f"{prefix}.{part}_proj" for prefix in _SHARED), f"shared_mlp.{joint}"])
        for part, joint in (("gate", "input_linear"), ("up", "input_linear"), ("down", "output_linear"))
    },
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "layer_output_scale": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "shortconv.conv": "conv.conv",
    "ssm_in": "mamba.in_proj mixer.in_proj linear_attn.in_proj_qkvz",
    **{
        f"ssm_{theirs}": " ".join(f"{prefix}.{ours}" for prefix in _RECURRENT)
        for theirs, ours in {"conv1d": "conv1d", "dt": "dt_bias", "a": "A_log", "d": "D", "norm": "norm",
                             "out": "out_proj"}.items()
    },
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_ba": "linear_attn.in_proj_ba",
}  # fmt: skip
"""By the names of tensors without their ending, or with it where that is another than `weight` or `bias`."""
