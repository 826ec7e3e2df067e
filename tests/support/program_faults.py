"""Faults planted into programs, each of which a comparison of logits has to see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, replace
from functools import partial
from typing import Any

from cbatch.model.ops.all import (
    RESIDUAL,
    Activation,
    Attend,
    Experts,
    Gate,
    GatedDelta,
    Gather,
    Head,
    HeadNorms,
    Linear,
    Matrix,
    Norm,
    Normalize,
    Operation,
    PrepareHeads,
    Program,
    Route,
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


_SHAPES = {
    "Embed.target", "Linear.add", "Linear.activation", "Normalize.add", "Normalize.width",
    "Normalize.groups", "Gate.width", "PrepareHeads.stores", "Experts.add", "activation.gated",
}  # fmt: skip
"""Settings that a program cannot forget and still run."""

_UNSEEN = {"Route.group_score", "Route.epsilon", "Route.least_sum", "SelectiveScan.step_min"}
"""Settings too small to be seen in tiny models, or that choose the same; tests of kernels have them."""


def forgotten(program: Program) -> Iterator[tuple[str, Program]]:
    """The program without each thing that an operation, or what stands in one, may have and these have."""
    found = {(type(one), path): default for one in program.operations for path, default in _given(one)}
    for (kind, path), default in found.items():
        name = f"{kind.__name__}.{'.'.join(path)}"
        if name not in _SHAPES | _UNSEEN and ".".join(path) not in _SHAPES:
            yield name, change(kind, partial(_with, path=path, value=default))(program)


def _given(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Fields that are not what they are by default, and that."""
    for each in fields(value):
        own, here = getattr(value, each.name), (*path, each.name)
        if isinstance(value, HeadNorms) and each.name == "last" and value.query and not value.query.weight:
            continue  # a norm without weights gives the same before a rotation and after it
        if isinstance(own, Norm | Activation | HeadNorms):
            yield from _given(own, here)
        elif each.default is not MISSING and own != each.default:
            yield here, each.default


def _with(one: Any, path: tuple[str, ...], value: Any) -> Any:
    name, *rest = path
    own = getattr(one, name)
    if rest and own is None:
        return one
    return replace(one, **{name: _with(own, tuple(rest), value) if rest else value})


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
    "norm offset dropped": ("gemma2", change(Normalize, lambda one: replace(one, norm=_without_offset(one.norm)))),
    "layer norm taken for RMS": (
        "cohere", change(Normalize, lambda one: replace(one, norm=replace(one.norm, kind="rms")))
    ),
    "post norm dropped": (
        "glm4", change(Normalize, lambda one: replace(one, norm=replace(one.norm, kind="none")) if one.add else one)
    ),
    "biases dropped": ("qwen2", _matrix(lambda matrix: Matrix(matrix.parts))),
    "parts of one matrix exchanged": ("phi3", change(Linear, lambda one: _exchanged(one))),
    "neighbours not reordered": ("glm", _matrix(_unordered)),
    "wrong rotary half": ("llama", _rotary(lambda one: replace(one, inv_freq=tuple(-step for step in one.inv_freq)))),
    "frequencies not scaled": ("gpt_oss", _rotary(lambda one: replace(one, factor=1.0))),
    "query not scaled by position": ("llama4_text", _rotary(lambda one: replace(one, scale_beta=0.0))),
    "clip dropped": ("olmo", change(PrepareHeads, lambda one: replace(one, clip=0.3))),
    "scores not scaled": ("granite", change(Attend, lambda one: replace(one, scale=0.25))),
    "window one too wide": ("mistral", change(Attend, lambda one: replace(one, window=one.window + 1))),
    "softcap of scores dropped": ("gemma2", change(Attend, lambda one: replace(one, softcap=2.0))),
    "gate dropped": ("afmoe", drop(Gate)),
    "gate of the shared expert dropped": ("qwen2_moe", drop(Gate)),
    "gate of each layer's embedding dropped": ("gemma4_text", drop(Gate)),
    "layers not scaled": ("gemma4_text", change(
        Normalize, lambda one: replace(one, norm=Norm("none", 0.0)) if one.source == one.target == RESIDUAL else one
    )),
    "latent columns moved": ("deepseek_v3", change(Gather, lambda one: replace(one, columns=one.columns.roll(1)))),
    "another activation": ("arcee", _activation(name="relu")),
    "gelu taken for its approximation": ("gpt_neox", _activation(name="gelu_tanh")),
    "clip of the activation dropped": ("gpt_oss", _activation(limit=0.2)),
    "xielu without its numbers": ("apertus", _activation(params=(1.0, 1.0, 0.5, -1e-6))),
    "router without its bias": (
        "gpt_oss", change(Route, lambda one: replace(one, matrix=Matrix(one.matrix.parts)))
    ),
    "softmax over all experts": ("granitemoe", change(Route, lambda one: replace(one, scores="softmax"))),
    "experts exchanged": ("olmoe", change(Experts, lambda one: replace(one, up=one.up[::-1]))),
    "gates of the convolution exchanged": (
        "lfm2_moe", change(ShortConvolution, lambda one: replace(one, input_gate=one.output_gate, output_gate=0))
    ),
    "delta rule without its bias": (
        "qwen3_5_text", change(GatedDelta, lambda one: replace(one, decay_bias=one.decay_log))
    ),
    "interleaved heads not brought together": ("qwen3_next", _matrix(_whole_unordered)),
    "gate of attention dropped": ("qwen3_5_text", drop(Gate)),
    "scan without its skip": ("granitemoehybrid", change(SelectiveScan, lambda one: replace(one, skip=one.step_bias))),
    "steps of another head": (
        "granitemoehybrid", change(SelectiveScan, lambda one: replace(one, step_start=one.step_start - 1))
    ),
    "softcap of logits dropped": ("gemma2", change(Head, lambda one: replace(one, softcap=3.0))),
}  # fmt: skip
"""Faults in words, each with the type of model in which it must be seen, and how it is done to its program."""


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
