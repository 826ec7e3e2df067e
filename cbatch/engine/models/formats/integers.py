"""Rows of a matrix as the integers of a packed format."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cbatch.engine.kernels.cpu.matmul.formats import INT4, INT4_ZEROS, INT8
from cbatch.engine.models.packing import quantized


class Integers(NamedTuple):
    """Rows of a matrix as a packed format has them, which `pack_integers` takes.

    numbers: [rows, depth] integers
    scales:  [rows, groups of 32] float32, which float16 has too
    zeros:   the same, for INT4_ZEROS
    """

    numbers: NDArray[Any]
    scales: NDArray[np.float32]
    zeros: NDArray[np.float32] | None = None

    def widened(self, own: int, target: int) -> Integers | None:
        """The same numbers in another packed format; None if it does not have them all."""
        if own == target:
            return self
        if own == INT4 and target == INT8:
            return self._replace(numbers=self.numbers.astype(np.int8) - 8)
        if own == INT4 and target == INT4_ZEROS:
            return self._replace(zeros=np.full_like(self.scales, 8))
        return None


def rounded(values: Tensor, format: int) -> Integers:
    """Numbers in int8, which everything goes to that no other format has."""
    if format != INT8:
        raise ValueError(f"numbers are rounded to int8 only, not to format {format}")
    numbers, scales = quantized(values, INT8)
    return Integers(numbers.numpy(), scales.numpy())


def common_format(formats: Iterable[int | None]) -> int | None:
    """The packed format of matrices that must have the same one; None if one of them stays numbers."""
    found = set(formats)
    if None in found:
        return None
    return INT8 if INT8 in found else INT4_ZEROS if INT4_ZEROS in found else INT4
