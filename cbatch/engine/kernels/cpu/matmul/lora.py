"""Adds to products what LoRA adapters make of their inputs: one phase to the ranks (shrink), and one back (expand).

Tokens that have the same adapter are taken together, so that its matrices are read once for several of them. Each sum
is made for one token at a time and in the same order, so a token has the same bits in every batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch.engine.kernels.cpu.activation import ActivationParams
from cbatch.engine.kernels.cpu.fast_math import to_float32
from cbatch.engine.kernels.cpu.jit import kernel
from cbatch.engine.kernels.cpu.matmul.linear import GATED, LinearWorkspace, write_tile
from cbatch.engine.kernels.cpu.matmul.microkernel import COLUMNS, LANES
from cbatch.engine.kernels.cpu.work_queue import Worker, claim, next_task

TOKENS_PER_GROUP = 8
_RANKS_PER_TASK = 8
_COLUMNS_PER_TASK = 256
_TILES_PER_TASK = 8


class LoraStep(NamedTuple):
    """The adapters of a model, and the N tokens of a step that have one.

    weights: float32, all matrices one after the other: [rank, depth] and [rank, columns]
    sites:   [sites, 3] int64, of some columns of a product: the first, how many, and how far apart 16 of them begin
    places:  [sites, adapters, 3] int64: where both matrices begin, and the rank; 0 if the adapter adds nothing
    tokens:  [N] int64, the tokens, those of an adapter one after the other
    groups:  [groups, 3] int64: an adapter, and some of its `tokens`, from the first to before the last
    inner:   [N, ranks] float32 memory, for the most ranks of a product
    """

    weights: NDArray[np.float32]
    sites: NDArray[np.int64]
    places: NDArray[np.int64]
    tokens: NDArray[np.int64]
    groups: NDArray[np.int64]
    inner: NDArray[np.float32]


NO_LORA = LoraStep(
    np.empty(0, np.float32), np.empty((0, 3), np.int64), np.empty((0, 0, 3), np.int64), np.empty(0, np.int64),
    np.empty((0, 3), np.int64), np.empty((0, 0), np.float32),
)  # fmt: skip
"""For models without adapters."""


@kernel
def _dot(row: Any, weights: Any) -> Any:
    """The sum of the products of a row's first numbers with as many float32."""
    total = np.float32(0)
    for i in range(len(weights)):
        total += to_float32(row[i]) * weights[i]
    return total


@kernel
def _shrink(worker: Worker, phase: int, first: int, count: int, depth: int, a: Any, lora: LoraStep) -> int:
    """inner [N, ranks] = the tokens' rows of `a` times the first matrices of the sites, side by side."""
    chunks = -(-lora.inner.shape[1] // _RANKS_PER_TASK)
    num_tasks = len(lora.groups) * chunks
    task = claim(worker, phase, num_tasks)
    while task >= 0:
        group, low = lora.groups[task // chunks], task % chunks * _RANKS_PER_TASK
        offset = 0
        for site in range(first, first + count):
            place, rank = lora.places[site, group[0], 0], lora.places[site, group[0], 2]
            for r in range(max(low - offset, 0), min(low + _RANKS_PER_TASK - offset, rank)):
                down = lora.weights[place + r * depth : place + (r + 1) * depth]
                for i in range(group[1], group[2]):
                    lora.inner[i, offset + r] = _dot(a[lora.tokens[i]], down)
            offset += rank
        task = next_task(worker, phase, num_tasks)
    return phase + 1


@kernel
def _add_row(out: Any, first: int, stride: int, factor: Any, row: Any, low: int, high: int) -> None:
    """Adds factor times the numbers low .. high-1 of a row to where they lie in a row of the product."""
    if stride == LANES:
        for i in range(low, high):
            out[first + i] += factor * row[i]
        return
    for block in range(low, high, LANES):
        start = first + block // LANES * stride
        for i in range(min(LANES, high - block)):
            out[start + i] += factor * row[block + i]


@kernel
def _expand_chunk(lora: LoraStep, group: Any, site: int, chunk: int, out: Any) -> None:
    """Adds some columns of the second matrices, from the site on in which the chunk lies."""
    offset, adapter = 0, group[0]
    chunks = -(-lora.sites[site, 1] // _COLUMNS_PER_TASK)
    while chunk >= chunks:
        chunk -= chunks
        offset += lora.places[site, adapter, 2]
        site += 1
        chunks = -(-lora.sites[site, 1] // _COLUMNS_PER_TASK)
    place, rank = lora.places[site, adapter, 1], lora.places[site, adapter, 2]
    first, columns, stride = lora.sites[site, 0], lora.sites[site, 1], lora.sites[site, 2]
    low = chunk * _COLUMNS_PER_TASK
    high = min(low + _COLUMNS_PER_TASK, columns)
    for i in range(group[1], group[2]):
        target = out[lora.tokens[i]]
        for r in range(rank):
            row = lora.weights[place + r * columns : place + (r + 1) * columns]
            _add_row(target, first, stride, lora.inner[i, offset + r], row, low, high)


@kernel
def _expand(worker: Worker, phase: int, first: int, count: int, lora: LoraStep, out: Any) -> int:
    """out [T, columns] += inner times the second matrices of the sites, for the tokens that have an adapter."""
    chunks = 0
    for site in range(first, first + count):
        chunks += -(-lora.sites[site, 1] // _COLUMNS_PER_TASK)
    num_tasks = len(lora.groups) * chunks
    task = claim(worker, phase, num_tasks)
    while task >= 0:
        _expand_chunk(lora, lora.groups[task // chunks], first, task % chunks, out)
        task = next_task(worker, phase, num_tasks)
    return phase + 1


@kernel
def add_adapters(
    worker: Worker, phase: int, first: int, count: int, depth: int, a: Any, lora: LoraStep, out: Any
) -> int:
    """out [T, columns] float32, a product with `a` [T, depth], plus what adapters add to it. Returns the next phase.

    first, count: the product's sites
    """
    if len(lora.groups) == 0:  # a phase must have a task
        return phase
    phase = _shrink(worker, phase, first, count, depth, a, lora)
    return _expand(worker, phase, first, count, lora, out)


@kernel
def activate_product(
    worker: Worker, phase: int, product: Any, mode: int, activation: ActivationParams, workspace: LinearWorkspace,
    out: Any,
) -> int:  # fmt: skip
    """out = what `matmul` gives in a mode with an activation, from the product [T, columns] that it gives by WRITE."""
    columns, most, tokens = LANES if mode == GATED else COLUMNS, workspace.sums.shape[1], len(out)
    num_tiles = out.shape[1] // columns
    chunks = -(-num_tiles // _TILES_PER_TASK)
    num_tasks = -(-tokens // most) * chunks
    task = claim(worker, phase, num_tasks)
    while task >= 0:
        first, first_tile = task // chunks * most, task % chunks * _TILES_PER_TASK
        count = min(most, tokens - first)
        sums = workspace.sums[worker.thread][:count]
        for tile in range(first_tile, min(num_tiles, first_tile + _TILES_PER_TASK)):
            for i in range(count):
                for j in range(COLUMNS):
                    sums[i, j] = product[first + i, tile * COLUMNS + j]
            gates = workspace.gates[worker.thread]
            write_tile(sums, mode, activation, gates, tile * columns, out[first : first + count])
        task = next_task(worker, phase, num_tasks)
    return phase + 1
