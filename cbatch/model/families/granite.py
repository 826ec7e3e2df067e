"""Granite and its kin: embedding, residual, scores and logits have multipliers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cbatch.model.families.builder import Builder
from cbatch.model.families.decoder import Part, attention, by_kind, decoder, every, family, feed_forward, mixture
from cbatch.model.families.mixers import expanded_mamba

_NAMES = "input_linear", "output_linear"
_SHARED: dict[str, Any] = {"prefix": "shared_mlp.", "names": _NAMES}
"""Of the feed-forward part beside the experts."""


def _experts(model: Builder, factor: float, names: Sequence[str], router: str, shared: Part | None = None) -> Part:
    """names: of the matrices up to the activation, and of those after it"""
    config, prefix = model.config, "block_sparse_moe."
    return mixture(
        model, {"name": prefix + router, "scores": "softmax_of_chosen"}, size=config.whole("intermediate_size"),
        prefix=prefix, names=tuple(names), stacked=True, factor=factor, beside=shared,
    )  # fmt: skip


_STORED = [f"{name}.weight" for name in _NAMES], "router.layer"


@family("granite", "granite4_vision_text", "granite_docling_text", "granite_swa", "granitemoe", "granitemoeshared",
        "granitemoe_swa", "hyperclovax")  # fmt: skip
def granite(model: Builder) -> None:
    """Those with windows have sinks, and bases of their own in each layer. Those with experts may have shared ones.

    HyperCLOVA X may have norms after each part, and multiplies logits instead of dividing them.
    """
    config, kind, is_clova = model.config, model.kind, model.kind == "hyperclovax"
    has_windows, has_experts = kind.endswith("_swa"), "moe" in kind
    model.read(has_rotary=False)
    thetas = config.get("layer_rope_theta") if has_windows else None
    rotary: list[int | None]
    if thetas is None:
        rotary = [model.read_rotary()] * model.num_layers
    else:
        rotary = [model.read_rotary(base=theta) if theta else None for theta in thetas]
    factor = config.number("residual_multiplier")
    after = ("post_norm1", "post_norm2") if is_clova and config.flag("use_post_norm") else ("", "")
    attend = attention(
        bias=config.flag("attention_bias"), rotary=rotary, factor=factor, has_sinks=has_windows, after=after[0],
        window=model.windows(every(4, model.num_layers, at=0)) if has_windows else 0,
        scale=config.get("attention_multiplier") if is_clova else config.number("attention_multiplier"),
    )  # fmt: skip
    size = config.whole("shared_intermediate_size") if kind in ("granitemoeshared", "granitemoe_swa") else 0
    if has_experts:
        names = (["experts.gate_up_proj", "experts.down_proj"], "router") if has_windows else _STORED
        feed = _experts(model, factor, *names, feed_forward(size=size, factor=factor, **_SHARED) if size else None)
    else:
        feed = feed_forward(bias=config.flag("mlp_bias"), factor=factor, after=after[1])
    _decoder(model, attend, feed)


def _decoder(model: Builder, *parts: Part) -> None:
    scale, logits = model.config.number("embedding_multiplier"), model.config.number("logits_scaling")
    model.image_scale = scale
    logits = logits if model.kind == "hyperclovax" else 1 / logits
    decoder(model, *parts, scale=scale, factor=logits)


@family("granitemoehybrid")
def granite_hybrid(model: Builder) -> None:
    """Most layers are of Mamba 2; positions are encoded in a few models only, and few have experts."""
    config = model.config
    is_rotated = config.expect("position_embedding_type", None, "rope", "nope") == "rope"
    config.ignore(
        "rope_parameters", "rope_scaling", "rope_theta", "intermediate_size", "mamba_chunk_size", "num_experts_per_tok"
    )
    config.expect("hidden_act", "silu")  # also after the convolutions
    model.read(has_rotary=is_rotated)
    factor, scale = config.number("residual_multiplier"), config.number("attention_multiplier")
    attend = attention(bias=config.flag("attention_bias"), factor=factor, scale=scale)
    kinds = model.layer_types(["linear_attention"] * model.num_layers, ("full_attention", "linear_attention"))
    mix = by_kind(kinds, full_attention=attend, linear_attention=expanded_mamba(model, factor=factor))
    feed = feed_forward(size=config.get("shared_intermediate_size"), factor=factor, **_SHARED)
    if config.whole("num_local_experts") > 0:
        feed = _experts(model, factor, *_STORED, feed)
    _decoder(model, mix, feed)
