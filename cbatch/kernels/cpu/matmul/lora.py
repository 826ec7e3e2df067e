"""Adds to products what LoRA adapters make of their inputs: one phase to the ranks (shrink), and one back (expand).

Tokens that have the same adapter are multiplied together, by the loop that multiplies float32 in all products. A row of
that has the same bits whichever rows are beside it, and so has a token whichever adapters are in its step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch.kernels.cpu.activation import ActivationParams
from cbatch.kernels.cpu.fast_math import copy_row
from cbatch.kernels.cpu.jit import kernel
from cbatch.kernels.cpu.matmul.linear import GATED, LinearWorkspace, write_tile
from cbatch.kernels.cpu.matmul.microkernel import COLUMNS, LANES, Rows, multiply_tile, panels_of_tile, prefetch_ahead
from cbatch.kernels.cpu.work_queue import Worker, claimed

_TILES_PER_TASK = 8


class LoraStep(NamedTuple):
    """The adapters of a model, and the N tokens of a step that have one.

    microkernel: of float32 (see `microkernel_address`)
    weights: float32, tiles of 32 columns, of both matrices of all linears
    shrinks: [linears, adapters, 2] int64: where the tiles of a first matrix begin, and how many it has
    expands: [tiles, adapters, 3] int64: for each tile of a product, where that of the second matrix begins, the first
             rank that is not 0 in it, and how many follow; 0 if the adapter adds nothing there
    tokens:  [N] int64, the tokens, those of an adapter one after the other
    groups:  [groups, 3] int64: an adapter, and some of its `tokens`, from the first to before the last
    inner:   [N, ranks] float32 memory, for the most ranks of a linear
    rows:    [threads, tokens of a group, depth] float32 memory, for the largest depth
    sums:    [threads, tokens of a group, 32] float32 memory
    panels:  [threads, 4] int64 memory (see `Panels`)
    """

    microkernel: int
    weights: NDArray[np.float32]
    shrinks: NDArray[np.int64]
    expands: NDArray[np.int64]
    tokens: NDArray[np.int64]
    groups: NDArray[np.int64]
    inner: NDArray[np.float32]
    rows: NDArray[np.float32]
    sums: NDArray[np.float32]
    panels: NDArray[np.int64]


NO_LORA = LoraStep(
    0, np.empty(0, np.float32), np.empty((0, 0, 2), np.int64), np.empty((0, 0, 3), np.int64), np.empty(0, np.int64),
    np.empty((0, 3), np.int64), np.empty((0, 0), np.float32), np.empty((0, 0, 0), np.float32),
    np.empty((0, 0, 0), np.float32), np.empty((0, 4), np.int64),
)  # fmt: skip
"""For models without adapters."""


@kernel
def _multiply(lora: LoraStep, thread: int, left: Rows, place: int, depth: int, out: Rows, count: int) -> None:
    """out [count, 32] = left [count, depth] times the tile at a place of the weights."""
    tile, ahead = np.int64(lora.weights.ctypes.data) + 4 * place, prefetch_ahead(4 * COLUMNS, depth, 0, 1)
    columns = panels_of_tile(lora.panels[thread], tile, depth, ahead)
    multiply_tile(lora.microkernel, left, columns, out, count, 0)


@kernel
def _shrink(worker: Worker, phase: int, linear: int, depth: int, a: Any, lora: LoraStep) -> int:
    """inner [N, ranks] = the tokens' rows of `a` times the first matrix of their adapters."""
    ranks = lora.inner.shape[1]
    tiles = ranks // COLUMNS
    for task in claimed(worker, phase, len(lora.groups) * tiles):
        group, tile = lora.groups[task // tiles], task % tiles
        place = lora.shrinks[linear, group[0]]
        if tile < place[1]:
            start, count, rows = group[1], group[2] - group[1], lora.rows[worker.thread]
            for i in range(count):
                copy_row(a[lora.tokens[start + i], :depth], rows[i])
            left = Rows(np.int64(rows.ctypes.data), 4 * rows.shape[1])
            out = Rows(np.int64(lora.inner.ctypes.data) + 4 * (start * ranks + tile * COLUMNS), 4 * ranks)
            _multiply(lora, worker.thread, left, place[0] + tile * COLUMNS * depth, depth, out, count)
    return phase + 1


@kernel
def _expand(worker: Worker, phase: int, first_tile: int, lora: LoraStep, out: Any) -> int:
    """out [T, columns] += inner times the second matrix of the tokens' adapters."""
    ranks, num_tiles = lora.inner.shape[1], out.shape[1] // COLUMNS
    chunks = -(-num_tiles // _TILES_PER_TASK)
    for task in claimed(worker, phase, len(lora.groups) * chunks):
        group, first = lora.groups[task // chunks], task % chunks * _TILES_PER_TASK
        start, count, sums = group[1], group[2] - group[1], lora.sums[worker.thread]
        results = Rows(np.int64(sums.ctypes.data), 4 * COLUMNS)
        for tile in range(first, min(num_tiles, first + _TILES_PER_TASK)):
            place = lora.expands[first_tile + tile, group[0]]
            if place[2] == 0:
                continue
            left = Rows(np.int64(lora.inner.ctypes.data) + 4 * (start * ranks + place[1]), 4 * ranks)
            _multiply(lora, worker.thread, left, place[0], place[2], results, count)
            for i in range(count):
                target, row = out[lora.tokens[start + i], tile * COLUMNS : (tile + 1) * COLUMNS], sums[i]
                for j in range(COLUMNS):
                    target[j] += row[j]
    return phase + 1


@kernel
def add_adapters(
    worker: Worker, phase: int, linear: int, first_tile: int, depth: int, a: Any, lora: LoraStep, out: Any
) -> int:
    """out [T, columns] float32, a linear's product with `a` [T, depth], plus what adapters add to it.

    linear, first_tile: where the linear stands in `shrinks`, and its tiles in `expands`

    Returns the next phase.
    """
    if len(lora.groups) == 0:  # a phase must have a task
        return phase
    phase = _shrink(worker, phase, linear, depth, a, lora)
    return _expand(worker, phase, first_tile, lora, out)


@kernel
def activate_product(
    worker: Worker, phase: int, product: Any, mode: int, activation: ActivationParams, workspace: LinearWorkspace,
    out: Any,
) -> int:  # fmt: skip
    """out = what `matmul` gives in a mode with an activation, from the product [T, columns] that it gives by WRITE."""
    columns, most, tokens = LANES if mode == GATED else COLUMNS, workspace.sums.shape[1], len(out)
    num_tiles = out.shape[1] // columns
    chunks = -(-num_tiles // _TILES_PER_TASK)
    for task in claimed(worker, phase, -(-tokens // most) * chunks):
        first, first_tile = task // chunks * most, task % chunks * _TILES_PER_TASK
        count = min(most, tokens - first)
        sums = workspace.sums[worker.thread][:count]
        for tile in range(first_tile, min(num_tiles, first_tile + _TILES_PER_TASK)):
            for i in range(count):
                for j in range(COLUMNS):
                    sums[i, j] = product[first + i, tile * COLUMNS + j]
            gates = workspace.gates[worker.thread]
            write_tile(sums, mode, activation, gates, tile * columns, out[first : first + count])
    return phase + 1
