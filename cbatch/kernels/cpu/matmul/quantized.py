"""The inner loop of products with quantized weights: a few rows times 32 columns, in integers.

Left-hand rows are quantized too (see `quantized_rows.py`), to int8 or int16, in the same groups of 32 numbers as the
weights. A vector of weights holds four bytes for each of 16 columns, which are multiplied with four numbers of a row:
one instruction for int8, two for int16, whose quads lie in the order 0, 2, 1, 3 for that. Where 4 bits are the place of
a level in a table, they become levels in registers. Sums of a group are exact
integers. They begin with what the offset of the stored weights adds too much, and at the group's end they become
float32, times the scales of both groups. The sums of 6 rows and the integers beside them fill the registers.

Each result is summed in the same order, whatever the other rows are: a row has the same result, to the last bit, in
every batch.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cbatch.kernels.cpu.jit import FEATURES, HAS_AVX512, HAS_VNNI, HAS_VNNI_256, Part, address_of, kernel
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
from cbatch.kernels.cpu.matmul.quantized_rows import left_group_bytes
from cbatch.kernels.formats import GROUP, INT4_ZEROS, INT8, LEVELS, MXFP4

ROW_COUNTS = (1, 2, 3, 4, 5, 6) if HAS_AVX512 else (1, 2)
"""Numbers of rows that there is code for: all up to the largest, the sums of which fill the registers."""

_ROWS_IN_REGISTERS = 6
"""Rows whose sums fit into the registers beside their integers."""

MAX_ROWS = max(ROW_COUNTS)

_FLOAT, _HALF, _INT8 = ir.FloatType(), ir.HalfType(), ir.IntType(8)
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

    def constant(self, number: int) -> Any:
        return ir.Constant(_WORDS, [number] * LANES)

    def load(self, start: Any, offset: int, kind: Any) -> Any:
        return self.builder.load(self.address(start, _INT64(offset), kind), align=1)

    def load_broadcast(self, start: Any, offset: Any, kind: Any) -> Any:
        return self.broadcast(self.builder.load(self.address(start, offset, kind), align=1))

    def even_and_odd(self, quads: Any) -> list[Any]:
        """Bytes 0 and 2 of each word, and 1 and 3, as unsigned numbers of 16 bits."""
        mask = self.constant(0x00FF00FF)
        return [self.builder.and_(quads, mask), self.builder.and_(self.builder.lshr(quads, self.constant(8)), mask)]

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
                left = self.load_broadcast(rows[row], there, _INT32)
                for panel in (0, 1):
                    sums[row, panel] = self.multiply_bytes(sums[row, panel], quads[panel], left)
                continue
            for odd in (0, 1):
                left = self.load_broadcast(rows[row], builder.add(there, _INT64(4 * odd)), _INT32)
                for panel in (0, 1):
                    sums[row, panel] = self.multiply_pairs(sums[row, panel], pairs[panel][odd], left)

    def weights(self, there: Any, number: int) -> list[Any]:
        """The vectors of both panels so many vectors further on.

        Of two cache lines that one pass needs, the first is prefetched. The processor brings the other one as well, and
        half as many requests wait for memory at once.
        """
        place, part = self.coming
        emit_prefetch(self.builder, self.builder.add(place, self.builder.mul(part, _INT64(number))), near=SECOND_CACHE)
        return [self.load(there, (2 * number + panel) * _VECTOR_BYTES, _WORDS) for panel in (0, 1)]

    def quads(self, start: Any, number: int) -> list[Any]:
        """Four bytes for each column of both panels, of a group that begins there."""
        if self.format == INT8:
            return self.weights(start, number)
        builder, low = self.builder, self.constant(0x0F0F0F0F)
        if number % 2 == 0:
            self.nibbles = self.weights(start, number // 2)
            found = [builder.and_(words, low) for words in self.nibbles]
        else:
            found = [builder.and_(builder.lshr(words, self.constant(4)), low) for words in self.nibbles]
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
        parts = [
            self.call(instruction, table, self.part(places, first, width)) for first in range(0, _VECTOR_BYTES, width)
        ]
        while len(parts) > 1:
            both = range(2 * parts[0].type.count)
            parts = [
                builder.shuffle_vector(*pair, ir.Constant(ir.VectorType(_INT32, len(both)), list(both)))
                for pair in zip(parts[::2], parts[1::2], strict=True)
            ]
        return builder.bitcast(parts[0], _WORDS)

    def part(self, vector: Any, first: int, count: int) -> Any:
        """So many elements of a vector, from the first on."""
        places = ir.Constant(ir.VectorType(_INT32, count), list(range(first, first + count)))
        return self.builder.shuffle_vector(vector, vector, places)

    def scales(self, start: Any, place: int) -> list[Any]:
        """Numbers of 16 bits of both panels as float32, which lie so far behind the start of a group."""
        builder, found = self.builder, []
        for panel in (0, 1):
            at = place + 2 * LANES * panel
            if self.format == MXFP4:
                halves = builder.zext(self.load(start, at, ir.VectorType(ir.IntType(16), LANES)), _WORDS)
                found.append(builder.bitcast(builder.shl(halves, self.constant(16)), _SUMS))
            else:
                found.append(builder.fpext(self.load(start, at, ir.VectorType(_HALF, LANES)), _SUMS))
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
            place: self.constant(0) if has_zeros else self.load_broadcast(rows[place[0]], offset, _INT32)
            for place in self.places
        }
        for quad in range(GROUP // 4):
            self.multiply_quads(totals, self.quads(start, quad), rows, _INT64(4 * self.left_bytes * quad))
        end = number_bytes(self.format)
        scales = self.scales(start, end)
        zeros = self.scales(start, end + 4 * LANES) if has_zeros else []
        for row in range(self.num_rows):
            factor = self.load_broadcast(rows[row], scale, _FLOAT)
            # With zero points, what the row has in place of an offset is minus the sum of its numbers.
            negative = self.load_broadcast(rows[row], offset, _FLOAT) if has_zeros else None
            for panel in (0, 1):
                total = builder.sitofp(totals[row, panel], _SUMS)
                if has_zeros:
                    total = self.fma(zeros[panel], negative, total)
                both_scales = builder.fmul(factor, scales[panel])
                builder.store(self.fma(total, both_scales, builder.load(sums[row, panel])), sums[row, panel])


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _emit_loop(
    context: Any, weights: Any, left_bytes: Any, left: Any, place: Any, groups: Any, ahead: Any, out: Any, count: Any,
    add: Any,
) -> Any:  # fmt: skip
    """The loop for each number of rows, and the choice among them. The first two are constants."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        *_, left, place, groups, ahead, out, count, add = args
        left, ahead, out = (cgutils.unpack_tuple(builder, record) for record in (left, ahead, out))
        kind = weights.literal_value, left_bytes.literal_value

        def emit(num_rows: int) -> None:
            _QuantizedEmitter(builder, *kind, num_rows).emit(left, place, groups, ahead, out, add)

        emit_for_rows(builder, count, ROW_COUNTS, emit)
        return context.get_dummy_value()

    if not isinstance(weights, types.IntegerLiteral):
        return None
    return types.void(weights, left_bytes, left, types.int64, groups, ahead, out, types.int64, types.int64), generate


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
    left:    see `quantized_rows.py`
    place:   the address of the tile
    count:   rows, 1 to MAX_ROWS
    """
    call_loop(
        address,
        (left.address, left.stride, place, groups, ahead.start, ahead.stride, out.address, out.stride, count, add),
    )
