"""Matrix products with weights packed once, when a model is loaded."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch.engine.kernels.cpu.fast_math import bits_of, from_bits, from_float32, silu, to_float32
from cbatch.engine.kernels.cpu.jit import kernel
from cbatch.engine.kernels.cpu.microkernel import (
    COLUMNS,
    LANES,
    MAX_ROWS,
    QUANT_BLOCK,
    microkernel_address,
    multiply_tile,
    pad_columns,
)
from cbatch.engine.kernels.cpu.work_queue import claim, complete
from cbatch.engine.runtime.aligned import empty

_ROW_BLOCK_BYTES = 384 * 1024
"""Of the left-hand matrix, so much is multiplied with a piece of the weights before the next: it stays in the cache."""

_ZERO_BELOW = np.float32(1e-34)
"""A block of no larger numbers counts as zeros, where rows are rounded to int16: its factor could not be a float32."""

_TASKS_PER_THREAD = 4
"""Pieces for each thread, so that none waits long for the others at the end."""


class LinearWorkspace(NamedTuple):
    """What each thread needs for a tile.

    code:   of the loop for the packed matrices
    sums:   [threads, MAX_ROWS, 32] its results
    panels: [threads, blocks, 2] the addresses of its panels
    whole:  [threads, numbers] room for left-hand rows as int16, where the matrices are int8
    """

    code: int
    sums: NDArray[np.float32]
    panels: NDArray[np.int64]
    quantized: NDArray[np.int16]


def new_linear_workspace(threads: int, dtype: np.dtype[Any], depth: int) -> LinearWorkspace:
    """dtype: of the packed matrices; depth: the largest of them"""
    numbers = max(_ROW_BLOCK_BYTES // 2, MAX_ROWS * depth)
    return LinearWorkspace(
        microkernel_address(dtype),
        empty((threads, MAX_ROWS, COLUMNS), np.float32),
        empty((threads, -(-depth // QUANT_BLOCK), 2), np.int64),
        empty((threads, numbers * 9 // 8 if dtype == np.int8 else 0), np.int16),  # 16 numbers, and a unit like 2
    )


def pair_size(dtype: np.dtype[Any]) -> int:
    """How many numbers of the depth lie side by side in a panel."""
    return 1 if dtype == np.float32 else 2


def pack_weight(weight: NDArray[Any]) -> NDArray[Any]:
    """A weight [columns, depth] as groups of two panels, one after the other: flat, columns filled up to groups.

    Layout [groups, depth / pair, 2, 16, pair]: the tile reads it from one end to the other.
    """
    columns, depth = weight.shape
    pair = pair_size(weight.dtype)
    padded = np.zeros((pad_columns(columns), depth), weight.dtype)
    padded[:columns] = weight
    return padded.reshape(-1, 2, LANES, depth // pair, pair).transpose(0, 3, 1, 2, 4).reshape(-1)


@kernel
def _rows_per_block(rows: int, row_bytes: int) -> int:
    """Rows that are multiplied with one piece of the weights."""
    fitting = _ROW_BLOCK_BYTES // row_bytes // MAX_ROWS * MAX_ROWS
    return min(rows, max(fitting, MAX_ROWS))


@kernel
def _groups_per_task(groups: int, threads: int) -> int:
    """Groups of columns in a piece."""
    return max(1, groups // (_TASKS_PER_THREAD * threads))


@kernel
def _quantize_row(row: Any, quantized: Any) -> None:
    """A row [depth] as int16: each block in units of a 32767th of its largest number. The units follow, float32."""
    depth = len(row)
    for block in range(-(-depth // QUANT_BLOCK)):
        first, stop = block * QUANT_BLOCK, min(depth, (block + 1) * QUANT_BLOCK)
        bits = np.uint32(0)
        for i in range(first, stop):
            bits = max(bits, bits_of(to_float32(row[i])) & np.uint32(0x7FFFFFFF))
        largest = from_bits(bits)
        unit, factor = largest / np.float32(32767), np.float32(0)
        if not largest < np.float32(np.inf):
            unit = np.float32(np.nan)
        elif largest > _ZERO_BELOW:
            factor = np.float32(32767) / largest
        for i in range(first, stop):
            quantized[i] = np.int16(np.rint(to_float32(row[i]) * factor)) if factor > 0 else np.int16(0)
        bits = bits_of(unit)
        quantized[depth + 2 * block] = np.int16(bits & np.uint32(0xFFFF))
        quantized[depth + 2 * block + 1] = np.int16(bits >> np.uint32(16))


@kernel
def _prepare_rows(a: Any, first: int, rows: int, matrix: Any, workspace: Any, thread: int) -> Any:
    """Rows of `a` as a tile for the matrix takes them: their address, and how many bytes lie from one to the next."""
    if matrix.itemsize > 1:
        bytes_ = a.shape[1] * a.itemsize
        return np.int64(a.ctypes.data) + first * bytes_, bytes_
    width = a.shape[1] + 2 * -(-a.shape[1] // QUANT_BLOCK)
    quantized = workspace.quantized[thread]
    for row in range(rows):
        _quantize_row(a[first + row], quantized[row * width : (row + 1) * width])
    return np.int64(quantized.ctypes.data), width * 2


@kernel
def _multiply_group(
    left: int,
    lda: int,
    rows: int,
    matrix: Any,
    start: int,
    depth: int,
    group: int,
    workspace: Any,
    thread: int,
    out: int,
    ldo: int,
    add: int,
) -> None:
    """out[:rows, 32], at an address, = rows at another times one group of columns of the matrix at `start`."""
    pair = 1 if matrix.itemsize == 4 else 2
    steps, run = depth // pair, (QUANT_BLOCK if matrix.itemsize == 1 else depth) // pair
    panels, stride = workspace.panels[thread], COLUMNS * pair * matrix.itemsize
    begin = matrix.ctypes.data + start * matrix.itemsize + group * steps * stride
    for block in range(-(-steps // run)):
        panels[block, 0] = begin + block * run * stride
        panels[block, 1] = panels[block, 0] + stride // 2
    multiply_tile(workspace.code, matrix[0], rows, left, lda, panels.ctypes.data, run, stride, steps, out, ldo, add)


@kernel
def _scale_row(sums: Any, scale: Any, add: int, out: Any) -> None:
    """out [32] = sums times a factor for each column, or is added to."""
    for j in range(COLUMNS):
        out[j] = sums[j] * scale[j] + (out[j] if add else np.float32(0))


@kernel
def _silu_and_mul(sums: Any, scale: Any, out: Any) -> None:
    """out [16] = silu(gate) * up, of 16 of each in `sums`, times factors where there are any."""
    if len(scale):
        _scale_row(sums, scale, 0, sums)
    for j in range(LANES):
        out[j] = from_float32(silu(sums[j]) * sums[LANES + j], out)


@kernel
def matmul(
    queue: Any, phase: int, thread: int, a: Any, matrix: Any, start: int, scale: Any, out: Any, add: int, workspace: Any
) -> int:
    """out [T, columns] = a [T, depth] times the matrix at `start`, or is added to where `add` is 1.

    matrix:  all packed matrices of the model; a: as it needs it, out: float32, columns filled up to groups
    scale:   a factor for each column, or nothing
    """
    groups = out.shape[1] // COLUMNS
    block = _rows_per_block(a.shape[0], a.shape[1] * a.itemsize)
    per_task = _groups_per_task(groups, len(workspace.sums))
    tasks_per_block = -(-groups // per_task)
    num_tasks = -(-a.shape[0] // block) * tasks_per_block
    sums, ldo, depth = workspace.sums[thread], out.shape[1] * 4, a.shape[1]
    held, left, lda = -1, 0, 0
    task = claim(queue, phase, num_tasks)
    while task >= 0:
        first = task // tasks_per_block * block
        count = min(a.shape[0] - first, block)
        if first != held:
            held, (left, lda) = first, _prepare_rows(a, first, count, matrix, workspace, thread)
        for group in range(task % tasks_per_block * per_task, min(groups, (task % tasks_per_block + 1) * per_task)):
            column = group * COLUMNS
            for row in range(0, count, MAX_ROWS):
                rows, at = min(MAX_ROWS, count - row), left + row * lda
                if len(scale) == 0:
                    target = out.ctypes.data + (first + row) * ldo + column * 4
                    _multiply_group(at, lda, rows, matrix, start, depth, group, workspace, thread, target, ldo, add)
                    continue
                _multiply_group(
                    at, lda, rows, matrix, start, depth, group, workspace, thread, sums.ctypes.data, COLUMNS * 4, 0
                )
                for i in range(rows):
                    _scale_row(sums[i], scale[column:], add, out[first + row + i, column:])
        complete(queue, phase, num_tasks)
        task = claim(queue, phase, num_tasks)
    return phase + 1


@kernel
def gated_matmul(
    queue: Any, phase: int, thread: int, a: Any, matrix: Any, start: int, scale: Any, out: Any, workspace: Any
) -> int:
    """out [T, columns] = silu(a times gate) * (a times up), with both weights interleaved in the matrix at `start`."""
    groups = out.shape[1] // LANES
    block = _rows_per_block(a.shape[0], a.shape[1] * a.itemsize)
    per_task = _groups_per_task(groups, len(workspace.sums))
    tasks_per_block = -(-groups // per_task)
    num_tasks = -(-a.shape[0] // block) * tasks_per_block
    sums, depth = workspace.sums[thread], a.shape[1]
    held, left, lda = -1, 0, 0
    task = claim(queue, phase, num_tasks)
    while task >= 0:
        first = task // tasks_per_block * block
        count = min(a.shape[0] - first, block)
        if first != held:
            held, (left, lda) = first, _prepare_rows(a, first, count, matrix, workspace, thread)
        for group in range(task % tasks_per_block * per_task, min(groups, (task % tasks_per_block + 1) * per_task)):
            for row in range(0, count, MAX_ROWS):
                rows, at = min(MAX_ROWS, count - row), left + row * lda
                _multiply_group(
                    at, lda, rows, matrix, start, depth, group, workspace, thread, sums.ctypes.data, COLUMNS * 4, 0
                )
                for i in range(rows):
                    _silu_and_mul(sums[i], scale[group * COLUMNS :], out[first + row + i, group * LANES :])
        complete(queue, phase, num_tasks)
        task = claim(queue, phase, num_tasks)
    return phase + 1
