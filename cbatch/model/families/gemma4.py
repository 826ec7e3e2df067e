"""Gemma 4: heads of two sizes, layers that share keys and values, an embedding for each layer, experts beside."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cbatch.model.config import UnsupportedConfig
from cbatch.model.families.builder import STACKED, Builder, HeadSizes, Layer, NormKind
from cbatch.model.families.decoder import every, family
from cbatch.model.families.gemma import WITH_PICTURES
from cbatch.model.families.rotary import read_rotary
from cbatch.model.ops.all import (
    RESIDUAL,
    Activation,
    Embed,
    Gate,
    HeadNorms,
    Linear,
    Matrix,
    Norm,
    Normalize,
    Route,
    Scale,
    Weight,
)

_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}


@family("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
def gemma4(model: Builder) -> None:
    """Full attention has larger heads. The last layers read the keys and values of earlier ones."""
    config, hidden, layers = model.config, model.hidden_size, model.num_layers
    norm, is_unified = NormKind(config.get("rms_norm_eps", 1e-6)), "unified" in config.kind
    config.expect("use_bidirectional_attention", None, "vision")
    kinds = model.layer_types([*every(6, layers)[:-1], "full_attention"])
    windows = model.windows(kinds, window=config.whole("sliding_window", 512))
    activation = model.activation("hidden_activation", default="gelu_pytorch_tanh")
    per_layer = int(config.get("hidden_size_per_layer_input", 0 if is_unified else 256) or 0)
    bias = config.flag("attention_bias")
    first_shared = layers - config.whole("num_kv_shared_layers", 0)
    is_doubled = config.flag("use_double_wide_mlp")
    config.ignore("vocab_size_per_layer_input", "cache_implementation", "global_head_dim", "num_global_key_value_heads")
    caches: dict[str, int] = {}
    model.layouts = WITH_PICTURES
    towers = "vision_tower|audio_tower|embed_vision|embed_audio|vision_embedder|multi_modal_projector"
    model.spare.append(rf"(model\.)?({towers})\..*")
    # Files may hold keys and values of layers that do not use them.
    model.spare += [rf"model\.layers\.{i}\.self_attn\.(k|v)_(proj|norm)\.weight" for i in range(first_shared, layers)]
    pictures = [config.get(f"{part}_token_id") for part in ("image", "video", "audio")]
    model.replaced_ids = {int(one): int(config.get("pad_token_id") or 0) for one in pictures if one is not None}
    model.embed(scale=hidden**0.5)
    if per_layer:
        _embed_per_layer(model, norm, per_layer)
    for layer, kind, window in zip(model.layers(), kinds, windows, strict=True):
        sizes, is_shared = _sizes(model, layer.number, kind), layer.number >= first_shared
        caches[kind] = _attention(
            layer, norm, sizes, kind=kind, window=window, bias=bias, shared=caches[kind] if is_shared else None
        )
        inner = config.whole("intermediate_size") * (2 if is_doubled and is_shared else 1)
        _feed_forward(layer, norm, inner, activation)
        if per_layer:
            gate = layer.matrix("per_layer_input_gate", per_layer, hidden)
            model.add(Linear(layer.unnormed(), "layer_input", gate, activation=replace(activation, gated=False)))
            model.add(Gate("per_layer", "layer_input", start=layer.number * per_layer, function="identity"))
            projection = layer.matrix("per_layer_projection", hidden, per_layer)
            layer.add_to_residual(
                "layer_input", projection, post_norm=layer.post_norm(norm, "post_per_layer_input_norm")
            )
        model.add(Scale(RESIDUAL, layer.weight("layer_scalar", 1)))
    softcap = config.get("final_logit_softcapping")
    model.head(norm("model.norm", hidden), tied_by_default=True, softcap=softcap)


def _sizes(model: Builder, number: int, kind: str) -> HeadSizes:
    """Newer files list the layers whose heads differ, older ones have other names for those of full attention."""
    config, is_full = model.config, kind == "full_attention"
    heads, head_dim = config.whole("num_attention_heads"), config.whole("head_dim", 256)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    listed: dict[str, Any] | None = config.get("per_layer_config")
    if listed is not None:
        own = next((value for key, value in listed.items() if int(key) == number), None) or {}
        if not own.keys() <= {"head_dim", "num_key_value_heads"}:
            raise UnsupportedConfig("its per_layer_config has other keys")
        head_dim, kv_heads = int(own.get("head_dim", head_dim)), int(own.get("num_key_value_heads", kv_heads))
    elif is_full:
        head_dim = config.whole("global_head_dim", 512)
        if config.get("attention_k_eq_v", False):
            kv_heads = int(config.get("num_global_key_value_heads") or kv_heads)
    return HeadSizes(heads, kv_heads, head_dim, head_dim, head_dim)


def _attention(
    layer: Layer, norm: NormKind, sizes: HeadSizes, *, kind: str, window: int, bias: bool, shared: int | None
) -> int:
    """Values are normed without weights; full attention may use keys as values. Returns the cache that it reads."""
    model, config = layer.model, layer.model.config
    rope = config.get("rope_parameters") or _ROPE
    rotary = model.rotary(read_rotary(config, sizes.head_dim, settings=rope[kind], part=1.0))
    norms = layer.head_norms(norm, sizes)
    qkv = layer.qkv(sizes, bias=bias)
    if shared is not None:
        norms, qkv = HeadNorms(norms.query), Matrix(qkv.parts[:1], qkv.biases[:1])
    else:
        norms = replace(norms, value=Norm("rms", norm.eps))
        if config.get("attention_k_eq_v", False) and kind == "full_attention":
            qkv = Matrix(qkv.parts[:2], qkv.biases[:2])
    return layer.attention(
        layer.norm(norm, "input_layernorm"), sizes, qkv=qkv, out_bias=bias, rotary=rotary, scale=1.0, window=window,
        norms=norms, shared_cache=shared, post_norm=layer.post_norm(norm, "post_attention_layernorm"),
    )  # fmt: skip


def _feed_forward(layer: Layer, norm: NormKind, inner: int, activation: Activation) -> None:
    model, config = layer.model, layer.model.config
    source, last = layer.norm(norm, "pre_feedforward_layernorm"), layer.post_norm(norm, "post_feedforward_layernorm")
    if not config.get("enable_moe_block", False):
        config.ignore("num_experts", "top_k_experts", "moe_intermediate_size")
        layer.feed_forward(source, inner, activation, post_norm=last)
        return
    layer.feed_forward(source, inner, activation, target="added", add=False)
    model.add(Normalize("added", "added", layer.post_norm(norm, "post_feedforward_layernorm_1")))
    experts, hidden = config.whole("num_experts"), model.hidden_size
    scale = replace(layer.weight("router.scale", hidden), factor=hidden**-0.5)
    model.add(Normalize(RESIDUAL, "router_input", Norm("rms", norm.eps, (scale,))))
    model.add(
        Route(
            "router_input", layer.matrix("router.proj", experts, hidden), config.whole("top_k_experts"), "softmax",
            normalize=True, expert_scales=layer.weight("router.per_expert_scale", experts),
        )
    )  # fmt: skip
    source = layer.norm(norm, "pre_feedforward_layernorm_2")
    size = config.whole("moe_intermediate_size")
    layer.experts(source, experts, size, activation, prefix="experts.", names=STACKED, stacked=True, target="mixed")
    model.add(Normalize("mixed", "added", layer.post_norm(norm, "post_feedforward_layernorm_2"), add=True))
    layer.add_normed(last)


def _embed_per_layer(model: Builder, norm: NormKind, size: int) -> None:
    """The addition of each layer to its own result: half from the token, half from the embedding, side by side."""
    hidden, columns, half = model.hidden_size, size * model.num_layers, 0.5**0.5
    vocabulary = int(model.config.get("vocab_size_per_layer_input", 262144))
    table = Weight("model.embed_tokens_per_layer.weight", (vocabulary, columns))
    model.add(Embed(table, half * size**0.5, target="per_layer"))
    model.add(Normalize(RESIDUAL, "normed", Norm("none", 0.0)))
    projection = Matrix((Weight("model.per_layer_model_projection.weight", (columns, hidden)),))
    model.add(Linear("normed", "projected", projection, factor=hidden**-0.5))
    weights = norm("model.per_layer_projection_norm", size)
    model.add(Normalize("projected", "per_layer", weights, add=True, width=size, groups=model.num_layers, factor=half))
