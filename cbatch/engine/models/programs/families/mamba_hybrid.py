"""Mamba 2 with attention in a few layers: Bamba and Nemotron H."""

from __future__ import annotations

import math

from cbatch.engine.models.programs.builder import Builder, Layer, NormKind
from cbatch.engine.models.programs.config_reader import UnsupportedConfig
from cbatch.engine.models.programs.families.experts import biased_router
from cbatch.engine.models.programs.families.granite import expanded_scan
from cbatch.engine.models.programs.families.registry import family
from cbatch.engine.models.programs.mixers import ScanSizes, mamba2
from cbatch.engine.models.programs.program import Activation
from cbatch.engine.models.programs.rotary import read_rotary

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
    bias, mlp_bias = bool(config.get("attention_bias", False)), bool(config.get("mlp_bias", False))
    model.embed()
    for layer in model.layers():
        source = layer.norm(norm, "input_layernorm")
        if layer.number in attends:
            layer.attention(source, sizes, qkv_bias=bias, out_bias=bias, rotary=rotary)
        else:
            mamba2(
                layer, source, scan, norm(layer.prefix + "mamba.norm", scan.inner), norm_groups=scan.groups,
                bias=bool(config.get("mamba_proj_bias", False)), conv_bias=bool(config.get("mamba_conv_bias", True)),
            )  # fmt: skip
        source = layer.norm(norm, "pre_ff_layernorm")
        layer.feed_forward(source, config["intermediate_size"], activation, prefix="feed_forward.", bias=mlp_bias)
    model.head(norm("model.final_layernorm", model.hidden_size))


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
    scan, bias = _nemotron_scan(model), bool(config.get("mlp_bias", False))
    model.embed("model.embeddings")
    for layer, kind in zip(model.layers(), _nemotron_layers(model), strict=True):
        source = layer.norm(norm, "norm")
        match kind:
            case "linear_attention":
                mamba2(
                    layer, source, scan, norm(layer.prefix + "mixer.norm", scan.inner), prefix=prefix,
                    norm_groups=scan.groups, bias=bool(config.get("use_bias", False)),
                    conv_bias=bool(config.get("use_conv_bias", True)),
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
        heads=int(config.get("mamba_num_heads", 128)),
        head_dim=int(config.get("mamba_head_dim", 64)),
        groups=int(config.get("n_groups", 8)),
        state_size=int(config.get("ssm_state_size", 128)),
        kernel=int(config.get("conv_kernel", 4)),
        limits=(float(config.get("time_step_min", 0.001)), math.inf),
    )


def _nemotron_experts(layer: Layer, source: str, activation: Activation, *, bias: bool) -> None:
    config, names = layer.model.config, ("up_proj", "down_proj")
    config.expect("moe_latent_size", None)
    experts, size = int(config.get("n_routed_experts", 8)), int(config.get("moe_intermediate_size", 7688))
    choice_bias = layer.weight("mixer.gate.e_score_correction_bias", experts)
    layer.route(source, experts, "mixer.gate", choice_bias=choice_bias, **biased_router(config))
    layer.experts(source, experts, size, activation, prefix="mixer.experts.", names=names)
    shared = int(config.get("moe_shared_expert_intermediate_size", 7688))
    layer.feed_forward(source, shared, activation, prefix="mixer.shared_experts.", names=names, bias=bias)
