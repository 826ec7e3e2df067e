"""Mixtures of experts with attention of several kinds, or with routers of their own."""

from __future__ import annotations

from dataclasses import replace

from cbatch.model.config import UnsupportedConfig
from cbatch.model.families.builder import Builder, NormKind
from cbatch.model.families.decoder import attention, decoder, family, mixture, sparse_by_type
from cbatch.model.families.experts import biased_router, num_experts
from cbatch.model.families.rotary import rope_settings


@family("phimoe")
def phimoe(model: Builder) -> None:
    """LayerNorm, and two experts that are weighed one after the other."""
    config, prefix = model.config, "block_sparse_moe."
    norm = NormKind(config.get("rms_norm_eps", 1e-5), "layer", has_bias=True)
    model.read(norm=norm, has_rotary=False)
    rope = rope_settings(config, None, 1e6, "rope_theta", None)
    if "long_mscale" in rope:
        if rope["long_mscale"] != rope.get("short_mscale"):
            raise UnsupportedConfig("its rotary embedding has another factor for long texts")
        rope["attention_factor"] = rope["long_mscale"]
    model.rotary = model.read_rotary(settings=rope)
    config.expect("num_experts_per_tok", 2)
    jitter = config.number("router_jitter_noise", 0.01)
    router = {"name": prefix + "gate", "scores": "sparse_mixer", "tolerance": 2 * jitter}
    feed = mixture(
        num_experts(config), config.whole("intermediate_size"), router, prefix=prefix + "experts.",
        names=("w1", "w3", "w2"),
    )  # fmt: skip
    attend = attention(bias=config.flag("attention_bias"), window=int(config.get("sliding_window") or 0))
    decoder(model, attend, feed, bias=config.flag("lm_head_bias"))


@family("mimo_v2_flash")
def mimo_v2_flash(model: Builder) -> None:
    """Windows have sinks, twice the KV heads and another base. Files of its authors have other names for that."""
    config, layers = model.config, model.num_layers
    norm = NormKind(config.get("rms_norm_eps", config.get("layernorm_epsilon", 1e-5)))
    model.read(norm=norm, has_rotary=False, head_dim=192)
    kv_heads = model.sizes.kv_heads
    if model.sizes.heads % (2 * kv_heads):
        raise UnsupportedConfig(f"its {model.sizes.heads} query heads cannot share {2 * kv_heads} KV heads")
    value_dim, pattern = config.whole("v_head_dim", 128), config.get("hybrid_layer_pattern")
    for key, value in (("num_attention_heads", model.sizes.heads), ("num_key_value_heads", 2 * kv_heads),
                       ("head_dim", model.sizes.head_dim), ("v_head_dim", value_dim)):  # fmt: skip
        config.expect(f"swa_{key}", value)
    config.expect("add_swa_attention_sink_bias", True)
    config.expect("add_full_attention_sink_bias", False)
    config.expect("n_shared_experts", None)
    config.ignore("attention_chunk_size", "scoring_func", "topk_method")
    pattern = pattern or [int(i > 0 and (i + 1) % 6 > 0) for i in model.numbers]
    kinds = model.layer_types(["sliding_attention" if one else "full_attention" for one in pattern])
    is_windowed = [kind == "sliding_attention" for kind in kinds]
    before, window = config.get("sliding_window_size"), config.whole("sliding_window", 129)
    window = window if before is None else int(before) + 1
    rotaries = {
        kind: model.read_rotary(
            layer_type=kind, part=0.334, theta=1e4 if kind == "sliding_attention" else 5e6,
            theta_key="swa_rope_theta" if kind == "sliding_attention" else "rope_theta",
        )
        for kind in sorted(set(kinds))
    }  # fmt: skip
    sizes, factor = replace(model.sizes, value_dim=value_dim), config.get("attention_value_scale", 0.707)
    attend = attention(
        sizes=[replace(sizes, kv_heads=2 * kv_heads) if one else sizes for one in is_windowed],
        qkv_bias=config.flag("attention_bias"), rotary=[rotaries[kind] for kind in kinds],
        window=[window if one else 0 for one in is_windowed], has_sinks=is_windowed, sinks="attention_sink_bias",
        factor=1.0 if factor is None else float(factor),
    )  # fmt: skip
    sparse, frequency = config.get("mlp_layer_types"), config.get("moe_layer_freq")
    model.spare.append(r"model\.mtp\..*")
    feed = mixture(
        num_experts(config, "n_routed_experts"), config.whole("moe_intermediate_size", 2048), biased_router(config),
        sparse=sparse_by_type(sparse) if sparse else [bool(one) for one in frequency or [0] + [1] * (layers - 1)],
    )  # fmt: skip
    decoder(model, attend, feed)
