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


@dataclass(eq=False)
class GgufMatrix(StoredMatrix):
    """A weight of a GGUF file.

    names:   of its tensors in the file; the rows of several follow each other, in each matrix if they hold several
    is_transposed: transformers has the matrices as [depth, columns]
    expert:  of tensors that hold the matrices of all experts, the one that is meant
    row_order: row i of each matrix is row row_order[i] in the file, and number i of a vector number row_order[i];
             of an expert, others are left out
    columns: the same for the columns of matrices
    offset:  added to each number
    combine: makes the weight of whole tensors, as numbers; nothing else is done then
    """

    file: GgufFile
    names: tuple[str, ...]
    shape: tuple[int, ...]
    is_transposed: bool = False
    expert: int | None = None
    row_order: Tensor | None = None
    columns: Tensor | None = None
    offset: float = 0.0
    combine: Callable[[Sequence[Tensor]], Tensor] | None = None

    def __post_init__(self) -> None:
        self._tensors = [self.file.tensors[name] for name in self.names]
        first = self._tensors[0].shape
        stored = first[0] if len(first) > 2 else 1
        self.num_matrices = stored if self.expert is None else 1
        self._counts = [len(tensor.data) // stored for tensor in self._tensors]
        """Rows of one matrix that each tensor has."""
        self.rows = sum(self._counts) if self.expert is None or self.row_order is None else len(self.row_order)
        self.has_rows = self.combine is None

    @property
    def whole(self) -> Tensor:
        if self.combine is not None:
            return self.combine([tensor.numbers for tensor in self._tensors]).view(self.shape)
        if len(self.shape) > 1 and not self.names[0].endswith(".bias"):
            return super().whole
        parts = [tensor.numbers if self.expert is None else tensor.numbers[self.expert] for tensor in self._tensors]
        numbers = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
        numbers = numbers if self.row_order is None else numbers[..., self.row_order]
        return self._moved(numbers).view(self.shape)

    def values(self, rows: Rows) -> Tensor:
        pieces = [(place, values_of(kind, data)) for place, kind, data in self._pieces(rows)]
        numbers = pieces[0][1]
        if len(pieces) > 1:
            numbers = torch.empty((len(rows), numbers.shape[1]))
            for place, part in pieces:
                numbers[place] = part.float()
        return self._moved(numbers if self.columns is None else numbers[:, self.columns])

    def _moved(self, numbers: Tensor) -> Tensor:
        return numbers if self.offset == 0 else numbers.float() + self.offset

    @property
    def _group_order(self) -> NDArray[np.int64] | None:
        """The order of groups of numbers that have one scale; None if columns of one group go to several."""
        if self.columns is None or len(self.columns) % GROUP:
            return None
        groups: NDArray[np.int64] = self.columns.numpy().reshape(-1, GROUP)
        starts = groups[:, :1]
        is_whole = (starts % GROUP == 0).all() and (groups == starts + np.arange(GROUP)).all()
        return starts[:, 0] // GROUP if is_whole else None

    @property
    def packing(self) -> Packing | None:
        if self.offset or (self.columns is not None and self._group_order is None):
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
        if self.columns is None:
            return found
        groups = self._group_order
        moved = found.map(lambda part: part[:, torch.from_numpy(groups)])
        return moved._replace(numbers=found.numbers[:, self.columns])

    def _pieces(self, rows: Rows) -> Iterator[tuple[slice | Rows, int, NDArray[np.uint8]]]:
        """Rows as blocks: which of them, their format, and their bytes."""
        starts = np.cumsum([0, *self._counts[:-1]])
        matrices, rows = np.divmod(rows, self.rows)
        rows = rows if self.row_order is None else self.row_order.numpy()[rows]
        matrices = matrices if self.expert is None else matrices + self.expert
        for tensor, count, start in zip(self._tensors, self._counts, starts, strict=True):
            mine = np.flatnonzero((rows >= start) & (rows < start + count)) if len(self._tensors) > 1 else slice(None)
            chosen = (matrices * count + rows - start)[mine]
            if len(chosen):
                yield mine, tensor.type, self.file.take(tensor, chosen)


def _put(place: slice | Rows, target: Tensor, part: Tensor) -> Tensor:
    target[place] = part
    return target
