"""Architectures of GGUF files: their settings as a `config.json` has them, and the fate of their tensors.

Declarations, in the other modules here, say what an architecture has beside the common settings (see `readers`), and
by `Rule`s which weights lie otherwise in files than in the program of a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cbatch.base.model_files import InvalidFile
from cbatch.model.formats.gguf_blocks import values_of
from cbatch.model.formats.gguf_file import GgufFile

_LARGEST = 2**31 - 1


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST


class Metadata:
    """The metadata of a file, with the type that each entry must have. Raises InvalidFile for another one."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self._prefix = file.architecture + "."

    def _get(self, name: str, default: Any = None) -> Any:
        found = self.file.metadata.get(self._prefix + name)
        return default if found is None else found

    def _checked(self, name: str, value: Any, is_right: bool) -> Any:
        if not is_right:
            found = "lacks" if value is None else f"has {str(value)[:60]!r} as"
            raise InvalidFile(f"{self.file.paths[0]} {found} {self._prefix}{name}.")
        return value

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number; if layers have one each, that of all."""
        value = self._get(name, default)
        value = value[0] if isinstance(value, list) and len(set(value)) == 1 else value
        return int(self._checked(name, value, _is_whole(value)))

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        return float(self._checked(name, value, type(value) in (int, float) and math.isfinite(value)))

    def text(self, name: str, default: str) -> str:
        value = self._get(name, default)
        return str(self._checked(name, value, isinstance(value, str)))

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        return bool(self._checked(name, value, isinstance(value, bool)))

    def wholes(self, name: str, count: int) -> list[int]:
        """A number for each layer."""
        value = self._get(name)
        values = [value] * count if type(value) is int else value
        is_list = isinstance(values, list) and len(values) >= count and all(map(_is_whole, values))
        self._checked(name, value, is_list)
        return list(values[:count])

    def own_numbers(self, name: str, count: int) -> list[float]:
        """A number for each layer of an entry whose name does not begin with that of the architecture."""
        value = self.file.metadata.get(name)
        values: list[Any] = value if isinstance(value, list) else [value] * count
        is_right = len(values) == count and all(type(one) is float and math.isfinite(one) for one in values)
        self._checked(name, value, is_right)
        return [float(one) for one in values]

    def flags(self, name: str, count: int) -> list[bool] | None:
        """A flag for each layer; None if there is none, or a number that says how often one is set."""
        value = self._get(name)
        if not isinstance(value, list):
            return None
        self._checked(name, value, len(value) >= count and all(type(one) is bool for one in value))
        return value[:count]

    def has(self, name: str) -> bool:
        return self._get(name) is not None

    def has_tensor(self, name: str) -> bool:
        return name in self.file.tensors

    def shapes(self, ending: str) -> list[tuple[int, ...]]:
        """Of such a tensor, in all layers that have one."""
        layers = (name.split(".", 2) for name in self.file.tensors)
        return [self.file.tensors[".".join(parts)].shape for parts in layers if parts[2:] == [ending]]

    def refused(self, why: str) -> InvalidFile:
        return InvalidFile(f"{self.file.paths[0]} {why}.")

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Of a tensor that must be there."""
        if tensor not in self.file.tensors:
            raise self.refused(f"has no tensor {tensor!r}")
        return self.file.tensors[tensor].shape

    def factors(self, tensor: str, count: int) -> list[float] | None:
        """Numbers of a small tensor that changes frequencies; None if it is not there."""
        if tensor not in self.file.tensors:
            return None
        found = self.file.tensors[tensor]
        if found.shape != (count,):
            raise self.refused(f"is damaged: the tensor {tensor!r} has the shape {found.shape}")
        values = [float(value) for value in values_of(found.type, found.data)[0].tolist()]
        if not all(math.isfinite(value) and value > 0 for value in values):
            raise self.refused(f"is damaged: {tensor!r} has numbers that cannot be factors")
        return values


Config = dict[str, Any]
Order = Callable[[Config, int], Tensor | None]
"""The order of some rows or columns in the file, given their number; None if they cannot be those of the model."""

MAX_EXPERTS = 4096


@dataclass(frozen=True, slots=True)
class Rule:
    """How a file has a weight of a layer, if it has it in another way than the program of the model.

    parts:     tensors whose rows follow those of this one
    rows, columns: their order in the file, see `GgufMatrix`
    combine:   see `GgufMatrix`
    """

    parts: tuple[str, ...] = ()
    rows: Order | None = None
    columns: Order | None = None
    combine: Callable[[Config, Sequence[Tensor]], Tensor] | None = None


Rules = dict[str, Rule]
"""By names of tensors in a layer without their ending (`attn_q`)."""

BEHIND = Rule()
"""Of tensors whose rows follow those of another one, or that are not used."""

Read = Callable[[Metadata, Config], Any]
"""Reads a setting of a file's model, given the common ones."""

ABSENT = object()
"""The value of a common setting that an architecture does not have."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """How models of an architecture are described.

    kind:         their `model_type` in transformers
    layer:        rules of their tensors
    settings:     what they have beside the common settings, each a value, or a function that reads it
    more:         functions that read several settings
    made:         weights that are not tensors of the file
    when:         of several for one name, the first that fits is taken
    """

    kind: str
    layer: Rules
    settings: Mapping[str, Any]
    more: Sequence[Read] = ()
    made: Callable[[Metadata, Config], Mapping[str, Tensor]] = lambda data, config: {}
    when: Callable[[Metadata], bool] = lambda data: True

    def read(self, data: Metadata, config: Config) -> Config:
        """All settings, given the common ones."""
        found = dict(config)
        for read in self.more:
            found |= read(data, found)
        found |= {name: one(data, config) if callable(one) else one for name, one in self.settings.items()}
        return {name: one for name, one in found.items() if one is not ABSENT}


architectures: dict[str, list[Architecture]] = {}
"""By their names in files."""
