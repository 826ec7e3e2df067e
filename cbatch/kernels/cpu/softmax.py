"""The online softmax of a row of scores over a tile of tokens, computed in vector registers.

Scores are in units of log2(e), so that a weight is a power of 2. They are relative to a reference, which only changes
when a score exceeds it by far (Milakov and Gimelshein, 2018, rescale at every new maximum): most tiles compare once and
rescale nothing.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from cbatch.kernels.cpu.emit import (
    FLOAT,
    FLOATS,
    INT32,
    LANES,
    LIKE,
    PARTS,
    SHORTS,
    WORDS,
    BFloat16,
    Value,
    Variable,
    emitted,
    for_range,
    if_then,
    load_floats,
)
from cbatch.kernels.cpu.instruction_sets import CHOSEN
from cbatch.kernels.cpu.rounding import IN_QUADS, MOST_SHORT, rounded
from cbatch.runtime.kv_cache import U8_OFFSET

TILE_TOKENS = 128
"""Tokens whose scores go through the online softmax at once."""

LOG2_E = 1.4426950408889634

_SLACK = 11.5
"""How far a score may exceed the reference of the weights, in powers of 2, before sums are rescaled to a new one."""

_LOWEST = -126.0
"""Scores further below the reference count as this one, whose weight is the smallest normal float32."""

_POWERS_OF_2 = {
    types.uint16: (9.570102e-3, 5.591786e-2, 2.4024744e-1, 6.931218e-1, 9.999993e-1),
    types.float32: (1.3276472e-3, 9.675541e-3, 5.550713e-2, 2.402212e-1, 6.9314694e-1, 1.0000001),
}
"""Coefficients of 2^x between -1/2 and 1/2, the highest power first, with the least relative error (Remez): 2.7e-6 for
weights in bfloat16, which are rounded by 2e-3, and 2.1e-7 for those in float32."""


def store_floats(vector: Value, address: Value, index: int, element: Any) -> None:
    """Stores float32 as such, or rounded to the nearest bfloat16."""
    if element == types.uint16 and CHOSEN.bfloat16:
        vector = vector.to("fptrunc", ir.VectorType(BFloat16(), LANES)).bits(SHORTS)
    elif element == types.uint16:
        bits = vector.bits(WORDS)
        nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        vector = vector.is_("ord", vector).choose(nearest, 0x7FC0).to("trunc", SHORTS)
    (address + index * LANES * (2 if element == types.uint16 else 4)).write(vector)


def _larger(one: Value, other: Value) -> Value:
    """The lanewise maximum; the second where either is NaN."""
    return one.is_(">", other).choose(one, other)


def _largest(vectors: list[Value]) -> Value:
    """Lanewise over all vectors; a NaN is ignored, unless it is in the last of them."""
    most = vectors[0].constant(float("-inf"))
    for vector in vectors:
        most = _larger(vector, most)
    return most


def _power_of_2(x: Value, element: Any) -> Value:
    """2^x; x must be below 127."""
    x = _larger(x.constant(_LOWEST), x)
    n = x.call(f"rint.v{LANES}f32")
    rest, (first, *others) = x - n, _POWERS_OF_2[element]
    p = x.constant(first)
    for term in others:
        p = p.fma(rest, x.constant(term))
    return (p.bits(WORDS) + (n.to("fptosi", WORDS) << 23)).bits(FLOATS)


def _relative(products: list[Value], counts: list[Value], scale: Value, reference: Value) -> list[Value]:
    """Scores relative to a reference; minus infinity where one does not count. counts: empty if all do"""
    below = (-reference).broadcast()
    found = [product.fma(scale, below) for product in products]
    pairs = zip(counts, found, strict=True) if counts else ()
    return [count.choose(score, float("-inf")) for count, score in pairs] or found


@emitted(types.void, LIKE, *[types.int64] * 4, types.float32, PARTS, PARTS)
def softmax_row(
    like: Any, scores: Value, weights: Value, state: Value, width: Value, scale: Value, scales: Any, bounds: Any
) -> None:
    """Turns a row of products into weights 2^(product * scale - reference), and updates its state.

    like:    an element of the weights: float32, or uint16 for bfloat16
    scores:  address of TILE_TOKENS float32
    weights: address of as many weights, which are written
    state:   address of the row's state: a sum of `width` float32, a multiple of 16; then 16 places, of which the first
             is the reference of its weights, minus infinity before the first; then 16 sums of weights
    scale:   positive
    scales:  None, or three addresses: TILE_TOKENS float32 that products are multiplied by; as many that weights are
             multiplied by when they are written, which changes no sum; and a header (see `byte_tile`), for weights are
             written as int16 then
    bounds:  None, or two int64: only products from the first up to the second count; the weights of others are 0

    If a score is NaN, so are its weight and one of the sums of weights.
    """
    parts = range(TILE_TOKENS // LANES)
    products = [load_floats(scores, part, types.float32) for part in parts]
    if scales is not None:
        products = [product * load_floats(scales[0], part, types.float32) for part, product in enumerate(products)]
    counts = []
    if bounds is not None:
        low, high = (bound.to("trunc", INT32).broadcast() for bound in bounds)
        for part in parts:
            places = low.constant([part * LANES + lane for lane in range(LANES)])
            counts.append(places.is_(">=", low) & places.is_("<", high))
    scale, last = scale.broadcast(), state + width * 4
    reference = last.read(FLOAT, align=4)
    found = _relative(products, counts, scale, reference)
    kept = [Variable(vector) for vector in found]
    is_far = _largest(found).is_(">", _SLACK).bits(ir.IntType(LANES)).is_("!=", 0)
    with if_then(is_far, likely=False):
        largest, lanes = _largest(_relative(products, counts, scale, reference.constant(0.0))), LANES
        while lanes > 1:  # always in the same order
            lanes //= 2
            largest = _larger(largest, largest.shuffle([(lane + lanes) % LANES for lane in range(LANES)]))
        most = largest.lane(0)
        last.write(most, align=4)
        for target, vector in zip(kept, _relative(products, counts, scale, most), strict=True):
            target.value = vector
        with if_then(reference.is_("!=", float("-inf"))):  # else there is nothing to rescale yet
            shrink = _power_of_2((reference - most).broadcast(), like)
            with for_range(width // LANES) as index:
                there = state + index * (LANES * 4)
                there.write(there.read(FLOATS) * shrink)
            store_floats(load_floats(last, 1, types.float32) * shrink, last, 1, types.float32)
    total, written = load_floats(last, 1, types.float32), []
    for part in parts:
        weight = _power_of_2(kept[part].value, like)
        if counts:
            weight = counts[part].choose(weight, 0.0)
        total = total + weight
        if scales is not None:
            weight = weight * load_floats(scales[1], part, types.float32)
            weight = counts[part].choose(weight, 0.0) if counts else weight  # no NaN of others
            written.append(weight)
        else:
            store_floats(weight, weights, part, like)
    store_floats(total, last, 1, types.float32)
    if scales is not None:
        found, sum_of_integers, unit = rounded(written, MOST_SHORT)
        for part, integers in enumerate(found):
            (weights + part * LANES * 2).write(integers.shuffle(IN_QUADS).to("trunc", SHORTS))
        scales[2].write(unit)
        (scales[2] + 4).write(sum_of_integers * -U8_OFFSET)
