"""Weights of files that have formats of their own: a program takes their integers as they are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

from torch import Tensor

from cbatch.kernels.formats import Integers
from cbatch.model.programs.program import Weight


class StoredWeights(ABC, Mapping[str, Tensor]):
    """Named weights, of which some are integers in the files. As a mapping they are numbers, made when they are read.

    Formats are those of `kernels/cpu/matmul/formats.py`.
    """

    @property
    def description(self) -> str:
        """The formats in the files, for people; empty if somebody else says it."""
        return ""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Of a weight, which is not read for that."""

    @abstractmethod
    def rows(self, weight: Weight, first: int, stop: int) -> Tensor:
        """Rows first .. stop-1 of a matrix, once it is loaded (see `Weight.size`), as numbers [rows, depth]."""

    @abstractmethod
    def format(self, weights: Iterable[Weight]) -> int | None:
        """The packed format that matrices get which must have the same one; None if they stay numbers."""

    def float8_group(self, weights: Iterable[Weight]) -> int | None:
        """Numbers of a row that share a scale, if all matrices are FP8 with as many, a multiple of 32; else None."""
        return None

    def float8(self, weight: Weight, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Rows of a matrix of FP8: bytes [rows, depth], and float32 scales [rows, groups]."""
        raise ValueError(f"{weight.name} is not FP8")

    @abstractmethod
    def packed(self, weights: Iterable[tuple[Weight, int, int]], format: int) -> Integers:
        """Rows in a packed format.

        weights: with the first of their rows, and the one after the last; all follow each other
        """
