"""Norms, and the residual stream between the parts of a layer: what is added to it, and its norm for the next part.

A step of few tokens takes as long as its launches and the reading of its weights, so whatever fits into one kernel is
one kernel. No argument that changes from step to step is a number on the host: nothing is compiled again, and a
captured launch is right for the next step.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from cbatch.kernels.operands import Addend, Embedding, NormWeights
from cbatch.kernels.triton.attention_tile import launch_options, power_of_2, wait_for_last_launch

_KINDS = {"none": 0, "rms": 1, "layer": 2}
_NO_NORM = NormWeights("none")


def norm_constants(norm: NormWeights, prefix: str = "") -> dict[str, Any]:
    """The constants of a kernel; see `normed`."""
    return {
        f"{prefix}KIND": _KINDS[norm.kind], f"{prefix}EPS": norm.eps, f"{prefix}HAS_WEIGHT": norm.weight is not None,
        f"{prefix}HAS_BIAS": norm.bias is not None,
    }  # fmt: skip


def norm_tensors(norm: NormWeights, placeholder: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and bias, or a tensor that is not read."""
    return (placeholder if norm.weight is None else norm.weight, placeholder if norm.bias is None else norm.bias)


@triton.jit
def normed(x, inside, column, weight, bias, SIZE, KIND, EPS, HAS_WEIGHT, HAS_BIAS):
    """The norm of a row x of SIZE numbers, which is 0 where it is not inside."""
    if KIND == 2:
        x = tl.where(inside, x - tl.sum(x, axis=0) / SIZE, 0.0)
    if KIND != 0:
        x *= tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + EPS)
    if HAS_WEIGHT:
        x *= tl.load(weight + column, mask=inside, other=0.0)
    if HAS_BIAS:
        x += tl.load(bias + column, mask=inside, other=0.0)
    return x


