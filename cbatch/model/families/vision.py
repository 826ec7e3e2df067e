"""Text models of models with pictures that are like no model without them."""

from __future__ import annotations

import torch

from cbatch.model.families.builder import Builder, HeadSizes, Layer, NormKind, rows_of
from cbatch.model.families.decoder import (
    attention,
    decoder,
    family,
    feed_forward,
    head_norms,
    mixture,
    row_norms,
    sparse_by_type,
)
from cbatch.model.families.deepseek import end_where_index_chooses
from cbatch.model.families.experts import num_experts, output_gate
from cbatch.model.families.rotary import rope_settings
from cbatch.model.ops.all import RESIDUAL, Activation, Linear, Matrix, Norm, Normalize


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


@family("ernie4_5_vl_moe_text")
def ernie_moe(model: Builder) -> None:
    """Tokens of pictures have experts of their own, which follow those of text in the files."""
    config = model.config
    model.read(is_interleaved=True)
    size, _ = config.get("moe_intermediate_size") or (1536, 512)
    bias, shared = config.flag("use_bias"), config.whole("moe_num_shared_experts")
    count, kinds = config.whole("moe_num_experts"), config.get("mlp_layer_types")
    others = "|".join(map(str, range(count, 2 * count)))
    model.spare += [rf".*\.mlp\.experts\.({others})\..*", r".*\.mlp\.gate\.weight_1"]
    router = {
        "top_k": config.whole("moe_k"), "scores": "softmax", "normalize": True, "transpose": True,
        "choice_bias": "mlp.moe_statics.e_score_correction_bias", "choice_shape": (2,),
        "least_sum": config.number("moe_norm_min"),
    }  # fmt: skip
    feed = mixture(
        count, size, router, shared=shared * size, shared_bias=bias, dense=feed_forward(bias=bias),
        sparse=sparse_by_type(kinds) if kinds else [number > 0 for number in model.numbers],
    )  # fmt: skip
    decoder(model, attention(bias=bias), feed, tied_by_default=True)


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

    def qkv(layer: Layer, sizes: HeadSizes) -> Matrix:
        return layer.matrix("self_attn.att_proj", sum(sizes.columns), model.hidden_size, bias=bias)

    def feed(layer: Layer, source: str) -> None:
        size, hidden = config.whole("intermediate_size"), model.hidden_size
        up = rows_of(layer.matrix("mlp.ff_proj", 2 * size, hidden), torch.arange(2 * size).roll(size))
        model.add(Linear(source, "intermediate", up, activation=model.activation))
        layer.add_to_residual("intermediate", layer.matrix("mlp.ff_out", hidden, size), after=after[1])

    bias = config.flag("attention_bias", config.flag("qkv_bias"))
    norms = row_norms if is_by_row else head_norms()
    attend = attention(qkv=qkv, out="attn_out", norms=norms, rotary=rotary, after=after[0])
    decoder(model, attend, feed, norms=("", "") if all(after) else ("attn_norm", "ff_norm"))


@family("muse_glimmer_text")
def muse_glimmer(model: Builder) -> None:
    """Norms of the embedding, of queries and of keys have no weights. Every fourth layer has no positions."""
    config, layers = model.config, model.num_layers
    eps, after = config.get("rms_norm_eps"), ("post_attention_layernorm", "post_feedforward_layernorm")
    kv_heads = config.whole("num_key_value_heads")
    model.read(norm=NormKind(eps, offset=1.0), key="hidden_activation", kv_heads=kv_heads, head_dim=128)
    added = NormKind(config.get("post_norm_eps"), offset=1.0)
    model.other_norms = dict.fromkeys(after, added) | {"norm": NormKind(eps)}
    pictures = (config.get(f"{part}_token_id") for part in ("image", "video"))
    model.replaced_ids = {int(one): 0 for one in pictures if one is not None}
    is_full = [(layers - 1 - number) % 4 == 0 for number in model.numbers]
    windows = model.windows(
        ["full_attention" if full else "sliding_attention" for full in is_full],
        window=config.whole("sliding_window"),
    )
    has_rope = config.get("layer_rope_theta") or [not full for full in is_full]  # the base is that of all layers
    attend = attention(
        bias=config.flag("attention_bias"), rotary=[model.rotary if one else None for one in has_rope], window=windows,
        scale=model.sizes.head_dim**-0.5 * config.number("qk_scale_factor"), gate=output_gate, after=after[0],
        norms=head_norms(kind=NormKind(eps, has_weight=False)),
    )  # fmt: skip
    decoder(
        model, attend, feed_forward(after=after[1]), norms=("input_layernorm", "pre_feedforward_layernorm"),
        before=lambda: model.add(Normalize(RESIDUAL, RESIDUAL, Norm("rms", eps))),
        factor=config.number("output_multiplier", 0.19611613513818404),
        softcap=config.get("final_logit_softcapping"),
    )  # fmt: skip


@family("minimax_m3_vl_text")
def minimax_m3(model: Builder) -> None:
    """MiniMax M2 with a shared expert and GPT-OSS' activation. An index chooses blocks of tokens in long texts."""
    config, prefix = model.config, "block_sparse_moe."
    index = config.get("sparse_attention_config") or {}
    norm, kv_heads = NormKind(config.get("rms_norm_eps"), offset=1.0), config.whole("num_key_value_heads")
    model.read(norm=norm, key="", part=1.0, kv_heads=kv_heads, head_dim=128)
    limit, slope = config.number("swiglu_limit"), config.number("swiglu_alpha")
    model.activation = Activation("silu", limit=limit, slope=slope, up_offset=1.0)
    config.ignore("hidden_act", "index_head_dim", "index_n_heads", "index_local_blocks", "layer_types")
    size = int(index.get("sparse_block_size", config.get("index_block_size")))
    blocks = int(index.get("sparse_topk_blocks", config.get("index_topk_blocks")))
    end_where_index_chooses(model, size * blocks, others="")
    model.spare += [r".*\.self_attn\.index_[qk]_(proj|norm)\.weight", r"mtp\..*"]
    router = {"name": prefix + "gate", "scores": "sigmoid", "choice_bias": prefix + "e_score_correction_bias",
              "normalize": True, "factor": config.number("routed_scaling_factor")}  # fmt: skip
    kinds = config.get("mlp_layer_types")
    sparse = sparse_by_type(kinds) if kinds else config.get("moe_layer_freq") or [True] * model.num_layers
    feed = mixture(
        num_experts(config), config.whole("intermediate_size"), router, prefix=prefix + "experts.",
        names=("w1", "w3", "w2"), shared=config.whole("shared_intermediate_size"),
        shared_prefix=prefix + "shared_experts.", sparse=[bool(one) for one in sparse],
        dense=feed_forward(size=config.get("dense_intermediate_size")),
    )  # fmt: skip
    decoder(model, attention(norms=head_norms()), feed)
