"""How keys and values lie in the cache for the CPU's attention, and how the attention of a step is cut into tasks.

A page holds the keys or values of one block for one head, in panels (see `microkernel`):

    keys    [num_blocks, heads, block_size / 16, key_dim / pair, 16, pair]      16 tokens are the columns of a panel
    values  [num_blocks, heads, value_dim / 16, block_size / pair, 16, pair]    16 numbers of a value are
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch.engine.kernels.cpu.jit import entry, kernel
from cbatch.engine.kernels.cpu.matmul.microkernel import LANES, pad_columns
from cbatch.engine.kernels.cpu.softmax import TILE_TOKENS
from cbatch.engine.runtime.batch import RaggedBatch
from cbatch.engine.runtime.cpu import empty

_MAX_QUERY_ROWS = 96
"""Query rows (tokens times the heads that share keys) of a task: they use a tile of keys while it is in the cache."""

BLOCK_ROWS = 48
"""Query rows whose scores with a tile of keys are there at once: they stay in the processor's first cache."""

REFERENCE, WEIGHT_SUM = 2 * LANES, LANES
"""Places from the end of a row's state of what its weights are relative to, and of the sum of its weights."""

SPLIT = 512
"""Tokens of a sequence whose values are summed apart; the partial sums are merged in their order.

So several threads can work on one sequence, and a token's result is the same however many they are.
"""


class PagedKV(NamedTuple):
    """The cache of one layer.

    microkernel:   see `microkernel_address`
    keys, values:  flat, all of its pages; float32, or uint16 for bfloat16
    """

    microkernel: int
    keys: NDArray[Any]
    values: NDArray[Any]
    heads: int
    key_dim: int
    value_dim: int
    block_size: int


class PagedCaches(NamedTuple):
    """The caches of all layers.

    keys, values: flat, those of one layer after those of the one before
    layout:       [layers, 5] int64: where the keys and the values of a layer begin, its heads, key_dim and value_dim
    """

    microkernel: int
    keys: NDArray[Any]
    values: NDArray[Any]
    layout: NDArray[np.int64]
    block_size: int


@kernel
def kv_of_layer(caches: PagedCaches, layer: int) -> PagedKV:
    keys, values, heads, key_dim, value_dim = caches.layout[layer]
    return PagedKV(
        caches.microkernel, caches.keys[keys:], caches.values[values:], heads, key_dim, value_dim, caches.block_size
    )


class AttentionPlan(NamedTuple):
    """The sequences of a step, and the tasks into which their attention is cut.

    tables:     [S, B] int32 block ids of each sequence
    starts:     [S] int64 position of the first token that the step computes
    first_rows: [S] int64 row of the step with that token
    tasks:      [N, 6] int64: sequence, first query token among the sequence's tokens of the step, number of query
                tokens, the positions that they may see (from, up to), and the index of the partial result if other
                tasks see the rest, else -1
    merges:     [M, 3] int64: row of the step, the first of its partial results, and their number
    partials:   [partials, query heads, state size] float32 states (see `attention`)
    slots:      [T] int64 where each token goes in the cache: block * block_size + offset
    is_last:    [T] bool, whether a token is the last that the step computes of its sequence
    """

    tables: NDArray[np.int32]
    starts: NDArray[np.int64]
    first_rows: NDArray[np.int64]
    tasks: NDArray[np.int64]
    merges: NDArray[np.int64]
    partials: NDArray[np.float32]
    slots: NDArray[np.int64]
    is_last: NDArray[np.bool_]


