"""Attention over the paged cache, without copying keys or values.

Keys and values lie in panels (see `paged_kv`), so scores and weighted sums use the same microkernel as all products.
Tiles of 64 tokens, at fixed positions of the sequence, go through the online softmax one after the other (Milakov and
Gimelshein, 2018), and splits of 512 tokens are merged. So a token's result has the same bits however its sequence was
cut into steps, and however many threads shared it.

The state of a row is what it has seen so far: the weighted sum of values, and in the last two places the score that the
weights are relative to, and the sum of the weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cbatch.engine.kernels.cpu.fast_math import exp, from_float32, tanh, to_float32
from cbatch.engine.kernels.cpu.jit import entry, kernel
from cbatch.engine.kernels.cpu.matmul.microkernel import COLUMNS, LANES, MAX_ROWS, Panels, Rows, multiply_tile, prefetch
from cbatch.engine.kernels.cpu.paged_kv import (
    SPLIT,
    AttentionParams,
    AttentionPlan,
    AttentionWorkspace,
    PagedKV,
)
from cbatch.engine.kernels.cpu.softmax import TILE_TOKENS, softmax_weights
from cbatch.engine.kernels.cpu.work_queue import Worker, claim, next_task

_TASKS_PER_THREAD = 8
"""Enough that no thread waits long for the others at the end of a layer's attention."""

_MINUS_INFINITY = np.float32(-np.inf)


class _QueryRows(NamedTuple):
    """Rows of a task that share the keys of a head: `group` for each token, the first of which is at `start`.

    A task may have several heads, the rows of one after those of the other.
    """

    start: int
    rows: int
    group: int


