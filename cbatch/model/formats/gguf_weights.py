"""The tensors of a GGUF file as the weights of a program, by the names that transformers has for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.kernels.formats import GROUP, Integers
from cbatch.model.formats.gguf_blocks import block_name, integers_of, is_exact, packing_of, values_of
from cbatch.model.formats.gguf_file import GgufFile
from cbatch.model.stored import Packing, Rows, StoredMatrix, common_packing, rounded


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


class GgufMatrix(StoredMatrix):
    """A weight of a GGUF file."""

    def __init__(self, file: GgufFile, source: Source) -> None:
        self._file, self._source = file, source
        self._tensors = [file.tensors[name] for name in source.tensors]
        first = self._tensors[0].shape
        stored = first[0] if len(first) > 2 else 1
        self.num_matrices = stored if source.expert is None else 1
        self._counts = [len(tensor.data) // stored for tensor in self._tensors]
        """Rows of one matrix that each tensor has."""
        self.rows = sum(self._counts)
        self.is_transposed = source.is_transposed
        self.has_rows = source.combine is None

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self._source.shape or self._tensors[0].shape
        return shape if self._source.expert is None else shape[1:]

    @property
    def whole(self) -> Tensor:
        source = self._source
        if source.combine is not None:
            return source.combine([tensor.numbers for tensor in self._tensors]).view(self.shape)
        if len(self.shape) > 1 and not source.are_vectors:
            return super().whole
        parts = [tensor.numbers if source.expert is None else tensor.numbers[source.expert] for tensor in self._tensors]
        numbers = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
        numbers = numbers if source.rows is None else numbers[..., source.rows]
        return self._moved(numbers).view(self.shape)

    def values(self, rows: Rows) -> Tensor:
        pieces = [(place, values_of(kind, data)) for place, kind, data in self._pieces(rows)]
        numbers = pieces[0][1]
        if len(pieces) > 1:
            numbers = torch.empty((len(rows), numbers.shape[1]))
            for place, part in pieces:
                numbers[place] = part.float()
        return self._moved(numbers if self._source.columns is None else numbers[:, self._source.columns])

    def _moved(self, numbers: Tensor) -> Tensor:
        return numbers if self._source.offset == 0 else numbers.float() + self._source.offset

    @property
    def packing(self) -> Packing | None:
        source = self._source
        if source.offset or (source.columns is not None and source.group_order is None):
            return None
        return common_packing({packing_of(tensor.type) if len(tensor.shape) > 1 else None for tensor in self._tensors})

    def lost(self, held: Collection[int]) -> set[str]:
        matrices = (tensor for tensor in self._tensors if len(tensor.shape) > 1)
        return {block_name(tensor.type) for tensor in matrices if not is_exact(tensor.type)}

    def integers(self, rows: Rows, format: int) -> Integers:
        pieces = [
            (place, integers_of(kind, data, format) or rounded(values_of(kind, data), format))
            for place, kind, data in self._pieces(rows)
        ]
        found = pieces[0][1]
        if len(pieces) > 1:
            found = found.map(lambda part: part.new_empty(len(rows), part.shape[1]))
            for place, integers in pieces:
                found.map(partial(_put, place), integers)
        if self._source.columns is None:
            return found
        groups = self._source.group_order
        moved = found.map(lambda part: part[:, torch.from_numpy(groups)])
        return moved._replace(numbers=found.numbers[:, self._source.columns])

    def _pieces(self, rows: Rows) -> Iterator[tuple[slice | Rows, int, NDArray[np.uint8]]]:
        """Rows as blocks: which of them, their format, and their bytes."""
        source, starts = self._source, np.cumsum([0, *self._counts[:-1]])
        matrices, rows = np.divmod(rows, self.rows)
        rows = rows if source.rows is None else source.rows.numpy()[rows]
        matrices = matrices if source.expert is None else matrices + source.expert
        for tensor, count, start in zip(self._tensors, self._counts, starts, strict=True):
            mine = np.flatnonzero((rows >= start) & (rows < start + count)) if len(self._tensors) > 1 else slice(None)
            chosen = (matrices * count + rows - start)[mine]
            if len(chosen):
                yield mine, tensor.type, self._file.take(tensor, chosen)


def _put(place: slice | Rows, target: Tensor, part: Tensor) -> Tensor:
    target[place] = part
    return target
