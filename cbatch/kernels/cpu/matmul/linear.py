"""Matrix products with weights that are packed once, when a model is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from cbatch.kernels.cpu.activation import CLIPPED_SILU, SILU, ActivationParams, activate, clipped_silu
from cbatch.kernels.cpu.emit import FLOATS, LINE, PARTS, Value, Variable, emitted, for_range, if_then
from cbatch.kernels.cpu.fast_math import copy_row, from_float32, silu
from cbatch.kernels.cpu.instruction_sets import CHOSEN
from cbatch.kernels.cpu.jit import kernel, shared, view_as
from cbatch.kernels.cpu.matmul import amx, quantized
from cbatch.kernels.cpu.matmul.formats import group_bytes, group_size, is_quantized, left_bytes_of, tile_bytes
from cbatch.kernels.cpu.matmul.microkernel import (
    COLUMNS,
    LANES,
    MAX_ROWS,
    Ahead,
    Rows,
    microkernel_address,
    multiply_tile,
    panels_of_tile,
    prefetch_ahead,
    prefetch_to_write,
)
from cbatch.kernels.cpu.matmul.quantized import (
    multiply_quantized,
    quantize_row,
    quantized_address,
    quantized_row_bytes,
    whole_lines,
)
from cbatch.kernels.cpu.work_queue import Worker, claimed
from cbatch.kernels.formats import BFLOAT16, FLOAT32, FORMATS
from cbatch.runtime.cpu import empty, second_cache_bytes

_ROW_BLOCK_BYTES = second_cache_bytes() * 3 // 8
"""Bytes of left-hand rows that are multiplied with a part of the weights before the next: they stay in the cache."""

_MULTIPLIES_BFLOAT16 = bool(CHOSEN.bfloat16)

FEW_ROWS = 4
"""Rows that every thread prepares for itself, which takes less time than waiting for each other."""

_ROWS_PER_TASK = 8

WRITE, ADD, ACTIVATED, GATED = 0, 1, 2, 3
"""Modes of `matmul`, by its results."""

_TASKS_PER_THREAD = 4
"""Enough that no thread waits long for the others at the end of a product."""


class PackedMatrix(NamedTuple):
    """A weight [columns, depth] among packed ones.

    data:   all matrices of a model, packed one after the other (see `formats.py`)
    start:  the byte at which this one begins
    format: one of FORMATS
    scale:  float32, a factor for each column, which other factors may follow; empty if there is none
    bias:   likewise, what is added to each column
    """

    data: NDArray[np.uint8]
    start: int
    format: int
    scale: NDArray[np.float32]
    bias: NDArray[np.float32]


class LinearWorkspace(NamedTuple):
    """The memory of the threads for products.

    microkernels: [formats] addresses of the loops, 0 for formats that no matrix has
    max_rows:     [formats] the most rows that each takes
    left_bytes:   [formats] bytes of a number of a left-hand row (see `left_bytes_of`)
    sums:         [threads, rows, 32] the results of a tile
    gates:        [threads, rows * 16] the activated half of them
    panels:       [threads, 4] the addresses of its panels, and what is prefetched (see `Panels`)
    few_rows:     [threads, bytes] a few prepared rows of each thread's own
    rows:         [bytes] prepared rows of a step
    """

    microkernels: NDArray[np.int64]
    max_rows: NDArray[np.int64]
    left_bytes: NDArray[np.int64]
    sums: NDArray[np.float32]
    gates: NDArray[np.float32]
    panels: NDArray[np.int64]
    few_rows: NDArray[np.uint8]
    rows: NDArray[np.uint8]


def new_linear_workspace(
    threads: int, formats: Iterable[int], depth: int, *, rows: int = 0, left_bytes: int = 1
) -> LinearWorkspace:
    """Memory for products with matrices of some formats.

    depth:      the largest of the matrices
    rows:       the most left-hand rows of a product
    left_bytes: of a number of a row for quantized weights, 1 or 2, if the processor multiplies such rows fast
    """
    addresses, most, of_numbers = np.zeros((3, len(FORMATS)), np.int64)
    width = 0
    for kind in formats:
        of_numbers[kind] = bytes_of_number = left_bytes_of(kind, left_bytes)
        addresses[kind], most[kind] = _microkernel_of(kind, bytes_of_number)
        width = max(width, prepared_row_bytes(kind, bytes_of_number, depth))
    return LinearWorkspace(
        addresses,
        most,
        of_numbers,
        empty((threads, int(most.max()), COLUMNS), np.float32),
        empty((threads, int(most.max()) * LANES), np.float32),
        empty((threads, 4), np.int64),
        empty((threads, FEW_ROWS * width), np.uint8),
        empty(rows * width, np.uint8),
    )


def _microkernel_of(kind: int, left_bytes: int) -> tuple[int, int]:
    """The address of the loop for a format, and the most rows that it takes."""
    if is_quantized(kind):
        return quantized_address(kind, left_bytes), quantized.MAX_ROWS
    if kind == BFLOAT16 and amx.has_amx():
        return amx.amx_address(), amx.MAX_ROWS
    return microkernel_address(np.dtype(np.float32 if kind == FLOAT32 else np.uint16)), MAX_ROWS


@kernel
def row_block(left: Rows, rows: int) -> int:
    """How many left-hand rows are multiplied with a part of the weights before the next: a multiple of `rows`."""
    fitting: int = _ROW_BLOCK_BYTES // left.stride // rows * rows
    return max(fitting, rows)


@shared
def prepared_row_bytes(format: int, left_bytes: int, depth: int) -> int:
    """Bytes from one left-hand row to the next as the microkernel takes them; 0 if it takes them as they are.

    left_bytes: as in `LinearWorkspace`
    """
    if is_quantized(format):
        return quantized_row_bytes(format, left_bytes, depth)
    return whole_lines(4 * depth) if format == BFLOAT16 and not _MULTIPLIES_BFLOAT16 else 0


@kernel
def _prepare_row(row: Any, memory: Any, weights: int, left_bytes: int) -> None:
    """Writes a row [depth] to memory of `prepared_row_bytes` bytes."""
    if is_quantized(weights):
        quantize_row(row, memory, weights, left_bytes)
    else:
        copy_row(row, view_as(memory, np.float32(0)))


@kernel
def prepare_rows(worker: Worker, phase: int, a: Any, weights: int, workspace: LinearWorkspace) -> tuple[int, Rows]:
    """Rows of `a` as the microkernel takes them for weights of that format, and the next phase."""
    left_bytes = workspace.left_bytes[weights]
    num_rows, width = len(a), prepared_row_bytes(weights, left_bytes, a.shape[1])
    if width == 0:
        return phase, Rows(np.int64(a.ctypes.data), a.shape[1] * a.itemsize)
    if num_rows <= FEW_ROWS:
        own = workspace.few_rows[worker.thread]
        for row in range(num_rows):
            _prepare_row(a[row], own[row * width : (row + 1) * width], weights, left_bytes)
        return phase, Rows(np.int64(own.ctypes.data), width)
    rows, num_tasks = workspace.rows, -(-num_rows // _ROWS_PER_TASK)
    for task in claimed(worker, phase, num_tasks):
        for row in range(task * _ROWS_PER_TASK, min(num_rows, (task + 1) * _ROWS_PER_TASK)):
            _prepare_row(a[row], rows[row * width : (row + 1) * width], weights, left_bytes)
    return phase + 1, Rows(np.int64(rows.ctypes.data), width)


@kernel
def _multiply(
    a: Any, left: Rows, matrix: PackedMatrix, tile: int, ahead: Ahead, out: Rows, count: int, add: int,
    workspace: LinearWorkspace, thread: int,
) -> None:  # fmt: skip
    """out [count, 32] = rows of `left` times a tile of the matrix.

    left: of `a`, see `prepare_rows`
    """
    depth, kind = a.shape[1], matrix.format
    place = matrix.data.ctypes.data + matrix.start + tile * tile_bytes(kind, depth)
    microkernel = workspace.microkernels[kind]
    if is_quantized(kind):
        multiply_quantized(microkernel, left, place, -(-depth // group_size(kind)), ahead, out, count, add)
        return
    steps = depth // (1 if kind == FLOAT32 else 2)
    columns = panels_of_tile(workspace.panels[thread], place, steps, ahead)
    multiply_tile(microkernel, left, columns, out, count, add)


@emitted(types.void, PARTS, PARTS, PARTS, types.int64)
def _emit_scaling(sums: Any, factors: Any, out: Any, count: Value) -> None:
    """Rows of 32 float32 times a factor for each column, plus a bias, plus what is in `out` if that is asked for."""
    (source, source_stride), (scale, bias, add), (target, target_stride) = sums, factors, out

    def read_if(start: Value, panel: int, otherwise: float) -> Value:
        """The value at an address unless that is 0."""
        found = Variable(start.constant(otherwise, FLOATS))
        with if_then(start.is_("!=", 0)):
            found.value = (start + 4 * LANES * panel).read(FLOATS)
        return found.value

    both = [(read_if(scale, panel, 1.0), read_if(bias, panel, 0.0)) for panel in (0, 1)]
    with for_range(count) as row:
        there, here = target + target_stride * row, source + source_stride * row
        before = add.is_("!=", 0).choose(there, 0)
        for panel, (factor, offset) in enumerate(both):
            total = (here + 4 * LANES * panel).read(FLOATS).fma(factor, offset) + read_if(before, panel, 0.0)
            (there + 4 * LANES * panel).write(total)


@kernel
def _scale_and_add_bias(sums: Rows, matrix: PackedMatrix, first: int, out: Rows, count: int, add: int) -> None:
    """out [count, 32] = sums times the factors of the columns from `first`, plus their biases; added to it if `add`."""
    scale = matrix.scale.ctypes.data + 4 * first if len(matrix.scale) else 0
    bias = matrix.bias.ctypes.data + 4 * first if len(matrix.bias) else 0
    _emit_scaling((sums.address, sums.stride), (scale, bias, add), (out.address, out.stride), count)


@kernel
def write_tile(sums: Any, mode: int, activation: ActivationParams, gates: Any, first: int, out: Any) -> None:
    """Writes activated results [rows, 32] to the columns of `out` from `first`; if GATED, to 16 of them.

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
    else:
        activate(sums.reshape(-1), activation)
        for i in range(len(sums)):
            for j in range(COLUMNS):
                out[i, first + j] = from_float32(sums[i, j], out)


