"""Products of rows with matrices: of numbers, or packed ones that become numbers of the rows' type in registers.

A program reads a part of a packed matrix's columns at a time, which lies in one piece of memory (see
`kernels/quantized_matrix.py`; 32 is the `GROUP` there), and some of them ahead. What it multiplies is rounded once,
from float32; sums are float32.

A program goes along the whole depth for a tile of rows and columns, in one order. So a row's result depends on nothing
but the row, as long as tiles have one size. For numbers, this has the place of the library's products if steps are to
be batch-invariant: those take another kernel, and may split the depth, for another number of rows.

Rows for products of FP8 are rounded by one kernel where torch has six. Divisions round as those of torch do, so the
bytes are the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbatch.kernels import products as library
from cbatch.kernels.formats import FP8, GROUP, INT4, INT4_ZEROS, INT8, MXFP4, NVFP4
from cbatch.kernels.quantized_matrix import LEAST_SCALE, Float8Matrix, QuantizedMatrix
from cbatch.kernels.triton.attention_tile import LAUNCH, launch_options, power_of_2
from cbatch.kernels.triton.conversion import from_fp8, to_fp8
from cbatch.runtime.kv_cache import FP8 as E4M3
from cbatch.runtime.kv_cache import FP8_MAX

FIXED_ROWS = 64
"""If steps are to be batch-invariant, packed matrices and experts get the tile that they have for so many rows."""

_MOST_AT_ONCE = 8192
"""Numbers of a row that a program rounds to FP8 at once."""

_LARGEST, _LEAST_SCALE = tl.constexpr(FP8_MAX), tl.constexpr(LEAST_SCALE)
_INT8, _INT4, _INT4_ZEROS, _MXFP4, _NVFP4, _FP8 = map(tl.constexpr, (INT8, INT4, INT4_ZEROS, MXFP4, NVFP4, FP8))


class Tile(NamedTuple):
    """Rows and columns that a program multiplies, and how much of the depth at once: numbers, or parts if packed."""

    rows: int
    columns: int
    step: int
    warps: int
    stages: int

    @classmethod
    def of_numbers(cls, dtype: torch.dtype, capability: int) -> Tile:
        """It depends on the type and the chip alone.  capability: of the chip, 90 for 9.0"""
        return cls(32, 32, 32, 4, 2) if has_no_units(dtype, capability) else cls(64, 64, 64, 4, 4)

    @classmethod
    def of_packed(cls, rows: float, dtype: torch.dtype, capability: int) -> Tile:
        """With few rows, there are as many programs as possible, each of which reads much ahead."""
        if has_no_units(dtype, capability):
            return cls(16, 32, 1, 4, 2) if rows <= 32 else cls(32, 32, 1, 4, 2)
        if rows <= 16:
            return cls(16, 32, 4, 4, 3)
        if rows <= 64:
            return cls(64, 64, 2, 4, 3)
        # Before 9.0, matrix units take both sides from registers, of which wider tiles need too many.
        return cls(128, 128 if capability in (90, 100) else 64, 1, 8, 3)

    @classmethod
    def of_experts(cls, rows: float, dtype: torch.dtype, capability: int) -> Tile:
        """For numbers, and so many rows of an expert on average. With few, a tile is a long piece of the matrix, which
        is read once; with many, it is a square that reuses what it has read.
        """
        if has_no_units(dtype, capability):
            return cls(16, 32, 32, 4, 2) if rows <= 32 else cls(32, 32, 32, 4, 2)
        if rows <= 16:
            return cls(16, 64, 128, 4, 3)
        return cls(64, 64, 64, 4, 4) if rows <= 64 else cls(128, 128, 64, 8, 3)


def has_no_units(dtype: torch.dtype, capability: int) -> bool:
    return dtype == torch.float32 or capability < 80


@triton.jit
def _half_of(code, half, SIZE):
    """The codes of 32 numbers of a part that has 32 or 64 of them."""
    if SIZE == 64:
        code = code & 15 if half == 0 else code >> 4
    return code


@triton.jit
def _scaled(code, group, column, kept, scales, zeros, KIND, COLUMNS, GROUP):
    """Numbers [columns, 32] float32 of each column. group: how many times 32 numbers lie before them"""
    place = (group * 32 // GROUP) * COLUMNS + column
    if (KIND == _MXFP4) | (KIND == _NVFP4):
        # Sign, two bits of exponent and one of mantissa at the places of float16, whose exponents begin 14 lower.
        bits = ((code & 7).to(tl.int16) << 9) | ((code & 8).to(tl.int16) << 12)
        number = bits.to(tl.float16, bitcast=True).to(tl.float32) * 32768.0
    elif KIND == _FP8:
        number = from_fp8(code, tl.float32)
    else:
        number = code.to(tl.float32)
    if KIND == _INT4:
        number -= 8.0
    if KIND == _INT4_ZEROS:
        number -= tl.load(zeros + place, mask=kept, other=0.0).to(tl.float32)[:, None]
    scale = tl.load(scales + place, mask=kept, other=0.0).to(tl.float32)[:, None]
    if KIND == _NVFP4:  # 16 numbers each
        second = tl.load(scales + place + COLUMNS, mask=kept, other=0.0).to(tl.float32)[:, None]
        scale = tl.where((tl.arange(0, 32) < 16)[None, :], scale, second)
    return number * scale


@triton.jit
def _add_group(total, left, there, code, group, column, kept, scales, zeros, KIND, COLUMNS, DEPTH, GROUP, IS_WHOLE):
    """total [rows, columns] plus the products of 32 numbers of the depth."""
    depth = group * 32 + tl.arange(0, 32)
    if IS_WHOLE:
        a = tl.load(left[:, None] + depth[None, :], mask=there[:, None], other=0.0)
    else:
        a = tl.load(left[:, None] + depth[None, :], mask=there[:, None] & (depth < DEPTH)[None, :], other=0.0)
    b = _scaled(code, group, column, kept, scales, zeros, KIND, COLUMNS, GROUP).to(a.dtype)
    return tl.dot(a, tl.trans(b), total, input_precision="ieee")


@triton.jit
def _multiply_numbers(left, there, right, inside, total, DEPTH, STEP):
    """See `multiply`. right: [columns] where each column begins"""
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


@triton.jit
def _multiply_packed(left, there, numbers, scales, zeros, column, inside, total, KIND, COLUMNS, DEPTH, GROUP, PARTS):
    """See `multiply`. PARTS: of the depth, in a round"""
    SIZE: tl.constexpr = 32 if (KIND == _INT8) | (KIND == _FP8) else 64
    COUNT: tl.constexpr = (DEPTH + SIZE - 1) // SIZE
    IS_WHOLE: tl.constexpr = DEPTH % (SIZE * PARTS) == 0
    step = tl.arange(0, 32)
    for first in range(0, COUNT, PARTS):
        for more in tl.static_range(PARTS):
            part = first + more
            place = part * COLUMNS + column
            kept = inside
            if not IS_WHOLE:
                kept = inside & (place < COUNT * COLUMNS)
            code = tl.load(numbers + place.to(tl.int64)[:, None] * 32 + step[None, :], mask=kept[:, None], other=0)
            for half in tl.static_range(SIZE // 32):
                total = _add_group(
                    total, left, there, _half_of(code, half, SIZE), part * (SIZE // 32) + half, column, kept, scales,
                    zeros, KIND, COLUMNS, DEPTH, GROUP, IS_WHOLE,
                )  # fmt: skip
    return total


@triton.jit
def multiply(left, there, numbers, scales, zeros, column, inside, total, KIND, COLUMNS, DEPTH, GROUP, STEP):
    """total [rows, columns] plus rows times columns of a matrix.

    left:   [rows] where each row begins; there: which rows exist
    column: [columns]; inside: which of them exist
    KIND:   format of a packed matrix; -1 for numbers
    GROUP:  numbers of a column that share a scale
    """
    if KIND >= 0:
        total = _multiply_packed(
            left, there, numbers, scales, zeros, column, inside, total, KIND, COLUMNS, DEPTH, GROUP, STEP
        )
    else:
        total = _multiply_numbers(left, there, numbers + column.to(tl.int64) * DEPTH, inside, total, DEPTH, STEP)
    return total


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    source, numbers, scales, zeros, biases, out, rows, KIND: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One program per tile of rows and columns. Those of the same columns follow each other."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there, inside = row < rows, column < COLUMNS
    total = multiply(
        source + row.to(tl.int64) * DEPTH, there, numbers, scales, zeros, column, inside,
        tl.zeros([ROWS, WIDTH], tl.float32), KIND, COLUMNS, DEPTH, GROUP, STEP,
    )  # fmt: skip
    if HAS_BIAS:
        total += tl.load(biases + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    to = out + row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=there[:, None] & inside[None, :])


def linear(
    source: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor, *, capability: int, batch_invariant: bool
) -> None:
    """See `model/ops/products.py`: the library's product, unless the bits of a row may not depend on other rows.

    capability: of the chip, 90 for 9.0
    """
    if batch_invariant:
        _launch(Tile.of_numbers(source.dtype, capability), source, matrix, bias, out)
    else:
        library.multiply(source, matrix, bias, out)


def quantized_linear(
    source: Tensor, matrix: QuantizedMatrix, bias: Tensor | None, out: Tensor, *, capability: int, batch_invariant: bool
) -> None:
    """See `model/ops/products.py`, and `linear`."""
    rows = FIXED_ROWS if batch_invariant else len(source)
    _launch(Tile.of_packed(rows, source.dtype, capability), source, matrix, bias, out)


def _launch(tile: Tile, source: Tensor, matrix: Tensor | QuantizedMatrix, bias: Tensor | None, out: Tensor) -> None:
    (rows, depth), (tensors, kind, group) = source.shape, operands(matrix)
    columns = len(matrix) if isinstance(matrix, Tensor) else matrix.columns
    _linear_kernel[(-(-rows // tile.rows), -(-columns // tile.columns))](
        source, *tensors, source if bias is None else bias, out, rows, kind, columns, depth, group, bias is not None,
        *tile[:3], num_warps=tile.warps, num_stages=tile.stages, **LAUNCH,
    )  # fmt: skip


def operands(matrix: Tensor | QuantizedMatrix) -> tuple[tuple[Tensor, ...], int, int]:
    """Numbers, scales and zero points, or a tensor that is not read in their place; KIND and GROUP of `multiply`."""
    if isinstance(matrix, Tensor):
        return (matrix, matrix, matrix), -1, 0
    zeros = matrix.scales if matrix.zeros is None else matrix.zeros
    return (matrix.numbers, matrix.scales, zeros), matrix.format, matrix.group


@triton.jit
def _look_up_kernel(
    numbers, scales, zeros, ids, out, KIND: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One program per row of `out`, and some parts of it."""
    SIZE: tl.constexpr = 32 if (KIND == _INT8) | (KIND == _FP8) else 64
    COUNT: tl.constexpr = (DEPTH + SIZE - 1) // SIZE
    row = tl.program_id(0).to(tl.int64)
    column = tl.load(ids + row).to(tl.int64)
    part = tl.program_id(1) * PARTS + tl.arange(0, PARTS)
    kept, step = part < COUNT, tl.arange(0, 32)
    place = (part.to(tl.int64) * COLUMNS + column)[:, None] * 32 + step[None, :]
    code = tl.load(numbers + place, mask=kept[:, None], other=0)
    for half in tl.static_range(SIZE // 32):
        group = part * (SIZE // 32) + half
        mine = _half_of(code, half, SIZE)
        found = _scaled(mine, group.to(tl.int64), column, kept, scales, zeros, KIND, COLUMNS, GROUP)
        depth = group[:, None] * 32 + step[None, :]
        tl.store(out + row * DEPTH + depth, found, mask=kept[:, None] & (depth < DEPTH))


def look_up(matrix: QuantizedMatrix, ids: Tensor, out: Tensor) -> None:
    """See `model/ops/products.py`."""
    parts = matrix.numbers.shape[0]
    block, (tensors, kind, group) = min(power_of_2(parts), 32), operands(matrix)
    _look_up_kernel[(len(ids), -(-parts // block))](
        *tensors, ids, out, kind, matrix.columns, matrix.depth, group,
        block, **launch_options(block * GROUP // 8),
    )  # fmt: skip


@triton.jit
def _round_rows_kernel(source, codes, scales, DEPTH: tl.constexpr, BLOCK: tl.constexpr):
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    step = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    for first in range(0, DEPTH, BLOCK):
        column = first + step
        number = tl.load(source + row * DEPTH + column, mask=column < DEPTH, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(number))
    scale = tl.maximum(tl.div_rn(tl.max(largest, 0), _LARGEST), _LEAST_SCALE)
    tl.store(scales + row, scale)
    for first in range(0, DEPTH, BLOCK):
        column = first + step
        number = tl.load(source + row * DEPTH + column, mask=column < DEPTH, other=0.0).to(tl.float32)
        tl.store(codes + row * DEPTH + column, to_fp8(tl.div_rn(number, scale)), mask=column < DEPTH)


def round_rows(source: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [T, depth] in e4m3, and their scales [T, 1] float32; see `rounded_rows`."""
    rows, depth = source.shape
    codes = torch.empty(rows, depth, dtype=torch.uint8, device=source.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=source.device)
    block = min(power_of_2(depth), _MOST_AT_ONCE)
    _round_rows_kernel[(rows,)](source, codes, scales, depth, block, **launch_options(block // 8))
    return codes.view(E4M3), scales


def float8_linear(source: Tensor, matrix: Float8Matrix, bias: Tensor | None, out: Tensor) -> None:
    """See `model/ops/products.py`."""
    matrix.multiply(*round_rows(source), bias, out)
