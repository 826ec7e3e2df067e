"""Granite and its kin: embedding, residual, scores and logits have multipliers."""

from __future__ import annotations

import math
from typing import Any

from cbatch.model.config import UnsupportedConfig
from cbatch.model.families.builder import Builder, Layer, NormKind
from cbatch.model.families.decoder import attention, decoder, every, family, feed_forward, read_common, sinks
from cbatch.model.families.mixers import ScanSizes, mamba2
from cbatch.model.families.rotary import read_rotary
from cbatch.model.ops.all import Activation

_NAMES = ("input_linear.weight", "output_linear.weight", "router.layer")
"""Of the experts of most of them: the matrices up to the activation, those after it, and the router."""

_SHARED: dict[str, Any] = {"prefix": "shared_mlp.", "names": ("input_linear", "output_linear")}
"""Of the feed-forward part beside the experts."""


@family("granite", "granite_swa", "granitemoe", "granitemoeshared", "granitemoe_swa")
def granite(model: Builder) -> None:
    """Those with windows have sinks, and bases of their own in each layer. Those with experts may have shared ones."""
    config, kind = model.config, model.config.kind
    has_windows, has_experts = kind.endswith("_swa"), "moe" in kind
    norm, sizes = NormKind(config["rms_norm_eps"]), model.head_sizes()
    rotaries = _rotaries(model, sizes.head_dim, has_windows)
    kinds, window = every(4, model.num_layers, at=0), config.whole("sliding_window", 128) if has_windows else 0
    windows = model.windows(kinds, window=window) if has_windows else [0] * model.num_layers
    activation, bias = model.activation("hidden_act", default="silu"), config.flag("attention_bias")
    factor = config.number("residual_multiplier", 1.0)
    mlp = feed_forward(activation, bias=not has_experts and config.flag("mlp_bias"), factor=factor)
    shared = config.whole("shared_intermediate_size", 0) if kind in ("granitemoeshared", "granitemoe_swa") else 0
    names = ("experts.gate_up_proj", "experts.down_proj", "router") if has_windows else _NAMES

    attend = attention(
        sizes, bias=bias, rotary=rotaries, window=windows, factor=factor,
        scale=config.number("attention_multiplier", 1.0), sinks=sinks(sizes) if has_windows else None,
    )  # fmt: skip

    def feed(layer: Layer, source: str) -> None:
        if not has_experts:
            mlp(layer, source)
            return
        _add_experts(layer, source, activation, names, factor)
        if shared:
            layer.feed_forward(source, shared, activation, factor=factor, **_SHARED)

    decoder(
        model, norm, attend, feed, scale=config.number("embedding_multiplier", 1.0),
        tied_by_default=kind == "granite_swa", factor=1 / config.number("logits_scaling", 1.0),
    )  # fmt: skip


def _add_experts(layer: Layer, source: str, activation: Activation, names: tuple[str, str, str], factor: float) -> None:
    """names: of the matrices up to the activation, of those after it, and of the router"""
    config, prefix = layer.model.config, "block_sparse_moe."
    experts, size = config.whole("num_local_experts"), config.whole("intermediate_size")
    *matrices, router = names
    layer.route(source, experts, prefix + router, top_k=config.whole("num_experts_per_tok"), scores="softmax_of_chosen")
    layer.experts(source, experts, size, activation, prefix=prefix, names=tuple(matrices), stacked=True, factor=factor)


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
    activation, bias = Activation("silu"), config.flag("attention_bias")
    factor, has_experts = config.number("residual_multiplier", 1.0), config.whole("num_local_experts", 8) > 0
    scan, attends = expanded_scan(model), _attending_layers(model)

    def mix(layer: Layer, source: str) -> None:
        if attends[layer.number]:
            scale = config.number("attention_multiplier", 1.0)
            layer.attention(source, sizes, qkv_bias=bias, out_bias=bias, rotary=rotary, factor=factor, scale=scale)
        else:
            expanded_mamba(layer, source, scan, norm, factor=factor)

    def feed(layer: Layer, source: str) -> None:
        if has_experts:
            _add_experts(layer, source, activation, _NAMES, factor)
        layer.feed_forward(source, config.get("shared_intermediate_size", 1024), activation, factor=factor, **_SHARED)

    scale, logits = config.number("embedding_multiplier", 1.0), 1 / config.number("logits_scaling", 1.0)
    decoder(model, norm, mix, feed, scale=scale, factor=logits)


def expanded_mamba(layer: Layer, source: str, scan: ScanSizes, norm: NormKind, *, factor: float = 1.0) -> None:
    """Mamba 2 with the biases that the config says, and a norm of each group."""
    config = layer.model.config
    mamba2(
        layer, source, scan, norm(layer.prefix + "mamba.norm", scan.inner), norm_groups=scan.groups, factor=factor,
        bias=config.flag("mamba_proj_bias"), conv_bias=config.flag("mamba_conv_bias", True),
    )  # fmt: skip


def _attending_layers(model: Builder) -> list[bool]:
    """Older files call the layers otherwise."""
    known = ("full_attention", "attention", "linear_attention", "mamba")
    return [kind.endswith("attention") and kind != known[2]
            for kind in model.layer_types([known[2]] * model.num_layers, known)]  # fmt: skip


def expanded_scan(model: Builder) -> ScanSizes:
    """The heads of Mamba's layers, which share a multiple of the hidden size."""
    config = model.config
    inner, heads = config.whole("mamba_expand", 2) * model.hidden_size, config.whole("mamba_n_heads", 128)
    if config.kind == "falcon_h1":
        inner = int(config.get("mamba_d_ssm", 1024) or inner)
    head_dim = config.get("mamba_d_head", "auto")
    low, high = map(_number, config.get("time_step_limit") or (0.0, math.inf))
    sizes = ScanSizes(
        heads, inner // heads if head_dim == "auto" else int(head_dim), config.whole("mamba_n_groups", 1),
        config.whole("mamba_d_state", 256), config.whole("mamba_d_conv", 4), (low, high),
    )  # fmt: skip
    if sizes.inner != inner:
        raise UnsupportedConfig("the heads of its recurrent layers do not fit its size")
    return sizes


def _number(value: Any) -> float:
    """Files that transformers saves name infinity, for which JSON has no number."""
    return float(value["__float__"] if isinstance(value, dict) else value)


def _rotaries(model: Builder, head_dim: int, has_windows: bool) -> list[int | None]:
    thetas = model.config.get("layer_rope_theta") if has_windows else None
    if thetas is None:
        return [model.rotary(read_rotary(model.config, head_dim))] * model.num_layers
    return [model.rotary(read_rotary(model.config, head_dim, base=theta)) if theta else None for theta in thetas]


@family("hyperclovax")
def hyperclovax(model: Builder) -> None:
    """Granite with norms after each part."""
    config = model.config
    norm, sizes, rotary, activation = read_common(model)
    bias, mlp_bias, scale = config.flag("attention_bias"), config.flag("mlp_bias"), config.get("attention_multiplier")
    after = ("post_norm1", "post_norm2") if config.flag("use_post_norm", True) else ("", "")
    factor = config.number("residual_multiplier", 1.0)
    attend = attention(sizes, bias=bias, rotary=rotary, scale=scale, factor=factor, after=(norm, after[0]))
    feed = feed_forward(activation, bias=mlp_bias, factor=factor, after=(norm, after[1]))
    embedding, logits = config.number("embedding_multiplier", 1.0), config.number("logits_scaling", 1.0)
    decoder(model, norm, attend, feed, scale=embedding, factor=logits)
