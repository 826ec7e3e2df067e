"""Families with LayerNorm, most with biases and without gates."""

from __future__ import annotations

import torch

from cbatch.model.families.builder import Builder, HeadSizes, Layer, NormKind
from cbatch.model.families.decoder import attention, decoder, family, feed_forward
from cbatch.model.families.rotary import read_rotary
from cbatch.model.ops.all import HeadNorms, Linear, Matrix, Norm


def _layer_norm(eps: float, *, offset: float = 0.0) -> NormKind:
    return NormKind(eps, "layer", offset, has_bias=True)


def by_head(sizes: HeadSizes) -> torch.Tensor:
    """Where the rows of queries, then keys, then values lie if each head has its three side by side."""
    rows = torch.arange(3 * sizes.heads * sizes.head_dim).view(sizes.heads, 3, sizes.head_dim)
    return rows.transpose(0, 1).flatten()


@family("gpt2", "gpt-sw3", "gpt_bigcode")
def gpt2(model: Builder) -> None:
    """Learned positions. GPT-2 stores its matrices as [depth, columns]."""
    config, is_bigcode = model.config, model.config.kind == "gpt_bigcode"
    norm, hidden = _layer_norm(config.get("layer_norm_epsilon", 1e-5)), model.hidden_size
    is_single = is_bigcode and config.flag("multi_query", True)
    sizes = model.head_sizes(kv_heads=1 if is_single else None)
    default = "gelu_pytorch_tanh" if is_bigcode else "gelu_new"
    activation = model.activation("activation_function", default=default, gated=False)
    inner = int(config.get("n_inner") or 4 * hidden)
    config.ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "reorder_and_upcast_attn", "n_ctx",
                  "num_key_value_heads", "runner_max_sequence_length", "inference_runner", "validate_runner_input",
                  "pre_allocate_kv_cache", "max_sequence_length", "max_batch_size", "pad_key_length")  # fmt: skip
    config.ignore(
        *(f"summary_{name}" for name in ("activation", "first_dropout", "proj_to_labels", "type", "use_proj"))
    )
    config.expect("add_cross_attention", False)
    scale = sizes.head_dim**-0.5 if config.get("scale_attn_weights", True) else 1.0
    by_layer = config.flag("scale_attn_by_inverse_layer_idx")
    model.layouts = ((("transformer.", ""),),)
    model.spare.append(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)")
    model.embed("transformer.wte", positions="transformer.wpe")
    for layer in model.layers("transformer.h"):

        def matrix(name: str, columns: int, depth: int) -> Matrix:
            return layer.matrix(name, columns, depth, bias=True, transpose=not is_bigcode)  # noqa: B023

        qkv = matrix("attn.c_attn", sum(sizes.columns), hidden)
        if is_bigcode and not is_single:
            qkv = layer.fused_qkv(sizes, "attn.c_attn", bias=True, order=by_head(sizes))
        out, own_scale = matrix("attn.c_proj", hidden, hidden), scale / (layer.number + 1) if by_layer else scale
        layer.attention(layer.norm(norm, "ln_1"), sizes, qkv=qkv, out=out, scale=own_scale)
        up, down = matrix("mlp.c_fc", inner, hidden), matrix("mlp.c_proj", hidden, inner)
        model.add(Linear(layer.norm(norm, "ln_2"), "intermediate", up, activation=activation))
        layer.add_to_residual("intermediate", down)
    model.head(norm("transformer.ln_f", hidden), tied_by_default=True)


@family("gpt_neox", "persimmon")
def gpt_neox(model: Builder) -> None:
    """Attention and feed-forward part side by side in GPT-NeoX; both rotate a part of each head."""
    config, is_neox = model.config, model.config.kind == "gpt_neox"
    norm, hidden = _layer_norm(config.get("layer_norm_eps", 1e-5)), model.hidden_size
    part = float(config.get("rotary_pct") or 0.25) if is_neox else 0.5
    config.ignore("head_dim") if not is_neox else None
    rotary = read_rotary(
        config, hidden // config.whole("num_attention_heads"), part=part,
        theta_key="rotary_emb_base" if is_neox else "rope_theta",
    )  # fmt: skip
    sizes, index = model.head_sizes(), model.rotary(rotary)
    activation = model.activation("hidden_act", default="gelu" if is_neox else "relu2", gated=False)
    bias = config.flag("attention_bias", True) if is_neox else True
    is_parallel = is_neox and config.flag("use_parallel_residual", True)
    has_norms = not is_neox and config.flag("qk_layernorm", True)
    prefix, part_name = ("gpt_neox", "attention.") if is_neox else ("model", "self_attn.")
    if is_neox:
        model.spare.append(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)")
    feed = feed_forward(activation, names=("dense_h_to_4h", "dense_4h_to_h"), bias=True)
    model.embed("gpt_neox.embed_in" if is_neox else "model.embed_tokens")
    for layer in model.layers(f"{prefix}.layers"):
        source = layer.norm(norm, "input_layernorm")
        second = layer.norm(norm, "post_attention_layernorm", target="normed_too") if is_parallel else ""
        names = "self_attn.q_layernorm", "self_attn.k_layernorm"
        norms = layer.head_norms(norm, sizes, names) if has_norms else None
        qkv = layer.fused_qkv(sizes, part_name + "query_key_value", bias=bias, order=by_head(sizes))
        out = layer.matrix(part_name + "dense", hidden, hidden, bias=bias)
        layer.attention(source, sizes, qkv=qkv, out=out, rotary=index, norms=norms)
        feed(layer, second or layer.norm(norm, "post_attention_layernorm"))
    final = norm(f"{prefix}.{'final_layer_norm' if is_neox else 'final_layernorm'}", hidden)
    model.head(final, "embed_out" if is_neox else "lm_head")


