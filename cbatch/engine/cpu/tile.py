"""The inner loop of every matrix product: a few rows times 32 columns, accumulated in registers.

The right-hand matrix lies in panels of 16 columns. A panel holds, for each step of the depth, its 16 columns side by
side, as one vector: one number each in float32, two neighbours of the depth in bfloat16 and int8, for there is an
instruction that multiplies pairs. So the loop loads two vectors, and spreads one number (or pair) of each row over a
vector of its own.

Each result is summed over the depth in one order, whatever the other rows are: a row has the same result, to the
last bit, in any company.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.numpy_support import from_dtype

from cbatch.engine.cpu.jit import HAS_AVX512, HAS_BFLOAT16, address_of, kernel

LANES = 16
"""Columns of a panel."""

COLUMNS = 2 * LANES
"""Columns of a tile."""

ROWS = (1, 2, 3, 4, 6, 8, 12) if HAS_AVX512 else (1, 2)
"""Numbers of rows there is code for. The sums of the most of them fill the registers that the columns leave."""

MAX_ROWS = max(ROWS)

_FLOAT, _INT8, _INT32, _INT64 = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)
_SUMS = ir.VectorType(_FLOAT, LANES)
_WORDS = ir.VectorType(_INT32, LANES)


def filled_up(columns: int) -> int:
    """Columns of a matrix with those that fill up its last tile."""
    return -(-columns // COLUMNS) * COLUMNS


class BFloat16(ir.Type):  # type: ignore[misc]
    """A type of LLVM that llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat16)

    def __hash__(self) -> int:
        return hash(BFloat16)


_PAIRS = ir.VectorType(BFloat16(), 2 * LANES)


class _Emitter:
    """Writes the loop for one kind of element and one number of rows."""

    def __init__(self, builder: Any, element: Any, most: int) -> None:
        self.builder = builder
        self.element = element
        self.most = most

    def address(self, start: Any, offset: Any, kind: Any) -> Any:
        return self.builder.inttoptr(self.builder.add(start, offset), kind.as_pointer())

    def weights(self, at: Any, offset: Any) -> Any:
        """One vector of a panel, ready to be multiplied."""
        if self.element == types.int8:
            narrow = self.builder.load(self.address(at, offset, ir.VectorType(_INT8, 2 * LANES)), align=1)
            wide = self.builder.sitofp(narrow, ir.VectorType(_FLOAT, 2 * LANES))
            if HAS_BFLOAT16:
                return self.builder.fptrunc(wide, _PAIRS)
            places = [[i + odd for i in range(0, 2 * LANES, 2)] for odd in (0, 1)]
            return [
                self.builder.shuffle_vector(wide, wide, ir.Constant(ir.VectorType(_INT32, LANES), place))
                for place in places
            ]
        if self.element == types.float32:
            return self.builder.load(self.address(at, offset, _SUMS), align=4)
        if HAS_BFLOAT16:
            return self.builder.load(self.address(at, offset, _PAIRS), align=4)
        return self.halves(self.builder.load(self.address(at, offset, _WORDS), align=4))

    def spread(self, at: Any, offset: Any) -> Any:
        """A number of a row, or a pair, in all lanes."""
        kind = _FLOAT if self.element == types.float32 else _INT32
        word = self.builder.load(self.address(at, offset, kind), align=2)
        vector = ir.VectorType(kind, LANES)
        first = self.builder.insert_element(ir.Constant(vector, ir.Undefined), word, _INT32(0))
        spread = self.builder.shuffle_vector(first, first, ir.Constant(_WORDS, [0] * LANES))
        if self.element == types.float32:
            return spread
        return self.builder.bitcast(spread, _PAIRS) if HAS_BFLOAT16 else self.halves(spread)

    def halves(self, words: Any) -> list[Any]:
        """Both bfloat16 of each word as float32."""
        high = self.builder.and_(words, ir.Constant(_WORDS, [0xFFFF0000] * LANES))
        low = self.builder.shl(words, ir.Constant(_WORDS, [16] * LANES))
        return [self.builder.bitcast(half, _SUMS) for half in (low, high)]

    def multiply_add(self, total: Any, left: Any, right: Any) -> Any:
        if self.element != types.float32 and HAS_BFLOAT16:
            kind, name = ir.FunctionType(_SUMS, [_SUMS, _PAIRS, _PAIRS]), "llvm.x86.avx512bf16.dpbf16ps.512"
            dot = cgutils.get_or_insert_function(self.builder.module, kind, name)
            return self.builder.call(dot, [total, left, right])
        kind = ir.FunctionType(_SUMS, [_SUMS] * 3)
        fma = cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.fma.v{LANES}f32")
        both = [(left, right)] if self.element == types.float32 else zip(left, right, strict=True)
        for one, other in both:
            total = self.builder.call(fma, [one, other, total])
        return total

    def emit(
        self, count: Any, a: Any, lda: Any, pages: Any, run: Any, stride: Any, depth: Any, out: Any, ldo: Any, add: Any
    ) -> None:
        """Code for up to so many rows; where there are fewer, the last one is computed several times."""
        builder = self.builder
        last = builder.sub(count, _INT64(1))
        numbers = [
            builder.select(builder.icmp_signed("<", _INT64(row), last), _INT64(row), last) for row in range(self.most)
        ]
        outs = [builder.add(out, builder.mul(ldo, number)) for number in numbers]
        rows = [builder.add(a, builder.mul(lda, number)) for number in numbers]
        places = [(row, panel) for row in range(self.most) for panel in (0, 1)]
        sums = {place: cgutils.alloca_once_value(builder, ir.Constant(_SUMS, None)) for place in places}
        targets = {(row, panel): self.address(outs[row], _INT64(panel * LANES * 4), _SUMS) for row, panel in places}
        with builder.if_then(builder.icmp_signed("!=", add, _INT64(0))):
            for place in places:
                builder.store(builder.load(targets[place], align=4), sums[place])
        with cgutils.for_range_slice(builder, _INT64(0), depth, run, inc=True) as (first, page):
            left = builder.sub(depth, first)
            steps = builder.select(builder.icmp_signed("<", left, run), left, run)
            at = builder.mul(page, _INT64(16))
            panels = [builder.load(self.address(pages, builder.add(at, _INT64(8 * i)), _INT64)) for i in (0, 1)]
            start = builder.mul(first, _INT64(4))
            with cgutils.for_range(builder, steps) as loop:
                here = builder.mul(loop.index, stride)
                there = builder.add(start, builder.mul(loop.index, _INT64(4)))
                weights = [self.weights(panel, here) for panel in panels]
                for row in range(self.most):
                    spread = self.spread(rows[row], there)
                    for panel in (0, 1):
                        total = self.multiply_add(builder.load(sums[row, panel]), spread, weights[panel])
                        builder.store(total, sums[row, panel])
        for place in places:
            builder.store(builder.load(sums[place]), targets[place], align=4)


