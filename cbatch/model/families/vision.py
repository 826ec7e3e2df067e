"""Text models of models with pictures that are like no model without them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from cbatch.model.families.builder import Builder, Layer, NormKind, rows_of
from cbatch.model.families.decoder import attention, decoder, family, feed_forward, head_norms, mixture, row_norms
from cbatch.model.families.deepseek import end_where_index_chooses
from cbatch.model.families.experts import clipped_silu, output_gate
from cbatch.model.families.rotary import rope_settings
from cbatch.model.ops.all import RESIDUAL, Activation, Linear, Norm, Normalize


@family("mllama_text_model")
def mllama(model: Builder) -> None:
    """Some layers attend to pictures only. Without these they are left out."""
    config = model.config
    model.read()
    config.expect("tie_word_embeddings", False)
    crossing = set(config.get("cross_attention_layers") or range(3, 40, 5))
    model.numbers = [number for number in model.numbers if number not in crossing]
    model.spare += [rf"model\.layers\.{number}\..*" for number in crossing]
    model.extra_tokens = 8
    decoder(model, attention(), feed_forward())


@family("molmo2_text")
def molmo2(model: Builder) -> None:
    """Up and gate are one matrix, in this order. Files hold the embeddings of tokens for pictures by themselves."""
    config = model.config
    model.read(has_rotary=False)
    after = ("attn_norm", "ff_norm") if config.flag("norm_after") else ("", "")
    config.ignore("additional_vocab_size")
    names = (("wte.embedding", "embed_tokens.weight"), ("blocks.", "layers."), ("ln_f.", "norm."))
    model.renamed = tuple((f"model.transformer.{theirs}", f"model.{ours}") for theirs, ours in names)
    model.spare.append(r"model\.transformer\.wte\.new_embedding")
    rope, scaled = rope_settings(config), config.get("rope_scaling_layers")
    plain = {"rope_theta": rope["rope_theta"]}
    rotary = [
        model.read_rotary(settings=None if scaled is None or number in scaled else plain) for number in model.numbers
    ]
    is_by_row = config.expect("qk_norm_type", "qwen3", "olmo") == "olmo"

    def feed(layer: Layer, source: str) -> None:
        size, hidden = config.whole("intermediate_size"), model.hidden_size
        up = rows_of(layer.matrix("mlp.ff_proj", 2 * size, hidden), torch.arange(2 * size).roll(size))
        model.add(Linear(source, "intermediate", up, activation=model.activation))
        layer.add_to_residual("intermediate", layer.matrix("mlp.ff_out", hidden, size), after=after[1])

    attend = attention(
        qkv="att_proj", qkv_bias=config.flag("attention_bias"), out="attn_out", rotary=rotary, after=after[0],
        norms=row_norms if is_by_row else head_norms(),
    )  # fmt: skip
    decoder(model, attend, feed, norms=("", "") if all(after) else ("attn_norm", "ff_norm"))


@family("muse_glimmer_text")
def muse_glimmer(model: Builder) -> None:
    """Norms of the embedding, of queries and of keys have no weights. Every fourth layer has no positions."""
    config, layers = model.config, model.num_layers
    eps, after = config.get("rms_norm_eps"), ("post_attention_layernorm", "post_feedforward_layernorm")
    model.read(norm=NormKind(eps, offset=1.0))
    added = NormKind(config.get("post_norm_eps"), offset=1.0)
    model.other_norms = dict.fromkeys(after, added) | {"norm": NormKind(eps)}
    pictures = (config.get(f"{part}_token_id") for part in ("image", "video"))
    model.replaced_ids = {int(one): 0 for one in pictures if one is not None}
    is_full = [(layers - 1 - number) % 4 == 0 for number in model.numbers]
    windows = model.windows(["full_attention" if full else "sliding_attention" for full in is_full])
    has_rope = config.get("layer_rope_theta") or [not full for full in is_full]  # the base is that of all layers
    attend = attention(
        bias=config.flag("attention_bias"), rotary=[model.rotary if one else None for one in has_rope], window=windows,
        scale=model.sizes.head_dim**-0.5 * config.number("qk_scale_factor"), gate=output_gate(), after=after[0],
        norms=head_norms(kind=NormKind(eps, has_weight=False)),
    )  # fmt: skip
    decoder(
        model, attend, feed_forward(after=after[1]), norms=("input_layernorm", "pre_feedforward_layernorm"),
        before=lambda: model.add(Normalize(RESIDUAL, RESIDUAL, Norm("rms", eps))),
        factor=config.number("output_multiplier", 0.19611613513818404), softcap=config.get("final_logit_softcapping"),
    )  # fmt: skip


@family("minimax_m3_vl_text")
def minimax_m3(model: Builder) -> None:
    """MiniMax M2 with a shared expert and GPT-OSS' activation. An index chooses blocks of tokens in long texts."""
    config, prefix = model.config, "block_sparse_moe."
    index = config.get("sparse_attention_config") or {}
    model.read(norm=NormKind(config.get("rms_norm_eps"), offset=1.0), part=1.0, activation=clipped_silu(config))
    config.ignore("hidden_act", "index_head_dim", "index_n_heads", "index_local_blocks", "layer_types")
    size = int(index.get("sparse_block_size", config.get("index_block_size")))
    blocks = int(index.get("sparse_topk_blocks", config.get("index_topk_blocks")))
    end_where_index_chooses(model, size * blocks, others="")
    model.spare.append(r".*\.self_attn\.index_[qk]_(proj|norm)\.weight")
    router = {"name": prefix + "gate", "scores": "sigmoid", "choice_bias": prefix + "e_score_correction_bias",
              "normalize": True, "factor": config.number("routed_scaling_factor")}  # fmt: skip
    sparse = [bool(one) for one in config.get("moe_layer_freq") or [True] * model.num_layers]
    feed = mixture(
        model, router, size=config.whole("intermediate_size"), prefix=prefix + "experts.", names=("w1", "w3", "w2"),
        shared=config.whole("shared_intermediate_size"), shared_prefix=prefix + "shared_experts.",
        sparse=model.sparse_by_type(sparse), dense=feed_forward(size=config.get("dense_intermediate_size")),
    )  # fmt: skip
    decoder(model, attention(norms=head_norms()), feed)


