"""MXFP4 as GPT-OSS has it, for the matrices of experts (https://www.opencompute.org, Microscaling Formats 1.0).

`*_blocks` [experts, rows, groups, 16] uint8 has 32 numbers of a row in 16 bytes, of which each has two, that of its low
bits first. `*_scales` [experts, rows, groups] uint8 are exponents of 2, plus 127.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cbatch.kernels.formats import GROUP, MXFP4
from cbatch.model.formats.matrices import GroupedMatrix, Rows, StoredMatrix, unpacked
from cbatch.model.formats.method import Headers, Settings


def read_settings(settings: Settings) -> None:
    """Raises UnreadQuantization for what is not read."""
    settings.ignore("modules_to_not_convert", "dequantize")
    settings.finish()


def matrices(_: None, headers: Headers) -> dict[str, StoredMatrix]:
    """By the names of their weights. Raises ModelError for missing or misshaped tensors."""
    found: dict[str, StoredMatrix] = {}
    for module in headers.modules("_blocks"):
        blocks, scale = f"{module}_blocks", f"{module}_scales"
        experts, rows, groups, _size = headers.shape(blocks, ("U8",), 4)
        headers.check(blocks, ("U8",), (experts, rows, groups, GROUP // 2))
        headers.check(scale, ("U8",), (experts, rows, groups))
        found[module] = Mxfp4Matrix(
            headers.tensors, blocks, rows, GROUP * groups, experts, is_transposed=True, scale=scale
        )
    return found


@dataclass(frozen=True, eq=False)
class Mxfp4Matrix(GroupedMatrix):
    @property
    def label(self) -> str:
        return "MXFP4"

    @property
    def format(self) -> int:
        return MXFP4

    @property
    def has_zeros(self) -> bool:
        return False

    def values(self, rows: Rows) -> Tensor:
        return self.integers(rows).values(MXFP4)

    def codes(self, rows: Rows) -> NDArray[Any]:
        """Places of levels."""
        return unpacked(self._taken(self.name, rows), 4)

    def scales(self, rows: Rows) -> NDArray[np.float32]:
        exponents = self._taken(self.scale, rows).astype(np.int32) - 128
        return np.ldexp(np.float32(1), exponents)

    def zeros(self, rows: Rows) -> None:
        return None

    def _taken(self, name: str, rows: Rows) -> NDArray[np.uint8]:
        """Rows of all experts, one after the other, as bytes."""
        taken: NDArray[np.uint8] = self.tensors.take(name, rows, shape=(self.experts * self.rows, -1)).numpy()
        return taken
