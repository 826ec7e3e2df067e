"""Rounding of numbers to integers, in units of a part of the largest of them."""

from __future__ import annotations

from cbatch.kernels.cpu.emit import FLOAT, INT32, LANES, WORDS, Value

MOST_SHORT = 32767
"""The largest integer of numbers that are rounded to 16 bits."""

SMALLEST = 1e-34
"""Numbers are rounded to zeros if all are smaller: the inverse of their unit would overflow a float32."""

IN_QUADS = [4 * (lane // 4) + (0, 2, 1, 3)[lane % 4] for lane in range(LANES)]
"""The order of int16: of four numbers each, the second and the third change places."""


def largest_of(numbers: list[Value]) -> Value:
    """The largest absolute value in vectors of float32: NaN if one is."""
    larger, *others = (number.bits(WORDS) & 0x7FFFFFFF for number in numbers)  # in the order of magnitudes, NaN above
    for other in others:
        larger = other.is_(">", larger).choose(other, larger)
    return larger.call(f"vector.reduce.smax.v{LANES}i32", result=INT32).bits(FLOAT)


def rounded(numbers: list[Value], most: int, largest: Value | None = None) -> tuple[list[Value], Value, Value]:
    """Vectors of float32 as integers of at most that size, their sum, and the unit: NaN if a number is not finite.

    largest: the number that becomes `most`, if it is not the largest of them
    """
    largest = largest_of(numbers) if largest is None else largest
    is_finite, total = largest.is_("<", float("inf")), numbers[0].constant(0, WORDS)
    is_normal, factor = is_finite & largest.is_(">", SMALLEST), (largest.constant(most) / largest).broadcast()
    integers = []
    for number in numbers:
        scaled = is_normal.choose(number * factor, None)
        integers.append(scaled.call(f"rint.v{LANES}f32").to("fptosi", WORDS))
        total = total + integers[-1]
    total = total.call(f"vector.reduce.add.v{LANES}i32", result=INT32)
    return integers, total, is_finite.choose(largest / largest.constant(most), float("nan"))
