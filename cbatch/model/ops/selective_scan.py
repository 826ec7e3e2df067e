"""The scan of Mamba 2."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from cbatch.kernels.cpu.program import BUFFER, floats_of, instruction
from cbatch.kernels.cpu.recurrent import as_numbers, step_scans
from cbatch.kernels.cpu.work_queue import Worker
from cbatch.kernels.operands import Recurrence
from cbatch.model.device_weights import DeviceWeights
from cbatch.model.ops.cpu_layout import CpuLayout, unpadded
from cbatch.model.ops.device_kernel import device_kernel
from cbatch.model.ops.device_plan import Step
from cbatch.model.ops.operation import Operation, numbers_a, operation, reads, writes
from cbatch.model.ops.recurrent import decay_vector, scanned
from cbatch.model.ops.shards import Made, Shards, columns_of, taken
from cbatch.model.weight import Weight


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

    def on_shard(self, shards: Shards) -> Made:
        target = shards.written(self.target)
        heads = shards.heads_of(self.heads, self.groups, self.head_dim, target.grain)
        if heads is None or not target.may_be_shared:
            return shards.alike(self, target)
        own, numbers = columns_of(heads.queries, self.head_dim), columns_of(heads.queries, 1)
        target.take(own)
        inner, size = self.heads * self.head_dim, self.state_size
        starts = inner, inner + self.groups * size
        xbc = torch.cat([own, *(columns_of(heads.keys, size, start) for start in starts)])
        source, steps = shards.read(self.source), shards.read(self.steps)
        source.need(lambda: xbc)
        steps.need(lambda: self.step_start + numbers)
        shards.set_state(self.state, len(heads.queries), self.head_dim, size)
        names = ("decay_log", "step_bias", "skip")
        weights: dict[str, Any] = {name: taken((getattr(self, name),), numbers)[0] for name in names}
        sizes: dict[str, Any] = {"heads": len(heads.queries), "groups": len(heads.keys)}
        return lambda: (replace(self, **sizes, **weights, step_start=steps.start_of(self.step_start + numbers)),)

    def on_cpu(self, layout: CpuLayout) -> None:
        layout.add(
            selective_scan, self, columns=self.head_dim, keys=self.state_size,
            decay=decay_vector(layout, self.decay_log, self.heads), floats=self.heads * unpadded(self.head_dim),
        )  # fmt: skip

    def load(self, weights: DeviceWeights) -> tuple[Tensor, Tensor, Tensor]:
        return weights.decay(self.decay_log), weights.vector(self.step_bias), weights.vector(self.skip)

    def run(
        self, step: Step, weights: tuple[Tensor, Tensor, Tensor], *, source: Tensor, steps: Tensor, target: Tensor
    ) -> None:
        columns = steps[:, self.step_start : self.step_start + self.heads]
        state = step.inputs.states[self.state]
        scan(step.ops, source, columns, self, weights, state, step.recurrence, target)


@device_kernel("recurrence:selective_scan", waits=True)
def scan(
    xbc: Tensor, steps: Tensor, heads: SelectiveScan, weights: tuple[Tensor, Tensor, Tensor], state: Tensor,
    recurrence: Recurrence, out: Tensor,
) -> None:  # fmt: skip
    """The scan over each chunk; see `SelectiveScan`.

    steps:   [T, heads], maybe columns of a wider tensor
    weights: [heads] float32 each: -exp(decay_log), step_bias and skip
    state:   [slots, heads, head_dim, state_size], read and written
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
    "heads columns groups keys decay step_bias skip step_start state", "step_min step_max", source=BUFFER, steps=BUFFER,
    target=BUFFER, state_type=None,
)  # fmt: skip
def selective_scan(worker: Worker, phase: int, op: Any, step: Any) -> int:
    states, vectors = as_numbers(step.recurrence, op.state_type), step.weights.vectors
    source, steps, out = floats_of(step, op.source), floats_of(step, op.steps), floats_of(step, op.target)
    keys = op.heads * op.columns
    return step_scans(worker, phase, op, vectors, states, keys, 0, source, steps, op.step_start, out)
