"""The tensors of a GGUF file as the weights of a program, by the names that transformers has for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.kernels.formats import GROUP, Integers
from cbatch.model.formats.gguf_blocks import integers_of, is_exact, packed_format, values_of
from cbatch.model.formats.gguf_file import GgufFile, GgufTensor
from cbatch.model.formats.integers import common_format, rounded
from cbatch.model.programs.program import Weight
from cbatch.model.programs.stored import StoredWeights
from cbatch.runtime.memory import drop_mapped_pages

_BYTES_BETWEEN_DROPS = 2**24
"""Bytes of the files that may stay in memory beside packed weights."""


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Where a weight comes from.

    tensors: names in the file; the rows of several follow each other, in each matrix if they hold one for each expert
    shape:   as transformers has it, if it differs
    is_transposed: transformers has the matrices as [depth, columns]
    expert:  of tensors that hold the matrices of all experts, the one that is meant
    rows:    their order in the file: row i of each matrix is row rows[i] there, and number i of a vector number rows[i]
    columns: the same for the columns of matrices
    offset:  added to each number
    combine: makes the weight of whole tensors, as numbers; nothing else is done then
    """

    tensors: tuple[str, ...]
    shape: tuple[int, ...] | None = None
    is_transposed: bool = False
    expert: int | None = None
    rows: Tensor | None = None
    columns: Tensor | None = None
    offset: float = 0.0
    combine: Callable[[Sequence[Tensor]], Tensor] | None = None

    @property
    def are_vectors(self) -> bool:
        """Whether numbers follow each other, where matrices have rows."""
        return self.tensors[0].endswith(".bias")

    @property
    def group_order(self) -> NDArray[np.int64] | None:
        """The order of groups of numbers that have one scale; None if columns of one group go to several."""
        if self.columns is None or len(self.columns) % GROUP:
            return None
        groups: NDArray[np.int64] = self.columns.numpy().reshape(-1, GROUP)
        starts = groups[:, :1]
        is_whole = (starts % GROUP == 0).all() and (groups == starts + np.arange(GROUP)).all()
        return starts[:, 0] // GROUP if is_whole else None


