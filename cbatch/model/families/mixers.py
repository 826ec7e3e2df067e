"""Recurrent layers in declarations: gated delta nets, Mamba 2 and short convolutions, up to their last linear."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from cbatch.model.config import UnsupportedConfig
from cbatch.model.families.builder import Layer
from cbatch.model.ops.all import (
    GatedDelta,
    GatedNorm,
    Linear,
    Matrix,
    Norm,
    SelectiveScan,
    ShortConvolution,
)


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


def gated_delta_net(
    layer: Layer, source: str, sizes: DeltaSizes, mixed: Matrix, controls: Matrix, eps: float, prefix: str
) -> None:
    """A gated delta net, whose result is added to the residual.

    mixed:    queries, keys, values and gates
    controls: see `GatedDelta`
    """
    model, channels = layer.model, 2 * sizes.keys + sizes.values
    if sizes.value_heads % sizes.key_heads:
        raise UnsupportedConfig(f"its {sizes.value_heads} heads of values cannot share {sizes.key_heads} of keys")
    model.add(Linear(source, "mixed", mixed))
    model.add(Linear(source, "controls", controls))
    weight = layer.weight(prefix + "conv1d.weight", channels, 1, sizes.kernel)
    state = model.new_state(channels, sizes.kernel - 1)
    model.add(ShortConvolution("mixed", "convolved", weight, state, activation="silu"))
    model.add(
        GatedDelta(
            "convolved", "controls", "recurrent", sizes.key_heads, sizes.value_heads, sizes.key_dim, sizes.value_dim,
            model.new_state(sizes.value_heads, sizes.key_dim, sizes.value_dim),
            layer.weight(prefix + "A_log", sizes.value_heads), layer.weight(prefix + "dt_bias", sizes.value_heads),
        )
    )  # fmt: skip
    weight = layer.weight(prefix + "norm.weight", sizes.value_dim)
    weight = replace(weight, rows=torch.arange(sizes.value_dim).repeat(sizes.value_heads))
    norm = Norm("rms", eps, (weight,))
    model.add(GatedNorm("recurrent", "mixed", "gated", norm, sizes.value_heads, gate_start=channels))
    layer.add_to_residual("gated", layer.matrix(prefix + "out_proj", model.hidden_size, sizes.values))


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
    layer: Layer,
    source: str,
    sizes: ScanSizes,
    norm: Norm,
    *,
    prefix: str = "mamba.",
    norm_groups: int = 1,
    gate_first: bool = True,
    bias: bool = False,
    conv_bias: bool = True,
    out_bias: bool | None = None,
    multipliers: Sequence[float] = (1.0,) * 5,
    factor: float = 1.0,
) -> None:
    """A layer of Mamba 2, whose result is added to the residual.

    norm, gate_first: of the result, and whether its gate comes before that
    out_bias:         if it is another than `bias`
    multipliers:      of the gates, x, B, C and the steps
    """
    model, inner, channels = layer.model, sizes.inner, sizes.channels
    if sizes.heads % sizes.groups:
        raise UnsupportedConfig(f"its {sizes.heads} heads cannot share {sizes.groups} groups")
    columns, shared = inner + channels + sizes.heads, sizes.groups * sizes.state_size
    mixed = layer.matrix(prefix + "in_proj", columns, model.hidden_size, bias=bias)
    if set(multipliers) != {1.0}:
        mixed = _scaled_parts(mixed, [inner, inner, shared, shared, sizes.heads], multipliers)
    model.add(Linear(source, "mixed", mixed))
    weight = layer.weight(prefix + "conv1d.weight", channels, 1, sizes.kernel)
    conv = layer.weight(prefix + "conv1d.bias", channels) if conv_bias else None
    state = model.new_state(channels, sizes.kernel - 1)
    model.add(ShortConvolution("mixed", "convolved", weight, state, inner, conv, activation="silu"))
    low, high = sizes.limits
    names = ("A_log", "dt_bias", "D")
    decay_log, step_bias, skip = (layer.weight(prefix + name, sizes.heads) for name in names)
    model.add(
        SelectiveScan(
            "convolved", "mixed", "recurrent", sizes.heads, sizes.head_dim, sizes.groups, sizes.state_size,
            model.new_state(sizes.heads, sizes.head_dim, sizes.state_size), decay_log, step_bias, skip,
            step_start=inner + channels, step_min=low, step_max=high,
        )
    )  # fmt: skip
    model.add(GatedNorm("recurrent", "mixed", "gated", norm, norm_groups, gate_first=gate_first))
    out = layer.matrix(prefix + "out_proj", model.hidden_size, inner, bias=bias if out_bias is None else out_bias)
    layer.add_to_residual("gated", out, factor=factor)


def _scaled_parts(matrix: Matrix, widths: Sequence[int], factors: Sequence[float]) -> Matrix:
    """A matrix of one linear, of which each part of the columns is multiplied with a factor."""
    rows = torch.split(torch.arange(matrix.columns), list(widths))
    parts, biases = (
        [replace(each[0], rows=part, factor=factor) for part, factor in zip(rows, factors, strict=True)] if each else []
        for each in (matrix.parts, matrix.biases)
    )
    return Matrix(tuple(parts), tuple(biases))


def gated_convolution(
    layer: Layer, source: str, kernel: int, *, bias: bool = False, post_norm: Norm | None = None
) -> None:
    """A short convolution between two gates (LFM 2), whose result is added to the residual."""
    model, hidden, prefix = layer.model, layer.model.hidden_size, "conv."
    model.add(Linear(source, "mixed", layer.matrix(prefix + "in_proj", 3 * hidden, hidden, bias=bias)))
    weight = layer.weight(prefix + "conv.weight", hidden, 1, kernel)
    conv_bias = layer.weight(prefix + "conv.bias", hidden) if bias else None
    state = model.new_state(hidden, kernel - 1)
    model.add(
        ShortConvolution(
            "mixed", "convolved", weight, state, 2 * hidden, conv_bias, input_gate=0, output_gate=hidden
        )
    )  # fmt: skip
    out = layer.matrix(prefix + "out_proj", hidden, hidden, bias=bias)
    layer.add_to_residual("convolved", out, post_norm=post_norm)
