"""Where recurrent layers have the states of sequences.

Each state goes from token to token in the memory of its slot, and a task has all tokens of a chunk for a part of it. So
a token's result has the same bits however its sequence was cut into steps, and however many threads shared the step.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch.kernels.cpu.fast_math import exp
from cbatch.kernels.cpu.jit import inlined, kernel
from cbatch.kernels.cpu.matmul.microkernel import prefetch
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.state_pool import StatePool

ROWS_AHEAD = 2
"""Rows of a prompt whose columns are prefetched: they lie too far apart for the processor to do so by itself."""


class Recurrence(NamedTuple):
    """Where the S chunks of a step have their states (see `StepStates`).

    memory:  flat, the slots of one state after those of the one before; float32, or uint16 for bfloat16. Their bytes,
             where kernels need not know the type
    layout:  [states, 2] int64, where each state begins, and how many numbers each slot has
    starts:  [S + 1] int64, first row of each chunk, and T
    slots, snapshot_counts, snapshot_slots: [S] int64
    """

    memory: NDArray[Any]
    layout: NDArray[np.int64]
    starts: NDArray[np.int64]
    slots: NDArray[np.int64]
    snapshot_counts: NDArray[np.int64]
    snapshot_slots: NDArray[np.int64]


_NOTHING = np.empty(0, np.int64)
NO_RECURRENCE = Recurrence(np.empty(0, np.uint8), np.empty((0, 2), np.int64), _NOTHING, _NOTHING, _NOTHING, _NOTHING)
"""Of a step of a model without states."""


def state_layout(pool: StatePool) -> NDArray[np.int64]:
    """See `Recurrence`."""
    sizes = np.array([math.prod(tensor.shape[1:]) for tensor in pool.tensors], np.int64)
    return np.stack([pool.num_slots * (sizes.cumsum() - sizes), sizes], axis=1)


def new_recurrence(batch: RaggedBatch, memory: NDArray[Any], layout: NDArray[np.int64]) -> Recurrence:
    """Of a batch that has states."""
    states = batch.states
    assert states is not None
    starts = np.zeros(len(batch.starts) + 1, np.int64)
    starts[1:] = batch.counts.cumsum()
    return Recurrence(memory, layout, starts, states.slots, states.snapshot_counts, states.snapshot_slots)


@inlined
def with_memory(recurrence: Recurrence, memory: Any) -> Recurrence:
    """The same with its memory as numbers."""
    _, layout, starts, slots, counts, targets = recurrence
    return Recurrence(memory, layout, starts, slots, counts, targets)


@inlined
def state_of(recurrence: Recurrence, state: int, slot: int) -> Any:
    """The numbers of a slot."""
    start, size = recurrence.layout[state]
    return recurrence.memory[start + slot * size : start + (slot + 1) * size]


@kernel
def snapshot_slot(recurrence: Recurrence, chunk: int, tokens: int) -> int:
    """Where the state of a chunk is copied to after so many of its tokens, -1 if it is not."""
    is_now = recurrence.snapshot_counts[chunk] == tokens
    return recurrence.snapshot_slots[chunk] if is_now else -1


@kernel
def copy_numbers(source: Any, target: Any) -> None:
    for i in range(len(source)):
        target[i] = source[i]


@kernel
def prefetch_row(rows: Any, row: int, column: int, width: int) -> None:
    """Prefetches columns of a row that comes soon."""
    begin = rows[min(row, len(rows) - 1), column:].ctypes.data
    for at in range(0, width * rows.itemsize, 64):
        prefetch(begin + at)


@kernel
def softplus(x: Any) -> Any:
    return np.log1p(exp(-abs(x))) + max(x, np.float32(0))
