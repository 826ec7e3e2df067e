"""Recurrent layers in declarations: gated delta nets, Mamba 2 and short convolutions, up to their last linear."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from cbatch.model.config import UnsupportedConfig
from cbatch.model.families.builder import Builder, Layer
from cbatch.model.families.decoder import Part
from cbatch.model.ops.all import GatedDelta, GatedNorm, Linear, Matrix, Norm, SelectiveScan, ShortConvolution


@dataclass(frozen=True, slots=True)
class DeltaSizes:
    """Heads of a gated delta net."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim


def gated_delta_net(sizes: DeltaSizes, matrices: Callable[[Layer, DeltaSizes], tuple[Matrix, Matrix]]) -> Part:
    """A gated delta net, whose result is added to the residual.

    matrices: make that of queries, keys, values and gates, and that of the controls (see `GatedDelta`)
    """
    prefix, channels, heads = "linear_attn.", 2 * sizes.keys + sizes.values, sizes.value_heads
    if heads % sizes.key_heads:
        raise UnsupportedConfig(f"its {heads} heads of values cannot share {sizes.key_heads} of keys")

    def mix(layer: Layer, source: str) -> None:
        model, (mixed, controls) = layer.model, matrices(layer, sizes)
        model.add(Linear(source, "mixed", mixed))
        model.add(Linear(source, "controls", controls))
        weight = layer.weight(prefix + "conv1d.weight", channels, 1, sizes.kernel)
        state = model.new_state(channels, sizes.kernel - 1)
        model.add(ShortConvolution("mixed", "convolved", weight, state, activation="silu"))
        model.add(
            GatedDelta(
                "convolved", "controls", "recurrent", sizes.key_heads, heads, sizes.key_dim, sizes.value_dim,
                model.new_state(heads, sizes.key_dim, sizes.value_dim),
                layer.weight(prefix + "A_log", heads), layer.weight(prefix + "dt_bias", heads),
            )
        )  # fmt: skip
        weight = layer.weight(prefix + "norm.weight", sizes.value_dim)
        weight = replace(weight, rows=torch.arange(sizes.value_dim).repeat(heads))
        norm = Norm("rms", model.norm.eps, (weight,))
        model.add(GatedNorm("recurrent", "mixed", "gated", norm, heads, gate_start=channels))
        layer.add_to_residual("gated", layer.matrix(prefix + "out_proj", model.hidden_size, sizes.values))

    return mix


@dataclass(frozen=True, slots=True)
class ScanSizes:
    """Heads of a Mamba 2 layer.

    limits: smallest and largest step
    """

    heads: int
    head_dim: int
    groups: int
    state_size: int
    kernel: int
    limits: Sequence[float] = (0.0, math.inf)

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        return self.inner + 2 * self.groups * self.state_size


def mamba2(
    sizes: ScanSizes, *, prefix: str = "mamba.", has_norm: bool = True, gate_first: bool = True, bias: bool = False,
    conv_bias: bool = True, out_bias: bool | None = None, multipliers: Sequence[float] = (1.0,) * 5,
    factor: float = 1.0,
) -> Part:  # fmt: skip
    """A layer of Mamba 2, whose result is added to the residual.

    has_norm, gate_first: whether groups of the result are normed, and whether its gate comes before that
    out_bias:    if it is another than `bias`
    multipliers: of the gates, x, B, C and the steps
    """
    inner, channels, heads = sizes.inner, sizes.channels, sizes.heads
    if heads % sizes.groups:
        raise UnsupportedConfig(f"its {heads} heads cannot share {sizes.groups} groups")
    shared, (low, high) = sizes.groups * sizes.state_size, sizes.limits

    def mix(layer: Layer, source: str) -> None:
        model = layer.model
        mixed = layer.matrix(prefix + "in_proj", inner + channels + heads, model.hidden_size, bias=bias)
        if set(multipliers) != {1.0}:
            mixed = _scaled_parts(mixed, [inner, inner, shared, shared, heads], multipliers)
        model.add(Linear(source, "mixed", mixed))
        weight = layer.weight(prefix + "conv1d.weight", channels, 1, sizes.kernel)
        conv = layer.weight(prefix + "conv1d.bias", channels) if conv_bias else None
        state = model.new_state(channels, sizes.kernel - 1)
        model.add(ShortConvolution("mixed", "convolved", weight, state, inner, conv, activation="silu"))
        decay_log, step_bias, skip = (layer.weight(prefix + name, heads) for name in ("A_log", "dt_bias", "D"))
        model.add(
            SelectiveScan(
                "convolved", "mixed", "recurrent", heads, sizes.head_dim, sizes.groups, sizes.state_size,
                model.new_state(heads, sizes.head_dim, sizes.state_size), decay_log, step_bias, skip,
                step_start=inner + channels, step_min=low, step_max=high,
            )
        )  # fmt: skip
        norm = layer.norm_of(prefix + "norm", inner) if has_norm else Norm("none", 0.0)
        model.add(GatedNorm("recurrent", "mixed", "gated", norm, sizes.groups, gate_first=gate_first))
        has_bias = bias if out_bias is None else out_bias
        out = layer.matrix(prefix + "out_proj", model.hidden_size, inner, bias=has_bias)
        layer.add_to_residual("gated", out, factor=factor)

    return mix


