"""How keys and values lie in the cache for the CPU's attention, and how the attention of a step is cut into tasks.

A page holds the keys or values of one block for one head, in panels (see `microkernel`):

    keys    [num_blocks, heads, block_size / 16, key_dim / pair, 16, pair]      16 tokens are the columns of a panel
    values  [num_blocks, heads, value_dim / 16, block_size / pair, 16, pair]    16 numbers of a value are

A cache of bytes (see `kv_store`) is made of panels of 16 tokens, each with 16 float32 scales behind its numbers:

    keys    [num_blocks, heads, block_size / 16, key_dim / 4 + 1, 16, 4]            bytes: 4 numbers of a key
    values  [num_blocks, heads, block_size / 16, value_dim / 16 * 4 + 1, 16, 4]     a number of 4 values
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch.kernels.cpu.jit import as_rows, entry, kernel
from cbatch.kernels.cpu.matmul.byte_tile import GROUP
from cbatch.kernels.cpu.matmul.microkernel import LANES, left_dtype, pad_columns
from cbatch.kernels.cpu.softmax import TILE_TOKENS
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.cpu import empty

_MAX_QUERY_ROWS = 96
"""Query rows (tokens times the heads that share keys) of a task: they use a tile of keys while it is in the cache."""

BLOCK_ROWS = 96
"""Query rows whose scores with a tile of keys are there at once: they stay in the processor's first cache."""

REFERENCE, WEIGHT_SUM = 2 * LANES, LANES
"""Places from the end of a row's state of what its weights are relative to, and of the sum of its weights."""

_ROWS_ALONE = 8
"""Rows of a chunk if each is the only one of its sequence."""

SPLIT = 512
"""Tokens of a sequence whose values are summed apart; the partial sums are merged in their order.

So several threads can work on one sequence, and sequences that begin with the same blocks can read them together. A
token's result is the same in all cases.
"""


class PagedKV(NamedTuple):
    """The cache of one layer.

    microkernel:   see `microkernel_address`, or `byte_tile_address` for a cache of bytes
    keys, values:  flat, the bytes of all of its pages
    itemsize:      bytes of a number: 4 in float32, 2 in bfloat16, 1 in a cache of bytes
    packed:        True for a cache of bytes, otherwise None. Kernels take it as an argument of its own: branches for
                   `None` are not compiled for `True`, nor the others for `None`
    """

    microkernel: int
    keys: NDArray[np.uint8]
    values: NDArray[np.uint8]
    itemsize: int
    packed: Literal[True] | None
    heads: int
    key_dim: int
    value_dim: int
    block_size: int


class PagedCaches(NamedTuple):
    """The caches of all layers.

    whole:  the first one's, with the bytes of all: those of a layer after those of the one before
    layout: [layers, 5] int64: at which bytes the keys and the values of a layer begin, its heads, key_dim and value_dim
    """

    whole: PagedKV
    layout: NDArray[np.int64]


@kernel
def kv_of_layer(caches: PagedCaches, layer: int) -> PagedKV:
    whole, (keys, values, heads, key_dim, value_dim) = caches.whole, caches.layout[layer]
    return PagedKV(
        whole.microkernel, whole.keys[keys:], whole.values[values:], whole.itemsize, whole.packed, heads, key_dim,
        value_dim, whole.block_size,
    )  # fmt: skip


class AttentionPlan(NamedTuple):
    """The sequences of a step, and the tasks into which their attention is cut.

    tables:     [S, B] int32 block ids of each sequence
    starts:     [S] int64 position of the first token that the step computes
    first_rows: [S] int64 row of the step with that token
    tasks:      [N, 6] int64: sequence whose blocks are read, first query token among the sequence's tokens of the
                step, number of query tokens, the positions that they may see (from, up to), and -1; or, if other tasks
                see the rest, where its query tokens begin among the members, by their positions
    members:    [K, 2] int64: sequence that has one query token, and the index of its partial result
    most_tokens: the most query tokens of a task
    merges:     [M, 3] int64: row of the step, the first of its partial results, and their number
    partials:   [partials, query heads, state size] float32 states (see `attention`)
    slots:      [T] int64 where each token goes in the cache: block * block_size + offset
    chunks:     [C + 1] int64 rows at which chunks begin: rows of one sequence that lie in the same panels, or up to 8
                sequences with one row each
    ends_seen, only_in_windows: see `RaggedBatch`; empty if each token sees those up to itself
    """

    tables: NDArray[np.int32]
    starts: NDArray[np.int64]
    first_rows: NDArray[np.int64]
    tasks: NDArray[np.int64]
    members: NDArray[np.int64]
    most_tokens: int
    merges: NDArray[np.int64]
    partials: NDArray[np.float32]
    slots: NDArray[np.int64]
    chunks: NDArray[np.int64]
    ends_seen: NDArray[np.int64]
    only_in_windows: bool


