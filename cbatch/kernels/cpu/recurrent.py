"""Layers with a state that goes from token to token: short convolutions, gated delta rules and the scan of Mamba 2.

Each state goes from token to token in the memory of its slot, and a task has all tokens of a chunk for a part of it. So
a token's result has the same bits however its sequence was cut into steps, and however many threads shared the step.

The states of delta rules and scans lie in blocks, each of which has some columns of a state [keys, columns], which are
independent of each other. It lies in one piece, so that it stays in the processor's first cache from token to token:
within a slot, a state is [heads, blocks, keys, columns of a block]. A token fetches and writes each number once.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numpy.typing import NDArray

from cbatch.kernels.cpu.fast_math import exp, from_float32, silu, to_float32
from cbatch.kernels.cpu.jit import HAS_AVX512, LIKE, PARTS, emitted, inlined, kernel
from cbatch.kernels.cpu.matmul.microkernel import LANES, prefetch
from cbatch.kernels.cpu.norm import NormParams, normalize
from cbatch.kernels.cpu.softmax import FloatEmitter
from cbatch.kernels.cpu.work_queue import Worker, claimed
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.state_pool import StatePool

_CHANNELS = 1024
"""Channels of a convolution that a task takes: their last tokens stay in the processor's first cache."""

_NORM_ROWS = 8
"""Rows of a task of a norm."""

_PANELS = (4, 2, 1) if HAS_AVX512 else (2, 1)
"""Numbers of vectors that a block may have. Sums of the most wait for no other, and fit into the registers."""

_INT64, _FLOATS = ir.IntType(64), ir.VectorType(ir.FloatType(), LANES)

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
def with_memory(recurrence: Recurrence, memory: Any) -> Recurrence:
    """The same with its memory as numbers."""
    _, layout, starts, slots, counts, targets = recurrence
    return Recurrence(memory, layout, starts, slots, counts, targets)


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


class ConvolutionParams(NamedTuple):
    """A convolution over the tokens of each sequence, channel by channel.

    weight:  [kernel, channels]; the last row is for the token itself
    bias:    [channels], or empty
    is_silu: whether silu comes after it
    start, input_gate, output_gate: first columns of the source; -1 for no gate
    """

    weight: NDArray[np.float32]
    bias: NDArray[np.float32]
    is_silu: int
    start: int
    input_gate: int
    output_gate: int


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
    if len(gate):
        for i in range(len(sums)):
            out[i] = from_float32(sums[i] * gate[i], out)
    else:
        for i in range(len(sums)):
            out[i] = from_float32(sums[i], out)


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
            row = source[first + token, column : column + width]
            for j in range(width):
                target[j] = from_float32(row[j], target)


@kernel
def _convolve_chunk(
    recurrence: Recurrence, state: int, chunk: int, left: int, width: int, params: ConvolutionParams, source: Any,
    sums: Any, out: Any,
) -> None:  # fmt: skip
    """The channels from `left` of a chunk."""
    kernel_size, channels = params.weight.shape
    first, stop, column = recurrence.starts[chunk], recurrence.starts[chunk + 1], params.start + left
    before = _state_of(recurrence, state, recurrence.slots[chunk])
    if params.input_gate >= 0:  # in place: what a state keeps and what a token uses are the same bits
        for row in range(first, stop):
            x, gate = source[row, column : column + width], source[row, params.input_gate + left :][:width]
            for i in range(width):
                x[i] *= gate[i]
    for row in range(first, stop):
        _prefetch_row(source, row + _ROWS_AHEAD, column, width)
        _prefetch_row(sums, row + _ROWS_AHEAD, left, width)
        total = sums[row, left : left + width]
        for i in range(width):
            total[i] = params.bias[left + i] if len(params.bias) else np.float32(0)
        for tap in range(kernel_size):
            weight, seen = params.weight[tap, left : left + width], row - kernel_size + 1 + tap
            if seen < first:
                start = (kernel_size - 1 + seen - first) * channels + left
                _add_tap(weight, before[start : start + width], before, total)
            else:
                _add_tap(weight, source[seen, column : column + width], before, total)
        gate = source[row, params.output_gate + left :][:width] if params.output_gate >= 0 else source[row, :0]
        _finish_row(total, params.is_silu, gate, out[row, left : left + width])
    count = recurrence.snapshot_counts[chunk]
    copied_to = _snapshot_slot(recurrence, chunk, count)
    if copied_to >= 0:
        copy = _state_of(recurrence, state, copied_to)
        _keep_last(source, first, count, column, left, width, channels, before, copy)
    _keep_last(source, first, stop - first, column, left, width, channels, before, before)


