"""Norms, and the residual stream between the parts of a layer: what is added to it, and its norm for the next part.

A step of few tokens takes as long as its launches and the reading of its weights, so whatever fits into one kernel is
one kernel. No argument that changes from step to step is a number on the host: nothing is compiled again, and a
captured launch is right for the next step. An argument that is None is compiled out of a kernel.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from cbatch.kernels.operands import Addend, Embedding, NormWeights
from cbatch.kernels.triton.attention_tile import launch_options, power_of_2, wait_for_last_launch

_NO_NORM = NormWeights("none")
_NOTHING: Any = None, 1.0, None
"""In the place of an `Addend`."""


@triton.jit
def normed(x, inside, column, weight, bias, SIZE, NORM):
    """The norm of a row x of SIZE numbers, which is 0 where it is not inside.  NORM: see `NormForm`"""
    if NORM.kind == "layer":
        x = tl.where(inside, x - tl.sum(x, axis=0) / SIZE, 0.0)
    if NORM.kind != "none":
        x *= tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + NORM.eps)
    if weight is not None:
        x *= tl.load(weight + column, mask=inside, other=0.0)
    if bias is not None:
        x += tl.load(bias + column, mask=inside, other=0.0)
    return x


@triton.jit(do_not_specialize_on_alignment=["rows", "positions"])
def _norm_kernel(
    residual, first, second, rows, positions, first_weight, first_bias, weight, bias, out, FIRST_FACTOR: tl.constexpr,
    SECOND_FACTOR: tl.constexpr, FACTOR: tl.constexpr, OFFSET: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
    EMBEDS: tl.constexpr, FIRST_NORM: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """One program per row of `out`; see `embed_and_norm`, `add_and_norm` and `select_and_norm`.

    An embedding is the first addend, and learned positions are the second.
    """
    wait_for_last_launch()
    row = tl.program_id(0).to(tl.int64)
    source = row
    if rows is not None:
        source = tl.load(rows + row).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    if first is not None:
        x = tl.load(first + source * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
        x = normed(x, inside, column, first_weight, first_bias, HIDDEN, FIRST_NORM)
        if FIRST_FACTOR != 1.0:
            x *= FIRST_FACTOR
        if not EMBEDS:
            x += tl.load(residual + source * HIDDEN + column, mask=inside, other=0.0)
    else:
        x = tl.load(residual + source * HIDDEN + column, mask=inside, other=0.0)
    if second is not None:
        place = source
        if EMBEDS:
            place = tl.load(positions + row).to(tl.int64) + OFFSET
        more = tl.load(second + place * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
        if SECOND_FACTOR != 1.0:
            more *= SECOND_FACTOR
        x += more
    if first is not None and (EMBEDS or rows is None):
        tl.store(residual + row * HIDDEN + column, x, mask=inside)
    if out is not None:
        x = normed(x, inside, column, weight, bias, HIDDEN, NORM)
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
    _launch(residual, addends, None, norm, out, capability)


def select_and_norm(
    residual: Tensor, addends: tuple[Addend, ...], rows: Tensor, norm: NormWeights, factor: float, out: Tensor, *,
    capability: int,
) -> None:  # fmt: skip
    """See `model/ops/residual.py`."""
    _launch(residual, addends, rows, norm, out, capability, factor=factor)


def _launch(
    residual: Tensor, addends: tuple[Addend, ...], rows: Tensor | None, norm: NormWeights | None, out: Tensor | None,
    capability: int, *, positions: Tensor | None = None, factor: float = 1.0, offset: int = 0, embeds: bool = False,
) -> None:  # fmt: skip
    (first, first_factor, first_norm), (second, second_factor, _) = (*addends, _NOTHING, _NOTHING)[:2]
    first_norm, norm, hidden = first_norm or _NO_NORM, norm or _NO_NORM, residual.shape[1]
    block = power_of_2(hidden)
    _norm_kernel[(len(residual if out is None else out),)](
        residual, first, second, rows, positions, first_norm.weight, first_norm.bias, norm.weight, norm.bias, out,
        first_factor, second_factor, factor, offset, hidden, block, embeds, first_norm.form, norm.form,
        **launch_options(block // 16, capability),
    )  # fmt: skip


@triton.jit
def _normalize_kernel(
    source, gate, weight, bias, out, SOURCE_ROW: tl.constexpr, GATE_ROW: tl.constexpr, OUT_ROW: tl.constexpr,
    FACTOR: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr, GATE_FIRST: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """One program per row and group. With a gate, each group has weights of its own."""
    wait_for_last_launch()
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * SIZE
    column = tl.arange(0, BLOCK)
    weighted = column
    inside = column < SIZE
    x = tl.load(source + row * SOURCE_ROW + first + column, mask=inside, other=0.0).to(tl.float32)
    if gate is not None:
        weighted += first
        factor = tl.load(gate + row * GATE_ROW + first + column, mask=inside, other=0.0).to(tl.float32)
        factor *= tl.sigmoid(factor)
        if GATE_FIRST:
            x *= factor
    x = normed(x, inside, weighted, weight, bias, SIZE, NORM)
    if gate is not None and not GATE_FIRST:
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
    _normalize(source, None, norm, groups, factor, out, capability, add, False)


def gated_norm(
    source: Tensor, gate: Tensor, norm: NormWeights, groups: int, out: Tensor, *, gate_first: bool, capability: int
) -> None:
    """See `model/ops/normalize.py`."""
    _normalize(source, gate, norm, groups, 1.0, out, capability, False, gate_first)


def _normalize(
    source: Tensor, gate: Tensor | None, norm: NormWeights, groups: int, factor: float, out: Tensor, capability: int,
    *switches: bool,
) -> None:  # fmt: skip
    size = source.shape[1] // groups
    block = power_of_2(size)
    _normalize_kernel[(len(source), groups)](
        source, gate, norm.weight, norm.bias, out, source.stride(0), 0 if gate is None else gate.stride(0),
        out.stride(0), factor, size, block, *switches, norm.form, **launch_options(block // 16, capability),
    )  # fmt: skip