@kernel
def store_kv(kv: PagedKV, slot: int, head: int, key: Any, value: Any, is_last: bool) -> None:
    """Stores a token's key [key_dim] and value [value_dim] in the cache.

    If the token is the last of its sequence, the other half of its value's pair becomes 0: it is multiplied with 0
    until its token comes, and what lies there could be NaN.
    """
    keys, values = kv.keys, kv.values
    pair = 1 if keys.itemsize == 4 else 2
    size = kv.block_size
    page, offset = slot // size * kv.heads + head, slot % size
    base = page * size * kv.key_dim + offset // LANES * LANES * kv.key_dim + offset % LANES * pair
    for i in range(kv.key_dim):
        keys[base + i // pair * LANES * pair + i % pair] = from_float32(to_float32(key[i]), keys)
    base = page * size * kv.value_dim + offset // pair * LANES * pair + offset % pair
    clear = is_last and pair == 2 and offset % 2 == 0
    for i in range(kv.value_dim):
        at = base + i // LANES * LANES * size + i % LANES * pair
        values[at] = from_float32(to_float32(value[i]), values)
        if clear:
            values[at + 1] = 0


@kernel
def _list_panels(kv: PagedKV, head: int, table: Any, token: int, stop: int, panels: Any) -> None:
    """Addresses of the panels of keys and of values of the 64 tokens from `token`: panels [2, 4].

    Panels past `stop` get the address of the first, which is safe to read and whose products are not used.
    """
    keys, values, size = kv.keys, kv.values, kv.block_size
    for part in range(TILE_TOKENS // LANES):
        first = token + part * LANES
        if first < stop:
            block, offset = np.uint64(first) // np.uint64(size), np.uint64(first) % np.uint64(size)
            page = (np.int64(table[block]) * kv.heads + head) * size
            at = page + np.int64(offset)
            panels[0, part] = keys.ctypes.data + at * kv.key_dim * keys.itemsize
            panels[1, part] = values.ctypes.data + (page * kv.value_dim + np.int64(offset) * LANES) * values.itemsize
        else:
            panels[0, part], panels[1, part] = panels[0, 0], panels[1, 0]


@kernel
def _compute_scores(kv: PagedKV, query: Rows, rows: int, count: int, panels: Any, scores: Any) -> None:
    """scores [rows, 64] = query [rows, key_dim] times the keys of the first `count` tokens of a tile."""
    keys = kv.keys
    pair = 1 if keys.itemsize == 4 else 2
    stride, depth = LANES * pair * keys.itemsize, kv.key_dim // pair
    for left in range(0, count, COLUMNS):
        columns = Panels(panels.ctypes.data + left // LANES * 8, depth, stride, depth)
        multiply_tile(
            kv.microkernel, keys[0], query, columns, Rows(scores.ctypes.data + left * 4, TILE_TOKENS * 4), rows, 0
        )


@kernel
def _accumulate_values(kv: PagedKV, weights: Any, rows: int, count: int, panels: Any, pairs: Any, out: Rows) -> None:
    """out [rows, value_dim] += weights [rows, 64] times the values of the first `count` tokens of a tile."""
    values = kv.values
    pair = 1 if values.itemsize == 4 else 2
    stride, depth, run = LANES * pair * values.itemsize, -(-count // pair), LANES // pair
    width, last = LANES * kv.block_size * values.itemsize, kv.value_dim // LANES - 1
    left = Rows(np.int64(weights.ctypes.data), TILE_TOKENS * values.itemsize)
    for panel in range(0, last + 1, 2):
        for part in range(TILE_TOKENS // LANES):
            pairs[part, 0] = panels[1, part] + panel * width
            pairs[part, 1] = pairs[part, 0] + (width if panel < last else 0)
        target = Rows(out.address + panel * LANES * 4, out.stride)
        multiply_tile(kv.microkernel, values[0], left, Panels(pairs.ctypes.data, run, stride, depth), target, rows, 1)


@kernel
def _prefetch_tile(kv: PagedKV, head: int, table: Any, token: int, stop: int) -> None:
    """Prefetches the keys and values of 64 tokens."""
    keys, values, size = kv.keys, kv.values, kv.block_size
    for first in range(token, min(token + TILE_TOKENS, stop), size):
        page = (table[first // size] * kv.heads + head) * size
        for at in range(0, min(size, TILE_TOKENS) * kv.key_dim * keys.itemsize, 64):
            prefetch(keys.ctypes.data + page * kv.key_dim * keys.itemsize + at)
        for at in range(0, min(size, TILE_TOKENS) * kv.value_dim * values.itemsize, 64):
            prefetch(values.ctypes.data + page * kv.value_dim * values.itemsize + at)


@kernel
def _online_softmax_update(
    scores: Any, first: int, stop: int, params: AttentionParams, weights: Any, state: Any
) -> None:
    """Turns a row of 64 products into weights, of which those from `first` up to `stop` count; rescales its state."""
    width = len(state) - 2
    scale, cap, before = np.float32(params.scale), np.float32(params.softcap), state[width]
    if cap > 0:
        for j in range(TILE_TOKENS):
            scores[j] = cap * tanh(scores[j] * scale / cap)
        scale = np.float32(1)
    most, added = softmax_weights(weights[0], scores.ctypes.data, weights.ctypes.data, scale, first, stop, before)
    if before != most:
        state[width] = most
        if before > _MINUS_INFINITY:
            shrink = exp(before - most)
            for j in range(width):
                state[j] *= shrink
            state[width + 1] *= shrink
    state[width + 1] += added


@kernel
def first_seen(position: int, params: AttentionParams) -> int:
    """The first token that a token at a position sees."""
    if params.chunk > 0:
        return position // params.chunk * params.chunk
    return max(0, position - params.window + 1) if params.window > 0 else 0


@kernel
def _attend_tile(
    kv: PagedKV, token: int, query_rows: _QueryRows, begin: int, params: AttentionParams, scratch: AttentionWorkspace,
    states: Any,
) -> None:  # fmt: skip
    """Lets the rows of a head see the 64 tokens from `token`. begin: the first of these rows in the task"""
    query, panels, scores, weights = scratch.query, scratch.panels, scratch.scores, scratch.weights
    start, group = query_rows.start, query_rows.group
    for top in range(0, query_rows.rows, MAX_ROWS):
        rows, first_row = min(MAX_ROWS, query_rows.rows - top), begin + top
        count = min(TILE_TOKENS, start + (top + rows - 1) // group + 1 - token)
        if count <= 0:
            continue
        stride = query.shape[1] * query.itemsize
        _compute_scores(kv, Rows(query.ctypes.data + first_row * stride, stride), rows, count, panels, scores)
        for i in range(rows):
            position = start + (top + i) // group
            first = first_seen(position, params) - token
            _online_softmax_update(scores[i], first, position + 1 - token, params, weights[i], states[first_row + i])
        stride = states.shape[1] * 4
        out = Rows(states.ctypes.data + first_row * stride, stride)
        _accumulate_values(kv, weights, rows, count, panels, scratch.pairs, out)


@kernel
def _reset(state: Any) -> None:
    for j in range(len(state)):
        state[j] = np.float32(0)
    state[len(state) - 2] = _MINUS_INFINITY


@kernel
def _merge_state(state: Any, later: Any, width: int) -> None:
    """Adds the state of a later split; its first `width` numbers are the weighted sum."""
    before, largest, total = state[len(state) - 2], later[len(later) - 2], later[len(later) - 1]
    if largest == _MINUS_INFINITY and total == 0:
        return
    most = max(before, largest)
    keep = exp(before - most) if before > _MINUS_INFINITY else np.float32(0)
    share = exp(largest - most) if largest > _MINUS_INFINITY else np.float32(1)
    for j in range(width):
        state[j] = state[j] * keep + later[j] * share
    state[len(state) - 2] = most
    state[len(state) - 1] = state[len(state) - 1] * keep + total * share


@kernel
def _attend_task(
    kv: PagedKV, first_head: int, stop_head: int, table: Any, begin: int, end: int, query_rows: _QueryRows,
    params: AttentionParams, scratch: AttentionWorkspace,
) -> None:  # fmt: skip
    """Lets all rows of a task see the tokens from `begin` up to `end`, as far as each may."""
    start, per_head = query_rows.start, query_rows.rows
    rows = (stop_head - first_head) * per_head
    lowest = first_seen(start, params) // TILE_TOKENS * TILE_TOKENS
    all_before = scratch.states[0]
    for i in range(rows):  # also for a task whose tokens are all before the window: it sees nothing
        _reset(all_before[i])
    for split in range(max(begin, lowest // SPLIT * SPLIT), end, SPLIT):
        is_first, stop = split <= max(begin, lowest), min(end, split + SPLIT)
        states = all_before if is_first else scratch.states[1]
        for i in range(0 if is_first else rows):
            _reset(states[i])
        for token in range(max(split, lowest), stop, TILE_TOKENS):
            for head in range(first_head, stop_head):
                if head + 1 < stop_head:
                    _prefetch_tile(kv, head + 1, table, token, end)
                else:
                    _prefetch_tile(kv, first_head, table, token + TILE_TOKENS, end)
                _list_panels(kv, head, table, token, stop, scratch.panels)
                _attend_tile(kv, token, query_rows, (head - first_head) * per_head, params, scratch, states)
        for i in range(0 if is_first else rows):
            _merge_state(all_before[i], states[i], kv.value_dim)


@kernel
def _workspace_of_thread(workspace: AttentionWorkspace, index: int) -> AttentionWorkspace:
    return AttentionWorkspace(
        workspace.panels[index], workspace.pairs[index], workspace.query[index], workspace.scores[index],
        workspace.weights[index], workspace.states[index],
    )  # fmt: skip


@kernel
def _heads_of_a_task(kv: PagedKV, plan: AttentionPlan, group: int, workspace: AttentionWorkspace) -> int:
    """How many heads of the cache a task sees. Several, if every sequence has one token and there are many of them.

    The heads of a block lie side by side: memory is read faster if they are read in turn.
    """
    if len(plan.slots) > len(plan.starts):
        return 1
    enough = len(plan.tasks) * kv.heads // (_TASKS_PER_THREAD * len(workspace.query))
    return max(1, min(kv.heads, len(workspace.query[0]) // group, enough))


@kernel
def attend(
    worker: Worker, phase: int, kv: PagedKV, plan: AttentionPlan, params: AttentionParams, query: Any, out: Any,
    workspace: AttentionWorkspace,
) -> int:  # fmt: skip
    """out [T, query heads * value_dim] = attention with query [T, query heads * key_dim]. Returns the next phase.

    query, out: in the cache's type
    """
    group, width = query.shape[1] // kv.key_dim // kv.heads, kv.value_dim
    scratch = _workspace_of_thread(workspace, worker.thread)
    heads = _heads_of_a_task(kv, plan, group, workspace)
    parts = -(-kv.heads // heads)
    num_tasks, states = len(plan.tasks) * parts, scratch.states[0]
    task = claim(worker, phase, num_tasks)
    while task >= 0:
        first_head = task % parts * heads
        stop_head = min(kv.heads, first_head + heads)
        sequence, first, tokens, begin, end, partial = plan.tasks[task // parts]
        row, start = plan.first_rows[sequence] + first, plan.starts[sequence] + first
        per_head = tokens * group
        for i in range((stop_head - first_head) * per_head):
            token, query_head = row + i % per_head // group, (first_head + i // per_head) * group + i % group
            _copy(query[token, query_head * kv.key_dim : (query_head + 1) * kv.key_dim], scratch.query[i])
        query_rows = _QueryRows(start, per_head, group)
        table = plan.tables[sequence]
        _attend_task(kv, first_head, stop_head, table, begin, end, query_rows, params, scratch)
        for i in range((stop_head - first_head) * per_head):
            token, query_head = row + i % per_head // group, (first_head + i // per_head) * group + i % group
            if partial >= 0:
                _reset(plan.partials[partial, query_head])
                _merge_state(plan.partials[partial, query_head], states[i], width)
            else:
                _normalize(states[i], query_head, params, out[token, query_head * width : (query_head + 1) * width])
        task = next_task(worker, phase, num_tasks)
    if len(plan.merges):
        return _merge_partials(worker, phase + 1, plan, params, kv, states[0], out)
    return phase + 1


@kernel
def _merge_partials(
    worker: Worker, phase: int, plan: AttentionPlan, params: AttentionParams, kv: PagedKV, state: Any, out: Any
) -> int:
    """Merges the partial results of rows that several tasks shared."""
    width = kv.value_dim
    heads = out.shape[1] // width
    num_tasks = len(plan.merges)
    task = claim(worker, phase, num_tasks)
    while task >= 0:
        row, first, count = plan.merges[task]
        for head in range(heads):
            _reset(state)
            for partial in range(first, first + count):
                _merge_state(state, plan.partials[partial, head], width)
            _normalize(state, head, params, out[row, head * width : (head + 1) * width])
        task = next_task(worker, phase, num_tasks)
    return phase + 1


@kernel
def _copy(source: Any, target: Any) -> None:
    for j in range(len(source)):
        target[j] = source[j]


@kernel
def _normalize(state: Any, head: int, params: AttentionParams, out: Any) -> None:
    """out [value_dim] = a row's weighted sum divided by the sum of its weights."""
    largest, share = state[len(state) - 2], state[len(state) - 1]
    factor = np.float32(1)
    if len(params.sinks):
        most = max(largest, params.sinks[head])
        factor = exp(largest - most)
        share = share * factor + exp(params.sinks[head] - most)
    factor = factor / share
    for j in range(len(out)):
        out[j] = from_float32(state[j] * factor, out)


@entry
def store_kv_layer(worker: Worker, kv: PagedKV, plan: AttentionPlan, keys: Any, values: Any) -> None:
    """Stores keys [T, heads, key_dim] and values [T, heads, value_dim] in the cache of a layer."""
    num_tasks = -(-len(keys) // LANES)
    task = claim(worker, 0, num_tasks)
    while task >= 0:
        for row in range(task * LANES, min(len(keys), (task + 1) * LANES)):
            for head in range(kv.heads):
                store_kv(kv, plan.slots[row], head, keys[row, head], values[row, head], plan.is_last[row])
        task = next_task(worker, 0, num_tasks)


@entry
def attend_layer(
    worker: Worker, kv: PagedKV, plan: AttentionPlan, params: AttentionParams, query: Any, out: Any,
    workspace: AttentionWorkspace,
) -> None:  # fmt: skip
    """`attend` over the cache of a layer."""
    attend(worker, 0, kv, plan, params, query, out, workspace)
