"""Attention over the pages of the cache where they lie.

Keys and values lie in panels (see `pages`), so that scores and sums of values are the same products as all others.
Chunks of 64 tokens, at fixed places of the sequence, go through the softmax one after the other (Milakov and
Gimelshein, 2018), and segments of 512 are added up. So a token's result is the same to the last bit however its
sequence was cut into steps, and however many threads shared it.

What a row has seen is its state: a weighted sum of values, then at the end the score that the weights were taken
against, and the sum of the weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbatch.engine.kernels.cpu.board import finish, take
from cbatch.engine.kernels.cpu.jit import entry, kernel
from cbatch.engine.kernels.cpu.numbers import exp, narrow, tanh, widen
from cbatch.engine.kernels.cpu.pages import SEGMENT
from cbatch.engine.kernels.cpu.softmax import CHUNK, weigh
from cbatch.engine.kernels.cpu.tile import COLUMNS, LANES, MAX_ROWS, prefetch, tile

_MINUS_INFINITY = np.float32(-np.inf)


@kernel
def store(pages: Any, layer: int, slot: int, head: int, key: Any, value: Any, is_last: bool) -> None:
    """Puts a token's key [key_dim] and value [value_dim] into the cache.

    The value's neighbour in its pair, if its token is still to come, becomes 0: it is multiplied with 0 until then,
    and what lies there may be no number.
    """
    keys, values = pages.keys[layer], pages.values[layer]
    pair = 1 if keys.itemsize == 4 else 2
    size = pages.block_size
    page, offset = slot // size * pages.heads + head, slot % size
    base = page * size * pages.key_dim + offset // LANES * LANES * pages.key_dim + offset % LANES * pair
    for i in range(pages.key_dim):
        keys[base + i // pair * LANES * pair + i % pair] = narrow(widen(key[i]), keys)
    base = page * size * pages.value_dim + offset // pair * LANES * pair + offset % pair
    clear = is_last and pair == 2 and offset % 2 == 0
    for i in range(pages.value_dim):
        at = base + i // LANES * LANES * size + i % LANES * pair
        values[at] = narrow(widen(value[i]), values)
        if clear:
            values[at + 1] = 0


@kernel
def _locate(pages: Any, layer: int, head: int, table: Any, token: int, stop: int, panels: Any) -> None:
    """Addresses of the keys and of the values of 64 tokens from `token`: panels [2, 4], of which some are past `stop`.

    Those get the address of the first, which holds numbers that nobody looks at.
    """
    keys, values, size = pages.keys[layer], pages.values[layer], pages.block_size
    for part in range(CHUNK // LANES):
        first = token + part * LANES
        if first < stop:
            block, offset = np.uint64(first) // np.uint64(size), np.uint64(first) % np.uint64(size)
            page = (np.int64(table[block]) * pages.heads + head) * size
            at = page + np.int64(offset)
            panels[0, part] = keys.ctypes.data + at * pages.key_dim * keys.itemsize
            panels[1, part] = values.ctypes.data + (page * pages.value_dim + np.int64(offset) * LANES) * values.itemsize
        else:
            panels[0, part], panels[1, part] = panels[0, 0], panels[1, 0]


@kernel
def _score(pages: Any, layer: int, query: int, rows: int, count: int, panels: Any, out: int) -> None:
    """out[:rows, 64] = query [rows, key_dim] times the keys of so many tokens; both are addresses."""
    keys = pages.keys[layer]
    pair = 1 if keys.itemsize == 4 else 2
    step, depth, width = LANES * pair * keys.itemsize, pages.key_dim // pair, pages.key_dim * keys.itemsize
    for left in range(0, count, COLUMNS):
        where = panels.ctypes.data + left // LANES * 8
        tile(pages.code, keys[0], rows, query, width, where, depth, step, depth, out + left * 4, CHUNK * 4, 0)


@kernel
def _add_values(
    pages: Any, layer: int, weights: int, rows: int, count: int, panels: Any, pairs: Any, out: int, ldo: int
) -> None:
    """out[:rows, value_dim] += weights [rows, 64] times the values of so many tokens; both are addresses."""
    values = pages.values[layer]
    pair = 1 if values.itemsize == 4 else 2
    step, depth, run = LANES * pair * values.itemsize, -(-count // pair), LANES // pair
    width, last = LANES * pages.block_size * values.itemsize, pages.value_dim // LANES - 1
    for panel in range(0, last + 1, 2):
        for part in range(CHUNK // LANES):
            pairs[part, 0] = panels[1, part] + panel * width
            pairs[part, 1] = pairs[part, 0] + (width if panel < last else 0)
        target = out + panel * LANES * 4
        where = pairs.ctypes.data
        tile(pages.code, values[0], rows, weights, CHUNK * values.itemsize, where, run, step, depth, target, ldo, 1)


@kernel
def _fetch(pages: Any, layer: int, head: int, table: Any, token: int, stop: int) -> None:
    """Asks for the keys and values of 64 tokens, which are needed next."""
    keys, values = pages.keys[layer], pages.values[layer]
    size = pages.block_size
    for first in range(token, min(token + CHUNK, stop), size):
        page = (table[first // size] * pages.heads + head) * size
        for at in range(0, min(size, CHUNK) * pages.key_dim * keys.itemsize, 64):
            prefetch(keys.ctypes.data + page * pages.key_dim * keys.itemsize + at)
        for at in range(0, min(size, CHUNK) * pages.value_dim * values.itemsize, 64):
            prefetch(values.ctypes.data + page * pages.value_dim * values.itemsize + at)


@kernel
def _weigh(scores: Any, first: int, stop: int, rule: Any, weights: Any, state: Any) -> None:
    """Turns a row of 64 products into weights, of which those from `first` up to `stop` count; rescales its state."""
    width = len(state) - 2
    scale, cap, before = np.float32(rule.scale), np.float32(rule.softcap), state[width]
    if cap > 0:
        for j in range(CHUNK):
            scores[j] = cap * tanh(scores[j] * scale / cap)
        scale = np.float32(1)
    most, added = weigh(weights[0], scores.ctypes.data, weights.ctypes.data, scale, first, stop, before)
    if before != most:
        state[width] = most
        if before > _MINUS_INFINITY:
            shrink = exp(before - most)
            for j in range(width):
                state[j] *= shrink
            state[width + 1] *= shrink
    state[width + 1] += added


@kernel
def _attend_chunk(
    pages: Any,
    layer: int,
    token: int,
    start: int,
    rows: int,
    group: int,
    rule: Any,
    thread: int,
    work: Any,
    states: Any,
) -> None:
    """Lets all rows of a piece see the 64 tokens from `token`. `start`: place of the first row's token."""
    query, panels = work.query[thread], work.panels[thread]
    scores, weights = work.scores[thread], work.weights[thread]
    for top in range(0, rows, MAX_ROWS):
        tile_rows = min(MAX_ROWS, rows - top)
        count = min(CHUNK, start + (top + tile_rows - 1) // group + 1 - token)
        if count <= 0:
            continue
        left = query.ctypes.data + top * query.shape[1] * query.itemsize
        _score(pages, layer, left, tile_rows, count, panels, scores.ctypes.data)
        for i in range(tile_rows):
            place = start + (top + i) // group
            first = place - rule.window + 1 - token if rule.window > 0 else 0
            _weigh(scores[i], first, place + 1 - token, rule, weights[i], states[top + i])
        ldo = states.shape[1] * 4
        target = states.ctypes.data + top * ldo
        _add_values(pages, layer, weights.ctypes.data, tile_rows, count, panels, work.pairs[thread], target, ldo)


@kernel
def _clear(state: Any) -> None:
    for j in range(len(state)):
        state[j] = np.float32(0)
    state[len(state) - 2] = _MINUS_INFINITY


@kernel
def _merge(state: Any, later: Any, width: int) -> None:
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
def _attend_piece(
    pages: Any, layer: int, head: int, table: Any, begin: int, end: int, start: int, rows: int, group: int, rule: Any,
    thread: int, work: Any,
) -> None:  # fmt: skip
    """Lets all rows of a piece see the tokens from `begin` up to `end`, as far as each may."""
    lowest = max(0, start - rule.window + 1) // CHUNK * CHUNK if rule.window > 0 else 0
    all_before = work.states[thread, 0]
    for i in range(rows):  # a part that lies before the window sees nothing
        _clear(all_before[i])
    for segment in range(max(begin, lowest // SEGMENT * SEGMENT), end, SEGMENT):
        is_first, stop = segment <= max(begin, lowest), min(end, segment + SEGMENT)
        states = all_before if is_first else work.states[thread, 1]
        for i in range(0 if is_first else rows):
            _clear(states[i])
        for token in range(max(segment, lowest), stop, CHUNK):
            _fetch(pages, layer, head, table, token + CHUNK, end)
            _locate(pages, layer, head, table, token, stop, work.panels[thread])
            _attend_chunk(pages, layer, token, start, rows, group, rule, thread, work, states)
        for i in range(0 if is_first else rows):
            _merge(all_before[i], states[i], pages.value_dim)


@kernel
def attend(
    board: Any, phase: int, thread: int, pages: Any, layer: int, slices: Any, rule: Any, query: Any, out: Any, work: Any
) -> int:
    """out [T, query heads * value_dim] = attention with query [T, query heads * key_dim], both in the cache's type."""
    group, width = query.shape[1] // pages.key_dim // pages.heads, pages.value_dim
    count, states = len(slices.pieces) * pages.heads, work.states[thread, 0]
    piece = take(board, phase, count)
    while piece >= 0:
        head = piece % pages.heads
        sequence, first, tokens, begin, end, part = slices.pieces[piece // pages.heads]
        row, start = slices.firsts[sequence] + first, slices.starts[sequence] + first
        for i in range(tokens * group):
            left = (head * group + i % group) * pages.key_dim
            _copy(query[row + i // group, left : left + pages.key_dim], work.query[thread, i])
        table = slices.tables[sequence]
        _attend_piece(pages, layer, head, table, begin, end, start, tokens * group, group, rule, thread, work)
        for i in range(tokens * group):
            place = head * group + i % group
            if part >= 0:
                _clear(slices.parts[part, place])
                _merge(slices.parts[part, place], states[i], width)
            else:
                _finish_row(states[i], place, rule, out[row + i // group, place * width : (place + 1) * width])
        finish(board, phase, count)
        piece = take(board, phase, count)
    if len(slices.merges):
        return _merge_parts(board, phase + 1, slices, rule, width, states[0], out)
    return phase + 1


@kernel
def _merge_parts(board: Any, phase: int, slices: Any, rule: Any, width: int, state: Any, out: Any) -> int:
    """Brings together the parts of rows that were seen by several pieces."""
    heads = slices.parts.shape[1]
    count = len(slices.merges)
    piece = take(board, phase, count)
    while piece >= 0:
        row, first, parts = slices.merges[piece]
        for head in range(heads):
            _clear(state)
            for part in range(first, first + parts):
                _merge(state, slices.parts[part, head], width)
            _finish_row(state, head, rule, out[row, head * width : (head + 1) * width])
        finish(board, phase, count)
        piece = take(board, phase, count)
    return phase + 1


@kernel
def _copy(source: Any, target: Any) -> None:
    for j in range(len(source)):
        target[j] = source[j]


@kernel
def _finish_row(state: Any, head: int, rule: Any, out: Any) -> None:
    """Divides a row's weighted sum by the sum of its weights."""
    largest, share = state[len(state) - 2], state[len(state) - 1]
    factor = np.float32(1)
    if len(rule.sinks):
        most = max(largest, rule.sinks[head])
        factor = exp(largest - most)
        share = share * factor + exp(rule.sinks[head] - most)
    factor = factor / share
    for j in range(len(out)):
        out[j] = narrow(state[j] * factor, out)


@entry
def store_layer(board: Any, thread: int, pages: Any, slices: Any, keys: Any, values: Any) -> None:
    """Puts keys [T, heads, key_dim] and values [T, heads, value_dim] into the cache of a layer that stands alone."""
    pieces = -(-len(keys) // LANES)
    piece = take(board, 0, pieces)
    while piece >= 0:
        for row in range(piece * LANES, min(len(keys), (piece + 1) * LANES)):
            for head in range(pages.heads):
                store(pages, 0, slices.slots[row], head, keys[row, head], values[row, head], slices.lasts[row])
        finish(board, 0, pieces)
        piece = take(board, 0, pieces)


@entry
def attend_layer(board: Any, thread: int, pages: Any, slices: Any, rule: Any, query: Any, out: Any, work: Any) -> None:
    """`attend` for a layer that stands alone."""
    attend(board, 0, thread, pages, 0, slices, rule, query, out, work)
