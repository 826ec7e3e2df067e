"""Attention over the paged cache, without copying keys or values.

Keys and values lie in panels (see `paged_kv`), so scores and weighted sums use the same microkernel as all products; a
cache of bytes has its own (see `byte_tile`). While keys of a tile are multiplied, its values are prefetched, and
meanwhile with these the keys of the next tile, which may be that of the next task: a decoding request reads each key
once, and would wait for memory otherwise. Functions that run for each tile are inlined, because their many arguments
would take as long to pass as a tile of few rows takes to compute.

Tiles of 128 tokens, at fixed positions of the sequence, go through the online softmax one after the other (see
`softmax`), and splits of 512 tokens are merged. So a token's result has the same bits however its sequence was cut into
steps, and however many threads shared it.

A prompt's query tokens, times the heads that share keys, are multiplied with a tile as a block of rows. Only rows whose
last token lies in the tile, or whose window begins in it, need a mask.

The state of a row is what it has seen so far (see `softmax_row`): the weighted sum of values in its first `value_dim`
places, the score that the weights are relative to in place -32, and from place -16 on sums of weights, which are added
up at the end of a split.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch.kernels.cpu.emit import LINE
from cbatch.kernels.cpu.fast_math import copy_row, exp, from_float32, tanh
from cbatch.kernels.cpu.jit import entry, inlined, kernel
from cbatch.kernels.cpu.kv_store import copy_vector
from cbatch.kernels.cpu.matmul.byte_tile import GROUP, HEADER_BYTES, multiply_byte_tile, round_row
from cbatch.kernels.cpu.matmul.microkernel import COLUMNS, LANES, MAX_ROWS, Panels, Rows, multiply_tile, prefetch
from cbatch.kernels.cpu.paged_kv import (
    BLOCK_ROWS,
    REFERENCE,
    SPLIT,
    WEIGHT_SUM,
    AttentionParams,
    AttentionPlan,
    AttentionWorkspace,
    PagedKV,
)
from cbatch.kernels.cpu.softmax import LOG2_E, TILE_TOKENS, softmax_row
from cbatch.kernels.cpu.work_queue import Worker, claimed, likely_task
from cbatch.runtime.kv_cache import U8_SCALE_BYTES

_TASKS_PER_THREAD = 8
"""Enough that no thread waits long for the others at the end of a layer's attention."""

_MINUS_INFINITY, _LN2 = np.float32(-np.inf), np.float32(1 / LOG2_E)


class _Tile(NamedTuple):
    """The tokens of a tile, from `token` up to `stop` at most, of one head; none if `stop` is 0.

    table: the blocks of the sequence
    """

    table: NDArray[np.int32]
    head: int
    token: int
    stop: int


