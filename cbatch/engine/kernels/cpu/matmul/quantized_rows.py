"""Left-hand rows as integers, for products with quantized weights.

A row is cut into groups of 32 numbers, each in units of a 127th (int8) or a 32767th (int16) of its largest number. In
memory it is its numbers, padded with zeros to whole groups; then the float32 scale of each group; then a word for each
group: what the offset of the stored weights adds too much, as an int32, or for weights with zero points minus the sum
of the group as a float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbatch.engine.kernels.cpu.fast_math import bits_of, from_bits, to_float32
from cbatch.engine.kernels.cpu.jit import kernel, shared
from cbatch.engine.kernels.cpu.matmul.formats import GROUP, INT4_ZEROS, offset_of

_LINE = 64

_ZERO_BELOW = np.float32(1e-34)
"""A group of smaller numbers is quantized to zeros: the inverse of its scale would overflow a float32."""


@shared
def row_bytes(left_bytes: int, depth: int) -> int:
    """Bytes from one row to the next: an odd number of cache lines, so that rows do not compete for the same sets."""
    lines = -(-(-(-depth // GROUP) * (GROUP * left_bytes + 8)) // _LINE)
    return (lines | 1) * _LINE


@kernel
def _quantize_group(row: Any, numbers: Any, largest_integer: int) -> Any:
    """A group in units of what is returned: a part of its largest number."""
    bits = np.uint32(0)
    for i in range(len(row)):
        bits = max(bits, bits_of(to_float32(row[i])) & np.uint32(0x7FFFFFFF))
    largest, most = from_bits(bits), np.float32(largest_integer)
    factor = most / largest if _ZERO_BELOW < largest < np.float32(np.inf) else np.float32(0)
    if factor > 0:
        for i in range(len(row)):
            numbers[i] = np.int32(np.rint(to_float32(row[i]) * factor))
    else:
        for i in range(len(row)):
            numbers[i] = 0
    return largest / most if largest < np.float32(np.inf) else np.float32(np.nan)


@kernel
def _sum(numbers: Any) -> Any:
    total = np.int32(0)
    for i in range(len(numbers)):
        total += np.int32(numbers[i])
    return total


@kernel
def _quantize_row_as(row: Any, numbers: Any, memory: Any, weights: int) -> None:
    """A row [depth] into its memory, which begins with the numbers [padded depth]."""
    depth, groups = len(row), len(numbers) // GROUP
    start = numbers.size * numbers.itemsize
    scales = memory[start : start + 4 * groups].view(np.float32)
    rest = memory[start + 4 * groups : start + 8 * groups]
    integers, floats = rest.view(np.int32), rest.view(np.float32)
    for i in range(depth, len(numbers)):
        numbers[i] = 0
    for group in range(groups):
        first, stop = group * GROUP, min(depth, (group + 1) * GROUP)
        part = numbers[first : first + GROUP]
        scales[group] = _quantize_group(row[first:stop], part, 127 if numbers.itemsize == 1 else 32767)
        total = _sum(part)
        if weights == INT4_ZEROS:
            floats[group] = -np.float32(total)
        else:
            integers[group] = -offset_of(weights) * total


@kernel
def _swap_in_quads(numbers: Any) -> None:
    """Of four numbers each, the second and the third change places."""
    for quad in range(len(numbers) // 4):
        one, two = numbers[4 * quad + 1], numbers[4 * quad + 2]
        numbers[4 * quad + 1], numbers[4 * quad + 2] = two, one


@kernel
def quantize_row(row: Any, memory: Any, weights: int, left_bytes: int) -> None:
    """Writes a row [depth] of float32 or bfloat16 to memory of `row_bytes` bytes, for weights of that format."""
    padded = -(-len(row) // GROUP) * GROUP
    if left_bytes == 1:
        _quantize_row_as(row, memory[:padded].view(np.int8), memory, weights)
    else:
        numbers = memory[: 2 * padded].view(np.int16)
        _quantize_row_as(row, numbers, memory, weights)
        _swap_in_quads(numbers)
