"""Text models of models with pictures that are like no model without them."""

from __future__ import annotations

import torch

from cbatch.model.families.builder import Builder, HeadSizes, Layer, rows_of
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
from cbatch.model.families.rotary import rope_settings
from cbatch.model.ops.all import Linear, Matrix


@family("mllama_text_model")
def mllama(model: Builder) -> None:
    """Some layers attend to pictures only. Without these they are left out."""
    config = model.config
    model.read(theta=5e5)
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
    model.read(theta=5e5, is_interleaved=True)
    size, _ = config.get("moe_intermediate_size") or (1536, 512)
    bias, shared = config.flag("use_bias"), config.whole("moe_num_shared_experts", 2)
    count, kinds = config.whole("moe_num_experts", 64), config.get("mlp_layer_types")
    others = "|".join(map(str, range(count, 2 * count)))
    model.spare += [rf".*\.mlp\.experts\.({others})\..*", r".*\.mlp\.gate\.weight_1"]
    router = {
        "top_k": config.whole("moe_k", 6), "scores": "softmax", "normalize": True, "transpose": True,
        "choice_bias": "mlp.moe_statics.e_score_correction_bias", "choice_shape": (2,),
        "least_sum": config.number("moe_norm_min", 1e-12),
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
    model.read(eps=1e-6, has_rotary=False)
    after = ("attn_norm", "ff_norm") if config.flag("norm_after") else ("", "")
    config.ignore("additional_vocab_size")
    names = (("embed_tokens.weight", "wte.embedding"), ("layers.", "blocks."), ("norm.", "ln_f."))
    model.layouts = (tuple((f"model.{ours}", f"model.transformer.{theirs}") for ours, theirs in names),)
    model.spare.append(r"model\.transformer\.wte\.new_embedding")
    rope, scaled = rope_settings(config, None, 1e4, "rope_theta", None), config.get("rope_scaling_layers")
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
