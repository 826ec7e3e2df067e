"""Quantized checkpoints in safetensors files: their readers by `quant_method`, and their weights."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from cbatch.base.errors import ModelError
from cbatch.base.quantization import Quantization
from cbatch.kernels.formats import Integers
from cbatch.model.config import UnsupportedConfig
from cbatch.model.formats import awq, compressed_tensors, fp8, gptq, mxfp4
from cbatch.model.formats.integers import common_format, rounded, tell_rounded, tell_widened
from cbatch.model.formats.matrices import FloatMatrix, Rows, StoredMatrix
from cbatch.model.formats.method import FLOATS, Headers, Settings, UnreadQuantization
from cbatch.model.programs.named_tensors import resolved
from cbatch.model.programs.program import Program, Weight
from cbatch.model.programs.stored import StoredWeights
from cbatch.model.tensor_files import Tensors

_KEY = "quantization_config"
_OF_OTHERS = re.compile(r".*\.(input_scale|input_zero_point|input_global_scale|output_scale|[qkv]_scale)")
"""Tensors for activations and KV caches that are rounded, which they are not here, or in another way."""


class Method(NamedTuple):
    """How checkpoints of a `quant_method` are read.

    name:     for people
    settings: understands a `quantization_config`, or raises UnreadQuantization
    matrices: finds the matrices, given what `settings` has returned; raises ModelError for damaged files
    """

    name: str
    settings: Callable[[Settings], Any]
    matrices: Callable[[Any, Headers], dict[str, StoredMatrix]]


METHODS: dict[str, Method] = {
    "awq": Method("AWQ", awq.read_settings, awq.matrices),
    "gptq": Method("GPTQ", gptq.read_settings, gptq.matrices),
    "compressed-tensors": Method("compressed-tensors", compressed_tensors.read_settings, compressed_tensors.matrices),
    "fp8": Method("FP8", fp8.read_settings, fp8.matrices),
    "mxfp4": Method("MXFP4", mxfp4.read_settings, mxfp4.matrices),
}
"""By `quant_method`."""


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json as that of a model whose weights are numbers."""
    plain = {key: value for key, value in config.items() if key != _KEY}
    if isinstance(text := plain.get("text_config"), Mapping):
        plain["text_config"] = without_quantization(text)
    return plain


class QuantizedCheckpoint:
    """What a config.json says of its quantized weights."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raises UnreadQuantization for a method, or one of its options, that is not read."""
        given = settings_of(config)
        if not isinstance(given, Mapping):
            raise UnreadQuantization(f"its {_KEY} is {given!r}")
        settings = Settings(given)
        if settings.method not in METHODS:
            raise UnreadQuantization(f"weights of quant_method {settings.method} are not read")
        self._method = METHODS[settings.method]
        self._settings = self._method.settings(settings)

    def weights(self, program: Program, tensors: Tensors) -> QuantizedWeights:
        """Raises ModelError, with one sentence, for tensors that are missing or have another shape."""
        headers = Headers(tensors)
        matrices = self._method.matrices(self._settings, headers)
        plain = {name: name for name in tensors if name not in headers.used and not _OF_OTHERS.fullmatch(name)}
        if twice := sorted(plain.keys() & matrices.keys()):
            raise ModelError(f"Cannot load {tensors.folder}: it has {twice[0]} twice, once quantized.")
        return QuantizedWeights(self._method.name, program, tensors, {**plain, **matrices})


def settings_of(config: Mapping[str, Any]) -> Any:
    """The `quantization_config` of a config.json, None if it has none."""
    text = config.get("text_config")
    inner = text.get(_KEY) if isinstance(text, Mapping) else None
    return config.get(_KEY) or inner


