"""Granite and its kin: embedding, residual, scores and logits have multipliers."""

from __future__ import annotations

from dataclasses import replace

from cbatch.engine.models.programs.builder import Builder, NormKind
from cbatch.engine.models.programs.families.registry import family
from cbatch.engine.models.programs.program import Rotary
from cbatch.engine.models.programs.rotary import read_rotary


@family("granite", "granite_swa", "granitemoe", "granitemoeshared", "granitemoe_swa")
def granite(model: Builder) -> None:
    """Those with windows have sinks, and bases of their own in each layer. Those with experts may have shared ones."""
    config, kind = model.config, model.config.kind
    has_windows, has_experts = kind.endswith("_swa"), "moe" in kind
    norm, sizes = NormKind(config["rms_norm_eps"]), model.head_sizes()
    rotaries = _rotaries(model, sizes.head_dim, has_windows)
    kinds = ["sliding_attention" if i % 4 else "full_attention" for i in model.numbers]
    windows = (
        model.windows(kinds, window=int(config.get("sliding_window", 128))) if has_windows else [0] * model.num_layers
    )
    activation, bias = model.activation("hidden_act", default="silu"), bool(config.get("attention_bias", False))
    mlp_bias = not has_experts and bool(config.get("mlp_bias", False))
    factor, inner = float(config.get("residual_multiplier", 1.0)), int(config["intermediate_size"])
    shared = int(config.get("shared_intermediate_size", 0)) if kind in ("granitemoeshared", "granitemoe_swa") else 0
    model.embed(scale=float(config.get("embedding_multiplier", 1.0)))
    for layer, rotary, window in zip(model.layers(), rotaries, windows, strict=True):
        source = layer.norm(norm, "input_layernorm")
        layer.attention(
            source, sizes, qkv_bias=bias, out_bias=bias, rotary=rotary, window=window, factor=factor,
            scale=float(config.get("attention_multiplier", 1.0)),
            sinks=layer.weight("self_attn.sinks", sizes.heads) if has_windows else None,
        )  # fmt: skip
        source = layer.norm(norm, "post_attention_layernorm")
        if not has_experts:
            layer.feed_forward(source, inner, activation, bias=mlp_bias, factor=factor)
            continue
        experts, prefix = int(config["num_local_experts"]), "block_sparse_moe."
        names = ("input_linear.weight", "output_linear.weight", "router.layer")
        if has_windows:
            names = ("experts.gate_up_proj", "experts.down_proj", "router")
        layer.route(
            source, experts, prefix + names[2], top_k=int(config["num_experts_per_tok"]), scores="softmax_of_chosen"
        )
        layer.stacked_experts(source, experts, inner, activation, prefix + names[0], prefix + names[1], factor=factor)
        if shared:
            layer.feed_forward(
                source, shared, activation, prefix="shared_mlp.", names=("input_linear", "output_linear"), factor=factor
            )
    logits = 1 / float(config.get("logits_scaling", 1.0))
    model.head(norm("model.norm", model.hidden_size), tied_by_default=kind == "granite_swa", factor=logits)


def _rotaries(model: Builder, head_dim: int, has_windows: bool) -> list[int | None]:
    config = model.config
    if not has_windows:
        return [model.rotary(read_rotary(config, head_dim))] * model.num_layers
    thetas = config.get("layer_rope_theta")
    if thetas is None:
        return [model.rotary(read_rotary(config, head_dim))] * model.num_layers
    return [model.rotary(_with_base(model, head_dim, theta)) if theta else None for theta in thetas]


def _with_base(model: Builder, head_dim: int, theta: float) -> Rotary:
    return replace(read_rotary(model.config, head_dim, base=theta))


@family("hyperclovax")
def hyperclovax(model: Builder) -> None:
    """Granite with norms after each part."""
    config = model.config
    norm, sizes = NormKind(config["rms_norm_eps"]), model.head_sizes()
    rotary, bias = model.rotary(read_rotary(config, sizes.head_dim)), bool(config.get("attention_bias", False))
    activation, mlp_bias = model.activation("hidden_act", default="silu"), bool(config.get("mlp_bias", False))
    has_post_norms, factor = bool(config.get("use_post_norm", True)), float(config.get("residual_multiplier", 1.0))
    scale = config.get("attention_multiplier")
    model.embed(scale=float(config.get("embedding_multiplier", 1.0)))
    for layer in model.layers():
        first, second = (layer.post_norm(norm, f"post_norm{i}") if has_post_norms else None for i in (1, 2))
        source = layer.norm(norm, "input_layernorm")
        layer.attention(
            source, sizes, qkv_bias=bias, out_bias=bias, rotary=rotary, scale=scale, factor=factor, post_norm=first
        )
        source = layer.norm(norm, "post_attention_layernorm")
        layer.feed_forward(
            source, config["intermediate_size"], activation, bias=mlp_bias, factor=factor, post_norm=second
        )
    model.head(norm("model.norm", model.hidden_size), factor=float(config.get("logits_scaling", 1.0)))
