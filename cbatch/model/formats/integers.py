"""Rows of a matrix as the integers of a packed format."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.base.units import format_bytes
from cbatch.kernels.formats import INT4, INT4_ZEROS, INT8, Integers, quantized

_log = logging.getLogger("cbatch")


def as_half(numbers: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
    """Rounded to what float16 has."""
    with np.errstate(all="ignore"):  # a damaged file may have any scale
        return numbers.astype(np.float16).astype(np.float32)


def rounded(values: Tensor, format: int) -> Integers:
    """Numbers in int8, which everything goes to that no other format has."""
    if format != INT8:
        raise ValueError(f"numbers are rounded to int8 only, not to format {format}")
    return quantized(values, INT8)


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