class QuantizedWeights(StoredWeights):
    """The weights of a quantized checkpoint by the names of a program."""

    def __init__(
        self, method: str, program: Program, tensors: Tensors, sources: Mapping[str, StoredMatrix | str]
    ) -> None:
        """sources: by the names of the files; a name of a tensor, or what is not stored as numbers

        Raises ModelError for a matrix that has another shape than the program's, and UnsupportedConfig for experts
        that lie in one tensor, if the program has them by themselves.
        """
        self._method, self._tensors = method, tensors
        renamed = resolved(program, cast(Any, sources))
        if any(name.endswith(".experts.gate_up_proj") for name in renamed.keys() - program.shapes.keys()):
            raise UnsupportedConfig("its experts lie in one tensor beside quantized weights")
        found = cast(Mapping[str, StoredMatrix | str], renamed)
        self._sources = {name: source for name, source in found.items() if not self._is_no_bias(name, found, program)}
        self._matrices = {
            name: source
            for name, source in found.items()
            if name in program.shapes and isinstance(source, StoredMatrix)
        }
        for name in program.shapes.keys() & self._sources.keys() - self._matrices.keys():
            stored = cast(str, self._sources[name])
            if (header := tensors.header(stored)).type not in FLOATS:
                raise ModelError(f"Cannot load {tensors.folder}: {stored} is {header}, which is not quantized.")
        for name, matrix in self._matrices.items():
            if matrix.shape != program.shapes[name]:
                raise ModelError(
                    f"Cannot load {tensors.folder}: {name} is {list(matrix.shape)}, and its config.json has "
                    f"{list(program.shapes[name])}."
                )

    def _is_no_bias(self, name: str, found: Mapping[str, StoredMatrix | str], program: Program) -> bool:
        """Whether it is a bias of zeros, which some tools add to every matrix."""
        if name in program.shapes or not name.endswith(".bias"):
            return False
        if not isinstance(found.get(f"{name.removesuffix('.bias')}.weight"), StoredMatrix):
            return False
        return not self._tensors[cast(str, found[name])].any()

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def __getitem__(self, name: str) -> Tensor:
        source = self._sources[name]
        if isinstance(source, str):
            return self._tensors[source]
        values = source.values(np.arange(source.rows * max(source.experts, 1)))
        if source.experts:
            values = values.view(source.experts, source.rows, source.depth)
        return values.transpose(-1, -2) if source.is_transposed else values

    @property
    def description(self) -> str:
        """The formats in the files, for people."""
        counts = Counter(source.label for source in self._matrices.values())
        formats = ", ".join(f"{count} of {label}" for label, count in counts.most_common())
        numbers = sum(int(np.prod(self.shape(name), dtype=np.int64)) for name in self._sources)
        bits = 8 * self._tensors.num_bytes / max(1, numbers)
        return f"{self._method} with {bits:.2f} bits a weight (matrices: {formats or 'none'})"

    def shape(self, name: str) -> tuple[int, ...]:
        source = self._sources[name]
        return self._tensors.header(source).shape if isinstance(source, str) else source.shape

    def rows(self, weight: Weight, first: int, stop: int) -> Tensor:
        matrix = self._row_wise(weight)
        if matrix is None:
            return weight.read(self[weight.name])[first:stop]
        numbers = matrix.values(_chosen(weight, matrix, first, stop))
        return numbers if (weight.factor, weight.offset) == (1, 0) else weight.factor * numbers + weight.offset

    def format(self, weights: Iterable[Weight]) -> int | None:
        formats = []
        for weight in weights:
            matrix = self._row_wise(weight)
            formats.append(None if matrix is None or (weight.factor, weight.offset) != (1, 0) else matrix.format)
        return common_format(formats)

    def float8_group(self, weights: Iterable[Weight]) -> int | None:
        groups = set()
        for weight in weights:
            matrix = self._row_wise(weight)
            is_kept = isinstance(matrix, FloatMatrix) and (weight.factor, weight.offset) == (1, 0)
            groups.add(matrix.group if is_kept and isinstance(matrix, FloatMatrix) else None)
        return groups.pop() if len(groups) == 1 else None

    def float8(self, weight: Weight, first: int, stop: int) -> tuple[Tensor, Tensor]:
        matrix = self._row_wise(weight)
        if not isinstance(matrix, FloatMatrix):
            return super().float8(weight, first, stop)
        rows = _chosen(weight, matrix, first, stop)
        return matrix.codes(rows), matrix.scales(rows)

    def packed(self, weights: Iterable[tuple[Weight, int, int]], format: int) -> Integers:
        parts = [self._integers(weight, first, stop, format) for weight, first, stop in weights]
        return Integers.concatenated(parts)

    def finish(
        self, memory: int, dtype: torch.dtype, quantize: Quantization | None, *, keeps_float8: bool = False
    ) -> None:
        """Gives back what has been read, and says what has become of formats that no kernel reads.

        memory:   bytes of the weights as they are now
        quantize: how matrices are kept as integers, if they are
        keeps_float8: those of FP8 are kept as they are
        """
        self._tensors.drop_pages()
        lost = {
            each.label
            for each in self._matrices.values()
            if not each.is_exact and not (keeps_float8 and isinstance(each, FloatMatrix) and each.group is not None)
        }
        if quantize is None:
            tell_widened(self._method, dtype, memory, self._tensors.num_bytes, "the files")
        elif lost and quantize.keeps_stored:
            tell_rounded(lost, memory, self._tensors.num_bytes, "the files")

    def _row_wise(self, weight: Weight) -> StoredMatrix | None:
        """The matrix whose rows are those of a loaded weight, if there is one."""
        source = self._sources[weight.name]
        if isinstance(source, str) or weight.is_flat or weight.function or weight.transpose != source.is_transposed:
            return None
        return source

    def _integers(self, weight: Weight, first: int, stop: int, format: int) -> Integers:
        matrix = self._sources[weight.name]
        if isinstance(matrix, str):
            raise ValueError(f"{weight.name} has no integers")
        rows = _chosen(weight, matrix, first, stop)
        return matrix.integers(rows).widened(matrix.format, format) or rounded(matrix.values(rows), format)


def _chosen(weight: Weight, matrix: StoredMatrix, first: int, stop: int) -> Rows:
    """Rows of the weight before its own rows are chosen, counted over all experts."""
    rows = np.arange(first, stop) if weight.rows is None else weight.rows[first:stop].numpy()
    return rows if weight.index is None else rows + weight.index * matrix.rows
