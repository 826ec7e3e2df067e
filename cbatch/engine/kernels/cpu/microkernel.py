"""The inner loop of every matrix product: a few rows times 32 columns, accumulated in registers.

The right-hand matrix lies in panels of 16 columns. A panel holds, for each step of the depth, its 16 columns side by
side, as one vector: one number each in float32, two neighbours of the depth in bfloat16 and int8, for there is an
instruction that multiplies pairs. So the loop loads two vectors, and spreads one number (or pair) of each row over a
vector of its own.

int8 weights meet int16: the left-hand rows are whole numbers too, in blocks of 256 with a unit each, so that a weight
is widened by one instruction, and the sums of a block are whole numbers that become float32 at its end.

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

from cbatch.engine.kernels.cpu.jit import HAS_AVX512, HAS_BFLOAT16, HAS_INT16, address_of, kernel

LANES = 16
"""Columns of a panel."""

COLUMNS = 2 * LANES
"""Columns of a tile."""

ROW_COUNTS = (1, 2, 3, 4, 6, 8, 12) if HAS_AVX512 else (1, 2)
"""Numbers of rows there is code for. The sums of the most of them fill the registers that the columns leave."""

MAX_ROWS = max(ROW_COUNTS)

QUANT_BLOCK = 256
"""Numbers of a left-hand row that share a unit, where the weights are int8: their products fit into an int32."""

_FLOAT, _INT8, _INT16 = ir.FloatType(), ir.IntType(8), ir.IntType(16)
_INT32, _INT64 = ir.IntType(32), ir.IntType(64)
_SUMS = ir.VectorType(_FLOAT, LANES)
_WORDS = ir.VectorType(_INT32, LANES)
_SHORTS = ir.VectorType(_INT16, 2 * LANES)


def pad_columns(columns: int) -> int:
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


class _TileEmitter:
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
            from_float32 = self.builder.load(self.address(at, offset, ir.VectorType(_INT8, 2 * LANES)), align=1)
            return self.builder.sext(from_float32, _SHORTS)
        if self.element == types.float32:
            return self.builder.load(self.address(at, offset, _SUMS), align=4)
        if HAS_BFLOAT16:
            return self.builder.load(self.address(at, offset, _PAIRS), align=4)
        return self.halves(self.builder.load(self.address(at, offset, _WORDS), align=4))

    def broadcast(self, at: Any, offset: Any, kind: Any) -> Any:
        """A float32 or a word, in all lanes."""
        word = self.builder.load(self.address(at, offset, kind), align=2)
        vector = ir.VectorType(kind, LANES)
        first = self.builder.insert_element(ir.Constant(vector, ir.Undefined), word, _INT32(0))
        return self.builder.shuffle_vector(first, first, ir.Constant(_WORDS, [0] * LANES))

    def left(self, at: Any, offset: Any) -> Any:
        """A number of a row, or a pair, ready to be multiplied with a vector of weights."""
        if self.element == types.float32:
            return self.broadcast(at, offset, _FLOAT)
        words = self.broadcast(at, offset, _INT32)
        if self.element == types.int8:
            return self.builder.bitcast(words, _SHORTS)
        return self.builder.bitcast(words, _PAIRS) if HAS_BFLOAT16 else self.halves(words)

    def halves(self, words: Any) -> list[Any]:
        """Both bfloat16 of each word as float32."""
        high = self.builder.and_(words, ir.Constant(_WORDS, [0xFFFF0000] * LANES))
        low = self.builder.shl(words, ir.Constant(_WORDS, [16] * LANES))
        return [self.builder.bitcast(half, _SUMS) for half in (low, high)]

    def multiply_add(self, total: Any, left: Any, right: Any) -> Any:
        if self.element == types.int8:
            return self.multiply_add_int16(total, left, right)
        if self.element != types.float32 and HAS_BFLOAT16:
            return self.call("llvm.x86.avx512bf16.dpbf16ps.512", _SUMS, total, left, right)
        both = [(left, right)] if self.element == types.float32 else zip(left, right, strict=True)
        for one, other in both:
            total = self.fma(one, other, total)
        return total

    def multiply_add_int16(self, total: Any, left: Any, right: Any) -> Any:
        """Pairs of int16, added to int32."""
        builder = self.builder
        if HAS_INT16:
            left, right = (builder.bitcast(pairs, _WORDS) for pairs in (left, right))
            return self.call("llvm.x86.avx512.vpdpwssd.512", _WORDS, total, left, right)
        for odd in (0, 1):
            places = ir.Constant(_WORDS, list(range(odd, 2 * LANES, 2)))
            halves = [builder.sext(builder.shuffle_vector(pairs, pairs, places), _WORDS) for pairs in (left, right)]
            total = builder.add(total, builder.mul(*halves))
        return total

    def fma(self, one: Any, other: Any, total: Any) -> Any:
        return self.call(f"llvm.fma.v{LANES}f32", _SUMS, one, other, total)

    def call(self, name: str, result: Any, *arguments: Any) -> Any:
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), arguments)

    def emit(
        self,
        count: Any,
        a: Any,
        lda: Any,
        panel_table: Any,
        run_length: Any,
        stride: Any,
        depth: Any,
        out: Any,
        ldo: Any,
        add: Any,
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
        is_int8 = self.element == types.int8
        int_sums = {place: cgutils.alloca_once(builder, _WORDS) for place in places} if is_int8 else sums
        with cgutils.for_range_slice(builder, _INT64(0), depth, run_length, inc=True) as (first, run):
            if is_int8:
                for place in places:
                    builder.store(ir.Constant(_WORDS, None), int_sums[place])
            left = builder.sub(depth, first)
            steps = builder.select(builder.icmp_signed("<", left, run_length), left, run_length)
            at = builder.mul(run, _INT64(16))
            panels = [builder.load(self.address(panel_table, builder.add(at, _INT64(8 * i)), _INT64)) for i in (0, 1)]
            self.emit_run(rows, panels, builder.mul(first, _INT64(4)), steps, stride, int_sums)
            if is_int8:
                unit = builder.mul(builder.add(depth, run), _INT64(4))
                for row, panel in places:
                    total = builder.sitofp(builder.load(int_sums[row, panel]), _SUMS)
                    total = self.fma(total, self.broadcast(rows[row], unit, _FLOAT), builder.load(sums[row, panel]))
                    builder.store(total, sums[row, panel])
        for place in places:
            builder.store(builder.load(sums[place]), targets[place], align=4)

    def emit_run(self, rows: list[Any], panels: list[Any], start: Any, steps: Any, stride: Any, sums: Any) -> None:
        """Code for the steps of one page. start: bytes from the beginning of a left-hand row."""
        builder = self.builder
        with cgutils.for_range(builder, steps) as loop:
            there = builder.add(start, builder.mul(loop.index, _INT64(4)))
            weights = [self.weights(panel, builder.mul(loop.index, stride)) for panel in panels]
            for row in range(self.most):
                number = self.left(rows[row], there)
                for panel in (0, 1):
                    total = self.multiply_add(builder.load(sums[row, panel]), number, weights[panel])
                    builder.store(total, sums[row, panel])


@intrinsic  # type: ignore[untyped-decorator]
def _emit_tile(
    context: Any,
    like: Any,
    rows: Any,
    a: Any,
    lda: Any,
    panel_table: Any,
    run_length: Any,
    stride: Any,
    depth: Any,
    out: Any,
    ldo: Any,
    add: Any,
) -> Any:
    """The loop for each number of rows there is code for, and the choice among them."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        end = builder.append_basic_block("end")
        blocks = {most: builder.append_basic_block(f"rows.{most}") for most in ROW_COUNTS}
        switch = builder.switch(args[1], end)
        for count in range(1, MAX_ROWS + 1):
            switch.add_case(_INT64(count), blocks[min(most for most in ROW_COUNTS if most >= count)])
        for most, block in blocks.items():
            with builder.goto_block(block):
                _TileEmitter(builder, like, most).emit(*args[1:])
                builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(like, *[types.int64] * 10), generate


