"""The online softmax of a row of scores over a tile of tokens, computed in vector registers.

Scores are in units of log2(e), so that a weight is a power of 2. They are relative to a reference, which only changes
when a score exceeds it by far (Milakov and Gimelshein, 2018, rescale at every new maximum): most tiles compare once and
rescale nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from cbatch.kernels.cpu.jit import HAS_BFLOAT16, LIKE, PARTS, emitted
from cbatch.kernels.cpu.matmul.microkernel import LANES, BFloat16, VectorEmitter

TILE_TOKENS = 128
"""Tokens whose scores go through the online softmax at once."""

LOG2_E = 1.4426950408889634

_SLACK = 11.5
"""How far a score may exceed the reference of the weights, in powers of 2, before sums are rescaled to a new one."""

_LOWEST = -126.0
"""Scores further below the reference count as this one, whose weight is the smallest normal float32."""

_FLOAT, _INT16, _INT32, _INT64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_FLOATS, _WORDS, _HALVES = (ir.VectorType(kind, LANES) for kind in (_FLOAT, _INT32, _INT16))

_POWERS_OF_2 = {
    types.uint16: (9.570102e-3, 5.591786e-2, 2.4024744e-1, 6.931218e-1, 9.999993e-1),
    types.float32: (1.3276472e-3, 9.675541e-3, 5.550713e-2, 2.402212e-1, 6.9314694e-1, 1.0000001),
}
"""Coefficients of 2^x between -1/2 and 1/2, the highest power first, with the least relative error (Remez): 2.7e-6 for
weights in bfloat16, which are rounded by 2e-3, and 2.1e-7 for those in float32."""


def _floats(value: float) -> Any:
    return ir.Constant(_FLOATS, [float(np.float32(value))] * LANES)


class FloatEmitter(VectorEmitter):
    """Loads and stores vectors of 16 float32, or bfloat16."""

    def load(self, address: Any, index: int, element: Any) -> Any:
        """Float32, also of bfloat16."""
        builder = self.builder
        if element != types.uint16:
            return self.read(address, index * LANES * 4, _FLOATS)
        halves = self.read(address, index * LANES * 2, _HALVES)
        return builder.bitcast(builder.shl(builder.zext(halves, _WORDS), self.words(16)), _FLOATS)

    def store(self, vector: Any, address: Any, index: int, element: Any) -> None:
        """Stores as float32, or rounded to the nearest bfloat16."""
        builder = self.builder
        if element == types.uint16 and HAS_BFLOAT16:
            vector = builder.bitcast(builder.fptrunc(vector, ir.VectorType(BFloat16(), LANES)), _HALVES)
        elif element == types.uint16:
            bits = builder.bitcast(vector, _WORDS)
            odd = builder.and_(builder.lshr(bits, self.words(16)), self.words(1))
            rounded = builder.lshr(builder.add(builder.add(bits, self.words(0x7FFF)), odd), self.words(16))
            rounded = builder.select(builder.fcmp_unordered("uno", vector, vector), self.words(0x7FC0), rounded)
            vector = builder.trunc(rounded, _HALVES)
        self.write(vector, address, index * LANES * (2 if element == types.uint16 else 4))


class _RowEmitter(FloatEmitter):
    """Emits the code for one row of scores."""

    def __init__(self, builder: Any, element: Any) -> None:
        super().__init__(builder)
        self.element = element

    def larger(self, one: Any, other: Any) -> Any:
        """The lanewise maximum; the second where either is NaN."""
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

    def power_of_2(self, x: Any) -> Any:
        """2^x; x must be below 127."""
        builder = self.builder
        x = self.larger(_floats(_LOWEST), x)
        n = self.call(f"rint.v{LANES}f32", x)
        rest = builder.fsub(x, n)
        first, *others = _POWERS_OF_2[self.element]
        p = _floats(first)
        for term in others:
            p = self.fma(p, rest, _floats(term))
        exponent = builder.shl(builder.fptosi(n, _WORDS), self.words(23))
        return builder.bitcast(builder.add(builder.bitcast(p, _WORDS), exponent), _FLOATS)

    def largest(self, vectors: list[Any]) -> Any:
        """Lanewise over all vectors; a NaN is ignored, unless it is in the last of them."""
        most = _floats(float("-inf"))
        for vector in vectors:
            most = self.larger(vector, most)
        return most

    def relative(self, products: list[Any], counts: list[Any], scale: Any, reference: Any) -> list[Any]:
        """Scores relative to a reference; minus infinity where one does not count. counts: empty if all do"""
        below = self.broadcast(self.builder.fneg(reference))
        found = [self.fma(product, scale, below) for product in products]
        if counts:
            lowest = _floats(float("-inf"))
            found = [self.builder.select(*pair, lowest) for pair in zip(counts, found, strict=True)]
        return found


def _emit_row(builder: Any, element: Any, *args: Any, bounds: tuple[Any, Any] | None = None) -> None:
    """The code of `softmax_row`, and of `masked_softmax_row` if there are bounds."""
    scores, weights, state, width, scale, scales = args
    emitter = _RowEmitter(builder, element)
    parts = range(TILE_TOKENS // LANES)
    products = [emitter.load(scores, part, types.float32) for part in parts]
    if scales is not None:
        factors = [emitter.load(scales[0], part, types.float32) for part in parts]
        products = [builder.fmul(*pair) for pair in zip(products, factors, strict=True)]
    counts = []
    if bounds is not None:
        low, high = (emitter.broadcast(builder.trunc(bound, _INT32)) for bound in bounds)
        for part in parts:
            places = ir.Constant(_WORDS, [part * LANES + lane for lane in range(LANES)])
            after, before = builder.icmp_signed(">=", places, low), builder.icmp_signed("<", places, high)
            counts.append(builder.and_(after, before))
    scale = emitter.broadcast(scale)
    last = builder.add(state, builder.mul(width, _INT64(4)))
    place = emitter.address(last, 0, _FLOAT)
    reference = builder.load(place)
    found = emitter.relative(products, counts, scale, reference)
    kept = [cgutils.alloca_once_value(builder, vector) for vector in found]
    far = builder.fcmp_ordered(">", emitter.largest(found), _floats(_SLACK))
    is_far = builder.icmp_signed("!=", builder.bitcast(far, ir.IntType(LANES)), ir.IntType(LANES)(0))
    with builder.if_then(is_far, likely=False):
        scaled = emitter.relative(products, counts, scale, _FLOAT(0))
        largest = emitter.reduce(emitter.largest(scaled), emitter.larger)
        builder.store(largest, place)
        for target, vector in zip(kept, emitter.relative(products, counts, scale, largest), strict=True):
            builder.store(vector, target)
        shrink = emitter.power_of_2(emitter.broadcast(builder.fsub(reference, largest)))
        with cgutils.for_range(builder, builder.udiv(width, _INT64(LANES))) as loop:
            there = builder.add(state, builder.mul(loop.index, _INT64(LANES * 4)))
            emitter.store(builder.fmul(emitter.load(there, 0, types.float32), shrink), there, 0, types.float32)
        emitter.store(builder.fmul(emitter.load(last, 1, types.float32), shrink), last, 1, types.float32)
    total = emitter.load(last, 1, types.float32)
    for part in parts:
        weight = emitter.power_of_2(builder.load(kept[part]))
        if counts:
            weight = builder.select(counts[part], weight, _floats(0.0))
        total = builder.fadd(total, weight)
        if scales is not None:
            weight = builder.fmul(weight, emitter.load(scales[1], part, types.float32))
            weight = builder.select(counts[part], weight, _floats(0.0)) if counts else weight  # no NaN of others
        emitter.store(weight, weights, part, element)
    emitter.store(total, last, 1, types.float32)


@emitted(types.void, LIKE, *[types.int64] * 4, types.float32, PARTS)
def softmax_row(
    builder: Any, like: Any, scores: Any, weights: Any, state: Any, width: Any, scale: Any, scales: Any
) -> None:
    """Turns a row of products into weights 2^(product * scale - reference), and updates its state.

    like:    an element of the weights: float32, or uint16 for bfloat16
    scores:  address of TILE_TOKENS float32
    weights: address of as many weights, which are written
    state:   address of the row's state: a sum of `width` float32, a multiple of 16; then 16 places, of which the first
             is the reference of its weights, minus infinity before the first; then 16 sums of weights
    scale:   positive
    scales:  None, or two addresses of TILE_TOKENS float32: products are multiplied by the first, and weights by the
             second when they are written, which changes no sum

    If a score is NaN, so are its weight and one of the sums of weights.
    """
    _emit_row(builder, like, scores, weights, state, width, scale, scales)


@emitted(types.void, LIKE, *[types.int64] * 4, types.float32, PARTS, types.int64, types.int64)
def masked_softmax_row(
    builder: Any, like: Any, scores: Any, weights: Any, state: Any, width: Any, scale: Any, scales: Any, first: Any,
    stop: Any,
) -> None:  # fmt: skip
    """As `softmax_row`, but only products from `first` up to `stop` count; the weights of others are 0."""
    _emit_row(builder, like, scores, weights, state, width, scale, scales, bounds=(first, stop))
