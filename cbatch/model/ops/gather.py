"""Columns of buffers in another order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cbatch.kernels.cpu.program import BUFFER, ROWS_PER_TASK, floats_of, instruction
from cbatch.kernels.cpu.work_queue import Worker, claimed
from cbatch.model.device_weights import DeviceWeights
from cbatch.model.ops.cpu_layout import CpuLayout
from cbatch.model.ops.device_plan import Step
from cbatch.model.ops.operation import Operation, operation, reads, writes
from cbatch.model.ops.shards import Columns, Made, Shards


@operation
class Gather(Operation):
    """target[:, i] = the sources side by side [:, columns[i]].  columns: int64"""

    sources: tuple[str, ...] = reads()
    target: str = writes()
    columns: Tensor

    def target_width(self, width: Callable[[str], int]) -> int:
        return len(self.columns)

    def on_shard(self, shards: Shards) -> Made:
        own = shards.written(self.target).take()
        columns = self.columns if own is None else self.columns[own]
        sources = [shards.read(name) for name in self.sources]
        parts = list(zip(sources, accumulate((source.width for source in sources), initial=0), strict=False))

        def within(source: Columns, start: int) -> Tensor:
            return (columns >= start) & (columns < start + source.width)

        for source, start in parts:
            source.need(partial(torch.unique, columns[within(source, start)] - start))

        def made() -> tuple[Gather]:
            local, place = torch.empty_like(columns), 0
            for source, start in parts:
                inside = within(source, start)
                local[inside] = place + source.places_of(columns[inside] - start)
                place += source.width if source.chosen is None else len(source.chosen)
            return (replace(self, columns=local),)

        return made

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
