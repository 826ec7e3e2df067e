"""Kernels that change each number by itself: activations, gates, and the end of the logits."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from cbatch.kernels.triton.attention_tile import launch_options, power_of_2, wait_for_last_launch


@triton.jit
def _activated(x, NAME, SLOPE, PARAMS):
    """See `Activation`."""
    if NAME == "silu":
        if SLOPE != 1.0:
            x *= tl.sigmoid(SLOPE * x)
        else:
            x *= tl.sigmoid(x)
    elif NAME == "gelu":
        x *= 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    elif NAME == "gelu_tanh":
        x *= tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif NAME == "relu":
        x = tl.where(x < 0, 0.0, x)
    elif NAME == "relu2":
        x = tl.where(x < 0, 0.0, x) * x
    elif NAME == "sigmoid":
        x = tl.sigmoid(x)
    elif NAME == "xielu":
        below = (PARAMS[1] + PARAMS[2]) * (tl.exp(tl.minimum(x, PARAMS[3])) - 1.0 - x) + PARAMS[2] * x
        x = tl.where(x > 0, PARAMS[0] * x * x + PARAMS[2] * x, below)
    return x


@triton.jit
def _activate_kernel(
    up, out, INNER: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr, NAME: tl.constexpr, LIMIT: tl.constexpr,
    UP_LIMIT: tl.constexpr, SLOPE: tl.constexpr, UP_OFFSET: tl.constexpr, PARAMS: tl.constexpr,
):  # fmt: skip
    """One program per row and block of columns."""
    wait_for_last_launch()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < INNER
    if GATED:
        gate = tl.load(up + row * (2 * INNER) + column, mask=inside, other=0.0).to(tl.float32)
        other = tl.load(up + row * (2 * INNER) + INNER + column, mask=inside, other=0.0).to(tl.float32)
        if LIMIT != 0.0:
            gate = tl.minimum(gate, LIMIT)
            other = tl.minimum(tl.maximum(other, -UP_LIMIT), UP_LIMIT)
        if UP_OFFSET != 0.0:
            other += UP_OFFSET
        x = _activated(gate, NAME, SLOPE, PARAMS) * other
    else:
        x = tl.load(up + row * INNER + column, mask=inside, other=0.0).to(tl.float32)
        x = _activated(x, NAME, SLOPE, PARAMS)
    tl.store(out + row * INNER + column, x.to(out.dtype.element_ty), mask=inside)


def activate(up: Tensor, activation: Any, out: Tensor, *, capability: int) -> None:
    """See `model/ops/linear.py`."""
    rows, inner = out.shape
    block = min(power_of_2(inner), 1024)
    _activate_kernel[(rows, -(-inner // block))](
        up, out, inner, block, activation.gated, activation.name, activation.limit,
        activation.up_limit or activation.limit, activation.slope, activation.up_offset, activation.params,
        **launch_options(block // 8, capability),
    )  # fmt: skip


@triton.jit
def _gate_kernel(
    gate, target, gate_row: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    FUNCTION: tl.constexpr,
):  # fmt: skip
    """One program per row and block of columns."""
    wait_for_last_launch()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    x = tl.load(gate + row * gate_row + column // WIDTH, mask=inside, other=0.0).to(tl.float32)
    if FUNCTION == "sigmoid":
        x = tl.sigmoid(x)
    elif FUNCTION == "softplus":
        x = tl.log(1.0 + tl.exp(-tl.abs(x))) + tl.maximum(x, 0.0)
    to = target + row * COLUMNS + column
    x *= tl.load(to, mask=inside, other=0.0).to(tl.float32)
    tl.store(to, x.to(target.dtype.element_ty), mask=inside)


def gate(gate: Tensor, width: int, function: str, target: Tensor, *, capability: int) -> None:
    """See `model/ops/gate.py`."""
    rows, columns = target.shape
    block = min(power_of_2(columns), 1024)
    _gate_kernel[(rows, -(-columns // block))](
        gate, target, gate.stride(0), columns, width, block, function, **launch_options(block // 8, capability)
    )


@triton.jit
def _finish_logits_kernel(logits, bias, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr, SOFTCAP: tl.constexpr):
    """One program per row and block of tokens."""
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < VOCABULARY
    to = logits + tl.program_id(0).to(tl.int64) * VOCABULARY + token
    x = tl.load(to, mask=inside, other=0.0)
    if bias is not None:
        x += tl.load(bias + token, mask=inside, other=0.0)
    if SOFTCAP != 0.0:
        x = SOFTCAP * (2.0 * tl.sigmoid(2.0 / SOFTCAP * x) - 1.0)
    tl.store(to, x, mask=inside)


def finish_logits(logits: Tensor, bias: Tensor | None, softcap: float) -> None:
    """See `model/ops/products.py`."""
    rows, vocabulary = logits.shape
    block = 4096
    _finish_logits_kernel[(rows, -(-vocabulary // block))](
        logits, bias, vocabulary, block, softcap, **launch_options(block // 4)
    )
