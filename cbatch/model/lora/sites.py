"""Where adapters add to the linears of a program, checked against the sizes of the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cbatch.model.lora_files import Adapter, LowRank
from cbatch.model.ops.experts import Experts, Route
from cbatch.model.ops.head import Head
from cbatch.model.ops.linear import Linear
from cbatch.model.ops.program import Program
from cbatch.model.tensor_names import PREFIXES
from cbatch.model.weight import Weight, weights_of


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """Some columns of a linear's product, in front of its activation, to which adapters add.

    column, columns: the first of them, and how many
    added:           by each adapter; None if that adds nothing. The rows of `up` are in the order of the columns
    """

    column: int
    columns: int
    added: tuple[LowRank | None, ...]


Sites = Mapping[Linear, tuple[Site, ...]]
"""The sites of each linear that any adapter adds to."""


class _Place(NamedTuple):
    """A part of a linear's matrix, which begins at a column."""

    linear: Linear
    column: int
    weight: Weight


def sites_of(program: Program, adapters: Sequence[Adapter]) -> Sites:
    """Where these adapters add to a program. Raises ModelError for one that does not fit."""
    places = _places(program)
    added: dict[_Place, list[LowRank | None]] = {}
    for number, adapter in enumerate(adapters):
        for module, low_rank in adapter.modules.items():
            for place in _places_of(program, places, adapter, module):
                added.setdefault(place, [None] * len(adapters))[number] = _part_of(low_rank, place.weight)
    sites: dict[Linear, list[Site]] = defaultdict(list)
    for place, each in sorted(added.items(), key=lambda item: item[0].column):
        sites[place.linear].append(Site(place.column, place.weight.size[0], tuple(each)))
    return {linear: tuple(own) for linear, own in sites.items()}


def _places(program: Program) -> dict[str, list[_Place]]:
    """The parts of all linears by the names of their weights."""
    places: dict[str, list[_Place]] = defaultdict(list)
    for linear in program.operations:
        if isinstance(linear, Linear):
            column = 0
            for part in linear.matrix.parts:
                places[part.name].append(_Place(linear, column, part))
                column += part.size[0]
    return places


def _places_of(program: Program, places: Mapping[str, list[_Place]], adapter: Adapter, module: str) -> list[_Place]:
    found = next((places[name] for name in _names(program, module) if name in places), None)
    if found is None:
        raise adapter.refused(_why_no_linear(program, module))
    for place in found:
        weight = place.weight
        if weight.index is not None or weight.is_flat or weight.function is not None or len(weight.shape) != 2:
            raise adapter.refused(f"{module} is stored in a form that adapters are not added to")
        adapter.check_size(module, weight.shape[::-1] if weight.transpose else weight.shape)
    return found


def _names(program: Program, module: str) -> Iterator[str]:
    """The names that a program may have for the weight of a module."""
    name = f"{module}.weight"
    yield name
    yield from (program.root + name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix))


def _why_no_linear(program: Program, module: str) -> str:
    names = set(_names(program, module))
    for operation in program.operations:
        if isinstance(operation, Linear) or names.isdisjoint(weight.name for weight in weights_of(operation)):
            continue
        if isinstance(operation, Experts | Route):
            return f"it adapts experts or their router ({module})"
        kind = "the output head" if isinstance(operation, Head) and not program.is_tied else "the embedding"
        return f"it adapts {kind} ({module}), and only the linears of layers can be"
    if module.rpartition(".")[2] in ("lm_head", "embed_out"):
        return f"it adapts the output head ({module}), and only the linears of layers can be"
    return f"it was made for another model: there is no linear {module} in a {program.name}"


def _part_of(low_rank: LowRank, weight: Weight) -> LowRank:
    """An addition to a part of a matrix: stored rows, perhaps in another order, for its depth."""
    up = low_rank.up if weight.rows is None else low_rank.up[weight.rows]
    down = low_rank.down if weight.depth is None else low_rank.down[:, slice(*weight.depth)]
    return LowRank(down, up if weight.factor == 1 else up * weight.factor)
