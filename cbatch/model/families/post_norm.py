"""OLMo and its kin. From OLMo 2 on, norms come after each part, and nothing is normed before it."""

from __future__ import annotations

from cbatch.model.families.registry import family
from cbatch.model.programs.builder import Builder, NormKind
from cbatch.model.programs.rotary import read_rotary


@family("olmo")
def olmo(model: Builder) -> None:
    """LayerNorm without any weights, and queries, keys and values that are clipped."""
    config = model.config
    norm, sizes = NormKind(1e-5, "layer", has_weight=False), model.head_sizes()
    rotary, bias = model.rotary(read_rotary(config, sizes.head_dim)), bool(config.get("attention_bias", False))
    activation, clip = model.activation("hidden_act", default="silu"), float(config.get("clip_qkv") or 0.0)
    model.embed()
    for layer in model.layers():
        source = layer.norm(norm, "input_layernorm")
        layer.attention(source, sizes, qkv_bias=bias, out_bias=bias, rotary=rotary, clip=clip)
        source = layer.norm(norm, "post_attention_layernorm")
        layer.feed_forward(source, config["intermediate_size"], activation)
    model.head(norm("model.norm", model.hidden_size))


@family("olmo2", "olmo3", "exaone4")
def olmo2(model: Builder) -> None:
    """OLMo norms all queries together, EXAONE each by itself; OLMo 3 and EXAONE have windows.

    EXAONE rotates only in its windows, if it has any.
    """
    config, kind = model.config, model.config.kind
    norm, sizes = NormKind(config.get("rms_norm_eps", 1e-5)), model.head_sizes()
    activation, bias = model.activation("hidden_act", default="silu"), bool(config.get("attention_bias", False))
    windows = [0] * model.num_layers if kind == "olmo2" else _windows(model)
    if kind == "olmo3":
        config.expect("rope_scaling", None)
        names = ["sliding_attention" if window else "full_attention" for window in windows]
        rotaries = [model.rotary(read_rotary(config, sizes.head_dim, layer_type=name, theta=5e5)) for name in names]
    else:
        rotaries = [model.rotary(read_rotary(config, sizes.head_dim))] * model.num_layers
    model.embed()
    for layer, window, rotary in zip(model.layers(), windows, rotaries, strict=True):
        is_rotated = kind != "exaone4" or window or not any(windows)
        layer.attention(
            layer.unnormed(),
            sizes,
            qkv_bias=bias,
            out_bias=bias,
            rotary=rotary if is_rotated else None,
            window=window,
            post_norm=layer.post_norm(norm, "post_attention_layernorm"),
            norms=layer.head_norms(norm, sizes) if kind == "exaone4" else layer.row_norms(norm, sizes),
        )
        post_norm = layer.post_norm(norm, "post_feedforward_layernorm")
        layer.feed_forward(layer.unnormed(), config["intermediate_size"], activation, post_norm=post_norm)
    model.head(norm("model.norm", model.hidden_size))


def _windows(model: Builder) -> list[int]:
    config = model.config
    if config.get("sliding_window", 4096) is None:
        config.ignore("sliding_window_pattern", "layer_types")
        return [0] * model.num_layers
    pattern = config.get("sliding_window_pattern", 4)
    period = pattern if isinstance(pattern, int) else 4  # a word beside `layer_types`, which count
    kinds = ["sliding_attention" if (i + 1) % period else "full_attention" for i in model.numbers]
    return model.windows(kinds, window=int(config.get("sliding_window", 4096)))
