"""Matrices on a GPU in packed formats (see `formats.py`), and how they lie in memory.

A product goes along the depth, so what it reads at once lies together: a part is 32 bytes of every column. In 8 bits
these are 32 numbers of the depth. In 4 bits they are 64, two groups with a scale each: byte i holds number i in its low
bits and number i + 32 in its high ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from cbatch.kernels.formats import FP8, GROUP, INT4_ZEROS, INT8, MXFP4, Integers

_IN_8_BITS = {INT8: torch.int8, FP8: torch.uint8}
_SCALES = {MXFP4: torch.bfloat16, FP8: torch.float32}
"""Their types, if they are not float16."""


class QuantizedMatrix(NamedTuple):
    """A matrix [columns, depth], or one for each expert: then every tensor has one more dimension before the others.

    format:  one of ON_GPU
    numbers: [parts, columns, 32] bytes
    scales:  [groups, columns]; 0 beyond the depth
    zeros:   [groups, columns], of INT4_ZEROS
    group:   numbers of a column that share a scale
    """

    format: int
    columns: int
    depth: int
    numbers: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    group: int = GROUP

    @classmethod
    def empty(
        cls, format: int, columns: int, depth: int, device: torch.device, experts: int = 0, group: int = GROUP
    ) -> QuantizedMatrix:
        """Without numbers, which `fill` brings. experts: how many matrices there are; 0 for one matrix"""
        size = _part_size(format)
        parts, count = -(-depth // size), (experts,) if experts else ()
        groups = -(-parts * size // group)
        numbers = torch.zeros(*count, parts, columns, GROUP, dtype=_IN_8_BITS.get(format, torch.uint8), device=device)
        dtype = _SCALES.get(format, torch.float16)
        scales = torch.zeros(*count, groups, columns, dtype=dtype, device=device)
        zeros = torch.zeros_like(scales) if format == INT4_ZEROS else None
        return cls(format, columns, depth, numbers, scales, zeros, group)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.numbers, self.scales, *([] if self.zeros is None else [self.zeros])]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def sizes(self) -> tuple[int, int]:
        """How many bytes and how many scales the matrix of each expert has."""
        return self.numbers[0].numel(), self.scales[0].numel()

    def expert(self, number: int) -> QuantizedMatrix:
        """The matrix of one expert, in the same memory."""
        return self._replace(
            numbers=self.numbers[number],
            scales=self.scales[number],
            zeros=None if self.zeros is None else self.zeros[number],
        )

    def fill(self, first: int, integers: Integers) -> None:
        """Writes columns from `first` on."""
        numbers, scales, zeros = integers
        columns, (parts, _, _), size = slice(first, first + len(numbers)), self.numbers.shape, _part_size(self.format)
        padded = pad(numbers, (0, parts * size - self.depth)).view(-1, parts, size)
        if size > GROUP:
            codes = padded.to(torch.uint8)
            padded = codes[..., :GROUP] | codes[..., GROUP:] << 4
        self.numbers[:, columns] = padded.transpose(0, 1).to(self.numbers.dtype)
        self.scales[: scales.shape[1], columns] = scales.T.to(self.scales.dtype)
        if self.zeros is not None and zeros is not None:
            self.zeros[: zeros.shape[1], columns] = zeros.T.to(self.zeros.dtype)

    def values(self, columns: slice | Tensor) -> Tensor:
        """Some columns as numbers [columns, depth] float32."""
        codes = self.numbers[:, columns].transpose(0, 1)
        if _part_size(self.format) > GROUP:
            codes = torch.stack([codes & 15, codes >> 4], dim=2)
        zeros = None if self.zeros is None else self.zeros[:, columns].T
        integers = Integers(codes.reshape(len(codes), -1), self.scales[:, columns].T, zeros)
        return integers.values(self.format, self.group)[:, : self.depth]


def _part_size(format: int) -> int:
    """Numbers of the depth in a part."""
    return GROUP if format in _IN_8_BITS else 2 * GROUP