@triton.jit(do_not_specialize_on_alignment=["rows", "positions"])
def _norm_kernel(
    residual, first, second, rows, positions, first_weight, first_bias, weight, bias, out, FIRST_FACTOR: tl.constexpr,
    SECOND_FACTOR: tl.constexpr, FACTOR: tl.constexpr, OFFSET: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
    ADDENDS: tl.constexpr, EMBEDS: tl.constexpr, SELECTS: tl.constexpr, WRITES: tl.constexpr, FIRST_KIND: tl.constexpr,
    FIRST_EPS: tl.constexpr, FIRST_HAS_WEIGHT: tl.constexpr, FIRST_HAS_BIAS: tl.constexpr, KIND: tl.constexpr,
    EPS: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One program per row of `out`; see `embed_and_norm`, `add_and_norm` and `select_and_norm`.

    An embedding is the first addend, and learned positions are the second.
    """
    wait_for_last_launch()
    row = tl.program_id(0).to(tl.int64)
    source = row
    if EMBEDS or SELECTS:
        source = tl.load(rows + row).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    if ADDENDS > 0:
        x = tl.load(first + source * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
        x = normed(
            x, inside, column, first_weight, first_bias, HIDDEN, FIRST_KIND, FIRST_EPS, FIRST_HAS_WEIGHT, FIRST_HAS_BIAS
        )
        if FIRST_FACTOR != 1.0:
            x *= FIRST_FACTOR
        if not EMBEDS:
            x += tl.load(residual + source * HIDDEN + column, mask=inside, other=0.0)
    else:
        x = tl.load(residual + source * HIDDEN + column, mask=inside, other=0.0)
    if ADDENDS > 1:
        place = source
        if EMBEDS:
            place = tl.load(positions + row).to(tl.int64) + OFFSET
        more = tl.load(second + place * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
        if SECOND_FACTOR != 1.0:
            more *= SECOND_FACTOR
        x += more
    if ADDENDS > 0 and not SELECTS:
        tl.store(residual + row * HIDDEN + column, x, mask=inside)
    if WRITES:
        x = normed(x, inside, column, weight, bias, HIDDEN, KIND, EPS, HAS_WEIGHT, HAS_BIAS)
        if FACTOR != 1.0:
            x *= FACTOR
        tl.store(out + row * HIDDEN + column, x.to(out.dtype.element_ty), mask=inside)


def embed_and_norm(
    embedding: Embedding, ids: Tensor, positions: Tensor, residual: Tensor, norm: NormWeights | None,
    out: Tensor | None, *, capability: int,
) -> None:  # fmt: skip
    """See `model/ops/residual.py`."""
    addends = [Addend(embedding.table, embedding.scale)]
    if embedding.positions is not None:
        addends.append(Addend(embedding.positions))
    _launch(
        residual, tuple(addends), ids, norm, out, capability, positions=positions, offset=embedding.offset, embeds=True
    )


def add_and_norm(
    residual: Tensor, addends: tuple[Addend, ...], norm: NormWeights | None, out: Tensor | None, *, capability: int
) -> None:
    """See `model/ops/residual.py`."""
    _launch(residual, addends, residual, norm, out, capability)


def select_and_norm(
    residual: Tensor, addends: tuple[Addend, ...], rows: Tensor, norm: NormWeights, factor: float, out: Tensor, *,
    capability: int,
) -> None:  # fmt: skip
    """See `model/ops/residual.py`."""
    _launch(residual, addends, rows, norm, out, capability, factor=factor, selects=True)


def _launch(
    residual: Tensor, addends: tuple[Addend, ...], rows: Tensor, norm: NormWeights | None, out: Tensor | None,
    capability: int, *, positions: Tensor | None = None, factor: float = 1.0, offset: int = 0, embeds: bool = False,
    selects: bool = False,
) -> None:  # fmt: skip
    norm = norm or _NO_NORM
    first, second = (*addends, *[Addend(residual)] * 2)[:2]
    first_norm, hidden = first.norm or _NO_NORM, residual.shape[1]
    block = power_of_2(hidden)
    _norm_kernel[(residual.shape[0] if out is None else out.shape[0],)](
        residual, first.value, second.value, rows, rows if positions is None else positions,
        *norm_tensors(first_norm, residual), *norm_tensors(norm, residual), residual if out is None else out,
        first.factor, second.factor, factor, offset, hidden, block, len(addends), embeds, selects, out is not None,
        **norm_constants(first_norm, "FIRST_"), **norm_constants(norm), **launch_options(block // 16, capability),
    )  # fmt: skip


@triton.jit
def _normalize_kernel(
    source, gate, weight, bias, out, SOURCE_ROW: tl.constexpr, GATE_ROW: tl.constexpr, OUT_ROW: tl.constexpr,
    FACTOR: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr, GATES: tl.constexpr,
    GATE_FIRST: tl.constexpr, KIND: tl.constexpr, EPS: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One program per row and group. With a gate, each group has weights of its own."""
    wait_for_last_launch()
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * SIZE
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    x = tl.load(source + row * SOURCE_ROW + first + column, mask=inside, other=0.0).to(tl.float32)
    if GATES:
        factor = tl.load(gate + row * GATE_ROW + first + column, mask=inside, other=0.0).to(tl.float32)
        factor *= tl.sigmoid(factor)
        weight, bias = weight + first, bias + first
        if GATE_FIRST:
            x *= factor
    x = normed(x, inside, column, weight, bias, SIZE, KIND, EPS, HAS_WEIGHT, HAS_BIAS)
    if GATES and not GATE_FIRST:
        x *= factor
    if FACTOR != 1.0:
        x *= FACTOR
    to = out + row * OUT_ROW + first + column
    if ADDS:
        x += tl.load(to, mask=inside, other=0.0).to(tl.float32)
    tl.store(to, x.to(out.dtype.element_ty), mask=inside)


def normalize(
    source: Tensor, norm: NormWeights, groups: int, factor: float, out: Tensor, *, add: bool = False, capability: int
) -> None:
    """See `model/ops/residual.py`."""
    _normalize(source, source, norm, groups, factor, out, capability, add, False, False)


def gated_norm(
    source: Tensor, gate: Tensor, norm: NormWeights, groups: int, out: Tensor, *, gate_first: bool, capability: int
) -> None:
    """See `model/ops/normalize.py`."""
    _normalize(source, gate, norm, groups, 1.0, out, capability, False, True, gate_first)


def _normalize(
    source: Tensor, gate: Tensor, norm: NormWeights, groups: int, factor: float, out: Tensor, capability: int,
    *switches: bool,
) -> None:  # fmt: skip
    size = source.shape[1] // groups
    block = power_of_2(size)
    _normalize_kernel[(len(source), groups)](
        source, gate, *norm_tensors(norm, source), out, source.stride(0), gate.stride(0), out.stride(0), factor, size,
        block, *switches, **norm_constants(norm), **launch_options(block // 16, capability),
    )  # fmt: skip
