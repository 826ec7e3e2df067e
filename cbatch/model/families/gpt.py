"""Families with LayerNorm, most with biases and without gates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from cbatch.model.config import UnsupportedConfig
from cbatch.model.families.builder import Builder, HeadSizes, Layer, NormKind, deinterleaved, rows_of
from cbatch.model.families.decoder import (
    LAYERNORMS,
    MakeQkv,
    attention,
    decoder,
    family,
    feed_forward,
    head_norms,
    side_by_side,
)
from cbatch.model.families.rotary import read_rotary
from cbatch.model.ops.all import HeadNorms, Matrix, Norm


def _layer_norm(eps: float, *, offset: float = 0.0) -> NormKind:
    return NormKind(eps, "layer", offset, has_bias=True)


def _by_head(name: str, *, bias: bool = True) -> MakeQkv:
    """One linear for queries, keys and values, where each key follows the queries that it serves, then its value."""

    def make(layer: Layer, sizes: HeadSizes) -> Matrix:
        matrix = layer.matrix(name, sum(sizes.columns), layer.model.hidden_size, bias=bias)
        heads = torch.arange(matrix.columns).view(sizes.kv_heads, -1, sizes.head_dim)
        return rows_of(matrix, torch.cat([heads[:, :-2].flatten(), heads[:, -2].flatten(), heads[:, -1].flatten()]))

    return make


@family("gpt2", "gpt-sw3", "gpt_bigcode")
def gpt2(model: Builder) -> None:
    """Learned positions. GPT-2 stores its matrices as [depth, columns]."""
    config, is_bigcode = model.config, model.kind == "gpt_bigcode"
    is_single = is_bigcode and config.flag("multi_query")
    model.read(
        norm=_layer_norm(config.get("layer_norm_epsilon")), has_rotary=False, gated=False,
        kv_heads=1 if is_single else None,
    )  # fmt: skip
    config.ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "reorder_and_upcast_attn")
    scale = model.sizes.head_dim**-0.5 if config.get("scale_attn_weights") else 1.0
    by_layer = config.flag("scale_attn_by_inverse_layer_idx")
    model.spare.append(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)")
    transpose, qkv = not is_bigcode, _by_head("attn.c_attn") if is_bigcode and not is_single else "c_attn"
    attend = attention(
        prefix="attn.", qkv=qkv, out="c_proj", bias=True, transpose=transpose,
        scale=[scale / (i + 1) if by_layer else scale for i in model.numbers],
    )  # fmt: skip
    inner = int(config.get("n_inner") or 4 * model.hidden_size)
    feed = feed_forward(size=inner, names=("c_fc", "c_proj"), bias=True, transpose=transpose)
    decoder(model, attend, feed, norms=("ln_1", "ln_2"), positions="wpe", **_NAMES)


_NAMES: dict[str, Any] = {"root": "transformer.", "embed": "wte", "layers": "h", "final": "ln_f"}
_LINEARS = "dense_h_to_4h", "dense_4h_to_h"


@family("gpt_neox", "persimmon")
def gpt_neox(model: Builder) -> None:
    """Attention and feed-forward part side by side in GPT-NeoX; both rotate a part of each head."""
    config, is_neox = model.config, model.kind == "gpt_neox"
    if not is_neox:
        config.ignore("head_dim")
    model.read(
        norm=_layer_norm(config.get("layer_norm_eps")), gated=False, part=config["rotary_pct"] if is_neox else None,
        theta_key="rotary_emb_base" if is_neox else "rope_theta",
    )  # fmt: skip
    bias = config.flag("attention_bias") if is_neox else True
    is_parallel = is_neox and config.flag("use_parallel_residual")
    has_norms = not is_neox and config.flag("qk_layernorm")
    prefix = "attention." if is_neox else "self_attn."
    if is_neox:
        model.spare.append(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)")
    qkv = _by_head(prefix + "query_key_value", bias=bias)
    norms = head_norms(*LAYERNORMS) if has_norms else None
    attend = attention(prefix=prefix, qkv=qkv, out="dense", bias=bias, norms=norms)
    parts = attend, feed_forward(names=_LINEARS, bias=True)
    decoder(
        model, *(side_by_side(*parts, "post_attention_layernorm") if is_parallel else parts),
        norms=("input_layernorm", None if is_parallel else "post_attention_layernorm"),
        root="gpt_neox." if is_neox else "model.", embed="embed_in" if is_neox else "embed_tokens",
        final="final_layer_norm" if is_neox else "final_layernorm", name="embed_out" if is_neox else "lm_head",
    )  # fmt: skip


@family("falcon")
def falcon(model: Builder) -> None:
    """Attention and feed-forward part side by side after one norm, or, in larger models, after one each."""
    config = model.config
    config.expect("alibi", False)
    is_new, bias = config.flag("new_decoder_architecture"), config.flag("bias")
    is_parallel = bool(config.expect("parallel_attn", True)) if is_new else config.flag("parallel_attn")
    heads = config.whole("num_attention_heads")
    shares, kv_heads = config.flag("multi_query"), int(config.get("num_kv_heads") or heads)
    model.read(
        norm=_layer_norm(config.get("layer_norm_epsilon")), gated=False,
        kv_heads=kv_heads if is_new else 1 if shares else heads,
    )  # fmt: skip
    has_two = config.get("num_ln_in_parallel_attn") != 1 and is_new
    inner = int(config.get("ffn_hidden_size") or 4 * model.hidden_size)
    prefix = "self_attention."
    qkv = _by_head(prefix + "query_key_value", bias=bias)
    attend = attention(prefix=prefix, qkv=qkv, out="dense", bias=bias)
    parts = attend, feed_forward(size=inner, names=_LINEARS, bias=bias)
    decoder(
        model, *(side_by_side(*parts, "ln_mlp") if has_two else parts),
        norms=("ln_attn" if has_two else "input_layernorm", None if is_parallel else "post_attention_layernorm"),
        root="transformer.", embed="word_embeddings", layers="h", final="ln_f",
    )  # fmt: skip


@family("gptj", "codegen")
def gptj(model: Builder) -> None:
    """Both parts read the same norm, and neighbours are rotated."""
    config, is_gptj = model.config, model.kind == "gptj"
    norm = _layer_norm(config.get("layer_norm_epsilon"))
    model.read(norm=norm, has_rotary=False, gated=False, is_interleaved=is_gptj)
    width = config.whole("rotary_dim")
    model.sizes, model.rotary = replace(model.sizes, rotary_dim=width), model.add_rotary(read_rotary(config, width))
    inner = int(config.get("n_inner") or 4 * model.hidden_size)
    model.spare.append(r"transformer\.h\.\d+\.attn\.(bias|masked_bias|causal_mask)")
    attend = attention(prefix="attn.", out="out_proj", qkv=None if is_gptj else _codegen_qkv)
    feed = feed_forward(size=inner, names=("fc_in", "fc_out"), bias=True)
    decoder(model, attend, feed, norms=("ln_1", None), bias=True, **_NAMES)


def _codegen_qkv(layer: Layer, sizes: HeadSizes) -> Matrix:
    """Four blocks of queries, values and keys. Rotated neighbours of a head are brought together here."""
    blocks = torch.arange(sum(sizes.columns)).view(4, 3, -1)
    queries, values, keys = (blocks[:, part].flatten() for part in range(3))
    order = deinterleaved(sizes.heads, sizes.head_dim, sizes.rotary_dim)
    matrix = layer.matrix("attn.qkv_proj", blocks.numel(), layer.model.hidden_size)
    return rows_of(matrix, torch.cat([queries[order], keys[order], values]))


@family("gpt_neo")
def gpt_neo(model: Builder) -> None:
    """GPT-2 whose scores are not scaled, with windows in some layers."""
    config = model.config
    model.read(norm=_layer_norm(config.get("layer_norm_epsilon")), has_rotary=False, gated=False)
    given, window = config.get("attention_types") or [[["global", "local"], 12]], config.whole("window_size")
    kinds = config.get("attention_layers") or [kind for one, count in given for _ in range(count) for kind in one]
    if not set(kinds) <= {"global", "local"} or len(kinds) != model.num_layers:
        raise UnsupportedConfig("it has layers of other types")
    inner = int(config.get("intermediate_size") or 4 * model.hidden_size)
    model.spare.append(r"transformer\.h\.\d+\.attn\.attention\.(bias|masked_bias)")
    attend = attention(
        prefix="attn.attention.", out="out_proj", out_bias=True, scale=1.0,
        window=[window if kind == "local" else 0 for kind in kinds],
    )  # fmt: skip
    feed = feed_forward(size=inner, names=("c_fc", "c_proj"), bias=True)
    decoder(model, attend, feed, norms=("ln_1", "ln_2"), positions="wpe", **_NAMES)


@family("opt", "biogpt")
def opt(model: Builder) -> None:
    """Learned positions from the third row of their table on."""
    config, is_opt, hidden = model.config, model.kind == "opt", model.hidden_size
    model.read(norm=_layer_norm(1e-5), has_rotary=False, gated=False)
    if is_opt:
        for key, value in (("do_layer_norm_before", True), ("_remove_final_layer_norm", False),
                           ("layer_norm_elementwise_affine", True), ("word_embed_proj_dim", hidden)):  # fmt: skip
            config.expect(key, value)
    bias = config.flag("enable_bias") if is_opt else True
    inner = config.whole("ffn_dim" if is_opt else "intermediate_size")
    decoder(
        model, attention(out="out_proj", bias=bias),
        feed_forward(size=inner, prefix="", names=("fc1", "fc2"), bias=bias),
        norms=("self_attn_layer_norm", "final_layer_norm"), root="model.decoder." if is_opt else "biogpt.",
        scale=hidden**0.5 if not is_opt and config.flag("scale_embedding") else 1.0,
        positions="embed_positions", offset=2, final="final_layer_norm" if is_opt else "layer_norm",
        name="lm_head" if is_opt else "output_projection",
    )  # fmt: skip


@family("starcoder2", "nemotron", "jais2")
def starcoder2(model: Builder) -> None:
    """LayerNorm and no gates. Nemotron adds 1 to the weights of norms, and rotates half of each head."""
    config, kind, is_coder = model.config, model.kind, model.kind == "starcoder2"
    eps = config[{"starcoder2": "norm_epsilon", "nemotron": "norm_eps", "jais2": "layer_norm_eps"}[kind]]
    model.read(norm=_layer_norm(eps, offset=float(kind == "nemotron")), gated=False)
    bias, mlp_bias = (config.flag("use_bias" if is_coder else key) for key in ("attention_bias", "mlp_bias"))
    attend = attention(bias=bias, window=int(config.get("sliding_window") or 0) if is_coder else 0)
    feed = feed_forward(names=("c_fc", "c_proj") if is_coder else None, bias=mlp_bias)
    decoder(model, attend, feed)


@family("stablelm", "phi")
def stablelm(model: Builder) -> None:
    """LayerNorm, a part of each head is rotated; Phi, and StableLM if it says so, in parallel blocks."""
    config, is_phi = model.config, model.kind == "phi"
    model.read(norm=_layer_norm(config.get("layer_norm_eps")), gated=not is_phi)
    is_parallel = is_phi or config.flag("use_parallel_residual")
    norms = head_norms(*LAYERNORMS) if is_phi else _norms
    attend = attention(
        qkv_bias=is_phi or config.flag("use_qkv_bias"), out="dense" if is_phi else "o_proj", out_bias=is_phi,
        norms=norms if config.flag("qk_layernorm") else None,
    )  # fmt: skip
    decoder(
        model, attend, feed_forward(names=("fc1", "fc2") if is_phi else None, bias=is_phi),
        norms=("input_layernorm", None if is_parallel else "post_attention_layernorm"),
        final="final_layernorm" if is_phi else "norm", bias=is_phi,
    )  # fmt: skip


def _norms(layer: Layer, sizes: HeadSizes) -> HeadNorms:
    """StableLM: weights for each head."""

    def norm(part: str, heads: int) -> Norm:
        names = (f"self_attn.{part}_layernorm.norms.{head}.weight" for head in range(heads))
        return Norm("layer", layer.model.norm.eps, tuple(layer.weight(name, sizes.head_dim) for name in names))

    return HeadNorms(norm("q", sizes.heads), norm("k", sizes.kv_heads))
