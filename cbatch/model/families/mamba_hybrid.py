"""Mamba 2 with attention, in other layers (Bamba, Nemotron H) or beside it (Falcon H1)."""

from __future__ import annotations

import math
from dataclasses import replace

from cbatch.model.config import ConfigReader, UnsupportedConfig
from cbatch.model.families.builder import Builder, Layer, NormKind
from cbatch.model.families.decoder import decoder, family, feed_forward
from cbatch.model.families.experts import biased_router
from cbatch.model.families.granite import expanded_mamba, expanded_scan
from cbatch.model.families.mixers import ScanSizes, mamba2
from cbatch.model.families.rotary import read_rotary
from cbatch.model.ops.all import Activation, Linear, Matrix, Norm

_MAMBA, _ATTENTION, _EXPERTS, _DENSE = "linear_attention", "full_attention", "moe", "mlp"
_LETTERS = {"M": _MAMBA, "*": _ATTENTION, "E": _EXPERTS, "-": _DENSE}
"""How older files of Nemotron H write the kinds of layers."""


@family("bamba")
def bamba(model: Builder) -> None:
    """A feed-forward part in every layer, and heads of which a half is rotated."""
    config = model.config
    norm, sizes = NormKind(config.get("rms_norm_eps", 1e-5)), model.head_sizes()
    rotary = model.rotary(read_rotary(config, sizes.head_dim, part=0.5))
    config.expect("hidden_act", "silu")  # also after the convolutions
    config.ignore("attn_rotary_emb", "mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient")
    attends = config.get("attn_layer_indices") or []
    activation, scan = Activation("silu"), expanded_scan(model)
    bias = config.flag("attention_bias")
    feed = feed_forward(activation, prefix="feed_forward.", bias=config.flag("mlp_bias"))

    def mix(layer: Layer, source: str) -> None:
        if layer.number in attends:
            layer.attention(source, sizes, qkv_bias=bias, out_bias=bias, rotary=rotary)
        else:
            expanded_mamba(layer, source, scan, norm)

    names = "input_layernorm", "pre_ff_layernorm"
    decoder(model, norm, mix, feed, norms=names, final="model.final_layernorm")


@family("falcon_h1")
def falcon_h1(model: Builder) -> None:
    """Mamba and attention read the same norm in every layer. There are multipliers everywhere."""
    config = model.config
    norm, sizes = NormKind(config.get("rms_norm_eps", 1e-5)), model.head_sizes()
    rotary = model.rotary(read_rotary(config, sizes.head_dim))
    config.expect("hidden_act", "silu")  # also after the convolutions
    config.ignore("mamba_chunk_size", "num_logits_to_keep", "mamba_use_mlp", "time_step_rank", "time_step_min",
                  "time_step_max", "time_step_floor")  # fmt: skip
    bias, enters = config.flag("attention_bias"), _multiplier(config, "attention_in")
    if bias and enters != 1:
        raise UnsupportedConfig("its attention has biases and a multiplier of its input")
    scale = sizes.head_dim**-0.5 * _multiplier(config, "key") * enters * enters
    scan, has_norm = expanded_scan(model), config.flag("mamba_rms_norm")
    comes_in = _multiplier(config, "ssm_in")
    multipliers = [comes_in * float(one) for one in config.get("ssm_multipliers") or [1.0] * 5]
    proj_bias = config.flag("mamba_proj_bias")
    if proj_bias and comes_in != 1:
        raise UnsupportedConfig("its recurrent layers have biases and a multiplier of their input")
    model.embed(scale=_multiplier(config, "embedding"))
    for layer in model.layers():
        source = layer.norm(norm, "input_layernorm")
        mamba2(
            layer, source, scan, norm(layer.prefix + "mamba.norm", scan.inner) if has_norm else Norm("none", 0.0),
            norm_groups=scan.groups, gate_first=not config.get("mamba_norm_before_gate", True), bias=proj_bias,
            conv_bias=config.flag("mamba_conv_bias", True), out_bias=config.flag("projectors_bias"),
            multipliers=multipliers, factor=_multiplier(config, "ssm_out"),
        )  # fmt: skip
        layer.attention(
            source, sizes, qkv_bias=bias, out_bias=bias, rotary=rotary, scale=scale,
            factor=_multiplier(config, "attention_out") * enters,
        )  # fmt: skip
        _scaled_feed_forward(layer, layer.norm(norm, "pre_ff_layernorm"))
    model.head(norm("model.final_layernorm", model.hidden_size), factor=_multiplier(config, "lm_head"))


def _multiplier(config: ConfigReader, name: str) -> float:
    return float(config.get(f"{name}_multiplier", 1.0))


