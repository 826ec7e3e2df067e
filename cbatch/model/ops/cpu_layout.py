"""Lays out a program for the CPU's kernels: instructions, buffers, and weights packed as products read them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.base.quantization import Quantization
from cbatch.kernels.cpu import activation, norm
from cbatch.kernels.cpu.matmul.formats import matrix_bytes, tile_bytes
from cbatch.kernels.cpu.matmul.linear import prepared_row_bytes
from cbatch.kernels.cpu.matmul.microkernel import COLUMNS, LANES, pad_columns
from cbatch.kernels.cpu.program import Instruction, Weights
from cbatch.kernels.cpu.tensors import as_array
from cbatch.kernels.formats import BFLOAT16, FLOAT32, INT4, INT8, ON_CPU
from cbatch.model.config import UnsupportedConfig
from cbatch.model.cpu_weights import gated_columns, interleaved, packed_columns
from cbatch.model.ops.operation import Operation, with_role
from cbatch.model.ops.program import Program
from cbatch.model.packed_file import Arrays, ArrayShape, PackedFile, WeightCache
from cbatch.model.stored import StoredWeights
from cbatch.model.weight import RESIDUAL, Activation, Matrix, Norm, Weight
from cbatch.runtime.cpu import empty, num_threads, single_threaded
from cbatch.runtime.memory import check_room

_log = logging.getLogger("cbatch")

PACKING = {"version": 4, "lanes": LANES, "columns": COLUMNS}
"""The order of packed numbers. It is the same for every processor; whoever changes it raises the version."""

_NORMS = {"none": norm.NO_NORM, "rms": norm.RMS_NORM, "layer": norm.LAYER_NORM}

_PART = 2**19
"""Numbers of a matrix that a thread packs at once, at most: few enough for the processor's caches, also as float32."""

Fill = Callable[[Arrays, Mapping[str, Tensor]], None]

Buffer = tuple[int, int]
"""Where a buffer begins in its arena, and its width; see `kernels.cpu.program.BUFFER`."""


class MatrixPlace(NamedTuple):
    """See `kernels.cpu.program.MATRIX`."""

    start: int
    format: int
    scale: int = -1
    bias: int = -1


