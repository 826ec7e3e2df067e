"""AWQ checkpoints (https://github.com/casper-hansen/AutoAWQ), of version gemm.

A matrix [rows, depth] of integers of 4 bits is stored the other way round: `qweight` [depth, rows / 8] int32 has eight
rows in a word, in the order of `_ORDER`. So has `qzeros` [groups, rows / 8]. `scales` are [groups, rows].
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbatch.model.formats.matrices import ColumnMatrix, unpacked_rows
from cbatch.model.formats.settings import Headers, Matrices, Method, Reader, Settings
from cbatch.model.stored import Rows

_ORDER = np.array((0, 2, 4, 6, 1, 3, 5, 7))
"""Which of eight rows the bits of a word are, the lowest first."""

_PLACES = np.argsort(_ORDER)


def _read(settings: Settings) -> Reader:
    settings.rename(bits="w_bit", group_size="q_group_size")
    for key in ("version", "format", "checkpoint_format"):
        settings.expect(key, "gemm", "GEMM")
    return awq_reader(settings, "dynamic")


def awq_reader(settings: Settings, rules: str) -> Reader:
    """rules: see `Settings.integers`"""
    sizes, has_zeros = settings.integers(rules, 4)[1], settings.expect("zero_point", True, False)

    def matrices(headers: Headers) -> Matrices:
        for module in headers.modules(".qweight"):
            name, scale, zero = (f"{module}.{part}" for part in ("qweight", "scales", "qzeros"))
            depth, words = headers.shape(name, ("I32",), 2)
            group, groups = headers.grouping(scale, sizes, depth, 8 * words)
            if has_zeros or zero in headers.tensors:
                headers.check(zero, ("I32",), (groups, words))
            yield f"{module}.weight", AwqMatrix(headers.tensors, name, 8 * words, depth, scale, group=group, zero=zero)

    return matrices


METHOD = Method("awq", "AWQ", _read)


class AwqMatrix(ColumnMatrix):
    def codes(self, rows: Rows) -> NDArray[Any]:
        return self._unpacked(self.name, rows)

    def zeros(self, rows: Rows) -> NDArray[np.float32]:
        return self._unpacked(self.zero, rows).astype(np.float32)

    def _unpacked(self, name: str, rows: Rows) -> NDArray[Any]:
        """Integers [rows, depth or groups]."""
        return unpacked_rows(self.tensors, name, rows // 8 * 8 + _PLACES[rows % 8], 4, axis=1)