def _scaled_feed_forward(layer: Layer, source: str) -> None:
    """With a multiplier of what goes into the activation, and one of the result."""
    model, config, prefix = layer.model, layer.model.config, "feed_forward."
    size, bias = config.whole("intermediate_size"), config.flag("mlp_bias")
    before, after = (float(one) for one in config.get("mlp_multipliers") or [1.0, 1.0])
    up = layer.matrix([prefix + "gate_proj", prefix + "up_proj"], [size, size], model.hidden_size, bias=bias)
    parts, biases = (
        tuple(replace(one, factor=before) for one in each[:1]) + each[1:] for each in (up.parts, up.biases)
    )
    model.add(Linear(source, "intermediate", Matrix(parts, biases), activation=Activation("silu")))
    down = layer.matrix(prefix + "down_proj", model.hidden_size, size, bias=bias)
    layer.add_to_residual("intermediate", down, factor=after)


@family("nemotron_h")
def nemotron_h(model: Builder) -> None:
    """Each layer is one part: Mamba, attention without positions, a feed-forward part or experts, all without gates."""
    config, prefix = model.config, "mixer."
    norm, sizes = NormKind(config.get("layer_norm_epsilon", 1e-5)), model.head_sizes(head_dim=128)
    activation = model.activation("mlp_hidden_act", default="relu2", gated=False)
    config.expect("mamba_hidden_act", "silu")
    config.expect("attention_bias", False)
    config.expect("mamba_ssm_cache_dtype", "float32")
    config.ignore("sliding_window", "use_mamba_kernels", "chunk_size", "expand", "time_step_max", "time_step_limit",
                  "time_step_floor", "moe_shared_expert_overlap", "num_nextn_predict_layers", "mtp_layers_block_type",
                  "mtp_hybrid_override_pattern", "mamba_proj_bias", "residual_in_fp32", "rescale_prenorm_residual",
                  "num_logits_to_keep", "intermediate_size", "n_shared_experts", "num_hidden_layers", "rope_theta",
                  "rope_parameters", "partial_rotary_factor")  # fmt: skip
    model.layouts = ((("model.", "backbone."),),)
    model.spare.append(r"mtp\..*")
    scan, bias = _nemotron_scan(model), config.flag("mlp_bias")
    model.embed("model.embeddings")
    for layer, kind in zip(model.layers(), _nemotron_layers(model), strict=True):
        source = layer.norm(norm, "norm")
        match kind:
            case "linear_attention":
                mamba2(
                    layer, source, scan, norm(layer.prefix + "mixer.norm", scan.inner), prefix=prefix,
                    norm_groups=scan.groups, bias=config.flag("use_bias"),
                    conv_bias=config.flag("use_conv_bias", True),
                )  # fmt: skip
            case "full_attention":
                layer.attention(source, sizes, qkv=layer.qkv(sizes, prefix), out=layer.out(sizes, "mixer.o_proj"))
            case "mlp":
                layer.feed_forward(source, config["intermediate_size"], activation, prefix=prefix, bias=bias)
            case _:
                _nemotron_experts(layer, source, activation, bias=bias)
    model.head(norm("model.norm_f", model.hidden_size))


def _nemotron_layers(model: Builder) -> list[str]:
    config, kinds = model.config, model.config.get("layers_block_type")
    if kinds is None:
        kinds = [_LETTERS.get(letter, letter) for letter in config["hybrid_override_pattern"]]
    older = {"mamba": _MAMBA, "attention": _ATTENTION}
    found = [str(older.get(kind, kind)) for kind in kinds]
    if not set(found) <= set(_LETTERS.values()) or len(found) != model.num_layers:
        raise UnsupportedConfig("it has layers of other types")
    config.ignore("hybrid_override_pattern")
    return found


def _nemotron_scan(model: Builder) -> ScanSizes:
    config = model.config
    return ScanSizes(
        heads=config.whole("mamba_num_heads", 128),
        head_dim=config.whole("mamba_head_dim", 64),
        groups=config.whole("n_groups", 8),
        state_size=config.whole("ssm_state_size", 128),
        kernel=config.whole("conv_kernel", 4),
        limits=(config.number("time_step_min", 0.001), math.inf),
    )


def _nemotron_experts(layer: Layer, source: str, activation: Activation, *, bias: bool) -> None:
    config, names = layer.model.config, ("up_proj", "down_proj")
    config.expect("moe_latent_size", None)
    experts, size = config.whole("n_routed_experts", 8), config.whole("moe_intermediate_size", 7688)
    choice_bias = layer.weight("mixer.gate.e_score_correction_bias", experts)
    layer.route(source, experts, "mixer.gate", choice_bias=choice_bias, **biased_router(config))
    layer.experts(source, experts, size, activation, prefix="mixer.experts.", names=names)
    shared = config.whole("moe_shared_expert_intermediate_size", 7688)
    layer.feed_forward(source, shared, activation, prefix="mixer.shared_experts.", names=names, bias=bias)
