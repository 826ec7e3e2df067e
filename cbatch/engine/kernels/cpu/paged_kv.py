"""Where keys and values lie for the CPU's attention, and what it is told of a step.

A page is the keys or values of one block, for one head, in panels (see `multiply_tile`):

    keys    [num_blocks, heads, block_size / 16, key_dim / pair, 16, pair]      16 tokens are the columns of a panel
    values  [num_blocks, heads, value_dim / 16, block_size / pair, 16, pair]    16 numbers of a value are
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch.engine.kernels.cpu.jit import entry
from cbatch.engine.kernels.cpu.microkernel import COLUMNS, LANES, MAX_ROWS, pad_columns
from cbatch.engine.kernels.cpu.softmax import TILE_TOKENS
from cbatch.engine.runtime.aligned import empty

_MAX_QUERY_ROWS = 96
"""Query rows (tokens times heads that share keys) for which a chunk of keys is used while it is in the cache."""


SPLIT = 512
"""Tokens of a sequence that are seen one after the other; what each such part gives is added up in their order.

So several threads may look at one sequence, and a token's result is the same however many they are.
"""


class PagedKV(NamedTuple):
    """Where the cache of a model's layers lies, all with the same heads and sizes.

    code:          of the tiles (see `microkernel_address`)
    keys, values:  [layers, all pages of a layer] float32, or uint16 for bfloat16
    """

    code: int
    keys: NDArray[Any]
    values: NDArray[Any]
    heads: int
    key_dim: int
    value_dim: int
    block_size: int


class AttentionPlan(NamedTuple):
    """The sequences of a step, and the pieces in which they attend.

    tables:  [S, B] int32 blocks of each sequence
    starts:  [S] int64 place in its sequence of a slice's first token
    firsts:  [S] int64 row of the step with that token
    pieces:  [N, 6] int64: sequence, first query token in its slice, number of query tokens, the tokens that they may
             see (from, up to), and the number of the part if others see the rest, else -1
    merges:  [M, 3] int64: row of the step, the first of its parts, and how many there are
    parts:   [parts, query heads, value_dim + 2] float32 states (see `attention`)
    slots:   [T] int64 where each token goes: block * block_size + offset
    lasts:   [T] bool, whether a token is the last of its slice
    """

    tables: NDArray[np.int32]
    starts: NDArray[np.int64]
    first_rows: NDArray[np.int64]
    tasks: NDArray[np.int64]
    merges: NDArray[np.int64]
    partials: NDArray[np.float32]
    slots: NDArray[np.int64]
    is_last: NDArray[np.bool_]


def plan_attention(
    tables: NDArray[np.int32],
    starts: Sequence[int],
    stops: Sequence[int],
    slots: NDArray[np.int64],
    heads: int,
    group: int,
    value_dim: int,
) -> AttentionPlan:
    """A step's slices, cut into pieces of which none is too large.

    heads: of queries, of which each `group` shares one head of the cache
    """
    begins, ends, most = np.array(starts), np.array(stops), max(1, _MAX_QUERY_ROWS // group)
    rows = len(begins)
    room = len(slots) // most + 2 * rows + sum(starts) // SPLIT
    tasks, order, costs = np.empty((room, 6), np.int64), np.empty(room, np.int64), np.empty(room, np.int64)
    first_rows, merges, is_last = (
        np.empty(rows, np.int64),
        np.empty((rows, 3), np.int64),
        np.zeros(len(slots), np.bool_),
    )
    count, alone, partials = _plan_tasks(begins, ends, most, tasks, order, costs, first_rows, merges, is_last)
    states = np.empty((partials, heads, value_dim + 2), np.float32)
    return AttentionPlan(tables, begins, first_rows, tasks[order[:count]], merges[:alone], states, slots, is_last)


@entry
def _plan_tasks(
    begins: Any, ends: Any, most: int, tasks: Any, order: Any, costs: Any, first_rows: Any, merges: Any, is_last: Any
) -> tuple[int, int, int]:
    """Writes down the pieces, and in which order they are to be taken: those that cost most come first.

    In one call, because a dozen operations of numpy take longer than all of it, where the weights of a step have just
    gone through the processor's caches. Returns how many pieces, sequences with parts, and parts there are.
    """
    count = alone = partials = row = 0
    for sequence in range(len(begins)):
        begin, tokens = begins[sequence], ends[sequence] - begins[sequence]
        first_rows[sequence] = row
        row += tokens
        is_last[row - 1] = True
        if tokens == 1 and begin >= SPLIT:
            merges[alone] = row - 1, partials, begin // SPLIT + 1
            alone += 1
            for start in range(0, begin + 1, SPLIT):
                tasks[count] = sequence, 0, 1, start, min(begin + 1, start + SPLIT), partials
                partials += 1
                count += 1
        else:
            for first in range(0, tokens, most):
                taken = min(most, tokens - first)
                tasks[count] = sequence, first, taken, 0, begin + first + taken, -1
                count += 1
    for task in range(count):
        cost = (tasks[task, 4] - tasks[task, 3]) * tasks[task, 2]
        low, high = 0, task
        while low < high:
            middle = (low + high) // 2
            if costs[middle] >= cost:
                low = middle + 1
            else:
                high = middle
        for place in range(task, low, -1):
            order[place], costs[place] = order[place - 1], costs[place - 1]
        order[low], costs[low] = task, cost
    return count, alone, partials


class AttentionParams(NamedTuple):
    """How a layer attends. window, softcap: 0 for none; sinks: [query heads] float32, empty for none."""

    scale: float
    window: int
    softcap: float
    sinks: NDArray[np.float32]


class AttentionWorkspace(NamedTuple):
    """What each thread needs for one piece: [threads, ...], rows for query tokens times the heads of a group.

    states: [threads, 2, rows, filled up value_dim + 32], of the first segment and of a later one
    """

    panels: NDArray[np.int64]
    pairs: NDArray[np.int64]
    query: NDArray[Any]
    scores: NDArray[np.float32]
    weights: NDArray[Any]
    states: NDArray[np.float32]


def new_attention_workspace(
    threads: int, group: int, key_dim: int, value_dim: int, dtype: np.dtype[Any]
) -> AttentionWorkspace:
    rows = max(_MAX_QUERY_ROWS, group)
    return AttentionWorkspace(
        empty((threads, 2, TILE_TOKENS // LANES), np.int64),
        empty((threads, TILE_TOKENS // LANES, 2), np.int64),
        empty((threads, rows, key_dim), dtype),
        empty((threads, MAX_ROWS, TILE_TOKENS), np.float32),
        empty((threads, MAX_ROWS, TILE_TOKENS), dtype),
        empty((threads, 2, rows, pad_columns(value_dim) + COLUMNS), np.float32),
    )
