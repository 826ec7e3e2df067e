"""Left-hand rows as integers, for products with quantized weights.

A row is cut into blocks, each in units of a 127th (int8) or a 32767th (int16) of its largest number. In memory it is
its numbers, padded with zeros to whole groups of the weights; then the float32 scale of each block; then a word for
each block: what the offset of the stored weights adds too much, as an int32, or for weights with zero points minus the
sum of the block as a float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbatch.engine.kernels.cpu.fast_math import bits_of, from_bits, to_float32
from cbatch.engine.kernels.cpu.jit import kernel, shared
from cbatch.engine.kernels.cpu.matmul.formats import INT4_ZEROS, INT8, offset_of
from cbatch.engine.kernels.cpu.matmul.quantized import block_of

_LINE = 64

_ZERO_BELOW = np.float32(1e-34)
"""A block of smaller numbers is quantized to zeros: the inverse of its scale would overflow a float32."""


@shared
def padded_depth(weights: int, depth: int) -> int:
    """Numbers of a row, for weights of that format: INT4 has whole groups."""
    return depth if weights == INT8 else -(-depth // block_of(weights)) * block_of(weights)


@shared
def row_bytes(weights: int, left_bytes: int, depth: int) -> int:
    """Bytes from one row to the next: an odd number of cache lines, so that rows do not compete for the same sets."""
    blocks = -(-depth // block_of(weights))
    lines = -(-(padded_depth(weights, depth) * left_bytes + 8 * blocks) // _LINE)
    return (lines | 1) * _LINE


@kernel
def _quantize_block(row: Any, numbers: Any, largest_integer: int) -> Any:
    """A block in units of what is returned: a part of its largest number."""
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
def _finish_row(memory: Any, numbers: Any, weights: int) -> None:
    """Writes what follows the scales of a row."""
    block, padded = block_of(weights), len(numbers)
    blocks = -(-padded // block)
    offsets = memory[padded * numbers.itemsize + 4 * blocks :]
    integers, floats = offsets[: 4 * blocks].view(np.int32), offsets[: 4 * blocks].view(np.float32)
    for number in range(blocks):
        total = _sum(numbers[number * block : min(padded, (number + 1) * block)])
        if weights == INT4_ZEROS:
            floats[number] = -np.float32(total)
        else:
            integers[number] = -offset_of(weights) * total


@kernel
def _quantize_row_as(row: Any, numbers: Any, memory: Any, weights: int) -> None:
    """A row [depth] into its memory, which begins with the numbers [padded depth]."""
    depth, padded, block = len(row), len(numbers), block_of(weights)
    blocks = -(-padded // block)
    scales = memory[padded * numbers.itemsize : padded * numbers.itemsize + 4 * blocks].view(np.float32)
    for i in range(depth, padded):
        numbers[i] = 0
    for number in range(blocks):
        first, stop = number * block, min(depth, (number + 1) * block)
        largest = 127 if numbers.itemsize == 1 else 32767
        scales[number] = _quantize_block(row[first:stop], numbers[first:stop], largest)
    _finish_row(memory, numbers, weights)


@kernel
def _swap_in_quads(numbers: Any) -> None:
    """Of four numbers each, the second and the third change places."""
    for quad in range(len(numbers) // 4):
        one, two = numbers[4 * quad + 1], numbers[4 * quad + 2]
        numbers[4 * quad + 1], numbers[4 * quad + 2] = two, one


@kernel
def quantize_row(row: Any, memory: Any, weights: int, left_bytes: int) -> None:
    """Writes a row [depth] of float32 or bfloat16 to memory of `row_bytes` bytes, for weights of that format."""
    padded = padded_depth(weights, len(row))
    if left_bytes == 1:
        _quantize_row_as(row, memory[:padded].view(np.int8), memory, weights)
    else:
        numbers = memory[: 2 * padded].view(np.int16)
        _quantize_row_as(row, numbers, memory, weights)
        _swap_in_quads(numbers)
