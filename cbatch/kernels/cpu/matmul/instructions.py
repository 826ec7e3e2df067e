"""Products of vectors of 16 numbers by the special instructions of the processor, part by part where registers are
narrower, and by plain arithmetic where there are none."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from llvmlite import ir

from cbatch.kernels.cpu.emit import FLOAT, FLOATS, INT32, LANES, SHORTS, WORDS, BFloat16, Value, by_parts
from cbatch.kernels.cpu.instruction_sets import CHOSEN

BFLOATS = ir.VectorType(BFloat16(), 2 * LANES)
SHORT_PAIRS, QUADS = ir.VectorType(ir.IntType(16), 2 * LANES), ir.VectorType(ir.IntType(8), 4 * LANES)
"""Of pairs of int16, and of four bytes, as many as there are lanes."""

_MANY_REGISTERS = 32

MOST_LEFT = 128
"""The largest absolute value of a number of a left-hand row of bytes."""


def _call(name: str, *vectors: Value, result: ir.Type = None) -> Value:
    """An instruction, for each part of vectors. result: the type of a part, if it is not that of the first vector's"""
    return by_parts(CHOSEN.lanes, lambda first, *others: first.call(name, *others, result=result), *vectors)


def add_bfloat16(total: Value, left: Value, right: Value) -> Value:
    """The products of pairs of bfloat16 [words], added to float32."""
    return _call(CHOSEN.bfloat16, total, left.bits(BFLOATS), right.bits(BFLOATS))


def add_pairs(total: Value, left: Value, right: Value) -> Value:
    """The products of pairs of int16 [words], added to int32."""
    if "vpdpwssd" in CHOSEN.pairs:  # which starts with a sum
        return _call(CHOSEN.pairs, total, left, right)
    sums = ir.VectorType(ir.IntType(32), CHOSEN.lanes)
    return total + _call(CHOSEN.pairs, left.bits(SHORT_PAIRS), right.bits(SHORT_PAIRS), result=sums)


def add_quads(total: Value, quads: Value, left: Value) -> Value:
    """The products of four bytes without a sign and four with one [words], added to int32."""
    if CHOSEN.quads.startswith("aarch64"):
        quads, left = quads.bits(QUADS), left.bits(QUADS)
    return _call(CHOSEN.quads, total, quads, left)


def add_squares(total: Value, left: Value, right: Value) -> Value:
    """The products of two rows with columns, added to sums of both by turns: of 4 bfloat16 each, or of 8 bytes.

    left: the numbers of one row, then those of the other; right: words, two of each of 8 columns
    """
    is_real = total.type == FLOATS
    name, kind = (CHOSEN.bfloat16_squares, BFLOATS) if is_real else (CHOSEN.quads_squares, QUADS)
    part = ir.VectorType(kind.element, kind.count * CHOSEN.lanes // LANES)
    return by_parts(CHOSEN.lanes, lambda one, other: one.call(name, other.bits(part), left.bits(part)), total, right)


def add_integers(total: Value, weights: Value, left: Value, left_bytes: int) -> Value:
    """The products of quads, or of pairs of int16, or of single ones where no instruction multiplies pairs."""
    if left_bytes == 2 and not CHOSEN.pairs:
        return total + weights.to("sext", WORDS) * left.to("sext", WORDS)
    return (add_pairs if left_bytes == 2 else add_quads if CHOSEN.quads else add_shorts)(total, weights, left)


def read_again(address: Value) -> Value:
    """An address for a second look. Where registers are short, it is read again rather than kept."""
    return address.hidden() if CHOSEN.registers < _MANY_REGISTERS else address


def split_quads(read: Callable[[], list[Value]]) -> Iterator[list[Value]]:
    """Bytes 0 and 2 of each word and then 1 and 3, as int16, one by one unless pairs are multiplied.

    read: returns the words; called for each part (see `read_again`)
    """
    if CHOSEN.pairs:
        for shift in (0, 8):
            yield [(words >> shift if shift else words) & 0x00FF00FF for words in read()]
        return
    for shift in (0, 16, 8, 24):
        halves = [(words >> (shift & 16)).to("trunc", SHORTS) for words in read()]
        yield [half >> 8 if shift & 8 else half & 0xFF for half in halves]


def needs_sign(weight: int) -> bool:
    """Whether `add_quads` takes weights as large as that only with a sign, and not with an offset."""
    return ".sdot." in CHOSEN.quads and weight >= MOST_LEFT


def add_shorts(total: Value, quads: Value, left: Value) -> Value:
    """The products of pairs of bytes without a sign and with one [words], added to int16, which must hold them."""
    sums = ir.VectorType(ir.IntType(16), 2 * CHOSEN.lanes)
    products = _call(CHOSEN.shorts, quads.bits(QUADS), left.bits(QUADS), result=sums)
    return (total.bits(SHORT_PAIRS) + products).bits(WORDS)


def float16_to_float32(bits: Value) -> Value:
    """Float32 of the bits of float16, a number or a vector of 16; finite ones."""
    is_vector = isinstance(bits.type, ir.VectorType)
    words, floats = (WORDS, FLOATS) if is_vector else (INT32, FLOAT)
    if CHOSEN.has_float16:
        half = ir.HalfType()
        return bits.bits(ir.VectorType(half, LANES) if is_vector else half).to("fpext", floats)
    wide = bits.to("zext", words)
    magnitude = ((wide & 0x7FFF) << 13).bits(floats) * 2.0**112  # the exponents' biases differ by 112
    return (magnitude.bits(words) | (wide & 0x8000) << 16).bits(floats)


def look_up(places: Value, table: list[int]) -> Value:
    """Bytes of a table of 16 at places of 0 to 15."""
    if not CHOSEN.table:
        found = places.constant(table[0])
        for place, level in enumerate(table[1:], 1):
            found = places.is_("==", place).choose(places.constant(level), found)
        return found
    width = 4 * CHOSEN.lanes
    constant = places.constant(table * (width // len(table)), ir.VectorType(ir.IntType(8), width))
    return by_parts(CHOSEN.lanes, lambda part: constant.call(CHOSEN.table, part), places)


def most_products(weight: int) -> int:
    """How many pairs of products of so large a weight int16 can hold the sum of."""
    return 32767 // (2 * MOST_LEFT * weight)


def takes_bytes(weight: int) -> bool:
    """Whether left-hand rows of bytes are multiplied faster than those of int16 with weights up to that integer."""
    return bool(CHOSEN.quads or (CHOSEN.shorts and most_products(weight)))
