"""Matrix products with weights that are packed once, when a model is loaded."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch.engine.kernels.cpu.activation import CLIPPED_SILU, SILU, ActivationParams, activate, clipped_silu
from cbatch.engine.kernels.cpu.fast_math import bits_of, from_bits, from_float32, silu, to_float32
from cbatch.engine.kernels.cpu.jit import kernel
from cbatch.engine.kernels.cpu.matmul import amx
from cbatch.engine.kernels.cpu.matmul.microkernel import (
    COLUMNS,
    LANES,
    MAX_ROWS,
    QUANT_BLOCK,
    Panels,
    Rows,
    microkernel_address,
    multiply_tile,
    pad_columns,
)
from cbatch.engine.kernels.cpu.work_queue import Worker, claim, next_task
from cbatch.engine.runtime.cpu import empty

_ROW_BLOCK_BYTES = 384 * 1024
"""Bytes of left-hand rows that are multiplied with a part of the weights before the next: they stay in the cache."""

_ZERO_BELOW = np.float32(1e-34)
"""A block of smaller numbers is quantized to zeros: the inverse of its scale would overflow a float32."""

WRITE, ADD, ACTIVATED, GATED = 0, 1, 2, 3
"""What `matmul` does with its results."""

_TASKS_PER_THREAD = 4
"""Enough that no thread waits long for the others at the end of a product."""


class PackedMatrix(NamedTuple):
    """A weight [columns, depth] among packed ones.

    data:   all matrices of a model, packed (see `pack_weight`) one after the other: float32, uint16 (bfloat16) or int8
    start:  where this one begins
    scale:  float32, a factor for each column, which other factors may follow; empty if there is none
    bias:   likewise, what is added to each column
    """

    data: NDArray[Any]
    start: int
    scale: NDArray[np.float32]
    bias: NDArray[np.float32]


class LinearWorkspace(NamedTuple):
    """What each thread needs for a product.

    microkernel: address of the loop for the packed matrices
    rows:        the most rows that it takes
    sums:        [threads, rows, 32] the results of a tile
    gates:       [threads, rows * 16] the activated half of them
    panels:      [threads, blocks, 2] the addresses of its panels
    quantized:   [threads, numbers] left-hand rows as int16; empty unless the matrices are int8
    """

    microkernel: int
    rows: int
    sums: NDArray[np.float32]
    gates: NDArray[np.float32]
    panels: NDArray[np.int64]
    quantized: NDArray[np.int16]


def new_linear_workspace(threads: int, dtype: np.dtype[Any], depth: int) -> LinearWorkspace:
    """dtype: of the packed matrices; depth: the largest of them"""
    numbers = max(_ROW_BLOCK_BYTES // 2, MAX_ROWS * depth)
    has_unit = dtype == np.uint16 and amx.has_amx()
    rows = amx.MAX_ROWS if has_unit else MAX_ROWS
    return LinearWorkspace(
        amx.amx_address() if has_unit else microkernel_address(dtype),
        rows,
        empty((threads, rows, COLUMNS), np.float32),
        empty((threads, rows * LANES), np.float32),
        empty((threads, -(-depth // QUANT_BLOCK), 2), np.int64),
        # A float32 scale takes the place of 2 int16; blocks have 16 numbers at least.
        empty((threads, numbers * 9 // 8 if dtype == np.int8 else 0), np.int16),
    )


def pack_weight(weight: NDArray[Any], depth: int | None = None) -> NDArray[Any]:
    """A weight [columns, depth] in the order in which the microkernel reads it: flat, columns padded to whole tiles.

    depth: padded to so many
    Layout [tiles, depth / pair, 2, 16, pair]: two panels side by side.
    """
    depth = weight.shape[1] if depth is None else depth
    pair = 1 if weight.dtype == np.float32 else 2
    columns = pad_columns(len(weight))
    if weight.shape != (columns, depth):
        padded = np.zeros((columns, depth), weight.dtype)
        padded[: len(weight), : weight.shape[1]] = weight
        weight = padded
    # A pair is moved as one number, which is several times as fast.
    lanes = np.ascontiguousarray(weight).view(f"u{weight.itemsize * pair}")
    tiles = lanes.reshape(-1, COLUMNS, depth // pair).transpose(0, 2, 1)
    return np.ascontiguousarray(tiles).view(weight.dtype).reshape(-1)


class _Tiling(NamedTuple):
    """How a product is cut into tasks: rows of a block, tiles of a task, tasks of a block, and tasks in all."""

    rows: int
    tiles: int
    tasks_per_block: int
    num_tasks: int


@kernel
def row_block(a: Any, rows: int) -> int:
    """How many left-hand rows are multiplied with a part of the weights before the next: a multiple of `rows`."""
    fitting: int = _ROW_BLOCK_BYTES // (a.shape[1] * a.itemsize) // rows * rows
    return max(fitting, rows)


@kernel
def _cut(a: Any, num_tiles: int, workspace: LinearWorkspace) -> _Tiling:
    rows = min(a.shape[0], row_block(a, workspace.rows))
    tiles = max(1, num_tiles // (_TASKS_PER_THREAD * len(workspace.sums)))
    tasks_per_block = -(-num_tiles // tiles)
    return _Tiling(rows, tiles, tasks_per_block, -(-a.shape[0] // rows) * tasks_per_block)


@kernel
def _quantize_row(row: Any, quantized: Any) -> None:
    """A row [depth] as int16, each block in units of a 32767th of its largest number; their float32 scales follow."""
    depth = len(row)
    for block in range(-(-depth // QUANT_BLOCK)):
        first, stop = block * QUANT_BLOCK, min(depth, (block + 1) * QUANT_BLOCK)
        bits = np.uint32(0)
        for i in range(first, stop):
            bits = max(bits, bits_of(to_float32(row[i])) & np.uint32(0x7FFFFFFF))
        largest = from_bits(bits)
        scale, factor = largest / np.float32(32767), np.float32(0)
        if not largest < np.float32(np.inf):
            scale = np.float32(np.nan)
        elif largest > _ZERO_BELOW:
            factor = np.float32(32767) / largest
        for i in range(first, stop):
            quantized[i] = np.int16(np.rint(to_float32(row[i]) * factor)) if factor > 0 else np.int16(0)
        bits = bits_of(scale)
        quantized[depth + 2 * block] = np.int16(bits & np.uint32(0xFFFF))
        quantized[depth + 2 * block + 1] = np.int16(bits >> np.uint32(16))


@kernel
def prepare_rows(a: Any, first: int, count: int, matrix: PackedMatrix, quantized: Any) -> Rows:
    """Rows of `a` as the microkernel takes them for the matrix."""
    if matrix.data.itemsize > 1:
        stride = a.shape[1] * a.itemsize
        return Rows(np.int64(a.ctypes.data) + first * stride, stride)
    width = a.shape[1] + 2 * -(-a.shape[1] // QUANT_BLOCK)
    for row in range(count):
        _quantize_row(a[first + row], quantized[row * width : (row + 1) * width])
    return Rows(np.int64(quantized.ctypes.data), width * 2)


@kernel
def _list_panels(matrix: PackedMatrix, tile: int, depth: int, table: Any) -> Panels:
    """The panels of a tile, whose addresses are written to the table [blocks, 2]."""
    size = matrix.data.itemsize
    pair = 1 if size == 4 else 2
    steps, run, stride = depth // pair, (QUANT_BLOCK if size == 1 else depth) // pair, COLUMNS * pair * size
    begin = matrix.data.ctypes.data + matrix.start * size + tile * steps * stride
    for block in range(-(-steps // run)):
        table[block, 0] = begin + block * run * stride
        table[block, 1] = table[block, 0] + stride // 2
    return Panels(table.ctypes.data, run, stride, steps)


@kernel
def _scale_and_add_bias(sums: Any, matrix: PackedMatrix, first: int) -> None:
    """sums [rows, 32] times the factors of the columns from `first`, plus their biases."""
    scale, bias = matrix.scale, matrix.bias
    if len(scale):
        for i in range(len(sums)):
            for j in range(COLUMNS):
                sums[i, j] *= scale[first + j]
    if len(bias):
        for i in range(len(sums)):
            for j in range(COLUMNS):
                sums[i, j] += bias[first + j]


@kernel
def _write_tile(sums: Any, mode: int, activation: ActivationParams, gates: Any, first: int, out: Any) -> None:
    """Writes results [rows, 32] to the columns of `out` from `first`; if GATED, to 16 of them.

    gates: [rows * 16] memory
    """
    if mode == GATED and activation.kind == SILU:  # the most frequent one, in a single pass
        for i in range(len(sums)):
            for j in range(LANES):
                out[i, first + j] = from_float32(silu(sums[i, j]) * sums[i, LANES + j], out)
    elif mode == GATED and activation.kind == CLIPPED_SILU:
        for i in range(len(sums)):
            for j in range(LANES):
                out[i, first + j] = from_float32(clipped_silu(sums[i, j], sums[i, LANES + j], activation), out)
    elif mode == GATED:
        for i in range(len(sums)):
            for j in range(LANES):
                gates[i * LANES + j] = sums[i, j]
        activate(gates[: len(sums) * LANES], activation)
        for i in range(len(sums)):
            for j in range(LANES):
                out[i, first + j] = from_float32(gates[i * LANES + j] * sums[i, LANES + j], out)
    elif mode == ACTIVATED:
        activate(sums.reshape(-1), activation)
        for i in range(len(sums)):
            for j in range(COLUMNS):
                out[i, first + j] = from_float32(sums[i, j], out)
    elif mode == ADD:
        for i in range(len(sums)):
            for j in range(COLUMNS):
                out[i, first + j] += sums[i, j]
    else:
        for i in range(len(sums)):
            for j in range(COLUMNS):
                out[i, first + j] = sums[i, j]


@kernel
def multiply_tiles(
    left: Rows, depth: int, first_tile: int, stop: int, matrix: PackedMatrix, out: Any, mode: int,
    activation: ActivationParams, workspace: LinearWorkspace, thread: int,
) -> None:  # fmt: skip
    """out [rows, columns] = rows of `left` times some tiles of the matrix; see `matmul`."""
    columns, count = LANES if mode == GATED else COLUMNS, len(out)
    sums, gates, table = workspace.sums[thread], workspace.gates[thread], workspace.panels[thread]
    ldo, results = out.shape[1] * 4, Rows(sums.ctypes.data, COLUMNS * 4)
    has_neither = len(matrix.scale) == 0 and len(matrix.bias) == 0
    for tile in range(first_tile, stop):
        panels = _list_panels(matrix, tile, depth, table)
        for row in range(0, count, workspace.rows):
            rows, part = min(workspace.rows, count - row), Rows(left.address + row * left.stride, left.stride)
            if mode <= ADD and has_neither:
                target = Rows(out.ctypes.data + row * ldo + tile * COLUMNS * 4, ldo)
                multiply_tile(workspace.microkernel, matrix.data[0], part, panels, target, rows, mode)
                continue
            multiply_tile(workspace.microkernel, matrix.data[0], part, panels, results, rows, 0)
            if not has_neither:
                _scale_and_add_bias(sums[:rows], matrix, tile * COLUMNS)
            _write_tile(sums[:rows], mode, activation, gates, tile * columns, out[row : row + rows])


@kernel
def _place_of(task: int, num_tasks: int, threads: int) -> int:
    """Which part of the columns a task takes: those of threads that claim by turns lie side by side in memory."""
    each = num_tasks // threads
    return task % threads * each + task // threads if task < threads * each else task


@kernel
def matmul(
    worker: Worker, phase: int, a: Any, matrix: PackedMatrix, out: Any, mode: int, activation: ActivationParams,
    workspace: LinearWorkspace,
) -> int:  # fmt: skip
    """out [T, columns] = a [T, depth] times the matrix. Returns the next phase.

    a:    float32 for a float32 matrix, else bfloat16
    out:  float32, columns padded to whole tiles; after an activation, of the type of `a`, and if GATED padded to half
          tiles
    mode: WRITE; ADD, to what is in `out`; ACTIVATED; or GATED: activation(a times gate) * (a times up), with 16
          columns of both in turn in the matrix
    """
    columns = LANES if mode == GATED else COLUMNS
    num_tiles = out.shape[1] // columns
    tiling = _cut(a, num_tiles, workspace)
    num_tasks = tiling.num_tasks
    prepared, left = -1, Rows(0, 0)
    task = claim(worker, phase, num_tasks)
    while task >= 0:
        first = task // tiling.tasks_per_block * tiling.rows
        count = min(a.shape[0] - first, tiling.rows)
        if first != prepared:
            prepared, left = first, prepare_rows(a, first, count, matrix, workspace.quantized[worker.thread])
        place = _place_of(task % tiling.tasks_per_block, tiling.tasks_per_block, len(workspace.sums))
        first_tile = place * tiling.tiles
        multiply_tiles(
            left, a.shape[1], first_tile, min(num_tiles, first_tile + tiling.tiles), matrix,
            out[first : first + count], mode, activation, workspace, worker.thread,
        )  # fmt: skip
        task = next_task(worker, phase, num_tasks)
    return phase + 1
