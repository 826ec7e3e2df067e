"""The metadata of a GGUF file, with the type that each entry must have."""

from __future__ import annotations

import math
from typing import Any

from cbatch.base.model_files import InvalidFile
from cbatch.model.formats.gguf_blocks import values_of
from cbatch.model.formats.gguf_file import GgufFile

_LARGEST = 2**31 - 1


class Metadata:
    """The metadata of a file, with the type that each entry must have. Raises InvalidFile for another one."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self._prefix = file.architecture + "."

    def _get(self, name: str) -> Any:
        return self.file.metadata.get(self._prefix + name)

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number; if layers have one each, that of all."""
        value = self._get(name)
        if isinstance(value, list) and value and len(set(value)) == 1:
            value = value[0]
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST:
            raise self._wrong(name, value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._wrong(name, value)
        return float(value)

    def text(self, name: str, default: str) -> str:
        value = default if (given := self._get(name)) is None else given
        if not isinstance(value, str):
            raise self._wrong(name, value)
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = default if (given := self._get(name)) is None else given
        if not isinstance(value, bool):
            raise self._wrong(name, value)
        return value

    def wholes(self, name: str, count: int) -> list[int]:
        """A number for each layer."""
        value = self._get(name)
        values = [value] * count if type(value) is int else value
        is_list = isinstance(values, list) and len(values) >= count
        if not is_list or not all(type(one) is int and 0 <= one <= _LARGEST for one in values):
            raise self._wrong(name, value)
        found: list[int] = values[:count]
        return found

    def flags(self, name: str, count: int) -> list[bool] | None:
        """A flag for each layer; None if there is none, or a number that says how often one is set."""
        value = self._get(name)
        if not isinstance(value, list):
            return None
        if len(value) < count or not all(type(one) is bool for one in value):
            raise self._wrong(name, value)
        return value[:count]

    def has(self, name: str) -> bool:
        return self._get(name) is not None

    def has_tensor(self, name: str) -> bool:
        return name in self.file.tensors

    def any_tensor(self, ending: str) -> bool:
        """Whether a layer has such a tensor."""
        return any(name.endswith("." + ending) for name in self.file.tensors)

    @property
    def num_layers(self) -> int:
        """Without those behind the model, which predict several tokens at once."""
        return self.whole("block_count") - self.whole("nextn_predict_layers", 0)

    def refused(self, why: str) -> InvalidFile:
        return InvalidFile(f"{self.file.paths[0]} {why}.")

    def _wrong(self, name: str, value: Any) -> InvalidFile:
        found = "lacks" if value is None else f"has {str(value)[:60]!r} as"
        return InvalidFile(f"{self.file.paths[0]} {found} {self._prefix}{name}.")

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Of a tensor that must be there."""
        if tensor not in self.file.tensors:
            raise InvalidFile(f"{self.file.paths[0]} has no tensor {tensor!r}.")
        return self.file.tensors[tensor].shape

    def factors(self, tensor: str, count: int) -> list[float] | None:
        """Numbers of a small tensor that changes frequencies; None if it is not there."""
        if tensor not in self.file.tensors:
            return None
        found = self.file.tensors[tensor]
        if found.shape != (count,):
            raise InvalidFile(f"{self.file.paths[0]}: the tensor {tensor!r} has the shape {found.shape}.")
        values = [float(value) for value in values_of(found.type, found.data)[0].tolist()]
        if not all(math.isfinite(value) and value > 0 for value in values):
            raise InvalidFile(f"{self.file.paths[0]} is damaged: {tensor!r} has numbers that cannot be factors.")
        return values
