"""Runs the program of a model: one step, from token ids to logits, in one call.

A program is a list of instructions. Each has a record of its own type, which an operation writes
(`model/ops/NAME.py`), and a function, which is compiled by itself if the program uses it. It is one phase of the step
or several, whose tasks the threads share (see `work_queue`). Buffers of float32, and of the type that goes into
products, lie in two arenas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numba import typeof, types
from numpy.typing import NDArray

from cbatch.kernels.cpu.activation import ActivationParams
from cbatch.kernels.cpu.jit import (
    Part,
    Reference,
    as_pointer,
    as_rows,
    call_address,
    code_size,
    entry,
    inlined,
    kernel,
    reference_to,
)
from cbatch.kernels.cpu.matmul.experts import Routing
from cbatch.kernels.cpu.matmul.linear import LinearWorkspace, PackedMatrix
from cbatch.kernels.cpu.matmul.lora import LoraStep
from cbatch.kernels.cpu.norm import NormParams
from cbatch.kernels.cpu.paged_kv import AttentionPlan, AttentionWorkspace, PagedCaches
from cbatch.kernels.cpu.recurrent import Recurrence
from cbatch.kernels.cpu.work_queue import Worker, lone_worker

ROWS_PER_TASK = 8
"""Rows of a task, for what is done row by row."""

BUFFER = np.dtype([("start", np.int64), ("width", np.int64)])
"""Where a buffer begins in its arena, in columns of the step, and its width."""

MATRIX = np.dtype([(name, np.int64) for name in ("start", "format", "scale", "bias")])
"""Where a matrix begins among all, in bytes; how it is packed (see `matmul/formats.py`); where the factors and the
biases of its columns begin, -1 for none."""

NORM = np.dtype([("kind", np.int64), ("eps", np.float32), ("weight", np.int64), ("bias", np.int64)])
"""See `NormParams`. The weight and bias are places among the vectors, -1 for none."""

ACTIVATION = np.dtype([("kind", np.int64), ("params", np.int64)])
"""See `ActivationParams`. The parameters are a place among the vectors, -1 for none."""


NO_PROGRAM = np.empty((0, 2), np.int64)
"""For the types of `run_step`."""


class Weights(NamedTuple):
    """A model's weights.

    matrices: every linear, packed (see `matmul/formats.py`) one after the other
    scales:   float32, a factor for each column of some matrices
    vectors:  float32: norms, biases, parameters of activations
    tables:   embeddings, row by row
    indices:  int64 column numbers
    """

    matrices: NDArray[np.uint8]
    scales: NDArray[np.float32]
    vectors: NDArray[np.float32]
    tables: NDArray[Any]
    indices: NDArray[np.int64]


class StepInputs(NamedTuple):
    """The inputs that change from step to step.

    ids:           [T] token ids
    positions:     [T] position of each token in its sequence
    rotary:        float32, of each rotary setting a row for every position up to the largest: cosines and sines
                   [rotary_dim / 2] each, and the factor of the query
    rotary_layout: [settings, 2] int64, where the rows of each begin, and rotary_dim / 2
    every:         [T] 0 to T - 1
    rows:          [R] rows whose logits are wanted
    images:        [E, hidden size] float32, what is embedded for tokens that images replace
    image_rows:    [T] int64, which of these a token has, -1 for none; empty if there are none
    """

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    rotary: NDArray[np.float32]
    rotary_layout: NDArray[np.int64]
    every: NDArray[np.int64]
    rows: NDArray[np.int64]
    images: NDArray[np.float32]
    image_rows: NDArray[np.int64]


class Arenas(NamedTuple):
    """Memory of all buffers, which one step leaves to the next. elements: of the type that goes into products."""

    floats: NDArray[np.float32]
    elements: NDArray[Any]


class Buffers(NamedTuple):
    """All memory that one step leaves to the next."""

    arenas: Arenas
    linear: LinearWorkspace
    attention: AttentionWorkspace
    routing: Routing


class StepOutputs(NamedTuple):
    """The outputs of a step for R rows.

    logits:  [R, columns] float32, of which the first `vocabulary` count
    tokens:  [R] int64, the first of the tokens with the largest logit
    largest: [R] float32, its logit; NaN if any logit of the row is NaN
    """

    logits: NDArray[np.float32]
    vocabulary: int
    tokens: NDArray[np.int64]
    largest: NDArray[np.float32]


class Step(NamedTuple):
    """The state that the instructions of a step share.

    recurrence: its memory as bytes
    """

    weights: Weights
    caches: PagedCaches
    plan: AttentionPlan
    inputs: StepInputs
    buffers: Buffers
    recurrence: Recurrence
    lora: LoraStep
    outputs: StepOutputs


@dataclass(frozen=True, slots=True, eq=False)
class Instruction:
    """A kind of instruction.

    function: of a worker, a phase, a record and a step; it runs the instruction and returns the next phase
    fields:   names and types of the record's parts; None for a number of the type of recurrent states
    """

    function: Callable[[Worker, int, Any, Step], int]
    fields: dict[str, Any]

    def record_type(self, state_type: np.dtype[Any]) -> np.dtype[Any]:
        return np.dtype([(name, state_type if kind is None else kind) for name, kind in self.fields.items()])


def parts_of(records: Mapping[Instruction, NDArray[Any]], step: Step) -> dict[Instruction, Part]:
    """The functions compiled for instructions with such records, and for steps of these types.

    Those that take longest to compile come first.
    """
    worker, shared = typeof(lone_worker()), Reference(typeof(step))
    kinds = sorted(records, key=lambda kind: -code_size(kind.function))
    return {
        kind: Part(kind.function, types.int64(worker, types.int64, typeof(records[kind]).dtype, shared))
        for kind in kinds
    }


def entry_of(step: Step) -> Part:
    """The function that runs all instructions of such steps."""
    return Part(run_step, tuple(map(typeof, (lone_worker(), NO_PROGRAM, step))))


def instruction(integers: str = "", floats: str = "", **fields: Any) -> Callable[[Any], Instruction]:
    """Makes a function of a module the instruction of that name, with these fields."""
    kinds = dict.fromkeys(integers.split(), np.int64) | dict.fromkeys(floats.split(), np.float32) | fields
    return lambda function: Instruction(function, kinds)


@inlined
def floats_of(step: Step, place: Any) -> Any:
    """A buffer [T, width] of float32.  place: BUFFER"""
    tokens = len(step.inputs.ids)
    return as_rows(
        step.buffers.arenas.floats[place.start * tokens : (place.start + place.width) * tokens], tokens, place.width
    )


@inlined
def elements_of(step: Step, place: Any) -> Any:
    """A buffer [T, width] of the type that goes into products.  place: BUFFER"""
    tokens = len(step.inputs.ids)
    return as_rows(
        step.buffers.arenas.elements[place.start * tokens : (place.start + place.width) * tokens], tokens, place.width
    )


@inlined
def vector_of(weights: Weights, start: int, size: int) -> Any:
    """So many numbers of the vectors; none if `start` is negative."""
    return weights.vectors[start : start + size] if start >= 0 else weights.vectors[:0]


@kernel
def matrix_of(weights: Weights, place: Any) -> PackedMatrix:
    """place: MATRIX"""
    nothing = weights.vectors[:0]
    return PackedMatrix(
        weights.matrices,
        place.start,
        place.format,
        weights.scales[place.scale :] if place.scale >= 0 else nothing,
        weights.vectors[place.bias :] if place.bias >= 0 else nothing,
    )


@kernel
def activation_of(weights: Weights, place: Any) -> ActivationParams:
    """place: ACTIVATION"""
    return ActivationParams(place.kind, weights.vectors[place.params : place.params + 4])


@kernel
def norm_of(weights: Weights, place: Any, size: int) -> NormParams:
    """A norm of so many columns.  place: NORM"""
    return NormParams(
        place.kind, place.eps, vector_of(weights, place.weight, size), vector_of(weights, place.bias, size)
    )


@entry
def run_step(worker: Worker, program: NDArray[np.int64], step: Step) -> None:
    """Computes the outputs of a step, and stores its keys and values in the cache.

    Every thread of a pool calls it. Each phase returns when all of its tasks are complete.

    program: [instructions, 2] the addresses of each one's function and of its record
    """
    # Not a plain 0: that has a type of its own, for which every kernel below would be compiled once more.
    phase: Any = np.int64(0)
    shared = reference_to(step)
    for index in range(len(program)):
        function, record = program[index, 0], program[index, 1]
        phase = call_address(function, (worker, phase, as_pointer(record), shared))
