"""Families of which most layers are recurrent: Qwen 3.5, LFM, and those of Mamba 2 with attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cbatch.model.config import ConfigReader, UnsupportedConfig
from cbatch.model.families.builder import Builder, HeadSizes, Layer, NormKind, rows_of
from cbatch.model.families.decoder import (
    LAYERNORMS,
    Part,
    attention,
    by_kind,
    decoder,
    family,
    feed_forward,
    head_norms,
    mixture,
    num_experts,
    separate_qkv,
)
from cbatch.model.families.experts import biased_router, gated_shared_expert, output_gate, sparse_layers
from cbatch.model.families.mixers import (
    DeltaSizes,
    ScanSizes,
    expanded_mamba,
    gated_convolution,
    gated_delta_net,
    mamba2,
    number,
)
from cbatch.model.ops.all import Activation, Gate, Linear, Matrix, Norm, Normalize


@family("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
def qwen_hybrid(model: Builder) -> None:
    """Norms have weights around 0, but for those of the delta nets. Text needs none of the positions for pictures."""
    config, is_next = model.config, model.kind == "qwen3_next"
    config.expect("hidden_act", "silu")  # also after the convolutions
    model.read(norm=NormKind(config.get("rms_norm_eps"), offset=1.0))
    bias, interval = config.flag("attention_bias"), config.whole("full_attention_interval")
    kinds = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in model.numbers]
    kinds = model.layer_types(kinds, ("full_attention", "linear_attention"))
    config.ignore("intermediate_size")
    gated = attention(
        qkv=lambda layer, sizes: _with_gates(layer, sizes, bias=bias)[0], out_bias=bias, norms=head_norms(),
        gate=lambda layer, source, sizes: _gate(layer, source, bias=bias),
    )  # fmt: skip
    keys = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    sizes = (config.whole(f"linear_{key}") for key in keys)
    delta = gated_delta_net(DeltaSizes(*sizes), _interleaved if is_next else _side_by_side)
    feed = feed_forward()
    if model.kind != "qwen3_5_text":
        sparse = sparse_layers(config, model.num_layers) if is_next else [True] * model.num_layers
        sparse = [one and num_experts(config) > 0 for one in sparse]
        router = {"scores": "softmax", "normalize": config.flag("norm_topk_prob") if is_next else True}
        feed = mixture(model, router, sparse=sparse, beside=gated_shared_expert)
    decoder(model, by_kind(kinds, full_attention=gated, linear_attention=delta), feed)


def _with_gates(layer: Layer, sizes: HeadSizes, *, bias: bool) -> tuple[Matrix, Matrix]:
    """Queries, keys and values; and gates, of which each head of q_proj gives one after its query."""
    twice = replace(sizes, heads=2 * sizes.heads)
    qkv, dim = separate_qkv(bias=bias)(layer, twice), sizes.head_dim
    start = 2 * dim * torch.arange(sizes.heads)[:, None] + torch.arange(dim)
    both = Matrix(qkv.parts[:1], qkv.biases[:1])
    gates, queries = rows_of(both, (start + dim).flatten()), rows_of(both, start.flatten())
    return Matrix(queries.parts + qkv.parts[1:], queries.biases + qkv.biases[1:]), gates


def _gate(layer: Layer, source: str, *, bias: bool) -> Gate:
    layer.model.add(Linear(source, "gate", _with_gates(layer, layer.model.sizes, bias=bias)[1]))
    return Gate("gate", "attended")


def _side_by_side(layer: Layer, sizes: DeltaSizes) -> tuple[Matrix, Matrix]:
    """Of Qwen 3.5: queries, keys and values, then gates; and what controls the state."""
    hidden, names = layer.model.hidden_size, [f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a")]
    mixed = layer.matrix(names[:2], [2 * sizes.keys + sizes.values, sizes.values], hidden)
    return mixed, layer.matrix(names[2:], [sizes.value_heads] * 2, hidden)


def _interleaved(layer: Layer, sizes: DeltaSizes) -> tuple[Matrix, Matrix]:
    """Of Qwen 3 Next: a head of keys and the heads of values that it serves lie together."""
    hidden, shared = layer.model.hidden_size, sizes.value_heads // sizes.key_heads
    values = shared * sizes.value_dim
    mixed = layer.matrix("linear_attn.in_proj_qkvz", 2 * (sizes.keys + sizes.values), hidden)
    controls = layer.matrix("linear_attn.in_proj_ba", 2 * sizes.value_heads, hidden)
    order = _gathered(sizes.key_heads, [sizes.key_dim, sizes.key_dim, values, values])
    return rows_of(mixed, order), rows_of(controls, _gathered(sizes.key_heads, [shared, shared]))


def _gathered(groups: int, widths: list[int]) -> Tensor:
    """The order of rows that brings parts together which each of the groups has."""
    parts = torch.split(torch.arange(groups * sum(widths)).view(groups, -1), widths, dim=1)
    return torch.cat([part.flatten() for part in parts])


_LFM_NAMES = ("w1", "w3", "w2")
_LFM_NORMS = ("operator_norm", "ffn_norm")


@family("lfm2", "lfm2_moe")
def lfm2(model: Builder) -> None:
    """One has experts after a few dense layers."""
    config, prefix = model.config, "feed_forward."
    model.read(norm=NormKind(config.get("norm_eps")))
    config.ignore("tie_embedding")  # the files show it
    attends = config.get("full_attn_idxs") or list(model.numbers)
    kinds = ["full_attention" if i in attends else "conv" for i in model.numbers]
    mix = by_kind(
        model.layer_types(kinds, ("full_attention", "conv")),
        full_attention=attention(out="out_proj", norms=head_norms(*LAYERNORMS)),
        conv=gated_convolution(config.whole("conv_L_cache"), bias=config.flag("conv_bias")),
    )
    if model.kind == "lfm2":
        feed = feed_forward(size=_feed_forward_size(model), prefix=prefix, names=_LFM_NAMES)
    else:
        router = {
            "name": prefix + "gate", "scores": "sigmoid", "normalize": config.flag("norm_topk_prob"),
            "choice_bias": prefix + "expert_bias" if config.get("use_expert_bias") else "", "epsilon": 1e-6,
            "factor": config.number("routed_scaling_factor"),
        }  # fmt: skip
        sparse = [i >= config.whole("num_dense_layers") for i in model.numbers]
        feed = mixture(
            model, router, prefix=prefix + "experts.", names=_LFM_NAMES, sparse=sparse,
            dense=feed_forward(size=config.whole("intermediate_size"), prefix=prefix, names=_LFM_NAMES),
        )  # fmt: skip
    decoder(model, mix, feed, norms=_LFM_NORMS, final="embedding_norm")


def _feed_forward_size(model: Builder) -> int:
    """Two thirds of what the file says, up to a multiple."""
    config = model.config
    size = int(config.first("block_ff_dim", "intermediate_size"))
    factor, multiple = config.get("block_ffn_dim_multiplier"), config.whole("block_multiple_of")
    if not config.get("block_auto_adjust_ff_dim"):
        return size
    size = int(2 * size / 3)
    if factor is None:
        return size
    return -(-int(factor * size) // multiple) * multiple


@family("lfm3")
def lfm3(model: Builder) -> None:
    """Windows with rotations of their own, a gate for each head, and norms after each part."""
    config = model.config
    model.read(norm=NormKind(config["norm_eps"]), has_rotary=False)
    kinds = ["conv" if i % 2 or i == 0 else "full_attention" if i % 4 == 2 else "sliding_attention"
             for i in model.numbers]  # fmt: skip
    kinds = model.layer_types(kinds, ("full_attention", "sliding_attention", "conv"))
    window = int(config.get("sliding_window") or 0)
    defaults = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    }
    is_given = bool(config.get("rope_parameters"))
    rotaries: dict[str, int | None] = {
        kind: model.read_rotary(layer_type=kind, settings=None if is_given else defaults[kind])
        for kind in sorted(set(kinds) - {"conv"})
    }
    after = ("post_operator_norm", "post_ffn_norm") if config.flag("use_sandwich_norm") else ("", "")
    attend = attention(
        bias=config.flag("attention_bias"), rotary=[rotaries.get(kind) for kind in kinds], norms=head_norms(),
        window=[window if kind == "sliding_attention" else 0 for kind in kinds], after=after[0],
        gate=output_gate(by_head=True) if config.flag("use_attention_gate") else None,
    )  # fmt: skip
    conv = gated_convolution(config.whole("conv_L_cache"), bias=config.flag("conv_bias"), after=after[0])
    mix = by_kind(kinds, conv=conv, full_attention=attend, sliding_attention=attend)
    feed = feed_forward(prefix="feed_forward.", names=_LFM_NAMES, after=after[1])
    decoder(model, mix, feed, norms=_LFM_NORMS, final="embedding_norm")


_MAMBA_NORMS = "input_layernorm", "pre_ff_layernorm"
_MAMBA, _ATTENTION, _EXPERTS, _DENSE = "linear_attention", "full_attention", "moe", "mlp"
_LETTERS = {"M": _MAMBA, "*": _ATTENTION, "E": _EXPERTS, "-": _DENSE}
"""How older files of Nemotron H write the kinds of layers."""


@family("bamba")
def bamba(model: Builder) -> None:
    """A feed-forward part in every layer, and heads of which a half is rotated."""
    config = model.config
    model.read(part=0.5)
    config.expect("hidden_act", "silu")  # also after the convolutions
    config.ignore("mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient")
    attends = config.get("attn_layer_indices") or []
    mix = by_kind(
        ["attention" if i in attends else "mamba" for i in model.numbers],
        attention=attention(bias=config.flag("attention_bias")), mamba=expanded_mamba(model),
    )  # fmt: skip
    feed = feed_forward(prefix="feed_forward.", bias=config.flag("mlp_bias"))
    decoder(model, mix, feed, norms=_MAMBA_NORMS, final="final_layernorm")


@family("falcon_h1")
def falcon_h1(model: Builder) -> None:
    """Mamba and attention read the same norm in every layer. There are multipliers everywhere."""
    config = model.config
    model.read()
    config.expect("hidden_act", "silu")  # also after the convolutions
    config.ignore("mamba_chunk_size", "num_logits_to_keep")

    def multiplier(name: str) -> float:
        return float(config.get(f"{name}_multiplier", 1.0))

    bias, enters, comes_in = config.flag("attention_bias"), multiplier("attention_in"), multiplier("ssm_in")
    if bias and enters != 1:
        raise UnsupportedConfig("its attention has biases and a multiplier of its input")
    if config.flag("mamba_proj_bias") and comes_in != 1:
        raise UnsupportedConfig("its recurrent layers have biases and a multiplier of their input")
    mamba = expanded_mamba(
        model, has_norm=config.flag("mamba_rms_norm"), gate_first=not config.get("mamba_norm_before_gate"),
        out_bias=config.flag("projectors_bias"), factor=multiplier("ssm_out"),
        multipliers=[comes_in * float(one) for one in config.get("ssm_multipliers") or [1.0] * 5],
    )  # fmt: skip
    scale = model.sizes.head_dim**-0.5 * multiplier("key") * enters * enters
    attend = attention(bias=bias, scale=scale, factor=multiplier("attention_out") * enters)

    def mix(layer: Layer, source: str) -> None:
        mamba(layer, source)
        attend(layer, source)

    before, after = (float(one) for one in config.get("mlp_multipliers") or [1.0, 1.0])
    feed = feed_forward(prefix="feed_forward.", bias=config.flag("mlp_bias"), gate_factor=before, factor=after)
    decoder(
        model, mix, feed, norms=_MAMBA_NORMS, final="final_layernorm", scale=multiplier("embedding"),
        factor=multiplier("lm_head"),
    )  # fmt: skip


@family("nemotron_h")
def nemotron_h(model: Builder) -> None:
    """Each layer is one part: Mamba, attention without positions, a feed-forward part or experts, all without gates."""
    config, prefix = model.config, "mixer."
    model.read(norm=NormKind(config.get("layer_norm_epsilon")), has_rotary=False, gated=False)
    config.expect("mamba_hidden_act", "silu")
    config.ignore(
        "sliding_window", "use_mamba_kernels", "chunk_size", "expand", "time_step_max", "time_step_limit",
        "time_step_floor", "mtp_layers_block_type", "mtp_hybrid_override_pattern", "num_logits_to_keep",
        "intermediate_size", "rope_theta", "rope_parameters", "partial_rotary_factor",
    )  # fmt: skip
    keys = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
    scan = _scan_sizes(config, keys, (config.number("time_step_min"), math.inf))
    older = [_LETTERS.get(letter, letter) for letter in config.get("hybrid_override_pattern") or ""]
    kinds, bias = model.layer_types(older, list(_LETTERS.values())), config.flag("mlp_bias")
    parts = {
        _MAMBA: mamba2(scan, prefix=prefix, bias=config.flag("use_bias"), conv_bias=config.flag("use_conv_bias")),
        _ATTENTION: attention(prefix=prefix),
        _DENSE: feed_forward(prefix=prefix, bias=bias),
    }
    if _EXPERTS in kinds:
        parts[_EXPERTS] = _nemotron_experts(model, prefix, bias=bias)
    decoder(model, by_kind(kinds, **parts), norms=("norm",), embed="embeddings", final="norm_f")


def _scan_sizes(config: ConfigReader, keys: Sequence[str], limits: Sequence[float]) -> ScanSizes:
    heads, head_dim, groups, state_size, kernel = map(config.whole, keys)
    return ScanSizes(heads, head_dim, groups, state_size, kernel, limits)


@family("mamba2")
def mamba2_alone(model: Builder) -> None:
    """Nothing but Mamba 2, which knows no positions."""
    config = model.config
    model.norm, model.max_model_len = NormKind(config.get("layer_norm_epsilon")), 2**18
    config.expect("hidden_act", "silu")
    config.ignore(
        "chunk_size", "time_step_rank", "time_step_min", "time_step_max", "time_step_floor", "residual_in_fp32"
    )
    keys = ("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel")
    sizes = _scan_sizes(config, keys, [number(one) for one in config.get("time_step_limit") or (0.0, math.inf)])
    if sizes.inner != int(config.number("expand") * model.hidden_size):
        raise UnsupportedConfig("the heads of its recurrent layers do not fit its size")
    mix = mamba2(sizes, prefix="mixer.", bias=config.flag("use_bias"), conv_bias=config.flag("use_conv_bias"))
    model.renamed = (("backbone.embedding.", "backbone.embeddings."),)
    decoder(model, mix, norms=("norm",), root="backbone.", embed="embeddings", final="norm_f")


def _nemotron_experts(model: Builder, prefix: str, *, bias: bool) -> Part:
    """Experts beside a feed-forward part for all tokens; those of Nemotron 3 Super may read and give a latent."""
    config, hidden, names = model.config, model.hidden_size, ("up_proj", "down_proj")
    shared, latent = config.whole("moe_shared_expert_intermediate_size"), config.get("moe_latent_size")
    router = {"name": prefix + "gate"} | biased_router(config, prefix + "gate.e_score_correction_bias")
    beside = feed_forward(size=shared, prefix=prefix + "shared_experts.", bias=bias)
    if latent is None:
        return mixture(model, router, prefix=prefix + "experts.", names=names, beside=beside)
    count, size, width = num_experts(config), config.whole("moe_intermediate_size"), int(latent)

    def feed(layer: Layer, source: str) -> None:
        top_k = layer.route(source, count, **router)
        down = layer.matrix(prefix + "fc1_latent_proj", width, hidden, bias=bias)
        model.add(Linear(source, "latent", down, activation=Activation("identity", gated=False)))
        layer.experts(
            "latent", count, top_k, size, prefix=prefix + "experts.", names=names, target="mixed", width=width
        )
        model.add(Normalize("mixed", "latent", Norm("none", 0.0)))
        layer.add_to_residual("latent", layer.matrix(prefix + "fc2_latent_proj", hidden, width, bias=bias))
        beside(layer, source)

    return feed
