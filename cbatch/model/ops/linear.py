"""Products of buffers with matrices, and activations of what they give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from cbatch.kernels.cpu.matmul.linear import ACTIVATED, ADD, GATED, WRITE, matmul
from cbatch.kernels.cpu.matmul.lora import activate_product, add_adapters
from cbatch.kernels.cpu.matmul.microkernel import LANES, pad_columns
from cbatch.kernels.cpu.program import (
    ACTIVATION,
    BUFFER,
    MATRIX,
    activation_of,
    elements_of,
    floats_of,
    instruction,
    matrix_of,
)
from cbatch.kernels.cpu.work_queue import Worker
from cbatch.model.config import UnsupportedConfig
from cbatch.model.ops.cpu_layout import CpuLayout, product_columns
from cbatch.model.ops.device_kernel import device_kernel
from cbatch.model.ops.device_plan import Buffer, DevicePlan, Run, Step
from cbatch.model.ops.operation import Operation, operation, reads, writes
from cbatch.model.ops.products import multiply
from cbatch.model.ops.shards import Made, Shards
from cbatch.model.weight import RESIDUAL, Activation, Matrix, Weight

PRODUCT, ACTIVATED_PRODUCT = "(product)", "(activated)"
"""Buffers that the program does not name."""


@operation
class Linear(Operation):
    """target = factor * activation(source times matrix + biases); added to the target if `add`.

    A gated activation takes two columns for each of its own, all gates before all ups.

    is_summed: each of several processes has a part of the depth, and products are summed over them
    """

    source: str = reads()
    target: str = writes()
    matrix: Matrix
    add: bool = False
    factor: float = 1.0
    activation: Activation | None = None
    is_summed: bool = False
    is_product = True

    @property
    def is_gated(self) -> bool:
        return self.activation is not None and self.activation.gated

    @property
    def width(self) -> int:
        return self.matrix.columns // 2 if self.is_gated else self.matrix.columns

    @property
    def multiplied(self) -> int:
        return self.matrix.size

    def target_width(self, width: Callable[[str], int]) -> int:
        return self.width

    def on_shard(self, shards: Shards) -> Made:
        target = shards.read(self.target) if self.add else shards.written(self.target)
        if self.add:
            target.need_all()
        own, source = target.take(shards.share_of(target)), shards.read(self.source)
        if own is not None:
            source.need_all()
            columns = torch.cat([own, self.width + own]) if self.is_gated else own
            return lambda: (replace(self, matrix=shards.matrix(self.matrix, columns)),)
        source.need_any(shards.grain([self.matrix]))

        def made() -> tuple[Linear]:
            if source.chosen is None:
                return (self,)
            return (replace(self, matrix=shards.matrix(self.matrix, None, source.depth), is_summed=True),)

        return made

    def on_cpu(self, layout: CpuLayout) -> None:
        act, (source, depth) = self.activation, layout.read(self.source)
        if act is None:
            mode = ADD if self.add else WRITE
            target = layout.floats(self.target, self.width)
        else:
            if self.add or self.factor != 1:
                raise UnsupportedConfig("what an activation gives is neither scaled nor added")
            mode = GATED if act.gated else ACTIVATED
            target = layout.elements(self.target, self.width, activated_width(self.width, is_gated=act.gated))
        activation = layout.activation(act)
        matrix = layout.matrix(self.matrix, depth, is_gated=mode == GATED, factor=self.factor)
        added, columns, places = target, self.matrix.columns, layout.adapted.get(self)
        if places is not None and act is not None:  # adapters add in front of the activation
            added = layout.floats(PRODUCT, product_columns(columns, is_gated=act.gated))
        layout.add(
            product, source=(source, depth), target=added, matrix=matrix, activation=activation,
            mode=mode if added is target else WRITE, is_logits=False,
        )  # fmt: skip
        if places is not None:
            given, (linear, first) = self.matrix.depth, places
            layout.add(adapt, source=(source, depth), target=added, depth=given, linear=linear, first_tile=first)
            if act is not None:
                layout.add(activate_sums, source=added, target=target, activation=activation, mode=mode)

    def on_device(self, plan: DevicePlan) -> Run:
        source, (matrix, bias) = plan.read(self.source), plan.weights.linear(self.matrix)
        columns = self.matrix.columns
        activation = None if self.activation is None else plan.weights.activation(self.activation)
        if self.target == RESIDUAL and self.add and activation is None:
            target = product = plan.added(columns, self.factor)
        else:
            target = plan.written(self.target, self.width)
            is_direct = activation is None and not (self.add or target.is_float or self.factor != 1)
            product = target if is_direct else Buffer(PRODUCT, columns)

        def run(step: Step) -> None:
            found = step[product]
            multiply(step.ops, step[source], matrix, bias, found)
            step.adapt(self, source, found)
            if self.is_summed:
                step.all_reduce(found)
            if product is target:
                return
            if activation is not None:
                is_last = not self.add and self.factor == 1
                activated = step[target] if is_last else step[Buffer(ACTIVATED_PRODUCT, self.width)]
                activate(step.ops, found, activation, activated)
                found = activated
            if self.add:
                step[target].add_(found, alpha=self.factor)
            elif found is not step[target]:
                torch.mul(found, self.factor, out=step[target])

        return run


def activated_width(columns: int, *, is_gated: bool) -> int:
    """Of so many columns, as products leave them after an activation."""
    return -(-columns // LANES) * LANES if is_gated else pad_columns(columns)


@device_kernel("activation:activate")
def activate(up: Tensor, activation: Activation, out: Tensor) -> None:
    """out [T, inner] = activation(up), or activation(gate) * up with both [T, 2 * inner] = gate, then up.

    activation: with numbers as its parameters
    """
    up = up.float()
    if not activation.gated:
        out.copy_(_activated(up, activation))
        return
    gate, up = up.chunk(2, dim=-1)
    if activation.limit:
        most = activation.up_limit or activation.limit
        gate, up = gate.clamp(max=activation.limit), up.clamp(-most, most)
    out.copy_(_activated(gate, activation) * (up + activation.up_offset))


def _activated(x: Tensor, activation: Activation) -> Tensor:
    match activation.name:
        case "silu":
            return x * torch.sigmoid(activation.slope * x)
        case "gelu":
            return functional.gelu(x)
        case "gelu_tanh":
            return functional.gelu(x, approximate="tanh")
        case "relu":
            return torch.relu(x)
        case "relu2":
            return torch.relu(x).square()
        case "sigmoid":
            return torch.sigmoid(x)
        case "xielu":
            positive, negative, beta, largest = (float(one) for one in activation.params if not isinstance(one, Weight))
            below = (negative + beta) * (torch.expm1(x.clamp(max=largest)) - x) + beta * x
            return torch.where(x > 0, positive * x * x + beta * x, below)
    return x


@instruction("mode is_logits", source=BUFFER, target=BUFFER, matrix=MATRIX, activation=ACTIVATION)
def product(worker: Worker, phase: int, op: Any, step: Any) -> int:
    """mode: see `matmul`; is_logits: of the first rows of the source, to the outputs of the step"""
    source, matrix = elements_of(step, op.source), matrix_of(step.weights, op.matrix)
    activation, workspace = activation_of(step.weights, op.activation), step.buffers.linear
    if op.mode <= ADD:
        out = floats_of(step, op.target)
        if op.is_logits:
            out = step.outputs.logits
            source = source[: len(out)]
            if len(out) == 0:  # chunks of prompts only; a phase must have a task
                return phase
        return matmul(worker, phase, source, matrix, out, op.mode, activation, workspace)
    activated = elements_of(step, op.target)
    return matmul(worker, phase, source, matrix, activated, op.mode, activation, workspace)


@instruction("depth linear first_tile", source=BUFFER, target=BUFFER)
def adapt(worker: Worker, phase: int, op: Any, step: Any) -> int:
    """Adds to a product what adapters add to it.  linear, first_tile: see `add_adapters`"""
    source, out = elements_of(step, op.source), floats_of(step, op.target)
    return add_adapters(worker, phase, op.linear, op.first_tile, op.depth, source, step.lora, out)


@instruction("mode", source=BUFFER, target=BUFFER, activation=ACTIVATION)
def activate_sums(worker: Worker, phase: int, op: Any, step: Any) -> int:
    """Activates a product to which adapters were added."""
    source, out = floats_of(step, op.source), elements_of(step, op.target)
    activation = activation_of(step.weights, op.activation)
    return activate_product(worker, phase, source, op.mode, activation, step.buffers.linear, out)
