"""The inner loop of products with quantized weights: a few rows times 32 columns, in integers.

Left-hand rows are quantized too, to int8 or int16, in the same groups of 32 numbers as the weights, each in units of a
127th or a 32767th of its largest number. In memory a group is its numbers, the last one's padded with zeros; then their
float32 scale; then a word: what the offset of the stored weights adds too much, as an int32, or for weights with zero
points minus the sum of the group as a float32. So one number says where a loop is in each of its rows.

A vector of weights holds four bytes for each of 16 columns, which are multiplied with four numbers of a row: one
instruction for int8, two for int16, whose quads lie in the order 0, 2, 1, 3 for that. Where 4 bits are the place of a
level in a table, they become levels in registers. Sums of a group are exact integers. They begin with what the offset
of the stored weights adds too much, and at the group's end they become float32, times the scales of both groups. The
sums of 6 rows and the integers beside them fill the registers.

Each result is summed in the same order, whatever the other rows are: a row has the same result, to the last bit, in
every batch.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from cbatch.kernels.cpu.jit import (
    FEATURES,
    HAS_AVX512,
    HAS_VNNI,
    HAS_VNNI_256,
    LIKE,
    LITERAL,
    PARTS,
    Part,
    address_of,
    emitted,
    kernel,
    shared,
)
from cbatch.kernels.cpu.matmul.formats import OFFSETS, group_bytes, number_bytes
from cbatch.kernels.cpu.matmul.microkernel import (
    LANES,
    SECOND_CACHE,
    Ahead,
    Rows,
    VectorEmitter,
    call_loop,
    emit_for_rows,
    emit_prefetch,
)
from cbatch.kernels.formats import GROUP, INT4_ZEROS, INT8, LEVELS, MXFP4

ROW_COUNTS = (1, 2, 3, 4, 5, 6) if HAS_AVX512 else (1, 2)
"""Numbers of rows that there is code for: all up to the largest, the sums of which fill the registers."""

MAX_ROWS = max(ROW_COUNTS)

_FLOAT, _HALF = ir.FloatType(), ir.HalfType()
_INT32, _INT64 = ir.IntType(32), ir.IntType(64)
_SUMS = ir.VectorType(_FLOAT, LANES)
_WORDS = ir.VectorType(_INT32, LANES)
_SHORTS = ir.VectorType(ir.IntType(16), 2 * LANES)
_BYTES = ir.VectorType(ir.IntType(8), 4 * LANES)
_VECTOR_BYTES = 4 * LANES
_LOOKUPS = {
    f"x86.{instruction}": width
    for feature, instruction, width in (
        ("avx512bw", "avx512.pshuf.b.512", 64), ("avx2", "avx2.pshuf.b", 32), ("ssse3", "ssse3.pshuf.b.128", 16)
    )
    if feature in FEATURES
}  # fmt: skip
"""Instructions that take bytes from a table of 16, and how many at once; the widest first."""
_NUM_ARGUMENTS = 10

_LINE = 64

_ZERO_BELOW = float(np.float32(1e-34))
"""A group of smaller numbers is quantized to zeros: the inverse of its scale would overflow a float32."""

_IN_QUADS = [4 * (lane // 4) + (0, 2, 1, 3)[lane % 4] for lane in range(LANES)]
"""The order of int16: of four numbers each, the second and the third change places."""


@shared
def left_group_bytes(left_bytes: int) -> int:
    """Bytes of a group of a row: its numbers, a scale and a word."""
    return GROUP * left_bytes + 8


@shared
def quantized_row_bytes(left_bytes: int, depth: int) -> int:
    """Bytes from one row to the next."""
    return whole_lines(-(-depth // GROUP) * left_group_bytes(left_bytes))


@shared
def whole_lines(size: int) -> int:
    """At least so many bytes: an odd number of cache lines, so that rows do not compete for the same sets."""
    return (-(-size // _LINE) | 1) * _LINE


class _RowEmitter(VectorEmitter):
    """Emits code that quantizes a group. like: type of its numbers, float32 or uint16 (bfloat16)."""

    def __init__(self, builder: Any, like: Any, left_bytes: int, weights: Any) -> None:
        super().__init__(builder)
        self.like = like
        self.left_bytes = left_bytes
        self.weights = weights

    def reduce(self, name: str, vector: Any) -> Any:
        kind = ir.FunctionType(_INT32, [_WORDS])
        name = f"llvm.vector.reduce.{name}.v{LANES}i32"
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), [vector])

    def bits(self, address: Any, half: int) -> Any:
        """Those of 16 numbers as float32."""
        builder, width = self.builder, self.like.bitwidth
        numbers = self.read(address, half * LANES * width // 8, ir.VectorType(ir.IntType(width), LANES))
        return numbers if width == 32 else builder.shl(builder.zext(numbers, _WORDS), self.words(16))

    def emit(self, source: Any, target: Any) -> None:
        """Quantizes the group of 32 numbers at an address to another address."""
        builder, most = self.builder, ir.FloatType()(127 if self.left_bytes == 1 else 32767)
        halves = [self.bits(source, half) for half in (0, 1)]
        both = [builder.and_(half, self.words(0x7FFFFFFF)) for half in halves]
        larger = builder.select(builder.icmp_unsigned(">", *both), *both)
        largest = builder.bitcast(self.reduce("umax", larger), ir.FloatType())
        is_finite = builder.fcmp_ordered("<", largest, ir.FloatType()(float("inf")))
        is_normal = builder.and_(is_finite, builder.fcmp_ordered(">", largest, ir.FloatType()(_ZERO_BELOW)))
        factors = self.broadcast(builder.fdiv(most, largest))
        sums = []
        for half, bits in enumerate(halves):
            scaled = builder.fmul(builder.bitcast(bits, _SUMS), factors)
            scaled = builder.select(is_normal, scaled, ir.Constant(_SUMS, None))
            integers = builder.fptosi(self.call(f"rint.v{LANES}f32", scaled), _WORDS)
            sums.append(integers)
            if self.left_bytes == 2:
                integers = builder.shuffle_vector(integers, integers, ir.Constant(_WORDS, _IN_QUADS))
            narrow = builder.trunc(integers, ir.VectorType(ir.IntType(8 * self.left_bytes), LANES))
            self.write(narrow, target, half * LANES * self.left_bytes)
        total = self.reduce("add", builder.add(*sums))
        scale = builder.select(is_finite, builder.fdiv(largest, most), ir.FloatType()(float("nan")))
        self.write(scale, target, GROUP * self.left_bytes)
        word = builder.bitcast(builder.fneg(builder.sitofp(total, ir.FloatType())), _INT32)
        for kind, offset in OFFSETS.items():
            is_meant = builder.icmp_signed("==", self.weights, _INT64(kind))
            word = builder.select(is_meant, builder.mul(total, _INT32(-offset)), word)
        self.write(word, target, GROUP * self.left_bytes + 4)


@emitted(types.void, LIKE, LITERAL, types.int64, types.int64, types.int64, types.int64)
def _quantize(builder: Any, like: Any, left_bytes: int, weights: Any, source: Any, depth: Any, target: Any) -> None:
    """Quantizes a row from an address to another. like: one of its numbers"""
    size, step = like.bitwidth // 8, left_group_bytes(left_bytes)
    emitter, number = _RowEmitter(builder, like, left_bytes, weights), ir.IntType(like.bitwidth)
    groups, rest = builder.udiv(depth, _INT64(GROUP)), builder.urem(depth, _INT64(GROUP))
    with cgutils.for_range(builder, groups) as loop:
        there = builder.add(source, builder.mul(loop.index, _INT64(GROUP * size)))
        emitter.emit(there, builder.add(target, builder.mul(loop.index, _INT64(step))))
    with builder.if_then(builder.icmp_signed(">", rest, _INT64(0))):
        part = ir.Constant(ir.ArrayType(number, GROUP), None)
        padded = builder.ptrtoint(cgutils.alloca_once_value(builder, part), _INT64)
        begin = builder.add(source, builder.mul(groups, _INT64(GROUP * size)))
        with cgutils.for_range(builder, rest) as loop:
            at = builder.mul(loop.index, _INT64(size))
            emitter.write(emitter.read(begin, at, number), padded, at)
        emitter.emit(padded, builder.add(target, builder.mul(groups, _INT64(step))))


@kernel
def quantize_row(row: Any, memory: Any, weights: int, left_bytes: int) -> None:
    """Writes a row [depth] of float32 or bfloat16, for weights of that format, to `quantized_row_bytes` of memory."""
    if left_bytes == 1:
        _quantize(row[0], 1, weights, row.ctypes.data, len(row), memory.ctypes.data)
    else:
        _quantize(row[0], 2, weights, row.ctypes.data, len(row), memory.ctypes.data)


class _QuantizedEmitter(VectorEmitter):
    """Emits the loop for one format of weights, one size of left-hand numbers in bytes, and one number of rows."""

    def __init__(self, builder: Any, weights: int, left_bytes: int, num_rows: int) -> None:
        super().__init__(builder)
        self.format = weights
        self.left_bytes = left_bytes
        self.num_rows = num_rows
        self.places = [(row, panel) for row in range(num_rows) for panel in (0, 1)]
        self.coming: tuple[Any, Any]
        """The address of what a group prefetches, and the bytes from one line of it to the next."""

    def even_and_odd(self, quads: Any) -> list[Any]:
        """Bytes 0 and 2 of each word, and 1 and 3, as unsigned numbers of 16 bits."""
        mask = self.words(0x00FF00FF)
        return [self.builder.and_(quads, mask), self.builder.and_(self.builder.lshr(quads, self.words(8)), mask)]

    def multiply_pairs(self, total: Any, left: Any, right: Any) -> Any:
        """The products of pairs of int16, added to int32."""
        builder = self.builder
        if HAS_VNNI:
            return self.call("x86.avx512.vpdpwssd.512", total, left, right)
        left, right = (builder.bitcast(words, _SHORTS) for words in (left, right))
        for odd in (0, 1):
            places = ir.Constant(_WORDS, list(range(odd, 2 * LANES, 2)))
            halves = [builder.sext(builder.shuffle_vector(pairs, pairs, places), _WORDS) for pairs in (left, right)]
            total = builder.add(total, builder.mul(*halves))
        return total

    def multiply_bytes(self, total: Any, quads: Any, left: Any) -> Any:
        """The products of four unsigned bytes with four signed ones, added to int32."""
        builder = self.builder
        if HAS_VNNI:
            return self.call("x86.avx512.vpdpbusd.512", total, quads, left)
        if HAS_VNNI_256:
            halves = []
            for half in (range(LANES // 2), range(LANES // 2, LANES)):
                places = ir.Constant(ir.VectorType(_INT32, LANES // 2), list(half))
                parts = [builder.shuffle_vector(each, each, places) for each in (total, quads, left)]
                halves.append(self.call("x86.avx512.vpdpbusd.256", *parts))
            return builder.shuffle_vector(*halves, ir.Constant(_WORDS, list(range(LANES))))
        signed = builder.bitcast(left, _SHORTS)
        eight = ir.Constant(_SHORTS, [8] * 2 * LANES)
        pairs = [builder.ashr(builder.shl(signed, eight), eight), builder.ashr(signed, eight)]
        for weights, numbers in zip(self.even_and_odd(quads), pairs, strict=True):
            total = self.multiply_pairs(total, weights, builder.bitcast(numbers, _WORDS))
        return total

    def multiply_quads(self, sums: dict[tuple[int, int], Any], quads: list[Any], rows: list[Any], there: Any) -> None:
        """Adds the products of one vector of both panels. there: bytes from the address of a row to four numbers"""
        builder = self.builder
        pairs = [self.even_and_odd(quad) for quad in quads] if self.left_bytes == 2 else []
        for row in range(self.num_rows):
            if self.left_bytes == 1:
                left = self.read_broadcast(rows[row], there, _INT32)
                for panel in (0, 1):
                    sums[row, panel] = self.multiply_bytes(sums[row, panel], quads[panel], left)
                continue
            for odd in (0, 1):
                left = self.read_broadcast(rows[row], builder.add(there, _INT64(4 * odd)), _INT32)
                for panel in (0, 1):
                    sums[row, panel] = self.multiply_pairs(sums[row, panel], pairs[panel][odd], left)

    def weights(self, there: Any, number: int) -> list[Any]:
        """The vectors of both panels so many vectors further on.

        Of two cache lines that one pass needs, the first is prefetched. The processor brings the other one as well, and
        half as many requests wait for memory at once.
        """
        place, part = self.coming
        emit_prefetch(self.builder, self.builder.add(place, self.builder.mul(part, _INT64(number))), near=SECOND_CACHE)
        return [self.read(there, (2 * number + panel) * _VECTOR_BYTES, _WORDS) for panel in (0, 1)]

    def quads(self, start: Any, number: int) -> list[Any]:
        """Four bytes for each column of both panels, of a group that begins there."""
        if self.format == INT8:
            return self.weights(start, number)
        builder, low = self.builder, self.words(0x0F0F0F0F)
        if number % 2 == 0:
            self.nibbles = self.weights(start, number // 2)
            found = [builder.and_(words, low) for words in self.nibbles]
        else:
            found = [builder.and_(builder.lshr(words, self.words(4)), low) for words in self.nibbles]
        return [self.levels(places) for places in found] if self.format in LEVELS else found

    def levels(self, places: Any) -> Any:
        """Bytes of 0 to 15 as levels plus their offset."""
        builder, offset = self.builder, OFFSETS[self.format]
        levels = [level + offset for level in LEVELS[self.format]]
        places = builder.bitcast(places, _BYTES)
        if not _LOOKUPS:
            found = ir.Constant(_BYTES, [levels[0]] * _VECTOR_BYTES)
            for place, level in enumerate(levels[1:], 1):
                is_it = builder.icmp_unsigned("==", places, ir.Constant(_BYTES, [place] * _VECTOR_BYTES))
                found = builder.select(is_it, ir.Constant(_BYTES, [level] * _VECTOR_BYTES), found)
            return builder.bitcast(found, _WORDS)
        instruction, width = next(iter(_LOOKUPS.items()))
        table = ir.Constant(ir.VectorType(ir.IntType(8), width), levels * (width // len(levels)))

        def chosen(one: Any, other: Any, first: int, count: int) -> Any:
            """So many elements of two vectors, one behind the other, from the first on."""
            numbers = ir.Constant(ir.VectorType(_INT32, count), list(range(first, first + count)))
            return builder.shuffle_vector(one, other, numbers)

        parts = [
            self.call(instruction, table, chosen(places, places, first, width))
            for first in range(0, _VECTOR_BYTES, width)
        ]
        while len(parts) > 1:
            pairs = zip(parts[::2], parts[1::2], strict=True)
            parts = [chosen(*pair, 0, 2 * pair[0].type.count) for pair in pairs]
        return builder.bitcast(parts[0], _WORDS)

    def scales(self, start: Any, place: int) -> list[Any]:
        """Numbers of 16 bits of both panels as float32, which lie so far behind the start of a group."""
        builder, found = self.builder, []
        for panel in (0, 1):
            at = place + 2 * LANES * panel
            if self.format == MXFP4:
                halves = builder.zext(self.read(start, at, ir.VectorType(ir.IntType(16), LANES)), _WORDS)
                found.append(builder.bitcast(builder.shl(halves, self.words(16)), _SUMS))
            else:
                found.append(builder.fpext(self.read(start, at, ir.VectorType(_HALF, LANES)), _SUMS))
        return found

    def emit(
        self, left: tuple[Any, Any], weights: Any, groups: Any, ahead: tuple[Any, Any], out: tuple[Any, Any], add: Any
    ) -> None:
        """Code for all rows. weights: address of the tile; groups: of 32 numbers of the depth; ahead: see `Ahead`"""
        builder, numbers = self.builder, range(self.num_rows)
        rows, outs = (
            [builder.add(address, builder.mul(stride, _INT64(row))) for row in numbers]
            for address, stride in (left, out)
        )
        coming, stride = builder.add(weights, ahead[0]), ahead[1]
        part = builder.udiv(stride, _INT64(number_bytes(self.format) // (2 * _VECTOR_BYTES)))
        with self.sums(outs, add) as sums, cgutils.for_range(builder, groups) as loop:
            self.coming = builder.add(coming, builder.mul(loop.index, stride)), part
            start = builder.add(weights, builder.mul(loop.index, _INT64(group_bytes(self.format))))
            first = builder.mul(loop.index, _INT64(left_group_bytes(self.left_bytes)))
            self.emit_group(sums, start, [builder.add(row, first) for row in rows])

    def emit_group(self, sums: dict[tuple[int, int], Any], start: Any, rows: list[Any]) -> None:
        """A group, which begins at `start` in the weights and at these addresses in the rows."""
        builder, has_zeros = self.builder, self.format == INT4_ZEROS
        scale, offset = (_INT64(GROUP * self.left_bytes + at) for at in (0, 4))
        totals = {
            place: self.words(0) if has_zeros else self.read_broadcast(rows[place[0]], offset, _INT32)
            for place in self.places
        }
        for quad in range(GROUP // 4):
            self.multiply_quads(totals, self.quads(start, quad), rows, _INT64(4 * self.left_bytes * quad))
        end = number_bytes(self.format)
        scales = self.scales(start, end)
        zeros = self.scales(start, end + 4 * LANES) if has_zeros else []
        for row in range(self.num_rows):
            factor = self.read_broadcast(rows[row], scale, _FLOAT)
            # With zero points, what the row has in place of an offset is minus the sum of its numbers.
            negative = self.read_broadcast(rows[row], offset, _FLOAT) if has_zeros else None
            for panel in (0, 1):
                total = builder.sitofp(totals[row, panel], _SUMS)
                if has_zeros:
                    total = self.fma(zeros[panel], negative, total)
                both_scales = builder.fmul(factor, scales[panel])
                builder.store(self.fma(total, both_scales, builder.load(sums[row, panel])), sums[row, panel])


@emitted(types.void, LITERAL, LITERAL, PARTS, types.int64, types.int64, PARTS, PARTS, types.int64, types.int64)
def _emit_loop(
    builder: Any, weights: int, left_bytes: int, left: Any, place: Any, groups: Any, ahead: Any, out: Any, count: Any,
    add: Any,
) -> None:  # fmt: skip
    """The loop for each number of rows, and the choice among them."""

    def emit(num_rows: int) -> None:
        _QuantizedEmitter(builder, weights, left_bytes, num_rows).emit(left, place, groups, ahead, out, add)

    emit_for_rows(builder, count, ROW_COUNTS, emit)


@cache
def quantized_address(weights: int, left_bytes: int) -> int:
    """The address of the loop for a format of weights, and left-hand numbers of 1 byte or 2.

    It is compiled by itself: as a part of each kernel that calls it, it would be compiled that often.
    """

    def loop(
        left: int, left_stride: int, place: int, groups: int, start: int, stride: int, out: int, out_stride: int,
        count: int, add: int,
    ) -> None:  # fmt: skip
        _emit_loop(
            weights, left_bytes, (left, left_stride), place, groups, (start, stride), (out, out_stride), count, add
        )

    return address_of(Part(loop, types.void(*[types.int64] * _NUM_ARGUMENTS)))


@kernel
def multiply_quantized(
    address: int, left: Rows, place: int, groups: int, ahead: Ahead, out: Rows, count: int, add: int
) -> None:
    """out [count, 32] float32 = left [count, 32 * groups] times a tile; added to `out` if `add` is 1.

    address: see `quantized_address`
    left:    see the beginning of this file
    place:   the address of the tile
    count:   rows, 1 to MAX_ROWS
    """
    call_loop(
        address,
        (left.address, left.stride, place, groups, ahead.start, ahead.stride, out.address, out.stride, count, add),
    )