@family("opt", "biogpt")
def opt(model: Builder) -> None:
    """Learned positions from the third row of their table on."""
    config, is_opt = model.config, model.config.kind == "opt"
    hidden, norm = model.hidden_size, _layer_norm(1e-5)
    bias = config.flag("enable_bias", True) if is_opt else True
    sizes = model.head_sizes()
    if is_opt:
        for key, value in (("do_layer_norm_before", True), ("_remove_final_layer_norm", False),
                           ("layer_norm_elementwise_affine", True)):  # fmt: skip
            config.expect(key, value)
        config.expect("word_embed_proj_dim", hidden)
        activation = model.activation("activation_function", default="relu", gated=False)
        model.layouts = ((("model.decoder.", "decoder."),),)
    else:
        config.ignore("layer_norm_eps")
        activation = model.activation("hidden_act", default="gelu", gated=False)
    config.ignore("layerdrop", "activation_dropout")
    inner, root = config.whole("ffn_dim" if is_opt else "intermediate_size"), "model.decoder" if is_opt else "biogpt"
    scale = hidden**0.5 if not is_opt and config.flag("scale_embedding", True) else 1.0
    model.embed(f"{root}.embed_tokens", scale, f"{root}.embed_positions", offset=2)
    for layer in model.layers(f"{root}.layers"):
        qkv, out = layer.qkv(sizes, bias=bias), layer.matrix("self_attn.out_proj", hidden, hidden, bias=bias)
        layer.attention(layer.norm(norm, "self_attn_layer_norm"), sizes, qkv=qkv, out=out)
        source = layer.norm(norm, "final_layer_norm")
        layer.feed_forward(source, inner, activation, prefix="", names=("fc1", "fc2"), bias=bias)
    final = f"{root}.final_layer_norm" if is_opt else f"{root}.layer_norm"
    model.head(norm(final, hidden), "lm_head" if is_opt else "output_projection", tied_by_default=True)


@family("starcoder2", "nemotron", "jais2")
def starcoder2(model: Builder) -> None:
    """LayerNorm and no gates. Nemotron adds 1 to the weights of norms, and rotates half of each head."""
    config, kind, is_coder = model.config, model.config.kind, model.config.kind == "starcoder2"
    eps = config[{"starcoder2": "norm_epsilon", "nemotron": "norm_eps", "jais2": "layer_norm_eps"}[kind]]
    norm = _layer_norm(eps, offset=1.0 if kind == "nemotron" else 0.0)
    sizes = model.head_sizes()
    rotary = model.rotary(read_rotary(config, sizes.head_dim, part=0.5 if kind == "nemotron" else None))
    activation = model.activation("hidden_act", default="gelu_pytorch_tanh" if is_coder else "relu2", gated=False)
    if is_coder:
        bias = mlp_bias = config.flag("use_bias", True)
        window = int(config.get("sliding_window") or 0)
    else:
        bias, mlp_bias = (config.flag(key, kind == "jais2") for key in ("attention_bias", "mlp_bias"))
        window = 0
    names = ("c_fc", "c_proj") if is_coder else ("up_proj", "down_proj")
    attend = attention(sizes, bias=bias, rotary=rotary, window=window)
    decoder(model, norm, attend, feed_forward(activation, names=names, bias=mlp_bias), tied_by_default=is_coder)


@family("stablelm", "phi")
def stablelm(model: Builder) -> None:
    """LayerNorm, a part of each head is rotated; Phi, and StableLM if it says so, in parallel blocks."""
    config, is_phi = model.config, model.config.kind == "phi"
    norm, sizes = _layer_norm(config.get("layer_norm_eps", 1e-5)), model.head_sizes()
    rotary = model.rotary(read_rotary(config, sizes.head_dim, part=0.5 if is_phi else 0.25))
    activation = model.activation("hidden_act", default="gelu_new" if is_phi else "silu", gated=not is_phi)
    bias = is_phi or config.flag("use_qkv_bias")
    is_parallel = is_phi or config.flag("use_parallel_residual")
    has_norms = config.flag("qk_layernorm")
    feed = feed_forward(activation, names=("fc1", "fc2") if is_phi else None, bias=is_phi)

    def norms(layer: Layer) -> HeadNorms | None:
        if not has_norms:
            return None
        if is_phi:
            return layer.head_norms(norm, sizes, ("self_attn.q_layernorm", "self_attn.k_layernorm"))

        def norm_of(part: str, heads: int) -> Norm:  # StableLM: weights for each head
            names = (f"self_attn.{part}_layernorm.norms.{head}.weight" for head in range(heads))
            return Norm("layer", norm.eps, tuple(layer.weight(name, sizes.head_dim) for name in names))

        return HeadNorms(norm_of("q", sizes.heads), norm_of("k", sizes.kv_heads))

    model.embed()
    for layer in model.layers():
        source = layer.norm(norm, "input_layernorm")
        out = layer.out(sizes, "self_attn.dense" if is_phi else "self_attn.o_proj", bias=is_phi)
        layer.attention(source, sizes, qkv_bias=bias, out=out, rotary=rotary, norms=norms(layer))
        feed(layer, source if is_parallel else layer.norm(norm, "post_attention_layernorm"))
    model.head(norm("model.final_layernorm" if is_phi else "model.norm", model.hidden_size), bias=is_phi)
