"""Keys and values as bytes: how they are rounded, and how bytes become numbers of the type that goes into products.

A byte is a sign and 7 bits of magnitude. The numbers of a token's head are its bytes times one float32 scale, 1/127 of
the largest. The scale does not take part in products: it multiplies scores, or weights. So bytes become numbers without
rounding, since bfloat16 holds every integer up to 127.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cbatch.kernels.cpu.fast_math import bits_of, from_bits, to_float32
from cbatch.kernels.cpu.jit import FEATURES, kernel
from cbatch.kernels.cpu.matmul.microkernel import LANES, VectorEmitter

SCALE_BYTES = 4

_LINE = 64
_INT8, _INT32, _INT64 = (ir.IntType(bits) for bits in (8, 32, 64))
_WORDS, _BYTES = ir.VectorType(_INT32, LANES), ir.VectorType(_INT8, _LINE)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_HAS_BYTE_TABLES = "avx512vbmi" in FEATURES
"""Whether one instruction looks 64 bytes up in a table of 128."""

_INTEGER = np.float32(2**23)
"""The low bits of a smaller number that is added to this are the nearest integer, ties to even."""

_SMALLEST = np.float32(1e-30)
"""Numbers are 0 if all of a head are smaller: the inverse of their scale would overflow."""


@intrinsic  # type: ignore[untyped-decorator]
def _fma(context: Any, one: Any, other: Any, total: Any) -> Any:
    """one * other + total in float32, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return VectorEmitter(builder).call("fma.f32", *args)

    return types.float32(types.float32, types.float32, types.float32), generate


@kernel
def round_to_bytes(numbers: Any, row: Any) -> Any:
    """Rounds numbers to bytes; returns their scale, which is NaN if one of them is not finite."""
    most = np.uint32(0)
    for i in range(len(numbers)):
        bits = bits_of(to_float32(numbers[i])) & np.uint32(0x7FFFFFFF)  # in the order of magnitudes, NaN above all
        most = bits if bits > most else most
    largest, inverse = from_bits(most), np.float32(0)
    scale = largest * np.float32(1 / 127)
    if most >= np.uint32(0x7F800000):
        scale = np.float32(np.nan)
    elif largest < _SMALLEST:
        scale = np.float32(0)
    else:
        inverse = np.float32(127) / largest
    for i in range(len(numbers)):
        bits = bits_of(to_float32(numbers[i]))
        magnitude = bits_of(_fma(from_bits(bits & np.uint32(0x7FFFFFFF)), inverse, _INTEGER))
        row[i] = np.uint8((magnitude & np.uint32(0x7F)) | ((bits >> np.uint32(24)) & np.uint32(0x80)))
    return scale


class _ByteEmitter(VectorEmitter):
    """Emits the code that turns 16 words of 4 bytes into numbers."""

    def number(self, words: Any, place: int) -> Any:
        """The bytes at a place of the words as float32."""
        builder = self.builder
        magnitude = builder.lshr(words, self.words(8 * place)) if place else words
        sign = builder.shl(words, self.words(24 - 8 * place)) if place < 3 else words
        number = builder.sitofp(builder.and_(magnitude, self.words(0x7F)), _FLOATS)
        return builder.or_(builder.bitcast(number, _WORDS), builder.and_(sign, self.words(0x80000000)))

    def words(self, value: int) -> Any:
        return ir.Constant(_WORDS, [value] * LANES)

    def floats(self, words: Any) -> list[Any]:
        """Four vectors of float32, as words: one for each byte."""
        return [self.number(words, place) for place in range(4)]

    def pairs(self, words: Any) -> list[Any]:
        """Two vectors of pairs of bfloat16, as words: of the first two bytes, and of the others."""
        if _HAS_BYTE_TABLES:
            return self.looked_up(words)
        found = self.floats(words)
        low = [self.builder.lshr(found[place], self.words(16)) for place in (0, 2)]
        return [self.builder.or_(one, other) for one, other in zip(low, (found[1], found[3]), strict=True)]

    def looked_up(self, words: Any) -> list[Any]:
        """The same, both bytes of each bfloat16 from tables."""
        builder = self.builder
        indices = builder.bitcast(words, _BYTES)
        bits = np.arange(128, dtype=np.float32).view(np.uint32) >> 16
        low, high = (self.look_up(indices, (bits >> shift) & 0xFF) for shift in (0, 8))
        high = builder.or_(high, builder.and_(indices, ir.Constant(_BYTES, [0x80] * _LINE)))
        found = []
        for half in (0, 2):
            places = [
                4 * word + half + place + side for word in range(LANES) for place in (0, 1) for side in (0, _LINE)
            ]
            mask = ir.Constant(ir.VectorType(_INT32, _LINE), places)
            found.append(builder.bitcast(builder.shuffle_vector(low, high, mask), _WORDS))
        return found

    def look_up(self, indices: Any, table: Any) -> Any:
        """Numbers [128] at the lower 7 bits of each index."""
        halves = [ir.Constant(_BYTES, [int(number) for number in half]) for half in (table[:_LINE], table[_LINE:])]
        return self.call("x86.avx512.vpermi2var.qi.512", halves[0], indices, halves[1])


@intrinsic  # type: ignore[untyped-decorator]
def bytes_to_numbers(context: Any, like: Any, source: Any, count: Any, target: Any) -> Any:
    """Turns 16 * count words of 4 bytes into numbers, without their scales.

    like:   such a number: float32, or uint16 for bfloat16
    source: address of vectors of 16 words
    target: address of as many groups of vectors of 16 words: of float32 the first bytes of all words, then the second
            ones, and so on; of bfloat16 the first two bytes of all words, then the others
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, source, count, target = args
        emitter = _ByteEmitter(builder)
        size = 4 * _LINE if like == types.float32 else 2 * _LINE
        with cgutils.for_range(builder, count) as loop:
            at = builder.add(source, builder.mul(loop.index, _INT64(_LINE)))
            words = builder.load(builder.inttoptr(at, _WORDS.as_pointer()), align=4)
            vectors = emitter.floats(words) if like == types.float32 else emitter.pairs(words)
            there = builder.add(target, builder.mul(loop.index, _INT64(size)))
            for number, vector in enumerate(vectors):
                place = builder.add(there, _INT64(number * _LINE))
                builder.store(vector, builder.inttoptr(place, _WORDS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(like, types.int64, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def copy_vector(context: Any, source: Any, target: Any) -> Any:
    """Copies 16 words from one address to another."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, target = (builder.inttoptr(address, _WORDS.as_pointer()) for address in args)
        builder.store(builder.load(source, align=4), target, align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def write_float(context: Any, number: Any, target: Any) -> Any:
    """Writes a float32 to an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[0], builder.inttoptr(args[1], ir.FloatType().as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.float32, types.int64), generate