@kernel
def _prefetch_results(out: Any, first: int, count: int, column: int, columns: int) -> None:
    """Prefetches the lines of so many rows and columns from the first ones, which are written when all are computed."""
    width = out.shape[1] * out.itemsize
    start = out.ctypes.data + first * width + column * out.itemsize
    for row in range(count):
        for at in range(0, columns * out.itemsize, LINE):
            prefetch_to_write(start + row * width + at)


@kernel
def multiply_tiles(
    a: Any, left: Rows, first_tile: int, stop: int, matrix: PackedMatrix, out: Any, mode: int,
    activation: ActivationParams, workspace: LinearWorkspace, thread: int,
) -> None:  # fmt: skip
    """out [rows, columns] = rows of `left` times some tiles of the matrix; see `matmul`."""
    columns, count, most = LANES if mode == GATED else COLUMNS, len(out), workspace.max_rows[matrix.format]
    sums, gates = workspace.sums[thread], workspace.gates[thread]
    ldo, results = out.shape[1] * 4, Rows(sums.ctypes.data, COLUMNS * 4)
    has_neither = len(matrix.scale) == 0 and len(matrix.bias) == 0
    step_bytes = group_bytes(matrix.format) if is_quantized(matrix.format) else 4 * COLUMNS
    steps = tile_bytes(matrix.format, a.shape[1]) // step_bytes
    for tile in range(first_tile, stop):
        for row in range(0, count, most):
            rows, part = min(most, count - row), Rows(left.address + row * left.stride, left.stride)
            ahead = prefetch_ahead(step_bytes, steps, row // most, -(-count // most))
            _prefetch_results(out, row, rows, tile * columns, columns)
            if mode <= ADD and has_neither:
                target = Rows(out.ctypes.data + row * ldo + tile * COLUMNS * 4, ldo)
                _multiply(a, part, matrix, tile, ahead, target, rows, mode, workspace, thread)
                continue
            _multiply(a, part, matrix, tile, ahead, results, rows, 0, workspace, thread)
            if mode <= ADD:
                target = Rows(out.ctypes.data + row * ldo + tile * COLUMNS * 4, ldo)
                _scale_and_add_bias(results, matrix, tile * COLUMNS, target, rows, mode)
                continue
            if not has_neither:
                _scale_and_add_bias(results, matrix, tile * COLUMNS, results, rows, 0)
            write_tile(sums[:rows], mode, activation, gates, tile * columns, out[row : row + rows])


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

    a:    float32 for a float32 matrix, bfloat16 for one of bfloat16, either for others
    out:  float32, columns padded to whole tiles; after an activation, of the type of `a`, and if GATED padded to half
          tiles
    mode: WRITE; ADD, to what is in `out`; ACTIVATED; or GATED: activation(a times gate) * (a times up), with 16
          columns of both in turn in the matrix
    """
    columns = LANES if mode == GATED else COLUMNS
    num_tiles, threads = out.shape[1] // columns, len(workspace.sums)
    phase, left = prepare_rows(worker, phase, a, matrix.format, workspace)
    rows, tiles = row_block(left, workspace.max_rows[matrix.format]), max(1, num_tiles // (_TASKS_PER_THREAD * threads))
    tasks_per_block = -(-num_tiles // tiles)
    for task in claimed(worker, phase, -(-len(a) // rows) * tasks_per_block):
        first = task // tasks_per_block * rows
        count = min(len(a) - first, rows)
        first_tile = _place_of(task % tasks_per_block, tasks_per_block, threads) * tiles
        part = Rows(left.address + first * left.stride, left.stride)
        multiply_tiles(
            a, part, first_tile, min(num_tiles, first_tile + tiles), matrix, out[first : first + count], mode,
            activation, workspace, worker.thread,
        )  # fmt: skip
    return phase + 1