@intrinsic  # type: ignore[untyped-decorator]
def _emit_tile(
    context: Any, like: Any, rows: Any, a: Any, lda: Any, pages: Any, run: Any, stride: Any, depth: Any, out: Any,
    ldo: Any, add: Any,
) -> Any:  # fmt: skip
    """The loop for each number of rows there is code for, and the choice among them."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        end = builder.append_basic_block("end")
        blocks = {most: builder.append_basic_block(f"rows.{most}") for most in ROWS}
        switch = builder.switch(args[1], end)
        for count in range(1, MAX_ROWS + 1):
            switch.add_case(_INT64(count), blocks[min(most for most in ROWS if most >= count)])
        for most, block in blocks.items():
            with builder.goto_block(block):
                _Emitter(builder, like, most).emit(*args[1:])
                builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(like, *[types.int64] * 10), generate


def _loop(
    like: Any, rows: int, a: int, lda: int, pages: int, run: int, stride: int, depth: int, out: int, ldo: int, add: int
) -> None:
    _emit_tile(like, rows, a, lda, pages, run, stride, depth, out, ldo, add)


@cache
def tile_code(dtype: np.dtype[Any]) -> int:
    """The address of the loop for right-hand matrices of float32, uint16 (bfloat16) or int8.

    It is compiled by itself: as a part of every kernel that calls it, it would be compiled as often.
    """
    return address_of(_loop, types.void(from_dtype(dtype), *[types.int64] * 10))


@intrinsic  # type: ignore[untyped-decorator]
def _call(context: Any, code: Any, like: Any, arguments: Any) -> Any:
    """Calls the loop at an address. `like`: an element of the right-hand matrix."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code, element, rest = args
        kind = ir.FunctionType(ir.VoidType(), [element.type, *[_INT64] * 10])
        values = [builder.extract_value(rest, place) for place in range(10)]
        builder.call(builder.inttoptr(code, kind.as_pointer()), [element, *values])
        return context.get_dummy_value()

    return types.void(code, like, arguments), generate


@kernel
def tile(
    code: int, like: Any, rows: int, a: int, lda: int, pages: int, run: int, stride: int, depth: int, out: int,
    ldo: int, add: int,
) -> None:  # fmt: skip
    """out[rows, 32] = a[rows, depth] times two panels, added to what `out` holds where `add` is not 0.

    code:    see `tile_code`; like: an element of the right-hand matrix
    rows:    1 to MAX_ROWS
    a, out:  addresses; their rows lie `lda` and `ldo` bytes apart. `a` is float32 for float32, else bfloat16
    pages:   address of [N, 2] int64 addresses of the panels, in pages of `run` steps that lie `stride` bytes apart
    depth:   steps to take: numbers in float32, pairs otherwise
    """
    _call(code, like, (rows, a, lda, pages, run, stride, depth, out, ldo, add))


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(context: Any, address: Any) -> Any:
    """Asks for the 64 bytes at an address, which will soon be read."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_INT8.as_pointer(), _INT32, _INT32, _INT32])
        fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(fetch, [builder.inttoptr(args[0], _INT8.as_pointer()), _INT32(0), _INT32(3), _INT32(1)])
        return context.get_dummy_value()

    return types.void(types.int64), generate
