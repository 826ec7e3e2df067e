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

A byte of INT4 has a number in its low bits, and in its high ones that of four numbers further on. Scales and zero
points are float16. A number of INT8 stands for scale * (byte - 128), one of INT4 for scale * (integer - 8), one of
INT4_ZEROS for scale * (integer - zero point), which need not be an integer. That covers Q8_0, Q4_0 and Q4_1 of GGUF,
AWQ and GPTQ; larger groups repeat their scale. The depth is padded to whole groups; rows are padded with zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from cbatch.engine.kernels.cpu.fast_math import to_float32
from cbatch.engine.kernels.cpu.jit import kernel, shared
from cbatch.engine.kernels.cpu.matmul.microkernel import COLUMNS, pad_columns

FORMATS = ("float32", "bfloat16", "int8", "int4", "int4_zeros")
FLOAT32, BFLOAT16, INT8, INT4, INT4_ZEROS = range(len(FORMATS))

GROUP = 32
"""Numbers of a column that share a scale."""

_INT8_OFFSET, _INT4_OFFSET = 128, 8
_HALF = np.dtype(np.float16).itemsize


@shared
def is_quantized(format: int) -> bool:
    """Whether numbers are integers, so that left-hand rows are quantized too."""
    return format >= INT8


@shared
def offset_of(format: int) -> int:
    """How much larger the stored integers are than those that are meant."""
    return _INT8_OFFSET if format == INT8 else _INT4_OFFSET if format == INT4 else 0


@shared
def tile_bytes(format: int, depth: int) -> int:
    """Bytes of 32 columns."""
    if format == FLOAT32:
        return 4 * COLUMNS * depth
    if format == BFLOAT16:
        return 2 * COLUMNS * depth
    return -(-depth // GROUP) * group_bytes(format)


@shared
def group_bytes(format: int) -> int:
    """Bytes of a group of 32 columns in a quantized format."""
    return number_bytes(format) + (2 if format == INT4_ZEROS else 1) * COLUMNS * _HALF


@shared
def number_bytes(format: int) -> int:
    """The bytes of a group that hold its integers; scales follow them."""
    return COLUMNS * GROUP if format == INT8 else COLUMNS * GROUP // 2


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


def pack_integers(
    format: int,
    numbers: NDArray[np.integer[Any]],
    scales: NDArray[np.floating[Any]],
    zeros: NDArray[np.floating[Any]] | None = None,
    depth: int | None = None,
) -> NDArray[np.uint8]:
    """Integers [columns, depth] as packed bytes: -128 to 127 for INT8, else 0 to 15.

    scales: [columns, groups of 32], rounded to float16; so are zero points, which INT4_ZEROS has
    depth:  padded to so many
    """
    depth = numbers.shape[1] if depth is None else depth
    groups, columns = -(-depth // GROUP), pad_columns(len(numbers))
    padded = np.zeros((columns, groups * GROUP), np.uint8)
    offset = _INT8_OFFSET if format == INT8 else 0
    padded[: len(numbers), : numbers.shape[1]] = numbers.astype(np.int16) + offset
    quads = _in_panels(padded)
    if format != INT8:
        quads = quads.reshape(-1, GROUP // 8, 2, COLUMNS * 4)
        quads = quads[..., 0, :] | quads[..., 1, :] << 4
    parts = [quads.reshape(-1, groups, number_bytes(format))]
    for given in (scales,) if zeros is None else (scales, zeros):
        halves = np.zeros((columns, groups), np.float16)
        halves[: given.shape[0], : given.shape[1]] = given
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
        floats = tile.view(np.float32)
        for i in range(depth):
            out[i] = factor * floats[i * COLUMNS + lane]
    elif kind == BFLOAT16:
        pairs = tile.view(np.uint16)
        for i in range(depth):
            out[i] = factor * to_float32(pairs[i // 2 * 2 * COLUMNS + lane * 2 + i % 2])
    else:
        _unpack_groups(tile, kind, lane, factor, out)


@kernel
def _unpack_groups(tile: Any, kind: int, lane: int, factor: float, out: Any) -> None:
    numbers, offset = number_bytes(kind), np.float32(offset_of(kind))
    for i in range(len(out)):
        group, within = tile[i // GROUP * group_bytes(kind) :], i % GROUP
        if kind == INT8:
            number = np.float32(group[within // 4 * 4 * COLUMNS + lane * 4 + within % 4])
        else:
            byte = group[within // 8 * 4 * COLUMNS + lane * 4 + within % 4]
            number = np.float32(byte >> 4 if within % 8 >= 4 else byte & 15)
        scale = _to_float(group[numbers + 2 * lane], group[numbers + 2 * lane + 1])
        at = numbers + 2 * (COLUMNS + lane)
        zero = _to_float(group[at], group[at + 1]) if kind == INT4_ZEROS else offset
        out[i] = factor * scale * (number - zero)


@intrinsic  # type: ignore[untyped-decorator]
def _to_float(context: Any, low: Any, high: Any) -> Any:
    """The float16 of two bytes as float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        short = ir.IntType(16)
        low, high = (builder.zext(byte, short) for byte in args)
        bits = builder.or_(low, builder.shl(high, short(8)))
        return builder.fpext(builder.bitcast(bits, ir.HalfType()), ir.FloatType())

    return types.float32(types.uint8, types.uint8), generate


def _in_panels(padded: NDArray[Any]) -> NDArray[Any]:
    """[columns, depth] in the order of panels. A lane has 4 bytes of consecutive numbers, which move as one."""
    lanes = np.ascontiguousarray(padded).view(np.uint32)
    tiles = lanes.reshape(-1, COLUMNS, lanes.shape[1]).transpose(0, 2, 1)
    return np.ascontiguousarray(tiles).view(padded.dtype).reshape(-1)
