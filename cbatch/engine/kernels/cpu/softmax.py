"""The softmax weights of a tile of scores, computed in vector registers."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from cbatch.engine.kernels.cpu.jit import HAS_BFLOAT16
from cbatch.engine.kernels.cpu.matmul.microkernel import LANES, BFloat16, VectorEmitter

TILE_TOKENS = 64
"""Tokens whose scores go through the online softmax at once."""

_SLACK = 8.0
"""How far a score may exceed the reference of the weights before all sums are rescaled to a new reference."""

_FLOAT, _INT16, _INT32, _INT64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_FLOATS, _WORDS, _HALVES = (ir.VectorType(kind, LANES) for kind in (_FLOAT, _INT32, _INT16))
_TERMS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
"""Coefficients of Cephes' expf."""


def _floats(value: float) -> Any:
    return ir.Constant(_FLOATS, [float(np.float32(value))] * LANES)


def _words(value: int) -> Any:
    return ir.Constant(_WORDS, [value] * LANES)


class FloatEmitter(VectorEmitter):
    """Loads and stores vectors of 16 float32, or bfloat16."""

    def load(self, address: Any, index: int, element: Any) -> Any:
        """Float32, also of bfloat16."""
        builder = self.builder
        if element != types.uint16:
            return builder.load(self.place(address, index * LANES * 4, _FLOATS), align=4)
        halves = builder.load(self.place(address, index * LANES * 2, _HALVES), align=2)
        return builder.bitcast(builder.shl(builder.zext(halves, _WORDS), _words(16)), _FLOATS)

    def place(self, address: Any, offset: int, kind: Any) -> Any:
        return self.builder.inttoptr(self.builder.add(address, _INT64(offset)), kind.as_pointer())

    def store(self, vector: Any, address: Any, index: int, element: Any) -> None:
        """Stores as float32, or rounded to the nearest bfloat16."""
        builder = self.builder
        if element == types.uint16 and HAS_BFLOAT16:
            vector = builder.bitcast(
                builder.fptrunc(vector, ir.VectorType(BFloat16(), LANES)), ir.VectorType(_INT16, LANES)
            )
        elif element == types.uint16:
            bits = builder.bitcast(vector, _WORDS)
            odd = builder.and_(builder.lshr(bits, _words(16)), _words(1))
            rounded = builder.lshr(builder.add(builder.add(bits, _words(0x7FFF)), odd), _words(16))
            rounded = builder.select(builder.fcmp_unordered("uno", vector, vector), _words(0x7FC0), rounded)
            vector = builder.trunc(rounded, ir.VectorType(_INT16, LANES))
        size = 2 if element == types.uint16 else 4
        builder.store(vector, self.place(address, index * LANES * size, vector.type), align=size)


class _SoftmaxEmitter(FloatEmitter):
    """Emits code for vectors of 16 float32."""

    def larger(self, one: Any, other: Any) -> Any:
        """The lanewise maximum; the second where the first is NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", one, other), one, other)

    def reduce(self, vector: Any, combine: Any) -> Any:
        """Combines all lanes, always in the same order."""
        width = LANES // 2
        while width:
            places = [(lane + width) % LANES for lane in range(LANES)]
            moved = self.builder.shuffle_vector(vector, vector, ir.Constant(_WORDS, places))
            vector = combine(vector, moved)
            width //= 2
        return self.builder.extract_element(vector, _INT32(0))

    def exp(self, x: Any) -> Any:
        """As `fast_math.exp`."""
        builder = self.builder
        is_tiny = builder.fcmp_ordered("<", x, _floats(-87.0))
        x = builder.select(is_tiny, _floats(-87.0), x)
        n = self.call(f"floor.v{LANES}f32", self.fma(x, _floats(1.4426950408889634), _floats(0.5)))
        r = self.fma(n, _floats(-0.693359375), x)
        r = self.fma(n, _floats(2.12194440e-4), r)
        p = _floats(_TERMS[0])
        for term in _TERMS[1:]:
            p = self.fma(p, r, _floats(term))
        p = builder.fadd(self.fma(builder.fmul(p, r), r, r), _floats(1.0))
        power = builder.shl(builder.add(builder.fptosi(n, _WORDS), _words(127)), _words(23))
        return builder.select(is_tiny, _floats(0.0), builder.fmul(p, builder.bitcast(power, _FLOATS)))


@intrinsic  # type: ignore[untyped-decorator]
def softmax_weights(
    context: Any, like: Any, scores: Any, weights: Any, scale: Any, first: Any, stop: Any, before: Any
) -> Any:
    """Of 64 scores times `scale`, of which those from `first` up to `stop` count: e^(score - reference).

    like:    an element of the weights: float32, or uint16 for bfloat16
    scores, weights: addresses; the weights are written
    before:  the reference of the weights of earlier tiles

    Returns the reference of these weights (minus infinity if no score has counted yet) and their sum. The reference is
    `before` as long as the largest score is not far above it. The sum is NaN if one of the scores is.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, scores, weights, scale, first, stop, before = args
        vectors = _SoftmaxEmitter(builder)
        low, high = (vectors.broadcast(builder.trunc(bound, _INT32)) for bound in (first, stop))
        lowest = _floats(float("-inf"))
        rows, most = [], lowest
        for part in range(TILE_TOKENS // LANES):
            pointer = builder.inttoptr(builder.add(scores, _INT64(part * LANES * 4)), _FLOATS.as_pointer())
            row = builder.fmul(builder.load(pointer, align=4), vectors.broadcast(scale))
            places = ir.Constant(_WORDS, [part * LANES + lane for lane in range(LANES)])
            counts = builder.and_(builder.icmp_signed(">=", places, low), builder.icmp_signed("<", places, high))
            rows.append(builder.select(counts, row, lowest))
            most = vectors.larger(rows[-1], most)
        largest = vectors.reduce(most, vectors.larger)
        far = builder.fcmp_ordered(">", largest, builder.fadd(before, _FLOAT(_SLACK)))
        largest = builder.select(far, largest, before)
        is_lowest = builder.fcmp_ordered("==", largest, _FLOAT(float("-inf")))
        base = builder.select(is_lowest, _FLOAT(0.0), largest)  # no score counts, or none that is a number
        total = _floats(0.0)
        for part, row in enumerate(rows):
            weight = vectors.exp(builder.fsub(row, vectors.broadcast(base)))
            total = builder.fadd(total, weight)
            vectors.store(weight, weights, part, like)
        return context.make_tuple(builder, signature.return_type, [largest, vectors.reduce(total, builder.fadd)])

    arguments = (like, types.int64, types.int64, types.float32, types.int64, types.int64, types.float32)
    return types.UniTuple(types.float32, 2)(*arguments), generate
