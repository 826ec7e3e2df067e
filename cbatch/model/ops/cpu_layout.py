"""Lays out a program for the CPU's kernels: instructions, buffers, and weights packed as products read them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from cbatch.base.quantization import Quantization
from cbatch.kernels.cpu import activation, norm
from cbatch.kernels.cpu.matmul.formats import (
    is_quantized,
    left_bytes_of,
    matrix_bytes,
    pack_integers,
    pack_weight,
    tile_bytes,
)
from cbatch.kernels.cpu.matmul.linear import prepared_row_bytes
from cbatch.kernels.cpu.matmul.microkernel import COLUMNS, LANES, pad_columns
from cbatch.kernels.cpu.program import BUFFER, NORM, Instruction, Weights
from cbatch.kernels.cpu.tensors import as_array, element_of
from cbatch.kernels.formats import BFLOAT16, FLOAT32, ON_CPU, quantized
from cbatch.model.config import UnsupportedConfig
from cbatch.model.ops.operation import Operation, with_role
from cbatch.model.ops.program import Program
from cbatch.model.packed_file import Arrays, PackedFile
from cbatch.model.stored import StoredWeights, kept_weights, packing_of, rows_of
from cbatch.model.weight import RESIDUAL, Activation, Matrix, Norm, Weight
from cbatch.runtime.cpu import empty, num_threads, single_threaded
from cbatch.runtime.memory import check_room

_log = logging.getLogger("cbatch")

PACKING = {"version": 4, "lanes": LANES, "columns": COLUMNS}
"""The order of packed numbers. It is the same for every processor; whoever changes it raises the version."""

_NORMS = {"none": norm.NO_NORM, "rms": norm.RMS_NORM, "layer": norm.LAYER_NORM}

_PART = 2**19
"""Numbers of a matrix that a thread packs at once, at most: few enough for the processor's caches, also as float32."""

