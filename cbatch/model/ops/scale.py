"""A buffer multiplied by a number."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cbatch.kernels.cpu.program import BUFFER, ROWS_PER_TASK, floats_of, instruction
from cbatch.kernels.cpu.work_queue import Worker, claimed
from cbatch.model.device_weights import DeviceWeights
from cbatch.model.ops.cpu_layout import CpuLayout
from cbatch.model.ops.device_plan import Step
from cbatch.model.ops.operation import Operation, operation, updates
from cbatch.model.weight import Weight


@operation
class Scale(Operation):
    """target *= weight, a number.  See `Weight`."""

    target: str = updates()
    weight: Weight

    def on_cpu(self, layout: CpuLayout) -> None:
        layout.add(scale, self)

    def load(self, weights: DeviceWeights) -> Tensor:
        return weights.vector(self.weight)

    def run(self, step: Step, weights: Tensor, *, target: Tensor) -> None:
        target.mul_(weights)


@instruction("weight", target=BUFFER)
def scale(worker: Worker, phase: int, op: Any, step: Any) -> int:
    factor, target = step.weights.vectors[op.weight], floats_of(step, op.target)
    tokens = len(target)
    for task in claimed(worker, phase, -(-tokens // ROWS_PER_TASK)):
        for row in range(task * ROWS_PER_TASK, min(tokens, (task + 1) * ROWS_PER_TASK)):
            for i in range(target.shape[1]):
                target[row, i] *= factor
    return phase + 1
