"""Layers with a state that goes from token to token: short convolutions, gated delta rules and the scan of Mamba 2.

Each state goes from token to token in the memory of its slot, and a task has all tokens of a chunk for a part of it. So
a token's result has the same bits however its sequence was cut into steps, and however many threads shared the step.

The states of delta rules and scans lie in blocks, each of which has some columns of a state [keys, columns], which are
independent of each other. It lies in one piece, so that it stays in the processor's first cache from token to token:
within a slot, a state is [heads, blocks, keys, columns of a block]. A token fetches and writes each number once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from cbatch.kernels.cpu.emit import (
    FLOAT,
    FLOATS,
    LANES,
    LIKE,
    PARTS,
    Value,
    Variable,
    emitted,
    for_range,
    load_floats,
    switch,
)
from cbatch.kernels.cpu.fast_math import copy_row, exp, from_float32, silu, to_float32
from cbatch.kernels.cpu.instruction_sets import CHOSEN
from cbatch.kernels.cpu.jit import inlined, kernel, view_as
from cbatch.kernels.cpu.matmul.microkernel import prefetch, read_broadcast
from cbatch.kernels.cpu.norm import NormParams, normalize
from cbatch.kernels.cpu.softmax import store_floats
from cbatch.kernels.cpu.work_queue import Worker, claimed
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.state_pool import StatePool

_CHANNELS = 1024
"""Channels of a convolution that a task takes: their last tokens stay in the processor's first cache."""

_NORM_ROWS = 8
"""Rows of a task of a norm."""

_PANELS = (4, 2, 1) if CHOSEN.lanes == LANES else (2, 1)
"""Numbers of vectors that a block may have. Sums of the most wait for no other, and fit into the registers."""

_ROWS_AHEAD = 2
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
def as_numbers(recurrence: Recurrence, like: Any) -> Recurrence:
    """The same with its memory as numbers of the type of `like`."""
    memory, layout, starts, slots, counts, targets = recurrence
    return Recurrence(view_as(memory, like), layout, starts, slots, counts, targets)


@inlined
def _state_of(recurrence: Recurrence, state: int, slot: int) -> Any:
    """The numbers of a slot."""
    start, size = recurrence.layout[state]
    return recurrence.memory[start + slot * size : start + (slot + 1) * size]


@kernel
def _snapshot_slot(recurrence: Recurrence, chunk: int, tokens: int) -> int:
    """Where the state of a chunk is copied to after so many of its tokens, -1 if it is not."""
    is_now = recurrence.snapshot_counts[chunk] == tokens
    return recurrence.snapshot_slots[chunk] if is_now else -1


@kernel
def _copy_numbers(source: Any, target: Any) -> None:
    for i in range(len(source)):
        target[i] = source[i]


@kernel
def _prefetch_row(rows: Any, row: int, column: int, width: int) -> None:
    """Prefetches columns of a row that comes soon."""
    begin = rows[min(row, len(rows) - 1), column:].ctypes.data
    for at in range(0, width * rows.itemsize, 64):
        prefetch(begin + at)


@kernel
def _softplus(x: Any) -> Any:
    return np.log1p(exp(-abs(x))) + max(x, np.float32(0))


@kernel
def _add_tap(weight: Any, x: Any, like: Any, sums: Any) -> None:
    """x: rounded as the state `like` keeps it"""
    for i in range(len(sums)):
        sums[i] += weight[i] * to_float32(from_float32(to_float32(x[i]), like))


@kernel
def _finish_row(sums: Any, is_silu: int, gate: Any, out: Any) -> None:
    """gate: empty for none"""
    if is_silu:
        for i in range(len(sums)):
            sums[i] = silu(sums[i])
    for i in range(len(gate)):
        sums[i] *= gate[i]
    copy_row(sums, out)


