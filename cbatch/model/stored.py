"""Weights of files that have formats of their own: a program takes their integers as they are."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cbatch.base.quantization import Quantization
from cbatch.base.units import format_bytes
from cbatch.kernels.formats import GROUP, INT4, INT4_ZEROS, INT8, ON_CPU, ON_GPU, Integers, quantized
from cbatch.model.base import Model
from cbatch.model.weight import Matrix, Weight
from cbatch.runtime.device import is_accelerator
from cbatch.runtime.memory import MappedFiles

_log = logging.getLogger("cbatch")

Rows = NDArray[np.int64]

_MOST_KEPT = 2**24
"""Numbers of the weight that was read last, if that is kept."""


class Packing(NamedTuple):
    """A packed format, and how many numbers of a row share a scale."""

    format: int
    group: int = GROUP


class StoredMatrix:
    """A weight as files have it: a matrix or those of all experts, one after the other; or what has no rows.

    What has rows gives them by `values`; anything else has its own `whole`.

    shape:         as transformers has it
    rows:          of one matrix, of which there are `num_matrices`
    is_transposed: transformers has it as [depth, rows]
    has_rows:      rows can be read by themselves
    """

    shape: tuple[int, ...]
    rows: int
    num_matrices: int = 1
    is_transposed: bool = False
    has_rows: bool = True

    def values(self, rows: Rows) -> Tensor:
        """Rows, counted over all matrices, as numbers [rows, depth]."""
        return self.whole[rows]

    @property
    def whole(self) -> Tensor:
        """The weight as transformers has it."""
        *before, first, last = self.shape
        stored = (*before, last, first) if self.is_transposed else self.shape
        numbers = self.values(np.arange(self.rows * self.num_matrices)).view(stored)
        return numbers.transpose(-1, -2) if self.is_transposed else numbers

    @property
    def packing(self) -> Packing | None:
        """How it is packed by kernels that have all formats; None for numbers."""
        return None

    def kept(self, rows: Rows, format: int) -> Integers | None:
        """Rows with the integers of the file; None if the format does not have these."""
        return None

    def integers(self, rows: Rows, format: int) -> Integers:
        """Rows in a packed format that has their integers, or rounded to int8."""
        found = self.kept(rows, format)
        return rounded(self.values(rows), format) if found is None else found

    def lost(self, held: Collection[int]) -> set[str]:
        """The formats, for people, whose integers are not kept in the formats that kernels have."""
        return set()


@dataclass(eq=False)
class PlainTensor(StoredMatrix):
    """A weight that is stored as numbers, by its name among others."""

    tensors: Mapping[str, Tensor]
    name: str
    has_rows = False

    @cached_property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(self.whole.shape)

    @property
    def whole(self) -> Tensor:
        return self.tensors[self.name]


class StoredWeights(Mapping[str, Tensor]):
    """Named weights, of which some are integers in the files. As a mapping they are numbers, made when they are read.

    description: the formats in the files, for people; empty if somebody else says it
    is_rounded:  the integers are those that `--quantize` asks for, not those of the files
    """

    is_rounded = False

    def __init__(self, matrices: Mapping[str, StoredMatrix], files: MappedFiles, description: str = "") -> None:
        self.matrices = matrices
        self.description = description
        self._files = files
        self._last: tuple[str, Tensor] | None = None

    def __iter__(self) -> Iterator[str]:
        return iter(self.matrices)

    def __len__(self) -> int:
        return len(self.matrices)

    def __getitem__(self, name: str) -> Tensor:
        last = self._last  # files have the biases of all experts in one, which is asked for by each
        if last is None or last[0] != name:
            last = name, self.matrices[name].whole
            self._last = last if last[1].numel() <= _MOST_KEPT else None
        return last[1]

    def rows(self, weight: Weight, first: int, stop: int) -> Tensor:
        """Rows first .. stop-1 of a matrix, once it is loaded (see `Weight.size`), as numbers [rows, depth]."""
        if not self._has_rows(weight):
            return weight.read(self[weight.name])[first:stop]
        numbers = self.matrices[weight.name].values(self._chosen(weight, first, stop))
        numbers = numbers if weight.depth is None else numbers[:, slice(*weight.depth)]
        return numbers if (weight.factor, weight.offset) == (1, 0) else weight.factor * numbers.float() + weight.offset

    def packing(self, weights: Iterable[Weight], held: Collection[int]) -> Packing | None:
        """How matrices are packed that must have one format; None if they stay numbers. held: formats of the kernels"""
        found = set()
        for weight in weights:
            is_changed = not self._has_rows(weight) or (weight.factor, weight.offset) != (1, 0)
            packing = None if is_changed else self.matrices[weight.name].packing
            found.add(packing if packing is None or packing.format in held else Packing(INT8))
        return common_packing(found)

    def packed(self, spans: Iterable[tuple[Weight, int, int]], format: int) -> Integers:
        """Rows in the packed format that `packing` has given.

        spans: weights with the first of their rows, and the one after the last; all follow each other
        """
        parts = []
        for one, *rows in spans:
            integers = self.matrices[one.name].integers(self._chosen(one, *rows), format)
            parts.append(integers if one.depth is None else integers.within(*one.depth))
        return Integers.concatenated(parts)

    def finish(self, name: str, where: str, model: Model, quantize: Quantization | None) -> None:
        """Gives back what has been read for a model, and says what has become of formats that no kernel reads.

        name:     of their format, and `where` they are, for people
        quantize: how matrices are kept as integers, if they are
        """
        held = ON_GPU if is_accelerator(model.device) else ON_CPU
        self._files.drop_pages()
        sizes = format_bytes(model.weight_bytes), format_bytes(self._files.num_bytes), where
        if quantize is None:
            kind = str(model.dtype).removeprefix("torch.")
            _log.warning("The %s weights are kept in %s, and take %s, and %s in %s.", name, kind, *sizes)
        elif quantize.keeps_stored and (lost := set[str]().union(*(one.lost(held) for one in self.matrices.values()))):
            _log.warning(
                "Matrices in %s are rounded to int8 in groups of 32, 8.5 bits a number; all weights take %s, and %s "
                "in %s.", ", ".join(sorted(lost)), *sizes,
            )  # fmt: skip

    def _has_rows(self, weight: Weight) -> bool:
        """Whether rows of a loaded weight are rows of its matrix."""
        matrix = self.matrices[weight.name]
        is_same = matrix.has_rows and weight.transpose == matrix.is_transposed
        return is_same and not weight.is_flat and weight.function is None

    def _chosen(self, weight: Weight, first: int, stop: int) -> Rows:
        """Rows of the weight before its own rows are chosen, counted over all matrices."""
        rows = np.arange(first, stop) if weight.rows is None else weight.rows[first:stop].numpy()
        return rows if weight.index is None else rows + weight.index * self.matrices[weight.name].rows


def kept_weights(tensors: Mapping[str, Tensor] | None, quantize: Quantization | None) -> StoredWeights | None:
    """The weights, if a model takes their integers; None if it takes numbers, or rounds these."""
    if quantize is None or not isinstance(tensors, StoredWeights):
        return None
    return tensors if quantize.keeps_stored or tensors.is_rounded else None


def packing_of(
    matrices: Iterable[Matrix], quantize: Quantization | None, stored: StoredWeights | None, held: Collection[int], *,
    is_head: bool = False,
) -> Packing | None:  # fmt: skip
    """How matrices are packed that must have one format; None if they stay numbers.

    Heads are int8 in int4 models, as llama.cpp and OpenVINO have them.

    stored: the weights, if their own integers are kept
    held:   formats of the kernels
    """
    if stored is not None:
        return stored.packing((part for matrix in matrices for part in matrix.parts), held)
    if quantize is None:
        return None
    return Packing(INT4 if quantize.weights == "int4" and not is_head else INT8)


def rows_of(tensors: Mapping[str, Tensor], weight: Weight, first: int, stop: int) -> Tensor:
    """Rows of a weight as numbers, once it is loaded."""
    if isinstance(tensors, StoredWeights) and len(weight.size) == 2:
        return tensors.rows(weight, first, stop)
    return weight.read(tensors[weight.name])[first:stop]


def common_packing(found: Collection[Packing | None]) -> Packing | None:
    """That of parts of one matrix; None if one of them stays numbers."""
    if None in found:
        return None
    if len(set(found)) == 1:
        return next(iter(found))
    return Packing(INT4_ZEROS if {one.format for one in found if one} == {INT4, INT4_ZEROS} else INT8)


def rounded(values: Tensor, format: int) -> Integers:
    """Numbers in int8, which everything goes to that no other format has."""
    if format != INT8:
        raise ValueError(f"numbers are rounded to int8 only, not to format {format}")
    return quantized(values, INT8)
