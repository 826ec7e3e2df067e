"""Granite and its kin: embedding, residual, scores and logits have multipliers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from cbatch.model.config import UnsupportedConfig
from cbatch.model.families.registry import family
from cbatch.model.programs.builder import Builder, Layer, NormKind
from cbatch.model.programs.mixers import ScanSizes, mamba2
from cbatch.model.programs.program import Activation, Rotary
from cbatch.model.programs.rotary import read_rotary

_NAMES = ("input_linear.weight", "output_linear.weight", "router.layer")
"""Of the experts of most of them: the matrices up to the activation, those after it, and the router."""


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
    factor = float(config.get("residual_multiplier", 1.0))
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
            layer.feed_forward(source, config["intermediate_size"], activation, bias=mlp_bias, factor=factor)
            continue
        names = ("experts.gate_up_proj", "experts.down_proj", "router") if has_windows else _NAMES
        _add_experts(layer, source, activation, names, factor)
        if shared:
            layer.feed_forward(
                source, shared, activation, prefix="shared_mlp.", names=("input_linear", "output_linear"), factor=factor
            )
    logits = 1 / float(config.get("logits_scaling", 1.0))
    model.head(norm("model.norm", model.hidden_size), tied_by_default=kind == "granite_swa", factor=logits)


def _add_experts(layer: Layer, source: str, activation: Activation, names: tuple[str, str, str], factor: float) -> None:
    """names: of the matrices up to the activation, of those after it, and of the router"""
    config, prefix = layer.model.config, "block_sparse_moe."
    experts, size = int(config["num_local_experts"]), int(config["intermediate_size"])
    up, down, router = (prefix + name for name in names)
    layer.route(source, experts, router, top_k=int(config["num_experts_per_tok"]), scores="softmax_of_chosen")
    layer.stacked_experts(source, experts, size, activation, up, down, factor=factor)


@family("granitemoehybrid")
def granite_hybrid(model: Builder) -> None:
    """Most layers are of Mamba 2; positions are encoded in a few models only, and few have experts."""
    config = model.config
    norm, sizes = NormKind(config.get("rms_norm_eps", 1e-6)), model.head_sizes()
    is_rotated = config.expect("position_embedding_type", None, "rope", "nope") == "rope"
    rotary = model.rotary(read_rotary(config, sizes.head_dim)) if is_rotated else None
    config.ignore("rope_parameters", "rope_scaling", "rope_theta", "intermediate_size", "mamba_chunk_size",
                  "num_experts_per_tok", "init_method", "layers_block_type")  # fmt: skip
    config.expect("normalization_function", "rmsnorm")
    config.expect("hidden_act", "silu")  # also after the convolutions
    activation, bias = Activation("silu"), bool(config.get("attention_bias", False))
    factor, has_experts = float(config.get("residual_multiplier", 1.0)), int(config.get("num_local_experts", 8)) > 0
    scan, attends = expanded_scan(model), _attending_layers(model)
    model.embed(scale=float(config.get("embedding_multiplier", 1.0)))
    for layer, is_attention in zip(model.layers(), attends, strict=True):
        source = layer.norm(norm, "input_layernorm")
        if is_attention:
            scale = float(config.get("attention_multiplier", 1.0))
            layer.attention(source, sizes, qkv_bias=bias, out_bias=bias, rotary=rotary, factor=factor, scale=scale)
        else:
            mamba2(
                layer, source, scan, norm(layer.prefix + "mamba.norm", scan.inner),
                bias=bool(config.get("mamba_proj_bias", False)), conv_bias=bool(config.get("mamba_conv_bias", True)),
                factor=factor, norm_groups=scan.groups,
            )  # fmt: skip
        source = layer.norm(norm, "post_attention_layernorm")
        if has_experts:
            _add_experts(layer, source, activation, _NAMES, factor)
        layer.feed_forward(
            source, config.get("shared_intermediate_size", 1024), activation, prefix="shared_mlp.",
            names=("input_linear", "output_linear"), factor=factor,
        )  # fmt: skip
    model.head(norm("model.norm", model.hidden_size), factor=1 / float(config.get("logits_scaling", 1.0)))


def _attending_layers(model: Builder) -> list[bool]:
    """Older files call the layers otherwise."""
    known = ("full_attention", "attention", "linear_attention", "mamba")
    return [kind.endswith("attention") and kind != known[2]
            for kind in model.layer_types([known[2]] * model.num_layers, known)]  # fmt: skip


def expanded_scan(model: Builder) -> ScanSizes:
    """The heads of Mamba's layers, which share a multiple of the hidden size."""
    config = model.config
    inner, heads = int(config.get("mamba_expand", 2)) * model.hidden_size, int(config.get("mamba_n_heads", 128))
    if config.kind == "falcon_h1":
        inner = int(config.get("mamba_d_ssm", 1024) or inner)
    head_dim = config.get("mamba_d_head", "auto")
    low, high = map(_number, config.get("time_step_limit") or (0.0, math.inf))
    sizes = ScanSizes(
        heads, inner // heads if head_dim == "auto" else int(head_dim), int(config.get("mamba_n_groups", 1)),
        int(config.get("mamba_d_state", 256)), int(config.get("mamba_d_conv", 4)), (low, high),
    )  # fmt: skip
    if sizes.inner != inner:
        raise UnsupportedConfig("the heads of its recurrent layers do not fit its size")
    return sizes


def _number(value: Any) -> float:
    """Files that transformers saves name infinity, for which JSON has no number."""
    return float(value["__float__"] if isinstance(value, dict) else value)


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
