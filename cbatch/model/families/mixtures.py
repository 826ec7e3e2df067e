"""Mixtures of experts with attention of several kinds, or with routers of their own."""

from __future__ import annotations

from dataclasses import replace

from cbatch.model.config import UnsupportedConfig
from cbatch.model.families.builder import Builder, NormKind
from cbatch.model.families.decoder import attention, decoder, every, family, feed_forward, head_norms, mixture
from cbatch.model.families.experts import biased_router, output_gate, sparse_layers
from cbatch.model.families.rotary import rope_settings


@family("phimoe")
def phimoe(model: Builder) -> None:
    """LayerNorm, and two experts that are weighed one after the other."""
    config, prefix = model.config, "block_sparse_moe."
    norm = NormKind(config.get("rms_norm_eps"), "layer", has_bias=True)
    model.read(norm=norm, has_rotary=False)
    rope = rope_settings(config)
    if "long_mscale" in rope:
        if rope["long_mscale"] != rope.get("short_mscale"):
            raise UnsupportedConfig("its rotary embedding has another factor for long texts")
        rope["attention_factor"] = rope["long_mscale"]
    model.rotary = model.read_rotary(settings=rope)
    config.expect("num_experts_per_tok", 2)
    tolerance, size = 2 * config.number("router_jitter_noise"), config.whole("intermediate_size")
    router = {"name": prefix + "gate", "scores": "sparse_mixer", "tolerance": tolerance}
    feed = mixture(model, router, size=size, prefix=prefix + "experts.", names=("w1", "w3", "w2"))
    attend = attention(bias=config.flag("attention_bias"), window=int(config.get("sliding_window") or 0))
    decoder(model, attend, feed, bias=config.flag("lm_head_bias"))


@family("mimo_v2_flash")
def mimo_v2_flash(model: Builder) -> None:
    """Windows have sinks, twice the KV heads and another base. Files of its authors have other names for that."""
    config, layers = model.config, model.num_layers
    model.read(has_rotary=False)
    kv_heads = model.sizes.kv_heads
    if model.sizes.heads % (2 * kv_heads):
        raise UnsupportedConfig(f"its {model.sizes.heads} query heads cannot share {2 * kv_heads} KV heads")
    value_dim, pattern = config.whole("v_head_dim"), config.get("hybrid_layer_pattern")
    for key, value in (("num_attention_heads", model.sizes.heads), ("num_key_value_heads", 2 * kv_heads),
                       ("head_dim", model.sizes.head_dim), ("v_head_dim", value_dim)):  # fmt: skip
        config.expect(f"swa_{key}", value)
    config.ignore("attention_chunk_size")
    pattern = pattern or [int(i > 0 and (i + 1) % 6 > 0) for i in model.numbers]
    kinds = model.layer_types(["sliding_attention" if one else "full_attention" for one in pattern])
    is_windowed = [kind == "sliding_attention" for kind in kinds]
    before, window = config.get("sliding_window_size"), config.whole("sliding_window")
    window = window if before is None else int(before) + 1
    rotaries = {
        kind: model.read_rotary(
            layer_type=kind, part=0.334,
            theta_key="swa_rope_theta" if kind == "sliding_attention" else "rope_theta",
        )
        for kind in sorted(set(kinds))
    }  # fmt: skip
    sizes, factor = replace(model.sizes, value_dim=value_dim), config.get("attention_value_scale")
    attend = attention(
        sizes=[replace(sizes, kv_heads=2 * kv_heads) if one else sizes for one in is_windowed],
        qkv_bias=config.flag("attention_bias"), rotary=[rotaries[kind] for kind in kinds],
        window=[window if one else 0 for one in is_windowed], has_sinks=is_windowed, sinks="attention_sink_bias",
        factor=1.0 if factor is None else float(factor),
    )  # fmt: skip
    sparse = config.get("moe_layer_freq") or [0] + [1] * (layers - 1)
    feed = mixture(model, biased_router(config), sparse=model.sparse_by_type([bool(one) for one in sparse]))
    decoder(model, attend, feed)