def _tile_loop(
    like: Any,
    rows: int,
    a: int,
    lda: int,
    panel_table: int,
    run_length: int,
    stride: int,
    depth: int,
    out: int,
    ldo: int,
    add: int,
) -> None:
    _emit_tile(like, rows, a, lda, panel_table, run_length, stride, depth, out, ldo, add)


@cache
def microkernel_address(dtype: np.dtype[Any]) -> int:
    """The address of the loop for right-hand matrices of float32, uint16 (bfloat16) or int8.

    It is compiled by itself: as a part of every kernel that calls it, it would be compiled as often.
    """
    return address_of(_tile_loop, types.void(from_dtype(dtype), *[types.int64] * 10))


@intrinsic  # type: ignore[untyped-decorator]
def _call_tile(context: Any, code: Any, like: Any, arguments: Any) -> Any:
    """Calls the loop at an address. `like`: an element of the right-hand matrix."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code, element, rest = args
        kind = ir.FunctionType(ir.VoidType(), [element.type, *[_INT64] * 10])
        values = [builder.extract_value(rest, place) for place in range(10)]
        builder.call(builder.inttoptr(code, kind.as_pointer()), [element, *values])
        return context.get_dummy_value()

    return types.void(code, like, arguments), generate


@kernel
def multiply_tile(
    code: int,
    like: Any,
    rows: int,
    a: int,
    lda: int,
    panel_table: int,
    run_length: int,
    stride: int,
    depth: int,
    out: int,
    ldo: int,
    add: int,
) -> None:
    """out[rows, 32] = a[rows, depth] times two panels, added to what `out` holds where `add` is not 0.

    code:    see `microkernel_address`; like: an element of the right-hand matrix
    rows:    1 to MAX_ROWS
    a, out:  addresses; their rows lie `lda` and `ldo` bytes apart. `a` has the type of the right-hand matrix; for int8
             a row is int16, and behind it are the units of its blocks, float32
    pages:   address of [N, 2] int64 addresses of the panels, in pages of `run_length` steps that lie `stride` bytes
             apart; for int8 a page is a block
    depth:   steps to take: numbers in float32, pairs otherwise
    """
    _call_tile(code, like, (rows, a, lda, panel_table, run_length, stride, depth, out, ldo, add))


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(context: Any, address: Any) -> Any:
    """Asks for the 64 bytes at an address, which will soon be read."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_INT8.as_pointer(), _INT32, _INT32, _INT32])
        fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(fetch, [builder.inttoptr(args[0], _INT8.as_pointer()), _INT32(0), _INT32(3), _INT32(1)])
        return context.get_dummy_value()

    return types.void(types.int64), generate