@kernel
def convolve(
    worker: Worker, phase: int, recurrence: Recurrence, state: int, params: ConvolutionParams, source: Any, sums: Any,
    out: Any,
) -> int:  # fmt: skip
    """out [T, channels] = the convolution of columns of the source (see `ShortConvolution`).

    Within a slot, the state is [kernel - 1, channels]. An input gate changes the source.

    sums: [T, channels] float32 memory, maybe `out`
    """
    channels = params.weight.shape[1]
    parts = -(-channels // _CHANNELS)
    for task in claimed(worker, phase, (len(recurrence.starts) - 1) * parts):
        left = task % parts * _CHANNELS
        width = min(_CHANNELS, channels - left)
        _convolve_chunk(recurrence, state, task // parts, left, width, params, source, sums, out)
    return phase + 1


@kernel
def block_width(columns: int) -> int:
    """Columns of a block, for a multiple of 16."""
    panels = _PANELS[0]
    while columns % (panels * LANES):
        panels //= 2
    return panels * LANES


class _BlockEmitter(FloatEmitter):
    """Emits code for one type of state and one number of panels."""

    def __init__(self, builder: Any, element: Any, panels: int) -> None:
        super().__init__(builder)
        self.element = element
        self.panels = range(panels)
        self.stride = panels * LANES * (2 if element == types.uint16 else 4)

    def number(self, start: Any, index: Any) -> Any:
        """A float32 of a row, in all lanes."""
        return self.read_broadcast(start, self.builder.mul(index, _INT64(4)), ir.FloatType())

    def key_row(self, state: Any, index: Any) -> Any:
        """The address of the numbers of a key."""
        return self.builder.add(state, self.builder.mul(_INT64(self.stride), index))

    def zeros(self) -> list[Any]:
        """Sums in registers, one for each panel."""
        return [cgutils.alloca_once_value(self.builder, ir.Constant(_FLOATS, None)) for _ in self.panels]

    def add(self, sums: Any, one: Any, other: Any) -> None:
        self.builder.store(self.fma(one, other, self.builder.load(sums)), sums)

    def emit_delta(self, addresses: Any, factors: Any) -> None:
        """Reads the state twice, the second time from the first cache, and writes it.

        With a token's key k and query q as they are in the source:
        error = rate * (v - seen * k S); out = old * q S + new * error; S = decay * S + key_factor * k outer error
        """
        state, keys, query, key, value, out = addresses
        decay, rate, seen, old, new, key_factor = map(self.broadcast, factors)
        builder, by_key, by_query, changes = self.builder, self.zeros(), self.zeros(), []
        with cgutils.for_range(builder, keys) as loop:
            row = self.key_row(state, loop.index)
            one, other = (self.number(start, loop.index) for start in (key, query))
            for panel in self.panels:
                numbers = self.load(row, panel, self.element)
                self.add(by_key[panel], one, numbers)
                self.add(by_query[panel], other, numbers)
        for panel in self.panels:
            error = builder.fmul(seen, builder.load(by_key[panel]))
            error = builder.fmul(rate, builder.fsub(self.load(value, panel, types.float32), error))
            result = self.fma(new, error, builder.fmul(old, builder.load(by_query[panel])))
            self.store(result, out, panel, types.float32)
            changes.append(builder.fmul(key_factor, error))
        with cgutils.for_range(builder, keys) as loop:
            row, number = self.key_row(state, loop.index), self.number(key, loop.index)
            for panel in self.panels:
                numbers = builder.fmul(decay, self.load(row, panel, self.element))
                self.store(self.fma(number, changes[panel], numbers), row, panel, self.element)

    def emit_scan(self, addresses: Any, factors: Any) -> None:
        """Reads and writes the state once: S = decay * S + b outer step * x; out = c S + skip * x."""
        state, keys, b, c, x, out = addresses
        decay, step, skip = map(self.broadcast, factors)
        builder, sums = self.builder, self.zeros()
        inputs = [self.load(x, panel, types.float32) for panel in self.panels]
        changes = [builder.fmul(step, one) for one in inputs]
        with cgutils.for_range(builder, keys) as loop:
            row = self.key_row(state, loop.index)
            one, other = (self.number(start, loop.index) for start in (b, c))
            for panel in self.panels:
                numbers = builder.fmul(decay, self.load(row, panel, self.element))
                numbers = self.fma(one, changes[panel], numbers)
                self.store(numbers, row, panel, self.element)
                self.add(sums[panel], other, numbers)
        for panel, one in zip(self.panels, inputs, strict=True):
            self.store(self.fma(skip, one, builder.load(sums[panel])), out, panel, types.float32)


def _emit(builder: Any, like: Any, width: Any, name: str, *records: Any) -> None:
    """The code for each number of panels, and the choice among them."""
    end = builder.append_basic_block("end")
    switch = builder.switch(width, end)
    for panels in _PANELS:
        block = builder.append_basic_block(f"panels.{panels}")
        switch.add_case(_INT64(panels * LANES), block)
        with builder.goto_block(block):
            getattr(_BlockEmitter(builder, like, panels), name)(*records)
            builder.branch(end)
    builder.position_at_end(end)


@emitted(types.void, LIKE, types.int64, PARTS, PARTS)
def _step_delta(builder: Any, like: Any, width: Any, addresses: Any, factors: Any) -> None:
    """One token of a block of so many columns (see `emit_delta`).  like: a number of the state"""
    _emit(builder, like, width, "emit_delta", addresses, factors)


@emitted(types.void, LIKE, types.int64, PARTS, PARTS)
def _step_scan(builder: Any, like: Any, width: Any, addresses: Any, factors: Any) -> None:
    """Likewise of a scan (see `emit_scan`)."""
    _emit(builder, like, width, "emit_scan", addresses, factors)


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
def _delta_factors(query: Any, key: Any, decay: Any, rate: Any) -> Any:
    """Of a token: decay, rate, seen, old, new and key_factor of `emit_delta`."""
    queries, keys, both = np.float32(0), np.float32(0), np.float32(0)
    for i in range(len(key)):
        queries += query[i] * query[i]
        keys += key[i] * key[i]
        both += query[i] * key[i]
    unit = np.float32(1) / np.sqrt(keys + np.float32(1e-6))
    scale = np.float32(1) / np.sqrt((queries + np.float32(1e-6)) * np.float32(len(key)))
    return decay, rate, decay * unit, decay * scale, scale * unit * both, unit


@kernel
def _delta_chunk(
    recurrence: Recurrence, state: int, chunk: int, head: int, left: int, width: int, params: DeltaParams, source: Any,
    controls: Any, out: Any,
) -> None:  # fmt: skip
    """The columns from `left` of a head."""
    keys, first, stop = params.key_dim, recurrence.starts[chunk], recurrence.starts[chunk + 1]
    column, size = head * params.value_dim + left, keys * width
    memory = _state_of(recurrence, state, recurrence.slots[chunk])[column * keys : column * keys + size]
    inner = params.key_heads * keys
    at_query, at_value = head // (params.value_heads // params.key_heads) * keys, 2 * inner + column
    at_key = inner + at_query
    for row in range(first, stop):
        for at, numbers in ((at_query, keys), (at_key, keys), (at_value, width)):
            _prefetch_row(source, row + _ROWS_AHEAD, at, numbers)
        query, key = source[row, at_query : at_query + keys], source[row, at_key : at_key + keys]
        rate = np.float32(1) / (np.float32(1) + exp(-controls[row, head]))
        speed = _softplus(controls[row, params.value_heads + head] + params.decay_bias[head])
        factors = _delta_factors(query, key, exp(params.decay[head] * speed), rate)
        addresses = (
            memory.ctypes.data, keys, query.ctypes.data, key.ctypes.data, source[row, at_value:].ctypes.data,
            out[row, column:].ctypes.data,
        )  # fmt: skip
        _step_delta(memory[0], width, addresses, factors)
        copied_to = _snapshot_slot(recurrence, chunk, row + 1 - first)
        if copied_to >= 0:
            _copy_numbers(memory, _state_of(recurrence, state, copied_to)[column * keys : column * keys + size])


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
    for task in claimed(worker, phase, (len(recurrence.starts) - 1) * per_chunk):
        chunk, head, left = task // per_chunk, task % per_chunk // parts, task % parts * width
        _delta_chunk(recurrence, state, chunk, head, left, width, params, source, controls, out)
    return phase + 1


class ScanParams(NamedTuple):
    """The heads of a scan (see `SelectiveScan` in `model/ops`).

    decay, step_bias, skip: [heads]; the decay is -exp(decay_log)
    """

    heads: int
    head_dim: int
    groups: int
    state_size: int
    decay: NDArray[np.float32]
    step_bias: NDArray[np.float32]
    skip: NDArray[np.float32]
    step_min: float
    step_max: float


@kernel
def _scan_chunk(
    recurrence: Recurrence, state: int, chunk: int, head: int, left: int, width: int, params: ScanParams, source: Any,
    steps: Any, start: int, out: Any,
) -> None:  # fmt: skip
    """The columns from `left` of a head."""
    keys, first, stop = params.state_size, recurrence.starts[chunk], recurrence.starts[chunk + 1]
    column, size = head * params.head_dim + left, keys * width
    memory = _state_of(recurrence, state, recurrence.slots[chunk])[column * keys : column * keys + size]
    at_b = params.heads * params.head_dim + head // (params.heads // params.groups) * keys
    at_c = at_b + params.groups * keys
    for row in range(first, stop):
        for at, numbers in ((column, width), (at_b, keys), (at_c, keys)):
            _prefetch_row(source, row + _ROWS_AHEAD, at, numbers)
        step = _softplus(steps[row, start + head] + params.step_bias[head])
        step = min(max(step, np.float32(params.step_min)), np.float32(params.step_max))
        addresses = (
            memory.ctypes.data, keys, source[row, at_b:].ctypes.data, source[row, at_c:].ctypes.data,
            source[row, column:].ctypes.data, out[row, column:].ctypes.data,
        )  # fmt: skip
        _step_scan(memory[0], width, addresses, (exp(params.decay[head] * step), step, params.skip[head]))
        copied_to = _snapshot_slot(recurrence, chunk, row + 1 - first)
        if copied_to >= 0:
            _copy_numbers(memory, _state_of(recurrence, state, copied_to)[column * keys : column * keys + size])


@kernel
def selective_scan(
    worker: Worker, phase: int, recurrence: Recurrence, state: int, params: ScanParams, source: Any, steps: Any,
    start: int, out: Any,
) -> int:  # fmt: skip
    """out [T, heads * head_dim] = the scan of x, B and C, side by side in the source (see `SelectiveScan`).

    steps: [T, ...], of which `heads` columns from `start` are the step; head_dim is a multiple of 16
    """
    width = block_width(params.head_dim)
    parts = params.head_dim // width
    per_chunk = params.heads * parts
    for task in claimed(worker, phase, (len(recurrence.starts) - 1) * per_chunk):
        chunk, head, left = task // per_chunk, task % per_chunk // parts, task % parts * width
        _scan_chunk(recurrence, state, chunk, head, left, width, params, source, steps, start, out)
    return phase + 1


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
            for i in range(columns):
                out[row, i] = from_float32(x[i], out)
    return phase + 1
