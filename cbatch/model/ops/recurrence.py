"""Recurrent layers whose states decay: the gated delta rule, and the scan of Mamba 2."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from cbatch.kernels.cpu.jit import view_as
from cbatch.kernels.cpu.program import BUFFER, floats_of, instruction, vector_of
from cbatch.kernels.cpu.recurrent import DeltaParams, ScanParams, with_memory
from cbatch.kernels.cpu.recurrent import gated_delta as delta_chunks
from cbatch.kernels.cpu.recurrent import selective_scan as scan_chunks
from cbatch.kernels.cpu.work_queue import Worker
from cbatch.kernels.operands import Recurrence
from cbatch.model.device_weights import DeviceWeights
from cbatch.model.ops.cpu_layout import CpuLayout, unpadded
from cbatch.model.ops.device_kernel import device_kernel
from cbatch.model.ops.device_plan import Step
from cbatch.model.ops.operation import Operation, numbers_a, operation, reads, writes
from cbatch.model.weight import Weight


class Piece(NamedTuple):
    """Rows `start .. stop-1` of a step, a chunk or a part of one, and the slot to which its state is copied after."""

    start: int
    stop: int
    slot: int
    copy_to: int

    def keep(self, state: Tensor, now: Tensor) -> None:
        """Keeps the state [slots, ...] that the rows have led to."""
        state[self.slot] = now
        if self.copy_to >= 0:
            state[self.copy_to] = state[self.slot]


def pieces(recurrence: Recurrence) -> Iterator[Piece]:
    """The host reads where the chunks of a step begin, so such steps cannot be captured as graphs."""
    starts, *columns = (
        column.tolist()
        for column in (recurrence.starts, recurrence.slots, recurrence.snapshot_counts, recurrence.snapshot_slots)
    )
    for start, stop, slot, count, copy_to in zip(starts, starts[1:], *columns, strict=False):
        if slot < 0:
            continue
        between = start + count if copy_to >= 0 else stop
        if between > start:
            yield Piece(start, between, slot, copy_to)
        if between < stop:
            yield Piece(between, stop, slot, -1)


def scanned(state: Tensor, recurrence: Recurrence, out: Tensor, step: Callable[[Tensor, int], Any]) -> None:
    """out [T, ...] += what each row gives; step: from a state and a row to the next state and that"""
    for piece in pieces(recurrence):
        now = state[piece.slot].float()
        for row in range(piece.start, piece.stop):
            now, given = step(now, row)
            out[row] += given
        piece.keep(state, now)


def decay_vector(layout: CpuLayout, log: Weight, heads: int) -> int:
    """Where -exp of a weight begins among the vectors."""
    return layout.numbers(heads, lambda tensors: -log.read(tensors[log.name]).float().flatten().exp())


def unit(x: Tensor) -> Tensor:
    """The last dimension divided by its length."""
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6)


@operation
class GatedDelta(Operation):
    """target [T, value_heads * value_dim] = the gated delta rule (Yang et al., https://arxiv.org/abs/2412.06464).

    For each token, with the state S [key_dim, value_dim] of each value head, float32:
        S = exp(-exp(decay_log) * softplus(a + decay_bias)) * S
        S = S + k outer (sigmoid(b) * (v - k S))
        target = key_dim**-0.5 * q S
    with q and k divided by their lengths (eps 1e-6 under the root). Each head of keys serves value_heads / key_heads
    value heads in a row.

    source:   [T, 2 * key_heads * key_dim + value_heads * value_dim] queries, keys, values
    controls: [T, 2 * value_heads] b, then a
    state:    number of the state [value_heads, key_dim, value_dim]
    decay_log, decay_bias: [value_heads]
    """

    source: str = reads()
    controls: str = reads()
    target: str = writes()
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    state: int = numbers_a("state")
    decay_log: Weight
    decay_bias: Weight

    def target_width(self, width: Callable[[str], int]) -> int:
        return self.value_heads * self.value_dim

    def on_cpu(self, layout: CpuLayout) -> None:
        decay = decay_vector(layout, self.decay_log, self.value_heads)
        layout.add(gated_delta, self, decay=decay, floats=self.value_heads * unpadded(self.value_dim))

    def load(self, weights: DeviceWeights) -> tuple[Tensor, Tensor]:
        return weights.decay(self.decay_log), weights.vector(self.decay_bias)

    def run(
        self, step: Step, weights: tuple[Tensor, Tensor], *, source: Tensor, controls: Tensor, target: Tensor
    ) -> None:
        state = step.inputs.states[self.state]
        apply_delta_rule(step.ops, source, controls, self, weights, state, step.recurrence, target)


@device_kernel("gated_delta:gated_delta")
def apply_delta_rule(
    qkv: Tensor, controls: Tensor, heads: GatedDelta, weights: tuple[Tensor, Tensor], state: Tensor,
    recurrence: Recurrence, out: Tensor,
) -> None:  # fmt: skip
    """out [T, value_heads * value_dim] = the gated delta rule over each chunk.

    qkv:      [T, 2 * key_heads * key_dim + value_heads * value_dim]
    controls: [T, 2 * value_heads] b, then a
    weights:  [value_heads] float32 each: -exp(decay_log), and decay_bias
    state:    [slots, value_heads, key_dim, value_dim], read and written
    """
    decay, decay_bias = weights
    widths = [heads.key_heads * heads.key_dim] * 2 + [heads.value_heads * heads.value_dim]
    query, key, value = (part.float() for part in torch.split(qkv, widths, dim=1))
    query, key = (unit(part.reshape(len(qkv), heads.key_heads, -1)) for part in (query, key))
    query, key = (part.repeat_interleave(heads.value_heads // heads.key_heads, dim=1) for part in (query, key))
    query, value = query * heads.key_dim**-0.5, value.reshape(len(qkv), heads.value_heads, -1)
    b, a = controls.float().chunk(2, dim=1)
    rate, kept = torch.sigmoid(b), (decay * functional.softplus(a + decay_bias)).exp()

    def step(now: Tensor, row: int) -> tuple[Tensor, Tensor]:
        now = now * kept[row, :, None, None]
        error = value[row] - torch.einsum("hkv,hk->hv", now, key[row])
        now = now + key[row, :, :, None] * (rate[row, :, None] * error)[:, None, :]
        return now, torch.einsum("hkv,hk->hv", now, query[row])

    found = torch.zeros_like(value)
    scanned(state, recurrence, found, step)
    out.copy_(found.flatten(1))


@instruction(
    "key_heads value_heads key_dim value_dim decay decay_bias state", source=BUFFER, controls=BUFFER, target=BUFFER,
    state_type=None,
)  # fmt: skip
def gated_delta(worker: Worker, phase: int, op: Any, step: Any) -> int:
    heads = op.value_heads
    params = DeltaParams(
        op.key_heads, heads, op.key_dim, op.value_dim, vector_of(step.weights, op.decay, heads),
        vector_of(step.weights, op.decay_bias, heads),
    )  # fmt: skip
    states = with_memory(step.recurrence, view_as(step.recurrence.memory, op.state_type))
    source, controls, out = floats_of(step, op.source), floats_of(step, op.controls), floats_of(step, op.target)
    return delta_chunks(worker, phase, states, op.state, params, source, controls, out)


@operation
class SelectiveScan(Operation):
    """target [T, heads * head_dim] = the scan of Mamba 2 (Dao and Gu, https://arxiv.org/abs/2405.21060).

    For each token, with the state S [head_dim, state_size] of each head, float32:
        d = clamp(softplus(step + step_bias), step_min, step_max)
        S = exp(-exp(decay_log) * d) * S + d * x outer B
        target = S C + skip * x

    source: [T, heads * head_dim + 2 * groups * state_size] x, then B and C of all groups; heads / groups heads in a row
            share one
    steps:  [T, ...], of which `heads` columns from `step_start` are the step
    state:  number of the state [heads, head_dim, state_size]
    decay_log, step_bias, skip: [heads]
    """

    source: str = reads()
    steps: str = reads()
    target: str = writes()
    heads: int
    head_dim: int
    groups: int
    state_size: int
    state: int = numbers_a("state")
    decay_log: Weight
    step_bias: Weight
    skip: Weight
    step_start: int = 0
    step_min: float = 0.0
    step_max: float = math.inf

    def target_width(self, width: Callable[[str], int]) -> int:
        return self.heads * self.head_dim

    def on_cpu(self, layout: CpuLayout) -> None:
        decay = decay_vector(layout, self.decay_log, self.heads)
        layout.add(selective_scan, self, decay=decay, floats=self.heads * unpadded(self.head_dim))

    def load(self, weights: DeviceWeights) -> tuple[Tensor, Tensor, Tensor]:
        return weights.decay(self.decay_log), weights.vector(self.step_bias), weights.vector(self.skip)

    def run(
        self, step: Step, weights: tuple[Tensor, Tensor, Tensor], *, source: Tensor, steps: Tensor, target: Tensor
    ) -> None:
        columns = steps[:, self.step_start : self.step_start + self.heads]
        state = step.inputs.states[self.state]
        scan(step.ops, source, columns, self, weights, state, step.recurrence, target)


@device_kernel("recurrence:selective_scan")
def scan(
    xbc: Tensor, steps: Tensor, heads: SelectiveScan, weights: tuple[Tensor, Tensor, Tensor], state: Tensor,
    recurrence: Recurrence, out: Tensor,
) -> None:  # fmt: skip
    """out [T, heads * head_dim] = the scan over each chunk.

    xbc:   [T, heads * head_dim + 2 * groups * state_size] x, B and C
    steps: [T, heads], maybe columns of a wider tensor
    weights: [heads] float32 each: -exp(decay_log), step_bias and skip
    state: [slots, heads, head_dim, state_size], read and written
    """
    decay, step_bias, skip = weights
    inner, shared = heads.heads * heads.head_dim, heads.groups * heads.state_size
    x, b, c = (part.float() for part in torch.split(xbc, [inner, shared, shared], dim=1))
    x = x.reshape(len(xbc), heads.heads, -1)
    b, c = (part.reshape(len(xbc), heads.groups, -1) for part in (b, c))
    b, c = (part.repeat_interleave(heads.heads // heads.groups, dim=1) for part in (b, c))
    size = functional.softplus(steps.float() + step_bias).clamp(heads.step_min, heads.step_max)
    kept, found = (decay * size).exp(), skip[:, None] * x

    def step(now: Tensor, row: int) -> tuple[Tensor, Tensor]:
        now = now * kept[row, :, None, None] + (size[row, :, None] * x[row])[:, :, None] * b[row, :, None, :]
        return now, torch.einsum("hps,hs->hp", now, c[row])

    scanned(state, recurrence, found, step)
    out.copy_(found.flatten(1))


@instruction(
    "heads head_dim groups state_size decay step_bias skip step_start state", "step_min step_max", source=BUFFER,
    steps=BUFFER, target=BUFFER, state_type=None,
)  # fmt: skip
def selective_scan(worker: Worker, phase: int, op: Any, step: Any) -> int:
    weights, heads = step.weights, op.heads
    params = ScanParams(
        heads, op.head_dim, op.groups, op.state_size, vector_of(weights, op.decay, heads),
        vector_of(weights, op.step_bias, heads), vector_of(weights, op.skip, heads), op.step_min, op.step_max,
    )  # fmt: skip
    states = with_memory(step.recurrence, view_as(step.recurrence.memory, op.state_type))
    source, steps, out = floats_of(step, op.source), floats_of(step, op.steps), floats_of(step, op.target)
    return scan_chunks(worker, phase, states, op.state, params, source, steps, op.step_start, out)
