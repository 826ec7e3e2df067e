"""Short convolutions over the tokens of each sequence."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch.kernels.cpu.fast_math import from_float32, silu, to_float32
from cbatch.kernels.cpu.jit import kernel
from cbatch.kernels.cpu.recurrent.states import (
    ROWS_AHEAD,
    Recurrence,
    copy_numbers,
    prefetch_row,
    snapshot_slot,
    state_of,
)
from cbatch.kernels.cpu.work_queue import Worker, claim, next_task

_CHANNELS = 1024
"""Channels of a convolution that a task takes: their last tokens stay in the processor's first cache."""


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
            copy_numbers(before[(i + tokens) * channels + left :][:width], target)
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
    before = state_of(recurrence, state, recurrence.slots[chunk])
    if params.input_gate >= 0:
        _multiply_rows(source, first, stop, params.input_gate + left, column, width)
    for row in range(first, stop):
        prefetch_row(source, row + ROWS_AHEAD, column, width)
        prefetch_row(sums, row + ROWS_AHEAD, left, width)
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
    copied_to = snapshot_slot(recurrence, chunk, count)
    if copied_to >= 0:
        copy = state_of(recurrence, state, copied_to)
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
    num_tasks = (len(recurrence.starts) - 1) * parts
    task = claim(worker, phase, num_tasks)
    while task >= 0:
        left = task % parts * _CHANNELS
        width = min(_CHANNELS, channels - left)
        _convolve_chunk(recurrence, state, task // parts, left, width, params, source, sums, out)
        task = next_task(worker, phase, num_tasks)
    return phase + 1
