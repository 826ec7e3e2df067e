"""Makes the program of a model from its config.json, and checks it against the weights in its files."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import cbatch.engine.models.families as _families  # noqa: F401  # which registers them
from cbatch.engine.models.builder import Builder
from cbatch.engine.models.config_reader import ConfigReader, UnsupportedConfig
from cbatch.engine.models.families.registry import declaration_of
from cbatch.engine.models.program import Program, Weight


def read_program(config: Mapping[str, Any]) -> Program:
    """The program of a model. Raises UnsupportedConfig if its family or one of its settings is not known."""
    try:
        return _read(config)
    except UnsupportedConfig:
        raise
    except Exception as error:  # any error that unexpected values cause
        raise UnsupportedConfig(f"its config.json is unusual ({error})") from error


def _read(config: Mapping[str, Any]) -> Program:
    reader = ConfigReader(config)
    declare = declaration_of(reader.kind)
    if declare is None:
        raise UnsupportedConfig(f"its model type {reader.kind} has no declaration")
    model = Builder(reader)
    declare(model)
    unread = reader.unread()
    if unread:
        defaults = _class_defaults(reader.kind)
        odd = {key: value for key, value in unread.items() if key not in defaults or defaults[key] != value}
        if odd:
            key, value = next(iter(odd.items()))
            raise UnsupportedConfig(f"its config.json says {key} = {value!r}, which its declaration does not know")
    return model.program()


def _class_defaults(kind: str) -> dict[str, Any]:
    """What transformers takes for keys that a config.json does not have. It is imported for unknown keys only."""
    from transformers import CONFIG_MAPPING

    try:
        defaults: dict[str, Any] = CONFIG_MAPPING[kind]().to_dict()
    except Exception:  # no class of that name, or one without defaults
        return {}
    return defaults


def resolved(program: Program, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The tensors of the files by the names that the program has for them."""
    if not program.prefixes:
        return tensors
    first, *others = program.prefixes
    table = program.embed.table.name
    for prefix in others:
        if table not in tensors and prefix + table.removeprefix(first) in tensors:
            return _Renamed(tensors, first, prefix)
    return tensors


class _Renamed(Mapping[str, Tensor]):
    """Tensors with another beginning of their names."""

    def __init__(self, tensors: Mapping[str, Tensor], ours: str, theirs: str) -> None:
        self._tensors = tensors
        self._names = {
            ours + name.removeprefix(theirs) if name.startswith(theirs) else name: name for name in tensors
        }

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._names[name]]

    def __iter__(self) -> Any:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def check_weights(program: Program, tensors: Mapping[str, Tensor]) -> int:
    """The number of parameters. Raises UnsupportedConfig unless the files hold exactly the weights of the program.

    tensors: by the program's names, see `resolved`
    """
    shapes = program.shapes
    head, table = "lm_head.weight", program.embed.table.name
    spare = re.compile("|".join(program.spare))
    odd = {name for name in tensors if not spare.fullmatch(name)} ^ shapes.keys()
    if program.is_tied:
        odd.discard(head)
    if odd:
        raise UnsupportedConfig(f"one of its weights is missing, or unknown in its family: {min(odd)}")
    wrong = [name for name, shape in shapes.items() if tuple(tensors[name].shape) != shape]
    if wrong:
        raise UnsupportedConfig(f"the shape of {wrong[0]} does not match its config")
    if program.is_tied and head in tensors and not torch.equal(tensors[head], tensors[table]):
        raise UnsupportedConfig("its head is tied to its embedding, but in its files the two differ")
    return sum(math.prod(shape) for shape in shapes.values())


def read_weight(weight: Weight, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """A weight as its operation needs it."""
    return weight.read(tensors[weight.name]).to(dtype)
