"""The norm of what a recurrent layer gives, with a gate."""

from __future__ import annotations

from typing import Any

from cbatch.kernels.cpu.fast_math import from_float32, silu
from cbatch.kernels.cpu.jit import kernel
from cbatch.kernels.cpu.norm import NormParams, normalize
from cbatch.kernels.cpu.work_queue import Worker, claim, next_task

_ROWS = 8
"""Rows of a task."""


@kernel
def _apply_gate(x: Any, gate: Any) -> None:
    for i in range(len(x)):
        x[i] *= silu(gate[i])


@kernel
def gated_norm(
    worker: Worker, phase: int, source: Any, gates: Any, start: int, columns: int, norm: NormParams, groups: int,
    gate_first: int, out: Any,
) -> int:  # fmt: skip
    """out [T, columns] = the norm of each group of the source, which changes, and the gate (see `GatedNorm`).

    gates: [T, ...], of which the gate is the columns from `start`
    """
    width, tokens = columns // groups, len(source)
    num_tasks = -(-tokens // _ROWS)
    task = claim(worker, phase, num_tasks)
    while task >= 0:
        for row in range(task * _ROWS, min(tokens, (task + 1) * _ROWS)):
            x, gate = source[row, :columns], gates[row, start : start + columns]
            if gate_first:
                _apply_gate(x, gate)
            for first in range(0, columns, width):
                part = x[first : first + width]
                weight = norm.weight[first : first + width] if len(norm.weight) else norm.weight
                normalize(part, NormParams(norm.kind, norm.eps, weight, norm.bias), part)
            if not gate_first:
                _apply_gate(x, gate)
            for i in range(columns):
                out[row, i] = from_float32(x[i], out)
        task = next_task(worker, phase, num_tasks)
    return phase + 1
