"""Products of numbers in tiles of one size, whatever the number of rows: a row's result depends on nothing but the row.

The library's products take another kernel, and may split the depth, for another number of rows. Here a program goes
along the whole depth for a tile of rows and columns, in one order. It has the place of the library's products if steps
are to be batch-invariant; one size of tiles cannot be the best both for decoding and for prompts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbatch.kernels.layer_ops import multiply
from cbatch.kernels.triton.attention_tile import LAUNCH

FIXED_ROWS = 64
"""Products of other kinds get the tile that they have for so many rows."""


class LinearTile(NamedTuple):
    """Rows and columns that a program multiplies, and the depth that it multiplies at once."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    @classmethod
    def of(cls, dtype: torch.dtype, capability: int) -> LinearTile:
        """It depends on the type and the chip alone.  capability: of the chip, 90 for 9.0"""
        if dtype == torch.float32 or capability < 80:  # without matrix units
            return cls(32, 32, 32, 4, 2)
        return cls(64, 64, 64, 4, 4)


@triton.jit
def multiply_numbers(
    left: tl.tensor, there: tl.tensor, right: tl.tensor, inside: tl.tensor, total: tl.tensor, DEPTH: tl.constexpr,
    STEP: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """total [rows, columns] plus rows times columns.

    left:  [rows] where each row begins; there: which rows exist
    right: [columns] where each column begins; inside: which of them exist
    """
    step = tl.arange(0, STEP)
    first, second = left[:, None] + step[None, :], right[:, None] + step[None, :]
    for start in range(0, DEPTH, STEP):
        if DEPTH % STEP == 0:
            a = tl.load(first + start, mask=there[:, None], other=0.0)
            b = tl.load(second + start, mask=inside[:, None], other=0.0)
        else:
            within = (start + step < DEPTH)[None, :]
            a = tl.load(first + start, mask=there[:, None] & within, other=0.0)
            b = tl.load(second + start, mask=inside[:, None] & within, other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    source: tl.tensor, matrix: tl.tensor, biases: tl.tensor, out: tl.tensor, rows: tl.tensor, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
) -> None:  # fmt: skip
    """One program per tile of rows and columns. Those of the same columns follow each other."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there, inside = row < rows, column < COLUMNS
    total = multiply_numbers(
        source + row.to(tl.int64) * DEPTH, there, matrix + column.to(tl.int64) * DEPTH, inside,
        tl.zeros([ROWS, WIDTH], tl.float32), DEPTH, STEP,
    )  # fmt: skip
    if HAS_BIAS:
        total += tl.load(biases + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    to = out + row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=there[:, None] & inside[None, :])


def linear(
    source: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor, *, capability: int, batch_invariant: bool
) -> None:
    """See `model/ops/products.py`: the library's product, unless the bits of a row may not depend on other rows."""
    if batch_invariant:
        tiled_linear(source, matrix, bias, out, capability)
    else:
        multiply(source, matrix, bias, out)


def tiled_linear(source: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor, capability: int) -> None:
    """See `linear`.  capability: of the chip, 90 for 9.0"""
    (rows, depth), columns = source.shape, len(matrix)
    tile = LinearTile.of(source.dtype, capability)
    _linear_kernel[(-(-rows // tile.rows), -(-columns // tile.columns))](
        source, matrix, source if bias is None else bias, out, rows, columns, depth, bias is not None, tile.rows,
        tile.columns, tile.depth, num_warps=tile.warps, num_stages=tile.stages, **LAUNCH,
    )  # fmt: skip
