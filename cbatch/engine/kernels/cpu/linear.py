"""Matrix products with weights packed once, when a model is loaded."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch.engine.kernels.cpu.board import finish, take
from cbatch.engine.kernels.cpu.jit import kernel
from cbatch.engine.kernels.cpu.numbers import bits_of, from_bits, narrow, silu, widen
from cbatch.engine.kernels.cpu.tile import BLOCK, COLUMNS, LANES, MAX_ROWS, filled_up, tile, tile_code
from cbatch.engine.runtime.aligned import empty

_ROW_BYTES = 384 * 1024
"""Of the left-hand matrix, so much is multiplied with a piece of the weights before the next: it stays in the cache."""

_NOTHING = np.float32(1e-34)
"""A block of no larger numbers counts as zeros, where rows are rounded to int16: its factor could not be a float32."""

_PIECES = 4
"""Pieces for each thread, so that none waits long for the others at the end."""


class Tiles(NamedTuple):
    """What each thread needs for a tile.

    code:   of the loop for the packed matrices
    sums:   [threads, MAX_ROWS, 32] its results
    panels: [threads, blocks, 2] the addresses of its panels
    whole:  [threads, numbers] room for left-hand rows as int16, where the matrices are int8
    """

    code: int
    sums: NDArray[np.float32]
    panels: NDArray[np.int64]
    whole: NDArray[np.int16]


def new_tiles(threads: int, dtype: np.dtype[Any], depth: int) -> Tiles:
    """dtype: of the packed matrices; depth: the largest of them"""
    numbers = max(_ROW_BYTES // 2, MAX_ROWS * depth)
    return Tiles(
        tile_code(dtype),
        empty((threads, MAX_ROWS, COLUMNS), np.float32),
        empty((threads, -(-depth // BLOCK), 2), np.int64),
        empty((threads, numbers * 9 // 8 if dtype == np.int8 else 0), np.int16),  # 16 numbers, and a unit like 2
    )


def pair_of(dtype: np.dtype[Any]) -> int:
    """How many numbers of the depth lie side by side in a panel."""
    return 1 if dtype == np.float32 else 2


def pack(weight: NDArray[Any]) -> NDArray[Any]:
    """A weight [columns, depth] as groups of two panels, one after the other: flat, columns filled up to groups.

    Layout [groups, depth / pair, 2, 16, pair]: the tile reads it from one end to the other.
    """
    columns, depth = weight.shape
    pair = pair_of(weight.dtype)
    padded = np.zeros((filled_up(columns), depth), weight.dtype)
    padded[:columns] = weight
    return padded.reshape(-1, 2, LANES, depth // pair, pair).transpose(0, 3, 1, 2, 4).reshape(-1)


@kernel
def _row_block(rows: int, row_bytes: int) -> int:
    """Rows that are multiplied with one piece of the weights."""
    fitting = _ROW_BYTES // row_bytes // MAX_ROWS * MAX_ROWS
    return min(rows, max(fitting, MAX_ROWS))


@kernel
def _chunk(groups: int, threads: int) -> int:
    """Groups of columns in a piece."""
    return max(1, groups // (_PIECES * threads))


@kernel
def _round_row(row: Any, whole: Any) -> None:
    """A row [depth] as int16: each block in units of a 32767th of its largest number. The units follow, float32."""
    depth = len(row)
    for block in range(-(-depth // BLOCK)):
        first, stop = block * BLOCK, min(depth, (block + 1) * BLOCK)
        bits = np.uint32(0)
        for i in range(first, stop):
            bits = max(bits, bits_of(widen(row[i])) & np.uint32(0x7FFFFFFF))
        largest = from_bits(bits)
        unit, factor = largest / np.float32(32767), np.float32(0)
        if not largest < np.float32(np.inf):
            unit = np.float32(np.nan)
        elif largest > _NOTHING:
            factor = np.float32(32767) / largest
        for i in range(first, stop):
            whole[i] = np.int16(np.rint(widen(row[i]) * factor)) if factor > 0 else np.int16(0)
        bits = bits_of(unit)
        whole[depth + 2 * block] = np.int16(bits & np.uint32(0xFFFF))
        whole[depth + 2 * block + 1] = np.int16(bits >> np.uint32(16))


@kernel
def _left(a: Any, first: int, rows: int, matrix: Any, tiles: Any, thread: int) -> Any:
    """Rows of `a` as a tile for the matrix takes them: their address, and how many bytes lie from one to the next."""
    if matrix.itemsize > 1:
        bytes_ = a.shape[1] * a.itemsize
        return np.int64(a.ctypes.data) + first * bytes_, bytes_
    width = a.shape[1] + 2 * -(-a.shape[1] // BLOCK)
    whole = tiles.whole[thread]
    for row in range(rows):
        _round_row(a[first + row], whole[row * width : (row + 1) * width])
    return np.int64(whole.ctypes.data), width * 2


@kernel
def _multiply(
    left: int, lda: int, rows: int, matrix: Any, start: int, depth: int, group: int, tiles: Any, thread: int, out: int,
    ldo: int, add: int,
) -> None:  # fmt: skip
    """out[:rows, 32], at an address, = rows at another times one group of columns of the matrix at `start`."""
    pair = 1 if matrix.itemsize == 4 else 2
    steps, run = depth // pair, (BLOCK if matrix.itemsize == 1 else depth) // pair
    panels, stride = tiles.panels[thread], COLUMNS * pair * matrix.itemsize
    begin = matrix.ctypes.data + start * matrix.itemsize + group * steps * stride
    for block in range(-(-steps // run)):
        panels[block, 0] = begin + block * run * stride
        panels[block, 1] = panels[block, 0] + stride // 2
    tile(tiles.code, matrix[0], rows, left, lda, panels.ctypes.data, run, stride, steps, out, ldo, add)


@kernel
def _scaled(sums: Any, scale: Any, add: int, out: Any) -> None:
    """out [32] = sums times a factor for each column, or is added to."""
    for j in range(COLUMNS):
        out[j] = sums[j] * scale[j] + (out[j] if add else np.float32(0))


@kernel
def _gated(sums: Any, scale: Any, out: Any) -> None:
    """out [16] = silu(gate) * up, of 16 of each in `sums`, times factors where there are any."""
    if len(scale):
        _scaled(sums, scale, 0, sums)
    for j in range(LANES):
        out[j] = narrow(silu(sums[j]) * sums[LANES + j], out)


@kernel
def multiply(
    board: Any, phase: int, thread: int, a: Any, matrix: Any, start: int, scale: Any, out: Any, add: int, tiles: Any
) -> int:
    """out [T, columns] = a [T, depth] times the matrix at `start`, or is added to where `add` is 1.

    matrix:  all packed matrices of the model; a: as it needs it, out: float32, columns filled up to groups
    scale:   a factor for each column, or nothing
    """
    groups = out.shape[1] // COLUMNS
    block = _row_block(a.shape[0], a.shape[1] * a.itemsize)
    chunk = _chunk(groups, len(tiles.sums))
    chunks = -(-groups // chunk)
    pieces = -(-a.shape[0] // block) * chunks
    sums, ldo, depth = tiles.sums[thread], out.shape[1] * 4, a.shape[1]
    held, left, lda = -1, 0, 0
    piece = take(board, phase, pieces)
    while piece >= 0:
        first = piece // chunks * block
        count = min(a.shape[0] - first, block)
        if first != held:
            held, (left, lda) = first, _left(a, first, count, matrix, tiles, thread)
        for group in range(piece % chunks * chunk, min(groups, (piece % chunks + 1) * chunk)):
            column = group * COLUMNS
            for row in range(0, count, MAX_ROWS):
                rows, at = min(MAX_ROWS, count - row), left + row * lda
                if len(scale) == 0:
                    target = out.ctypes.data + (first + row) * ldo + column * 4
                    _multiply(at, lda, rows, matrix, start, depth, group, tiles, thread, target, ldo, add)
                    continue
                _multiply(at, lda, rows, matrix, start, depth, group, tiles, thread, sums.ctypes.data, COLUMNS * 4, 0)
                for i in range(rows):
                    _scaled(sums[i], scale[column:], add, out[first + row + i, column:])
        finish(board, phase, pieces)
        piece = take(board, phase, pieces)
    return phase + 1


@kernel
def multiply_gated(
    board: Any, phase: int, thread: int, a: Any, matrix: Any, start: int, scale: Any, out: Any, tiles: Any
) -> int:
    """out [T, columns] = silu(a times gate) * (a times up), with both weights interleaved in the matrix at `start`."""
    groups = out.shape[1] // LANES
    block = _row_block(a.shape[0], a.shape[1] * a.itemsize)
    chunk = _chunk(groups, len(tiles.sums))
    chunks = -(-groups // chunk)
    pieces = -(-a.shape[0] // block) * chunks
    sums, depth = tiles.sums[thread], a.shape[1]
    held, left, lda = -1, 0, 0
    piece = take(board, phase, pieces)
    while piece >= 0:
        first = piece // chunks * block
        count = min(a.shape[0] - first, block)
        if first != held:
            held, (left, lda) = first, _left(a, first, count, matrix, tiles, thread)
        for group in range(piece % chunks * chunk, min(groups, (piece % chunks + 1) * chunk)):
            for row in range(0, count, MAX_ROWS):
                rows, at = min(MAX_ROWS, count - row), left + row * lda
                _multiply(at, lda, rows, matrix, start, depth, group, tiles, thread, sums.ctypes.data, COLUMNS * 4, 0)
                for i in range(rows):
                    _gated(sums[i], scale[group * COLUMNS :], out[first + row + i, group * LANES :])
        finish(board, phase, pieces)
        piece = take(board, phase, pieces)
    return phase + 1