def plan_attention(batch: RaggedBatch, heads: int, group: int, value_dim: int) -> AttentionPlan:
    """Cuts the attention of a step into tasks, none of them too large.

    heads: query heads, of which each `group` shares a head of the cache
    """
    begins, ends, slots = np.array(batch.starts), np.array(batch.stops), batch.slots
    max_tokens = max(1, _MAX_QUERY_ROWS // group)
    sequences = len(begins)
    size = len(slots) // max_tokens + 2 * sequences + sum(batch.starts) // SPLIT
    tasks, order = np.empty((size, 6), np.int64), np.empty((size, 2), np.int64)
    first_rows, merges = np.empty(sequences, np.int64), np.empty((sequences, 3), np.int64)
    is_last = np.zeros(len(slots), np.bool_)
    num_tasks, num_merges, num_partials = _plan_tasks(
        begins, ends, max_tokens, tasks, order, first_rows, merges, is_last
    )
    partials = np.empty((num_partials, heads, _state_size(value_dim)), np.float32)
    tasks, merges = tasks[order[:num_tasks, 0]], merges[:num_merges]
    return AttentionPlan(batch.tables, begins, first_rows, tasks, merges, partials, slots, is_last)


def _state_size(value_dim: int) -> int:
    return pad_columns(value_dim) + REFERENCE


@entry
def _plan_tasks(
    begins: Any, ends: Any, max_tokens: int, tasks: Any, order: Any, first_rows: Any, merges: Any, is_last: Any
) -> tuple[int, int, int]:
    """Lists the tasks, and in `order` [N, 2] their indices and costs, the most expensive first.

    Returns the numbers of tasks, merges and partial results. All in one call: a dozen numpy operations take longer,
    because each step's weights evict them from the processor's caches.
    """
    num_tasks = num_merges = num_partials = row = 0
    for sequence in range(len(begins)):
        begin, tokens = begins[sequence], ends[sequence] - begins[sequence]
        first_rows[sequence] = row
        row += tokens
        is_last[row - 1] = True
        if tokens == 1 and begin >= SPLIT:
            merges[num_merges] = row - 1, num_partials, begin // SPLIT + 1
            num_merges += 1
            for start in range(0, begin + 1, SPLIT):
                tasks[num_tasks] = sequence, 0, 1, start, min(begin + 1, start + SPLIT), num_partials
                num_partials += 1
                num_tasks += 1
        else:
            for first in range(0, tokens, max_tokens):
                taken = min(max_tokens, tokens - first)
                tasks[num_tasks] = sequence, first, taken, 0, begin + first + taken, -1
                num_tasks += 1
    for task in range(num_tasks):  # a stable insertion sort
        cost = (tasks[task, 4] - tasks[task, 3]) * tasks[task, 2]
        low, high = 0, task
        while low < high:
            middle = (low + high) // 2
            if order[middle, 1] >= cost:
                low = middle + 1
            else:
                high = middle
        for place in range(task, low, -1):
            order[place, 0], order[place, 1] = order[place - 1, 0], order[place - 1, 1]
        order[low, 0], order[low, 1] = task, cost
    return num_tasks, num_merges, num_partials


class AttentionParams(NamedTuple):
    """How a layer attends. window, chunk, softcap: 0 for none; sinks: [query heads] float32, empty for none."""

    scale: float
    window: int
    chunk: int
    softcap: float
    sinks: NDArray[np.float32]


class AttentionWorkspace(NamedTuple):
    """What each thread needs for a task; for one thread alone, without the first dimension.

    Rows are query tokens times the heads of a group.

    panels: [threads, 2, TILE_TOKENS / 16] addresses of the panels of keys and of values of a tile
    pairs:  [threads, TILE_TOKENS / 16, 2] addresses of two panels of values each
    query:  [threads, rows, key_dim]
    scores, weights: [threads, BLOCK_ROWS, TILE_TOKENS] before and after the softmax
    states: [threads, 2, rows, state size] (see `attention`) of the first split and of a later one
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
        empty((threads, BLOCK_ROWS, TILE_TOKENS), np.float32),
        empty((threads, BLOCK_ROWS, TILE_TOKENS), dtype),
        empty((threads, 2, rows, _state_size(value_dim)), np.float32),
    )
