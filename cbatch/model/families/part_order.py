"""Other orders of norms and parts: OLMo and GLM with norms after each part, Cohere with both parts after one norm."""

from __future__ import annotations

from cbatch.model.families.builder import Builder, HeadSizes, Layer, NormKind, deinterleaved
from cbatch.model.families.decoder import attention, decoder, every, family, feed_forward, head_norms, row_norms
from cbatch.model.families.rotary import read_rotary
from cbatch.model.ops.all import HeadNorms, Matrix, Norm, Weight


@family("olmo")
def olmo(model: Builder) -> None:
    """LayerNorm without any weights, and queries, keys and values that are clipped."""
    config = model.config
    norm, sizes = NormKind(1e-5, "layer", has_weight=False), model.head_sizes()
    rotary, bias = model.rotary(read_rotary(config, sizes.head_dim)), config.flag("attention_bias")
    activation, clip = model.activation("hidden_act", default="silu"), float(config.get("clip_qkv") or 0.0)
    attend = attention(sizes, bias=bias, rotary=rotary, clip=clip)
    decoder(model, norm, attend, feed_forward(activation))


@family("olmo2", "olmo3", "exaone4")
def olmo2(model: Builder) -> None:
    """OLMo norms all queries together, EXAONE each by itself; OLMo 3 and EXAONE have windows.

    EXAONE rotates only in its windows, if it has any.
    """
    config, kind = model.config, model.config.kind
    norm, sizes = NormKind(config.get("rms_norm_eps", 1e-5)), model.head_sizes()
    activation, bias = model.activation("hidden_act", default="silu"), config.flag("attention_bias")
    windows = [0] * model.num_layers if kind == "olmo2" else _windows(model)
    if kind == "olmo3":
        config.expect("rope_scaling", None)
        names = ["sliding_attention" if window else "full_attention" for window in windows]
        rotaries = [model.rotary(read_rotary(config, sizes.head_dim, layer_type=name, theta=5e5)) for name in names]
    else:
        rotaries = [model.rotary(read_rotary(config, sizes.head_dim))] * model.num_layers
    is_rotated = [kind != "exaone4" or bool(window) or not any(windows) for window in windows]
    attend = attention(
        sizes, bias=bias, window=windows,
        rotary=[one if rotated else None for one, rotated in zip(rotaries, is_rotated, strict=True)],
        norms=head_norms(norm, sizes) if kind == "exaone4" else row_norms(norm, sizes),
        after=(norm, "post_attention_layernorm"),
    )  # fmt: skip
    feed = feed_forward(activation, after=(norm, "post_feedforward_layernorm"))
    decoder(model, norm, attend, feed, norms=("", ""))


def _windows(model: Builder) -> list[int]:
    config = model.config
    if config.get("sliding_window", 4096) is None:
        config.ignore("sliding_window_pattern", "layer_types")
        return [0] * model.num_layers
    pattern = config.get("sliding_window_pattern", 4)
    period = pattern if isinstance(pattern, int) else 4  # a word beside `layer_types`, which count
    return model.windows(every(period, model.num_layers), window=config.whole("sliding_window", 4096))


@family("cohere", "cohere2")
def cohere(model: Builder) -> None:
    """LayerNorm without bias, neighbours are rotated, logits scaled. Cohere 2 rotates only in its windows."""
    config, is_second = model.config, model.config.kind == "cohere2"
    norm, sizes = NormKind(config.get("layer_norm_eps", 1e-5), "layer"), model.head_sizes(is_interleaved=True)
    rotary = model.rotary(read_rotary(config, sizes.head_dim, theta=1e4 if is_second else 5e5))
    feed, bias = feed_forward(model.activation("hidden_act", default="silu")), config.flag("attention_bias")
    kinds = every(config.whole("sliding_window_pattern", 4), model.num_layers)
    windows = model.windows(kinds) if is_second else [0] * model.num_layers
    config.ignore(
        "use_parallel_block", "use_parallel_embedding", "order_of_interleaved_layers", "position_embedding_type",
        "rotary_pct", "use_embedding_sharing", "use_gated_activation", "layer_switch", "cache_implementation",
        "_sliding_window_pattern",
    )  # fmt: skip
    has_norms = not is_second and config.flag("use_qk_norm")
    model.embed()
    for layer, window in zip(model.layers(), windows, strict=True):
        source = layer.norm(norm, "input_layernorm")
        layer.attention(
            source, sizes, qkv_bias=bias, out_bias=bias, rotary=rotary if window or not is_second else None,
            window=window, norms=_norms(layer, norm, sizes) if has_norms else None,
        )  # fmt: skip
        feed(layer, source)
    factor = config.number("logit_scale", 0.0625)
    model.head(norm("model.norm", model.hidden_size), tied_by_default=True, factor=factor)


def _norms(layer: Layer, kind: NormKind, sizes: HeadSizes) -> HeadNorms:
    """Each head has weights of its own."""

    def norm(part: str, heads: int) -> Norm:
        rows = deinterleaved(heads, sizes.head_dim, sizes.rotary_dim)
        name = f"{layer.prefix}self_attn.{part}_norm.weight"
        return Norm(kind.kind, kind.eps, (Weight(name, (heads, sizes.head_dim), is_flat=True, rows=rows),))

    return HeadNorms(norm("q", sizes.heads), norm("k", sizes.kv_heads))


_NAMES = ("gate_up_proj", "down_proj")


@family("phi3")
def phi3(model: Builder) -> None:
    """Queries, keys and values are one matrix, too. A context with long frequencies ends where the first one did."""
    config = model.config
    norm, sizes = NormKind(config["rms_norm_eps"]), model.head_sizes()
    rotary = model.rotary(read_rotary(config, sizes.head_dim, part=1.0, aliases={"su": "longrope", "yarn": "longrope"}))
    activation, window = model.activation("hidden_act", default="silu"), int(config.get("sliding_window") or 0)

    def qkv(layer: Layer) -> Matrix:
        return layer.matrix("self_attn.qkv_proj", sum(sizes.columns), model.hidden_size)

    attend = attention(sizes, qkv=qkv, rotary=rotary, window=window)
    decoder(model, norm, attend, feed_forward(activation, names=_NAMES))


@family("glm", "glm4")
def glm(model: Builder) -> None:
    """Half of each head is rotated, neighbours together. GLM 4 has norms after each part, too."""
    config, is_fourth = model.config, model.config.kind == "glm4"
    norm, part = NormKind(config["rms_norm_eps"]), 0.5
    head_dim = model.head_sizes().head_dim
    rotary = read_rotary(config, head_dim, part=part)
    sizes = model.head_sizes(part=2 * len(rotary.inv_freq) / head_dim, is_interleaved=True)
    index, bias = model.rotary(rotary), config.flag("attention_bias", True)
    activation = model.activation("hidden_act", default="silu")
    after = ("post_self_attn_layernorm", "post_mlp_layernorm") if is_fourth else ("", "")
    attend = attention(sizes, qkv_bias=bias, rotary=index, after=(norm, after[0]))
    decoder(model, norm, attend, feed_forward(activation, names=_NAMES, after=(norm, after[1])))
