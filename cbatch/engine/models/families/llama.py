"""Llama and its kin: norm, attention with rotary positions, norm, gated feed-forward part."""

from __future__ import annotations

from cbatch.engine.models.builder import Builder, NormKind
from cbatch.engine.models.config_reader import UnsupportedConfig
from cbatch.engine.models.families.registry import family
from cbatch.engine.models.rotary import read_rotary


@family("llama", "mistral", "qwen2", "qwen3", "ministral", "cwm", "internlm3", "iquestcoder")
def llama(model: Builder) -> None:
    """Qwen 2 has biases, Qwen 3 norms of queries and keys, Mistral and Qwen windows."""
    config, kind = model.config, model.config.kind
    norm, sizes = NormKind(config["rms_norm_eps"]), model.head_sizes()
    rotary = model.rotary(read_rotary(config, sizes.head_dim))
    activation = model.activation("hidden_act", default="silu")
    has_bias = bool(config.get("attention_bias", False))
    model.embed()
    for layer, window in zip(model.layers(), _windows(model), strict=True):
        head_norms = {}
        if kind == "qwen3":
            head_norms["query_norm"] = layer.head_norm(norm, "self_attn.q_norm", sizes.heads, sizes.head_dim)
            head_norms["key_norm"] = layer.head_norm(norm, "self_attn.k_norm", sizes.kv_heads, sizes.head_dim)
        layer.attention(
            layer.norm(norm, "input_layernorm"),
            sizes,
            qkv=layer.qkv(sizes, bias=kind == "qwen2" or has_bias),
            out=layer.out(sizes, bias=kind != "qwen2" and has_bias),
            rotary=rotary,
            window=window,
            **head_norms,
        )
        source = layer.norm(norm, "post_attention_layernorm")
        layer.feed_forward(source, config["intermediate_size"], activation, bias=bool(config.get("mlp_bias", False)))
    model.head(norm("model.norm", model.hidden_size))


def _windows(model: Builder) -> list[int]:
    config, kind, layers = model.config, model.config.kind, model.num_layers
    has_window = kind in ("mistral", "ministral", "cwm") or bool(config.get("use_sliding_window", False))
    kinds = config.get("layer_types")
    if not has_window:
        config.ignore("sliding_window", "max_window_layers")
        if kinds is not None and "sliding_attention" in kinds:
            raise UnsupportedConfig("its config has sliding windows, which its family does not support")
        return model.windows()
    if kinds is not None:
        config.ignore("max_window_layers")
        return model.windows()
    if "sliding_window" not in config.values:  # the class has a default
        raise UnsupportedConfig("its config.json has no sliding_window")
    window = int(config.get("sliding_window") or 0)
    first = int(config["max_window_layers"]) if window and kind.startswith("qwen") else 0
    return [window if layer >= first else 0 for layer in range(layers)]
