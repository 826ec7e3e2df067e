"""The norm of what a recurrent layer gives, with a gate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional

from cbatch.kernels.cpu.program import BUFFER, NORM, elements_of, floats_of, instruction, norm_of
from cbatch.kernels.cpu.recurrent import gated_norm as gated_norm_rows
from cbatch.kernels.cpu.work_queue import Worker
from cbatch.kernels.operands import NormWeights
from cbatch.model.device_weights import DeviceWeights
from cbatch.model.ops.cpu_layout import CpuLayout
from cbatch.model.ops.device_kernel import device_kernel
from cbatch.model.ops.device_plan import Step
from cbatch.model.ops.operation import Operation, operation, reads, writes
from cbatch.model.ops.residual import normed
from cbatch.model.weight import Norm


@operation
class GatedNorm(Operation):
    """target = norm(source) * silu(gate), or norm(source * silu(gate)) if the gate comes first.

    gate_start: first column of the gate, which is as wide as the source
    groups:     so many parts of the source are normed, each by itself; the norm's weight is as long as the source
    """

    source: str = reads()
    gate: str = reads()
    target: str = writes()
    norm: Norm
    groups: int
    gate_start: int = 0
    gate_first: bool = False

    def target_width(self, width: Callable[[str], int]) -> int:
        return width(self.source)

    def on_cpu(self, layout: CpuLayout) -> None:
        width = layout.used[self.source]
        layout.add(
            gated_norm, self, source=layout.read(self.source), gate=layout.read(self.gate), width=width,
            target=layout.product_source(self.target, width), norm=layout.norm(self.norm),
        )  # fmt: skip

    def load(self, weights: DeviceWeights) -> NormWeights:
        return weights.norm(self.norm)

    def run(self, step: Step, weights: NormWeights, *, source: Tensor, gate: Tensor, target: Tensor) -> None:
        factors = gate[:, self.gate_start : self.gate_start + source.shape[1]]
        norm_with_gate(step.ops, source, factors, weights, self.groups, target, gate_first=self.gate_first)


@device_kernel("norm:gated_norm")
def norm_with_gate(
    source: Tensor, gate: Tensor, norm: NormWeights, groups: int, out: Tensor, *, gate_first: bool
) -> None:
    """out [T, columns] = norm(source) * silu(gate), or norm(source * silu(gate)) if the gate comes first.

    source, gate: as wide, maybe columns of wider tensors; each of `groups` parts is normed by itself
    """
    factor = functional.silu(gate.float())
    x = source.float() * factor if gate_first else source.float()
    weight = None if norm.weight is None else norm.weight.view(groups, -1)
    found = normed(x.reshape(len(x), groups, -1), norm._replace(weight=weight)).flatten(1)
    out.copy_(found if gate_first else found * factor)


@instruction("gate_start width groups gate_first", source=BUFFER, gate=BUFFER, target=BUFFER, norm=NORM)
def gated_norm(worker: Worker, phase: int, op: Any, step: Any) -> int:
    source, gates, out = floats_of(step, op.source), floats_of(step, op.gate), elements_of(step, op.target)
    norm = norm_of(step.weights, op.norm, op.width)
    return gated_norm_rows(worker, phase, source, gates, op.gate_start, op.width, norm, op.groups, op.gate_first, out)