class CpuLayout:
    """A program as the kernels run it.

    float_columns, element_columns: widths of both arenas of buffers, in numbers for each token
    deepest:       the largest depth of a product
    formats:       of the matrices
    left_bytes:    bytes of a number of a row that is multiplied with quantized weights
    prepared_bytes: the most bytes that the left-hand rows of a product take, for each token, if it has to prepare them
    routing_columns, num_experts: the most experts of a token, and of a layer; 0 without experts
    multiplied:    names of the buffers that go into products
    used:          how many columns of each buffer are in use, without padding
    head:          where the embedding lies if it is read from the matrix of the head
    adapted:       linears to which adapters add (see `CpuAdapters`)
    stored:        weights that keep the formats of their files
    """

    def __init__(
        self,
        program: Program,
        dtype: torch.dtype,
        quantize: Quantization | None,
        stored: StoredWeights | None = None,
        adapted: Mapping[Any, tuple[int, int]] = MappingProxyType({}),
    ) -> None:
        """Raises UnsupportedConfig for what the kernels do not support.

        stored:  weights that keep the formats of their files, if `quantize` says so
        adapted: they change instructions and buffers, no weights
        """
        self.program = program
        self.adapted = adapted
        self.dtype = dtype
        self.quantize = quantize
        self.stored = stored if quantize is not None and quantize.keeps_stored else None
        self.float_columns = self.element_columns = 0
        self.deepest = 0
        self.formats: set[int] = set()
        self.left_bytes = 2 if quantize is not None and quantize.activations == "bf16" else 1
        self.prepared_bytes = 0
        self.routing_columns = self.num_experts = 0
        self._sizes = dict.fromkeys(("matrices", "scales", "vectors", "tables", "indices"), 0)
        self._fills: list[Fill] = []
        """Each fills a part of the arrays; their order does not matter."""
        self._last_fills: list[Fill] = []
        """Those that read arrays which others fill."""
        self._buffers: dict[str, Buffer] = {}
        self._places: dict[tuple[str, int], int] = {}
        self.used: dict[str, int] = {RESIDUAL: program.hidden_size}
        self.multiplied = {name for one in program.operations if one.is_product for _, name in with_role(one, "reads")}
        self._instructions: list[tuple[Instruction, dict[str, Any]]] = []
        self.head: MatrixPlace | None = None
        self.floats(RESIDUAL, program.hidden_size)
        if program.head.parts == (program.embedding,) and not program.head.biases:
            self.head = self._place(program.head, pad_columns(program.hidden_size), is_head=True)
        for operation in program.operations:
            operation.on_cpu(self)

    def records(self, state_type: np.dtype[Any]) -> dict[Instruction, NDArray[Any]]:
        """The records of each kind of instruction, in their order.

        state_type: of the numbers of recurrent states
        """
        found: dict[Instruction, list[tuple[Any, ...]]] = {}
        for kind, values in self._instructions:
            found.setdefault(kind, []).append(tuple(values[name] for name in kind.fields))
        return {kind: np.array(rows, kind.record_type(state_type)) for kind, rows in found.items()}

    def instructions(
        self, records: Mapping[Instruction, NDArray[Any]], address_of: Callable[[Instruction], int]
    ) -> NDArray[np.int64]:
        """The table for `run_step`: [instructions, 2] addresses of each one's function and of its record.

        The records lie in the same memory: a thread that comes late to a step still reads them.

        records:    as `records` gave them
        address_of: the function of a kind
        """
        count = len(self._instructions)
        memory = np.zeros(2 * count + sum(-(-array.nbytes // 8) for array in records.values()), np.int64)
        places, end = {}, 2 * count
        for kind, array in records.items():
            places[kind] = memory[end:].ctypes.data
            memory[end:].view(np.uint8)[: array.nbytes] = array.view(np.uint8)
            end += -(-array.nbytes // 8)
        table = memory[: 2 * count].reshape(count, 2)
        for row, (kind, _) in zip(table, self._instructions, strict=True):
            row[:] = address_of(kind), places[kind]
            places[kind] += records[kind].itemsize
        return table

    @property
    def array_shapes(self) -> dict[str, ArrayShape]:
        """The arrays of `Weights`."""
        element = np.dtype(np.float32 if self.dtype == torch.float32 else np.uint16)
        single = np.dtype(np.float32)
        types: dict[str, np.dtype[Any]] = {
            "matrices": np.dtype(np.uint8),
            "scales": single,
            "vectors": single,
            "tables": element,
            "indices": np.dtype(np.int64),
        }
        return {name: ArrayShape((size,), types[name]) for name, size in self._sizes.items()}

    def load(self, tensors: Mapping[str, Tensor], shared: PackedFile | None) -> Weights:
        """The weights as the kernels take them, in memory of this process or mapped.

        tensors: by their names in the program; `check_weights` has accepted them. Not read if the shared file is there
        shared:  the file that keeps them, and other processes map too; if it cannot be used, the log says why
        """

        def fill(arrays: Arrays) -> None:
            threads = num_threads()
            with single_threaded(), ThreadPoolExecutor(threads, "cbatch-pack") as executor:
                for fills in (self._fills, self._last_fills):
                    waiting = [executor.submit(each, arrays, tensors) for each in fills]
                    try:
                        for each in waiting:
                            each.result()
                    except BaseException:
                        executor.shutdown(cancel_futures=True)
                        raise

        shapes = self.array_shapes
        if shared is not None and sum(array.nbytes for array in shapes.values()) >= shared.cache.least_bytes:
            try:
                return Weights(**shared.arrays(shapes, fill))
            except OSError as error:
                _log.warning("Packed weights are not kept in %s: %s.", shared.cache.folder, error)
        check_room("The weights", sum(array.nbytes for array in shapes.values()), torch.device("cpu"))
        arrays = {name: empty(*array) for name, array in shapes.items()}
        fill(arrays)
        return Weights(**arrays)

    def add(self, kind: Instruction, operation: Operation | None = None, **values: Any) -> None:
        """Adds an instruction. Fields that are not given are those of the operation with the same names; None is -1."""
        found = {
            name: values[name] if name in values else 0 if type is None else getattr(operation, name)
            for name, type in kind.fields.items()
        }
        self._instructions.append((kind, {name: -1 if value is None else value for name, value in found.items()}))

    def read(self, name: str) -> Buffer:
        """A buffer as it was written last."""
        return self._buffers[name]

    def floats(self, name: str, columns: int) -> Buffer:
        """A buffer of float32 that is written next, whose columns are padded for products."""
        self.used[name] = columns
        width = pad_columns(columns)
        if (name, width) not in self._places:
            self._places[name, width] = self.float_columns
            self.float_columns += width
        self._buffers[name] = self._places[name, width], width
        return self._buffers[name]

    def elements(self, name: str, columns: int, width: int | None = None) -> Buffer:
        """A buffer of what goes into products that is written next.  width: with its padding, if it has any"""
        self.used[name] = columns
        width = columns if width is None else width
        if (name, width) not in self._places:
            self._places[name, width] = self.element_columns
            self.element_columns += pad_columns(width)
        self._buffers[name] = self._places[name, width], width
        return self._buffers[name]

    def product_source(self, name: str, columns: int) -> Buffer:
        """A buffer of what goes into products, without padding."""
        if columns % LANES:
            raise UnsupportedConfig(f"the kernels do not support {columns} channels in recurrent layers")
        return self.elements(name, columns)

    def norm(self, given: Norm | None) -> tuple[int, float, int, int]:
        """See `kernels.cpu.program.NORM`."""
        if given is None:
            return norm.NO_NORM, 0.0, -1, -1
        weight = self.vector(*given.weight) if given.weight else -1
        return _NORMS[given.kind], given.eps, weight, self.vector(*given.bias) if given.bias else -1

    def activation(self, act: Activation | None) -> tuple[int, int]:
        """See `kernels.cpu.program.ACTIVATION`."""
        if act is None:
            return activation.IDENTITY, -1
        name, params = act.name, act.params
        if act.limit:
            name, params = "clipped_silu", (act.limit, act.slope, act.up_offset)

        def read(tensors: Mapping[str, Tensor]) -> Tensor:
            numbers = [
                param.read(tensors[param.name]).flatten() if isinstance(param, Weight) else torch.tensor([param])
                for param in params
            ]
            return torch.cat([*(each.float() for each in numbers), torch.zeros(4 - len(numbers))])

        return activation.NAMES.index(name), self.numbers(4, read) if params else -1

    def matrix(
        self, matrix: Matrix, depth: int, *, is_gated: bool = False, factor: float = 1.0, is_head: bool = False
    ) -> MatrixPlace:
        """A matrix of a product of rows of so many numbers, with its biases, times a factor."""
        place = self._place(matrix, depth, is_gated=is_gated, factor=factor, is_head=is_head)
        return place._replace(bias=self.biases(matrix, is_gated=is_gated, factor=factor))

    def expert_matrices(
        self, matrices: tuple[Matrix, ...], depth: int, top_k: int, *, is_gated: bool
    ) -> tuple[MatrixPlace, int, int]:
        """All experts' matrices, and then their biases, each as far from the one before as all are.

        Returns the place of the first, how far apart matrices are, in bytes, and biases, in columns.
        """
        columns = gated_columns(matrices[0].columns) if is_gated else pad_columns(matrices[0].columns)
        kind, places = self.format_of(*matrices), []
        for matrix in matrices:
            place = self._place(matrix, depth, is_gated=is_gated, rows=top_k, kind=kind)
            places.append(place._replace(bias=self.biases(matrix, is_gated=is_gated)))
        return places[0], matrix_bytes(kind, columns, depth), columns

    def biases(self, matrix: Matrix, *, is_gated: bool = False, factor: float = 1.0) -> int:
        """Where the biases of a matrix begin, -1 if it has none."""
        if not matrix.biases:
            return -1
        columns = sum(bias.size[0] for bias in matrix.biases)

        def read(tensors: Mapping[str, Tensor]) -> Tensor:
            bias = factor * torch.cat([bias.read(tensors[bias.name]).float() for bias in matrix.biases])
            return interleaved(bias[:, None])[:, 0] if is_gated else bias

        return self.numbers(gated_columns(columns) if is_gated else pad_columns(columns), read)

    def format_of(self, *matrices: Matrix, is_head: bool = False) -> int:
        """How matrices are packed. Heads are int8 in int4 models, as llama.cpp and OpenVINO have them."""
        if self.stored is not None:
            kept = self.stored.packing((part for matrix in matrices for part in matrix.parts), ON_CPU)
            return BFLOAT16 if kept is None else kept.format
        if self.quantize is None:
            return FLOAT32 if self.dtype == torch.float32 else BFLOAT16
        return INT4 if self.quantize.weights == "int4" and not is_head else INT8

    def _place(
        self,
        matrix: Matrix,
        depth: int,
        *,
        is_gated: bool = False,
        factor: float = 1.0,
        is_head: bool = False,
        rows: int = 1,
        kind: int | None = None,
    ) -> MatrixPlace:
        """Where a matrix lies that is multiplied with so many rows for each token.

        kind: its format, if that is given
        """
        columns = gated_columns(matrix.columns) if is_gated else pad_columns(matrix.columns)
        kind = self.format_of(matrix, is_head=is_head) if kind is None else kind
        keeps_stored = self.stored is not None
        self.deepest = max(self.deepest, depth)
        self.formats.add(kind)
        self.prepared_bytes = max(self.prepared_bytes, rows * prepared_row_bytes(kind, self.left_bytes, depth))
        start, scale = self._sizes["matrices"], -1
        self._sizes["matrices"] += matrix_bytes(kind, columns, depth)
        if factor != 1:
            scale = self._sizes["scales"]
            self._sizes["scales"] += columns

        def fill(first: int, stop: int, arrays: Arrays, tensors: Mapping[str, Tensor]) -> None:
            """Fills tiles of columns."""
            packed = packed_columns(
                matrix, tensors, kind, self.dtype, depth, first * COLUMNS, stop * COLUMNS, is_gated=is_gated,
                keeps_stored=keeps_stored,
            )  # fmt: skip
            begin = start + first * tile_bytes(kind, depth)
            arrays["matrices"][begin : begin + packed.size] = packed
            if scale >= 0:
                arrays["scales"][scale + first * COLUMNS : scale + stop * COLUMNS] = factor

        tiles, step = columns // COLUMNS, max(1, _PART // (COLUMNS * depth))
        self._fills += [partial(fill, first, min(first + step, tiles)) for first in range(0, tiles, step)]
        return MatrixPlace(start, kind, scale)

    def scaled(self, scale: int, matrix: Matrix, factor: float) -> int:
        """Where the factors of a matrix's columns, multiplied once more, begin."""
        columns, start = pad_columns(matrix.columns), self._sizes["scales"]
        self._sizes["scales"] += columns

        def fill(arrays: Arrays, tensors: Mapping[str, Tensor]) -> None:
            before = arrays["scales"][scale : scale + columns] if scale >= 0 else np.float32(1)
            arrays["scales"][start : start + columns] = factor * before

        self._last_fills.append(fill)
        return start

    def vector(self, *weights: Weight) -> int:
        """Where weights side by side begin among the vectors."""

        def read(tensors: Mapping[str, Tensor]) -> Tensor:
            return torch.cat([weight.read(tensors[weight.name]).float().flatten() for weight in weights])

        return self.numbers(sum(math.prod(weight.size) for weight in weights), read)

    def numbers(self, size: int, read: Callable[[Mapping[str, Tensor]], Tensor]) -> int:
        """Where so many numbers begin that are read among the vectors."""
        start = self._sizes["vectors"]
        padded = -(-size // LANES) * LANES
        self._sizes["vectors"] += padded

        def fill(arrays: Arrays, tensors: Mapping[str, Tensor]) -> None:
            numbers = read(tensors).numpy()
            arrays["vectors"][start : start + padded] = np.pad(numbers, (0, padded - len(numbers)))

        self._fills.append(fill)
        return start

    def table(self, weight: Weight) -> int:
        """Where an embedding begins among the tables."""
        rows, width = weight.size
        start = self._sizes["tables"]
        self._sizes["tables"] += rows * width

        def fill(arrays: Arrays, tensors: Mapping[str, Tensor]) -> None:
            table = as_array(weight.read(tensors[weight.name]).to(self.dtype))
            arrays["tables"][start : start + table.size] = table.reshape(-1)

        self._fills.append(fill)
        return start

    def indices(self, numbers: NDArray[np.int64]) -> int:
        """Where column numbers begin among the indices."""
        start = self._sizes["indices"]
        stop = self._sizes["indices"] = start + len(numbers)

        def fill(arrays: Arrays, tensors: Mapping[str, Tensor]) -> None:
            arrays["indices"][start:stop] = numbers

        self._fills.append(fill)
        return start


def packed_weights(
    cache: WeightCache, fingerprint: str, files: Sequence[Path], dtype: torch.dtype, quantize: Quantization | None
) -> PackedFile:
    """The file that keeps a model's packed weights.

    fingerprint: of the model's files, by samples; sizes and times notice any other change
    """
    times = [(status.st_size, status.st_mtime_ns) for status in (path.stat() for path in files)]
    content = {"packing": PACKING, "model": fingerprint, "files": times, "dtype": str(dtype)}
    return PackedFile(cache, content | {"quantize": None if quantize is None else quantize.weights})