_NOTHING, _NO_ROWS = np.empty(0, np.int64), np.empty((0, 0), np.int64)

NO_PLAN = AttentionPlan(
    np.empty((0, 0), np.int32), _NOTHING, _NOTHING, _NO_ROWS, _NO_ROWS, 0, _NO_ROWS, np.empty((0, 0, 0), np.float32),
    _NOTHING, _NOTHING, _NOTHING, False,
)  # fmt: skip
"""For its types."""


def plan_attention(batch: RaggedBatch, block_size: int, heads: int, group: int, value_dim: int) -> AttentionPlan:
    """Cuts the attention of a step into tasks, none of them too large.

    heads: query heads, of which each `group` shares a head of the cache
    """
    begins, ends, slots = np.array(batch.starts), np.array(batch.stops), batch.slots
    max_tokens = max(1, _MAX_QUERY_ROWS // group)
    sequences, splits = len(begins), sum(batch.starts) // SPLIT + len(begins)
    size = len(slots) // max_tokens + sequences + splits
    tasks, order = np.empty((size, 6), np.int64), np.empty((size, 2), np.int64)
    first_rows, merges = np.empty(sequences, np.int64), np.empty((sequences, 3), np.int64)
    members, chunks = np.empty((splits, 2), np.int64), np.empty(len(slots) // LANES + 2 * sequences + 1, np.int64)
    blocks = SPLIT // block_size if SPLIT % block_size == 0 else 0
    hashed = 1 << (2 * sequences - 1).bit_length()  # a power of two, at least twice as many
    scratch = np.empty(5 * sequences + hashed, np.int64)
    seen = _NOTHING if batch.ends_seen is None else batch.ends_seen
    num_tasks, num_merges, num_partials, most_tokens, num_chunks = _plan_tasks(
        batch.tables, begins, ends, max_tokens, blocks, tasks, members, order, first_rows, merges, chunks, scratch,
        seen,
    )  # fmt: skip
    partials = np.empty((num_partials, heads, _state_size(value_dim)), np.float32)
    tasks, merges = tasks[order[:num_tasks, 0]], merges[:num_merges]
    return AttentionPlan(
        batch.tables, begins, first_rows, tasks, members, most_tokens, merges, partials, slots,
        chunks[: num_chunks + 1], seen, batch.only_in_windows,
    )  # fmt: skip


def _state_size(value_dim: int) -> int:
    return pad_columns(value_dim) + REFERENCE


@entry
def _plan_tasks(
    tables: Any, begins: Any, ends: Any, max_tokens: int, blocks: int, tasks: Any, members: Any, order: Any,
    first_rows: Any, merges: Any, chunks: Any, scratch: Any, ends_seen: Any,
) -> tuple[int, int, int, int, int]:  # fmt: skip
    """Lists the tasks, and in `order` [N, 2] their indices and costs, the most expensive first.

    blocks: of a split; 0 if it does not end with a block

    Returns the numbers of tasks, merges and partial results, the most query tokens of a task, and the number of chunks.
    All in one call: a dozen numpy operations take longer, because each step's weights evict them from the processor's
    caches.
    """
    num_tasks = num_merges = num_partials = row = num_splits = 0
    for sequence in range(len(begins)):
        begin, tokens = begins[sequence], ends[sequence] - begins[sequence]
        first_rows[sequence] = row
        row += tokens
        if tokens == 1 and begin >= SPLIT:
            _write(merges[num_merges], (row - 1, num_partials, begin // SPLIT + 1))
            num_merges += 1
            num_partials += begin // SPLIT + 1
            num_splits = max(num_splits, begin // SPLIT + 1)
        else:
            for first in range(0, tokens, max_tokens):
                taken = min(max_tokens, tokens - first)
                end = begin + first + taken
                if len(ends_seen):
                    end = ends_seen[first_rows[sequence] + first + taken - 1]
                _write(tasks[num_tasks], (sequence, first, taken, 0, end, -1))
                num_tasks += 1
    if num_splits:
        num_tasks = _plan_splits(
            tables, begins, ends, max_tokens, blocks, tasks, members, num_tasks, num_splits, scratch
        )
    most_tokens = 0
    for task in range(num_tasks):  # a stable insertion sort
        most_tokens = max(most_tokens, tasks[task, 2])
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
    return num_tasks, num_merges, num_partials, most_tokens, _plan_chunks(begins, ends, chunks)


@kernel
def _plan_chunks(begins: Any, ends: Any, chunks: Any) -> int:
    """Lists at which rows chunks begin, and the number of rows. Returns the number of chunks."""
    num_chunks = row = alone = 0
    for sequence in range(len(begins)):
        tokens, place = ends[sequence] - begins[sequence], begins[sequence]
        if tokens == 1:
            if alone % _ROWS_ALONE == 0:
                chunks[num_chunks] = row
                num_chunks += 1
            alone, row = alone + 1, row + 1
            continue
        alone = 0
        while place < ends[sequence]:
            chunks[num_chunks] = row
            num_chunks += 1
            taken = min(LANES - place % LANES, ends[sequence] - place)
            place, row = place + taken, row + taken
    chunks[num_chunks] = row
    return num_chunks


@kernel
def _plan_splits(
    tables: Any, begins: Any, ends: Any, max_tokens: int, blocks: int, tasks: Any, members: Any, num_tasks: int,
    num_splits: int, scratch: Any,
) -> int:  # fmt: skip
    """Lists the tasks of sequences that decode behind a split or more. Returns the number of all tasks.

    Sequences that have all blocks of a split in common are one group, and a task for each `max_tokens` of them reads
    its keys and values.
    """
    count, num_members = len(begins), 0
    group_of, firsts, sizes = scratch[:count], scratch[count : 2 * count], scratch[2 * count : 3 * count]
    members_of = as_rows(scratch[3 * count : 5 * count], count, 2)  # of each group, from where to where there are any
    hashed = scratch[5 * count :]
    for split in range(num_splits):
        start, num_groups, partial = split * SPLIT, 0, split
        for place in range(len(hashed)):
            hashed[place] = -1
        for sequence in range(count):
            if not _is_split(begins, ends, sequence) or begins[sequence] < start:
                continue
            group = num_groups
            if blocks > 0 and begins[sequence] + 1 >= start + SPLIT:
                group = _find_group(tables, split * blocks, blocks, sequence, firsts, hashed, num_groups)
            if group == num_groups:
                firsts[group], sizes[group] = sequence, 0
                num_groups += 1
            group_of[sequence] = group
            sizes[group] += 1
        for group in range(num_groups):
            first, stop = firsts[group], min(begins[firsts[group]] + 1, start + SPLIT)
            for member in range(0, sizes[group], max_tokens):
                taken = min(max_tokens, sizes[group] - member)
                _write(tasks[num_tasks], (first, 0, taken, start, stop, num_members + member))
                num_tasks += 1
            members_of[group, 0] = members_of[group, 1] = num_members
            num_members += sizes[group]
        for sequence in range(count):
            if not _is_split(begins, ends, sequence):
                continue
            if begins[sequence] >= start:
                group = group_of[sequence]
                _insert_member(members, members_of[group, 0], members_of[group, 1], begins, sequence, partial)
                members_of[group, 1] += 1
            partial += begins[sequence] // SPLIT + 1
    return num_tasks


@kernel
def _write(row: Any, numbers: Any) -> None:
    for place in range(len(numbers)):  # an assignment of all takes long to compile
        row[place] = numbers[place]


@kernel
def _is_split(begins: Any, ends: Any, sequence: int) -> bool:
    """Whether a sequence decodes behind a split or more."""
    return bool(ends[sequence] - begins[sequence] == 1 and begins[sequence] >= SPLIT)


@kernel
def _find_group(tables: Any, first: int, blocks: int, sequence: int, firsts: Any, hashed: Any, num_groups: int) -> int:
    """The group whose sequences have the same blocks from the `first` on; a new one is noted as `num_groups`.

    firsts: a sequence of each group
    hashed: groups by their first block, in the next free place if that is taken; -1 where there is none
    """
    place = np.int64(tables[sequence, first]) & (len(hashed) - 1)
    while hashed[place] >= 0:
        other = firsts[hashed[place]]
        same = 0
        while same < blocks and tables[other, first + same] == tables[sequence, first + same]:
            same += 1
        if same == blocks:
            group: int = hashed[place]
            return group
        place = (place + 1) & (len(hashed) - 1)
    hashed[place] = num_groups
    return num_groups


@kernel
def _insert_member(members: Any, first: int, stop: int, begins: Any, sequence: int, partial: int) -> None:
    """Adds a sequence and its partial result to the members from `first` up to `stop`, by their positions."""
    place = stop
    while place > first and begins[members[place - 1, 0]] > begins[sequence]:
        members[place, 0], members[place, 1] = members[place - 1, 0], members[place - 1, 1]
        place -= 1
    members[place, 0], members[place, 1] = sequence, partial


class AttentionParams(NamedTuple):
    """How a layer attends. window, chunk, softcap: 0 for none; sinks: [query heads] float32, empty for none."""

    scale: float
    window: int
    chunk: int
    softcap: float
    sinks: NDArray[np.float32]


class AttentionWorkspace(NamedTuple):
    """The memory of each thread for a task; for one thread alone, without the first dimension.

    Rows are query tokens times the heads of a group.

    panels: [threads, 2, 3, TILE_TOKENS / 16] addresses in a tile, and in the next (see `_list_panels`)
    runs:   [threads, TILE_TOKENS / 16, 4] where the products of two panels find them (see `Panels`)
    seen:   [threads, 2, rows] positions of the query tokens, and how many tokens of its sequence each one sees
    query:  [threads, rows, key_dim] of `left_dtype`
    scores: [threads, BLOCK_ROWS, TILE_TOKENS] before the softmax
    weights: [threads, BLOCK_ROWS, TILE_TOKENS] after it, of `left_dtype`
    states: [threads, 2, rows, state size] (see `attention`) of the first split and of a later one
    stored: [threads, 16, the larger of key_dim and value_dim] keys or values on their way into the cache
    scales: [threads, 3, TILE_TOKENS] of the keys and the values of a tile, and ones
    rounded_query, rounded_weights: as `query` and `weights`, in int16, for a cache of bytes (see `byte_tile`)
    query_headers: [threads, rows, groups of key_dim, 2] of the rounded queries
    weight_headers: [threads, BLOCK_ROWS, 2] of the rounded weights
    """

    panels: NDArray[np.int64]
    runs: NDArray[np.int64]
    seen: NDArray[np.int64]
    query: NDArray[Any]
    scores: NDArray[np.float32]
    weights: NDArray[Any]
    states: NDArray[np.float32]
    stored: NDArray[Any]
    scales: NDArray[np.float32]
    rounded_query: NDArray[np.int16]
    rounded_weights: NDArray[np.int16]
    query_headers: NDArray[np.int32]
    weight_headers: NDArray[np.int32]


def new_attention_workspace(
    threads: int, group: int, key_dim: int, value_dim: int, dtype: np.dtype[Any]
) -> AttentionWorkspace:
    """dtype: of keys and values when they are multiplied"""
    rows, dim = max(_MAX_QUERY_ROWS, group), max(key_dim, value_dim)
    scales = empty((threads, 3, TILE_TOKENS), np.float32)
    scales[:, 2] = 1
    return AttentionWorkspace(
        empty((threads, 2, 3, TILE_TOKENS // LANES), np.int64),
        empty((threads, TILE_TOKENS // LANES, 4), np.int64),
        empty((threads, 2, rows), np.int64),
        empty((threads, rows, key_dim), left_dtype(dtype)),
        empty((threads, BLOCK_ROWS, TILE_TOKENS), np.float32),
        empty((threads, BLOCK_ROWS, TILE_TOKENS), left_dtype(dtype)),
        empty((threads, 2, rows, _state_size(value_dim)), np.float32),
        empty((threads, LANES, dim), dtype),
        scales,
        empty((threads, rows, key_dim), np.int16),
        empty((threads, BLOCK_ROWS, TILE_TOKENS), np.int16),
        empty((threads, rows, -(-key_dim // GROUP), 2), np.int32),
        empty((threads, BLOCK_ROWS, 2), np.int32),
    )
