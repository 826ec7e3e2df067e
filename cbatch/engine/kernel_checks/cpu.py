"""Checks the CPU's kernels. They are not checked when an engine is made, since they were tested on CPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.attention.base import AttentionBackend
from cbatch.base.quantization import STORED
from cbatch.base.units import format_bytes
from cbatch.engine.kernel_checks.attention import AttentionCall, AttentionChecks
from cbatch.engine.kernel_checks.kernel_check import TOLERANCES, KernelCheck, Workload, largest_error, run_check
from cbatch.engine.kernel_checks.made_up_steps import draw
from cbatch.engine.kernel_checks.whole_step import ExpectedSteps, StepRunner
from cbatch.kernels.cpu.activation import ActivationParams
from cbatch.kernels.cpu.jit import entry
from cbatch.kernels.cpu.matmul.formats import is_quantized, left_bytes_of, pack_integers, pack_weight, tile_bytes
from cbatch.kernels.cpu.matmul.linear import WRITE, PackedMatrix, matmul, new_linear_workspace
from cbatch.kernels.cpu.matmul.microkernel import COLUMNS, pad_columns
from cbatch.kernels.cpu.tensors import as_array
from cbatch.kernels.cpu.thread_pool import shared_thread_pool
from cbatch.kernels.formats import FORMATS, INT4_ZEROS, INT8, MXFP4, Integers, group_of
from cbatch.model.base import Model
from cbatch.model.cpu import CpuModel
from cbatch.model.cuda import CudaModel
from cbatch.model.ops.attention import Attend
from cbatch.model.ops.device_kernel import by_torch
from cbatch.model.ops.linear import Linear
from cbatch.runtime.cpu import empty, num_threads, single_threaded
from cbatch.runtime.memory import device_memory

CPU = torch.device("cpu")

_WORKLOAD_BYTES = 2**26
_MANY_ROWS = 256
_QUANTIZED_TOLERANCES = {"int8": 0.3, "int4": 2.0, STORED: 0.3}
"""Most that the logits of rounded weights differ from those of the weights they were made of."""

_INT8_ROWS_TOLERANCE = 0.05
"""Most that products of rows rounded to int8 differ from those of the rows, relative to the largest."""


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
        calls = [  # without chunks of tokens, which the reference checks in whole steps
            AttentionCall(
                one.heads, one.shape, one.scale, one.window or None, one.softcap or None, one.sinks is not None
            )
            for one in model.program.operations
            if isinstance(one, Attend)
        ]
        different = list(dict.fromkeys(calls))
        yield from AttentionChecks(
            self.attention, self.block_size, model.dtype, device, different, _WORKLOAD_BYTES
        ).run()
        matrices = [one.matrix for one in model.program.operations if isinstance(one, Linear)]
        largest = max(matrices, key=lambda matrix: matrix.size)
        for kind in sorted(model.formats):
            product = _Product(largest.columns, largest.depth, model.dtype, kind, model.left_bytes)
            for name, rows in (("one row", 1), ("many rows", _MANY_ROWS)):
                yield product.check(f"linear, {name}", rows)
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
        return expected.check(name, self.model, self.attention, tolerance, workload)

    @cached_property
    def _runner(self) -> StepRunner:
        """Of a step with prompts, and one that decodes."""
        return StepRunner(self.model, self.attention, self.block_size, [[(0, 4), (0, 3)], [(4, 5), (3, 4)]])

    def _argmax_error(self) -> float:
        """Share of the rows whose largest logit is another one."""
        found = self.model.forward(self._runner.batch(0), self._runner.kv_cache, self.attention)
        assert found.argmax is not None
        return float(np.mean(found.argmax.tokens != found.values.numpy().argmax(-1)))

    def _step_workload(self) -> Workload:
        """A step that decodes: it reads all weights."""
        batches = [self._runner.batch(0), self._runner.batch(1)]

        def run() -> None:
            with single_threaded():
                self.model.forward(batches[-1], self._runner.kv_cache, self.attention)

        self.model.forward(batches[0], self._runner.kv_cache, self.attention)
        return Workload(run, bytes_read=self.model.linear_cost.weight_bytes)


@entry
def _multiply(worker: Any, a: Any, matrix: Any, out: Any, workspace: Any) -> None:
    matmul(worker, 0, a, matrix, out, WRITE, ActivationParams(0, matrix.bias), workspace)


@dataclass(frozen=True)
class _Product:
    """The kernel of the products with weights [columns, depth] of a format.

    left_bytes: see `CpuLayout`
    """

    columns: int
    depth: int
    dtype: torch.dtype
    format: int
    left_bytes: int

    def check(self, name: str, rows: int) -> KernelCheck:
        by = f" by int{8 * left_bytes_of(self.format, self.left_bytes)}" if is_quantized(self.format) else ""
        tolerance = _INT8_ROWS_TOLERANCE if by == " by int8" else TOLERANCES[self.dtype]
        measure, workload = partial(self._error, rows), partial(self._workload, rows)
        return run_check(f"{name} ({FORMATS[self.format]}{by})", CPU, tolerance, measure, workload)

    @cached_property
    def _weight(self) -> tuple[NDArray[np.uint8], Tensor]:
        """A random weight, packed, and as the numbers that this stands for."""
        generator, shape = np.random.default_rng(0), (self.columns, self.depth)
        if not is_quantized(self.format):
            numbers = torch.from_numpy(generator.standard_normal(shape, np.float32)).to(self.dtype)
            return pack_weight(as_array(numbers)), numbers.float()
        groups = self.columns, -(-self.depth // group_of(self.format))
        low, high = (-127, 128) if self.format == INT8 else (0, 16)
        steps = np.exp2(generator.integers(-3, 1, groups).astype(np.float32))
        steps *= 1 if self.format == MXFP4 else generator.uniform(0.5, 1, groups).astype(np.float16).astype(np.float32)
        zeros = generator.integers(0, 16, groups).astype(np.float32) if self.format == INT4_ZEROS else None
        places = generator.integers(low, high, shape, np.int8)
        integers = Integers.of_arrays(places, steps.astype(np.float16), zeros)
        return pack_integers(self.format, integers), integers.values(self.format)

    def _call(self, rows: int) -> tuple[Tensor, Tensor, Callable[[], None]]:
        """Rows, their products [rows, columns], and the call that computes these."""
        left = draw(rows, rows, self.depth, dtype=self.dtype, device=CPU)
        out, nothing = empty((rows, pad_columns(self.columns)), np.float32), np.empty(0, np.float32)
        packed, pool = self._weight[0], shared_thread_pool(num_threads())
        data = empty(packed.size, packed.dtype)
        data[:] = packed
        matrix = PackedMatrix(data, 0, self.format, nothing, nothing)
        workspace = new_linear_workspace(pool.size, [self.format], self.depth, rows=rows, left_bytes=self.left_bytes)
        run = partial(pool.run, _multiply, as_array(left), matrix, out, workspace)
        return left, torch.from_numpy(out)[:, : self.columns], run

    def _error(self, rows: int) -> float:
        left, found, run = self._call(rows)
        run()
        return largest_error(found, left.float() @ self._weight[1].T)

    def _workload(self, rows: int) -> Workload:
        if rows == 1:  # more weights than the processor's caches hold
            columns = max(self.columns, _WORKLOAD_BYTES // tile_bytes(self.format, self.depth) * COLUMNS)
            larger = replace(self, columns=columns)
            return Workload(larger._call(rows)[2], bytes_read=larger._weight[0].nbytes)
        return Workload(self._call(rows)[2], flops=2 * rows * self.columns * self.depth)
