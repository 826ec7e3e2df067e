"""Checks the kernels between the matrix products of a layer, with the sizes of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from cbatch.engine.execution.kernel_checks.comparison import (
    TOLERANCES,
    error_of_cache,
    error_of_fp8_cache,
    largest_error,
    product_tolerance,
)
from cbatch.engine.execution.kernel_checks.kernel_check import KernelCheck, Workload, run_check
from cbatch.engine.kernels.layer_ops import LayerOps, Positions
from cbatch.engine.kernels.reference.layer import TorchLayerOps
from cbatch.engine.models.base import HiddenStates
from cbatch.engine.models.cuda import CudaModel
from cbatch.engine.models.llama_spec import weight_shapes
from cbatch.engine.runtime.kv_cache import FP8

_TOKENS = 5
_PRODUCT_TOKENS = 2048
_BLOCKS = 3
_HEAD_PIECE = 4096
"""Rows of the head's matrix that are widened to float64 at once."""

# Logits are float32: what the kernel before them rounds in another way is all that may differ. On GPUs that are not
# CUDA's, logits are rounded too, by up to 0.0005 in float16 and 0.004 in bfloat16.
_HEAD_TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}


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
        spec, dtype = self.model.spec, self.model.dtype
        size, hidden = dtype.itemsize, spec.hidden_size
        kv_size = (self.kv_dtype or dtype).itemsize
        kv_bytes = 2 * spec.num_kv_heads * (size + kv_size)
        operations: dict[str, tuple[Callable[[LayerOps, int], list[Tensor]], int]] = {
            "embed_and_norm": (self._embed_and_norm, hidden * (2 * size + 4)),
            "add_and_norm": (self._add_and_norm, hidden * (2 * size + 8)),
            "select_and_norm": (self._select_and_norm, hidden * (2 * size + 4)),
            "rope_and_store_kv": (self._rope_and_store_kv, (2 * spec.num_heads * size + kv_bytes) * spec.head_dim),
            "silu_and_mul": (self._silu_and_mul, 3 * spec.intermediate_size * size),
        }
        for name, (operate, token_bytes) in operations.items():
            measure = partial(self._error, operate)
            yield run_check(
                name, self.model.device, TOLERANCES[dtype], measure, partial(self._workload, operate, token_bytes)
            )
        tolerance = product_tolerance(dtype, _HEAD_TOLERANCES[dtype])
        yield run_check("output head", self.model.device, tolerance, self._head_error, self._head_workload)

    def product(self) -> KernelCheck:
        """A product of matrices by the library, of the size of a layer's largest."""
        spec, model = self.model.spec, self.model
        weight = self._draw(0, 2 * spec.intermediate_size, spec.hidden_size)

        def measure() -> float:
            left, columns = self._draw(1, _TOKENS, spec.hidden_size), slice(0, 256)
            return largest_error(linear(left, weight)[:, columns], linear(left.double(), weight[columns].double()))

        def workload() -> Workload:
            left = self._draw(1, _PRODUCT_TOKENS, spec.hidden_size)
            return Workload(partial(linear, left, weight), flops=2 * len(left) * weight.numel())

        tolerance = product_tolerance(model.dtype, TOLERANCES[model.dtype])
        return run_check("linear", model.device, tolerance, measure, workload)

    def _error(self, operate: Callable[[LayerOps, int], list[Tensor]]) -> float:
        plain = TorchLayerOps(self.model.ops.heads_first)
        results = zip(operate(self.model.ops, _TOKENS), operate(plain, _TOKENS), strict=True)
        return max(_error_of_result(found, expected) for found, expected in results)

    def _head_error(self) -> float:
        """With the model's own matrix, compared with a product in float64."""
        residual, added = (self._draw(seed, _TOKENS, self.model.spec.hidden_size) for seed in (0, 1))
        hidden, rows = HiddenStates(residual.float(), added), torch.tensor([3, 0], device=self.model.device)
        plain = self.model.with_ops(_WideHead(self.model.ops.heads_first))
        return largest_error(self.model.run_head(hidden, rows), plain.run_head(hidden, rows))

    def _head_workload(self) -> Workload:
        tokens, spec = 256, self.model.spec
        hidden = HiddenStates(*(self._draw(seed, tokens, spec.hidden_size) for seed in (0, 1)))
        hidden = hidden._replace(residual=hidden.residual.float())
        rows = torch.arange(tokens, device=self.model.device)
        return Workload(
            partial(self.model.run_head, hidden, rows), flops=2 * tokens * spec.hidden_size * spec.vocab_size
        )

    def _workload(self, operate: Callable[..., list[Tensor]], token_bytes: int) -> Workload:
        calls: list[Callable[[], object]] = []
        tokens = self.workload_bytes // token_bytes
        operate(_Deferred(self.model.ops, calls), tokens)
        return Workload(calls[0], bytes_read=token_bytes * tokens)

    def _embed_and_norm(self, ops: LayerOps, tokens: int) -> list[Tensor]:
        residual, out, weight, eps = self._norm_arguments(tokens)
        ids = torch.arange(tokens, 0, -1, device=out.device)  # each once, so that all are read from memory
        ops.embed_and_norm(self._draw(0, tokens + 1, out.shape[1]), ids, residual, weight, eps, out)
        return [residual, out]

    def _add_and_norm(self, ops: LayerOps, tokens: int) -> list[Tensor]:
        residual, out, weight, eps = self._norm_arguments(tokens)
        ops.add_and_norm(residual, self._draw(0, *out.shape), weight, eps, out)
        return [residual, out]

    def _select_and_norm(self, ops: LayerOps, tokens: int) -> list[Tensor]:
        residual, out, weight, eps = self._norm_arguments(tokens)
        rows = torch.arange(tokens - 1, -1, -1, device=out.device)
        ops.select_and_norm(residual, self._draw(0, *out.shape), rows, weight, eps, out)
        return [residual, out]

    def _rope_and_store_kv(self, ops: LayerOps, tokens: int) -> list[Tensor]:
        """The token in the middle has no slot."""
        spec, device = self.model.spec, self.model.device
        blocks = tokens // self.block_size + _BLOCKS
        block = [self.block_size, spec.num_kv_heads]
        if ops.heads_first:
            block.reverse()
        keys, values = (
            torch.full((blocks, *block, spec.head_dim), torch.nan, device=device).to(self.kv_dtype or self.model.dtype)
            for _ in range(2)
        )
        slots = torch.arange(tokens, device=device) + self.block_size - 2  # in two blocks
        slots[tokens // 2] = -1
        angles = torch.arange(tokens, device=device)[:, None] * spec.inv_freq.to(device)
        positions = Positions(angles.cos(), angles.sin(), slots)
        norms = None
        if "model.layers.0.self_attn.q_norm.weight" in weight_shapes(spec):
            norms = 1 + self._draw(1, 2 * spec.head_dim) / 8
        qkv = self._draw(2, tokens, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim)
        query = qkv.new_empty(tokens, spec.num_heads, spec.head_dim)
        ops.rope_and_store_kv(qkv, positions, norms, spec.rms_norm_eps, query, keys, values)
        return [query, keys, values]

    def _silu_and_mul(self, ops: LayerOps, tokens: int) -> list[Tensor]:
        gate_up = 3 * self._draw(0, tokens, 2 * self.model.spec.intermediate_size)
        out = gate_up.new_empty(tokens, self.model.spec.intermediate_size)
        ops.silu_and_mul(gate_up, out)
        return [out]

    def _norm_arguments(self, tokens: int) -> tuple[Tensor, Tensor, Tensor, float]:
        """Residual, output, weight and epsilon."""
        spec = self.model.spec
        residual = self._draw(3, tokens, spec.hidden_size).float()
        weight = 1 + self._draw(4, spec.hidden_size) / 8
        return residual, torch.empty_like(residual, dtype=self.model.dtype), weight, spec.rms_norm_eps

    def _draw(self, seed: int, *shape: int) -> Tensor:
        generator: Any = torch.Generator(self.model.device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=self.model.device).to(self.model.dtype)


def _error_of_result(found: Tensor, expected: Tensor) -> float:
    return (error_of_fp8_cache if found.dtype == FP8 else error_of_cache)(found, expected)


class _WideHead(TorchLayerOps):
    """Logits are summed and written in float64."""

    def logits(self, hidden: Tensor, lm_head: Tensor, out: Tensor | None = None) -> Tensor:
        wide = hidden.double()
        return torch.cat([linear(wide, piece.double()) for piece in torch.split(lm_head, _HEAD_PIECE)], 1)


class _Deferred:
    """Operations that are not called, but kept to be called later."""

    def __init__(self, ops: LayerOps, calls: list[Callable[[], object]]) -> None:
        self._ops, self._calls = ops, calls

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._ops, name)
        if not callable(operation):
            return operation
        return lambda *arguments: self._calls.append(partial(operation, *arguments))
