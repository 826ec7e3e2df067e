"""Rows of a matrix as the integers of a packed format."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.base.units import format_bytes
from cbatch.kernels.cpu.matmul.formats import GROUP, INT4, INT4_ZEROS, INT8, LEVELS
from cbatch.model.packing import quantized

_log = logging.getLogger("cbatch")


class Integers(NamedTuple):
    """Rows of a matrix as a packed format has them, which `pack_integers` takes.

    numbers: [rows, depth] integers
    scales:  [rows, groups of 32] float32, which float16 has too; for MXFP4 powers of 2
    zeros:   as scales, for INT4_ZEROS
    """

    numbers: NDArray[Any]
    scales: NDArray[np.float32]
    zeros: NDArray[np.float32] | None = None

    def values(self, own: int) -> NDArray[np.float32]:
        """The numbers [rows, depth] that they stand for in their packed format."""
        if own in LEVELS:
            centred = np.array(LEVELS[own], np.float32)[self.numbers]
        else:
            middle = 8 if own == INT4 else 0
            centred = self.numbers.astype(np.float32) - (middle if self.zeros is None else self._spread(self.zeros))
        with np.errstate(all="ignore"):  # a damaged file may have any scale
            numbers: NDArray[np.float32] = centred * self._spread(self.scales)
        return numbers

    def _spread(self, groups: NDArray[np.float32]) -> NDArray[np.float32]:
        """Numbers of groups [rows, groups] for each of their members."""
        return np.repeat(groups, GROUP, axis=1)[:, : self.numbers.shape[1]]

    def widened(self, own: int, target: int) -> Integers | None:
        """The same numbers in another packed format; None if it does not have them all."""
        if own == target:
            return self
        if own == INT4 and target == INT8:
            return self._replace(numbers=self.numbers.astype(np.int8) - 8)
        if own == INT4 and target == INT4_ZEROS:
            return self._replace(zeros=np.full_like(self.scales, 8))
        if own in LEVELS and target == INT8 and np.array_equal(as_half(self.scales), self.scales):
            return self._replace(numbers=np.array(LEVELS[own], np.int8)[self.numbers])
        return None


def as_half(numbers: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
    """Rounded to what float16 has."""
    with np.errstate(all="ignore"):  # a damaged file may have any scale
        return numbers.astype(np.float16).astype(np.float32)


def rounded(values: Tensor, format: int) -> Integers:
    """Numbers in int8, which everything goes to that no other format has."""
    if format != INT8:
        raise ValueError(f"numbers are rounded to int8 only, not to format {format}")
    numbers, scales = quantized(values, INT8)
    return Integers(numbers.numpy(), scales.numpy())


def tell_rounded(formats: Iterable[str], memory: int, stored: int, where: str) -> None:
    """Says which formats are rounded, because no kernel reads them.

    memory: bytes of all weights as they are now
    stored: their bytes in what they come from, which `where` names
    """
    _log.warning(
        "Matrices in %s are rounded to int8 in groups of 32, 8.5 bits a number; all weights take %s, and %s in %s.",
        ", ".join(sorted(formats)), format_bytes(memory), format_bytes(stored), where,
    )  # fmt: skip


def tell_widened(name: str, dtype: torch.dtype, memory: int, stored: int, where: str) -> None:
    """Says that quantized weights become numbers. name: of their format; for the others see `tell_rounded`"""
    _log.warning(
        "The %s weights are kept in %s, and take %s, and %s in %s.",
        name, str(dtype).removeprefix("torch."), format_bytes(memory), format_bytes(stored), where,
    )  # fmt: skip


def common_format(formats: Iterable[int | None]) -> int | None:
    """The packed format of matrices that must have the same one; None if one of them stays numbers."""
    found = set(formats)
    if None in found:
        return None
    if len(found) == 1:
        return found.pop()
    return INT4_ZEROS if found == {INT4, INT4_ZEROS} else INT8
