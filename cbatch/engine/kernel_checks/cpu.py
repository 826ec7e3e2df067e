"""Checks the CPU's kernels. They are not checked when an engine is made, since they were tested on CPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cbatch.attention.base import AttentionBackend
from cbatch.base.quantization import STORED
from cbatch.base.units import format_bytes
from cbatch.engine.kernel_checks.attention import AttentionCall, AttentionChecks
from cbatch.engine.kernel_checks.comparison import TOLERANCES, largest_error
from cbatch.engine.kernel_checks.kernel_check import KernelCheck, Workload, run_check
from cbatch.engine.kernel_checks.whole_step import ExpectedSteps, StepRunner
from cbatch.kernels.cpu.activation import ActivationParams
from cbatch.kernels.cpu.jit import entry
from cbatch.kernels.cpu.matmul.formats import is_quantized, pack_integers, pack_weight, tile_bytes
from cbatch.kernels.cpu.matmul.linear import WRITE, PackedMatrix, matmul, new_linear_workspace
from cbatch.kernels.cpu.matmul.microkernel import COLUMNS, pad_columns
from cbatch.kernels.cpu.tensors import as_array
from cbatch.kernels.cpu.thread_pool import shared_thread_pool
from cbatch.kernels.formats import FORMATS, GROUP, INT4, INT4_ZEROS, INT8, MXFP4, Integers, quantized
from cbatch.model.base import Model
from cbatch.model.cpu import CpuModel
from cbatch.model.cuda import CudaModel
from cbatch.model.ops.attention import Attend
from cbatch.model.ops.device_kernel import by_torch
from cbatch.model.ops.linear import Linear
from cbatch.runtime.cpu import empty, num_threads, single_threaded
from cbatch.runtime.memory import device_memory

_WORKLOAD_BYTES = 2**26
_MANY_ROWS = 256
_QUANTIZED_TOLERANCES = {"int8": 0.3, "int4": 2.0, STORED: 0.3}
"""Most that the logits of rounded weights differ from those of the weights they were made of."""

_INT8_ROWS_TOLERANCE = 0.05
"""Most that products of rows rounded to int8 differ from those of the rows, relative to the largest."""


def _call_of(call: Attend) -> AttentionCall:
    """How a layer calls attention; a chunk of tokens is left out, because the reference checks it in whole steps."""
    return AttentionCall(
        call.heads, call.shape, call.scale, call.window or None, call.softcap or None, call.sinks is not None
    )


@dataclass(frozen=True)
class CpuChecks:
    """The checks of a model that the CPU's kernels run.

    make_plain: makes the same model by transformers
    """

    model: CpuModel
    attention: AttentionBackend
    block_size: int
    make_plain: Callable[[], Model]

    def run(self) -> Iterator[KernelCheck]:
        model, device = self.model, self.model.device
        calls = [_call_of(call) for call in model.program.operations if isinstance(call, Attend)]
        attention = AttentionChecks(self.attention, self.block_size, model.dtype, device, _WORKLOAD_BYTES)
        yield from attention.run(list(dict.fromkeys(calls)))
        matrices = [one.matrix for one in model.program.operations if isinstance(one, Linear)]
        largest = max(matrices, key=lambda matrix: matrix.size)
        for kind in sorted(model.formats):
            product = _Product(largest.columns, largest.depth, model.dtype, kind, model.left_bytes)
            for name, rows in (("one row", 1), ("many rows", _MANY_ROWS)):
                measure, workload = partial(product.error, rows), partial(product.workload, rows)
                yield run_check(f"linear, {name} ({product.name})", device, product.tolerance, measure, workload)
        yield self._step()
        yield run_check("argmax", device, 0.0, self._argmax_error, of_tokens=True)

    def _step(self) -> KernelCheck:
        """Against transformers, which needs the weights a second time; against plain torch for formats of files."""
        stored, make_plain, judge = self.model.stored_weights, self.make_plain, "transformers"
        if stored is not None:
            config, plain_ops, judge = self.model.config, by_torch(), "plain torch"
            make_plain = partial(CudaModel, config, stored, self.model.dtype, self.model.device, plain_ops)
        name = f"a whole step, against {judge}"
        needed, free = self.model.num_parameters * self.model.dtype.itemsize, device_memory(self.model.device).free()
        if needed > free:
            missing = f"it needs {format_bytes(needed)} more memory, and {format_bytes(free)} are free"
            return KernelCheck(name, 0.0, 0.0, skipped=missing)
        expected = ExpectedSteps.of(make_plain(), self.block_size, self.attention.kv_dtype)
        quantization = self.model.quantization
        tolerance = None if quantization is None else _QUANTIZED_TOLERANCES[quantization.weights]
        # Fewer weights stay in the processor's caches, and are not read from memory.
        workload = self._step_workload if self.model.weight_bytes >= _WORKLOAD_BYTES else None
        return expected.check(name, self.model, self.attention, self.block_size, tolerance, workload)

    @cached_property
    def _runner(self) -> StepRunner:
        steps = [[(0, 4), (0, 3)], [(4, 5), (3, 4)]]
        return StepRunner(self.model, self.attention, self.block_size, steps)

    def _argmax_error(self) -> float:
        """Share of the rows whose largest logit is another one."""
        found = self.model.forward(self._runner.batch(0), self._runner.kv_cache, self.attention)
        assert found.argmax is not None
        return float(np.mean(found.argmax.tokens != found.values.numpy().argmax(-1)))

    def _step_workload(self) -> Workload:
        """A step that decodes: it reads all weights."""
        self._runner.forward(0)
        batch = self._runner.batch(1)

        def run() -> None:
            with single_threaded():
                self.model.forward(batch, self._runner.kv_cache, self.attention)

        return Workload(run, bytes_read=self.model.linear_cost.weight_bytes)


@entry
def _multiply(worker: Any, a: Any, matrix: Any, out: Any, workspace: Any) -> None:
    matmul(worker, 0, a, matrix, out, WRITE, ActivationParams(0, matrix.bias), workspace)


@dataclass(frozen=True)
class _Product:
    """The kernel of the products with weights [columns, depth] of a format.

    left_bytes: see `LinearWorkspace`
    """

    columns: int
    depth: int
    dtype: torch.dtype
    format: int
    left_bytes: int

    @property
    def name(self) -> str:
        name = FORMATS[self.format]
        return f"{name} by {('int8', 'int16')[self.left_bytes - 1]}" if is_quantized(self.format) else name

    @property
    def tolerance(self) -> float:
        return _INT8_ROWS_TOLERANCE if is_quantized(self.format) and self.left_bytes == 1 else TOLERANCES[self.dtype]

    @cached_property
    def _weight(self) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(self.columns, self.depth, generator=generator).to(self.dtype)

    @cached_property
    def _rounded(self) -> Tensor:
        """The numbers that the packed weight stands for."""
        if not is_quantized(self.format):
            return self._weight.float()
        return self._integers.values(self.format)

    @cached_property
    def _integers(self) -> Integers:
        """The weight as integers; random ones of a format that only files are in."""
        if self.format in (INT8, INT4):
            return quantized(self._weight, self.format)
        generator, groups = np.random.default_rng(0), (self.columns, -(-self.depth // GROUP))
        places = generator.integers(0, 16, (self.columns, self.depth), np.uint8)
        steps = np.exp2(generator.integers(-3, 1, groups).astype(np.float32))
        steps *= 1 if self.format == MXFP4 else generator.uniform(0.5, 1, groups).astype(np.float16).astype(np.float32)
        zeros = generator.integers(0, 16, groups).astype(np.float32) if self.format == INT4_ZEROS else None
        return Integers.of_arrays(places, steps.astype(np.float16), zeros)

    @cached_property
    def _packed(self) -> PackedMatrix:
        nothing = np.empty(0, np.float32)
        if is_quantized(self.format):
            packed = pack_integers(self.format, self._integers)
        else:
            packed = pack_weight(as_array(self._weight))
        data = empty(packed.size, packed.dtype)
        data[:] = packed
        return PackedMatrix(data, 0, self.format, nothing, nothing)

    def _call(self, rows: int) -> tuple[Tensor, Tensor, Callable[[], None]]:
        """Rows, their products [rows, columns], and the call that computes these."""
        generator, pool = torch.Generator().manual_seed(rows), shared_thread_pool(num_threads())
        left = torch.randn(rows, self.depth, generator=generator).to(self.dtype)
        out = empty((rows, pad_columns(self.columns)), np.float32)
        workspace = new_linear_workspace(pool.size, [self.format], self.depth, rows=rows, left_bytes=self.left_bytes)
        run = partial(pool.run, _multiply, as_array(left), self._packed, out, workspace)
        return left, torch.from_numpy(out)[:, : self.columns], run

    def error(self, rows: int) -> float:
        left, found, run = self._call(rows)
        run()
        return largest_error(found, left.float() @ self._rounded.T)

    def workload(self, rows: int) -> Workload:
        if rows == 1:  # more weights than the processor's caches hold
            columns = max(self.columns, _WORKLOAD_BYTES // tile_bytes(self.format, self.depth) * COLUMNS)
            larger = replace(self, columns=columns)
            return Workload(larger._call(rows)[2], bytes_read=larger._packed.data.nbytes)
        *_, run = self._call(rows)
        return Workload(run, flops=2 * rows * self.columns * self.depth)
