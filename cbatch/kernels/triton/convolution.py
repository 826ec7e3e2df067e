"""Causal convolutions, channel by channel, over the tokens of each sequence.

What goes in is rounded as the state holds it, so that it does not matter whether a token finds the ones before it in
its chunk or in the state.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from cbatch.kernels.operands import Recurrence
from cbatch.kernels.triton.attention_tile import launch_options, power_of_2
from cbatch.kernels.triton.recurrence import CHUNK_TENSORS, chunk_tensors, read_chunk

_ROWS, _CHANNELS = 16, 128
"""Of a tile of a step with chunks; a step that only decodes has twice as many channels and one row."""


class _Form(NamedTuple):
    """The constants that the kernels are compiled for: the FORM below. Of rows, how far each is from the next."""

    channels: int
    kernel: int
    is_silu: bool
    source_row: int
    input_row: int
    output_row: int
    out_row: int


@triton.jit
def _load_input(source, gate, state, row, channel, kept, FORM):
    """The inputs of the convolution from rows of the step, in the type of the state."""
    x = tl.load(source + row * FORM.source_row + channel, mask=kept, other=0.0).to(tl.float32)
    if gate is not None:
        x *= tl.load(gate + row * FORM.input_row + channel, mask=kept, other=0.0).to(tl.float32)
    return x.to(state.dtype.element_ty)


@triton.jit
def _convolve_rows(source, input_gate, output_gate, weight, bias, state, out, row, start, slot, channel, kept, FORM):
    """Writes rows of `out`.

    row, start, slot: [rows, 1] int64; start: first row of the row's chunk
    channel:          [1, channels]
    kept:             [rows, channels]
    """
    total = tl.zeros(kept.shape, tl.float32)
    if bias is not None:
        total += tl.load(bias + channel, mask=channel < FORM.channels, other=0.0)
    for tap in tl.static_range(FORM.kernel):
        at = row + (tap - (FORM.kernel - 1))
        is_new = at >= start
        x = _load_input(source, input_gate, state, at, channel, kept & is_new, FORM)
        if tap < FORM.kernel - 1:
            window = state + (slot * (FORM.channels * (FORM.kernel - 1)) + (at - start + (FORM.kernel - 1)))
            old = tl.load(window + channel * (FORM.kernel - 1), mask=kept & (at < start), other=0.0)
            x = tl.where(is_new, x, old)
        factor = tl.load(weight + channel * FORM.kernel + tap, mask=channel < FORM.channels, other=0.0)
        total += x.to(tl.float32) * factor
    if FORM.is_silu:
        total *= tl.sigmoid(total)
    if output_gate is not None:
        total *= tl.load(output_gate + row * FORM.output_row + channel, mask=kept, other=0.0).to(tl.float32)
    tl.store(out + row * FORM.out_row + channel, total.to(out.dtype.element_ty), mask=kept)


@triton.jit
def _window(source, input_gate, state, start, count, slot, channel, FORM, TAPS):
    """[channels, TAPS] the state after `count` tokens of a chunk."""
    tap = tl.arange(0, TAPS)[None, :]
    kept = (channel < FORM.channels)[:, None] & (tap < FORM.kernel - 1)
    at = tap + count - (FORM.kernel - 1)
    new = _load_input(source, input_gate, state, start + at, channel[:, None], kept & (at >= 0), FORM)
    place = (slot * FORM.channels + channel[:, None]) * (FORM.kernel - 1) + tap + count
    return tl.where(at >= 0, new, tl.load(state + place, mask=kept & (at < 0), other=0.0))


@triton.jit(do_not_specialize_on_alignment=CHUNK_TENSORS)
def _keep_window_kernel(
    source, input_gate, output_gate, weight, bias, state, starts, slots, snapshot_counts, snapshot_slots, out,
    FORM: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr, CONVOLVES: tl.constexpr,
):  # fmt: skip
    """One program per chunk and block of channels: writes the state of the chunk, and its snapshot.

    CONVOLVES: each chunk has one token, and this writes its row of `out`, too
    """
    start, count, slot, cut, target = read_chunk(starts, slots, snapshot_counts, snapshot_slots, tl.program_id(0))
    if count <= 0:
        return
    channel, tap = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, TAPS)[None, :]
    if CONVOLVES:
        row = start + tl.zeros([1, 1], tl.int64)
        _convolve_rows(
            source, input_gate, output_gate, weight, bias, state, out, row, row, slot, channel[None, :],
            (channel < FORM.channels)[None, :], FORM,
        )  # fmt: skip
    kept = (channel < FORM.channels)[:, None] & (tap < FORM.kernel - 1)
    last = _window(source, input_gate, state, start, count, slot, channel, FORM, TAPS)
    if cut > 0:
        then = _window(source, input_gate, state, start, cut, slot, channel, FORM, TAPS)
        tl.store(state + (target * FORM.channels + channel[:, None]) * (FORM.kernel - 1) + tap, then, mask=kept)
    tl.debug_barrier()  # no thread writes what another one has yet to read
    tl.store(state + (slot * FORM.channels + channel[:, None]) * (FORM.kernel - 1) + tap, last, mask=kept)


@triton.jit
def _chunk_of(starts, row, chunks):
    """[rows] the chunk of each row: the last one that begins before it or at it."""
    begun = tl.zeros(row.shape, tl.int32)
    for base in range(0, chunks, 128):
        chunk = base + tl.arange(0, 128)
        start = tl.load(starts + chunk, mask=chunk < chunks, other=1 << 30)
        begun += tl.sum((start[None, :] <= row[:, None]).to(tl.int32), axis=1)
    return begun - 1


@triton.jit(do_not_specialize=["tokens", "chunks"], do_not_specialize_on_alignment=CHUNK_TENSORS)
def _convolve_kernel(
    source, input_gate, output_gate, weight, bias, state, starts, slots, out, tokens, chunks, FORM: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per block of rows and channels. States are only read: other programs need them, too."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    chunk = _chunk_of(starts, row, chunks)
    slot = tl.load(slots + chunk, mask=row < tokens, other=-1).to(tl.int64)
    start = tl.load(starts + chunk).to(tl.int64)
    kept = (slot >= 0)[:, None] & (channel < FORM.channels)[None, :]
    _convolve_rows(
        source, input_gate, output_gate, weight, bias, state, out, row.to(tl.int64)[:, None], start[:, None],
        slot[:, None], channel[None, :], kept, FORM,
    )  # fmt: skip


def convolve(
    source: Tensor, weights: tuple[Tensor, Tensor | None], activation: str, state: Tensor, recurrence: Recurrence, out:
    Tensor, input_gate: Tensor | None, output_gate: Tensor | None,
) -> None:  # fmt: skip
    """See `model/ops/convolution.py`."""
    weight, bias = weights
    channels, kernel = weight.shape
    given = source, input_gate, output_gate, weight, bias, state
    steps = (0 if rows is None else rows.stride(0) for rows in (source, input_gate, output_gate, out))
    form = _Form(channels, kernel, activation == "silu", *steps)
    chunks, taps, wide, is_step = len(recurrence.slots), power_of_2(kernel - 1), 2 * _CHANNELS, recurrence.longest == 1
    if not is_step:
        _convolve_kernel[(-(-len(source) // _ROWS), -(-channels // _CHANNELS))](
            *given, recurrence.starts, recurrence.slots, out, len(source), chunks, form, _ROWS, _CHANNELS,
            **launch_options(_ROWS * _CHANNELS // 16),
        )  # fmt: skip
    _keep_window_kernel[(chunks, -(-channels // wide))](
        *given, *chunk_tensors(recurrence), out, form, taps, wide, is_step, **launch_options(wide * taps // 8)
    )  # fmt: skip
