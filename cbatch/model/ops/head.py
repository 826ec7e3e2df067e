"""The last operation of a program: the output head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cbatch.kernels.cpu.fast_math import tanh
from cbatch.kernels.cpu.matmul.linear import WRITE
from cbatch.kernels.cpu.matmul.microkernel import pad_columns
from cbatch.kernels.cpu.program import instruction
from cbatch.kernels.cpu.sampling import argmax
from cbatch.kernels.cpu.work_queue import Worker, claimed
from cbatch.model.ops.cpu_layout import CpuLayout
from cbatch.model.ops.device_plan import ADDED, DeviceHead, DevicePlan
from cbatch.model.ops.linear import product
from cbatch.model.ops.normalize import norm_rows
from cbatch.model.ops.operation import Operation, operation
from cbatch.model.ops.shards import Made, Shards
from cbatch.model.weight import RESIDUAL, Matrix, Norm


@operation
class Head(Operation):
    """Logits of the wanted rows: softcap(factor * (norm(residual) times matrix + biases)); softcap 0 for none."""

    norm: Norm
    matrix: Matrix
    factor: float = 1.0
    softcap: float = 0.0

    def on_shard(self, shards: Shards) -> Made:
        return lambda: (replace(self, matrix=shards.vocabulary_of(self.matrix)),)

    def on_cpu(self, layout: CpuLayout) -> None:
        source, depth = layout.read(RESIDUAL)
        normed = layout.elements("normed", layout.program.hidden_size, depth)
        layout.head_norm = layout.norm(self.norm)
        layout.add(
            norm_rows, source=(source, depth), target=normed, width=layout.program.hidden_size, wanted=True,
            norm=layout.head_norm,
        )  # fmt: skip
        if layout.head is None:
            matrix = layout.matrix(self.matrix, depth, factor=self.factor, is_head=True)
        else:
            matrix = layout.head._replace(scale=layout.scales(pad_columns(self.matrix.columns), self.factor))
        layout.add(
            product, source=normed, target=(0, 0), matrix=matrix, activation=layout.activation(None), mode=WRITE,
            is_logits=True,
        )  # fmt: skip
        layout.add(finish_logits, self)

    def on_device(self, plan: DevicePlan) -> None:
        weights, added = plan.weights, None
        if [(each.buffer.name, each.norm) for each in plan.pending] == [(ADDED, None)]:
            added = plan.pending.pop().factor
        plan.flush()
        lm_head = weights.output_head(self.matrix)
        bias = weights.vector(*self.matrix.biases, factor=self.factor) if self.matrix.biases else None
        plan.head = DeviceHead(added, weights.norm(self.norm), lm_head, bias, self.factor, self.softcap)


@instruction(floats="softcap")
def finish_logits(worker: Worker, phase: int, op: Any, step: Any) -> int:
    """Caps the logits, and finds the largest of each row."""
    outputs = step.outputs
    num_tasks = len(outputs.tokens)
    if num_tasks == 0:  # chunks of prompts only; a phase must have a task
        return phase
    for task in claimed(worker, phase, num_tasks):
        row = outputs.logits[task, : outputs.vocabulary]
        if op.softcap > 0:
            for i in range(len(row)):
                row[i] = op.softcap * tanh(row[i] / op.softcap)
        outputs.tokens[task], outputs.largest[task] = argmax(row)
    return phase + 1
