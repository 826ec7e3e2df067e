"""OLMo and its kin. From OLMo 2 on, norms come after each part, and nothing is normed before it."""

from __future__ import annotations

from cbatch.model.families.builder import Builder, NormKind
from cbatch.model.families.decoder import attention, decoder, every, feed_forward, head_norms, row_norms
from cbatch.model.families.registry import family
from cbatch.model.families.rotary import read_rotary


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