@family("laguna", "kolibri1", "flint")
def windowed_moe(model: Builder) -> None:
    """Windows rotate, and full attention only in Laguna. That has a gate for each head or number, Flint has sinks."""
    config, layers, kind = model.config, model.num_layers, model.kind
    is_laguna, is_kolibri, is_flint = (kind == one for one in ("laguna", "kolibri1", "flint"))
    model.read(has_rotary=False)
    full = [is_laguna or i < 2 or i % 4 == 1 or i == layers - 1 for i in model.numbers]
    kinds = every(5, layers) if is_kolibri else ["full_attention" if one else "sliding_attention" for one in full]
    windows = model.windows(kinds)
    if is_laguna:
        usual = {"full_attention": {"rope_theta": 5e5, "partial_rotary_factor": 0.5},
                 "sliding_attention": {"rope_theta": 1e4}}  # fmt: skip
        is_given = bool(config.get("rope_parameters"))
        types = ["sliding_attention" if window else "full_attention" for window in windows]
        rotary: list[int | None] = [
            model.read_rotary(layer_type=one, part=1.0, settings=None if is_given else usual[one]) for one in types
        ]
        config.expect("moe_router_logit_softcapping", 0.0)
    else:
        rotary = [model.read_rotary() if window else None for window in windows]
    heads = config.get("num_attention_heads_per_layer") if is_laguna else None
    sizes = [replace(model.sizes, heads=int(count)) for count in heads or [model.sizes.heads] * layers]
    if any(one.heads % one.kv_heads for one in sizes):
        raise UnsupportedConfig("the heads of a layer cannot share its KV heads")
    by_head = is_laguna and config.expect("gating", True, "per-head", "per-element") in (True, "per-head")
    gate = output_gate("g_proj", by_head=by_head, function="softplus")
    attend = attention(
        sizes=sizes, bias=not is_kolibri and config.flag("attention_bias"), rotary=rotary, window=windows,
        norms=head_norms(), has_sinks=is_flint, sinks="softmax_offset", gate=gate if is_laguna else None,
        after="post_attn_norm" if is_kolibri else "",
    )  # fmt: skip
    routers = {
        "laguna": {"scores": "sigmoid", "choice_bias": "mlp.experts.e_score_correction_bias"},
        "kolibri1": {"scores": "sigmoid_of_chosen", "choice_bias": "moe.router.expert_bias"},
        "flint": {"scores": "sigmoid"},
    }
    normalize = is_laguna or config.flag("norm_topk_prob")
    factor = config.number("moe_routed_scaling_factor") if is_laguna else 1.0
    sparse = [True] * layers
    if is_laguna:
        sparse = model.sparse_by_type([i > 0 for i in model.numbers])
    elif is_flint:
        sparse = sparse_layers(config, layers, dense=[0, 1])
    feed = mixture(
        model, {"normalize": normalize, "factor": factor, **routers[kind]},
        shared=config.whole("shared_expert_intermediate_size"), sparse=sparse,
        shared_prefix="mlp.shared_experts." if is_kolibri else "mlp.shared_expert.",
        after="post_ffn_norm" if is_kolibri else "",
    )  # fmt: skip
    decoder(model, attend, feed)


@family("cohere2_moe")
def cohere2_moe(model: Builder) -> None:
    """Cohere 2 with experts, and maybe with RMSNorm. Dense layers may rotate in full attention, too."""
    config = model.config
    eps, dense = config.get("rms_norm_eps"), config.whole("first_k_dense_replace")
    norm = NormKind(config.get("layer_norm_eps"), "layer") if eps is None else NormKind(eps)
    model.read(norm=norm, is_interleaved=True)
    periods = config.whole("prefix_dense_sliding_window_pattern"), config.whole("sliding_window_pattern")
    windows = model.windows(every(periods[0], dense) + every(periods[1], model.num_layers - dense))
    sparse, shared = model.sparse_by_type([i >= dense for i in model.numbers]), config.whole("num_shared_experts")
    is_rotated = [bool(window) or (periods[0] == 1 and not one) for window, one in zip(windows, sparse, strict=True)]
    is_softmax = config.expect("expert_selection_fn", "softmax", "sigmoid") == "softmax"
    mean = shared > 0 and config.expect("shared_expert_combination_strategy", "average", "sum") == "average"
    router = {
        "scores": "softmax_of_chosen" if is_softmax else "sigmoid_of_chosen", "factor": 0.5 if mean else 1.0,
        "normalize": not is_softmax and config.flag("norm_topk_prob"),
    }  # fmt: skip
    size, dense_size = config.whole("intermediate_size"), config.get("prefix_dense_intermediate_size")
    beside = feed_forward(size=size * shared, prefix="mlp.shared_experts.", factor=0.5 if mean else 1.0)
    feed = mixture(
        model, router, size=size, beside=beside if shared else None, sparse=sparse, dense=feed_forward(size=dense_size)
    )
    attend = attention(
        bias=config.flag("attention_bias"), window=windows,
        rotary=[model.rotary if one else None for one in is_rotated],
    )  # fmt: skip
    decoder(model, attend, feed, norms=("input_layernorm", None), factor=config.number("logit_scale"))
