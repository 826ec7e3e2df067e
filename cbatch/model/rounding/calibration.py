"""Rounds the matrices of a model to 4 bits by what goes through it: one step of its program over some tokens.

The program is run by torch's operations, in float32, with all tokens in one step. So each linear is computed once: its
matrix is read, rounded by the second moments of the rows that it is multiplied with (see `error_feedback.py`), and
multiplied as it is then, so that later matrices are rounded by what the rounded ones before them give. One matrix is in
memory at a time, in float32.

Matrices are found by the program's operations, whatever its family is. All of the parts of a matrix have one format.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cbatch.attention.reference import ReferenceAttention
from cbatch.base.quantization import MOST_DIVERGENCE, Quantization
from cbatch.kernels.formats import INT4_ZEROS, INT8, Integers
from cbatch.kernels.operands import ExpertWeights, Routing
from cbatch.model.cuda import CudaModel
from cbatch.model.device_weights import DeviceWeights
from cbatch.model.families import read_program
from cbatch.model.ops.attention import PrepareHeads
from cbatch.model.ops.device_kernel import DeviceKernel, DeviceOps
from cbatch.model.ops.experts import Experts, expert_linear
from cbatch.model.ops.linear import Linear
from cbatch.model.ops.products import linear
from cbatch.model.ops.program import Program
from cbatch.model.program_model import check_weights, resolved
from cbatch.model.rounding.error_feedback import in_parts, moments_of, rounded_to_4_bits
from cbatch.model.stored import Packing, PlainTensor, Rows, StoredMatrix, StoredWeights, rows_of
from cbatch.model.tensor_files import Tensors
from cbatch.model.weight import Matrix, Weight
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.cpu import single_threaded
from cbatch.runtime.device import is_accelerator
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.memory import MappedFiles, is_out_of_memory
from cbatch.runtime.state_pool import StatePool, StepStates

_log = logging.getLogger("cbatch")

_MOST_TOKENS, _LENGTH, _BLOCK = 2048, 512, 16
"""Of all that go through the model, of a sequence, and of a block of the KV cache."""

_TOKENS_PER_LOGITS = 8
"""Tokens of which one is followed by logits."""

_WEIGHT_OF_MEANS = 8
"""How much `_moments_of_means` counts beside the moments of single tokens."""

_LEAST_TOKENS = 128
"""An expert that fewer tokens go to gets scales that are searched without them."""

_MOST_ON_CPU = 2 * 10**9
"""Numbers of matrices, above which a CPU would take many minutes."""

_LONG = 10**8
"""Numbers of matrices, from which on people are told why they wait."""


class CalibratedWeights(StoredWeights):
    """The weights of plain files, with the matrices of linears and experts in 4 bits, and that of the head in 8.

    All are rounded together, when the first one is asked for.
    """

    is_rounded = True

    def __init__(
        self, config: Mapping[str, Any], program: Program, tensors: Mapping[str, Tensor], files: MappedFiles,
        device: torch.device, ids: Sequence[int] | None,
    ) -> None:  # fmt: skip
        """tensors: by the names of the program, mapped from the files
        device:  that rounds them
        ids:     that go through the model; None to round all matrices to 8 bits
        """
        found: dict[str, StoredMatrix] = {name: PlainTensor(tensors, name) for name in tensors}
        self._parts = [part for matrix in _matrices_of(program) for part in matrix.parts]
        format = INT8 if ids is None else INT4_ZEROS
        found |= {part.name: RoundedMatrix(tensors, part, format, self) for part in self._parts}
        found |= {part.name: RoundedMatrix(tensors, part, INT8, self) for part in program.head.parts}
        self._first_values = _first_values(program)
        super().__init__(found, files)
        self._config, self._tensors, self._device, self._ids = config, tensors, device, ids or ()
        self._kept: dict[str, Integers] = {}
        self._logits: Tensor | None = None
        self._lock = threading.Lock()

    def integers_of(self, name: str) -> Integers:
        """All rows of a matrix in 4 bits, as its file has them."""
        with self._lock:
            if not self._kept:
                self._round()
        return self._kept[name]

    def divergence(self) -> float:
        """How far the rounded model is from what it was: mean Kullback-Leibler divergence of the next token, in nats.

        It is taken after some of the tokens that the matrices are rounded by, which flatters a little. Infinite if they
        are rounded without these.
        """
        with self._lock:
            if not self._kept:
                self._round()
            if self._logits is None:
                return math.inf
            numbers = run_through(self._config, self._tensors, self._device, self._ids, lambda one, _: self._read(one))
        own, rounded = (torch.log_softmax(one, -1) for one in (numbers, self._logits))
        return float((own.exp() * (own - rounded)).sum(-1).mean())

    def forget(self) -> None:
        """Gives back the memory of the integers; whoever asks for them later has them rounded again."""
        self._kept, self._logits = {}, None

    def _round(self) -> None:
        began, size = time.monotonic(), sum(math.prod(part.size) for part in self._parts)
        reason = "a CPU would take many minutes for so large a model"
        if is_accelerator(self._device) or size <= _MOST_ON_CPU:
            if size >= _LONG:
                _log.warning("Weights are being rounded to 4 bits, which takes a while.")
            try:
                self._logits = run_through(self._config, self._tensors, self._device, self._ids, self._rounded)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = f"the memory of {self._device} is too small"
        if self._kept.keys() != {part.name for part in self._parts}:
            _log.warning("Weights are rounded to 4 bits without trying what goes through the model: %s.", reason)
            self._kept, self._logits = {}, None
            for part in self._parts:
                self._rounded(Matrix((part,)), None)
        _log.info("Rounding to 4 bits took %.1f s.", time.monotonic() - began)

    def _rounded(self, matrix: Matrix, rows: Tensor | None) -> Tensor:
        """A matrix [columns, depth] float32 as it is rounded, by the rows [S, T, depth] that it is multiplied with."""
        weight = self._read(matrix)
        first = self._first_values.get(matrix.parts[0].name, len(weight))
        moments = None if rows is None else moments_of(rows.flatten(0, 1))
        integers = rounded_to_4_bits(weight[:first], moments)
        if first < len(weight):
            if moments is not None and rows is not None:
                moments += _moments_of_means(rows)
            integers = Integers.concatenated([integers, rounded_to_4_bits(weight[first:], moments)])
        first = 0
        for part in matrix.parts:
            self._keep(part, integers, first)
            first += part.size[0]
        return integers.values(INT4_ZEROS)

    def _read(self, matrix: Matrix) -> Tensor:
        """A matrix [columns, depth] float32 as it is in the files."""
        weights = [rows_of(self._tensors, part, 0, part.size[0]) for part in matrix.parts]
        return torch.cat([one.to(self._device).float() for one in weights])

    def _keep(self, part: Weight, integers: Integers, first: int) -> None:
        """Keeps the integers of a weight, which are rows of others from the first on."""
        stored, rows = self.matrices[part.name], slice(first, first + part.size[0])
        count, places = stored.num_matrices * stored.rows, torch.from_numpy(self._chosen(part, 0, part.size[0]))
        if part.name not in self._kept:
            self._kept[part.name] = integers.map(lambda each: each.new_zeros(count, each.shape[1], device="cpu"))
        integers.map(lambda new, kept: kept.index_copy_(0, places, new[rows].cpu()), self._kept[part.name])


def _moments_of_means(rows: Tensor) -> Tensor:
    """The second moments of what attention would give if every token saw all before it alike, times `_WEIGHT_OF_MEANS`.

    Errors of values that tokens have in common do not cancel where attention adds values.
    """
    counts = torch.arange(1, rows.shape[1] + 1, device=rows.device)
    return _WEIGHT_OF_MEANS * moments_of((rows.cumsum(1) / counts[:, None]).flatten(0, 1))


class RoundedMatrix(PlainTensor):
    """A matrix, or those of all experts, in 4 bits, or rounded to 8."""

    has_rows = True

    def __init__(self, tensors: Mapping[str, Tensor], weight: Weight, format: int, weights: CalibratedWeights) -> None:
        super().__init__(tensors, weight.name)
        *before, rows, self.depth = (*weight.shape[:-2], *weight.shape[-2:][:: -1 if weight.transpose else 1])
        self.rows, self.num_matrices, self.is_transposed = rows, math.prod(before), weight.transpose
        self.format, self._weights = format, weights

    def values(self, rows: Rows) -> Tensor:
        numbers = self.whole.transpose(-1, -2) if self.is_transposed else self.whole
        return numbers.reshape(-1, self.depth)[rows].to(torch.bfloat16)  # as all that the CPU rounds

    @property
    def packing(self) -> Packing:
        return Packing(self.format)

    def kept(self, rows: Rows, format: int) -> Integers | None:
        if self.format == INT8:
            return None
        return self._weights.integers_of(self.name).map(lambda part: part[rows]).widened(INT4_ZEROS, format)


def calibrated(
    config: Mapping[str, Any], tensors: Tensors, device: torch.device, ids: Sequence[int], *,
    in_8_bits: bool = False,
) -> CalibratedWeights | None:  # fmt: skip
    """Weights of files that a device rounds to 4 bits. None if a matrix is another one than the files have.

    ids: of `CALIBRATION_TEXT`; random ones if there are none, with which the result is worse
    """
    program = read_program(config)
    parts = [part for matrix in [*_matrices_of(program), program.head] for part in matrix.parts]
    plain = {field.name: field.default for field in fields(Weight) if field.name not in ("name", "shape")}
    kept = ("index", "transpose", "rows")
    if any(getattr(part, name) != value for part in parts for name, value in plain.items() if name not in kept):
        return None
    named = resolved(program, tensors)
    check_weights(program, named)
    ids = ids or np.random.default_rng(0).integers(0, program.vocab_size, _MOST_TOKENS).tolist()
    return CalibratedWeights(config, program, named, tensors, device, None if in_8_bits else ids[:_MOST_TOKENS])


def chosen(weights: CalibratedWeights | None) -> str:
    """The choice of `--quantize auto`: int4 if it is near enough to the model, else int8. weights: rounded to 4 bits"""
    lost = math.inf if weights is None else weights.divergence()
    name = "int4" if lost <= MOST_DIVERGENCE else "int8"
    _log.warning("Weights are quantized to %s: int4 changes the next token's probabilities by %.3f nats.", name, lost)
    return name


def _matrices_of(program: Program) -> list[Matrix]:
    linears = [one.matrix for one in program.operations if isinstance(one, Linear)]
    experts = [one.up + one.down for one in program.operations if isinstance(one, Experts)]
    return [*linears, *chain.from_iterable(experts)]


def _first_values(program: Program) -> dict[str, int]:
    """The first column of the values that attention stores, by the first part of the matrix that gives them."""
    found, linears = dict[str, int](), dict[str, Linear]()
    for one in program.operations:
        if isinstance(one, PrepareHeads) and one.stores and one.source in linears:
            (_, heads, width), (_, kv_heads, _), _ = one.parts
            found[linears[one.source].matrix.parts[0].name] = (heads + kv_heads) * width
        linears |= {one.target: one} if isinstance(one, Linear) else {}
    return found


Round = Callable[[Matrix, Tensor | None], Tensor]
"""The matrix to multiply with, given the one that is wanted, and the rows [S, T, depth] of S sequences."""


def run_through(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device, ids: Sequence[int], round: Round
) -> Tensor:
    """Runs tokens through a model, whose matrices are read when they are multiplied.

    Returns logits [R, vocabulary] after some of the tokens.
    """
    attention, length = ReferenceAttention(), min(_LENGTH, read_program(config).max_model_len, len(ids))
    ops = _Rounding(round=round, length=length)
    quantize = Quantization("int4")  # for embedding and head
    model = CudaModel(config, tensors, torch.float32, device, ops, quantize=quantize, weights_type=_Unread)
    count, blocks = len(ids) // length, -(-length // _BLOCK)
    shapes = [attention.block_shapes(layer, _BLOCK, torch.float32) for layer in model.layers]
    cache = KVCache(shapes, count * blocks, _BLOCK, torch.float32, device)
    tables = np.arange(count * blocks, dtype=np.int32).reshape(count, blocks)
    each, positions, rows = np.arange(count), np.arange(length), np.arange(0, count * length, _TOKENS_PER_LOGITS)
    slots = each[:, None] * blocks * _BLOCK + positions
    states = StepStates(StatePool(model.states, count, device), each, 0 * each, 0 * each - 1)
    states.pool.zero(each.tolist())
    batch = RaggedBatch(
        np.array(ids[: count * length]) % model.vocab_size, np.tile(positions, count), slots.flatten(), rows, tables,
        [0] * count, [length] * count, device, states=states if model.states else None,
    )  # fmt: skip
    with single_threaded():  # what is not computed `in_parts`, so that sums do not depend on the number of threads
        return model.forward(batch, cache, attention).values


class _Unread(DeviceWeights):
    """Leaves the matrices of linears and experts in the files."""

    def linear(self, matrix: Matrix) -> tuple[Any, Tensor | None]:
        return matrix, self._stacked(matrix.biases, self._dtype) if matrix.biases else None

    def experts(self, matrices: Sequence[Matrix]) -> ExpertWeights:
        biases = [self._stacked(matrix.biases, self._dtype) for matrix in matrices if matrix.biases]
        unread: Any = matrices
        return ExpertWeights(unread, torch.stack(biases) if biases else None)


@dataclass(frozen=True, slots=True)
class _Rounding(DeviceOps):
    """Operations of torch, with matrices that are rounded when they are multiplied."""

    round: Round = field(kw_only=True)
    length: int = field(kw_only=True)

    def call(self, kernel: DeviceKernel[Any, Any], arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        if kernel is linear and isinstance(arguments[1], Matrix):
            return self._linear(*arguments)
        if kernel is expert_linear:
            return self._experts(*arguments, **keywords)
        return DeviceOps.call(self, kernel, arguments, keywords)

    def _linear(self, source: Tensor, matrix: Matrix, bias: Tensor | None, out: Tensor) -> None:
        columns = self.round(matrix, source.view(-1, self.length, source.shape[1]))
        in_parts(lambda rows: linear.meaning(source[rows], columns, bias, out[rows]), len(source))

    def _experts(
        self, source: Tensor, routing: Routing, experts: ExpertWeights, out: Tensor, *, gathers: bool, weighs: bool
    ) -> None:
        rows = source[routing.order // routing.weights.shape[1]] if gathers else source
        matrices: Any = experts.weight
        each = zip(matrices, torch.split(rows, routing.counts.tolist()), strict=True)
        weight = [self.round(one, seen[None] if len(seen) >= _LEAST_TOKENS else None) for one, seen in each]
        expert_linear.meaning(
            source, routing, ExpertWeights(torch.stack(weight), experts.bias), out, gathers=gathers, weighs=weighs
        )
