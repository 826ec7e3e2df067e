"""What transformers calls the tensors of a GGUF file, by the rules of its architecture."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from torch import Tensor

from cbatch.base.model_files import InvalidFile
from cbatch.model.formats.gguf_architectures.architecture import (
    BEHIND,
    Architecture,
    Order,
    Rule,
    Rules,
)
from cbatch.model.formats.gguf_config import Config, architecture_of
from cbatch.model.formats.gguf_file import GgufFile
from cbatch.model.formats.gguf_weights import Source

_MAX_EXPERTS = 4096

_NOT_WEIGHTS = re.compile(r"rope_freqs\.weight|rope_factors_(long|short)\.weight")
"""Tensors that the config is made of."""

_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(.+)")


def sources_of(file: GgufFile, config: Config) -> dict[str, Source]:
    """The weights of a model, by the names that transformers has for them.

    Raises InvalidFile for a tensor that models of its architecture do not have.
    """
    architecture = architecture_of(file)
    found: dict[str, Source] = {}
    for name in file.tensors:
        match = _LAYER_TENSOR.fullmatch(name)
        if match is not None and int(match[1]) < config["num_hidden_layers"]:
            before = f"blk.{match[1]}.", f"model.layers.{match[1]}."
            found.update(_sources(file, architecture, architecture.layer, config, match[2], *before))
        elif match is None and not _NOT_WEIGHTS.fullmatch(name):
            found.update(_sources(file, architecture, architecture.model, config, name))
    return found


def _sources(
    file: GgufFile,
    architecture: Architecture,
    rules: Rules,
    config: Config,
    name: str,
    theirs: str = "",
    ours: str = "",
) -> Iterator[tuple[str, Source]]:
    """What becomes of a tensor. theirs, ours: what its name begins with in the file, and that of the weight"""
    stem, _, ending = name.rpartition(".")
    rule, suffix = (rules[name], "") if name in rules else (rules.get(stem), f".{ending}")
    if rule is BEHIND:
        return
    if rule is None:
        raise InvalidFile(f"{file.paths[0]} holds the tensor {theirs + name[:80]!r}, which is not read.")
    rule = Rule(rule) if isinstance(rule, str) else rule
    parts = [part + suffix for part in rule.parts]
    tensors = tuple(theirs + one for one in (name, *parts))
    shape = _joined_shape(file, tensors)
    if "{}" in rule.name:
        if shape[0] > _MAX_EXPERTS:
            raise InvalidFile(f"{file.paths[0]}: the tensor {tensors[0]!r} has the shape {shape}.")
        for number in range(shape[0]):
            yield ours + rule.name.format(number) + suffix, Source(tensors, expert=number)
        return
    is_norm = stem.endswith("_norm") and ending == "weight" and stem not in architecture.plain_norms
    are_vectors = ending == "bias" or len(shape) == 1
    rows = _order(file, rule.rows, config, tensors[0], shape[-1 if are_vectors else -2])
    columns = None if are_vectors else _order(file, rule.columns, config, tensors[0], shape[-1])
    shape = rule.shape(shape) if rule.shape is not None else shape
    yield (
        ours + rule.name + suffix,
        Source(
            tensors,
            (*shape[:-2], *reversed(shape[-2:])) if rule.is_transposed else shape,
            is_transposed=rule.is_transposed,
            rows=rows,
            columns=columns,
            offset=-architecture.norm_offset if is_norm else 0.0,
            combine=None if rule.combine is None else partial(rule.combine, config),
        ),
    )


def _joined_shape(file: GgufFile, tensors: tuple[str, ...]) -> tuple[int, ...]:
    """Of tensors whose rows follow each other."""
    shapes = [file.tensors[name].shape for name in tensors if name in file.tensors]
    first = shapes[0]
    if len(tensors) == 1:
        return first
    axis = len(first) - (1 if tensors[0].endswith(".bias") or len(first) == 1 else 2)
    others = [(len(shape), *shape[:axis], *shape[axis + 1 :]) for shape in shapes]
    if len(shapes) != len(tensors) or len(set(others)) != 1:
        raise InvalidFile(f"{file.paths[0]}: the tensors {', '.join(tensors)} do not fit each other.")
    return (*first[:axis], sum(shape[axis] for shape in shapes), *first[axis + 1 :])


def _order(file: GgufFile, order: Order | None, config: Config, name: str, count: int) -> Tensor | None:
    if order is None:
        return None
    found = order(config, count)
    if found is None:
        raise InvalidFile(f"{file.paths[0]}: the tensor {name!r} does not have the shape that its heads need.")
    return found