class GgufWeights(StoredWeights):
    """The weights of a GGUF file. What has been read is dropped from time to time, as packed weights take its place."""

    def __init__(self, file: GgufFile, sources: Mapping[str, Source]) -> None:
        self._file = file
        self._sources = sources
        self._bytes_read = 0

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def __getitem__(self, name: str) -> Tensor:
        source, shape = self._sources[name], self.shape(name)
        if source.combine is not None:
            parts = [values_of(tensor.type, tensor.data).view(tensor.shape) for tensor in self._tensors(source)]
            return source.combine(parts).view(shape)
        if len(shape) == 1 or source.are_vectors:
            return self._vector(source).view(shape)
        stored = shape if not source.is_transposed else (*shape[:-2], shape[-1], shape[-2])
        count = sum(self._rows_each(source)) * (1 if source.expert is not None else self._num_matrices(source))
        numbers = self._values(source, None, np.arange(count)).view(stored)
        return numbers.transpose(-1, -2) if source.is_transposed else numbers

    def drop_pages(self) -> None:
        """Gives back the memory of what has been read."""
        self._bytes_read = 0
        drop_mapped_pages(self._file.paths)

    def shape(self, name: str) -> tuple[int, ...]:
        source = self._sources[name]
        shape = source.shape or self._tensors(source)[0].shape
        return shape if source.expert is None else shape[1:]

    def rows(self, weight: Weight, first: int, stop: int) -> Tensor:
        source = self._sources[weight.name]
        if not self._is_row_wise(weight, source):
            return weight.read(self[weight.name])[first:stop]
        numbers = self._values(source, weight.index, self._chosen(weight, first, stop))
        return numbers if (weight.factor, weight.offset) == (1, 0) else weight.factor * numbers.float() + weight.offset

    def format(self, weights: Iterable[Weight]) -> int | None:
        formats: set[int | None] = set()
        for weight in weights:
            source = self._sources[weight.name]
            is_changed = (weight.factor, weight.offset, source.offset) != (1, 0, 0)
            is_split = source.columns is not None and source.group_order is None
            for tensor in self._tensors(source):
                keeps = self._is_row_wise(weight, source) and not (is_changed or is_split) and len(tensor.shape) > 1
                formats.add(packed_format(tensor.type) if keeps else None)
        return common_format(formats)

    def packed(self, weights: Iterable[tuple[Weight, int, int]], format: int) -> Integers:
        parts = [
            self._integers(self._sources[weight.name], weight.index, self._chosen(weight, first, stop), format)
            for weight, first, stop in weights
        ]
        return Integers.concatenated(parts)

    def _tensors(self, source: Source) -> list[GgufTensor]:
        return [self._file.tensors[name] for name in source.tensors]

    def _num_matrices(self, source: Source) -> int:
        """In each of its tensors."""
        shape = self._tensors(source)[0].shape
        return shape[0] if len(shape) > 2 else 1

    def _rows_each(self, source: Source) -> list[int]:
        """Of one matrix, those from each tensor."""
        return [len(tensor.data) // self._num_matrices(source) for tensor in self._tensors(source)]

    @staticmethod
    def _is_row_wise(weight: Weight, source: Source) -> bool:
        """Whether rows of the loaded weight are rows of the file."""
        is_same = weight.transpose == source.is_transposed and source.combine is None
        return is_same and not weight.is_flat and weight.function is None

    @staticmethod
    def _chosen(weight: Weight, first: int, stop: int) -> NDArray[np.int64]:
        """Rows of the weight before its own rows are chosen."""
        return np.arange(first, stop) if weight.rows is None else weight.rows[first:stop].numpy()

    def _pieces(
        self, source: Source, index: int | None, rows: NDArray[np.int64]
    ) -> Iterator[tuple[slice, int, NDArray[np.uint8]]]:
        """Rows of the weight as blocks: which of them, their format, and their bytes.

        index: of a tensor that holds several matrices; None: rows are those of all
        """
        tensors, counts = self._tensors(source), self._rows_each(source)
        matrices, rows = np.divmod(rows, sum(counts))
        if source.rows is not None:
            rows = source.rows.numpy()[rows]
        if index is None:
            index = source.expert
        matrices = matrices if index is None else matrices + index
        for tensor, count, start in zip(tensors, counts, np.cumsum([0, *counts[:-1]]), strict=True):
            mine = np.flatnonzero((rows >= start) & (rows < start + count)) if len(tensors) > 1 else None
            chosen = matrices * count + rows - start
            chosen = chosen if mine is None else chosen[mine]
            if not len(chosen):
                continue
            if np.array_equal(chosen, np.arange(chosen[0], chosen[0] + len(chosen))):
                data = tensor.data[chosen[0] : chosen[0] + len(chosen)]
            else:
                data = tensor.data[chosen]
            self._bytes_read += data.nbytes
            if self._bytes_read > _BYTES_BETWEEN_DROPS:
                self.drop_pages()
            yield (slice(None) if mine is None else mine), tensor.type, data  # type: ignore[misc]

    def _vector(self, source: Source) -> Tensor:
        """Tensors of one dimension, or one for each expert."""
        parts = [values_of(tensor.type, tensor.data).view(tensor.shape) for tensor in self._tensors(source)]
        parts = [part if source.expert is None else part[source.expert] for part in parts]
        numbers = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
        numbers = numbers if source.rows is None else numbers[..., source.rows]
        return numbers if source.offset == 0 else numbers.float() + source.offset

    def _values(self, source: Source, index: int | None, rows: NDArray[np.int64]) -> Tensor:
        pieces = [(place, values_of(kind, data)) for place, kind, data in self._pieces(source, index, rows)]
        if len(pieces) == 1:
            numbers = pieces[0][1]
        else:
            numbers = torch.empty((len(rows), pieces[0][1].shape[1]))
            for place, part in pieces:
                numbers[place] = part.float()
        numbers = numbers if source.columns is None else numbers[:, source.columns]
        return numbers if source.offset == 0 else numbers.float() + source.offset

    def _integers(self, source: Source, index: int | None, rows: NDArray[np.int64], format: int) -> Integers:
        pieces = [
            (place, integers_of(kind, data, format) or rounded(values_of(kind, data), format))
            for place, kind, data in self._pieces(source, index, rows)
        ]
        if len(pieces) == 1:
            return _in_order(pieces[0][1], source)
        whole = pieces[0][1].map(lambda part: part.new_empty(len(rows), part.shape[1]))
        for place, integers in pieces:
            whole.map(partial(_put, place), integers)
        return _in_order(whole, source)


def _put(place: slice | NDArray[np.int64], target: Tensor, part: Tensor) -> Tensor:
    target[place] = part
    return target


def _in_order(integers: Integers, source: Source) -> Integers:
    """With the columns that a weight has. Groups move as they are."""
    if source.columns is None:
        return integers
    groups = source.group_order
    assert groups is not None
    moved = integers.map(lambda part: part[:, torch.from_numpy(groups)])
    return moved._replace(numbers=integers.numbers[:, source.columns])


def bits_per_weight(file: GgufFile) -> float:
    """In the file, over all tensors."""
    size = sum(tensor.data.nbytes for tensor in file.tensors.values())
    return 8 * size / max(1, sum(tensor.num_elements for tensor in file.tensors.values()))


def rounded_types(file: GgufFile) -> set[int]:
    """Formats of matrices in a file that are not packed as they are."""
    return {tensor.type for tensor in file.tensors.values() if len(tensor.shape) > 1 and not is_exact(tensor.type)}
