"""Left-hand rows as integers, for products with quantized weights.

A row is cut into groups of 32 numbers, each in units of a 127th (int8) or a 32767th (int16) of its largest number. In
memory a group is its numbers, the last one's padded with zeros; then their float32 scale; then a word: what the offset
of the stored weights adds too much, as an int32, or for weights with zero points minus the sum of the group as a
float32. So one number says where a loop is in each of its rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cbatch.kernels.cpu.jit import kernel, shared
from cbatch.kernels.cpu.matmul.formats import OFFSETS
from cbatch.kernels.cpu.matmul.microkernel import LANES, VectorEmitter
from cbatch.kernels.formats import GROUP

_LINE = 64

_ZERO_BELOW = float(np.float32(1e-34))
"""A group of smaller numbers is quantized to zeros: the inverse of its scale would overflow a float32."""

_INT32, _INT64 = ir.IntType(32), ir.IntType(64)
_FLOATS, _WORDS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(_INT32, LANES)
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

    def pointer(self, address: Any, offset: int, kind: Any) -> Any:
        return self.builder.inttoptr(self.builder.add(address, _INT64(offset)), kind.as_pointer())

    def load(self, address: Any, half: int) -> Any:
        """The bits of 16 numbers as float32."""
        builder, size = self.builder, self.like.bitwidth // 8
        kind = ir.VectorType(ir.IntType(self.like.bitwidth), LANES)
        numbers = builder.load(self.pointer(address, half * LANES * size, kind), align=size)
        if size == 4:
            return numbers
        return builder.shl(builder.zext(numbers, _WORDS), ir.Constant(_WORDS, [16] * LANES))

    def emit(self, source: Any, target: Any) -> None:
        """Quantizes the group of 32 numbers at an address to another address."""
        builder, most = self.builder, ir.FloatType()(127 if self.left_bytes == 1 else 32767)
        halves = [self.load(source, half) for half in (0, 1)]
        without_sign = ir.Constant(_WORDS, [0x7FFFFFFF] * LANES)
        both = [builder.and_(half, without_sign) for half in halves]
        larger = builder.select(builder.icmp_unsigned(">", *both), *both)
        largest = builder.bitcast(self.reduce("umax", larger), ir.FloatType())
        is_finite = builder.fcmp_ordered("<", largest, ir.FloatType()(float("inf")))
        is_normal = builder.and_(is_finite, builder.fcmp_ordered(">", largest, ir.FloatType()(_ZERO_BELOW)))
        factors = self.broadcast(builder.fdiv(most, largest))
        sums = []
        for half, bits in enumerate(halves):
            scaled = builder.fmul(builder.bitcast(bits, _FLOATS), factors)
            scaled = builder.select(is_normal, scaled, ir.Constant(_FLOATS, None))
            integers = builder.fptosi(self.call(f"rint.v{LANES}f32", scaled), _WORDS)
            sums.append(integers)
            if self.left_bytes == 2:
                integers = builder.shuffle_vector(integers, integers, ir.Constant(_WORDS, _IN_QUADS))
            kind = ir.VectorType(ir.IntType(8 * self.left_bytes), LANES)
            place = self.pointer(target, half * LANES * self.left_bytes, kind)
            builder.store(builder.trunc(integers, kind), place, align=1)
        total = self.reduce("add", builder.add(*sums))
        scale = builder.select(is_finite, builder.fdiv(largest, most), ir.FloatType()(float("nan")))
        builder.store(scale, self.pointer(target, GROUP * self.left_bytes, ir.FloatType()), align=4)
        word = builder.bitcast(builder.fneg(builder.sitofp(total, ir.FloatType())), _INT32)
        for kind, offset in OFFSETS.items():
            is_meant = builder.icmp_signed("==", self.weights, _INT64(kind))
            word = builder.select(is_meant, builder.mul(total, _INT32(-offset)), word)
        builder.store(word, self.pointer(target, GROUP * self.left_bytes + 4, _INT32), align=4)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _quantize(context: Any, like: Any, left_bytes: Any, weights: Any, source: Any, depth: Any, target: Any) -> Any:
    """Quantizes a row from an address to another. like: one of its numbers"""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        *_, weights, source, depth, target = args
        size, step = like.bitwidth // 8, left_group_bytes(left_bytes.literal_value)
        emitter = _RowEmitter(builder, like, left_bytes.literal_value, weights)
        groups, rest = builder.udiv(depth, _INT64(GROUP)), builder.urem(depth, _INT64(GROUP))
        with cgutils.for_range(builder, groups) as loop:
            there = builder.add(source, builder.mul(loop.index, _INT64(GROUP * size)))
            emitter.emit(there, builder.add(target, builder.mul(loop.index, _INT64(step))))
        with builder.if_then(builder.icmp_signed(">", rest, _INT64(0))):
            part = ir.ArrayType(ir.IntType(8 * size), GROUP)
            padded = builder.ptrtoint(cgutils.alloca_once_value(builder, ir.Constant(part, None)), _INT64)
            with cgutils.for_range(builder, rest) as loop:
                number = builder.add(builder.mul(groups, _INT64(GROUP)), loop.index)
                found = builder.add(source, builder.mul(number, _INT64(size)))
                place = builder.add(padded, builder.mul(loop.index, _INT64(size)))
                kind = ir.IntType(8 * size).as_pointer()
                builder.store(builder.load(builder.inttoptr(found, kind)), builder.inttoptr(place, kind))
            emitter.emit(padded, builder.add(target, builder.mul(groups, _INT64(step))))
        return context.get_dummy_value()

    if not isinstance(left_bytes, types.IntegerLiteral):
        return None
    return types.void(like, left_bytes, types.int64, types.int64, types.int64, types.int64), generate


@kernel
def quantize_row(row: Any, memory: Any, weights: int, left_bytes: int) -> None:
    """Writes a row [depth] of float32 or bfloat16, for weights of that format, to `quantized_row_bytes` of memory."""
    if left_bytes == 1:
        _quantize(row[0], 1, weights, row.ctypes.data, len(row), memory.ctypes.data)
    else:
        _quantize(row[0], 2, weights, row.ctypes.data, len(row), memory.ctypes.data)