@family("step3p5")
def step3p5(model: Builder) -> None:
    """Windows may have other heads, all of which have gates. Some layers clip what goes into their last linears."""
    config, layers = model.config, model.num_layers
    model.read(norm=NormKind(config.get("rms_norm_eps"), offset=1.0), has_rotary=False)
    config.expect("attention_bias", False)
    config.expect("mlp_bias", False)
    others = config.whole("num_nextn_predict_layers")  # which predict more tokens; lists have entries for them
    model.spare += [rf"model\.layers\.{layers + number}\..*" for number in range(others)]
    kinds = list(config.get("layer_types") or ["full_attention"] * layers)[:layers]
    heads, listed = model.sizes.heads, config.get("per_layer_config")
    setting = config.get("attention_other_setting") or {}
    windowed = int(config.get("num_sliding_attention_heads") or setting.get("num_attention_heads") or heads)
    if listed is None:
        listed = {str(i): {"num_attention_heads": windowed} for i in model.numbers if kinds[i] == "sliding_attention"}
    own = [int(listed.get(str(i), {}).get("num_attention_heads", heads)) for i in model.numbers]
    window = config.whole("sliding_window") if "sliding_attention" in kinds else 0

    def rotary(kind: str) -> int:
        given, first = config.get("rope_parameters") or {}, kinds.index(kind)
        theta, parts = config.get("rope_theta"), config.get("partial_rotary_factors")
        settings = {"rope_theta": theta[first] if isinstance(theta, list) else theta}
        settings |= {"partial_rotary_factor": parts[first]} if parts else {}
        settings |= config.get("rope_scaling") or {} if kind == "full_attention" else {}
        return model.read_rotary(settings=given.get(kind, settings), part=1.0)

    rotaries = {kind: rotary(kind) for kind in sorted(set(kinds))}
    attend = attention(
        sizes=[replace(model.sizes, heads=one) for one in own], rotary=[rotaries[kind] for kind in kinds],
        gate=output_gate("g_proj", by_head=True),
        window=[window if kind == "sliding_attention" else 0 for kind in kinds], norms=head_norms(),
        scale=float(config.get("query_pre_attn_scalar") or model.sizes.head_dim) ** -0.5,
    )  # fmt: skip
    limits, shared_limits = config.get("swiglu_limits"), config.get("swiglu_limits_shared")
    count, shared = config.whole("n_routed_experts"), config.whole("share_expert_dim")
    dense = _dense_layers(config.get("mlp_layer_types"), config.get("moe_layers_enum"), layers)
    router: dict[str, Any] = {
        "name": "moe.gate", "scores": "sigmoid", "choice_bias": "moe.router_bias", "normalize": True,
        "factor": config.number("moe_router_scaling_factor"),
    }  # fmt: skip

    def feed(layer: Layer, source: str) -> None:
        clipped = _clipped(shared_limits[layer.number] if shared_limits else None)
        if layer.number in dense:
            feed_forward(activation=clipped)(layer, source)
            return
        layer.experts(
            source, count, layer.route(source, count, **router), config.whole("moe_intermediate_size"),
            prefix="moe.", names=("gate_proj.weight", "up_proj.weight", "down_proj.weight"), stacked=True,
            activation=_clipped(limits[layer.number] if limits else None),
        )  # fmt: skip
        feed_forward(size=shared, prefix="share_expert.", activation=clipped)(layer, source)

    decoder(model, attend, feed)


def _dense_layers(kinds: Any, sparse: Any, layers: int) -> set[int]:
    """kinds, sparse: `mlp_layer_types`, or the numbers of those with experts; by default all after three"""
    if kinds:
        return {number for number in range(layers) if kinds[number] == "dense"}
    given = range(3, layers) if sparse is None else sparse.split(",") if isinstance(sparse, str) else sparse
    return set(range(layers)) - {int(one) for one in given if str(one).strip()}


def _clipped(limit: float | None) -> Activation:
    """SiLU of which no result is larger than a limit, which is one of its argument: x with x * sigmoid(x) = limit."""
    if not limit:
        return Activation("silu")
    most = limit
    for _ in range(50):
        most = limit * (1 + math.exp(-most))
    return Activation("silu", limit=most, up_limit=limit)
