"""The first operation of a program: the embedding of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cbatch.kernels.cpu.fast_math import to_float32
from cbatch.kernels.cpu.matmul.formats import unpack_column
from cbatch.kernels.cpu.matmul.microkernel import pad_columns
from cbatch.kernels.cpu.program import BUFFER, MATRIX, ROWS_PER_TASK, floats_of, instruction
from cbatch.kernels.cpu.work_queue import Worker, claimed
from cbatch.kernels.formats import ON_CPU
from cbatch.kernels.operands import Embedding
from cbatch.kernels.quantized_matrix import QuantizedMatrix
from cbatch.model.ops.cpu_layout import CpuLayout, MatrixPlace
from cbatch.model.ops.device_plan import Begin, Buffer, DevicePlan, Run, Step
from cbatch.model.ops.operation import Operation, operation, updates, writes
from cbatch.model.ops.products import look_up
from cbatch.model.ops.residual import embed_and_norm
from cbatch.model.ops.shards import Made, Shards
from cbatch.model.weight import RESIDUAL, Matrix, Weight


@operation
class Embed(Operation):
    """target = scale * table[token ids] + positions[position + position_offset]; in the residual stream, rows of
    images, times `image_scale`, have the place of their tokens.

    first_row: of the table, of which other processes have other rows; None: it is whole
    """

    table: Weight
    scale: float = 1.0
    positions: Weight | None = None
    position_offset: int = 0
    first_row: int | None = None
    image_scale: float = 1.0
    target: str = writes(default=RESIDUAL)

    @property
    def keeps_sum(self) -> bool:
        return True

    def target_width(self, width: Callable[[str], int]) -> int:
        return self.table.size[1]

    def on_shard(self, shards: Shards) -> Made:
        shards.alike(self)
        table = shards.embedding if shards.is_first(self.table) else shards.rows_of(self.table)
        first = shards.part.range_of(self.table.size[0]).start
        return lambda: (replace(self, table=table, first_row=first),)

    def on_cpu(self, layout: CpuLayout) -> None:
        width, matrix, is_first = self.table.size[1], None, self.table is layout.program.embedding
        if is_first and layout.head is not None:
            matrix = layout.head
        elif is_first and layout.stored is not None and layout.stored.packing([self.table], ON_CPU) is not None:
            matrix = layout.matrix(Matrix((self.table,)), pad_columns(width))
        layout.add(
            embed, self, floats=width, width=width, factor=self.scale,
            matrix=matrix or MatrixPlace(-1, 0), table=layout.table(self.table) if matrix is None else -1,
            positions=None if self.positions is None else layout.table(self.positions),
            takes_images=self.target == RESIDUAL, image_factor=self.image_scale,
        )  # fmt: skip

    def on_device(self, plan: DevicePlan) -> Run | None:
        found = self._looked_up(plan)
        if self.target == RESIDUAL:
            plan.begins = _with_images(found, self.image_scale)
            return None
        target = plan.written(self.target, self.table.size[1])

        def run(step: Step) -> None:
            embed_and_norm(step.ops, *found(step), step.inputs.position_ids, step[target], None, None)

        return run

    def _looked_up(self, plan: DevicePlan) -> Begin:
        """The embedding of a step and the rows that are taken of it.

        Those of a quantized embedding become numbers first, and those of one that processes share are summed.
        """
        weights = plan.weights
        table, given = weights.embedding(self.table), self.positions
        positions = None if given is None else weights.table(given)
        first, count = self.first_row, self.table.size[0]
        if first is None and isinstance(table, Tensor):
            embedding = Embedding(table, self.scale, positions, self.position_offset)
            return lambda step: (embedding, step.ids)
        buffer = Buffer("(embedded)", self.table.size[1], isinstance(table, QuantizedMatrix))

        def look_up_first(step: Step) -> tuple[Embedding, Tensor]:
            ids, found = step.ids, step[buffer]
            if first is not None:
                elsewhere = (ids < first) | (ids >= first + count)
                ids = torch.where(elsewhere, 0, ids - first)
            if isinstance(table, QuantizedMatrix):
                look_up(step.ops, table, ids, found)
            else:
                torch.index_select(table, 0, ids, out=found)
            if first is not None:
                step.all_reduce(found.masked_fill_(elsewhere[:, None], 0))
            rows = torch.arange(len(ids), device=ids.device)
            return Embedding(found, self.scale, positions, self.position_offset), rows

        return look_up_first


def _with_images(begin: Begin, scale: float) -> Begin:
    """The same, with rows of images, times `scale`, in place of those of their tokens."""

    def find(step: Step) -> tuple[Embedding, Tensor]:
        embedding, ids = begin(step)
        if (images := step.inputs.images) is None:
            return embedding, ids
        rows = embedding.table[ids].float() * embedding.scale
        rows[images.places] = images.values[:, : rows.shape[1]].float() * scale
        return embedding._replace(table=rows, scale=1.0), torch.arange(len(ids), device=ids.device)

    return find


@operation
class AddImage(Operation):
    """target += what the vision tower gives for a layer, where images stand (see `ImageRows`).

    level: number of the layer
    """

    level: int
    target: str = updates(default=RESIDUAL)

    def on_cpu(self, layout: CpuLayout) -> None:
        layout.add(add_image, self, width=layout.program.hidden_size)

    def run(self, step: Step, weights: Any, *, target: Tensor) -> None:
        if (images := step.inputs.images) is not None:
            width = target.shape[1]
            added = images.values[:, (self.level + 1) * width : (self.level + 2) * width]
            target.index_add_(0, images.places, added.to(target.dtype))


@instruction("level width", target=BUFFER)
def add_image(worker: Worker, phase: int, op: Any, step: Any) -> int:
    places, images, target = step.inputs.image_rows, step.inputs.images, floats_of(step, op.target)
    tokens = len(target)
    for task in claimed(worker, phase, -(-tokens // ROWS_PER_TASK)):
        for row in range(task * ROWS_PER_TASK, min(tokens, (task + 1) * ROWS_PER_TASK)):
            if len(places) and places[row] >= 0:
                for i in range(op.width):
                    target[row, i] += images[places[row], (op.level + 1) * op.width + i]
    return phase + 1


@instruction("width table positions position_offset takes_images", "factor image_factor", target=BUFFER, matrix=MATRIX)
def embed(worker: Worker, phase: int, op: Any, step: Any) -> int:
    """table: where the embedding begins among the tables; -1 if it is a packed matrix"""
    weights, ids, out = step.weights, step.inputs.ids, floats_of(step, op.target)
    matrix, hidden, has_images = op.matrix, out.shape[1], op.takes_images and len(step.inputs.image_rows)
    for task in claimed(worker, phase, -(-len(ids) // ROWS_PER_TASK)):
        for row in range(task * ROWS_PER_TASK, min(len(ids), (task + 1) * ROWS_PER_TASK)):
            factor, image = op.factor, step.inputs.image_rows[row] if has_images else -1
            if image >= 0:
                for i in range(hidden):
                    out[row, i] = step.inputs.images[image, i] * op.image_factor if i < op.width else np.float32(0)
            elif op.table < 0:
                if matrix.scale >= 0:
                    factor = factor * weights.scales[matrix.scale + ids[row]]
                unpack_column(weights.matrices, matrix.start, matrix.format, ids[row], factor, out[row])
            else:
                base = op.table + ids[row] * op.width
                for i in range(op.width):
                    out[row, i] = factor * to_float32(weights.tables[base + i])
                for i in range(op.width, hidden):
                    out[row, i] = np.float32(0)
            if op.positions >= 0:
                base = op.positions + (step.inputs.positions[row] + op.position_offset) * op.width
                for i in range(op.width):
                    out[row, i] += to_float32(weights.tables[base + i])
    return phase + 1
