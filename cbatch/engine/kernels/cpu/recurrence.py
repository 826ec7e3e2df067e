"""Recurrent layers: the states of sequences, short convolutions, scans, and the norms with gates that follow them.

Each state goes from token to token in the memory of its slot, and a task has all tokens of a chunk for a part of it. So
a token's result has the same bits however its sequence was cut into steps, and however many threads shared the step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch.engine.kernels.cpu.fast_math import exp, from_float32, silu, to_float32
from cbatch.engine.kernels.cpu.jit import inlined, kernel
from cbatch.engine.kernels.cpu.norm import NormParams, normalize
from cbatch.engine.kernels.cpu.work_queue import Worker, claim, next_task
from cbatch.engine.runtime.batch import RaggedBatch
from cbatch.engine.runtime.state_pool import StatePool

_CHANNELS = 512
"""Channels of a convolution that a task takes: their last tokens stay in the processor's first cache."""

_ROWS = 8
"""Rows that a task norms."""


class Recurrence(NamedTuple):
    """Where the S chunks of a step have their states (see `StepStates`).

    memory:  flat, the slots of one state after those of the one before; float32, or uint16 for bfloat16
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


class ScanParams(NamedTuple):
    """The heads of a scan (see `SelectiveScan` in `models/programs/program.py`).

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


def state_layout(pool: StatePool) -> NDArray[np.int64]:
    """See `Recurrence`."""
    sizes = np.array([tensor[0].numel() for tensor in pool.tensors], np.int64)
    return np.stack([pool.num_slots * (sizes.cumsum() - sizes), sizes], axis=1)


def new_recurrence(batch: RaggedBatch, memory: NDArray[Any], layout: NDArray[np.int64]) -> Recurrence:
    """Of a batch that has states."""
    states = batch.states
    assert states is not None
    starts = np.zeros(len(batch.starts) + 1, np.int64)
    starts[1:] = batch.counts.cumsum()
    return Recurrence(memory, layout, starts, states.slots, states.snapshot_counts, states.snapshot_slots)


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
def _multiply_rows(source: Any, first: int, stop: int, factors: int, column: int, width: int) -> None:
    """Multiplies columns with others, in place: what a state keeps and what a token uses are the same bits."""
    for row in range(first, stop):
        x, gate = source[row, column : column + width], source[row, factors : factors + width]
        for i in range(width):
            x[i] *= gate[i]


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
def _keep_last(source: Any, first: int, tokens: int, column: int, before: Any, kept: Any) -> None:
    """kept [kernel - 1, width] = the last inputs once so many tokens have followed those before, which it may be."""
    size, width = kept.shape
    for i in range(size):
        token = tokens - size + i
        if token < 0:
            for j in range(width):
                kept[i, j] = before[i + tokens, j]
        else:
            row = source[first + token, column : column + width]
            for j in range(width):
                kept[i, j] = from_float32(row[j], kept)


