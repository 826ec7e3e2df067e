"""The tensors of a model's files by the names that its program has for them, and whether they are those it needs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from cbatch.model.config import UnsupportedConfig
from cbatch.model.ops.program import Layout, Program
from cbatch.model.stored import StoredWeights

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")

_NUMBERS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def resolved(program: Program, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The tensors of the files by the names that the program has for them."""
    table = program.embedding.name
    for layout in program.layouts:
        if table not in tensors and _named(table, layout) in tensors:
            tensors = _Renamed(tensors, layout)
            break
    stacked = {name for name in tensors if name.endswith(".experts.gate_up_proj")}
    return _Unstacked(tensors, program.shapes.keys()) if stacked - program.shapes.keys() else tensors


def _named(name: str, layout: Layout) -> str:
    """What a file of a layout calls a weight."""
    for ours, theirs in layout:
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


class _Renamed(Mapping[str, Tensor]):
    """Tensors of files that name them in another way."""

    def __init__(self, tensors: Mapping[str, Tensor], layout: Layout) -> None:
        self._tensors = tensors
        back = tuple((theirs, ours) for ours, theirs in layout)
        self._names = {_named(name, back): name for name in tensors}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _Unstacked(Mapping[str, Tensor]):
    """Tensors of files that hold the matrices of all experts in one, for a program that names each."""

    def __init__(self, tensors: Mapping[str, Tensor], names: Iterable[str]) -> None:
        """names: of the program"""
        self._tensors = tensors
        found = {name: match for name in names if (match := _EXPERT.fullmatch(name)) and name not in tensors}
        self._places = {name: self._place_of(*match.groups()) for name, match in found.items()}
        self._places = {name: place for name, place in self._places.items() if place[0] in tensors}
        stacked = {place[0] for place in self._places.values()}
        self._names = [*(name for name in tensors if name not in stacked), *self._places]

    @staticmethod
    def _place_of(prefix: str, number: str, part: str) -> tuple[str, int, str]:
        return f"{prefix}.{'down' if part == 'down' else 'gate_up'}_proj", int(number), part

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._places:
            return self._tensors[name]
        stack, number, part = self._places[name]
        matrix = self._tensors[stack][number]
        if part == "down":
            return matrix
        gate, up = matrix.chunk(2)
        return gate if part == "gate" else up

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def check_weights(program: Program, tensors: Mapping[str, Tensor]) -> int:
    """The number of parameters. Raises UnsupportedConfig unless the files hold exactly the weights of the program.

    tensors: by the program's names, see `resolved`
    """
    shapes = program.shapes
    head, table = "lm_head.weight", program.embedding.name
    spare = re.compile("|".join(program.spare))
    odd = {name for name in tensors if not spare.fullmatch(name)} ^ shapes.keys()
    if program.is_tied:
        odd.discard(head)
    if odd:
        raise UnsupportedConfig(f"one of its weights is missing, or unknown in its family: {min(odd)}")
    shape_of = tensors.shape if isinstance(tensors, StoredWeights) else partial(_shape_of_numbers, tensors)
    wrong = [name for name, shape in shapes.items() if shape_of(name) != shape]
    if wrong:
        raise UnsupportedConfig(f"the shape of {wrong[0]} does not match its config")
    if program.is_tied and head in tensors and not torch.equal(tensors[head], tensors[table]):
        raise UnsupportedConfig("its head is tied to its embedding, but in its files the two differ")
    return sum(math.prod(shape) for shape in shapes.values())


def _shape_of_numbers(tensors: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    """Raises UnsupportedConfig for a weight that is not stored as numbers."""
    tensor = tensors[name]
    if tensor.dtype not in _NUMBERS:
        raise UnsupportedConfig(f"{name} is {str(tensor.dtype).removeprefix('torch.')}")
    return tuple(tensor.shape)
