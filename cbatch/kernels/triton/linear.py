"""Products of rows with matrices: of numbers, or packed ones that become numbers of the rows' type in registers.

A program reads a part of a packed matrix's columns at a time, which lies in one piece of memory (see
`kernels/quantized_matrix.py`; 32 is the `GROUP` there), and some of them ahead. Sums are float32. With many rows,
weights are rounded once, from float32 to the rows' type. With few, integers are multiplied as they are and the sums of
groups by their scales, and the depth is split if the columns are too few for all multiprocessors.

Otherwise, a program goes along the whole depth for a tile of rows and columns, in one order. So a row's result depends
on nothing but the row, as long as tiles have one size, that of many rows. For numbers, this has the place of the
library's products if steps are to be batch-invariant: those take another kernel, and may split the depth, for another
number of rows.

Rows for products of FP8 are rounded by one kernel where torch has six. Divisions round as those of torch do, so the
bytes are the same.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbatch.kernels import products as library
from cbatch.kernels.formats import FP8, GROUP, INT8, MXFP4, NVFP4
from cbatch.kernels.quantized_matrix import LEAST_SCALE, Float8Matrix, QuantizedMatrix
from cbatch.kernels.triton.attention_tile import LAUNCH, launch_options, power_of_2
from cbatch.kernels.triton.conversion import (
    from_four_bits,
    from_fp8,
    from_int8,
    in_order,
    ones_like,
    quotient,
    to_fp8,
)
from cbatch.kernels.triton.occupancy import device_limits
from cbatch.runtime.kv_cache import FP8 as E4M3
from cbatch.runtime.kv_cache import FP8_MAX

FIXED_ROWS = 64
"""If steps are to be batch-invariant, packed matrices and experts get the tile that they have for so many rows."""

_RESIDENT = 4
"""Programs of a multiprocessor that split the depth: two warps each, for its four schedulers twice."""

_MOST_AT_ONCE = 8192
"""Numbers of a row that a program rounds to FP8 at once."""

_LARGEST, _LEAST_SCALE = tl.constexpr(FP8_MAX), tl.constexpr(LEAST_SCALE)
_INT8, _MXFP4, _NVFP4, _FP8 = map(tl.constexpr, (INT8, MXFP4, NVFP4, FP8))


class Form(NamedTuple):
    """The constants of a matrix that a kernel is compiled for: the FORM of `multiply`.

    kind:  format of a packed matrix; -1 for numbers
    group: numbers of a column that share a scale
    """

    kind: int
    columns: int
    depth: int
    group: int


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
            return cls(8 if rows <= 8 else 16, 64, 2, 2, 4)
        if rows <= 64:
            return cls(64, 64, 2, 4, 3)
        # Before 9.0, matrix units take both sides from registers, of which wider tiles need too many.
        return cls(128, 128 if capability in (90, 100) else 64, 1, 8, 3)

    def splits(self, columns: int, depth: int, multiprocessors: int) -> int:
        """Of the depth, if there are few rows: enough for all multiprocessors, each with rounds to read ahead."""
        if self.rows > 16 or self.step == 1:
            return 1
        tiles, rounds = -(-columns // self.columns), -(-depth // (2 * GROUP * self.step))
        return max(1, min(_RESIDENT * multiprocessors // tiles, rounds // self.stages))

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
def _pair_of(pairs, pair, column, kept, COLUMNS):
    """The scales or zero points of two groups that follow each other, for each column in float32."""
    word = tl.load(pairs.to(tl.pointer_type(tl.int32), bitcast=True) + pair * COLUMNS + column, mask=kept, other=0)
    if pairs.dtype.element_ty == tl.bfloat16:
        first, second = word << 16, word & -65536
    else:
        first, second = word.to(tl.int16).to(tl.float16, bitcast=True), (word >> 16).to(tl.int16)
        first, second = first.to(tl.float32), second.to(tl.float16, bitcast=True).to(tl.float32)
    return first.to(tl.float32, bitcast=True), second.to(tl.float32, bitcast=True)


@triton.jit
def _scales_of(scales, part, column, kept, FORM):
    """Of 64 numbers, for each column: of the first 16, of those from 16, from 32, and from 48 on."""
    if FORM.kind == _NVFP4:
        first, second = _pair_of(scales, part * 2, column, kept, FORM.columns)
        third, fourth = _pair_of(scales, part * 2 + 1, column, kept, FORM.columns)
    elif FORM.kind == _FP8:
        first = tl.load(scales + part * 64 // FORM.group * FORM.columns + column, mask=kept, other=0.0)
        second, third, fourth = first, first, first
        if FORM.group % 64 != 0:
            kept = kept & (part * 64 + 32 < FORM.depth)
            third = tl.load(scales + (part * 64 + 32) // FORM.group * FORM.columns + column, mask=kept, other=0.0)
            fourth = third
    else:
        first, third = _pair_of(scales, part, column, kept, FORM.columns)
        second, fourth = first, third
    return first, second, third, fourth


@triton.jit
def _integers_of(numbers, part, column, kept, FORM, dtype):
    """Two pieces [columns, 32] of 64 numbers, before their scales."""
    byte = tl.arange(0, 32)[None, :]
    if (FORM.kind == _INT8) | (FORM.kind == _FP8):
        place = (part * 2 * FORM.columns + column).to(tl.int64)[:, None]
        low = tl.load(numbers + place * 32 + byte, mask=kept[:, None], other=0)
        if FORM.depth % 64 != 0:
            kept = kept & (part * 64 + 32 < FORM.depth)
        high = tl.load(numbers + (place + FORM.columns) * 32 + byte, mask=kept[:, None], other=0)
        if FORM.kind == _INT8:
            found = from_int8(low, dtype), from_int8(high, dtype)
        else:
            found = from_fp8(low, dtype), from_fp8(high, dtype)
    else:
        place = (part * FORM.columns + column).to(tl.int64)[:, None]
        code = tl.load(numbers + place * 32 + byte, mask=kept[:, None], other=0)
        found = from_four_bits(code, dtype, (FORM.kind == _MXFP4) | (FORM.kind == _NVFP4))
    return found


@triton.jit
def _numbers_of(matrix, part, column, kept, FORM):
    """Two pieces [columns, 32] float32 of 64 numbers."""
    low, high = _integers_of(matrix[0], part, column, kept, FORM, tl.float32)
    first, second, third, fourth = _scales_of(matrix[1], part, column, kept, FORM)
    first, third = first[:, None], third[:, None]
    if FORM.kind == _NVFP4:
        is_first = (tl.arange(0, 32) < 16)[None, :]
        first, third = tl.where(is_first, first, second[:, None]), tl.where(is_first, third, fourth[:, None])
    if matrix[2] is not None:
        zero, other = _pair_of(matrix[2], part, column, kept, FORM.columns)
        low, high = low - (zero - 8.0)[:, None], high - (other - 8.0)[:, None]
    return low * first, high * third


@triton.jit
def _rows_of(left, there, begin, first, SIZE, DEPTH, IS_WHOLE):
    """[rows, 32] numbers from a depth on; 0 but for SIZE of them."""
    step = tl.arange(0, 32)
    kept = there[:, None]
    if not IS_WHOLE:
        kept = kept & (begin + step < DEPTH)[None, :]
    if SIZE < 32:
        kept = kept & (step // SIZE * SIZE == first)[None, :]
    return tl.load(left[:, None] + (begin + step)[None, :], mask=kept, other=0.0)


@triton.jit
def _multiply_packed(left, there, matrix, column, inside, total, FORM, PARTS):
    """See `multiply`. PARTS: of 64 numbers of the depth, in a round"""
    IS_WHOLE: tl.constexpr = FORM.depth % (64 * PARTS) == 0
    for first in range(0, (FORM.depth + 63) // 64, PARTS):
        for more in tl.static_range(PARTS):
            part, kept = first + more, inside
            if not IS_WHOLE:
                kept = inside & (part * 64 < FORM.depth)
            pieces = _numbers_of(matrix, part, column, kept, FORM)
            for half in tl.static_range(2):
                a = _rows_of(left, there, part * 64 + half * 32, 0, 32, FORM.depth, IS_WHOLE)
                b = in_order(pieces[half].to(a.dtype))
                total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    return total


@triton.jit
def _add_scaled(sums, number, a, scale, zero):
    """sums [columns, rows] plus products of numbers [columns, K] of one group with rows a [rows, K]."""
    found = tl.dot(number, tl.trans(a), input_precision="ieee")
    if zero is not None:
        found -= (zero - 8.0)[:, None] * tl.dot(ones_like(number), tl.trans(a), input_precision="ieee")
    return sums + found * scale[:, None]


@triton.jit
def _multiply_few(left, there, matrix, column, inside, FORM, PARTS, SPLITS):
    """[columns, rows] products with one split of the depth, of which it takes PARTS times 64 numbers in a round.

    A matrix unit takes 16 numbers of one side and 8 of the other, so columns have the place of rows. Integers are
    multiplied as they are, and the sum of a group by its scale.
    """
    IS_WHOLE: tl.constexpr = FORM.depth % (64 * PARTS) == 0
    SIZE: tl.constexpr = 16 if FORM.kind == _NVFP4 else 32
    ROUNDS: tl.constexpr = (FORM.depth + 64 * PARTS - 1) // (64 * PARTS)
    EACH: tl.constexpr = (ROUNDS + SPLITS - 1) // SPLITS * PARTS
    begin = tl.program_id(2) * EACH
    sums = tl.zeros([column.shape[0], left.shape[0]], tl.float32)
    # Asked for by the loop, stages are for all that it reads: scales are no operand of a product.
    for first in tl.range(begin, tl.minimum(begin + EACH, ROUNDS * PARTS), PARTS, num_stages=4):
        for more in tl.static_range(PARTS):
            part, kept = first + more, inside
            if not IS_WHOLE:
                kept = inside & (part * 64 < FORM.depth)
            scale = _scales_of(matrix[1], part, column, kept, FORM)
            zero = (None, None)
            if matrix[2] is not None:
                zero = _pair_of(matrix[2], part, column, kept, FORM.columns)
            number = _integers_of(matrix[0], part, column, kept, FORM, left.dtype.element_ty)
            for half in tl.static_range(2):
                for turn in tl.static_range(32 // SIZE):
                    a = _rows_of(left, there, part * 64 + half * 32, turn * SIZE, SIZE, FORM.depth, IS_WHOLE)
                    sums = _add_scaled(sums, number[half], a, scale[half * 2 + turn], zero[half])
    return sums


@triton.jit
def multiply(left, there, matrix, column, inside, total, FORM, STEP, SPLITS):
    """total [rows, columns] plus rows times columns of a matrix.

    left:   [rows] where each row begins; there: which rows exist
    matrix: numbers, scales and zero points, see `operands`
    column: [columns]; inside: which of them exist
    SPLITS: of the depth, if there are few rows; program_id(2) says which to take
    """
    if FORM.kind >= 0 and left.shape[0] <= 16 and STEP > 1:
        total += tl.trans(_multiply_few(left, there, matrix, column, inside, FORM, STEP, SPLITS))
    elif FORM.kind >= 0:
        total = _multiply_packed(left, there, matrix, column, inside, total, FORM, STEP)
    else:
        right = matrix[0] + column.to(tl.int64) * FORM.depth
        total = _multiply_numbers(left, there, right, inside, total, FORM.depth, STEP)
    return total


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    source, numbers, scales, zeros, biases, out, partials, arrivals, rows, FORM: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One program per tile of rows and columns, and split of the depth. Those of the same columns follow each other.

    Of the splits of a tile, the program that is the last to arrive adds all, always in their order.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there, inside = row < rows, column < FORM.columns
    left, total = source + row.to(tl.int64) * FORM.depth, tl.zeros([ROWS, WIDTH], tl.float32)
    total = multiply(left, there, (numbers, scales, zeros), column, inside, total, FORM, STEP, SPLITS)
    place = row.to(tl.int64)[:, None] * FORM.columns + column[None, :]
    kept = there[:, None] & inside[None, :]
    if SPLITS > 1:
        size = rows.to(tl.int64) * FORM.columns
        tl.store(partials + tl.program_id(2) * size + place, total, mask=kept)
        tl.debug_barrier()  # all of the program has stored what the arrival announces
        if tl.atomic_add(arrivals + tl.program_id(1), 1) < SPLITS - 1:
            return
        total = tl.zeros([ROWS, WIDTH], tl.float32)
        for split in range(SPLITS):
            total += tl.load(partials + split * size + place, mask=kept, other=0.0, cache_modifier=".cg")
        tl.store(arrivals + tl.program_id(1), 0)  # for the next launch
    if biases is not None:
        total += tl.load(biases + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=kept)


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
    tensors, form = operands(matrix)
    rows, splits, arrivals, partials = len(source), 1, None, None
    if isinstance(matrix, QuantizedMatrix) and rows <= 16:
        splits = tile.splits(form.columns, form.depth, _multiprocessors(source.device))
        if splits > 1:
            arrivals, partials = matrix.arrivals, out.new_empty(splits, rows, form.columns, dtype=torch.float32)
    _linear_kernel[(-(-rows // tile.rows), -(-form.columns // tile.columns), splits)](
        source, *tensors, bias, out, partials, arrivals, rows, form, splits, *tile[:3], num_warps=tile.warps,
        num_stages=tile.stages, **LAUNCH,
    )  # fmt: skip


@cache
def _multiprocessors(device: torch.device) -> int:
    return device_limits(device).multiprocessors


def operands(matrix: Tensor | QuantizedMatrix) -> tuple[tuple[Tensor | None, ...], Form]:
    """Numbers, scales and zero points, or None if there are none; and the form of a matrix, or of each expert's."""
    if isinstance(matrix, Tensor):
        return (matrix, None, None), Form(-1, matrix.shape[-2], matrix.shape[-1], 0)
    form = Form(matrix.format, matrix.columns, matrix.depth, matrix.group)
    return (matrix.numbers, matrix.scales, matrix.zeros), form


@triton.jit
def _look_up_kernel(numbers, scales, zeros, ids, out, FORM: tl.constexpr, PARTS: tl.constexpr):
    """One program per row of `out`, and some parts of 64 numbers."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.load(ids + row).to(tl.int64)
    part = tl.program_id(1) * PARTS + tl.arange(0, PARTS)
    pieces = _numbers_of((numbers, scales, zeros), part, column, part * 64 < FORM.depth, FORM)
    for half in tl.static_range(2):
        depth = (part * 64 + half * 32)[:, None] + tl.arange(0, 32)[None, :]
        tl.store(out + row * FORM.depth + depth, pieces[half], mask=depth < FORM.depth)


def look_up(matrix: QuantizedMatrix, ids: Tensor, out: Tensor) -> None:
    """See `model/ops/products.py`."""
    parts = -(-matrix.depth // (2 * GROUP))
    block, (tensors, form) = min(power_of_2(parts), 32), operands(matrix)
    grid = len(ids), -(-parts // block)
    _look_up_kernel[grid](*tensors, ids, out, form, block, **launch_options(block * GROUP // 8))


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
        tl.store(codes + row * DEPTH + column, to_fp8(quotient(number, scale)), mask=column < DEPTH)


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