@kernel
def _convolve_chunk(
    recurrence: Recurrence, state: int, chunk: int, left: int, width: int, params: ConvolutionParams, source: Any,
    sums: Any, out: Any,
) -> None:  # fmt: skip
    """The channels from `left` of a chunk."""
    kernel_size, channels = params.weight.shape
    first, stop, column = recurrence.starts[chunk], recurrence.starts[chunk + 1], params.start + left
    memory = state_of(recurrence, state, recurrence.slots[chunk]).reshape(kernel_size - 1, channels)
    before = memory[:, left : left + width]
    if params.input_gate >= 0:
        _multiply_rows(source, first, stop, params.input_gate + left, column, width)
    for row in range(first, stop):
        total = sums[row, left : left + width]
        for i in range(width):
            total[i] = params.bias[left + i] if len(params.bias) else np.float32(0)
        for tap in range(kernel_size):
            weight, seen = params.weight[tap, left : left + width], row - kernel_size + 1 + tap
            if seen < first:
                _add_tap(weight, before[kernel_size - 1 + seen - first], memory, total)
            else:
                _add_tap(weight, source[seen, column : column + width], memory, total)
        gate = source[row, params.output_gate + left :][:width] if params.output_gate >= 0 else source[row, :0]
        _finish_row(total, params.is_silu, gate, out[row, left : left + width])
    count = recurrence.snapshot_counts[chunk]
    copied_to = snapshot_slot(recurrence, chunk, count)
    if copied_to >= 0:
        copy = state_of(recurrence, state, copied_to).reshape(kernel_size - 1, channels)
        _keep_last(source, first, count, column, before, copy[:, left : left + width])
    _keep_last(source, first, stop - first, column, before, before)


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
    num_tasks = (len(recurrence.starts) - 1) * parts
    task = claim(worker, phase, num_tasks)
    while task >= 0:
        left = task % parts * _CHANNELS
        width = min(_CHANNELS, channels - left)
        _convolve_chunk(recurrence, state, task // parts, left, width, params, source, sums, out)
        task = next_task(worker, phase, num_tasks)
    return phase + 1


@kernel
def softplus(x: Any) -> Any:
    return np.log1p(exp(-abs(x))) + max(x, np.float32(0))


@kernel
def _scan_token(state: Any, decay: Any, factor: Any, b: Any, c: Any) -> Any:
    """state [state_size] = decay * state + factor * b. Returns its product with c."""
    total = np.float32(0)
    for i in range(len(state)):
        number = decay * to_float32(state[i]) + factor * b[i]
        state[i] = from_float32(number, state)
        total += number * c[i]
    return total


@kernel
def _copy(source: Any, target: Any) -> None:
    for i in range(len(source)):
        target[i] = source[i]


@kernel
def _scan_chunk(
    recurrence: Recurrence, state: int, chunk: int, head: int, params: ScanParams, source: Any, steps: Any, out: Any
) -> None:
    dim, size = params.head_dim, params.state_size
    width = dim * size
    memory = state_of(recurrence, state, recurrence.slots[chunk])[head * width : (head + 1) * width]
    inner, group = params.heads * dim, head // (params.heads // params.groups)
    first, stop = recurrence.starts[chunk], recurrence.starts[chunk + 1]
    for row in range(first, stop):
        x = source[row, head * dim : (head + 1) * dim]
        b = source[row, inner + group * size : inner + (group + 1) * size]
        c = source[row, inner + (params.groups + group) * size :][:size]
        step = softplus(steps[row, head] + params.step_bias[head])
        step = min(max(step, np.float32(params.step_min)), np.float32(params.step_max))
        decay = exp(params.decay[head] * step)
        for i in range(dim):
            total = _scan_token(memory[i * size : (i + 1) * size], decay, step * x[i], b, c)
            out[row, head * dim + i] = total + params.skip[head] * x[i]
        copied_to = snapshot_slot(recurrence, chunk, row + 1 - first)
        if copied_to >= 0:
            _copy(memory, state_of(recurrence, state, copied_to)[head * width : (head + 1) * width])


@kernel
def selective_scan(
    worker: Worker, phase: int, recurrence: Recurrence, state: int, params: ScanParams, source: Any, steps: Any,
    out: Any,
) -> int:  # fmt: skip
    """out [T, heads * head_dim] = the scan of x, B and C, side by side in the source (see `SelectiveScan`).

    steps: [T, heads]
    """
    num_tasks = (len(recurrence.starts) - 1) * params.heads
    task = claim(worker, phase, num_tasks)
    while task >= 0:
        _scan_chunk(recurrence, state, task // params.heads, task % params.heads, params, source, steps, out)
        task = next_task(worker, phase, num_tasks)
    return phase + 1


@kernel
def _apply_gate(x: Any, gate: Any) -> None:
    for i in range(len(x)):
        x[i] *= silu(gate[i])


@kernel
def gated_norm(
    worker: Worker, phase: int, source: Any, gate: Any, norm: NormParams, groups: int, gate_first: int, out: Any
) -> int:
    """out [T, columns] = the norm of each group of the source, which changes, and the gate (see `GatedNorm`)."""
    rows, columns = gate.shape
    width = columns // groups
    num_tasks = -(-rows // _ROWS)
    task = claim(worker, phase, num_tasks)
    while task >= 0:
        for row in range(task * _ROWS, min(rows, (task + 1) * _ROWS)):
            if gate_first:
                _apply_gate(source[row, :columns], gate[row])
            for start in range(0, columns, width):
                part = source[row, start : start + width]
                weight = norm.weight[start : start + width] if len(norm.weight) else norm.weight
                normalize(part, NormParams(norm.kind, norm.eps, weight, norm.bias), part)
            if not gate_first:
                _apply_gate(source[row, :columns], gate[row])
            for i in range(columns):
                out[row, i] = from_float32(source[row, i], out)
        task = next_task(worker, phase, num_tasks)
    return phase + 1