def expanded_mamba(model: Builder, **options: Any) -> Part:
    """Mamba 2 with the biases that the config says, whose heads share a multiple of the hidden size."""
    config = model.config
    inner, heads = config.whole("mamba_expand", 2) * model.hidden_size, config.whole("mamba_n_heads", 128)
    if model.kind == "falcon_h1":
        inner = int(config.get("mamba_d_ssm", 1024) or inner)
    head_dim = config.get("mamba_d_head", "auto")
    low, high = map(number, config.get("time_step_limit") or (0.0, math.inf))
    sizes = ScanSizes(
        heads, inner // heads if head_dim == "auto" else int(head_dim), config.whole("mamba_n_groups", 1),
        config.whole("mamba_d_state", 256), config.whole("mamba_d_conv", 4), (low, high),
    )  # fmt: skip
    if sizes.inner != inner:
        raise UnsupportedConfig("the heads of its recurrent layers do not fit its size")
    bias, conv_bias = config.flag("mamba_proj_bias"), config.flag("mamba_conv_bias", True)
    return mamba2(sizes, bias=bias, conv_bias=conv_bias, **options)


def number(value: Any) -> float:
    """Files that transformers saves name infinity, for which JSON has no number."""
    return float(value["__float__"] if isinstance(value, dict) else value)


def _scaled_parts(matrix: Matrix, widths: Sequence[int], factors: Sequence[float]) -> Matrix:
    """A matrix of one linear, of which each part of the columns is multiplied with a factor."""
    rows = torch.split(torch.arange(matrix.columns), list(widths))
    parts, biases = (
        [replace(each[0], rows=part, factor=factor) for part, factor in zip(rows, factors, strict=True)] if each else []
        for each in (matrix.parts, matrix.biases)
    )
    return Matrix(tuple(parts), tuple(biases))


def gated_convolution(kernel: int, *, bias: bool = False, after: str = "") -> Part:
    """A short convolution between two gates (LFM 2), whose result is added to the residual. after: the norm of it"""

    def mix(layer: Layer, source: str) -> None:
        model, hidden = layer.model, layer.model.hidden_size
        model.add(Linear(source, "mixed", layer.matrix("conv.in_proj", 3 * hidden, hidden, bias=bias)))
        weight = layer.weight("conv.conv.weight", hidden, 1, kernel)
        conv_bias, state = layer.weight("conv.conv.bias", hidden) if bias else None, model.new_state(hidden, kernel - 1)
        model.add(
            ShortConvolution(
                "mixed", "convolved", weight, state, 2 * hidden, conv_bias, input_gate=0, output_gate=hidden
            )
        )  # fmt: skip
        out = layer.matrix("conv.out_proj", hidden, hidden, bias=bias)
        layer.add_to_residual("convolved", out, after=after)

    return mix