@kernel
def _keep_last(
    source: Any, first: int, tokens: int, column: int, left: int, width: int, channels: int, before: Any, kept: Any
) -> None:
    """kept [kernel - 1, channels] = the last inputs once so many tokens have followed those before, which it may be.

    The channels from `left` are.
    """
    size = len(kept) // channels
    for i in range(size):
        token, target = tokens - size + i, kept[i * channels + left : i * channels + left + width]
        if token < 0:
            _copy_numbers(before[(i + tokens) * channels + left :][:width], target)
        else:
            copy_row(source[first + token, column : column + width], target)


@kernel
def _convolve_chunk(
    op: Any, vectors: Any, recurrence: Recurrence, chunk: int, left: int, width: int, source: Any, sums: Any, out: Any
) -> None:
    """The channels from `left` of a chunk."""
    channels, weight, bias = op.channels, vectors[op.weight + left :], vectors[op.bias + left :]
    first, stop, column = recurrence.starts[chunk], recurrence.starts[chunk + 1], op.start + left
    before = _state_of(recurrence, op.state, recurrence.slots[chunk])
    if op.input_gate >= 0:  # in place: what a state keeps and what a token uses are the same bits
        for row in range(first, stop):
            x, gate = source[row, column : column + width], source[row, op.input_gate + left :][:width]
            for i in range(width):
                x[i] *= gate[i]
    for row in range(first, stop):
        _prefetch_row(source, row + _ROWS_AHEAD, column, width)
        _prefetch_row(sums, row + _ROWS_AHEAD, left, width)
        total = sums[row, left : left + width]
        for i in range(width):
            total[i] = bias[i] if op.bias >= 0 else np.float32(0)
        for tap in range(op.kernel):
            seen = row - op.kernel + 1 + tap
            if seen < first:
                start = (op.kernel - 1 + seen - first) * channels + left
                _add_tap(weight[tap * channels :], before[start : start + width], before, total)
            else:
                _add_tap(weight[tap * channels :], source[seen, column : column + width], before, total)
        gate = source[row, op.output_gate + left :][:width] if op.output_gate >= 0 else source[row, :0]
        _finish_row(total, op.is_silu, gate, out[row, left : left + width])
    count = recurrence.snapshot_counts[chunk]
    copied_to = _snapshot_slot(recurrence, chunk, count)
    if copied_to >= 0:
        copy = _state_of(recurrence, op.state, copied_to)
        _keep_last(source, first, count, column, left, width, channels, before, copy)
    _keep_last(source, first, stop - first, column, left, width, channels, before, before)


