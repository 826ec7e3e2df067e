"""Matrix products with weights packed once, when a model is loaded."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch.engine.cpu.board import finish, take
from cbatch.engine.cpu.jit import kernel
from cbatch.engine.cpu.memory import empty
from cbatch.engine.cpu.numbers import bits_of, narrow, silu
from cbatch.engine.cpu.tile import COLUMNS, LANES, MAX_ROWS, filled_up, tile, tile_code

_ROW_BYTES = 384 * 1024
"""Of the left-hand matrix, so much is multiplied with a piece of the weights before the next: it stays in the cache."""

_PIECES = 4
"""Pieces for each thread, so that none waits long for the others at the end."""


class Tiles(NamedTuple):
    """What each thread needs for a tile.

    code:     of the loop for the packed matrices
    sums, panels: [threads, MAX_ROWS, 32] its results, and [threads, 1, 2] the addresses of its panels
    wide_code, wide: of the loop for bfloat16, and [threads, numbers] room for a group of int8 as bfloat16
    """

    code: int
    sums: NDArray[np.float32]
    panels: NDArray[np.int64]
    wide_code: int
    wide: NDArray[np.uint16]


def new_tiles(threads: int, dtype: np.dtype[Any], depth: int) -> Tiles:
    """dtype: of the packed matrices; depth: the largest of them"""
    wide = np.dtype(np.uint16)
    return Tiles(
        tile_code(dtype),
        empty((threads, MAX_ROWS, COLUMNS), np.float32),
        empty((threads, 1, 2), np.int64),
        tile_code(wide) if dtype == np.int8 else 0,
        empty((threads, depth * COLUMNS if dtype == np.int8 else 0), wide),
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
def _widen_group(a: Any, rows: int, matrix: Any, start: int, group: int, tiles: Any, thread: int) -> bool:
    """Where more than one tile of rows needs them, int8 become bfloat16 once and not in every tile; whether they do."""
    if matrix.itemsize != 1 or rows <= MAX_ROWS:
        return False
    size = a.shape[1] * COLUMNS
    source, target = matrix[start + group * size : start + (group + 1) * size], tiles.wide[thread]
    for i in range(size):  # whole numbers up to 127 have no more digits than a bfloat16
        target[i] = np.uint16(bits_of(np.float32(source[i])) >> np.uint32(16))
    return True


@kernel
def _multiply(
    a: Any, row: int, rows: int, matrix: Any, start: int, group: int, tiles: Any, thread: int, is_wide: bool, out: int,
    ldo: int, add: int,
) -> None:  # fmt: skip
    """out[:rows, 32], at an address, = a[row : row + rows] times one group of columns of the matrix at `start`."""
    pair = 1 if matrix.itemsize == 4 else 2
    depth, lda = a.shape[1] // pair, a.shape[1] * a.itemsize
    left = a.ctypes.data + row * lda
    panels = tiles.panels[thread]
    if is_wide:
        step = COLUMNS * pair * 2
        panels[0, 0] = tiles.wide.ctypes.data + thread * tiles.wide.shape[1] * 2
        panels[0, 1] = panels[0, 0] + step // 2
        code, like = tiles.wide_code, tiles.wide[0, 0]
        tile(code, like, rows, left, lda, panels.ctypes.data, depth, step, depth, out, ldo, add)
    else:
        step = COLUMNS * pair * matrix.itemsize
        panels[0, 0] = matrix.ctypes.data + start * matrix.itemsize + group * depth * step
        panels[0, 1] = panels[0, 0] + step // 2
        tile(tiles.code, matrix[0], rows, left, lda, panels.ctypes.data, depth, step, depth, out, ldo, add)


@kernel
def _rescale(sums: Any, rows: int, scale: Any, left: int) -> None:
    for i in range(rows):
        for j in range(COLUMNS):
            sums[i, j] *= scale[left + j]


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
    sums, ldo = tiles.sums[thread], out.shape[1] * 4
    piece = take(board, phase, pieces)
    while piece >= 0:
        first = piece // chunks * block
        for group in range(piece % chunks * chunk, min(groups, (piece % chunks + 1) * chunk)):
            left, count = group * COLUMNS, min(a.shape[0] - first, block)
            is_wide = _widen_group(a, count, matrix, start, group, tiles, thread)
            for row in range(first, first + count, MAX_ROWS):
                rows = min(MAX_ROWS, first + count - row)
                if len(scale) == 0:
                    target = out.ctypes.data + row * ldo + left * 4
                    _multiply(a, row, rows, matrix, start, group, tiles, thread, is_wide, target, ldo, add)
                    continue
                _multiply(a, row, rows, matrix, start, group, tiles, thread, is_wide, sums.ctypes.data, COLUMNS * 4, 0)
                _rescale(sums, rows, scale, left)
                for i in range(rows):
                    for j in range(COLUMNS):
                        out[row + i, left + j] = sums[i, j] + (out[row + i, left + j] if add else np.float32(0))
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
    sums = tiles.sums[thread]
    piece = take(board, phase, pieces)
    while piece >= 0:
        first = piece // chunks * block
        for group in range(piece % chunks * chunk, min(groups, (piece % chunks + 1) * chunk)):
            count = min(a.shape[0] - first, block)
            is_wide = _widen_group(a, count, matrix, start, group, tiles, thread)
            for row in range(first, first + count, MAX_ROWS):
                rows = min(MAX_ROWS, first + count - row)
                _multiply(a, row, rows, matrix, start, group, tiles, thread, is_wide, sums.ctypes.data, COLUMNS * 4, 0)
                if len(scale) > 0:
                    _rescale(sums, rows, scale, group * COLUMNS)
                for i in range(rows):
                    for j in range(LANES):
                        out[row + i, group * LANES + j] = narrow(silu(sums[i, j]) * sums[i, LANES + j], out)
        finish(board, phase, pieces)
        piece = take(board, phase, pieces)
    return phase + 1
