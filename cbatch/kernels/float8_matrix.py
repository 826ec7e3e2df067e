"""Products of FP8 matrices with rows that are rounded to FP8 too, by the matrix units that a GPU has for it.

`torch._scaled_mm` takes both sides in e4m3 (4 bits of exponent and 3 of mantissa), and multiplies a sum by the scale of
its row and by that of its column. A row's scale makes its largest number 448, the largest of e4m3, and depends on
nothing but the row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cbatch.kernels.formats import Integers
from cbatch.runtime.kv_cache import FP8, FP8_MAX, as_stored

LEAST_SCALE = 2.0**-126
"""The smallest scale of a row: the smallest normal float32. Rows of zeros have it."""

_MULTIPLE = 16
"""Columns and depth of what a GPU multiplies are multiples of it."""


class Float8Matrix(NamedTuple):
    """A matrix [columns, depth] with a scale for each column, as `torch._scaled_mm` takes it.

    numbers: [columns, depth] e4m3
    scales:  [1, columns] float32
    """

    numbers: Tensor
    scales: Tensor

    @classmethod
    def empty(cls, columns: int, depth: int, device: torch.device) -> Float8Matrix:
        """Without numbers, which `fill` brings."""
        numbers = torch.zeros(columns, depth, dtype=torch.uint8, device=device).view(FP8)
        return cls(numbers, torch.zeros(1, columns, dtype=torch.float32, device=device))

    @staticmethod
    def takes(columns: int, depth: int) -> bool:
        """Whether a GPU multiplies matrices of this size."""
        return columns % _MULTIPLE == 0 and depth % _MULTIPLE == 0

    @property
    def columns(self) -> int:
        return len(self.numbers)

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.scales.nbytes

    def fill(self, first: int, integers: Integers) -> None:
        """Writes columns from `first` on, each with one scale."""
        columns = slice(first, first + len(integers.numbers))
        self.numbers.view(torch.uint8)[columns] = integers.numbers
        self.scales[:, columns] = integers.scales.T

    def multiply(self, rows: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """out [T, columns] = scales [T, 1] * rows [T, depth] e4m3 times the matrix, plus bias [columns]."""
        torch._scaled_mm(rows, self.numbers.t(), scales, self.scales, bias=bias, out_dtype=out.dtype, out=out)


def rounded_rows(source: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [T, depth] in e4m3, and their scales [T, 1] float32, by operations of torch."""
    numbers = source.float()
    scales = (numbers.abs().amax(1, keepdim=True) / FP8_MAX).clamp(min=LEAST_SCALE)
    return as_stored(numbers / scales, FP8), scales
