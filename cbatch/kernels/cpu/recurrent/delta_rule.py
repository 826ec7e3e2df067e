"""The gated delta rule."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch.kernels.cpu.fast_math import exp
from cbatch.kernels.cpu.jit import kernel
from cbatch.kernels.cpu.recurrent.blocks import DeltaAddresses, DeltaFactors, block_width, step_delta
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


class DeltaParams(NamedTuple):
    """The heads of a gated delta rule (see `GatedDelta` in `model/ops`).

    decay, decay_bias: [value_heads]; the decay is -exp(decay_log)
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    decay: NDArray[np.float32]
    decay_bias: NDArray[np.float32]


@kernel
def _factors(query: Any, key: Any, decay: Any, rate: Any) -> DeltaFactors:
    queries, keys, both = np.float32(0), np.float32(0), np.float32(0)
    for i in range(len(key)):
        queries += query[i] * query[i]
        keys += key[i] * key[i]
        both += query[i] * key[i]
    unit = np.float32(1) / np.sqrt(keys + np.float32(1e-6))
    scale = np.float32(1) / np.sqrt((queries + np.float32(1e-6)) * np.float32(len(key)))
    return DeltaFactors(decay, rate, decay * unit, decay * scale, scale * unit * both, unit)


@kernel
def _delta_chunk(
    recurrence: Recurrence, state: int, chunk: int, head: int, left: int, width: int, params: DeltaParams, source: Any,
    controls: Any, out: Any,
) -> None:  # fmt: skip
    """The columns from `left` of a head."""
    keys, first, stop = params.key_dim, recurrence.starts[chunk], recurrence.starts[chunk + 1]
    column, size = head * params.value_dim + left, keys * width
    memory = state_of(recurrence, state, recurrence.slots[chunk])[column * keys : column * keys + size]
    inner = params.key_heads * keys
    at_query, at_value = head // (params.value_heads // params.key_heads) * keys, 2 * inner + column
    at_key = inner + at_query
    for row in range(first, stop):
        for at, numbers in ((at_query, keys), (at_key, keys), (at_value, width)):
            prefetch_row(source, row + ROWS_AHEAD, at, numbers)
        query, key = source[row, at_query : at_query + keys], source[row, at_key : at_key + keys]
        rate = np.float32(1) / (np.float32(1) + exp(-controls[row, head]))
        speed = softplus(controls[row, params.value_heads + head] + params.decay_bias[head])
        factors = _factors(query, key, exp(params.decay[head] * speed), rate)
        addresses = DeltaAddresses(
            memory.ctypes.data, keys, query.ctypes.data, key.ctypes.data, source[row, at_value:].ctypes.data,
            out[row, column:].ctypes.data,
        )  # fmt: skip
        step_delta(memory[0], width, addresses, factors)
        copied_to = snapshot_slot(recurrence, chunk, row + 1 - first)
        if copied_to >= 0:
            copy_numbers(memory, state_of(recurrence, state, copied_to)[column * keys : column * keys + size])


@kernel
def gated_delta(
    worker: Worker, phase: int, recurrence: Recurrence, state: int, params: DeltaParams, source: Any, controls: Any,
    out: Any,
) -> int:  # fmt: skip
    """out [T, value_heads * value_dim] = the gated delta rule over queries, keys and values (see `GatedDelta`).

    controls: [T, 2 * value_heads] b, then a; value_dim is a multiple of 16
    """
    width = block_width(params.value_dim)
    parts = params.value_dim // width
    per_chunk = params.value_heads * parts
    num_tasks = (len(recurrence.starts) - 1) * per_chunk
    task = claim(worker, phase, num_tasks)
    while task >= 0:
        chunk, head, left = task // per_chunk, task % per_chunk // parts, task % parts * width
        _delta_chunk(recurrence, state, chunk, head, left, width, params, source, controls, out)
        task = next_task(worker, phase, num_tasks)
    return phase + 1
