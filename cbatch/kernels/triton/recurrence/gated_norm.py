"""The norm behind a recurrent layer, with its gate."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cbatch.kernels.operands import NormWeights
from cbatch.kernels.triton.attention_tile import power_of_2
from cbatch.kernels.triton.launch import launch_options
from cbatch.kernels.triton.norm import norm_constants, norm_tensors, normed


@triton.jit
def _gated_norm_kernel(
    source: tl.tensor, gate: tl.tensor, weight: tl.tensor, bias: tl.tensor, out: tl.tensor, SOURCE_ROW: tl.constexpr,
    GATE_ROW: tl.constexpr, OUT_ROW: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, GATE_FIRST: tl.constexpr,
    KIND: tl.constexpr, EPS: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
) -> None:  # fmt: skip
    """One program per row and group."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * SIZE
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    x = tl.load(source + row * SOURCE_ROW + first + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(gate + row * GATE_ROW + first + column, mask=inside, other=0.0).to(tl.float32)
    factor *= tl.sigmoid(factor)
    if GATE_FIRST:
        x *= factor
    x = normed(x, inside, column, weight + first, bias + first, SIZE, KIND, EPS, HAS_WEIGHT, HAS_BIAS)
    if not GATE_FIRST:
        x *= factor
    tl.store(out + row * OUT_ROW + first + column, x.to(out.dtype.element_ty), mask=inside)


def gated_norm(source: Tensor, gate: Tensor, norm: NormWeights, groups: int, out: Tensor, *, gate_first: bool) -> None:
    """See `model/ops/gated_norm.py`."""
    size = source.shape[1] // groups
    block = power_of_2(size)
    _gated_norm_kernel[(len(source), groups)](
        source, gate, *norm_tensors(norm, source), out, source.stride(0), gate.stride(0), out.stride(0), size, block,
        gate_first, **norm_constants(norm), **launch_options(block // 16),
    )  # fmt: skip
