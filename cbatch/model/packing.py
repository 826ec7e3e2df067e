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
from torch import Tensor

from cbatch.base.quantization import Quantization
from cbatch.kernels.cpu import activation, norm
from cbatch.kernels.cpu import program as instructions
from cbatch.kernels.cpu.matmul.formats import matrix_bytes, tile_bytes
from cbatch.kernels.cpu.matmul.linear import ACTIVATED, ADD, GATED, WRITE, prepared_row_bytes
from cbatch.kernels.cpu.matmul.microkernel import COLUMNS, LANES, pad_columns
from cbatch.kernels.cpu.program import INSTRUCTION, Weights
from cbatch.kernels.cpu.tensors import as_array
from cbatch.kernels.formats import BFLOAT16, FLOAT32, INT4, INT8, ON_CPU
from cbatch.model.config import UnsupportedConfig
from cbatch.model.cpu_weights import gated_columns, interleaved, packed_columns
from cbatch.model.packed_file import Arrays, ArrayShape, PackedFile
from cbatch.model.programs.program import (
    RESIDUAL,
    Activation,
    Attend,
    Embed,
    Experts,
    Gate,
    GatedDelta,
    GatedNorm,
    Gather,
    Head,
    Linear,
    Matrix,
    Norm,
    Normalize,
    Operation,
    PrepareHeads,
    Program,
    Route,
    Scale,
    SelectiveScan,
    ShortConvolution,
    Weight,
)
from cbatch.model.programs.stored import StoredWeights
from cbatch.model.weight_cache import WeightCache
from cbatch.runtime.cpu import empty, num_threads, single_threaded
from cbatch.runtime.memory import check_room

_log = logging.getLogger("cbatch")

PACKING = {"version": 4, "lanes": LANES, "columns": COLUMNS}
"""The order of packed numbers. It is the same for every processor; whoever changes it raises the version."""


def packed_weights(
    cache: WeightCache, fingerprint: str, files: Sequence[Path], dtype: torch.dtype, quantize: Quantization | None
) -> PackedFile:
    """The file that keeps a model's packed weights.

    fingerprint: of the model's files, by samples; sizes and times notice any other change
    """
    times = [(status.st_size, status.st_mtime_ns) for status in (path.stat() for path in files)]
    content = {"packing": PACKING, "model": fingerprint, "files": times, "dtype": str(dtype)}
    return PackedFile(cache, content | {"quantize": None if quantize is None else quantize.weights})


_PLACES = (
    "matrix", "scale", "bias", "params", "norm_weight", "norm_bias", "table", "positions", "rotary", "sinks", "index",
    "query_norm_weight", "query_norm_bias", "key_norm_weight", "key_norm_bias", "value_norm_weight", "value_norm_bias",
    "choice_bias", "expert_scales", "input_gate", "output_gate",
)  # fmt: skip
"""Fields of an instruction that are -1 if they are not used."""

_SCORES = ("softmax", "sigmoid", "softmax_of_chosen", "sigmoid_of_chosen")
_GROUP_SCORES = ("highest", "two_highest")
_GATES = {"identity": instructions.IDENTITY, "sigmoid": instructions.SIGMOID, "softplus": instructions.SOFTPLUS}
_NORMS = {"none": norm.NO_NORM, "rms": norm.RMS_NORM, "layer": norm.LAYER_NORM}
_NORMED, _PRODUCT = "normed", "product before its activation"

_PART = 2**19
"""Numbers of a matrix that a thread packs at once, at most: few enough for the processor's caches, also as float32."""

Fill = Callable[[Arrays, Mapping[str, Tensor]], None]


class _MatrixPlace(NamedTuple):
    """Where a matrix begins, how it is packed, and where the factors of its columns begin, -1 if it has none."""

    start: int
    format: int
    scale: int


