"""Lays out a program for a device that runs it operation by operation: weights, buffers, and calls of kernels.

What is added to the residual waits for the norm that comes next, so that both are one kernel: a linear leaves its
product in a buffer, or a post-norm its source, until the residual is read. So does the embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from cbatch.kernels.operands import Addend, Embedding, NormWeights, Positions, Recurrence, Routing
from cbatch.kernels.quantized_matrix import QuantizedMatrix
from cbatch.model.base import DeviceInputs, HiddenStates
from cbatch.model.device_weights import DeviceWeights
from cbatch.model.ops.device_kernel import DeviceOps
from cbatch.model.ops.operation import Operation, with_role
from cbatch.model.ops.program import Program
from cbatch.model.ops.residual import add_and_norm, embed_and_norm
from cbatch.model.weight import RESIDUAL
from cbatch.runtime.process_group import ProcessGroup

_MOST_ADDENDS = 2

ADDED = "(added)"
"""The buffer `HiddenStates.added`."""


class Buffer(NamedTuple):
    """A tensor [T, width] of a step.  is_float: of float32, because it is added to; else of the model's type"""

    name: str
    width: int
    is_float: bool = False


@dataclass(slots=True)
class Step:
    """The state that the operations of a step share.

    ids:       [T] the tokens that are embedded
    hidden:    the residual [T, hidden] float32. In a decode step it stays in the device's cache. For 2,000 tokens of an
               8B model, half the bytes would save 67 MB of memory traffic beside 0.9 TFLOP, by calculation a hundredth
               of a layer's time; and rounding it in every layer is much of what a model loses in bfloat16.
    positions: for each rotary setting, and last for none
    routing:   of the last router
    group:     the processes that compute the step together; None for this one alone
    """

    ops: DeviceOps
    ids: Tensor
    inputs: DeviceInputs
    hidden: HiddenStates
    positions: list[Positions]
    buffers: dict[Buffer, Tensor] = field(default_factory=dict)
    routing: Routing | None = None
    group: ProcessGroup | None = None

    @property
    def recurrence(self) -> Recurrence:
        """Where the chunks have their states, of a model that has recurrent layers."""
        assert self.inputs.recurrence is not None
        return self.inputs.recurrence

    def adapt(self, linear: Operation, source: Buffer, out: Tensor) -> None:
        """Adds to a linear's product what adapters add to it, for tokens that have one."""
        if self.inputs.adapters is not None:
            self.inputs.adapters(linear, self[source], out)

    def all_reduce(self, part: Tensor) -> None:
        """Sums what each process has in such a tensor, in place."""
        if self.group is not None:
            self.group.all_reduce(part)

    def __getitem__(self, buffer: Buffer) -> Tensor:
        """The memory of a buffer, which every layer uses again."""
        if buffer.name in (RESIDUAL, ADDED):
            return self.hidden.residual if buffer.name == RESIDUAL else self.hidden.added
        if buffer not in self.buffers:
            added = self.hidden.added
            dtype = torch.float32 if buffer.is_float else added.dtype
            self.buffers[buffer] = added.new_empty(len(added), buffer.width, dtype=dtype)
        return self.buffers[buffer]


Run = Callable[[Step], None]
"""Runs an operation in a step."""

Begin = Callable[[Step], tuple[Embedding, Tensor]]
"""The embedding of a step, and which of its rows are taken."""


class Pending(NamedTuple):
    """A sum that the residual still waits for."""

    buffer: Buffer
    factor: float
    norm: NormWeights | None = None


class DeviceHead(NamedTuple):
    """The output head (see `Head`).

    added:   factor of `HiddenStates.added`, which the head adds to the residual; None if it does not
    lm_head: [vocabulary, hidden]
    bias:    [vocabulary] float32
    """

    added: float | None
    norm: NormWeights
    lm_head: Tensor | QuantizedMatrix
    bias: Tensor | None
    factor: float
    softcap: float


