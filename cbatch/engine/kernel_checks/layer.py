"""Checks the kernels between the matrix products of a model's layers, as the model calls them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from cbatch.engine.kernel_checks.comparison import (
    TOLERANCES,
    error_of_cache,
    error_of_fp8_cache,
    largest_error,
    product_tolerance,
)
from cbatch.engine.kernel_checks.kernel_check import KernelCheck, Workload, run_check
from cbatch.engine.kernel_checks.layer_calls import CHUNKS, LayerCall, noted_calls
from cbatch.engine.kernel_checks.recurrent_calls import (
    STATES,
    STEPS,
    StateChunk,
    bytes_per_sequence,
    over_chunks,
)
from cbatch.kernels.layer_ops import Addend, Embedding, Positions, Router, Routing
from cbatch.kernels.quantized_matrix import QuantizedMatrix
from cbatch.kernels.reference.layer import TorchLayerOps
from cbatch.model.base import HiddenStates
from cbatch.model.cuda import CudaModel
from cbatch.model.programs.program import Linear
from cbatch.runtime.kv_cache import FP8

_TOKENS = 5
_PRODUCT_TOKENS = 2048
_HEAD_PIECE = 4096
"""Rows of the head's matrix that are widened to float64 at once."""

# Logits are float32: what the kernel before them rounds in another way is all that may differ. On GPUs that are not
# CUDA's, logits are rounded too, by up to 0.0005 in float16 and 0.004 in bfloat16.
_HEAD_TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}

_PRODUCTS = ("linear", "expert_linear", "quantized_linear", "float8_linear")

_READ_AND_WRITTEN = {"add_and_norm": 0, "gate": 4, "finish_logits": 0}
"""Which argument of an operation is both."""


