"""Llama and its kin: norm, attention with rotary positions, norm, gated feed-forward part."""

from __future__ import annotations

from dataclasses import replace

import torch

from cbatch.model.config import UnsupportedConfig
from cbatch.model.families.builder import Builder, Layer, NormKind
from cbatch.model.families.decoder import Part, attention, decoder, family, feed_forward, head_norms, read_common
from cbatch.model.families.rotary import read_rotary, rope_settings
from cbatch.model.ops.all import Activation, Rotary


@family("llama", "mistral", "qwen2", "qwen3", "internlm3", "iquestcoder", "emu3", "emu3_text_model", "ministral",
        "cwm", "seed_oss")  # fmt: skip
def llama(model: Builder) -> None:
    """Qwen 2 has biases, Qwen 3 norms of queries and keys, Mistral and Qwen windows."""
    config, kind = model.config, model.config.kind
    norm, sizes, rotary, activation = read_common(model)
    bias = kind == "qwen2" or config.flag("attention_bias", config.get("qkv_bias", kind == "seed_oss"))
    out_bias = config.flag("attention_out_bias") if kind == "seed_oss" else bias and kind != "qwen2"
    mlp_bias = config.flag("mlp_bias", config.get("bias", False))
    config.expect("clip_qkv", None)
    norms = head_norms(norm, sizes) if kind == "qwen3" else None
    attend = attention(sizes, qkv_bias=bias, out_bias=out_bias, rotary=rotary, window=_windows(model), norms=norms)
    decoder(model, norm, attend, feed_forward(activation, bias=mlp_bias))


def _windows(model: Builder) -> list[int]:
    config, kind, layers = model.config, model.config.kind, model.num_layers
    has_window = kind in ("mistral", "ministral", "cwm") or config.flag("use_sliding_window")
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
    if kind == "cwm":
        return [0 if layer % 4 == 0 else window for layer in range(layers)]
    first = config.whole("max_window_layers") if window and kind.startswith("qwen") else 0
    return [window if layer >= first else 0 for layer in range(layers)]


@family("smollm3")
def smollm3(model: Builder) -> None:
    """Every fourth layer has no positions."""
    config = model.config
    norm, sizes, rotary, activation = read_common(model, theta=2e6)
    interval = config.whole("no_rope_layer_interval", 4)
    has_rope = config.get("no_rope_layers") or [(layer + 1) % interval != 0 for layer in model.numbers]
    is_windowed = config.flag("use_sliding_window") and config.get("sliding_window") is not None
    kinds = [
        "sliding_attention" if is_windowed and not has_rope[layer] else "full_attention" for layer in model.numbers
    ]
    bias, windows = config.flag("attention_bias"), model.windows(kinds)
    positions = [rotary if has_rope[layer] else None for layer in model.numbers]
    attend = attention(sizes, bias=bias, rotary=positions, window=windows)
    decoder(model, norm, attend, feed_forward(activation, bias=config.flag("mlp_bias")), tied_by_default=True)


@family("ministral3")
def ministral3(model: Builder) -> None:
    """Queries grow with the position, once it is past the context of pretraining."""
    config = model.config
    norm, sizes = NormKind(config["rms_norm_eps"]), model.head_sizes()
    rope = rope_settings(config, None, 1e6, "rope_theta", None)
    floor, beta = float(rope["original_max_position_embeddings"]), float(rope["llama_4_scaling_beta"])
    rotary = model.rotary(replace(read_rotary(config, sizes.head_dim), scale_beta=beta, scale_floor=floor))
    window = int(config.get("sliding_window") or 0)
    feed = feed_forward(model.activation("hidden_act", default="silu"))
    decoder(model, norm, attention(sizes, rotary=rotary, window=window), feed)


