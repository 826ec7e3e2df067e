"""The scan of Mamba 2."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch.kernels.cpu.fast_math import exp
from cbatch.kernels.cpu.jit import kernel
from cbatch.kernels.cpu.recurrent.blocks import ScanAddresses, ScanFactors, block_width, step_scan
from cbatch.kernels.cpu.recurrent.states import (
    ROWS_AHEAD,
    Recurrence,
    copy_numbers,
    prefetch_row,
    snapshot_slot,
    softplus,
    state_of,
)
from cbatch.kernels.cpu.work_queue import Worker, claim, next_task


class ScanParams(NamedTuple):
    """The heads of a scan (see `SelectiveScan` in `model/ops`).

    decay, step_bias, skip: [heads]; the decay is -exp(decay_log)
    """

    heads: int
    head_dim: int
    groups: int
    state_size: int
    decay: NDArray[np.float32]
    step_bias: NDArray[np.float32]
    skip: NDArray[np.float32]
    step_min: float
    step_max: float


@kernel
def _scan_chunk(
    recurrence: Recurrence, state: int, chunk: int, head: int, left: int, width: int, params: ScanParams, source: Any,
    steps: Any, start: int, out: Any,
) -> None:  # fmt: skip
    """The columns from `left` of a head."""
    keys, first, stop = params.state_size, recurrence.starts[chunk], recurrence.starts[chunk + 1]
    column, size = head * params.head_dim + left, keys * width
    memory = state_of(recurrence, state, recurrence.slots[chunk])[column * keys : column * keys + size]
    at_b = params.heads * params.head_dim + head // (params.heads // params.groups) * keys
    at_c = at_b + params.groups * keys
    for row in range(first, stop):
        for at, numbers in ((column, width), (at_b, keys), (at_c, keys)):
            prefetch_row(source, row + ROWS_AHEAD, at, numbers)
        step = softplus(steps[row, start + head] + params.step_bias[head])
        step = min(max(step, np.float32(params.step_min)), np.float32(params.step_max))
        addresses = ScanAddresses(
            memory.ctypes.data, keys, source[row, at_b:].ctypes.data, source[row, at_c:].ctypes.data,
            source[row, column:].ctypes.data, out[row, column:].ctypes.data,
        )  # fmt: skip
        step_scan(memory[0], width, addresses, ScanFactors(exp(params.decay[head] * step), step, params.skip[head]))
        copied_to = snapshot_slot(recurrence, chunk, row + 1 - first)
        if copied_to >= 0:
            copy_numbers(memory, state_of(recurrence, state, copied_to)[column * keys : column * keys + size])


@kernel
def selective_scan(
    worker: Worker, phase: int, recurrence: Recurrence, state: int, params: ScanParams, source: Any, steps: Any,
    start: int, out: Any,
) -> int:  # fmt: skip
    """out [T, heads * head_dim] = the scan of x, B and C, side by side in the source (see `SelectiveScan`).

    steps: [T, ...], of which `heads` columns from `start` are the step; head_dim is a multiple of 16
    """
    width = block_width(params.head_dim)
    parts = params.head_dim // width
    per_chunk = params.heads * parts
    num_tasks = (len(recurrence.starts) - 1) * per_chunk
    task = claim(worker, phase, num_tasks)
    while task >= 0:
        chunk, head, left = task // per_chunk, task % per_chunk // parts, task % parts * width
        _scan_chunk(recurrence, state, chunk, head, left, width, params, source, steps, start, out)
        task = next_task(worker, phase, num_tasks)
    return phase + 1
