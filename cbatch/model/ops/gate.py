"""A buffer multiplied by a function of another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from cbatch.kernels.cpu.fast_math import exp, from_float32, to_float32
from cbatch.kernels.cpu.program import BUFFER, ROWS_PER_TASK, elements_of, floats_of, instruction
from cbatch.kernels.cpu.work_queue import Worker, claimed
from cbatch.model.ops.cpu_layout import CpuLayout
from cbatch.model.ops.device_kernel import device_kernel
from cbatch.model.ops.device_plan import Step
from cbatch.model.ops.operation import Operation, operation, reads, updates
from cbatch.model.ops.shards import Columns, Made, Shards

_FUNCTIONS = ("identity", "sigmoid", "softplus")
_SIGMOID, _SOFTPLUS = 1, 2


@operation
class Gate(Operation):
    """target *= function(gate), where each number of the gate is for `width` numbers of the target.

    start: first column of the gate
    """

    gate: str = reads()
    target: str = updates()
    width: int = 1
    start: int = 0
    function: Literal["sigmoid", "softplus", "identity"] = "sigmoid"

    def on_shard(self, shards: Shards) -> Made:
        target, gate = shards.read(self.target), shards.read(self.gate)
        gate.need(lambda: self._columns_for(target))

        def made() -> tuple[Gate]:
            columns = self._columns_for(target)
            if columns is None or target.chosen is None:
                return (self,)
            return (replace(self, width=len(target.chosen) // len(columns), start=gate.start_of(columns)),)

        return made

    def _columns_for(self, target: Columns) -> Tensor | None:
        """The gates of the columns that a process has; None for all."""
        return None if target.chosen is None else self.start + torch.unique(target.chosen // self.width)

    def on_cpu(self, layout: CpuLayout) -> None:
        columns = layout.used[self.target] // self.width
        layout.add(apply_gate, self, columns=columns, function=_FUNCTIONS.index(self.function))

    def run(self, step: Step, weights: None, *, gate: Tensor, target: Tensor) -> None:
        columns = target.shape[1] // self.width
        multiply_by_gate(step.ops, gate[:, self.start : self.start + columns], self.width, self.function, target)


@device_kernel("activation:gate", updates="target")
def multiply_by_gate(gate: Tensor, width: int, function: str, target: Tensor) -> None:
    """target [T, columns * width] *= function(gate [T, columns]), each for `width` numbers."""
    factors = gate.float()
    if function != "identity":
        factors = torch.sigmoid(factors) if function == "sigmoid" else functional.softplus(factors)
    target.copy_(factors.repeat_interleave(width, dim=1) * target)


@instruction("start width columns function", gate=BUFFER, target=BUFFER)
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
                    target[row, j] = from_float32(x * to_float32(target[row, j]), target)
    return phase + 1
