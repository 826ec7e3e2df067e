"""Cohere: attention and feed-forward part side by side, after one norm."""

from __future__ import annotations

from cbatch.model.families.builder import Builder, HeadSizes, Layer, NormKind, deinterleaved
from cbatch.model.families.decoder import every, feed_forward
from cbatch.model.families.registry import family
from cbatch.model.families.rotary import read_rotary
from cbatch.model.ops.all import HeadNorms, Norm, Weight


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
