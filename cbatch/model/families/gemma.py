"""Gemma: scaled embeddings, norms on both sides of each part; Gemma 4 has heads of two sizes and more embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from cbatch.model.config import UnsupportedConfig
from cbatch.model.families.builder import STACKED, Builder, HeadSizes, Layer, NormKind
from cbatch.model.families.decoder import (
    Part,
    attention,
    decoder,
    every,
    family,
    feed_forward,
    head_norms,
    separate_qkv,
)
from cbatch.model.families.rotary import read_rotary
from cbatch.model.ops.all import RESIDUAL, Embed, Gate, HeadNorms, Linear, Matrix, Norm, Normalize, Weight


@family("gemma")
def gemma(model: Builder) -> None:
    """The first one still has Llama's order."""
    config = model.config
    config.expect("hidden_act", "gelu_pytorch_tanh", "gelu")
    config.expect("use_bidirectional_attention", None, False)
    model.read(norm=NormKind(config["rms_norm_eps"], offset=1.0))
    model.activation = replace(model.activation, name="gelu_tanh")
    attend = attention(bias=config.flag("attention_bias"))
    decoder(model, attend, feed_forward(), scale=model.hidden_size**0.5)


@family("gemma2", "vaultgemma", "gemma3_text")
def gemma2(model: Builder) -> None:
    """Windows in most layers, softcaps, and norms after each part, which VaultGemma leaves out again.

    Gemma 3 has norms of queries and keys instead of the softcap of scores, and other rotations in its windows. Tokens
    of EmbeddingGemma see later ones, too.
    """
    config, kind, is_third = model.config, model.kind, model.kind.startswith("gemma3")
    model.read(norm=NormKind(config.get("rms_norm_eps"), offset=1.0), has_rotary=False)
    windows = model.windows(every(config.whole("sliding_window_pattern", 6) if is_third else 2, model.num_layers))
    if is_third:
        rotary: Sequence[int | None] = model.read_rotaries(windows, config.number("rope_local_base_freq"))
    else:
        rotary = [model.read_rotary()] * model.num_layers
    if config.expect("use_bidirectional_attention", None, False, *[True] * is_third):
        model.is_causal, windows = False, [window // 2 + 1 if window else 0 for window in windows]
    scale = config.number("query_pre_attn_scalar") ** -0.5
    softcap = config.get("attn_logit_softcapping")
    final_softcap = config.get("final_logit_softcapping")
    if config.is_wrapped and is_third:  # whose head has no softcap
        image = config.get("image_token_index", config.get("image_token_id"))
        model.replaced_ids = {int(image): 0} if image is not None and int(image) >= model.vocab_size else {}
        final_softcap = None
    after = ("", "") if kind == "vaultgemma" else ("post_attention_layernorm", "post_feedforward_layernorm")
    attend = attention(
        bias=config.flag("attention_bias"), rotary=rotary, scale=scale,
        window=windows, softcap=None if is_third else softcap, norms=head_norms() if is_third else None, after=after[0],
    )  # fmt: skip
    decoder(
        model, attend, feed_forward(after=after[1]), scale=model.hidden_size**0.5,
        norms=("input_layernorm", "pre_feedforward_layernorm"), softcap=final_softcap,
    )  # fmt: skip


_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}


@family("gemma4_text", "gemma4_unified_text")
def gemma4(model: Builder) -> None:
    """Full attention has larger heads. The last layers read the keys and values of earlier ones."""
    config, hidden, layers = model.config, model.hidden_size, model.num_layers
    model.norm = NormKind(config.get("rms_norm_eps"))
    model.activation = model.read_activation()
    config.expect("use_bidirectional_attention", None, "vision")
    kinds = model.layer_types([*every(6, layers)[:-1], "full_attention"])
    windows = model.windows(kinds)
    per_layer = int(config.get("hidden_size_per_layer_input") or 0)
    bias = config.flag("attention_bias")
    first_shared = layers - config.whole("num_kv_shared_layers")
    is_doubled = config.flag("use_double_wide_mlp")
    config.ignore("vocab_size_per_layer_input", "global_head_dim", "num_global_key_value_heads")
    # Files may hold keys and values of layers that do not use them.
    model.spare += [rf"model\.layers\.{i}\.self_attn\.(k|v)_(proj|norm)\.weight" for i in range(first_shared, layers)]
    pictures = [config.get(f"{part}_token_id") for part in ("image", "video", "audio")]
    model.replaced_ids = {int(one): int(config.get("pad_token_id") or 0) for one in pictures if one is not None}
    attend = _attention(model, kinds, windows, first_shared, bias=bias)

    def feed(layer: Layer, source: str) -> None:
        is_wide = is_doubled and layer.number >= first_shared
        _feed_forward(layer, source, config.whole("intermediate_size") * (2 if is_wide else 1))
        if per_layer:
            gate = layer.matrix("per_layer_input_gate", per_layer, hidden)
            activation = replace(model.activation, gated=False)
            model.add(Linear(layer.norm(""), "layer_input", gate, activation=activation))
            model.add(Gate("per_layer", "layer_input", start=layer.number * per_layer, function="identity"))
            projection = layer.matrix("per_layer_projection", hidden, per_layer)
            layer.add_to_residual("layer_input", projection, after="post_per_layer_input_norm")
        scalar = replace(layer.weight("layer_scalar", 1), rows=torch.zeros(hidden, dtype=torch.int64))
        model.add(Normalize(RESIDUAL, RESIDUAL, Norm("none", 0.0, (scalar,))))

    decoder(
        model, attend, feed, norms=("input_layernorm", "pre_feedforward_layernorm"), scale=hidden**0.5,
        before=(lambda: _embed_per_layer(model, per_layer)) if per_layer else None,
        softcap=config.get("final_logit_softcapping"),
    )  # fmt: skip


