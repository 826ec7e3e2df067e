"""Matrices of safetensors files that are not stored as numbers: as integers for the packed formats, or as numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.engine.kernels.cpu.matmul.formats import GROUP, INT4, INT4_ZEROS, INT8
from cbatch.engine.models.formats.integers import Integers, rounded
from cbatch.engine.models.tensor_files import Tensors

Rows = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class StoredMatrix(ABC):
    """A matrix, or those of all experts one after the other.

    tensors:  of the files
    name:     of its numbers in the files
    rows, depth: of the matrix, or of each expert's
    experts:  how many there are; 0 for one matrix
    is_transposed: transformers has it as [depth, rows]
    """

    tensors: Tensors
    name: str
    rows: int
    depth: int
    experts: int = 0
    is_transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """As transformers has it."""
        one = (self.depth, self.rows) if self.is_transposed else (self.rows, self.depth)
        return (self.experts, *one) if self.experts else one

    @property
    @abstractmethod
    def label(self) -> str:
        """How its numbers are stored, for people."""

    @property
    @abstractmethod
    def format(self) -> int:
        """The packed format that it gets."""

    @property
    @abstractmethod
    def is_exact(self) -> bool:
        """Whether the packed format has its integers."""

    @abstractmethod
    def values(self, rows: Rows) -> Tensor:
        """Rows as numbers [rows, depth] float32."""

    def integers(self, rows: Rows) -> Integers:
        """Rows in its packed format."""
        return rounded(self.values(rows), INT8)


@dataclass(frozen=True, eq=False)
class FloatMatrix(StoredMatrix):
    """A matrix of floating-point numbers of 8 bits, whose scales stand in another tensor. It becomes int8.

    scale: name of the scales; [rows of blocks, columns of blocks], or one number
    block: rows and columns that share a scale
    """

    scale: str = ""
    block: tuple[int, int] = (1, 1)

    @property
    def label(self) -> str:
        return "FP8"

    @property
    def format(self) -> int:
        return INT8

    @property
    def is_exact(self) -> bool:
        return False

    def values(self, rows: Rows) -> Tensor:
        numbers = self.tensors.take(self.name, rows).float()
        scales = self.tensors[self.scale].float()
        if scales.numel() == 1:
            return numbers * scales.reshape(())
        scales = scales.view(len(scales), -1)[torch.from_numpy(rows) // self.block[0]]
        return numbers * scales.repeat_interleave(self.block[1], dim=1)[:, : self.depth]


@dataclass(frozen=True, eq=False)
class GroupedMatrix(StoredMatrix):
    """A matrix of integers: a number is scale * (integer - zero point).

    bits:   4: integers from 0 to 15; 8: from -128 to 127
    group:  numbers of a row that share scale and zero point, one after the other unless `order` says otherwise
    order:  [depth] group of each number of a row; None if they lie in turn
    """

    bits: int = 4
    group: int = GROUP
    order: Rows | None = None

    @abstractmethod
    def codes(self, rows: Rows) -> NDArray[Any]:
        """Integers [rows, depth]."""

    @abstractmethod
    def scales(self, rows: Rows) -> NDArray[np.float32]:
        """[rows, groups]"""

    @abstractmethod
    def zeros(self, rows: Rows) -> NDArray[np.float32] | None:
        """Zero points [rows, groups]; None if all are 8 for 4 bits, and 0 for 8 bits."""

    @property
    @abstractmethod
    def has_zeros(self) -> bool:
        """Whether some zero points are not the usual ones."""

    @property
    def label(self) -> str:
        groups = "columns" if self.group >= self.depth else f"groups of {self.group}"
        order = "" if self.order is None else " in another order"
        return f"{self.bits} bits in {groups}{' with zero points' if self.has_zeros else ''}{order}"

    @property
    def format(self) -> int:
        if self.bits == 8 or not self._fits:
            return INT8
        return INT4_ZEROS if self.has_zeros else INT4

    @property
    def is_exact(self) -> bool:
        return self._fits and not (self.bits == 8 and self.has_zeros)

    @property
    def _fits(self) -> bool:
        """Whether groups of 32 have one scale each."""
        return self.order is None and (self.group % GROUP == 0 or self.group >= self.depth)

    def values(self, rows: Rows) -> Tensor:
        groups = np.arange(self.depth) // self.group if self.order is None else self.order
        zeros = self.zeros(rows)
        zero: Any = zeros[:, groups] if zeros is not None else 8 if self.bits == 4 else 0
        with np.errstate(all="ignore"):  # a damaged file may have any scale
            return torch.from_numpy(self.scales(rows)[:, groups] * (self.codes(rows).astype(np.float32) - zero))

    def integers(self, rows: Rows) -> Integers:
        if not self.is_exact:
            return super().integers(rows)
        groups = np.arange(0, self.depth, GROUP) // self.group
        zeros = self.zeros(rows) if self.format == INT4_ZEROS else None
        return Integers(self.codes(rows), self.scales(rows)[:, groups], None if zeros is None else zeros[:, groups])


def unpacked(words: NDArray[np.int32], bits: int) -> NDArray[np.uint8]:
    """Integers [..., numbers] of 4 or 8 bits, of words [..., words], whose lowest bits come first."""
    each = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return each
    return np.stack([each & 15, each >> 4], axis=-1).reshape(*each.shape[:-1], -1)


def packed_places(rows: Rows, bits: int) -> tuple[Rows, Rows]:
    """The words that hold rows which are packed, each word once; and where the rows are among what those hold."""
    words, place = np.unique(rows * bits // 32, return_inverse=True)
    return words, place * (32 // bits) + rows % (32 // bits)


def as_float32(tensor: Tensor) -> NDArray[np.float32]:
    numbers: NDArray[np.float32] = tensor.float().numpy()
    return numbers