Tensors = Mapping[str, Tensor]

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
    left_bytes:    wanted bytes of a number of a row that is multiplied with quantized weights (see `left_bytes_of`)
    prepared_bytes: the most bytes that the left-hand rows of a product take, for each token, if it has to prepare them
    routing_columns, num_experts: the most experts of a token, and of a layer; 0 without experts
    multiplied:    names of the buffers that go into products
    used:          how many columns of each buffer are in use, without padding
    head:          where the embedding lies if it is read from the matrix of the head
    head_norm:     the norm in front of the head; see `kernels.cpu.program.NORM`
    adapted:       linears to which adapters add (see `CpuAdapters`)
    stored:        weights that keep the formats of their files
    """

    head_norm: tuple[int, float, int, int]

    def __init__(
        self,
        program: Program,
        dtype: torch.dtype,
        quantize: Quantization | None,
        stored: StoredWeights | None = None,
        adapted: Mapping[Any, tuple[int, int]] = MappingProxyType({}),
    ) -> None:
        """Raises UnsupportedConfig for what the kernels do not support.

        stored:  weights that may have packed formats, see `kept_weights`
        adapted: they change instructions and buffers, no weights
        """
        self.program, self.adapted, self.dtype, self.quantize = program, adapted, dtype, quantize
        self.stored = kept_weights(stored, quantize)
        self.float_columns = self.element_columns = self.deepest = self.prepared_bytes = 0
        self.routing_columns = self.num_experts = 0
        self.formats: set[int] = set()
        self.left_bytes = 2 if quantize is not None and quantize.activations == "bf16" else 1
        self._sizes = dict.fromkeys(Weights._fields, 0)
        self._fills: list[Callable[[Arrays, Tensors], None]] = []
        """Each fills a part of the arrays; their order does not matter."""
        self._buffers: dict[str, Buffer] = {}
        self._places: dict[tuple[str, int], int] = {}
        self.used: dict[str, int] = {RESIDUAL: program.hidden_size}
        self.multiplied = {name for one in program.operations if one.is_product for _, name in with_role(one, "reads")}
        self._instructions: list[tuple[Instruction, tuple[Any, ...]]] = []
        self.head: MatrixPlace | None = None
        self.floats(RESIDUAL, program.hidden_size)
        if program.head.parts == (program.embedding,) and not program.head.biases:
            self.head = self.matrix(program.head, pad_columns(program.hidden_size), is_head=True)
        for operation in program.operations:
            operation.on_cpu(self)

    def records(self, state_type: np.dtype[Any]) -> dict[Instruction, NDArray[Any]]:
        """The records of each kind of instruction, in their order.

        state_type: of the numbers of recurrent states
        """
        found: dict[Instruction, list[tuple[Any, ...]]] = {}
        for kind, values in self._instructions:
            found.setdefault(kind, []).append(values)
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
    def num_bytes(self) -> int:
        """Memory that the weights take."""
        return sum(size * type.itemsize for size, type in self._shapes().values())

    def _shapes(self) -> dict[str, tuple[int, np.dtype[Any]]]:
        """Length and type of each array of the weights."""
        byte, number, index = map(np.dtype, (np.uint8, np.float32, np.int64))
        types = byte, number, number, element_of(self.dtype), index
        return dict(zip(self._sizes, zip(self._sizes.values(), types, strict=True), strict=True))

    def no_weights(self) -> Weights:
        """Of the same types."""
        return Weights(**{name: np.empty(0, type) for name, (_, type) in self._shapes().items()})

    def load(self, tensors: Tensors, shared: PackedFile | None) -> Weights:
        """The weights as the kernels take them, in memory of this process or mapped.

        tensors: by their names in the program; `check_weights` has accepted them. Not read if the shared file is there
        shared:  the file that keeps them, and other processes map too; if it cannot be used, the log says why
        """

        def fill(arrays: Arrays) -> None:
            with single_threaded(), ThreadPoolExecutor(num_threads(), "cbatch-pack") as executor:
                for _ in executor.map(lambda each: each(arrays, tensors), self._fills):
                    pass  # the first error cancels those that wait

        shapes, total = self._shapes(), self.num_bytes
        if shared is not None and total >= shared.cache.least_bytes:
            try:
                return Weights(**shared.arrays(shapes, fill))
            except OSError as error:
                _log.warning("Packed weights are not kept in %s: %s.", shared.cache.folder, error)
        check_room("The weights", total, torch.device("cpu"))
        arrays = {name: empty(*array) for name, array in shapes.items()}
        fill(arrays)
        return Weights(**arrays)

    def add(
        self, kind: Instruction, operation: Operation | None = None, *, floats: int | None = None,
        elements: int | None = None, **values: Any,
    ) -> None:  # fmt: skip
        """Adds an instruction. Fields that are not given are those of the operation with the same names; None is -1.

        Buffers are read as they were written last; norms and weights get a place among the vectors.

        floats, elements: columns of the operation's target, which is a buffer of that kind
        """
        for name, type in kind.fields.items():
            if name not in values and not (name == "target" and (floats or elements)):
                value: Any = 0 if type is None else getattr(operation, name)
                if type is BUFFER or type is NORM:
                    value = self.read(value) if type is BUFFER else self.norm(value)
                values[name] = self.vector(value) if isinstance(value, Weight) else value
        if floats or elements:
            target: str = getattr(operation, "target")  # noqa: B009
            values["target"] = self.floats(target, floats) if floats else self.elements(target, elements or 0)
        self._instructions.append((kind, tuple(-1 if values[name] is None else values[name] for name in kind.fields)))

    def read(self, name: str) -> Buffer:
        """A buffer as it was written last."""
        return self._buffers[name]

    def floats(self, name: str, columns: int) -> Buffer:
        """A buffer of float32 that is written next, whose columns are padded for products."""
        width = pad_columns(columns)
        start = self._places.setdefault((name, width), self.float_columns)
        self.float_columns = max(self.float_columns, start + width)
        return self._written(name, columns, (start, width))

    def elements(self, name: str, columns: int, width: int | None = None) -> Buffer:
        """A buffer of what goes into products that is written next.  width: with its padding, if it has any"""
        width = columns if width is None else width
        start = self._places.setdefault((name, width), self.element_columns)
        self.element_columns = max(self.element_columns, start + pad_columns(width))
        return self._written(name, columns, (start, width))

    def _written(self, name: str, columns: int, buffer: Buffer) -> Buffer:
        self.used[name], self._buffers[name] = columns, buffer
        return buffer

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
            name, params = "clipped_silu", (act.limit, act.slope, act.up_offset, act.up_limit or act.limit)

        def read(tensors: Tensors) -> Tensor:
            numbers = [
                param.read(tensors[param.name]).flatten() if isinstance(param, Weight) else torch.tensor([param])
                for param in params
            ]
            return torch.cat([*(each.float() for each in numbers), torch.zeros(4 - len(numbers))])

        return activation.NAMES.index(name), self.numbers(4, read) if params else -1

    def matrix(
        self, matrix: Matrix, depth: int, *, is_gated: bool = False, factor: float = 1.0, is_head: bool = False,
        rows: int = 1, format: int | None = None,
    ) -> MatrixPlace:  # fmt: skip
        """Where a matrix lies, with its biases, times a factor.

        depth:  of the rows that it is multiplied with, so many for each token
        format: how it is packed, if that is given
        """
        columns = product_columns(matrix.columns, is_gated=is_gated)
        kind = self.format_of(matrix, is_head=is_head) if format is None else format
        self.deepest = max(self.deepest, depth)
        self.formats.add(kind)
        width = prepared_row_bytes(kind, left_bytes_of(kind, self.left_bytes), depth)
        self.prepared_bytes = max(self.prepared_bytes, rows * width)
        start = self._place("matrices", matrix_bytes(kind, columns, depth))

        def fill(first: int, stop: int, arrays: Arrays, tensors: Tensors) -> None:
            """Fills tiles of columns."""
            packed = self._packed(matrix, tensors, kind, depth, first * COLUMNS, stop * COLUMNS, is_gated=is_gated)
            begin = start + first * tile_bytes(kind, depth)
            arrays["matrices"][begin : begin + packed.size] = packed

        tiles, step = columns // COLUMNS, max(1, _PART // (COLUMNS * depth))
        self._fills += [partial(fill, first, min(first + step, tiles)) for first in range(0, tiles, step)]
        biases = self._biases(matrix, is_gated=is_gated, factor=factor)
        return MatrixPlace(start, kind, self.scales(columns, factor), biases)

    def expert_matrices(
        self, matrices: tuple[Matrix, ...], depth: int, top_k: int, *, is_gated: bool
    ) -> dict[str, Any]:
        """All experts' matrices, and then their biases, each as far from the one before as all are.

        Gives the place of the first `matrix`, the `stride` of matrices, in bytes, and that of biases, in `columns`.
        """
        columns = product_columns(matrices[0].columns, is_gated=is_gated)
        kind = self.format_of(*matrices)
        places = [self.matrix(matrix, depth, is_gated=is_gated, rows=top_k, format=kind) for matrix in matrices]
        return {"matrix": places[0], "stride": matrix_bytes(kind, columns, depth), "columns": columns}

    def _biases(self, matrix: Matrix, *, is_gated: bool, factor: float) -> int:
        """Where the biases of a matrix begin, -1 if it has none."""
        if not matrix.biases:
            return -1
        columns = sum(bias.size[0] for bias in matrix.biases)

        def read(tensors: Tensors) -> Tensor:
            bias = factor * torch.cat([bias.read(tensors[bias.name]).float() for bias in matrix.biases])
            return interleaved(bias[:, None])[:, 0] if is_gated else bias

        return self.numbers(product_columns(columns, is_gated=is_gated), read)

    def format_of(self, *matrices: Matrix, is_head: bool = False) -> int:
        """How matrices are packed that have one format."""
        packing = packing_of(matrices, self.quantize, self.stored, ON_CPU, is_head=is_head)
        return packing.format if packing is not None else FLOAT32 if self.dtype == torch.float32 else BFLOAT16

    def _packed(
        self, matrix: Matrix, tensors: Tensors, format: int, depth: int, first: int, stop: int, *, is_gated: bool
    ) -> NDArray[np.uint8]:
        """Some columns of a matrix, whole tiles of them.

        depth:    padded to so many
        is_gated: columns are those of gate and up, in the order of `interleaved`
        """
        spans = [(first, stop)]
        if is_gated:
            half = matrix.columns // 2
            spans = [(first // 2 + up, min(stop // 2, half) + up) for up in (0, half)]
        parts = [part for span in spans for part in _part_rows(matrix, *span)]
        ordered: Callable[[Tensor], Tensor] = interleaved if is_gated else lambda rows: rows
        if self.stored is not None and is_quantized(format):
            return pack_integers(format, self.stored.packed(parts, format).map(ordered), depth)
        read = [rows_of(tensors, *part) for part in parts]
        # Numbers are rounded to the model's type before they are packed, or rounded to integers.
        rows = ordered(torch.cat(read) if len(read) > 1 else read[0]).to(self.dtype)
        if is_quantized(format):
            return pack_integers(format, quantized(rows, format), depth)
        return pack_weight(as_array(rows), depth)

    def _place(
        self, array: str, size: int, values: Callable[[Tensors], NDArray[Any] | np.float32] | None = None
    ) -> int:
        """Where so many numbers begin in an array of `Weights`, which they fill if they are given."""
        start = self._sizes[array]
        stop = self._sizes[array] = start + size
        if values is not None:

            def fill(arrays: Arrays, tensors: Tensors) -> None:
                arrays[array][start:stop] = values(tensors)

            self._fills.append(fill)
        return start

    def scales(self, columns: int, factor: float) -> int:
        """Where the factors of so many columns begin; -1 if they are 1."""
        return -1 if factor == 1 else self._place("scales", columns, lambda tensors: np.float32(factor))

    def vector(self, *weights: Weight) -> int:
        """Where weights side by side begin among the vectors."""

        def read(tensors: Tensors) -> Tensor:
            return torch.cat([weight.read(tensors[weight.name]).float().flatten() for weight in weights])

        return self.numbers(sum(math.prod(weight.size) for weight in weights), read)

    def numbers(self, size: int, read: Callable[[Tensors], Tensor]) -> int:
        """Where so many numbers begin that are read among the vectors."""
        padded = -(-size // LANES) * LANES

        def values(tensors: Tensors) -> NDArray[Any]:
            numbers = read(tensors).numpy()
            return np.pad(numbers, (0, padded - len(numbers)))

        return self._place("vectors", padded, values)

    def table(self, weight: Weight) -> int:
        """Where an embedding begins among the tables."""

        def values(tensors: Tensors) -> NDArray[Any]:
            return as_array(weight.read(tensors[weight.name]).to(self.dtype)).reshape(-1)

        return self._place("tables", math.prod(weight.size), values)

    def indices(self, numbers: NDArray[np.int64]) -> int:
        """Where column numbers begin among the indices."""
        return self._place("indices", len(numbers), lambda tensors: numbers)


def _part_rows(matrix: Matrix, first: int, stop: int) -> list[tuple[Weight, int, int]]:
    """The parts of a matrix that have some of its columns, and which rows these are of each."""
    parts, begin = [], 0
    for part in matrix.parts:
        end = begin + part.size[0]
        if first < end and begin < stop:
            parts.append((part, max(first - begin, 0), min(stop, end) - begin))
        begin = end
    return parts


def product_columns(columns: int, *, is_gated: bool) -> int:
    """Columns of a product, padded to whole tiles; those of gate and up each to whole halves of tiles."""
    return 2 * -(-columns // COLUMNS) * LANES if is_gated else pad_columns(columns)


def unpadded(columns: int) -> int:
    """So many columns of a buffer or a head that recurrent layers do not pad. Raises UnsupportedConfig for others."""
    if columns % LANES:
        raise UnsupportedConfig(f"the kernels do not support heads or channels of {columns} in recurrent layers")
    return columns


def interleaved(both: Tensor) -> Tensor:
    """Gate and up, one after the other, as 16 columns of each in turn: a tile has both factors of 16 results."""
    halves = both.view(2, -1, both.shape[1])
    padded = pad(halves, (0, 0, 0, -halves.shape[1] % LANES))
    return padded.view(2, -1, LANES, both.shape[1]).transpose(0, 1).reshape(-1, both.shape[1])