@dataclass(frozen=True, slots=True)
class LayerChecks:
    """The checks of a model's operations.

    kv_dtype:       type of the KV cache; None: that of the model
    workload_bytes: what a workload reads and writes: more than the L2 cache of any GPU holds
    """

    model: CudaModel
    block_size: int
    kv_dtype: torch.dtype | None = None
    workload_bytes: int = 2**29

    def run(self) -> Iterator[KernelCheck]:
        """One check for each way in which the model calls an operation, and one of the output head."""
        model, seen = self.model, Counter[str]()
        with torch.inference_mode():
            calls = noted_calls(model, self.block_size, self.kv_dtype)
        for call in calls:
            if call.name == "linear" and not model.ops.batch_invariant:
                continue  # the library's: nothing could take its place
            seen[call.name] += 1
            name = call.name + (f" ({seen[call.name]})" if seen[call.name] > 1 else "")
            tolerance = TOLERANCES[model.dtype]
            if call.name in _PRODUCTS:
                tolerance = product_tolerance(model.dtype, tolerance)
            error, workload = self._error, self._workload
            if call.name in STATES:
                error, workload = self._recurrent_error, self._recurrent_workload
            yield run_check(name, model.device, tolerance, partial(error, call), partial(workload, call))
        tolerance = product_tolerance(model.dtype, _HEAD_TOLERANCES[model.dtype])
        yield run_check("output head", model.device, tolerance, self._head_error, self._head_workload)

    def product(self) -> KernelCheck:
        """A product of matrices by the library, of the size of the model's largest."""
        model, operations = self.model, self.model.program.operations
        matrix = max((one.matrix for one in operations if isinstance(one, Linear)), key=lambda one: one.size)
        weight = self._draw(0, matrix.columns, matrix.depth)

        def measure() -> float:
            left, columns = self._draw(1, _TOKENS, matrix.depth), slice(0, 256)
            return largest_error(linear(left, weight)[:, columns], linear(left.double(), weight[columns].double()))

        def workload() -> Workload:
            left = self._draw(1, _PRODUCT_TOKENS, matrix.depth)
            return Workload(partial(linear, left, weight), flops=2 * len(left) * weight.numel())

        tolerance = product_tolerance(model.dtype, TOLERANCES[model.dtype])
        return run_check("linear", model.device, tolerance, measure, workload)

    def _error(self, call: LayerCall) -> float:
        results = zip(call(self.model.ops), call(TorchLayerOps(self.model.ops.heads_first)), strict=True)
        return max(_error_of_result(found, expected) for found, expected in results)

    def _recurrent_error(self, call: LayerCall) -> float:
        return max(self._error(over_chunks(call, chunks, self._draw)) for chunks in STEPS.values())

    def _recurrent_workload(self, call: LayerCall) -> Workload:
        """A step in which so many sequences decode that the device's memory limits it."""
        sequences = max(self.workload_bytes // bytes_per_sequence(call), 1)
        grown = over_chunks(call, [StateChunk(1)] * sequences, self._draw)
        run = partial(getattr(self.model.ops, call.name), *grown.arguments, **call.keywords)
        return Workload(run, bytes_read=bytes_per_sequence(call) * sequences)

    def _head_error(self) -> float:
        """With the model's own matrix, compared with a product in float64."""
        residual, added = (self._draw(seed, _TOKENS, self.model.program.hidden_size) for seed in (0, 1))
        hidden, rows = HiddenStates(residual.float(), added), torch.tensor([3, 0], device=self.model.device)
        plain = self.model.with_ops(_WideHead(self.model.ops.heads_first))
        return largest_error(self.model.run_head(hidden, rows), plain.run_head(hidden, rows))

    def _head_workload(self) -> Workload:
        tokens, program = 256, self.model.program
        hidden = HiddenStates(*(self._draw(seed, tokens, program.hidden_size) for seed in (0, 1)))
        hidden = hidden._replace(residual=hidden.residual.float())
        rows = torch.arange(tokens, device=self.model.device)
        return Workload(partial(self.model.run_head, hidden, rows), flops=2 * tokens * program.head.matrix.size)

    def _workload(self, call: LayerCall) -> Workload:
        """The call with so many tokens that the device's memory limits it, or the products of experts."""
        token_bytes = _bytes_per_token(call)
        tokens = _PRODUCT_TOKENS if call.name in _PRODUCTS else max(self.workload_bytes // token_bytes, 1)
        grown = self._grown(call, tokens)
        run = partial(getattr(self.model.ops, call.name), *grown.arguments, **call.keywords)
        if call.name not in _PRODUCTS:
            return Workload(run, bytes_read=token_bytes * tokens)
        # Both end with the rows of the result, which are as long as a matrix has columns.
        out = next(one for one in reversed(grown.arguments) if isinstance(one, Tensor))
        return Workload(run, flops=2.0 * out.numel() * grown.arguments[0].shape[1])

    def _grown(self, call: LayerCall, tokens: int) -> LayerCall:
        """The call with so many tokens instead of the few that were noted, of random numbers."""
        noted = sum(stop - start for start, stop in CHUNKS)
        sequences, count = len(CHUNKS), 0
        scale = next((one.weights.shape[1] for one in call.arguments if isinstance(one, Routing)), 1)

        def grow(tensor: Tensor) -> Tensor:
            nonlocal count
            count += 1
            rows = {noted: tokens, sequences: tokens, noted * scale: tokens * scale}.get(len(tensor))
            if rows is None or (tensor.dim() == 4 and call.name == "prepare_heads"):  # a cache of all tokens
                blocks = -(-tokens // self.block_size)
                return tensor.new_empty(blocks, *tensor.shape[1:]) if tensor.dim() == 4 else tensor
            if tensor.is_floating_point():
                return self._draw(count, rows, *tensor.shape[1:]).to(tensor.dtype)
            numbers = torch.arange(rows, device=tensor.device) % self.model.vocab_size  # each is read from memory
            return numbers.to(tensor.dtype)

        routing = None
        if any(isinstance(one, Routing) for one in call.arguments):
            routing = self._routing(call, tokens)
        arguments = tuple(routing if isinstance(one, Routing) else one for one in call.with_tensors(grow).arguments)
        return LayerCall(call.name, arguments, call.keywords)

    def _routing(self, call: LayerCall, tokens: int) -> Routing:
        """Of random scores: every expert has about as many tokens."""
        noted = next(one for one in call.arguments if isinstance(one, Routing))
        scores = self._draw(9, tokens, len(noted.counts)).float()
        return self.model.ops.route(scores, Router(noted.weights.shape[1], "softmax"))

    def _draw(self, seed: int, *shape: int) -> Tensor:
        generator: Any = torch.Generator(self.model.device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=self.model.device).to(self.model.dtype)


def _bytes_per_token(call: LayerCall) -> int:
    """What an operation reads and writes for each token, without weights and small numbers."""
    total = 0
    for number, one in enumerate(call.arguments):
        match one:
            case Tensor() if one.is_floating_point():
                row = one[0, :, 0] if one.dim() == 4 else one[0]  # of a cache, the place of one token
                times = 2 if _READ_AND_WRITTEN.get(call.name) == number else 1
                total += times * row.numel() * one.element_size()
            case Embedding():
                total += one.table[0].nbytes * (1 if one.positions is None else 2)
            case Positions():
                total += sum(each[0].nbytes for each in one if each is not None)
            case tuple() if type(one) is tuple:
                total += sum(each.value[0].nbytes for each in one if isinstance(each, Addend))
    return total


def _error_of_result(found: Tensor, expected: Tensor) -> float:
    return (error_of_fp8_cache if found.dtype == FP8 else error_of_cache)(found, expected)


class _WideHead(TorchLayerOps):
    """Logits are summed and written in float64."""

    def logits(self, hidden: Tensor, lm_head: Tensor | QuantizedMatrix, out: Tensor | None = None) -> Tensor:
        wide = hidden.double()
        return torch.cat([linear(wide, piece.double()) for piece in _pieces(lm_head)], 1)


def _pieces(matrix: Tensor | QuantizedMatrix) -> Iterator[Tensor]:
    """Some rows of the head's matrix after the other."""
    if not isinstance(matrix, QuantizedMatrix):
        yield from torch.split(matrix, _HEAD_PIECE)
        return
    for first in range(0, matrix.columns, _HEAD_PIECE):
        yield matrix.values(slice(first, first + _HEAD_PIECE))
