"""Quantized checkpoints in safetensors files: their readers by `quant_method`, and their weights."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, cast

from cbatch.base.errors import ModelError
from cbatch.model.config import UnsupportedConfig
from cbatch.model.formats import methods
from cbatch.model.formats.matrices import EncodedMatrix
from cbatch.model.formats.settings import FLOATS, Headers, Method, Settings, UnreadQuantization
from cbatch.model.ops.program import Program
from cbatch.model.program_model import resolved
from cbatch.model.stored import PlainTensor, StoredMatrix, StoredWeights
from cbatch.model.tensor_files import Tensors

_KEY = "quantization_config"
_OF_OTHERS = re.compile(
    r".*(_proj_input_scale|\.(input_scale|input_zero_point|input_global_scale|output_scale|(q|k|v|kv|prob)_scale))"
)
"""Tensors for activations and KV caches that are rounded, which they are not here, or in another way."""

METHODS: dict[str, Method] = {
    found.name: found
    for found in (import_module(f"{methods.__name__}.{each.name}").METHOD for each in iter_modules(methods.__path__))
}
"""By `quant_method`."""


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json as that of a model whose weights are numbers."""
    plain = {key: value for key, value in config.items() if key != _KEY}
    if isinstance(text := plain.get("text_config"), Mapping):
        plain["text_config"] = without_quantization(text)
    return plain


class QuantizedCheckpoint:
    """The quantized weights that a config.json tells of."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raises UnreadQuantization for a method, or one of its options, that is not read."""
        given = settings_of(config)
        if not isinstance(given, Mapping):
            raise UnreadQuantization(f"its {_KEY} is {given!r}")
        settings = Settings(_named(given))
        if settings.method not in METHODS:
            raise UnreadQuantization(f"weights of quant_method {settings.method} are not read")
        self.name = METHODS[settings.method].label
        self._read = METHODS[settings.method].read(settings)
        settings.finish()

    def weights(self, program: Program, tensors: Tensors) -> StoredWeights:
        """The weights by the names of a program.

        Raises ModelError, with one sentence, for tensors that are missing or have another shape than the program's,
        and UnsupportedConfig for experts that lie in one tensor, if the program has them by themselves.
        """
        headers = Headers(tensors)
        matrices = dict(self._read(headers))
        plain = [name for name in tensors if name not in headers.used and not _OF_OTHERS.fullmatch(name)]
        if twice := sorted(matrices.keys() & plain):
            raise ModelError(f"Cannot load {tensors.folder}: it has {twice[0]} twice, once quantized.")
        sources: dict[str, StoredMatrix] = {**{name: PlainTensor(tensors, name) for name in plain}, **matrices}
        if _have_stacks(sources) and not _have_stacks(program.shapes):
            raise UnsupportedConfig("its experts lie in one tensor beside quantized weights")
        found = cast(Mapping[str, StoredMatrix], resolved(program, cast(Any, sources)))
        kept = {name: source for name, source in found.items() if not _is_no_bias(name, found, program)}
        for name in program.shapes.keys() & kept.keys():
            _check(tensors, name, kept[name], program.shapes[name])
        return StoredWeights(kept, tensors, self._description(program, kept, tensors))

    def _description(self, program: Program, kept: Mapping[str, StoredMatrix], tensors: Tensors) -> str:
        used = [kept[name] for name in program.shapes.keys() & kept.keys()]
        counts = Counter(source.label for source in used if isinstance(source, EncodedMatrix))
        formats = ", ".join(f"{count} of {label}" for label, count in counts.most_common())
        numbers = sum(math.prod(source.shape) for source in kept.values())
        bits = 8 * tensors.num_bytes / max(1, numbers)
        return f"{self.name} with {bits:.2f} bits a weight (matrices: {formats or 'none'})"


def _named(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with their method, which those of ModelOpt may leave out, or name by what they have changed."""
    inner = given.get("quantization")
    values = {**given, **inner} if isinstance(inner, Mapping) else dict(given)
    values.pop("quantization", None)
    method = "modelopt" if "quant_algo" in values else values.get("quant_method")
    return values | {"quant_method": method.removeprefix("intel/") if isinstance(method, str) else method}


def _have_stacks(names: Iterable[str]) -> bool:
    return any(name.endswith(".experts.gate_up_proj") for name in names)


def _check(tensors: Tensors, name: str, source: StoredMatrix, shape: tuple[int, ...]) -> None:
    """Raises ModelError for a matrix with another shape than the program's, and for a tensor without numbers."""
    if isinstance(source, PlainTensor) and (header := tensors.header(source.name)).type not in FLOATS:
        raise ModelError(f"Cannot load {tensors.folder}: {source.name} is {header}, which is not quantized.")
    if isinstance(source, EncodedMatrix) and source.shape != shape:
        raise ModelError(
            f"Cannot load {tensors.folder}: {name} is {list(source.shape)}, and its config.json has {list(shape)}."
        )


def _is_no_bias(name: str, found: Mapping[str, StoredMatrix], program: Program) -> bool:
    """Whether it is a bias of zeros, which some tools add to every matrix."""
    if name in program.shapes or not name.endswith(".bias"):
        return False
    if not isinstance(found.get(f"{name.removesuffix('.bias')}.weight"), EncodedMatrix):
        return False
    return not found[name].whole.any()


def settings_of(config: Mapping[str, Any]) -> Any:
    """The `quantization_config` of a config.json, None if it has none."""
    text = config.get("text_config")
    inner = text.get(_KEY) if isinstance(text, Mapping) else None
    return config.get(_KEY) or inner
