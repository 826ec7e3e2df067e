"""Faults planted into programs, each of which a comparison of logits has to see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cbatch.model.programs.program import (
    Attend,
    Embed,
    Experts,
    Gate,
    GatedDelta,
    GatedNorm,
    Gather,
    Head,
    Linear,
    Matrix,
    Norm,
    Normalize,
    Operation,
    PrepareHeads,
    Program,
    Route,
    Scale,
    SelectiveScan,
    ShortConvolution,
)

Fault = Callable[[Program], Program]


def change(kind: type[Operation], edit: Callable[[Any], Operation]) -> Fault:
    """Edits every operation of a kind."""
    return lambda program: replace(
        program, operations=tuple(edit(one) if isinstance(one, kind) else one for one in program.operations)
    )


def drop(kind: type[Operation]) -> Fault:
    return lambda program: replace(
        program, operations=tuple(one for one in program.operations if not isinstance(one, kind))
    )


def _without_offset(norm: Norm) -> Norm:
    return replace(norm, weight=tuple(replace(weight, offset=0.0) for weight in norm.weight))


def _linear(**values: Any) -> Fault:
    """Of linears that add to the residual."""
    return change(Linear, lambda one: replace(one, **values) if one.add else one)


def _matrix(edit: Callable[[Matrix], Matrix]) -> Fault:
    return change(Linear, lambda one: replace(one, matrix=edit(one.matrix)))


def _norms(**values: Any) -> Fault:
    return change(PrepareHeads, lambda one: replace(one, norms=replace(one.norms, **values)))


def _activation(**values: Any) -> Fault:
    def edit(one: Any) -> Operation:
        return replace(one, activation=replace(one.activation, **values)) if one.activation else one

    return lambda program: change(Experts, edit)(change(Linear, edit)(program))


def _rotary(edit: Callable[[Any], Any]) -> Fault:
    return lambda program: replace(program, rotaries=tuple(map(edit, program.rotaries)))


def _unordered(matrix: Matrix) -> Matrix:
    return Matrix(tuple(replace(part, rows=None) for part in matrix.parts), matrix.biases)


def _whole_unordered(matrix: Matrix) -> Matrix:
    """Unless it has only some of the rows."""
    return _unordered(matrix) if matrix.parts[0].size == matrix.parts[0].shape else matrix


FAULTS: dict[str, tuple[str, Fault]] = {
    "embedding not scaled": ("gemma", change(Embed, lambda one: replace(one, scale=1.0))),
    "positions one row too early": ("opt", change(Embed, lambda one: replace(one, position_offset=1))),
    "norm offset dropped": ("gemma2", change(Normalize, lambda one: replace(one, norm=_without_offset(one.norm)))),
    "norm bias dropped": ("starcoder2", change(Normalize, lambda one: replace(one, norm=replace(one.norm, bias=())))),
    "layer norm taken for RMS": (
        "cohere", change(Normalize, lambda one: replace(one, norm=replace(one.norm, kind="rms")))
    ),
    "post norm dropped": (
        "glm4", change(Normalize, lambda one: replace(one, norm=replace(one.norm, kind="none")) if one.add else one)
    ),
    "final norm without bias": ("phi", change(Head, lambda one: replace(one, norm=replace(one.norm, bias=())))),
    "biases dropped": ("qwen2", _matrix(lambda matrix: Matrix(matrix.parts))),
    "residual multiplier missing": ("granite", _linear(factor=0.5)),
    "parts of one matrix exchanged": ("phi3", change(Linear, lambda one: _exchanged(one))),
    "neighbours not reordered": ("glm", _matrix(_unordered)),
    "wrong rotary half": ("llama", _rotary(lambda one: replace(one, inv_freq=tuple(-step for step in one.inv_freq)))),
    "frequencies not scaled": ("gpt_oss", _rotary(lambda one: replace(one, factor=1.0))),
    "rotated without positions": ("smollm3", change(PrepareHeads, lambda one: replace(one, rotary=0))),
    "query not scaled by position": ("llama4_text", _rotary(lambda one: replace(one, scale_beta=0.0))),
    "query norm dropped": ("qwen3", _norms(query=None)),
    "key norm by head": ("olmo2", _norms(by_row=False)),
    "norms before the rotation": ("hunyuan_v1_dense", _norms(last=False)),
    "clip dropped": ("olmo", change(PrepareHeads, lambda one: replace(one, clip=0.3))),
    "scores not scaled": ("granite", change(Attend, lambda one: replace(one, scale=0.25))),
    "window one too wide": ("mistral", change(Attend, lambda one: replace(one, window=one.window + 1))),
    "chunk forgotten": ("llama4_text", change(Attend, lambda one: replace(one, chunk=0))),
    "softcap of scores dropped": ("gemma2", change(Attend, lambda one: replace(one, softcap=2.0))),
    "sinks dropped": ("gpt_oss", change(Attend, lambda one: replace(one, sinks=None))),
    "gate dropped": ("afmoe", drop(Gate)),
    "gate of the shared expert dropped": ("qwen2_moe", drop(Gate)),
    "gate of each layer's embedding dropped": ("gemma4_text", drop(Gate)),
    "layers not scaled": ("gemma4_text", drop(Scale)),
    "value norm dropped": ("gemma4_text", _norms(value=None)),
    "embeddings of the layers not weighed": (
        "gemma4_text", change(Normalize, lambda one: replace(one, factor=1.0))
    ),
    "latent columns moved": ("deepseek_v3", change(Gather, lambda one: replace(one, columns=one.columns.roll(1)))),
    "another activation": ("arcee", _activation(name="relu")),
    "gelu taken for its approximation": ("gpt_neox", _activation(name="gelu_tanh")),
    "clipped activation without offset": ("gpt_oss", _activation(up_offset=0.0)),
    "clip of the activation dropped": ("gpt_oss", _activation(limit=0.2)),
    "xielu without its numbers": ("apertus", _activation(params=(1.0, 1.0, 0.5, -1e-6))),
    "router without its bias": (
        "gpt_oss", change(Route, lambda one: replace(one, matrix=Matrix(one.matrix.parts)))
    ),
    "choice without its bias": ("minimax_m2", change(Route, lambda one: replace(one, choice_bias=None))),
    "router weights not normalised": ("mixtral", change(Route, lambda one: replace(one, normalize=False))),
    "router scale missing": ("hy_v3", change(Route, lambda one: replace(one, factor=1.0))),
    "softmax over all experts": ("granitemoe", change(Route, lambda one: replace(one, scores="softmax"))),
    "weights of experts on the wrong side": (
        "llama4_text", change(Experts, lambda one: replace(one, weigh_input=False))
    ),
    "experts exchanged": ("olmoe", change(Experts, lambda one: replace(one, up=one.up[::-1]))),
    "input gate of the convolution dropped": (
        "lfm2", change(ShortConvolution, lambda one: replace(one, input_gate=None))
    ),
    "gates of the convolution exchanged": (
        "lfm2_moe", change(ShortConvolution, lambda one: replace(one, input_gate=one.output_gate, output_gate=0))
    ),
    "convolution without its activation": (
        "qwen3_5_text", change(ShortConvolution, lambda one: replace(one, activation="none"))
    ),
    "convolution without its biases": (
        "granitemoehybrid", change(ShortConvolution, lambda one: replace(one, bias=None))
    ),
    "delta rule without its bias": (
        "qwen3_5_text", change(GatedDelta, lambda one: replace(one, decay_bias=one.decay_log))
    ),
    "gate of the delta net moved": ("qwen3_next", change(GatedNorm, lambda one: replace(one, gate_start=0))),
    "interleaved heads not brought together": ("qwen3_next", _matrix(_whole_unordered)),
    "gate of attention dropped": ("qwen3_5_text", drop(Gate)),
    "scan without its skip": ("granitemoehybrid", change(SelectiveScan, lambda one: replace(one, skip=one.step_bias))),
    "steps of another head": (
        "granitemoehybrid", change(SelectiveScan, lambda one: replace(one, step_start=one.step_start - 1))
    ),
    "gate after the norm": ("granitemoehybrid", change(GatedNorm, lambda one: replace(one, gate_first=False))),
    "logits not scaled": ("cohere", change(Head, lambda one: replace(one, factor=1.0))),
    "softcap of logits dropped": ("gemma2", change(Head, lambda one: replace(one, softcap=3.0))),
}  # fmt: skip
"""What is wrong, the type of model in which it must be seen, and how it is done to its program."""


def _exchanged(one: Linear) -> Linear:
    """Gate and up of a matrix that holds both."""
    if one.activation is None or not one.activation.gated:
        return one
    (part,) = one.matrix.parts
    rows = _rolled(part.size[0])
    return replace(one, matrix=Matrix((replace(part, rows=rows),)))


def _rolled(rows: int) -> Any:
    import torch

    return torch.arange(rows).roll(rows // 2)
