"""Norms of buffers, and the norm with a gate of what a recurrent layer gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from cbatch.kernels.cpu.fast_math import from_float32
from cbatch.kernels.cpu.jit import kernel
from cbatch.kernels.cpu.matmul.microkernel import pad_columns
from cbatch.kernels.cpu.norm import RMS_NORM, inverse_rms
from cbatch.kernels.cpu.norm import normalize as normalize_row
from cbatch.kernels.cpu.program import BUFFER, NORM, ROWS_PER_TASK, elements_of, floats_of, instruction, norm_of
from cbatch.kernels.cpu.recurrent import gated_norm as gated_norm_rows
from cbatch.kernels.cpu.work_queue import Worker, claimed
from cbatch.kernels.operands import NormWeights
from cbatch.model.config import UnsupportedConfig
from cbatch.model.device_weights import DeviceWeights
from cbatch.model.ops.cpu_layout import CpuLayout, unpadded
from cbatch.model.ops.device_kernel import device_kernel
from cbatch.model.ops.device_plan import DevicePlan, Pending, Run, Step
from cbatch.model.ops.operation import Operation, operation, reads, updates, writes
from cbatch.model.ops.residual import normalize, normed
from cbatch.model.ops.shards import Made, Shards, norm_for
from cbatch.model.weight import RESIDUAL, Norm


@operation
class Normalize(Operation):
    """target = factor * norm(source[:, :width]); added to the target if `add`.

    width:  0 for the whole row
    groups: so many parts of `width` numbers are normed, each by itself
    factor: of the result
    """

    source: str = reads()
    target: str = writes()
    norm: Norm
    add: bool = False
    width: int = 0
    groups: int = 1
    factor: float = 1.0

    def _width(self, width: Callable[[str], int]) -> int:
        """Of a group."""
        return self.width or width(self.source)

    def target_width(self, width: Callable[[str], int]) -> int:
        return self._width(width) * self.groups

    def on_cpu(self, layout: CpuLayout) -> None:
        source, width = layout.read(self.source), self._width(layout.used.__getitem__)
        if self.add or self.target in (RESIDUAL, self.source):
            layout.add(add_norm, self, width=width)
        else:
            target = layout.elements(self.target, width, pad_columns(width))
            layout.add(norm_rows, self, source=source, target=target, width=width, wanted=False)

    def on_device(self, plan: DevicePlan) -> Run | None:
        width = self._width(lambda name: plan.buffers[name].width)
        norm, columns = plan.weights.norm(self.norm), width * self.groups
        is_whole = self.groups == 1 and width == plan.program.hidden_size
        if self.source == RESIDUAL != self.target and is_whole and not self.add and self.factor == 1:
            plan.norm_residual(norm, plan.written(self.target, width))
            return None
        source = plan.read(self.source)
        if self.target == RESIDUAL and self.add and is_whole and self.source != RESIDUAL:
            plan.make_room(for_norm=True)
            plan.pending.append(Pending(source, self.factor, norm))
            return None
        target = plan.written(self.target, columns)

        def run(step: Step) -> None:
            normalize(step.ops, step[source][:, :columns], norm, self.groups, self.factor, step[target], add=self.add)

        return run


@kernel
def _rms_norm_rows(worker: Worker, phase: int, x: Any, rows: Any, weight: Any, eps: float, out: Any) -> int:
    """out [R, width] = RMSNorm of those rows of x [T, width]. What most models need, as simple as it can be."""
    for task in claimed(worker, phase, -(-len(rows) // ROWS_PER_TASK)):
        for i in range(task * ROWS_PER_TASK, min(len(rows), (task + 1) * ROWS_PER_TASK)):
            row = x[rows[i]]
            factor = inverse_rms(row, eps)
            for j in range(len(row)):
                out[i, j] = from_float32(row[j] * factor * weight[j], out)
    return phase + 1


@instruction("width wanted", source=BUFFER, target=BUFFER, norm=NORM)
def norm_rows(worker: Worker, phase: int, op: Any, step: Any) -> int:
    """target [R, width] = the norm of columns of rows of the source, as products take it; its padding is 0.

    wanted: of the rows whose logits are wanted; else of every one
    """
    source, out = floats_of(step, op.source), elements_of(step, op.target)
    rows = step.inputs.rows if op.wanted else step.inputs.every
    if len(rows) == 0:  # chunks of prompts only; a phase must have a task
        return phase
    norm = norm_of(step.weights, op.norm, op.width)
    if norm.kind == RMS_NORM and len(norm.weight) == source.shape[1] == out.shape[1]:
        return _rms_norm_rows(worker, phase, source, rows, norm.weight, norm.eps, out)
    for task in claimed(worker, phase, -(-len(rows) // ROWS_PER_TASK)):
        for i in range(task * ROWS_PER_TASK, min(len(rows), (task + 1) * ROWS_PER_TASK)):
            normalize_row(source[rows[i], : op.width], norm, out[i])
            for j in range(op.width, out.shape[1]):  # padding, which is multiplied with zeros
                out[i, j] = 0
    return phase + 1


@instruction("width groups add", "factor", source=BUFFER, target=BUFFER, norm=NORM)
def add_norm(worker: Worker, phase: int, op: Any, step: Any) -> int:
    """Norms groups of columns of the source, in place, and puts them into the target of float32 or adds them to it."""
    source, target = floats_of(step, op.source), floats_of(step, op.target)
    norm, tokens = norm_of(step.weights, op.norm, op.width), len(target)
    for task in claimed(worker, phase, -(-tokens // ROWS_PER_TASK)):
        for row in range(task * ROWS_PER_TASK, min(tokens, (task + 1) * ROWS_PER_TASK)):
            for group in range(op.groups):
                first = group * op.width
                part, sums = source[row, first : first + op.width], target[row, first:]
                normalize_row(part, norm, part)
                if op.add:
                    for i in range(len(part)):
                        sums[i] += op.factor * part[i]
                else:
                    for i in range(len(part)):
                        sums[i] = op.factor * part[i]
    return phase + 1


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

    def on_shard(self, shards: Shards) -> Made:
        columns, gate = shards.follow(self.source, self.target), shards.read(self.gate)
        gate.need(lambda: None if columns.chosen is None else self.gate_start + columns.chosen)

        def made() -> tuple[Operation, ...]:
            own = columns.chosen
            if own is None:
                return (self,)
            norm, width = norm_for(self.norm, own) or self.norm, columns.width // self.groups
            groups, counts = torch.unique(own // width, return_counts=True)
            mine = replace(self, norm=norm, groups=len(groups), gate_start=gate.start_of(self.gate_start + own))
            if norm.kind == "none" or bool((counts == width).all()):
                return (mine,)
            mine = replace(mine, norm=Norm("none", 0.0), groups=1)
            if self.gate_first:
                return mine, NormAcross(self.target, norm, 0, own, width, self.groups)
            return NormAcross(self.source, norm, 0, own, width, self.groups), mine

        return made

    def on_cpu(self, layout: CpuLayout) -> None:
        width = layout.used[self.source]
        layout.add(gated_norm, self, width=width, elements=unpadded(width))

    def load(self, weights: DeviceWeights) -> NormWeights:
        return weights.norm(self.norm)

    def run(self, step: Step, weights: NormWeights, *, source: Tensor, gate: Tensor, target: Tensor) -> None:
        factors = gate[:, self.gate_start : self.gate_start + source.shape[1]]
        norm_with_gate(step.ops, source, factors, weights, self.groups, target, gate_first=self.gate_first)


@operation
class NormAcross(Operation):
    """Norms columns of the target from `start` on, of which other processes have the rest.

    columns: numbers of the columns in the whole row
    width:   of a part of the row, each of which is normed by itself
    parts:   how many the row has
    copies:  how many processes have each of the columns
    """

    target: str = updates()
    norm: Norm
    start: int
    columns: Tensor
    width: int
    parts: int = 1
    copies: int = 1

    def on_cpu(self, layout: CpuLayout) -> None:
        raise UnsupportedConfig("one process on a CPU has whole rows")

    def load(self, weights: DeviceWeights) -> tuple[NormWeights, Tensor]:
        """The norm, and the part of the row that each column is in."""
        if self.norm.kind != "rms":
            raise UnsupportedConfig("its heads are normed together by a LayerNorm, which processes cannot share")
        return weights.norm(self.norm), weights.indices(self.columns // self.width)

    def run(self, step: Step, weights: tuple[NormWeights, Tensor], *, target: Tensor) -> None:
        norm, groups = weights
        part = target[:, self.start : self.start + len(groups)]
        x = part.float()
        squares = x.new_zeros(len(x), self.parts).index_add_(1, groups, x.square())
        step.all_reduce(squares)
        x = x * torch.rsqrt(squares[:, groups] / (self.width * self.copies) + norm.eps)
        part.copy_(x if norm.weight is None else x * norm.weight)


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