@kernel
def convolve(
    worker: Worker, phase: int, op: Any, vectors: Any, recurrence: Recurrence, source: Any, sums: Any, out: Any
) -> int:
    """out [T, channels] = the convolution of columns of the source (see `ShortConvolution`).

    Within a slot, the state is [kernel - 1, channels]. An input gate changes the source.

    op:   its record, whose weight is [kernel, channels]; the last row is for the token itself
    sums: [T, channels] float32 memory, maybe `out`
    """
    parts = -(-op.channels // _CHANNELS)
    for task in claimed(worker, phase, (len(recurrence.starts) - 1) * parts):
        left = task % parts * _CHANNELS
        width = min(_CHANNELS, op.channels - left)
        _convolve_chunk(op, vectors, recurrence, task // parts, left, width, source, sums, out)
    return phase + 1


@kernel
def block_width(columns: int) -> int:
    """Columns of a block, for a multiple of 16."""
    panels = _PANELS[0]
    while columns % (panels * LANES):
        panels //= 2
    return panels * LANES


def _zeros(like: Value, panels: range) -> list[Variable]:
    """Sums in registers, one for each panel."""
    return [Variable(like.constant(None, FLOATS)) for _ in panels]


def _add(total: Variable, one: Value, other: Value) -> None:
    total.value = one.fma(other, total.value)


def _emit_delta(element: Any, panels: range, addresses: list[Value], factors: list[Value]) -> None:
    """Reads the state twice, the second time from the first cache, and writes it.

    With a token's key k and query q as they are in the source:
    error = rate * (v - seen * k S); out = old * q S + new * error; S = decay * S + key_factor * k outer error
    """
    state, keys, query, key, value, out = addresses
    decay, rate, seen, old, new, key_factor = (factor.broadcast() for factor in factors)
    by_key, by_query, changes = _zeros(keys, panels), _zeros(keys, panels), []
    stride = len(panels) * LANES * element.bitwidth // 8
    with for_range(keys) as index:
        row, one, other = state + index * stride, *(read_broadcast(at + index * 4, FLOAT) for at in (key, query))
        for panel in panels:
            numbers = load_floats(row, panel, element)
            _add(by_key[panel], one, numbers)
            _add(by_query[panel], other, numbers)
    for panel in panels:
        error = rate * (load_floats(value, panel, types.float32) - seen * by_key[panel].value)
        store_floats(new.fma(error, old * by_query[panel].value), out, panel, types.float32)
        changes.append(key_factor * error)
    with for_range(keys) as index:
        row, number = state + index * stride, read_broadcast(key + index * 4, FLOAT)
        for panel in panels:
            numbers = number.fma(changes[panel], decay * load_floats(row, panel, element))
            store_floats(numbers, row, panel, element)


def _emit_scan(element: Any, panels: range, addresses: list[Value], factors: list[Value]) -> None:
    """Reads and writes the state once: S = decay * S + b outer step * x; out = c S + skip * x."""
    state, keys, b, c, x, out = addresses
    decay, step, skip = (factor.broadcast() for factor in factors)
    sums, inputs = _zeros(keys, panels), [load_floats(x, panel, types.float32) for panel in panels]
    changes, stride = [step * one for one in inputs], len(panels) * LANES * element.bitwidth // 8
    with for_range(keys) as index:
        row, one, other = state + index * stride, *(read_broadcast(at + index * 4, FLOAT) for at in (b, c))
        for panel in panels:
            numbers = one.fma(changes[panel], decay * load_floats(row, panel, element))
            store_floats(numbers, row, panel, element)
            _add(sums[panel], other, numbers)
    for panel in panels:
        store_floats(skip.fma(inputs[panel], sums[panel].value), out, panel, types.float32)


@emitted(types.void, LIKE, types.int64, PARTS, PARTS)
def _step_block(like: Any, width: Value, addresses: list[Value], factors: list[Value]) -> None:
    """One token of a block of so many columns.

    like: a number of the state; factors: six of `_emit_delta`, or three of `_emit_scan`
    """
    emit = _emit_scan if len(factors) == 3 else _emit_delta
    switch(width, {panels * LANES: partial(emit, like, range(panels), addresses, factors) for panels in _PANELS})


@kernel
def _delta_factors(op: Any, vectors: Any, query: Any, key: Any, controls: Any, head: int) -> Any:
    """Those of a token, for `_emit_delta`."""
    queries, keys, both = np.float32(0), np.float32(0), np.float32(0)
    for i in range(len(key)):
        queries += query[i] * query[i]
        keys += key[i] * key[i]
        both += query[i] * key[i]
    unit = np.float32(1) / np.sqrt(keys + np.float32(1e-6))
    scale = np.float32(1) / np.sqrt((queries + np.float32(1e-6)) * np.float32(len(key)))
    rate = np.float32(1) / (np.float32(1) + exp(-controls[head]))
    decay = exp(vectors[op.decay + head] * _softplus(controls[op.heads + head] + vectors[op.decay_bias + head]))
    return decay, rate, decay * unit, decay * scale, scale * unit * both, unit


@kernel
def _scan_factors(op: Any, vectors: Any, b: Any, c: Any, controls: Any, head: int) -> Any:
    step = _softplus(controls[head] + vectors[op.step_bias + head])
    step = min(max(step, op.step_min), op.step_max)
    return exp(vectors[op.decay + head] * step), step, vectors[op.skip + head]


def _stepping(factors_of: Callable[..., Any]) -> Callable[..., int]:
    """The loop over the states of all chunks. It cannot get the function as an argument: numba keeps no such code."""

    @kernel
    def step_states(
        worker: Worker, phase: int, op: Any, vectors: Any, recurrence: Recurrence, at_keys: int, at_columns: int,
        source: Any, controls: Any, control: int, out: Any,
    ) -> int:  # fmt: skip
        """out [T, heads * columns] = what the states [keys, columns] of all heads give, after a step for each token.

        op:                  a record of an instruction; `columns` is a multiple of 16, the decay is -exp(decay_log)
        at_keys, at_columns: where in the source there are two times [groups, keys], and [heads, columns]
        control:             where in the controls those of the heads begin
        """
        keys, width = op.keys, block_width(op.columns)
        parts, size = op.columns // width, keys * width
        per_chunk = op.heads * parts
        for task in claimed(worker, phase, (len(recurrence.starts) - 1) * per_chunk):
            chunk, head = task // per_chunk, task % per_chunk // parts
            first, stop = recurrence.starts[chunk], recurrence.starts[chunk + 1]
            column = head * op.columns + task % parts * width
            begin, value = column * keys, at_columns + column
            one = at_keys + head // (op.heads // op.groups) * keys
            other = one + op.groups * keys
            memory = _state_of(recurrence, op.state, recurrence.slots[chunk])[begin : begin + size]
            for row in range(first, stop):
                for at, numbers in ((one, keys), (other, keys), (value, width)):
                    _prefetch_row(source, row + _ROWS_AHEAD, at, numbers)
                query, key = source[row, one : one + keys], source[row, other : other + keys]
                addresses = (
                    memory.ctypes.data, keys, query.ctypes.data, key.ctypes.data, source[row, value:].ctypes.data,
                    out[row, column:].ctypes.data,
                )  # fmt: skip
                factors = factors_of(op, vectors, query, key, controls[row, control:], head)
                _step_block(memory[0], width, addresses, factors)
                copied_to = _snapshot_slot(recurrence, chunk, row + 1 - first)
                if copied_to >= 0:
                    _copy_numbers(memory, _state_of(recurrence, op.state, copied_to)[begin : begin + size])
        return phase + 1

    return step_states


step_deltas, step_scans = _stepping(_delta_factors), _stepping(_scan_factors)
"""Of gated delta rules (see `GatedDelta`), whose keys are queries and keys, and of scans (see `SelectiveScan`)."""


@kernel
def _apply_gate(x: Any, gate: Any) -> None:
    for i in range(len(x)):
        x[i] *= silu(gate[i])


@kernel
def gated_norm(
    worker: Worker, phase: int, source: Any, gates: Any, start: int, columns: int, norm: NormParams, groups: int,
    gate_first: int, out: Any,
) -> int:  # fmt: skip
    """out [T, columns] = the norm of each group of the source, which changes, and the gate (see `GatedNorm`).

    gates: [T, ...], of which the gate is the columns from `start`
    """
    width, tokens = columns // groups, len(source)
    for task in claimed(worker, phase, -(-tokens // _NORM_ROWS)):
        for row in range(task * _NORM_ROWS, min(tokens, (task + 1) * _NORM_ROWS)):
            x, gate = source[row, :columns], gates[row, start : start + columns]
            if gate_first:
                _apply_gate(x, gate)
            for first in range(0, columns, width):
                part = x[first : first + width]
                weight = norm.weight[first : first + width] if len(norm.weight) else norm.weight
                normalize(part, NormParams(norm.kind, norm.eps, weight, norm.bias), part)
            if not gate_first:
                _apply_gate(x, gate)
            copy_row(x, out[row, :columns])
    return phase + 1
