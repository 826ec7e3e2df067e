"""Matrices of numbers of 4 bits, e2m1: a sign, two bits of exponent and one of mantissa.

In MXFP4, 32 numbers share a power of 2. In NVFP4, 16 share a scale in e4m3, and all scales of a matrix are multiplied
with a number, or divided by it. The first of two numbers has the low bits of their byte.

Sources: Open Compute Project, Microscaling Formats 1.0; https://github.com/NVIDIA/Model-Optimizer;
https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.kernels.formats import GROUP, MXFP4, NVFP4, Integers, group_of
from cbatch.model.formats.matrices import GroupedMatrix, as_float32, unpacked
from cbatch.model.formats.settings import Headers
from cbatch.model.stored import Packing, Rows

_SMALL = group_of(NVFP4)


def fp4_matrix(
    headers: Headers, name: str, scale: str, factor: str, *, divides: bool = False, sizes: Sequence[int] = (_SMALL,)
) -> GroupedMatrix:
    """A matrix [rows, depth / 2] of bytes: NVFP4, or MXFP4 if it has no `factor`.

    scale, factor: names of its scales, and of the number that these are multiplied with; divides: or divided by
    sizes: numbers that may share a scale
    """
    rows, pairs = headers.shape(name, ("U8",), 2)
    depth = 2 * pairs
    if factor not in headers.tensors:
        headers.check(scale, ("U8", "F8_E8M0"), (rows, -(-depth // GROUP)))
        return Mxfp4Matrix(headers.tensors, name, rows, depth, scale)
    headers.check(factor, ("F32",), (), (1,))
    headers.check(scale, ("F8_E4M3",), *((rows, -(-depth // size)) for size in sizes))
    return Nvfp4Matrix(headers.tensors, name, rows, depth, scale, factor=factor, divides=divides)


def nvfp4_stack(headers: Headers, name: str) -> Nvfp4Matrix:
    """The matrices of all experts [experts, depth / 2, rows]."""
    scale, factor = f"{name}_weight_scale", f"{name}_weight_scale_2"
    experts, pairs, rows = headers.shape(name, ("U8",), 3)
    headers.check(factor, ("F32",), (), (1,), (experts,), (experts, 1, 1))
    headers.check(scale, ("F8_E4M3",), (experts, -(-2 * pairs // _SMALL), rows))
    return Nvfp4Matrix(headers.tensors, name, rows, 2 * pairs, scale, experts, is_transposed=True, factor=factor)


class Mxfp4Matrix(GroupedMatrix):
    label = "MXFP4"
    packing = Packing(MXFP4)

    def values(self, rows: Rows) -> Tensor:
        return self.integers(rows, MXFP4).values(MXFP4)

    def codes(self, rows: Rows) -> NDArray[Any]:
        """Places of levels."""
        return unpacked(self._taken(self.name, rows), 4)

    def scales(self, rows: Rows) -> NDArray[np.float32]:
        return np.ldexp(np.float32(1), self._taken(self.scale, rows).astype(np.int32) - 128)

    def _taken(self, name: str, rows: Rows) -> NDArray[np.uint8]:
        """Rows of all experts, one after the other, as bytes."""
        taken = self.tensors.take(name, rows, shape=(self.num_matrices * self.rows, -1))
        found: NDArray[np.uint8] = taken.view(torch.uint8).numpy()
        return found


@dataclass(eq=False)
class Nvfp4Matrix(GroupedMatrix):
    """factor: name of the number that scales are multiplied with, or those of each expert; divides: or divided by"""

    factor: str = ""
    divides: bool = False
    label = "NVFP4"
    packing = Packing(NVFP4, _SMALL)

    def values(self, rows: Rows) -> Tensor:
        return Integers.of_arrays(self.codes(rows), self.scales(rows)).values(NVFP4)

    def lost(self, held: Collection[int]) -> set[str]:
        return set() if NVFP4 in held else {self.label}

    def kept(self, rows: Rows, format: int) -> Integers | None:
        if format != NVFP4:
            return None
        found = Integers.of_arrays(self.codes(rows), self.scales(rows))
        return found._replace(scales=found.scales.half().float())

    def codes(self, rows: Rows) -> NDArray[Any]:
        """Places of levels."""
        return unpacked(self.taken(self.name, rows).numpy(), 4)

    def scales(self, rows: Rows) -> NDArray[np.float32]:
        factor = self._factor if len(self._factor) == 1 else self._factor[rows // self.rows, None]
        scales = self.taken(self.scale, rows).view(torch.float8_e4m3fn).float() * factor
        repeats = -(-self.depth // _SMALL // scales.shape[1])  # 2 if 32 numbers share one, as in W4A8_NVFP4_FP8
        return as_float32(scales.repeat_interleave(repeats, dim=1))

    @cached_property
    def _factor(self) -> Tensor:
        """[1 or experts]. Half of it, since levels are twice what they stand for."""
        found = self.tensors[self.factor].reshape(-1)
        return 0.5 / found if self.divides else 0.5 * found