def _sizes(model: Builder, number: int, kind: str) -> HeadSizes:
    """Newer files list the layers whose heads differ, older ones have other names for those of full attention."""
    config, is_full = model.config, kind == "full_attention"
    heads, head_dim = config.whole("num_attention_heads"), config.whole("head_dim")
    kv_heads = int(config.get("num_key_value_heads") or heads)
    listed: dict[str, Any] | None = config.get("per_layer_config")
    if listed is not None:
        own = next((value for key, value in listed.items() if int(key) == number), None) or {}
        if not own.keys() <= {"head_dim", "num_key_value_heads"}:
            raise UnsupportedConfig("its per_layer_config has other keys")
        head_dim, kv_heads = int(own.get("head_dim", head_dim)), int(own.get("num_key_value_heads", kv_heads))
    elif is_full:
        head_dim = config.whole("global_head_dim")
        if config.get("attention_k_eq_v"):
            kv_heads = int(config.get("num_global_key_value_heads") or kv_heads)
    return HeadSizes(heads, kv_heads, head_dim, head_dim, head_dim)


def _attention(model: Builder, kinds: list[str], windows: list[int], first_shared: int, *, bias: bool) -> Part:
    """Values are normed without weights; full attention may use keys as values.

    first_shared: from this layer on, they read the cache of the last one of their kind that has its own
    """
    config, sizes = model.config, [_sizes(model, number, kind) for number, kind in enumerate(kinds)]
    rope, is_full = config.get("rope_parameters") or _ROPE, [kind == "full_attention" for kind in kinds]
    last = {kind: number for number, kind in enumerate(kinds[:first_shared])}
    are_keys_values = config.get("attention_k_eq_v")

    def qkv(layer: Layer, sizes: HeadSizes) -> Matrix:
        whole = separate_qkv(bias=bias)(layer, sizes)
        used = 1 if layer.number >= first_shared else 2 if are_keys_values and is_full[layer.number] else 3
        return Matrix(whole.parts[:used], whole.biases[:used])

    def norms(layer: Layer, sizes: HeadSizes) -> HeadNorms:
        found = head_norms()(layer, sizes)
        if layer.number >= first_shared:
            return HeadNorms(found.query)
        return replace(found, value=Norm("rms", model.norm.eps))

    def rotary(number: int) -> int:
        return model.add_rotary(read_rotary(config, sizes[number].head_dim, settings=rope[kinds[number]], part=1.0))

    return attention(
        sizes=sizes, qkv=qkv, out_bias=bias, rotary=[rotary(number) for number in model.numbers], scale=1.0,
        window=windows, norms=norms, after="post_attention_layernorm",
        shared_cache=[last[kind] if number >= first_shared else None for number, kind in enumerate(kinds)],
    )  # fmt: skip


def _feed_forward(layer: Layer, source: str, inner: int) -> None:
    model, config = layer.model, layer.model.config
    if not config.get("enable_moe_block"):
        config.ignore("num_experts", "top_k_experts", "moe_intermediate_size")
        feed_forward(size=inner, after="post_feedforward_layernorm")(layer, source)
        return
    feed_forward(size=inner, target="added", add=False)(layer, source)
    model.add(Normalize("added", "added", layer.norm_of("post_feedforward_layernorm_1")))
    experts, hidden = config.whole("num_experts"), model.hidden_size
    scale = replace(layer.weight("router.scale", hidden), factor=hidden**-0.5)
    model.add(Normalize(RESIDUAL, "router_input", Norm("rms", model.norm.eps, (scale,))))
    top_k = layer.route(
        "router_input", experts, "router.proj", top_k=config.whole("top_k_experts"), scores="softmax",
        normalize=True, expert_scales=layer.weight("router.per_expert_scale", experts),
    )  # fmt: skip
    source, size = layer.norm("pre_feedforward_layernorm_2"), config.whole("moe_intermediate_size")
    layer.experts(source, experts, top_k, size, prefix="experts.", names=STACKED, stacked=True, target="mixed")
    model.add(Normalize("mixed", "added", layer.norm_of("post_feedforward_layernorm_2"), add=True))
    layer.add_normed("post_feedforward_layernorm")


def _embed_per_layer(model: Builder, size: int) -> None:
    """The addition of each layer to its own result: half from the token, half from the embedding, side by side."""
    hidden, columns, half = model.hidden_size, size * model.num_layers, 0.5**0.5
    vocabulary = int(model.config.get("vocab_size_per_layer_input"))
    table = Weight("model.embed_tokens_per_layer.weight", (vocabulary, columns))
    model.add(Embed(table, half * size**0.5, target="per_layer"))
    model.add(Normalize(RESIDUAL, "normed", Norm("none", 0.0)))
    projection = Matrix((Weight("model.per_layer_model_projection.weight", (columns, hidden)),))
    model.add(Linear("normed", "projected", projection, factor=hidden**-0.5))
    weights = model.norm("model.per_layer_projection_norm", size)
    model.add(Normalize("projected", "per_layer", weights, add=True, width=size, groups=model.num_layers, factor=half))
