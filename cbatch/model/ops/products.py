"""Products with matrices on a device, as numbers or in the bits that they are kept in."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from cbatch.kernels import products as library
from cbatch.kernels.quantized_matrix import Float8Matrix, QuantizedMatrix, rounded_rows
from cbatch.model.ops.device_kernel import DeviceOps, device_kernel

_COLUMNS_AT_ONCE = 4096
"""Of a quantized matrix, which become numbers together."""


linear = device_kernel("linear:linear", is_product=True)(library.multiply)


@device_kernel("linear:quantized_linear", is_product=True)
def quantized_linear(source: Tensor, matrix: QuantizedMatrix, bias: Tensor | None, out: Tensor) -> None:
    """out [T, columns] = source [T, depth] times a quantized matrix [columns, depth], plus bias [columns]."""
    for first in range(0, matrix.columns, _COLUMNS_AT_ONCE):
        columns = slice(first, first + _COLUMNS_AT_ONCE)
        product = functional.linear(source, matrix.values(columns).to(source.dtype))
        out[:, columns] = product if bias is None else product + bias[columns]


@device_kernel("linear:float8_linear", is_product=True)
def float8_linear(source: Tensor, matrix: Float8Matrix, bias: Tensor | None, out: Tensor) -> None:
    """The same with a matrix of FP8, and rows that are rounded to FP8 before they are multiplied."""
    codes, scales = rounded_rows(source)
    rows = codes.float()
    for first in range(0, matrix.columns, _COLUMNS_AT_ONCE):
        columns = slice(first, first + _COLUMNS_AT_ONCE)
        product = functional.linear(rows, matrix.numbers[columns].float()) * scales * matrix.scales[:, columns]
        out[:, columns] = product if bias is None else product + bias[columns]


def multiply(
    ops: DeviceOps, source: Tensor, matrix: Tensor | QuantizedMatrix | Float8Matrix, bias: Tensor | None, out: Tensor
) -> None:
    """out [T, columns] = source [T, depth] times a matrix [columns, depth] of any kind, plus bias [columns]."""
    if isinstance(matrix, QuantizedMatrix):
        quantized_linear(ops, source, matrix, bias, out)
    elif isinstance(matrix, Float8Matrix):
        float8_linear(ops, source, matrix, bias, out)
    else:
        linear(ops, source, matrix, bias, out)


@device_kernel("linear:look_up")
def look_up(matrix: QuantizedMatrix, ids: Tensor, out: Tensor) -> None:
    """out [T, depth] float32 = the columns ids [T] of a matrix, which are the rows of an embedding."""
    out.copy_(matrix.values(ids))


multiply_logits = device_kernel()(library.multiply_logits)


def logits(ops: DeviceOps, hidden: Tensor, lm_head: Tensor | QuantizedMatrix, out: Tensor | None = None) -> Tensor:
    """Logits [R, vocabulary] float32 of hidden [R, hidden], in `out` if it is given."""
    if isinstance(lm_head, Tensor) and not ops.batch_invariant:
        return multiply_logits(ops, hidden, lm_head, out)
    if out is None:
        columns = len(lm_head) if isinstance(lm_head, Tensor) else lm_head.columns
        out = hidden.new_empty(len(hidden), columns, dtype=torch.float32)
    multiply(ops, hidden, lm_head, None, out)
    return out


@device_kernel("activation:finish_logits", updates="logits")
def finish_logits(logits: Tensor, bias: Tensor | None, softcap: float) -> None:
    """logits [R, vocabulary] = softcap * tanh((logits + bias) / softcap), in place; softcap 0 for none."""
    if bias is not None:
        logits += bias
    if softcap:
        logits.copy_(softcap * torch.tanh(logits / softcap))
