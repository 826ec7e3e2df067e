"""MXFP4 as GPT-OSS has it, for the matrices of experts (https://www.opencompute.org, Microscaling Formats 1.0).

`*_blocks` [experts, rows, groups, 16] uint8 has 32 numbers of a row in 16 bytes, of which each has two, that of its low
bits first. `*_scales` [experts, rows, groups] uint8 are exponents of 2, plus 127.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cbatch.kernels.formats import GROUP, MXFP4
from cbatch.model.formats.matrices import GroupedMatrix, unpacked
from cbatch.model.formats.settings import Headers, Matrices, Method, Reader, Settings
from cbatch.model.stored import Packing, Rows


def _read(settings: Settings) -> Reader:
    settings.ignore("modules_to_not_convert", "dequantize")
    return _matrices


def _matrices(headers: Headers) -> Matrices:
    for module in headers.modules("_blocks"):
        blocks, scale = f"{module}_blocks", f"{module}_scales"
        experts, rows, groups, _size = headers.shape(blocks, ("U8",), 4)
        headers.check(blocks, ("U8",), (experts, rows, groups, GROUP // 2))
        headers.check(scale, ("U8",), (experts, rows, groups))
        yield module, Mxfp4Matrix(headers.tensors, blocks, rows, GROUP * groups, scale, experts, is_transposed=True)


METHOD = Method("mxfp4", "MXFP4", _read)


class Mxfp4Matrix(GroupedMatrix):
    label = "MXFP4"
    packing = Packing(MXFP4)
    has_zeros = False

    def values(self, rows: Rows) -> Tensor:
        return self.integers(rows, MXFP4).values(MXFP4)

    def codes(self, rows: Rows) -> NDArray[Any]:
        """Places of levels."""
        return unpacked(self._taken(self.name, rows), 4)

    def scales(self, rows: Rows) -> NDArray[np.float32]:
        exponents = self._taken(self.scale, rows).astype(np.int32) - 128
        return np.ldexp(np.float32(1), exponents)

    def _taken(self, name: str, rows: Rows) -> NDArray[np.uint8]:
        """Rows of all experts, one after the other, as bytes."""
        taken: NDArray[np.uint8] = self.tensors.take(name, rows, shape=(self.experts * self.rows, -1)).numpy()
        return taken
