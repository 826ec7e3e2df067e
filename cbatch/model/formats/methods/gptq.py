"""GPTQ checkpoints (https://github.com/AutoGPTQ/AutoGPTQ, https://github.com/ModelCloud/GPTQModel).

A matrix [rows, depth] of integers of 4 or 8 bits is stored the other way round: `qweight` [depth * bits / 32, rows]
int32 has several numbers of a row in a word, and `qzeros` [groups, rows * bits / 32] the zero points of several rows.
They are stored minus one, unless `checkpoint_format` is gptq_v2. `scales` are [groups, rows]. `g_idx` [depth] is the
group of each number of a row: with `desc_act`, those of a group do not lie side by side.

Rules in `dynamic` give modules that match a pattern other bits or groups, which the tensors show; one that begins with
`-:` leaves its modules as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbatch.model.formats.matrices import ColumnMatrix, unpacked, unpacked_rows
from cbatch.model.formats.settings import Headers, Matrices, Method, Reader, Settings
from cbatch.model.stored import Rows


def _read(settings: Settings) -> Reader:
    version = settings.expect("checkpoint_format", "gptq", "gptq_v2")
    settings.expect("format", version)
    return gptq_reader(settings, "dynamic", shift=int(version == "gptq"))


def gptq_reader(settings: Settings, rules: str, *, shift: int) -> Reader:
    """rules: see `Settings.integers`; shift: what has been subtracted from zero points"""
    bits, sizes = settings.integers(rules, 4, 8)

    def matrices(headers: Headers) -> Matrices:
        for module in headers.modules(".qweight"):
            name, scale, zero, place = (f"{module}.{part}" for part in ("qweight", "scales", "qzeros", "g_idx"))
            words, rows = headers.shape(name, ("I32",), 2)
            columns = headers.shape(zero, ("I32",), 2)[1]
            own = next((one for one in bits if -(-rows * one // 32) == columns), bits[0])
            depth = 32 // own * words
            group, groups = headers.grouping(scale, sizes, depth, rows)
            headers.check(zero, ("I32",), (groups, -(-rows * own // 32)))
            order = headers.order(place, depth, group, groups)
            where = headers.tensors, name, rows, depth, scale
            made = GptqMatrix(*where, bits=own, group=group, order=order, zero=zero, shift=shift)
            yield f"{module}.weight", made

    return matrices


METHOD = Method("gptq", "GPTQ", _read)


@dataclass(eq=False)
class GptqMatrix(ColumnMatrix):
    """shift: what has been subtracted from zero points"""

    shift: int = 0

    def codes(self, rows: Rows) -> NDArray[Any]:
        return unpacked(self.tensors.take(self.name, rows, axis=1).numpy().T, self.bits)

    def zeros(self, rows: Rows) -> NDArray[np.float32]:
        return unpacked_rows(self.tensors, self.zero, rows, self.bits, axis=1).astype(np.float32) + self.shift
