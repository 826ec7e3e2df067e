"""LFM 2 and 3: short convolutions between two gates, and attention in some layers."""

from __future__ import annotations

from cbatch.model.families.builder import Builder, HeadSizes, Layer, NormKind
from cbatch.model.families.decoder import family
from cbatch.model.families.mixers import gated_convolution
from cbatch.model.families.rotary import read_rotary
from cbatch.model.ops.all import Activation, Gate, Linear

_NAMES = ("w1", "w3", "w2")


@family("lfm2", "lfm2_moe")
def lfm2(model: Builder) -> None:
    """One has experts after a few dense layers."""
    config, has_experts = model.config, model.config.kind == "lfm2_moe"
    norm, sizes = NormKind(config.get("norm_eps", 1e-5)), model.head_sizes()
    rotary = model.rotary(read_rotary(config, sizes.head_dim, theta=1e6))
    kernel, bias = config.whole("conv_L_cache", 3), config.flag("conv_bias")
    config.ignore("conv_dim", "conv_dim_out", "conv_use_xavier_init", "block_use_swiglu", "block_norm_eps",
                  "block_dim", "block_use_xavier_init", "block_mlp_init_scale", "block_out_init_scale",
                  "num_heads")  # fmt: skip
    attends = config.get("full_attn_idxs") or list(model.numbers)
    kinds = ["full_attention" if i in attends else "conv" for i in model.numbers]
    dense = config.whole("num_dense_layers", 2) if has_experts else model.num_layers
    size = config.whole("intermediate_size") if has_experts else _feed_forward_size(model)
    activation, names = Activation("silu"), ("self_attn.q_layernorm", "self_attn.k_layernorm")
    model.embed()
    for layer, kind in zip(model.layers(), model.layer_types(kinds, ("full_attention", "conv")), strict=True):
        source = layer.norm(norm, "operator_norm")
        if kind == "conv":
            gated_convolution(layer, source, kernel, bias=bias)
        else:
            norms, out = layer.head_norms(norm, sizes, names), layer.out(sizes, "self_attn.out_proj")
            layer.attention(source, sizes, out=out, rotary=rotary, norms=norms)
        source = layer.norm(norm, "ffn_norm")
        if layer.number < dense:
            layer.feed_forward(source, size, activation, prefix="feed_forward.", names=_NAMES)
        else:
            _add_experts(layer, source, activation)
    model.head(norm("model.embedding_norm", model.hidden_size), tied_by_default=config.flag("tie_embedding", True))


def _feed_forward_size(model: Builder) -> int:
    """Two thirds of what the file says, up to a multiple."""
    config = model.config
    size = int(config.first("block_ff_dim", "intermediate_size"))
    factor, multiple = config.get("block_ffn_dim_multiplier", 1.0), config.whole("block_multiple_of", 256)
    if not config.get("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    if factor is None:
        return size
    return -(-int(factor * size) // multiple) * multiple


def _add_experts(layer: Layer, source: str, activation: Activation) -> None:
    config, prefix = layer.model.config, "feed_forward."
    experts, size = config.whole("num_experts"), config.whole("moe_intermediate_size")
    bias = layer.weight(prefix + "expert_bias", experts) if config.get("use_expert_bias", True) else None
    layer.route(
        source, experts, prefix + "gate", top_k=config.whole("num_experts_per_tok"), scores="sigmoid", choice_bias=bias,
        normalize=config.flag("norm_topk_prob", True), epsilon=1e-6,
        factor=config.number("routed_scaling_factor", 1.0),
    )  # fmt: skip
    layer.experts(source, experts, size, activation, prefix=prefix + "experts.", names=_NAMES)


@family("lfm3")
def lfm3(model: Builder) -> None:
    """Windows with rotations of their own, a gate for each head, and norms after each part."""
    config = model.config
    norm, sizes = NormKind(config.first("norm_eps", "rms_norm_eps")), model.head_sizes(head_dim=128)
    kernel, bias = config.whole("conv_L_cache", 7), config.flag("conv_bias")
    attention_bias, has_gate = config.flag("attention_bias"), config.flag("use_attention_gate", True)
    has_post_norms = config.flag("use_sandwich_norm", True)
    kinds = ["conv" if i % 2 or i == 0 else "full_attention" if i % 4 == 2 else "sliding_attention"
             for i in model.numbers]  # fmt: skip
    kinds = model.layer_types(kinds, ("full_attention", "sliding_attention", "conv"))
    window = int(config.get("sliding_window", 256) or 0)
    rotaries = {kind: _lfm3_rotary(model, sizes, kind) for kind in sorted(set(kinds) - {"conv"})}
    activation = Activation("silu")
    model.embed()
    for layer, kind in zip(model.layers(), kinds, strict=True):
        first, second = (
            layer.post_norm(norm, name) if has_post_norms else None for name in ("post_operator_norm", "post_ffn_norm")
        )
        source = layer.norm(norm, "operator_norm")
        if kind == "conv":
            gated_convolution(layer, source, kernel, bias=bias, post_norm=first)
        else:
            if has_gate:
                model.add(Linear(source, "gate", layer.matrix("self_attn.gate_proj", sizes.heads, model.hidden_size)))
            layer.attention(
                source, sizes, qkv_bias=attention_bias, out_bias=attention_bias, rotary=rotaries[kind],
                window=window if kind == "sliding_attention" else 0, norms=layer.head_norms(norm, sizes),
                gate=Gate("gate", "attended", width=sizes.cache.value_dim) if has_gate else None, post_norm=first,
            )  # fmt: skip
        source = layer.norm(norm, "ffn_norm")
        layer.feed_forward(
            source, config["intermediate_size"], activation, prefix="feed_forward.", names=_NAMES, post_norm=second
        )
    model.head(norm("model.embedding_norm", model.hidden_size), tied_by_default=True)


def _lfm3_rotary(model: Builder, sizes: HeadSizes, kind: str) -> int:
    defaults = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    }
    settings = None if model.config.get("rope_parameters") else defaults[kind]
    return model.rotary(read_rotary(model.config, sizes.head_dim, layer_type=kind, settings=settings))
