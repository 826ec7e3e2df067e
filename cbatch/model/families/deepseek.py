"""Multi-head latent attention."""

from __future__ import annotations

from cbatch.model.config import UnsupportedConfig
from cbatch.model.families.experts import add_biased_experts, num_experts
from cbatch.model.families.registry import family
from cbatch.model.programs.builder import Builder, NormKind
from cbatch.model.programs.program import RESIDUAL
from cbatch.model.programs.rotary import read_rotary, rope_settings, yarn_mscale


def _scale(model: Builder) -> float:
    """Of scores: YaRN makes them larger."""
    config = model.config
    scale = (int(config["qk_nope_head_dim"]) + int(config["qk_rope_head_dim"])) ** -0.5
    rope = rope_settings(config, None, 1e4, "rope_theta", None)
    kind, all_dims = rope.get("rope_type", rope.get("type", "default")), rope.get("mscale_all_dim")
    return float(scale * yarn_mscale(rope["factor"], all_dims) ** 2) if kind != "default" and all_dims else float(scale)


@family("deepseek_v2")
def deepseek_v2(model: Builder) -> None:
    """Experts by softmax, whose weights are not normalised."""
    config, norm = model.config, NormKind(model.config["rms_norm_eps"])
    rotary = model.rotary(read_rotary(config, int(config["qk_rope_head_dim"])))
    scale, bias, mlp_bias = (
        _scale(model),
        bool(config.get("attention_bias", False)),
        bool(config.get("mlp_bias", False)),
    )
    activation, size = model.activation("hidden_act", default="silu"), int(config["moe_intermediate_size"])
    experts, shared = num_experts(config, "n_routed_experts"), int(config.get("n_shared_experts") or 0)
    method = config.expect("topk_method", "greedy", "group_limited_greedy")
    grouped = method == "group_limited_greedy"
    groups, top_groups = (int(config["n_group"]), int(config["topk_group"])) if grouped else (1, 1)
    config.ignore(
        "n_group", "topk_group", "norm_topk_prob", "scoring_func", "moe_layer_freq", "ep_size", "intermediate_size"
    )
    dense = int(config.get("first_k_dense_replace", 0))
    model.embed()
    for layer in model.layers():
        source = layer.norm(norm, "input_layernorm")
        layer.mla(source, scale=scale, rotary=rotary, is_interleaved=True, bias=bias)
        source = layer.norm(norm, "post_attention_layernorm")
        if layer.number < dense:
            layer.feed_forward(source, config["intermediate_size"], activation, bias=mlp_bias)
            continue
        layer.route(
            source, experts, top_k=int(config["num_experts_per_tok"]), scores="softmax", groups=groups,
            top_groups=top_groups, factor=float(config.get("routed_scaling_factor", 1.0)),
        )  # fmt: skip
        layer.experts(source, experts, size, activation)
        if shared:
            layer.feed_forward(source, shared * size, activation, prefix="mlp.shared_experts.", bias=mlp_bias)
    model.head(norm("model.norm", model.hidden_size))


@family("deepseek_v3", "glm4_moe_lite", "axk1")
def deepseek_v3(model: Builder) -> None:
    """Experts by sigmoids, in groups. A.X K1 norms what they give."""
    config, kind = model.config, model.config.kind
    norm = NormKind(config["rms_norm_eps"])
    rotated = int(config["qk_rope_head_dim"])
    rotary = model.rotary(read_rotary(config, rotated, part=1.0 if kind == "glm4_moe_lite" else None))
    scale, bias = _scale(model), bool(config.get("attention_bias", False))
    is_interleaved = bool(config.get("rope_interleave", True))
    activation, size = model.activation("hidden_act", default="silu"), int(config["moe_intermediate_size"])
    experts = num_experts(config, "n_routed_experts")
    shared = int(config.first("n_shared_experts"))
    config.expect("topk_method", "noaux_tc", "greedy", None)
    config.ignore("num_mtp_layers", "num_nextn_predict_layers", "scoring_func", "ep_size", "intermediate_size")
    model.spare.append(rf"model\.layers\.{model.num_layers}\..*")
    is_sparse = _sparse_layers(model)
    model.embed()
    for layer in model.layers():
        source = layer.norm(norm, "input_layernorm")
        layer.mla(source, scale=scale, rotary=rotary, is_interleaved=is_interleaved, bias=bias)
        source = layer.norm(norm, "post_attention_layernorm")
        if not is_sparse[layer.number]:
            layer.feed_forward(source, config["intermediate_size"], activation)
            continue
        target = "added" if kind == "axk1" else RESIDUAL
        add_biased_experts(layer, source, experts, size, shared, activation, "mlp.gate.e_score_correction_bias", target)
        if kind == "axk1":
            layer.add_normed(layer.post_norm(norm, "post_mlp_layernorm"))
    model.head(norm("model.norm", model.hidden_size))


def _sparse_layers(model: Builder) -> list[bool]:
    config, kind = model.config, model.config.kind
    kinds = config.get("mlp_layer_types") if kind != "deepseek_v3" else None
    if kinds:
        return [one == "sparse" for one in kinds]
    dense = (
        1 if kind == "glm4_moe_lite" else int(config.get("first_k_dense_replace", 3 if kind == "deepseek_v3" else 1))
    )
    period = int(config.get("moe_layer_freq", 1))
    if kind != "axk1" and period != 1:
        raise UnsupportedConfig(f"its moe_layer_freq is {period}")
    config.ignore("first_k_dense_replace")
    return [layer >= dense and layer % period == 0 for layer in model.numbers]


@family("minicpm3", "youtu")
def minicpm3(model: Builder) -> None:
    """Without experts. MiniCPM scales embedding, residual and logits."""
    config, is_minicpm = model.config, model.config.kind == "minicpm3"
    norm, hidden = NormKind(config["rms_norm_eps"]), model.hidden_size
    rotary = model.rotary(read_rotary(config, int(config["qk_rope_head_dim"])))
    scale, bias = _scale(model), bool(config.get("attention_bias", False))
    mlp_bias = is_minicpm and bool(config.get("mlp_bias", False))
    activation = model.activation("hidden_act", default="silu")
    factor = logits = embedding = 1.0
    if is_minicpm:
        depth = config.get("scale_depth", 1.4)
        factor = 1.0 if depth is None else float(depth) / model.num_layers**0.5
        embedding, logits = (
            float(config.get("scale_emb", 12)),
            float(config.get("dim_model_base", 256) or hidden) / hidden,
        )
    is_interleaved = not is_minicpm and bool(config.get("rope_interleave", True))
    model.embed(scale=embedding)
    for layer in model.layers():
        source = layer.norm(norm, "input_layernorm")
        layer.mla(source, scale=scale, rotary=rotary, is_interleaved=is_interleaved, bias=bias, factor=factor)
        source = layer.norm(norm, "post_attention_layernorm")
        layer.feed_forward(source, config["intermediate_size"], activation, bias=mlp_bias, factor=factor)
    model.head(norm("model.norm", hidden), tied_by_default=True, factor=logits)
