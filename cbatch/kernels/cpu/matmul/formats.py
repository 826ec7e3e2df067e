"""How the numbers of packed matrices lie in memory: one arena of bytes holds matrices of several formats.

A matrix [columns, depth] is cut into tiles of 32 columns, which follow each other. A tile is two panels of 16 columns
side by side. For each step along the depth, a panel holds one vector: one number of each of its columns in float32,
two consecutive numbers in bfloat16, four in int8, because there are instructions that multiply that many.

| format | a number is | a tile of 32 columns holds, for each |
|---|---|---|
| FLOAT32 | itself | number of the depth: 2 vectors of 16 |
| BFLOAT16 | its 16 bits | pair of numbers: 2 vectors of 16 pairs |
| INT8 | 128 more than the integer, a byte | group of 32 numbers: 8 times 2 vectors of 16 times 4, and 32 scales |
| INT4 | 8 more than the integer, 4 bits | group of 32 numbers: 4 times 2 vectors of 16 times 8, and 32 scales |
| INT4_ZEROS | an integer from 0 to 15, 4 bits | the same, and then 32 zero points |
| MXFP4, IQ4_NL | the place of a level in a table of 16, 4 bits | the same as INT4 |
| NVFP4 | the same | group of 16 numbers: 2 times 2 vectors of 16 times 8, and 32 scales |

A byte of 4-bit numbers has one in its low bits, and in its high ones that of four numbers further on. Scales and zero
points are float16, but scales of MXFP4 are bfloat16. What a number stands for is said in `kernels/formats.py`. The
depth is padded to whole groups; rows are padded with zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from cbatch.kernels.cpu.emit import INT16, Value, emitted
from cbatch.kernels.cpu.fast_math import to_float32
from cbatch.kernels.cpu.jit import kernel, shared, view_as
from cbatch.kernels.cpu.matmul.instructions import float16_to_float32, takes_bytes
from cbatch.kernels.cpu.matmul.microkernel import COLUMNS, pad_columns
from cbatch.kernels.formats import (
    BFLOAT16,
    FLOAT32,
    FORMATS,
    FP8,
    INT4,
    INT4_ZEROS,
    INT8,
    LEVELS,
    MIDDLE,
    MXFP4,
    Integers,
    group_of,
)

CPU_FORMATS = FORMATS[:FP8]
"""Names of those that these kernels have, by their numbers."""

OFFSETS = {INT8: 128, INT4: MIDDLE} | {format: -min(levels) for format, levels in LEVELS.items()}
"""How much larger the integers that are multiplied are than those that are meant."""

MOST_WEIGHT = {INT8: 255, INT4: 15, INT4_ZEROS: 15} | {
    format: max(levels) - min(levels) for format, levels in LEVELS.items()
}
"""The largest integer that is multiplied."""

_NUMBERS = np.zeros((FP8, 256), np.float32)
for _format, _offset in {INT4_ZEROS: 0, **OFFSETS}.items():
    _NUMBERS[_format] = np.resize(LEVELS.get(_format, np.arange(256) - _offset), 256)
"""The values of a byte or of 4 bits, in each format."""

_HALF = np.dtype(np.float16).itemsize

group_size = shared(group_of)


@shared
def is_quantized(format: int) -> bool:
    """Whether numbers are integers, so that left-hand rows are quantized too."""
    return format >= INT8


def left_bytes_of(format: int, wanted: int) -> int:
    """The bytes of a number of a left-hand row: as many as wanted, 1 or 2, or 0 for weights that are not quantized.

    If the processor multiplies bytes no faster than int16, rows of bytes would only lose accuracy.
    """
    if not is_quantized(format):
        return 0
    return wanted if takes_bytes(MOST_WEIGHT[format]) else 2


@shared
def tile_bytes(format: int, depth: int) -> int:
    """Bytes of 32 columns."""
    if format == FLOAT32:
        return 4 * COLUMNS * depth
    if format == BFLOAT16:
        return 2 * COLUMNS * depth
    return -(-depth // group_size(format)) * group_bytes(format)


@shared
def group_bytes(format: int) -> int:
    """Bytes of a group of numbers of 32 columns in a quantized format."""
    return number_bytes(format) + (2 if format == INT4_ZEROS else 1) * COLUMNS * _HALF


@shared
def number_bytes(format: int) -> int:
    """The bytes of a group that hold its integers; scales follow them."""
    return COLUMNS * group_size(format) // (1 if format == INT8 else 2)


def matrix_bytes(format: int, columns: int, depth: int) -> int:
    """Bytes of a packed matrix, a multiple of a cache line."""
    return pad_columns(columns) // COLUMNS * tile_bytes(format, depth)


def pack_weight(weight: NDArray[Any], depth: int | None = None) -> NDArray[np.uint8]:
    """A weight [columns, depth] of float32 or uint16 (bfloat16) as packed bytes.

    depth: padded to so many, a multiple of 16
    """
    depth = weight.shape[1] if depth is None else depth
    columns = pad_columns(len(weight))
    if weight.shape != (columns, depth):
        padded = np.zeros((columns, depth), weight.dtype)
        padded[: len(weight), : weight.shape[1]] = weight
        weight = padded
    return _in_panels(weight).view(np.uint8)


def pack_integers(format: int, integers: Integers, depth: int | None = None) -> NDArray[np.uint8]:
    """Integers [columns, depth] as packed bytes. depth: padded to so many"""
    numbers = integers.numbers.numpy()
    depth = numbers.shape[1] if depth is None else depth
    group = group_of(format)
    groups, columns = -(-depth // group), pad_columns(len(numbers))
    padded = np.zeros((columns, groups * group), np.uint8)
    offset = OFFSETS[INT8] if format == INT8 else 0
    padded[: len(numbers), : numbers.shape[1]] = numbers.astype(np.int16) + offset
    quads = _in_panels(padded)
    if format != INT8:
        quads = quads.reshape(-1, group // 8, 2, COLUMNS * 4)
        quads = quads[..., 0, :] | quads[..., 1, :] << 4
    parts = [quads.reshape(-1, groups, number_bytes(format))]
    for given in integers[1:]:
        if given is None:
            continue
        halves, found = np.zeros((columns, groups), np.uint16), given.numpy()
        bits = found.view(np.uint32) >> 16 if format == MXFP4 else found.astype(np.float16).view(np.uint16)
        halves[: found.shape[0], : found.shape[1]] = bits
        tiles = halves.reshape(-1, COLUMNS, groups).transpose(0, 2, 1)
        parts.append(np.ascontiguousarray(tiles).view(np.uint8))
    return np.concatenate(parts, axis=2).reshape(-1)


@kernel
def unpack_column(data: Any, start: int, kind: int, column: int, factor: float, out: Any) -> None:
    """out [depth] float32 = factor * a column of the matrix that begins at that byte, without its `scale`."""
    depth = len(out)
    lane = column % COLUMNS
    tile = data[start + column // COLUMNS * tile_bytes(kind, depth) :][: tile_bytes(kind, depth)]
    if kind == FLOAT32:
        floats = view_as(tile, np.float32(0))
        for i in range(depth):
            out[i] = factor * floats[i * COLUMNS + lane]
    elif kind == BFLOAT16:
        pairs = view_as(tile, np.uint16(0))
        for i in range(depth):
            out[i] = factor * to_float32(pairs[i // 2 * 2 * COLUMNS + lane * 2 + i % 2])
    else:
        _unpack_groups(tile, kind, lane, factor, out)


@kernel
def _unpack_groups(tile: Any, kind: int, lane: int, factor: float, out: Any) -> None:
    numbers, size = number_bytes(kind), group_size(kind)
    for i in range(len(out)):
        group, within = tile[i // size * group_bytes(kind) :], i % size
        if kind == INT8:
            place = group[within // 4 * 4 * COLUMNS + lane * 4 + within % 4]
        else:
            byte = group[within // 8 * 4 * COLUMNS + lane * 4 + within % 4]
            place = np.uint8(byte >> 4 if within % 8 >= 4 else byte & 15)
        number, at = _NUMBERS[kind, place], numbers + 2 * lane
        scale = _to_float(group[at], group[at + 1])
        if kind == MXFP4:
            scale = to_float32(np.uint16(group[at] | np.uint16(group[at + 1]) << 8))
        elif kind == INT4_ZEROS:
            number -= _to_float(group[at + 2 * COLUMNS], group[at + 2 * COLUMNS + 1])
        out[i] = factor * scale * number


@emitted(types.float32, types.uint8, types.uint8)
def _to_float(low: Value, high: Value) -> Value:
    """The float16 of two bytes as float32."""
    return float16_to_float32(low.to("zext", INT16) | high.to("zext", INT16) << 8)


def _in_panels(padded: NDArray[Any]) -> NDArray[Any]:
    """[columns, depth] in the order of panels. A lane has 4 bytes of consecutive numbers, which move as one."""
    lanes = np.ascontiguousarray(padded).view(np.uint32)
    tiles = lanes.reshape(-1, COLUMNS, lanes.shape[1]).transpose(0, 2, 1)
    return np.ascontiguousarray(tiles).view(padded.dtype).reshape(-1)
