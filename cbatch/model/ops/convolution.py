"""Short convolutions over the tokens of each sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from cbatch.kernels.cpu.program import BUFFER, elements_of, floats_of, instruction
from cbatch.kernels.cpu.recurrent import as_numbers
from cbatch.kernels.cpu.recurrent import convolve as convolve_chunks
from cbatch.kernels.cpu.work_queue import Worker
from cbatch.kernels.operands import Recurrence
from cbatch.model.device_weights import DeviceWeights
from cbatch.model.ops.cpu_layout import CpuLayout, unpadded
from cbatch.model.ops.device_kernel import device_kernel
from cbatch.model.ops.device_plan import Step
from cbatch.model.ops.operation import Operation, numbers_a, operation, reads, writes
from cbatch.model.ops.recurrent import pieces
from cbatch.model.ops.shards import Made, Shards, taken
from cbatch.model.weight import Weight


@operation
class ShortConvolution(Operation):
    """target [T, channels] = activation(a causal convolution over the tokens of each sequence, channel by channel).

    start:       first column of the source that goes in
    weight:      [channels, 1, kernel]; its last number is for the token itself
    state:       number of the state [channels, kernel - 1]: what the last tokens gave, the last one last
    activation:  silu, or none
    input_gate:  first column of the source with which what goes in is multiplied; None for none
    output_gate: likewise for what comes out
    """

    source: str = reads()
    target: str = writes()
    weight: Weight
    state: int = numbers_a("state")
    start: int = 0
    bias: Weight | None = None
    activation: Literal["silu", "none"] = "none"
    input_gate: int | None = None
    output_gate: int | None = None

    @property
    def channels(self) -> int:
        return self.weight.size[0]

    @property
    def kernel(self) -> int:
        return self.weight.size[-1]

    def target_width(self, width: Callable[[str], int]) -> int:
        return self.channels

    def on_shard(self, shards: Shards) -> Made:
        target, source = shards.written(self.target), shards.read(self.source)
        own = target.take(shards.share_of(target))
        if own is None:
            source.need_all()
            return lambda: (self,)
        columns = [None if start is None else start + own for start in (self.start, self.input_gate, self.output_gate)]
        source.need(lambda: torch.cat([one for one in columns if one is not None]))
        shards.set_state(self.state, len(own), self.kernel - 1)

        def made() -> tuple[Operation, ...]:
            start, *gates = (None if one is None else source.start_of(one) for one in columns)
            assert start is not None
            weight, bias = (None if one is None else taken((one,), own)[0] for one in (self.weight, self.bias))
            assert weight is not None
            mine = replace(self, weight=weight, bias=bias, start=start, input_gate=gates[0], output_gate=gates[1])
            return (mine,)

        return made

    def on_cpu(self, layout: CpuLayout) -> None:
        channels, kernel, weight = self.channels, self.kernel, self.weight
        is_element = self.target in layout.multiplied
        sums = layout.floats(f"sums of {self.target}" if is_element else self.target, channels)

        def taps(tensors: Any) -> Tensor:
            return weight.read(tensors[weight.name]).float().view(channels, kernel).T.flatten()

        layout.add(
            convolve, self, source=layout.read(self.source), sums=sums, is_element=is_element,
            target=layout.elements(self.target, unpadded(channels)) if is_element else sums,
            weight=layout.numbers(kernel * channels, taps), is_silu=self.activation == "silu",
        )  # fmt: skip

    def load(self, weights: DeviceWeights) -> tuple[Tensor, Tensor | None]:
        weight = weights.vector(self.weight).view(self.channels, self.kernel)
        return weight, None if self.bias is None else weights.vector(self.bias)

    def run(self, step: Step, weights: tuple[Tensor, Tensor | None], *, source: Tensor, target: Tensor) -> None:
        part, *gates = (
            None if start is None else source[:, start : start + self.channels]
            for start in (self.start, self.input_gate, self.output_gate)
        )
        assert part is not None
        state = step.inputs.states[self.state]
        convolve_by_channel(step.ops, part, weights, self.activation, state, step.recurrence, target, *gates)


@device_kernel("convolution:convolve", waits=True)
def convolve_by_channel(
    source: Tensor, weights: tuple[Tensor, Tensor | None], activation: str, state: Tensor, recurrence: Recurrence,
    out: Tensor, input_gate: Tensor | None, output_gate: Tensor | None,
) -> None:  # fmt: skip
    """out [T, channels] = output_gate * activation(convolution(source * input_gate)) of each chunk.

    source, gates: [T, channels], maybe columns of wider tensors
    weights:       [channels, kernel] float32, and the bias [channels] float32, or None
    state:         [slots, channels, kernel - 1], read and written
    """
    weight, bias = weights
    gated = source if input_gate is None else source.float() * input_gate
    found, (channels, kernel) = gated.new_zeros(gated.shape, dtype=torch.float32), weight.shape
    for piece in pieces(recurrence):
        new = gated[piece.start : piece.stop].float().T
        seen = torch.cat([state[piece.slot].float(), new], dim=1)
        rows = functional.conv1d(seen[None], weight[:, None], bias, groups=channels)[0].T
        found[piece.start : piece.stop] = functional.silu(rows) if activation == "silu" else rows
        piece.keep(state, seen[:, seen.shape[1] - (kernel - 1) :])
    out.copy_(found if output_gate is None else found * output_gate)


@instruction(
    "kernel channels weight bias is_silu start input_gate output_gate state is_element", source=BUFFER, sums=BUFFER,
    target=BUFFER, state_type=None,
)  # fmt: skip
def convolve(worker: Worker, phase: int, op: Any, step: Any) -> int:
    """sums: memory; is_element: whether the target goes into a product, else it is the same memory"""
    states, vectors = as_numbers(step.recurrence, op.state_type), step.weights.vectors
    source, sums = floats_of(step, op.source), floats_of(step, op.sums)
    if op.is_element:
        return convolve_chunks(worker, phase, op, vectors, states, source, sums, elements_of(step, op.target))
    return convolve_chunks(worker, phase, op, vectors, states, source, sums, sums)