class DevicePlan:
    """A program with its weights on a device.

    calls:   all operations but the head, in their order
    head:    set by the operation `Head`
    pending: what is still to be added to the residual
    begins:  with what the residual begins, until it does
    """

    head: DeviceHead

    def __init__(self, program: Program, weights: DeviceWeights) -> None:
        """Raises UnsupportedConfig for what operations on a device do not support."""
        self.program, self.weights = program, weights
        self.calls: list[Run] = []
        self.begins: Begin | None = None
        self.pending: list[Pending] = []
        self._floats = {
            name for one in program.operations if one.keeps_sum for _, name in with_role(one, "writes", "updates")
        }
        self.buffers = {RESIDUAL: Buffer(RESIDUAL, program.hidden_size, True)}
        self._inv_freqs = [
            tuple(torch.tensor(inv_freq, device=weights.device) for inv_freq in (rotary.inv_freq, rotary.long_inv_freq))
            for rotary in program.rotaries
        ]
        for operation in program.operations:
            run = operation.on_device(self)
            if run is not None:
                self.calls.append(run)

    def new_step(self, ops: DeviceOps, inputs: DeviceInputs, hidden: HiddenStates, group: ProcessGroup | None) -> Step:
        """hidden: memory for its result; group: see `Step`"""
        ids = inputs.input_ids
        for replaced, instead in self.program.replaced_ids.items():
            ids = torch.where(ids == replaced, instead, ids)
        is_long = None
        if self.program.short_context is not None:
            longest = self.program.max_model_len
            is_long = inputs.position_ids >= longest
            position_ids = torch.where(is_long, inputs.position_ids - longest, inputs.position_ids)
            inputs = inputs._replace(position_ids=position_ids)
        images, turns = inputs.images, inputs.position_ids
        if images is not None and images.positions is not None:
            turns = turns.repeat(3, 1)
            turns[:, images.places] = images.positions
        positions = []  # by torch's own functions, which are exact for large angles too; a kernel's may not be
        for rotary, (inv_freq, long_inv_freq) in zip(self.program.rotaries, self._inv_freqs, strict=True):
            cosines = sines = scales = None
            if len(inv_freq):
                if is_long is not None and len(long_inv_freq):
                    inv_freq = torch.where(is_long[:, None], long_inv_freq, inv_freq)
                cosines, sines = rotary.tables(turns, inv_freq)
            if rotary.scale_beta:
                scales = rotary.query_scales(inputs.position_ids)
            positions.append(Positions(cosines, sines, inputs.slot_mapping, scales))
        positions.append(Positions(None, None, inputs.slot_mapping))
        return Step(ops, ids, inputs, hidden, positions, group=group)

    def read(self, name: str) -> Buffer:
        """The buffer of that name as it was written last."""
        if name == RESIDUAL:
            self.flush()
        return self.buffers[name]

    def written(self, name: str, width: int) -> Buffer:
        """The buffer of that name, which is written next. What the residual holds stays there."""
        if name == RESIDUAL:
            return self.read(name)
        buffer = Buffer(name, width, name in self._floats)
        if any(pending.buffer == buffer for pending in self.pending):
            self.flush()
        self.buffers[name] = buffer
        return buffer

    def bound(self, operation: Operation) -> Run:
        """Runs an operation with its weights, and the buffers that its fields name."""
        given: dict[str, Buffer | tuple[Buffer, ...]] = {}
        for field_name, name in with_role(operation, "reads"):
            given[field_name] = tuple(map(self.read, name)) if isinstance(name, tuple) else self.read(name)
        for field_name, name in with_role(operation, "updates"):
            given[field_name] = self.written(name, self.buffers[name].width)
        for field_name, name in with_role(operation, "writes"):
            given[field_name] = self.written(name, operation.target_width(lambda source: self.buffers[source].width))
        weights = operation.load(self.weights)

        def run(step: Step) -> None:
            buffers = {
                name: step[one] if isinstance(one, Buffer) else tuple(step[each] for each in one)
                for name, one in given.items()
            }
            operation.run(step, weights, **buffers)

        return run

    def flush(self) -> None:
        """Adds to the residual what is still to be added."""
        if self.begins is not None or self.pending:
            self.norm_residual(None, None)

    def norm_residual(self, norm: NormWeights | None, target: Buffer | None) -> None:
        """Adds to the residual what is still to be added, and norms it."""
        begins, pending = self.begins, tuple(self.pending)
        self.begins, self.pending = None, []

        def run(step: Step) -> None:
            out, residual = None if target is None else step[target], step.hidden.residual
            if begins is not None:
                embed_and_norm(step.ops, *begins(step), step.inputs.position_ids, residual, norm, out)
            else:
                addends = tuple(Addend(step[one.buffer], one.factor, one.norm) for one in pending)
                add_and_norm(step.ops, residual, addends, norm, out)

        self.calls.append(run)

    def added(self, columns: int, factor: float) -> Buffer:
        """The buffer of a product that is added to the residual."""
        self.make_room()
        is_first = all(one.buffer.name != ADDED for one in self.pending)
        self.pending.append(Pending(Buffer(ADDED if is_first else "(second addend)", columns), factor))
        return self.pending[-1].buffer

    def make_room(self, *, for_norm: bool = False) -> None:
        """For one more thing to be added to the residual. Only the first of several may have a norm."""
        is_full = len(self.pending) == _MOST_ADDENDS or (bool(self.pending) and for_norm)
        if self.begins is not None or is_full:
            self.flush()