@inlined
def _list_panels(kv: PagedKV, tile: _Tile, panels: Any) -> None:
    """Addresses in a tile of the panels of keys and of values, and of the values of 16 tokens, which lie together:
    panels [3, TILE_TOKENS / 16].

    Panels past its end get the address of the first, which is safe to read and whose products are not used.
    """
    table, head, token, stop = tile
    keys, values, size, itemsize = kv.keys.ctypes.data, kv.values.ctypes.data, kv.block_size, kv.itemsize
    for part in range(TILE_TOKENS // LANES):
        first = token + part * LANES
        if first < stop:
            block, offset = np.uint64(first) // np.uint64(size), np.uint64(first) % np.uint64(size)
            page = (np.int64(table[block]) * kv.heads + head) * size
            at = page + np.int64(offset)
            if itemsize == 1:
                panels[0, part] = keys + at * (kv.key_dim + U8_SCALE_BYTES)
                panels[1, part] = panels[2, part] = values + at * (kv.value_dim + U8_SCALE_BYTES)
                prefetch(panels[0, part] + LANES * kv.key_dim)  # scales
                prefetch(panels[1, part] + LANES * kv.value_dim)
            else:
                panels[0, part] = keys + at * kv.key_dim * itemsize
                panels[1, part] = values + (page * kv.value_dim + np.int64(offset) * LANES) * itemsize
                panels[2, part] = values + at * kv.value_dim * itemsize
        else:
            for place in range(3):
                panels[place, part] = panels[place, 0]


@kernel
def _copy_scales(kv: PagedKV, packed: Any, panels: Any, scales: Any) -> None:
    """Scales [2, TILE_TOKENS] of the keys and the values of a tile of a cache of bytes."""
    if packed is None:
        return
    target = np.int64(scales.ctypes.data)
    for part in range(TILE_TOKENS // LANES):
        copy_vector(panels[0, part] + LANES * kv.key_dim, target + part * LINE)
        copy_vector(panels[1, part] + LANES * kv.value_dim, target + (TILE_TOKENS // LANES + part) * LINE)


@inlined
def _share_prefetching(run: Any, one: int, other: int, top: int, rows: int) -> None:
    """Where a pass prefetches from: with many rows the first one and the second take a place each."""
    if top == 0:
        run[2], run[3] = one, other if rows <= MAX_ROWS else one
    elif top == MAX_ROWS:
        run[2], run[3] = other, other


@inlined
def _compute_scores(
    kv: PagedKV, packed: Any, first: int, rows: int, low: int, high: int, now: int, scratch: AttentionWorkspace
) -> None:
    """scores [rows, TILE_TOKENS] = queries [rows, key_dim] times the keys of a part of a tile.

    first:     of these rows in the task
    low, high: the tokens of the tile that the rows see: from `low`, a multiple of 32
    now:       which of the panels are those of the tile
    """
    panels, runs, query = scratch.panels[now], scratch.runs, scratch.query
    rounded, headers, itemsize = scratch.rounded_query, scratch.query_headers, scratch.stored.itemsize
    at_once, numbers = (kv.key_dim, 4 // itemsize) if packed is None else (GROUP, 4)
    for left in range(low, high, COLUMNS):
        part = left // LANES
        for i in range(2):
            runs[0, i] = panels[0, part + i]
        for group in range(0, kv.key_dim, at_once):
            steps, coming = min(at_once, kv.key_dim - group) // numbers, group * LANES
            columns = Panels(np.int64(runs.ctypes.data), steps, LINE, steps, LINE)
            for top in range(0, rows, MAX_ROWS):
                row, count = first + top, min(MAX_ROWS, rows - top)
                _share_prefetching(runs[0], panels[2, part] + coming, panels[2, part + 1] + coming, top, rows)
                out = Rows(scratch.scores.ctypes.data + (top * TILE_TOKENS + left) * 4, TILE_TOKENS * 4)
                if packed is None:
                    width = query.shape[1] * query.itemsize
                    of_query = Rows(query.ctypes.data + row * width, width)
                    multiply_tile(kv.microkernel, of_query, columns, out, count, 0)
                else:
                    width, header = rounded.shape[1] * 2, headers.shape[1] * HEADER_BYTES
                    of_query = Rows(rounded.ctypes.data + row * width + group * 2, width)
                    of_headers = Rows(headers.ctypes.data + row * header + group // GROUP * HEADER_BYTES, header)
                    multiply_byte_tile(kv.microkernel, of_query, of_headers, columns, out, count, 1 if group else 0)
            for i in range(2):
                runs[0, i] += steps * LINE


@inlined
def _accumulate_values(
    kv: PagedKV, packed: Any, rows: int, low: int, high: int, now: int, scratch: AttentionWorkspace, out: Rows
) -> None:
    """out [rows, value_dim] += weights [rows, TILE_TOKENS] times the values of a part of a tile."""
    weights, runs, itemsize = scratch.weights, scratch.runs, kv.itemsize
    rounded, headers = scratch.rounded_weights, scratch.weight_headers
    pair = 4 // itemsize
    run, depth = LANES // pair, -(-(high - low) // pair)
    if packed is not None:
        depth = -(-depth // run) * run
    width, half = LANES * (kv.block_size if packed is None else LANES) * itemsize, LANES * LANES * itemsize
    columns = Panels(np.int64(runs.ctypes.data) + low // LANES * 32, run, LINE, depth, LINE)
    for i in range(TILE_TOKENS // LANES):
        runs[i, 0] = scratch.panels[now, 1, i]
        runs[i, 1] = runs[i, 0] + width
    for panel in range(0, kv.value_dim // LANES, 2):
        is_alone = panel == kv.value_dim // LANES - 1
        if is_alone:
            for i in range(TILE_TOKENS // LANES):
                runs[i, 1] = runs[i, 0]
        for top in range(0, rows, MAX_ROWS):
            for i in range(TILE_TOKENS // LANES if top <= MAX_ROWS else 0):
                following = scratch.panels[1 - now, 0, i] + panel * half
                _share_prefetching(runs[i], following, following if is_alone else following + half, top, rows)
            count = min(MAX_ROWS, rows - top)
            target = Rows(out.address + top * out.stride + panel * LANES * 4, out.stride)
            if packed is not None:
                left = Rows(rounded.ctypes.data + (top * TILE_TOKENS + low) * 2, TILE_TOKENS * 2)
                of_headers = Rows(headers.ctypes.data + top * HEADER_BYTES, HEADER_BYTES)
                multiply_byte_tile(kv.microkernel, left, of_headers, columns, target, count, 1)
            else:
                size = weights.itemsize
                left = Rows(weights.ctypes.data + (top * TILE_TOKENS + low) * size, TILE_TOKENS * size)
                multiply_tile(kv.microkernel, left, columns, target, count, 1)
        for i in range(TILE_TOKENS // LANES):
            runs[i, 0] += 2 * width
            runs[i, 1] += 2 * width


@kernel
def _cap_scores(scores: Any, rows: int, params: AttentionParams, scales: Any) -> None:
    """Replaces products [rows, TILE_TOKENS] by softcap * tanh(product * scale / softcap). scales: of each token"""
    scale, cap = np.float32(params.scale), np.float32(params.softcap)
    for i in range(rows):
        row = scores[i]
        for j in range(TILE_TOKENS):
            row[j] = cap * tanh(row[j] * scales[j] * scale / cap)


@inlined
def _weigh(
    packed: Any, token: int, seen: Any, group: int, top: int, rows: int, params: AttentionParams,
    scratch: AttentionWorkspace, states: Rows, width: int,
) -> None:  # fmt: skip
    """Turns the scores of the rows from `top` on into weights, and rescales their states if need be."""
    scores, weights = scratch.scores, scratch.weights
    scale, key_scales, value_scales = np.float32(LOG2_E), scratch.scales[2], scratch.scales[1]
    if params.softcap > 0:
        _cap_scores(scores, rows, params, key_scales if packed is None else scratch.scales[0])
    else:
        key_scales = scratch.scales[0]
        scale = np.float32(params.scale * LOG2_E)
    targets, row_bytes = np.int64(weights.ctypes.data), TILE_TOKENS * weights.itemsize
    if packed is not None:
        targets, row_bytes = np.int64(scratch.rounded_weights.ctypes.data), TILE_TOKENS * 2
    headers = np.int64(scratch.weight_headers.ctypes.data)
    least, last_position = seen[1, top // group], seen[0, (top + rows - 1) // group]
    is_whole = least >= token + TILE_TOKENS and first_seen(last_position, params) <= token
    for i in range(rows):
        source = np.int64(scores.ctypes.data) + i * TILE_TOKENS * 4
        target = targets + i * row_bytes
        scales = np.int64(key_scales.ctypes.data), np.int64(value_scales.ctypes.data), headers + i * HEADER_BYTES
        state = states.address + i * states.stride
        if not is_whole:
            position, end = seen[0, (top + i) // group], seen[1, (top + i) // group]
            first, stop = first_seen(position, params) - token, end - token
            if first > 0 or stop < TILE_TOKENS:
                if packed is None:
                    softmax_row(weights[0, 0], source, target, state, width, scale, None, (first, stop))
                else:
                    softmax_row(weights[0, 0], source, target, state, width, scale, scales, (first, stop))
                continue
        if packed is None:
            softmax_row(weights[0, 0], source, target, state, width, scale, None, None)
        else:
            softmax_row(weights[0, 0], source, target, state, width, scale, scales, None)


@kernel
def first_seen(position: int, params: AttentionParams) -> int:
    """The first token that a token at a position sees."""
    if params.chunk > 0:
        return position // params.chunk * params.chunk
    return max(0, position - params.window + 1) if params.window > 0 else 0


@inlined
def _attend_tile(
    kv: PagedKV, token: int, seen: Any, group: int, begin: int, params: AttentionParams, now: int,
    scratch: AttentionWorkspace, states: Any,
) -> None:  # fmt: skip
    """Lets the rows of a head see the tile from `token`.

    seen:  see `AttentionWorkspace`, of the tokens of a task; neither row decreases
    group: rows of each token that share the keys of a head
    begin: the first of these rows in the task
    now:   which of the panels are those of the tile
    """
    num_rows, state_stride = seen.shape[1] * group, states.shape[1] * 4
    for top in range(0, num_rows, BLOCK_ROWS):
        rows = min(BLOCK_ROWS, num_rows - top)
        low = max(0, first_seen(seen[0, top // group], params) - token) // COLUMNS * COLUMNS
        high = min(TILE_TOKENS, seen[1, (top + rows - 1) // group] - token)
        if high <= low:
            continue
        target = Rows(states.ctypes.data + (begin + top) * state_stride, state_stride)
        _compute_scores(kv, kv.packed, begin + top, rows, low, high, now, scratch)
        width = states.shape[1] - 2 * LANES
        _weigh(kv.packed, token, seen, group, top, rows, params, scratch, target, width)
        _accumulate_values(kv, kv.packed, rows, low, high, now, scratch, target)


@kernel
def _reset(state: Any) -> None:
    for j in range(len(state)):
        state[j] = np.float32(0)
    state[len(state) - REFERENCE] = _MINUS_INFINITY


@kernel
def _add_up_weights(state: Any) -> None:
    """Adds the sums of weights of a row into the first of them."""
    total = np.float32(0)
    for j in range(len(state) - WEIGHT_SUM, len(state)):
        total += state[j]
        state[j] = np.float32(0)
    state[len(state) - WEIGHT_SUM] = total


@kernel
def _merge_state(state: Any, later: Any) -> None:
    """Adds the state of a later split."""
    width = len(state) - REFERENCE
    before, largest = state[width], later[width]
    total, added = len(state) - WEIGHT_SUM, later[len(later) - WEIGHT_SUM]
    if largest == _MINUS_INFINITY and added == 0:
        return
    most = max(before, largest)
    keep = exp((before - most) * _LN2) if before > _MINUS_INFINITY else np.float32(0)
    share = exp((largest - most) * _LN2) if largest > _MINUS_INFINITY else np.float32(1)
    for j in range(width):
        state[j] = state[j] * keep + later[j] * share
    state[width] = most
    state[total] = state[total] * keep + added * share


@inlined
def _attend_task(
    kv: PagedKV, task: Any, table: Any, upcoming: _Tile, seen: Any, group: int, params: AttentionParams,
    scratch: AttentionWorkspace,
) -> None:  # fmt: skip
    """Lets all rows of a task see its tokens, as far as each may. upcoming: what is read after the task"""
    first_head, stop_head, _, _, _, begin, end, _ = task
    start, per_head = seen[0, 0], seen.shape[1] * group
    rows = (stop_head - first_head) * per_head
    lowest = first_seen(start, params) // TILE_TOKENS * TILE_TOKENS
    all_before = scratch.states[0]
    for i in range(rows):  # also for a task whose tokens are all before the window: it sees nothing
        _reset(all_before[i])
    now = 0
    if max(begin, lowest) < end:
        _list_panels(kv, _Tile(table, first_head, max(begin, lowest), end), scratch.panels[now])
    for split in range(max(begin, lowest // SPLIT * SPLIT), end, SPLIT):
        is_first, stop = split <= max(begin, lowest), min(end, split + SPLIT)
        states = all_before if is_first else scratch.states[1]
        for i in range(0 if is_first else rows):
            _reset(states[i])
        for token in range(max(split, lowest), stop, TILE_TOKENS):
            for head in range(first_head, stop_head):
                following = upcoming
                if head + 1 < stop_head:
                    following = _Tile(table, head + 1, token, end)
                elif token + TILE_TOKENS < end:
                    following = _Tile(table, first_head, token + TILE_TOKENS, end)
                _copy_scales(kv, kv.packed, scratch.panels[now], scratch.scales)
                if following.stop > 0:
                    _list_panels(kv, following, scratch.panels[1 - now])
                else:
                    for i in range(TILE_TOKENS // LANES):
                        scratch.panels[1 - now, 0, i] = scratch.panels[now, 0, i]
                first_row = (head - first_head) * per_head
                _attend_tile(kv, token, seen, group, first_row, params, now, scratch, states)
                now = 1 - now
        for i in range(rows):
            _add_up_weights(states[i])
            if not is_first:
                _merge_state(all_before[i], states[i])


@kernel
def _workspace_of_thread(workspace: AttentionWorkspace, index: int) -> AttentionWorkspace:
    return AttentionWorkspace(
        workspace.panels[index], workspace.runs[index], workspace.seen[index], workspace.query[index],
        workspace.scores[index], workspace.weights[index], workspace.states[index], workspace.stored[index],
        workspace.scales[index], workspace.rounded_query[index], workspace.rounded_weights[index],
        workspace.query_headers[index], workspace.weight_headers[index],
    )  # fmt: skip


@kernel
def _heads_of_a_task(kv: PagedKV, plan: AttentionPlan, group: int, workspace: AttentionWorkspace) -> int:
    """How many heads of the cache a task sees. Several, if every sequence has one token and there are many of them.

    The heads of a block lie side by side: memory is read faster if they are read in turn.
    """
    if len(plan.slots) > len(plan.starts):
        return 1
    enough = len(plan.tasks) * kv.heads // (_TASKS_PER_THREAD * len(workspace.query))
    return max(1, min(kv.heads, len(workspace.query[0]) // (group * plan.most_tokens), enough))


@kernel
def _task_of(kv: PagedKV, plan: AttentionPlan, heads: int, number: int) -> Any:
    """Rows of one sequence or a group of them, and the heads and tokens of the cache that they see: of both the first,
    and the one after the last. The rows of one head come after those of the other.

    heads: of a task

    Returns the heads, the sequence whose blocks are read, its first query token, their number, the tokens of the cache,
    and the first of the sequences that decode behind the same blocks, -1 if there is only one sequence.
    """
    parts = -(-kv.heads // heads)
    first_head = number % parts * heads
    sequence, first, tokens, begin, end, member = plan.tasks[number // parts]
    return first_head, min(kv.heads, first_head + heads), sequence, first, tokens, begin, end, member


@inlined
def _first_tile(kv: PagedKV, plan: AttentionPlan, heads: int, number: int) -> _Tile:
    """The tile that a task reads first, windows aside; an empty one for task -1."""
    if number < 0:
        return _Tile(plan.tables[0], 0, 0, 0)
    first_head, _, sequence, _, _, begin, end, _ = _task_of(kv, plan, heads, number)
    return _Tile(plan.tables[sequence], first_head, begin, end)


@kernel
def attend(
    worker: Worker, phase: int, kv: PagedKV, plan: AttentionPlan, params: AttentionParams, query: Any, out: Any,
    workspace: AttentionWorkspace,
) -> int:  # fmt: skip
    """out [T, query heads * value_dim] = attention with query [T, query heads * key_dim]. Returns the next phase.

    query, out: in the type that goes into products
    """
    group, width = query.shape[1] // kv.key_dim // kv.heads, kv.value_dim
    scratch = _workspace_of_thread(workspace, worker.thread)
    heads = _heads_of_a_task(kv, plan, group, workspace)
    num_tasks, states = len(plan.tasks) * -(-kv.heads // heads), scratch.states[0]
    sees_later = len(plan.ends_seen) > 0 and (params.window > 0 or not plan.only_in_windows)
    for number in claimed(worker, phase, num_tasks):
        task = _task_of(kv, plan, heads, number)
        first_head, stop_head, sequence, first, tokens, _, _, member = task
        per_head = tokens * group
        for token in range(tokens):
            of, offset = (sequence, first + token) if member < 0 else (plan.members[member + token, 0], 0)
            row, scratch.seen[0, token] = plan.first_rows[of] + offset, plan.starts[of] + offset
            scratch.seen[1, token] = plan.ends_seen[row] if sees_later else plan.starts[of] + offset + 1
            for head in range(first_head, stop_head):
                at = (head - first_head) * per_head + token * group
                for i in range(group):
                    start = (head * group + i) * kv.key_dim
                    _take(kv.packed, query[row, start : start + kv.key_dim], scratch, at + i)
        upcoming = _first_tile(kv, plan, heads, likely_task(worker, phase, num_tasks))
        seen = scratch.seen[:, :tokens]
        _attend_task(kv, task, plan.tables[sequence], upcoming, seen, group, params, scratch)
        for i in range((stop_head - first_head) * per_head):
            token, query_head = i % per_head // group, (first_head + i // per_head) * group + i % group
            if member >= 0:
                copy_row(states[i], plan.partials[plan.members[member + token, 1], query_head])
            else:
                row = plan.first_rows[sequence] + first + token
                _normalize(states[i], query_head, params, out[row, query_head * width : (query_head + 1) * width])
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
    for task in claimed(worker, phase, len(plan.merges)):
        row, first, count = plan.merges[task]
        for head in range(heads):
            _reset(state)
            for partial in range(first, first + count):
                _merge_state(state, plan.partials[partial, head])
            _normalize(state, head, params, out[row, head * width : (head + 1) * width])
    return phase + 1


@kernel
def _take(packed: Any, source: Any, scratch: AttentionWorkspace, row: int) -> None:
    """Takes a query [key_dim] as the products with such keys need it."""
    if packed is None:
        copy_row(source, scratch.query[row])
        return
    for group in range(0, len(source), GROUP):
        part = source[group : group + GROUP]
        into = scratch.rounded_query[row, group : group + len(part)]
        round_row(part, into, scratch.query_headers[row, group // GROUP])


@kernel
def _normalize(state: Any, head: int, params: AttentionParams, out: Any) -> None:
    """out [value_dim] = a row's weighted sum divided by the sum of its weights."""
    largest, share = state[len(state) - REFERENCE], state[len(state) - WEIGHT_SUM]
    factor = np.float32(1)
    if len(params.sinks):
        sink = params.sinks[head] * np.float32(LOG2_E)
        most = max(largest, sink)
        factor = exp((largest - most) * _LN2)
        share = share * factor + exp((sink - most) * _LN2)
    factor = factor / share
    for j in range(len(out)):
        out[j] = from_float32(state[j] * factor, out)


@entry
def attend_layer(
    worker: Worker, kv: PagedKV, plan: AttentionPlan, params: AttentionParams, query: Any, out: Any,
    workspace: AttentionWorkspace,
) -> None:  # fmt: skip
    """`attend` over the cache of a layer."""
    attend(worker, 0, kv, plan, params, query, out, workspace)