class CpuProgram:
    """A program as the kernels run it.

    instructions:  [operations] of type INSTRUCTION
    float_columns, element_columns: widths of both arenas of buffers, in numbers for each token
    deepest:       the largest depth of a product
    formats:       of the matrices
    left_bytes:    bytes of a number of a row that is multiplied with quantized weights
    prepared_bytes: the most bytes that the left-hand rows of a product take, for each token, if it has to prepare them
    routing_columns, num_experts: the most experts of a token, and of a layer; 0 without experts
    """

    def __init__(
        self,
        program: Program,
        dtype: torch.dtype,
        quantize: Quantization | None,
        stored: StoredWeights | None = None,
        adapted: Mapping[Linear, tuple[int, int]] = MappingProxyType({}),
    ) -> None:
        """Raises UnsupportedConfig for what the kernels do not support.

        stored:  weights that keep the formats of their files, if `quantize` says so
        adapted: linears to which adapters add (see `CpuAdapters`). They change instructions and buffers, no weights
        """
        self.program = program
        self._adapted = adapted
        self.dtype = dtype
        self.quantize = quantize
        self._stored = stored if quantize is not None and quantize.keeps_stored else None
        self.float_columns = self.element_columns = 0
        self.deepest = 0
        self.formats: set[int] = set()
        self.left_bytes = 2 if quantize is not None and quantize.activations == "bf16" else 1
        self.prepared_bytes = 0
        self.routing_columns = self.num_experts = 0
        self._routing = 0, 0
        self._sizes = dict.fromkeys(("matrices", "scales", "vectors", "tables", "indices"), 0)
        self._fills: list[Fill] = []
        """What fills a part of the arrays each, in any order."""
        self._last_fills: list[Fill] = []
        """What reads arrays that others fill."""
        self._buffers: dict[str, tuple[int, int]] = {}
        self._places: dict[tuple[str, int], int] = {}
        self._columns: dict[str, int] = {RESIDUAL: program.hidden_size}
        """How many columns of each buffer are in use, without padding."""
        self._multiplied = {
            operation.source for operation in program.operations if isinstance(operation, Linear | Route | Experts)
        }
        self._packed_embedding: _MatrixPlace | None = None
        self._float(RESIDUAL, pad_columns(program.hidden_size))
        embed, head = program.embed, program.head
        if head.matrix.parts == (embed.table,) and not head.matrix.biases:
            # The embedding is read from the matrix of the head.
            self._packed_embedding = self._matrix(head.matrix, pad_columns(program.hidden_size), is_head=True)
        self._instructions: list[Any] = []
        for operation in program.operations:
            self._write(operation)
        self.instructions = np.array(self._instructions, INSTRUCTION)

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

    def _new(self, code: int) -> Any:
        """A new instruction, in which every place is missing."""
        instruction = np.zeros((), INSTRUCTION)
        for place in _PLACES:
            instruction[place] = -1
        instruction["code"], instruction["factor"] = code, 1
        self._instructions.append(instruction)
        return instruction

    def _write(self, operation: Operation) -> None:
        match operation:
            case Embed():
                self._write_embed(operation)
            case Normalize():
                self._write_normalize(operation)
            case Linear():
                self._write_linear(operation)
            case PrepareHeads():
                self._write_heads(operation)
            case Attend():
                self._write_attend(operation)
            case Gate():
                self._write_gate(operation)
            case Gather():
                self._write_gather(operation)
            case Scale():
                instruction = self._new(instructions.SCALE)
                instruction["target"], instruction["target_width"] = self._buffers[operation.target]
                instruction["params"] = self._vector(operation.weight)
            case Route():
                self._write_route(operation)
            case Experts():
                self._write_experts(operation)
            case ShortConvolution():
                self._write_convolution(operation)
            case GatedDelta():
                self._write_gated_delta(operation)
            case SelectiveScan():
                self._write_scan(operation)
            case GatedNorm():
                self._write_gated_norm(operation)
            case Head():
                self._write_head(operation)

    def _write_embed(self, operation: Embed) -> None:
        instruction = self._new(instructions.EMBED)
        instruction["factor"] = operation.scale
        width = operation.table.size[1]
        place = self._float(operation.target, pad_columns(width))
        instruction["target"], instruction["target_width"] = place
        instruction["width"] = width
        instruction["position_offset"] = operation.position_offset
        is_first = operation is self.program.embed
        if self._packed_embedding is not None and is_first:
            instruction["is_packed"] = 1
            self._place(instruction, self._packed_embedding)
        elif self._stored is not None and is_first and self._stored.packing([operation.table], ON_CPU) is not None:
            instruction["is_packed"] = 1
            self._place(instruction, self._matrix(Matrix((operation.table,)), pad_columns(width)))
        else:
            instruction["table"] = self._table(operation.table)
        if operation.positions is not None:
            instruction["positions"] = self._table(operation.positions)

    def _write_normalize(self, operation: Normalize) -> None:
        instruction = self._new(instructions.NORMALIZE)
        instruction["factor"] = operation.factor
        source, width = self._buffers[operation.source]
        instruction["source"], instruction["source_width"] = source, width
        size = operation.width or self._columns[operation.source] - operation.start
        instruction["start"], instruction["width"] = operation.start, size
        is_float = operation.add or operation.target in (RESIDUAL, operation.source)
        place = self._buffers[operation.target] if is_float else self._element(operation.target, pad_columns(size))
        instruction["target"], instruction["target_width"] = place
        instruction["add"] = 0 if not is_float else 1 if operation.add else 2
        instruction["groups"] = operation.groups
        self._write_norm(instruction, "", operation.norm)

    def _write_linear(self, operation: Linear) -> None:
        instruction = self._new(instructions.LINEAR)
        source, depth = self._buffers[operation.source]
        instruction["source"], instruction["source_width"] = source, depth
        act = operation.activation
        self._columns[operation.target] = operation.width
        if act is None:
            mode = ADD if operation.add else WRITE
            place = self._float(operation.target, pad_columns(operation.width))
        else:
            if operation.add or operation.factor != 1:
                raise UnsupportedConfig("what an activation gives is neither scaled nor added")
            mode = GATED if act.gated else ACTIVATED
            multiple = LANES if act.gated else COLUMNS
            place = self._element(operation.target, -(-operation.width // multiple) * multiple)
            instruction["function"], instruction["params"] = self._activation(act)
        instruction["mode"] = mode
        instruction["target"], instruction["target_width"] = place
        self._write_matrix(instruction, operation.matrix, depth, is_gated=mode == GATED, factor=operation.factor)
        if operation in self._adapted:
            self._write_adapters(instruction, operation)

    def _write_adapters(self, linear: Any, operation: Linear) -> None:
        """Adds adapters to the product of a linear whose instruction is written, and then its activation."""
        activate = None
        if operation.activation is not None:
            columns = operation.matrix.columns
            width = gated_columns(columns) if linear["mode"] == GATED else pad_columns(columns)
            activate = linear.copy()
            linear["mode"] = WRITE
            linear["target"], linear["target_width"] = self._float(_PRODUCT, width)
        add = self._new(instructions.ADD_ADAPTERS)
        for field in ("source", "source_width", "target", "target_width"):
            add[field] = linear[field]
        add["width"] = operation.matrix.depth
        add["index"], add["columns"] = self._adapted[operation]
        if activate is not None:
            activate["code"] = instructions.ACTIVATE
            activate["source"], activate["source_width"] = linear["target"], linear["target_width"]
            self._instructions.append(activate)

    def _write_matrix(
        self,
        instruction: Any,
        matrix: Matrix,
        depth: int,
        *,
        is_gated: bool = False,
        factor: float = 1.0,
        is_head: bool = False,
    ) -> None:
        self._place(instruction, self._matrix(matrix, depth, is_gated=is_gated, factor=factor, is_head=is_head))
        instruction["bias"] = self._biases(matrix, is_gated=is_gated, factor=factor)

    def _biases(self, matrix: Matrix, *, is_gated: bool, factor: float = 1.0) -> int:
        """Where the biases of a matrix begin, -1 if it has none."""
        if not matrix.biases:
            return -1
        columns = sum(bias.size[0] for bias in matrix.biases)

        def read(tensors: Mapping[str, Tensor]) -> Tensor:
            bias = factor * torch.cat([bias.read(tensors[bias.name]).float() for bias in matrix.biases])
            return interleaved(bias[:, None])[:, 0] if is_gated else bias

        return self._add_vector(gated_columns(columns) if is_gated else pad_columns(columns), read)

    def _write_heads(self, operation: PrepareHeads) -> None:
        instruction = self._new(instructions.PREPARE_HEADS)
        instruction["source"], instruction["source_width"] = self._buffers[operation.source]
        width = operation.heads * operation.shape.key_dim
        instruction["target"], instruction["target_width"] = self._element(operation.query, width)
        instruction["stores"], instruction["cache"] = operation.stores, operation.cache
        instruction["heads"], instruction["clip"] = operation.heads, operation.clip
        instruction["rotary"] = -1 if operation.rotary is None else operation.rotary
        norms = operation.norms
        instruction["norm_rows"], instruction["norm_last"] = norms.by_row, norms.last
        for part, given in (("query_", norms.query), ("key_", norms.key), ("value_", norms.value)):
            if given is not None:
                self._write_norm(instruction, part, given)

    def _write_norm(self, instruction: Any, part: str, given: Norm) -> None:
        instruction[f"{part}norm_kind"], instruction[f"{part}eps"] = _NORMS[given.kind], given.eps
        if given.weight:
            instruction[f"{part}norm_weight"] = self._vector(*given.weight)
        if given.bias:
            instruction[f"{part}norm_bias"] = self._vector(*given.bias)

    def _write_head(self, operation: Head) -> None:
        instruction = self._new(instructions.HEAD)
        instruction["softcap"] = operation.softcap
        instruction["source"], depth = self._buffers[RESIDUAL]
        instruction["source_width"], instruction["width"] = depth, self.program.hidden_size
        instruction["target"], instruction["target_width"] = self._element(_NORMED, depth)
        instruction["mode"] = WRITE
        self._write_norm(instruction, "", operation.norm)
        if self._packed_embedding is None:
            self._write_matrix(instruction, operation.matrix, depth, factor=operation.factor, is_head=True)
        else:
            self._place(instruction, self._packed_embedding)
            if operation.factor != 1:
                instruction["scale"] = self._scaled(self._packed_embedding.scale, operation.matrix, operation.factor)

    def _write_attend(self, operation: Attend) -> None:
        instruction = self._new(instructions.ATTEND)
        instruction["source"], instruction["source_width"] = self._buffers[operation.query]
        width = self._columns[operation.target] = operation.heads * operation.shape.value_dim
        instruction["target"], instruction["target_width"] = self._element(operation.target, width)
        instruction["cache"], instruction["heads"] = operation.cache, operation.heads
        instruction["attention_scale"], instruction["softcap"] = operation.scale, operation.softcap
        instruction["window"], instruction["chunk"] = operation.window, operation.chunk
        if operation.sinks is not None:
            instruction["sinks"] = self._vector(operation.sinks)

    def _write_gate(self, operation: Gate) -> None:
        instruction = self._new(instructions.GATE)
        instruction["source"], instruction["source_width"] = self._buffers[operation.gate]
        target, width = self._buffers[operation.target]
        instruction["target"], instruction["target_width"] = target, width
        instruction["start"], instruction["width"] = operation.start, operation.width
        instruction["columns"] = self._columns[operation.target] // operation.width
        instruction["function"], instruction["factor"] = _GATES[operation.function], operation.factor

    def _write_gather(self, operation: Gather) -> None:
        """For each column: where its buffer begins, how wide that is, and its column in there."""
        instruction = self._new(instructions.GATHER)
        columns = [
            (*self._buffers[source], column) for source in operation.sources for column in range(self._columns[source])
        ]
        chosen = np.array(columns, np.int64)[operation.columns.numpy()].T.flatten()
        instruction["index"], instruction["columns"] = self._sizes["indices"], len(operation.columns)
        self._sizes["indices"] += len(chosen)
        start, stop = int(instruction["index"]), self._sizes["indices"]

        def fill(arrays: Arrays, tensors: Mapping[str, Tensor]) -> None:
            arrays["indices"][start:stop] = chosen

        self._fills.append(fill)
        place = self._float(operation.target, pad_columns(len(operation.columns)))
        instruction["target"], instruction["target_width"] = place

    def _write_route(self, operation: Route) -> None:
        instruction = self._new(instructions.ROUTE)
        matrix, experts = operation.matrix, operation.matrix.columns
        instruction["source"], instruction["source_width"] = self._buffers[operation.source]
        instruction["width"], instruction["num_experts"] = matrix.depth, experts
        instruction["params"] = self._add_vector(
            experts * matrix.depth,
            lambda tensors: torch.cat([part.read(tensors[part.name]).float().flatten() for part in matrix.parts]),
        )
        if matrix.biases:
            instruction["bias"] = self._vector(matrix.biases[0])
        for name in ("choice_bias", "expert_scales"):
            if (weight := getattr(operation, name)) is not None:
                instruction[name] = self._vector(weight)
        for name in ("top_k", "groups", "top_groups", "normalize", "epsilon", "least_sum", "factor"):
            instruction[name] = getattr(operation, name)
        instruction["scores"] = _SCORES.index(operation.scores)
        instruction["group_score"] = _GROUP_SCORES.index(operation.group_score)
        self._routing = experts, operation.top_k
        self.routing_columns = max(self.routing_columns, operation.top_k)
        self.num_experts = max(self.num_experts, experts)

    def _write_experts(self, operation: Experts) -> None:
        """Gathers the source of each pair of a token and an expert, then the linears, then the weighted sums."""
        experts, top_k = self._routing
        source, depth = self._buffers[operation.source]
        inner = operation.down[0].depth
        gathered = self._element("expert_input", top_k * depth)
        is_gated = operation.activation.gated
        multiple = LANES if is_gated else COLUMNS
        activated = self._element("expert_intermediate", top_k * (-(-inner // multiple) * multiple))
        result = self._float("expert_output", top_k * pad_columns(operation.down[0].columns))
        codes = instructions.GATHER_FOR_EXPERTS, instructions.EXPERT_LINEAR, instructions.EXPERT_LINEAR
        steps = [self._new(code) for code in (*codes, instructions.COMBINE_EXPERTS)]
        target = (
            self._buffers[operation.target]
            if operation.add
            else self._float(operation.target, pad_columns(operation.down[0].columns))
        )
        places = [(source, depth), gathered, activated, result, target]
        for step, before, after in zip(steps, places[:-1], places[1:], strict=True):
            step["source"], step["source_width"] = before
            step["target"], step["target_width"] = after
            step["top_k"], step["num_experts"], step["weigh_input"] = top_k, experts, operation.weigh_input
        steps[1]["mode"], steps[2]["mode"] = GATED if is_gated else ACTIVATED, WRITE
        steps[1]["function"], steps[1]["params"] = self._activation(operation.activation)
        self._write_expert_matrices(steps[1], operation.up, depth, is_gated=is_gated)
        self._write_expert_matrices(steps[2], operation.down, activated[1] // top_k, is_gated=False)
        steps[3]["factor"], steps[3]["add"] = operation.factor, operation.add

    def _write_expert_matrices(
        self, instruction: Any, matrices: tuple[Matrix, ...], depth: int, *, is_gated: bool
    ) -> None:
        """All experts' matrices, and then their biases, each as far from the one before as all are."""
        columns = matrices[0].columns
        instruction["columns"] = gated_columns(columns) if is_gated else pad_columns(columns)
        kind = self._format(*matrices)
        for number, matrix in enumerate(matrices):
            place = self._matrix(matrix, depth, is_gated=is_gated, rows=int(instruction["top_k"]), kind=kind)
            bias = self._biases(matrix, is_gated=is_gated)
            if number == 0:
                self._place(instruction, place)
                instruction["bias"] = bias
                instruction["stride"] = matrix_bytes(place.format, int(instruction["columns"]), depth)

    def _write_convolution(self, operation: ShortConvolution) -> None:
        channels, kernel, weight = operation.channels, operation.kernel, operation.weight
        instruction = self._new(instructions.CONVOLVE)
        instruction["source"], instruction["source_width"] = self._buffers[operation.source]
        instruction["columns"], instruction["kernel"] = channels, kernel
        instruction["start"], instruction["state"] = operation.start, operation.state
        instruction["function"] = operation.activation == "silu"
        for name in ("input_gate", "output_gate"):
            if (start := getattr(operation, name)) is not None:
                instruction[name] = start
        instruction["params"] = self._add_vector(
            kernel * channels,
            lambda tensors: weight.read(tensors[weight.name]).float().view(channels, kernel).T.flatten(),
        )
        if operation.bias is not None:
            instruction["bias"] = self._vector(operation.bias)
        self._columns[operation.target] = channels
        width = pad_columns(channels)
        if operation.target in self._multiplied:
            instruction["is_element"] = 1
            instruction["other"], instruction["other_width"] = self._float(f"sums of {operation.target}", width)
            place = self._product_source(operation.target, channels)
            instruction["target"], instruction["target_width"] = place
        else:
            instruction["other"], instruction["other_width"] = self._float(operation.target, width)

    def _write_gated_delta(self, operation: GatedDelta) -> None:
        instruction = self._new(instructions.GATED_DELTA)
        self._write_recurrence(
            instruction, operation, operation.controls, operation.value_heads, operation.key_dim, operation.value_dim
        )
        instruction["key_heads"] = operation.key_heads
        instruction["bias"] = self._vector(operation.decay_bias)

    def _write_scan(self, operation: SelectiveScan) -> None:
        instruction = self._new(instructions.SELECTIVE_SCAN)
        self._write_recurrence(
            instruction, operation, operation.steps, operation.heads, operation.state_size, operation.head_dim
        )
        instruction["groups"], instruction["start"] = operation.groups, operation.step_start
        instruction["step_min"], instruction["step_max"] = operation.step_min, operation.step_max
        instruction["bias"], instruction["scale"] = self._vector(operation.step_bias), self._vector(operation.skip)

    def _write_recurrence(
        self,
        instruction: Any,
        operation: GatedDelta | SelectiveScan,
        controls: str,
        heads: int,
        keys: int,
        columns: int,
    ) -> None:
        """keys, columns: of the state of a head"""
        if columns % LANES:
            raise UnsupportedConfig(f"the kernels do not support heads of {columns} in recurrent layers")
        instruction["source"], instruction["source_width"] = self._buffers[operation.source]
        instruction["other"], instruction["other_width"] = self._buffers[controls]
        instruction["heads"], instruction["key_dim"], instruction["value_dim"] = heads, keys, columns
        instruction["state"], log = operation.state, operation.decay_log
        instruction["params"] = self._add_vector(
            heads, lambda tensors: -log.read(tensors[log.name]).float().flatten().exp()
        )
        self._columns[operation.target] = heads * columns
        place = self._float(operation.target, pad_columns(heads * columns))
        instruction["target"], instruction["target_width"] = place

    def _write_gated_norm(self, operation: GatedNorm) -> None:
        instruction = self._new(instructions.GATED_NORM)
        width = self._columns[operation.source]
        instruction["source"], instruction["source_width"] = self._buffers[operation.source]
        instruction["other"], instruction["other_width"] = self._buffers[operation.gate]
        instruction["start"], instruction["columns"] = operation.gate_start, width
        instruction["groups"], instruction["gate_first"] = operation.groups, operation.gate_first
        self._columns[operation.target] = width
        place = self._product_source(operation.target, width)
        instruction["target"], instruction["target_width"] = place
        self._write_norm(instruction, "", operation.norm)

    def _product_source(self, name: str, width: int) -> tuple[int, int]:
        """A buffer of what goes into products, without padding."""
        if width % LANES:
            raise UnsupportedConfig(f"the kernels do not support {width} channels in recurrent layers")
        return self._element(name, width)

    def _float(self, name: str, width: int) -> tuple[int, int]:
        """Where a buffer of float32 begins that is written next, and its width."""
        if (name, width) not in self._places:
            self._places[name, width] = self.float_columns
            self.float_columns += pad_columns(width)
        self._buffers[name] = self._places[name, width], width
        return self._buffers[name]

    def _element(self, name: str, width: int) -> tuple[int, int]:
        """Where a buffer of what goes into products begins that is written next, and its width."""
        if (name, width) not in self._places:
            self._places[name, width] = self.element_columns
            self.element_columns += pad_columns(width)
        self._buffers[name] = self._places[name, width], width
        return self._buffers[name]

    def _place(self, instruction: Any, place: _MatrixPlace) -> None:
        instruction["matrix"], instruction["format"], instruction["scale"] = place

    def _format(self, *matrices: Matrix, is_head: bool = False) -> int:
        """How matrices are packed. Heads are int8 in int4 models, as llama.cpp and OpenVINO have them."""
        if self._stored is not None:
            kept = self._stored.packing((part for matrix in matrices for part in matrix.parts), ON_CPU)
            return BFLOAT16 if kept is None else kept.format
        if self.quantize is None:
            return FLOAT32 if self.dtype == torch.float32 else BFLOAT16
        return INT4 if self.quantize.weights == "int4" and not is_head else INT8

    def _matrix(
        self,
        matrix: Matrix,
        depth: int,
        *,
        is_gated: bool = False,
        factor: float = 1.0,
        is_head: bool = False,
        rows: int = 1,
        kind: int | None = None,
    ) -> _MatrixPlace:
        """Where a matrix lies that is multiplied with so many rows for each token.

        kind: its format, if that is given
        """
        columns = gated_columns(matrix.columns) if is_gated else pad_columns(matrix.columns)
        kind = self._format(matrix, is_head=is_head) if kind is None else kind
        keeps_stored = self._stored is not None
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
        return _MatrixPlace(start, kind, scale)

    def _scaled(self, scale: int, matrix: Matrix, factor: float) -> int:
        """Where the factors of a matrix's columns, multiplied once more, begin."""
        columns, start = pad_columns(matrix.columns), self._sizes["scales"]
        self._sizes["scales"] += columns

        def fill(arrays: Arrays, tensors: Mapping[str, Tensor]) -> None:
            before = arrays["scales"][scale : scale + columns] if scale >= 0 else np.float32(1)
            arrays["scales"][start : start + columns] = factor * before

        self._last_fills.append(fill)
        return start

    def _activation(self, act: Activation) -> tuple[int, int]:
        """The function's number, and where its parameters begin."""
        name, params = act.name, act.params
        if act.limit:
            name, params = "clipped_silu", (act.limit, act.slope, act.up_offset)

        def read(tensors: Mapping[str, Tensor]) -> Tensor:
            numbers = [
                param.read(tensors[param.name]).flatten() if isinstance(param, Weight) else torch.tensor([param])
                for param in params
            ]
            return torch.cat([*(each.float() for each in numbers), torch.zeros(4 - len(numbers))])

        return activation.NAMES.index(name), self._add_vector(4, read) if params else -1

    def _vector(self, *weights: Weight) -> int:
        """Where weights side by side begin among the vectors."""

        def read(tensors: Mapping[str, Tensor]) -> Tensor:
            return torch.cat([weight.read(tensors[weight.name]).float().flatten() for weight in weights])

        return self._add_vector(sum(math.prod(weight.size) for weight in weights), read)

    def _add_vector(self, size: int, read: Callable[[Mapping[str, Tensor]], Tensor]) -> int:
        start = self._sizes["vectors"]
        padded = -(-size // LANES) * LANES
        self._sizes["vectors"] += padded

        def fill(arrays: Arrays, tensors: Mapping[str, Tensor]) -> None:
            numbers = read(tensors).numpy()
            arrays["vectors"][start : start + padded] = np.pad(numbers, (0, padded - len(numbers)))

        self._fills.append(fill)
        return start

    def _table(self, weight: Weight) -> int:
        rows, width = weight.size
        start = self._sizes["tables"]
        self._sizes["tables"] += rows * width

        def fill(arrays: Arrays, tensors: Mapping[str, Tensor]) -> None:
            table = as_array(weight.read(tensors[weight.name]).to(self.dtype))
            arrays["tables"][start : start + table.size] = table.reshape(-1)

        self._fills.append(fill)
        return start
