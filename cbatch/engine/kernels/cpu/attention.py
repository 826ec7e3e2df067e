"""Attention over the pages of the cache where they lie.

Keys and values lie in panels (see `kv`), so that scores and sums of values are the same products as all others.
Chunks of 64 tokens, at fixed places of the sequence, go through the softmax one after the other (Milakov and
Gimelshein, 2018), and segments of 512 are added up. So a token's result is the same to the last bit however its
sequence was cut into steps, and however many threads shared it.

What a row has seen is its state: a weighted sum of values, then at the end the score that the weights were taken
against, and the sum of the weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbatch.engine.kernels.cpu.fast_math import exp, from_float32, tanh, to_float32
from cbatch.engine.kernels.cpu.jit import entry, kernel
from cbatch.engine.kernels.cpu.microkernel import COLUMNS, LANES, MAX_ROWS, multiply_tile, prefetch
from cbatch.engine.kernels.cpu.paged_kv import SPLIT
from cbatch.engine.kernels.cpu.softmax import TILE_TOKENS, softmax_weights
from cbatch.engine.kernels.cpu.work_queue import claim, complete

_MINUS_INFINITY = np.float32(-np.inf)


@kernel
def store_kv(kv: Any, layer: int, slot: int, head: int, key: Any, value: Any, is_last: bool) -> None:
    """Puts a token's key [key_dim] and value [value_dim] into the cache.

    The value's neighbour in its pair, if its token is still to come, becomes 0: it is multiplied with 0 until then,
    and what lies there may be no number.
    """
    keys, values = kv.keys[layer], kv.values[layer]
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
def _panel_addresses(kv: Any, layer: int, head: int, table: Any, token: int, stop: int, panels: Any) -> None:
    """Addresses of the keys and of the values of 64 tokens from `token`: panels [2, 4], of which some are past `stop`.

    Those get the address of the first, which holds numbers that nobody looks at.
    """
    keys, values, size = kv.keys[layer], kv.values[layer], kv.block_size
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
def _compute_scores(kv: Any, layer: int, query: int, rows: int, count: int, panels: Any, out: int) -> None:
    """out[:rows, 64] = query [rows, key_dim] times the keys of so many tokens; both are addresses."""
    keys = kv.keys[layer]
    pair = 1 if keys.itemsize == 4 else 2
    step, depth, width = LANES * pair * keys.itemsize, kv.key_dim // pair, kv.key_dim * keys.itemsize
    for left in range(0, count, COLUMNS):
        where = panels.ctypes.data + left // LANES * 8
        multiply_tile(
            kv.code, keys[0], rows, query, width, where, depth, step, depth, out + left * 4, TILE_TOKENS * 4, 0
        )


@kernel
def _accumulate_values(
    kv: Any, layer: int, weights: int, rows: int, count: int, panels: Any, pairs: Any, out: int, ldo: int
) -> None:
    """out[:rows, value_dim] += weights [rows, 64] times the values of so many tokens; both are addresses."""
    values = kv.values[layer]
    pair = 1 if values.itemsize == 4 else 2
    step, depth, run = LANES * pair * values.itemsize, -(-count // pair), LANES // pair
    width, last = LANES * kv.block_size * values.itemsize, kv.value_dim // LANES - 1
    for panel in range(0, last + 1, 2):
        for part in range(TILE_TOKENS // LANES):
            pairs[part, 0] = panels[1, part] + panel * width
            pairs[part, 1] = pairs[part, 0] + (width if panel < last else 0)
        target = out + panel * LANES * 4
        where = pairs.ctypes.data
        multiply_tile(
            kv.code, values[0], rows, weights, TILE_TOKENS * values.itemsize, where, run, step, depth, target, ldo, 1
        )


@kernel
def _prefetch_tile(kv: Any, layer: int, head: int, table: Any, token: int, stop: int) -> None:
    """Asks for the keys and values of 64 tokens, which are needed next."""
    keys, values = kv.keys[layer], kv.values[layer]
    size = kv.block_size
    for first in range(token, min(token + TILE_TOKENS, stop), size):
        page = (table[first // size] * kv.heads + head) * size
        for at in range(0, min(size, TILE_TOKENS) * kv.key_dim * keys.itemsize, 64):
            prefetch(keys.ctypes.data + page * kv.key_dim * keys.itemsize + at)
        for at in range(0, min(size, TILE_TOKENS) * kv.value_dim * values.itemsize, 64):
            prefetch(values.ctypes.data + page * kv.value_dim * values.itemsize + at)


@kernel
def _online_softmax(scores: Any, first: int, stop: int, params: Any, weights: Any, state: Any) -> None:
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
def _attend_tile(
    kv: Any,
    layer: int,
    token: int,
    start: int,
    rows: int,
    group: int,
    params: Any,
    thread: int,
    workspace: Any,
    states: Any,
) -> None:
    """Lets all rows of a piece see the 64 tokens from `token`. `start`: place of the first row's token."""
    query, panels = workspace.query[thread], workspace.panels[thread]
    scores, weights = workspace.scores[thread], workspace.weights[thread]
    for top in range(0, rows, MAX_ROWS):
        tile_rows = min(MAX_ROWS, rows - top)
        count = min(TILE_TOKENS, start + (top + tile_rows - 1) // group + 1 - token)
        if count <= 0:
            continue
        left = query.ctypes.data + top * query.shape[1] * query.itemsize
        _compute_scores(kv, layer, left, tile_rows, count, panels, scores.ctypes.data)
        for i in range(tile_rows):
            place = start + (top + i) // group
            first = place - params.window + 1 - token if params.window > 0 else 0
            _online_softmax(scores[i], first, place + 1 - token, params, weights[i], states[top + i])
        ldo = states.shape[1] * 4
        target = states.ctypes.data + top * ldo
        _accumulate_values(
            kv, layer, weights.ctypes.data, tile_rows, count, panels, workspace.pairs[thread], target, ldo
        )


@kernel
def _reset(state: Any) -> None:
    for j in range(len(state)):
        state[j] = np.float32(0)
    state[len(state) - 2] = _MINUS_INFINITY


@kernel
def _merge_state(state: Any, later: Any, width: int) -> None:
    """Adds the state of a later segment, of which `width` numbers are the sum."""
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
    kv: Any, layer: int, head: int, table: Any, begin: int, end: int, start: int, rows: int, group: int, params: Any,
    thread: int, workspace: Any,
) -> None:  # fmt: skip
    """Lets all rows of a piece see the tokens from `begin` up to `end`, as far as each may."""
    lowest = max(0, start - params.window + 1) // TILE_TOKENS * TILE_TOKENS if params.window > 0 else 0
    all_before = workspace.states[thread, 0]
    for i in range(rows):  # a part that lies before the window sees nothing
        _reset(all_before[i])
    for split in range(max(begin, lowest // SPLIT * SPLIT), end, SPLIT):
        is_first, stop = split <= max(begin, lowest), min(end, split + SPLIT)
        states = all_before if is_first else workspace.states[thread, 1]
        for i in range(0 if is_first else rows):
            _reset(states[i])
        for token in range(max(split, lowest), stop, TILE_TOKENS):
            _prefetch_tile(kv, layer, head, table, token + TILE_TOKENS, end)
            _panel_addresses(kv, layer, head, table, token, stop, workspace.panels[thread])
            _attend_tile(kv, layer, token, start, rows, group, params, thread, workspace, states)
        for i in range(0 if is_first else rows):
            _merge_state(all_before[i], states[i], kv.value_dim)


@kernel
def attend(
    queue: Any,
    phase: int,
    thread: int,
    kv: Any,
    layer: int,
    plan: Any,
    params: Any,
    query: Any,
    out: Any,
    workspace: Any,
) -> int:
    """out [T, query heads * value_dim] = attention with query [T, query heads * key_dim], both in the cache's type."""
    group, width = query.shape[1] // kv.key_dim // kv.heads, kv.value_dim
    count, states = len(plan.tasks) * kv.heads, workspace.states[thread, 0]
    task = claim(queue, phase, count)
    while task >= 0:
        head = task % kv.heads
        sequence, first, tokens, begin, end, part = plan.tasks[task // kv.heads]
        row, start = plan.first_rows[sequence] + first, plan.starts[sequence] + first
        for i in range(tokens * group):
            left = (head * group + i % group) * kv.key_dim
            _copy(query[row + i // group, left : left + kv.key_dim], workspace.query[thread, i])
        table = plan.tables[sequence]
        _attend_task(kv, layer, head, table, begin, end, start, tokens * group, group, params, thread, workspace)
        for i in range(tokens * group):
            place = head * group + i % group
            if part >= 0:
                _reset(plan.partials[part, place])
                _merge_state(plan.partials[part, place], states[i], width)
            else:
                _normalize(states[i], place, params, out[row + i // group, place * width : (place + 1) * width])
        complete(queue, phase, count)
        task = claim(queue, phase, count)
    if len(plan.merges):
        return _merge_partials(queue, phase + 1, plan, params, width, states[0], out)
    return phase + 1


@kernel
def _merge_partials(queue: Any, phase: int, plan: Any, params: Any, width: int, state: Any, out: Any) -> int:
    """Brings together the parts of rows that were seen by several pieces."""
    heads = plan.partials.shape[1]
    count = len(plan.merges)
    task = claim(queue, phase, count)
    while task >= 0:
        row, first, partials = plan.merges[task]
        for head in range(heads):
            _reset(state)
            for part in range(first, first + partials):
                _merge_state(state, plan.partials[part, head], width)
            _normalize(state, head, params, out[row, head * width : (head + 1) * width])
        complete(queue, phase, count)
        task = claim(queue, phase, count)
    return phase + 1


@kernel
def _copy(source: Any, target: Any) -> None:
    for j in range(len(source)):
        target[j] = source[j]


@kernel
def _normalize(state: Any, head: int, params: Any, out: Any) -> None:
    """Divides a row's weighted sum by the sum of its weights."""
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
def store_kv_layer(queue: Any, thread: int, kv: Any, plan: Any, keys: Any, values: Any) -> None:
    """Puts keys [T, heads, key_dim] and values [T, heads, value_dim] into the cache of a layer that stands alone."""
    tasks = -(-len(keys) // LANES)
    task = claim(queue, 0, tasks)
    while task >= 0:
        for row in range(task * LANES, min(len(keys), (task + 1) * LANES)):
            for head in range(kv.heads):
                store_kv(kv, 0, plan.slots[row], head, keys[row, head], values[row, head], plan.is_last[row])
        complete(queue, 0, tasks)
        task = claim(queue, 0, tasks)


@entry
def attend_layer(
    queue: Any, thread: int, kv: Any, plan: Any, params: Any, query: Any, out: Any, workspace: Any
) -> None:
    """`attend` for a layer that stands alone."""
    attend(queue, 0, thread, kv, 0, plan, params, query, out, workspace)