@family("arcee", "ernie4_5", "helium")
def plain_kin(model: Builder) -> None:
    """Arcee's feed-forward part has no gate; the others rotate neighbours."""
    config, kind, is_arcee = model.config, model.config.kind, model.config.kind == "arcee"
    norm, sizes, rotary, activation = read_common(
        model, theta={"ernie4_5": 5e5, "helium": 1e5}.get(kind, 1e4), is_interleaved=not is_arcee, gated=not is_arcee,
        activation="relu2" if is_arcee else "silu",
    )  # fmt: skip
    bias = mlp_bias = config.flag("use_bias" if kind == "ernie4_5" else "attention_bias")
    if kind != "ernie4_5":
        mlp_bias = config.flag("mlp_bias")
    attend = attention(sizes, qkv_bias=bias, out_bias=bias and kind != "helium", rotary=rotary)
    decoder(model, norm, attend, feed_forward(activation, bias=mlp_bias), tied_by_default=kind == "ernie4_5")


@family("apertus")
def apertus(model: Builder) -> None:
    """Norms of queries and keys, and an activation with numbers of its own in each layer."""
    config = model.config
    norm, sizes = NormKind(config["rms_norm_eps"]), model.head_sizes()
    rotary = model.rotary(read_rotary(config, sizes.head_dim))
    config.expect("hidden_act", "xielu")
    bias = config.flag("attention_bias")
    attend = attention(sizes, bias=bias, rotary=rotary, norms=head_norms(norm, sizes))

    def feed(layer: Layer, source: str) -> None:
        alphas = [replace(layer.weight(f"mlp.act_fn.alpha_{sign}", 1), function="softplus") for sign in "pn"]
        params = (*alphas, layer.weight("mlp.act_fn.beta"), layer.weight("mlp.act_fn.eps"))
        layer.feed_forward(source, config["intermediate_size"], Activation("xielu", gated=False, params=params))

    decoder(model, norm, attend, feed, norms=("attention_layernorm", "feedforward_layernorm"))


@family("hunyuan_v1_dense")
def hunyuan(model: Builder) -> None:
    """Norms of queries and keys come after the rotation."""
    norm = NormKind(model.config["rms_norm_eps"])
    attend = hunyuan_attention(model, norm)
    decoder(model, norm, attend, feed_forward(model.activation("hidden_act", default="silu")))


def hunyuan_attention(model: Builder, norm: NormKind) -> Part:
    """Attention of HunYuan, with and without experts."""
    sizes, names = model.head_sizes(), ("self_attn.query_layernorm", "self_attn.key_layernorm")
    rotary, bias = model.rotary(_hunyuan_rotary(model, sizes.head_dim)), model.config.flag("attention_bias")
    norms = head_norms(norm, sizes, names, last=True)
    return attention(sizes, bias=bias, rotary=rotary, norms=norms)


def _hunyuan_rotary(model: Builder, head_dim: int) -> Rotary:
    """A base that `alpha` makes larger, for any length."""
    config = model.config
    config["head_dim"]
    config.ignore("eod_token_id")
    rope = rope_settings(config, None, 1e4, "rope_theta", None)
    rotary = read_rotary(config, head_dim)
    if rope.get("rope_type", rope.get("type")) != "dynamic" or not rope.get("alpha"):
        return rotary
    theta = rope["rope_theta"] * rope["alpha"] ** (head_dim / (head_dim - 2))
    inv_freq = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    return replace(rotary, inv_freq=tuple(inv_freq.tolist()))


@family("nanochat")
def nanochat(model: Builder) -> None:
    """Norms without weights, also of the embedding; rotations go backwards, and queries and keys are normed after."""
    config = model.config
    norm, sizes = NormKind(config.get("rms_norm_eps", 1e-6), has_weight=False), model.head_sizes()
    forward = read_rotary(config, sizes.head_dim)
    rotary = model.rotary(replace(forward, inv_freq=tuple(-step for step in forward.inv_freq)))
    activation = model.activation("hidden_act", default="relu2", gated=False)
    bias = config.flag("attention_bias")
    norms = head_norms(norm, sizes, last=True)
    attend = attention(sizes, bias=bias, rotary=rotary, norms=norms)
    softcap = config.get("final_logit_softcapping", 15.0)
    decoder(model, norm, attend, feed_forward(activation, names=("fc1", "fc2")), norm_embedding=True, softcap=softcap)
