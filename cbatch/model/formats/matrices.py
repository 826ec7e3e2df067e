"""Matrices of safetensors files that are not stored as numbers: as integers for the packed formats, or as numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.kernels.formats import FP8, GROUP, INT4, INT4_ZEROS, INT8, MXFP4, Integers
from cbatch.model.stored import Packing, Rows, StoredMatrix
from cbatch.model.tensor_files import Tensors


@dataclass(eq=False)
class EncodedMatrix(StoredMatrix, ABC):
    """A matrix, or those of all experts one after the other, that is not stored as numbers.

    tensors:  of the files
    name:     of its numbers in the files
    rows, depth: of the matrix, or of each expert's
    scale:    name of the scales
    experts:  how many there are; 0 for one matrix
    """

    tensors: Tensors
    name: str
    rows: int
    depth: int
    scale: str
    experts: int = 0
    is_transposed: bool = False

    def __post_init__(self) -> None:
        one = (self.depth, self.rows) if self.is_transposed else (self.rows, self.depth)
        self.shape = (self.experts, *one) if self.experts else one
        self.num_matrices = self.experts or 1

    @property
    @abstractmethod
    def label(self) -> str:
        """How its numbers are stored, for people."""

    def taken(self, name: str, rows: Rows) -> Tensor:
        """Rows of a tensor of bytes; of all experts if it is [experts, depth, rows]."""
        if not self.experts:
            return self.tensors.take(name, rows).view(torch.uint8)
        expert, column = (torch.from_numpy(part) for part in divmod(rows, self.rows))
        return self.tensors[name].view(torch.uint8)[expert, :, column]


@dataclass(eq=False)
class RoundedNumbers(EncodedMatrix):
    """A matrix that is stored as numbers, and rounded to int8."""

    label = "numbers"

    @property
    def packing(self) -> Packing:
        return Packing(INT8)

    def values(self, rows: Rows) -> Tensor:
        return self.tensors.take(self.name, rows).to(torch.bfloat16)


@dataclass(eq=False)
class FloatMatrix(EncodedMatrix):
    """A matrix of floating-point numbers of 8 bits. Its scales are [rows of blocks, columns of blocks], or one number.

    block: rows and columns that share a scale
    """

    block: tuple[int, int] = (1, 1)
    label = "FP8"

    @property
    def packing(self) -> Packing:
        is_whole = self.block[1] >= self.depth or self.tensors.header(self.scale).shape in ((), (1,))
        group = -(-self.depth // GROUP) * GROUP if is_whole else self.block[1]
        return Packing(INT8) if group % GROUP else Packing(FP8, group)

    def kept(self, rows: Rows, format: int) -> Integers | None:
        if format != FP8:
            return None
        return Integers(self.taken(self.name, rows), self.scales(rows))

    def lost(self, held: Collection[int]) -> set[str]:
        return set() if self.packing.format == FP8 and FP8 in held else {self.label}

    def values(self, rows: Rows) -> Tensor:
        numbers, scales = self.taken(self.name, rows).view(torch.float8_e4m3fn).float(), self.scales(rows)
        if scales.shape[1] == 1:
            return numbers * scales
        return numbers * scales.repeat_interleave(self.block[1], dim=1)[:, : self.depth]

    def scales(self, rows: Rows) -> Tensor:
        """[rows, columns of blocks] float32"""
        stored = self.tensors[self.scale]
        scales = (stored.view(torch.float8_e8m0fnu) if stored.dtype == torch.uint8 else stored).float()
        if scales.numel() == 1:
            return scales.reshape(1, 1).expand(len(rows), 1)
        return scales.view(len(scales), -1)[torch.from_numpy(rows) // self.block[0]]


@dataclass(eq=False)
class GroupedMatrix(EncodedMatrix):
    """A matrix of integers: a number is scale * (integer - zero point).

    bits:   4: integers from 0 to 15; 8: from -128 to 127
    group:  numbers of a row that share scale and zero point, one after the other unless `order` says otherwise
    order:  [depth] group of each number of a row; None if they lie in turn
    zero:   name of the zero points, which need not be there
    """

    bits: int = 4
    group: int = GROUP
    order: Rows | None = None
    zero: str = ""

    @abstractmethod
    def codes(self, rows: Rows) -> NDArray[Any]:
        """Integers [rows, depth]."""

    @abstractmethod
    def scales(self, rows: Rows) -> NDArray[np.float32]:
        """[rows, groups]"""

    def zeros(self, rows: Rows) -> NDArray[np.float32]:
        """Zero points [rows, groups]."""
        return np.full_like(self.scales(rows), self.usual_zero)

    @cached_property
    def has_zeros(self) -> bool:
        """Whether some zero points are not the usual one."""
        return self.zero in self.tensors and bool((self.zeros(np.arange(self.rows)) != self.usual_zero).any())

    @property
    def usual_zero(self) -> int:
        """The zero point in the middle of the integers."""
        return 8 if self.bits == 4 else 0

    @property
    def label(self) -> str:
        groups = "columns" if self.group >= self.depth else f"groups of {self.group}"
        order = "" if self.order is None else " in another order"
        return f"{self.bits} bits in {groups}{' with zero points' if self.has_zeros else ''}{order}"

    @property
    def packing(self) -> Packing:
        if self.bits == 8 or not self._fits:
            return Packing(INT8)
        return Packing(INT4_ZEROS if self.has_zeros else INT4)

    def lost(self, held: Collection[int]) -> set[str]:
        return set() if self._fits and not (self.bits == 8 and self.has_zeros) else {self.label}

    @property
    def _fits(self) -> bool:
        """Whether groups of 32 have one scale each."""
        return self.order is None and (self.group % GROUP == 0 or self.group >= self.depth)

    def values(self, rows: Rows) -> Tensor:
        groups = np.arange(self.depth) // self.group if self.order is None else self.order
        zero: Any = self.zeros(rows)[:, groups] if self.has_zeros else self.usual_zero
        with np.errstate(all="ignore"):  # a damaged file may have any scale
            return torch.from_numpy(self.scales(rows)[:, groups] * (self.codes(rows).astype(np.float32) - zero))

    def kept(self, rows: Rows, format: int) -> Integers | None:
        if self.lost(()):
            return None
        own = self.packing.format
        groups = np.arange(0, self.depth, GROUP) // self.group
        zeros = self.zeros(rows)[:, groups] if own == INT4_ZEROS else None
        found = Integers.of_arrays(self.codes(rows), self.scales(rows)[:, groups], zeros)
        found = found if own == MXFP4 else found._replace(scales=found.scales.half().float())
        return found.widened(own, format)


class ColumnMatrix(GroupedMatrix):
    """A matrix whose rows are columns of the tensors in the files."""

    def scales(self, rows: Rows) -> NDArray[np.float32]:
        return as_float32(self.tensors.take(self.scale, rows, axis=1)).T


def unpacked(words: NDArray[Any], bits: int) -> NDArray[Any]:
    """Integers [..., numbers] as `GroupedMatrix` has them, of words [..., words], whose lowest bits come first.

    In the words, those of 8 bits are from 0.
    """
    each = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return (each ^ 128).view(np.int8)
    return np.stack([each & 15, each >> 4], axis=-1).reshape(*each.shape[:-1], -1)


def unpacked_rows(tensors: Tensors, name: str, rows: Rows, bits: int, axis: int) -> NDArray[Any]:
    """Integers [rows, others] of rows that lie several to a word of 32 bits, along an axis of a tensor."""
    each = 32 // bits
    words, place = np.unique(rows // each, return_inverse=True)  # each word once
    taken = tensors.take(name, words, axis=axis).numpy()
    both = unpacked(taken if axis == 1 else taken.T, bits)
    return np.ascontiguousarray(both.T[place * each + rows % each])


def as_float32(tensor: Tensor) -> NDArray[np.float32]:
    numbers: NDArray[np.float32] = tensor.float().numpy()
    return numbers
