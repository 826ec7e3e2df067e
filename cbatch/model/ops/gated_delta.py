"""The gated delta rule of recurrent layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from cbatch.kernels.cpu.program import BUFFER, floats_of, instruction
from cbatch.kernels.cpu.recurrent import as_numbers, step_deltas
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

    def on_shard(self, shards: Shards) -> Made:
        target = shards.written(self.target)
        heads = shards.heads_of(self.value_heads, self.key_heads, self.value_dim, target.grain)
        if heads is None or not target.may_be_shared:
            return shards.alike(self, target)
        target.take(columns_of(heads.queries, self.value_dim))
        keys, numbers = self.key_heads * self.key_dim, columns_of(heads.queries, 1)
        parts = [columns_of(heads.keys, self.key_dim, start) for start in (0, keys)]
        qkv = torch.cat([*parts, columns_of(heads.queries, self.value_dim, 2 * keys)])
        ba = torch.cat([numbers, self.value_heads + numbers])
        source, controls = shards.read(self.source), shards.read(self.controls)
        source.need(lambda: qkv)
        controls.need(lambda: ba)
        shards.set_state(self.state, len(heads.queries), self.key_dim, self.value_dim)
        decay_log, decay_bias = (taken((one,), numbers)[0] for one in (self.decay_log, self.decay_bias))
        sizes: dict[str, Any] = {"key_heads": len(heads.keys), "value_heads": len(heads.queries)}
        return lambda: (replace(self, **sizes, decay_log=decay_log, decay_bias=decay_bias),)

    def on_cpu(self, layout: CpuLayout) -> None:
        layout.add(
            gated_delta, self, groups=self.key_heads, heads=self.value_heads, keys=self.key_dim, columns=self.value_dim,
            decay=decay_vector(layout, self.decay_log, self.value_heads),
            floats=self.value_heads * unpadded(self.value_dim),
        )  # fmt: skip

    def load(self, weights: DeviceWeights) -> tuple[Tensor, Tensor]:
        return weights.decay(self.decay_log), weights.vector(self.decay_bias)

    def run(
        self, step: Step, weights: tuple[Tensor, Tensor], *, source: Tensor, controls: Tensor, target: Tensor
    ) -> None:
        state = step.inputs.states[self.state]
        apply_delta_rule(step.ops, source, controls, self, weights, state, step.recurrence, target)


@device_kernel("gated_delta:gated_delta", waits=True)
def apply_delta_rule(
    qkv: Tensor, controls: Tensor, heads: GatedDelta, weights: tuple[Tensor, Tensor], state: Tensor,
    recurrence: Recurrence, out: Tensor,
) -> None:  # fmt: skip
    """The rule over each chunk; see `GatedDelta`.

    weights: [value_heads] float32 each: -exp(decay_log), and decay_bias
    state:   [slots, value_heads, key_dim, value_dim], read and written
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
    "groups heads keys columns decay decay_bias state", source=BUFFER, controls=BUFFER, target=BUFFER, state_type=None
)
def gated_delta(worker: Worker, phase: int, op: Any, step: Any) -> int:
    states, vectors = as_numbers(step.recurrence, op.state_type), step.weights.vectors
    source, controls, out = floats_of(step, op.source), floats_of(step, op.controls), floats_of(step, op.target)
    values = 2 * op.groups * op.keys
    return step_deltas(worker, phase, op, vectors, states, 0, values, source, controls, 0, out)
