"""Operations on each number or column of a buffer: a gate, a factor, another order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from cbatch.kernels.cpu.fast_math import exp, from_float32, to_float32
from cbatch.kernels.cpu.program import BUFFER, ROWS_PER_TASK, elements_of, floats_of, instruction
from cbatch.kernels.cpu.work_queue import Worker, claimed
from cbatch.model.device_weights import DeviceWeights
from cbatch.model.ops.cpu_layout import CpuLayout
from cbatch.model.ops.device_kernel import device_kernel
from cbatch.model.ops.device_plan import Step
from cbatch.model.ops.operation import Operation, operation, reads, updates, writes
from cbatch.model.weight import Weight

_FUNCTIONS = ("identity", "sigmoid", "softplus")
_SIGMOID, _SOFTPLUS = 1, 2


@operation
class Gate(Operation):
    """target *= factor * function(gate), where each number of the gate is for `width` numbers of the target.

    start: first column of the gate
    """

    gate: str = reads()
    target: str = updates()
    width: int = 1
    start: int = 0
    function: Literal["sigmoid", "softplus", "identity"] = "sigmoid"
    factor: float = 1.0

    def on_cpu(self, layout: CpuLayout) -> None:
        columns = layout.used[self.target] // self.width
        layout.add(apply_gate, self, columns=columns, function=_FUNCTIONS.index(self.function))

    def run(self, step: Step, weights: None, *, gate: Tensor, target: Tensor) -> None:
        columns = target.shape[1] // self.width
        multiply_by_gate(
            step.ops, gate[:, self.start : self.start + columns], self.width, self.function, self.factor, target
        )


@device_kernel("activation:gate", updates="target")
def multiply_by_gate(gate: Tensor, width: int, function: str, factor: float, target: Tensor) -> None:
    """target [T, columns * width] *= factor * function(gate [T, columns]), each for `width` numbers."""
    factors = gate.float()
    if function != "identity":
        factors = torch.sigmoid(factors) if function == "sigmoid" else functional.softplus(factors)
    target.copy_(factor * factors.repeat_interleave(width, dim=1) * target)


@instruction("start width columns function", "factor", gate=BUFFER, target=BUFFER)
def apply_gate(worker: Worker, phase: int, op: Any, step: Any) -> int:
    gate, target = floats_of(step, op.gate), elements_of(step, op.target)
    tokens = len(target)
    for task in claimed(worker, phase, -(-tokens // ROWS_PER_TASK)):
        for row in range(task * ROWS_PER_TASK, min(tokens, (task + 1) * ROWS_PER_TASK)):
            for i in range(op.columns):
                x = gate[row, op.start + i]
                if op.function == _SIGMOID:
                    x = np.float32(1) / (np.float32(1) + exp(-x))
                elif op.function == _SOFTPLUS:
                    x = np.log1p(exp(-abs(x))) + max(x, np.float32(0))
                for j in range(i * op.width, (i + 1) * op.width):
                    target[row, j] = from_float32(op.factor * x * to_float32(target[row, j]), target)
    return phase + 1


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


@operation
class Gather(Operation):
    """target[:, i] = the sources side by side [:, columns[i]].  columns: int64"""

    sources: tuple[str, ...] = reads()
    target: str = writes()
    columns: Tensor

    def target_width(self, width: Callable[[str], int]) -> int:
        return len(self.columns)

    def on_cpu(self, layout: CpuLayout) -> None:
        places = [(*layout.read(name), column) for name in self.sources for column in range(layout.used[name])]
        chosen = np.array(places, np.int64)[self.columns.numpy()].T.flatten()
        count = len(self.columns)
        layout.add(gather, self, index=layout.indices(chosen), count=count, floats=count)

    def load(self, weights: DeviceWeights) -> Tensor:
        return weights.indices(self.columns)

    def run(self, step: Step, weights: Tensor, *, sources: tuple[Tensor, ...], target: Tensor) -> None:
        joined = sources[0] if len(sources) == 1 else torch.cat(sources, 1)
        torch.index_select(joined, 1, weights, out=target)


@instruction("index count", target=BUFFER)
def gather(worker: Worker, phase: int, op: Any, step: Any) -> int:
    """Copies columns of the arena. Of each, the index has where its buffer begins, how wide that is, and the column."""
    floats, indices, target = step.buffers.arenas.floats, step.weights.indices, floats_of(step, op.target)
    tokens = len(target)
    starts = indices[op.index : op.index + op.count]
    widths = indices[op.index + op.count : op.index + 2 * op.count]
    places = indices[op.index + 2 * op.count : op.index + 3 * op.count]
    for task in claimed(worker, phase, -(-tokens // ROWS_PER_TASK)):
        for row in range(task * ROWS_PER_TASK, min(tokens, (task + 1) * ROWS_PER_TASK)):
            for i in range(op.count):
                target[row, i] = floats[starts[i] * tokens + row * widths[i] + places[i]]
    return phase + 1
