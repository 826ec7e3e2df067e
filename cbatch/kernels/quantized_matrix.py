"""Matrices on a GPU whose numbers are kept in 8 or 4 bits, and how they lie in memory.

A product goes along the depth, so what it reads at once lies together: a part is 32 bytes of every column. In 8 bits
these are 32 numbers of the depth. In 4 bits they are 64, two groups with a scale each: byte i holds number i in its low
bits and number i + 32 in its high ones.

| kind | a number is | scales |
|---|---|---|
| int8 | scale * integer, from -128 to 127 | float16, for 32 numbers |
| int4 | scale * (integer - 8), from 0 to 15 | float16, for 32 numbers |
| int4_zeros | scale * (integer - zero point), from 0 to 15 | float16, as zero points are, for 32 numbers |
| fp8 | scale * e4m3, whose 8 bits are kept | float32, for a multiple of 32 numbers |
| mxfp4 | scale * level, whose place from 0 to 15 is kept | bfloat16, powers of 2, for 32 numbers |
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from cbatch.kernels.formats import Integers

GROUP = 32
"""Numbers of a column that share a scale, but in fp8."""

KINDS = ("int8", "fp8", "int4", "int4_zeros", "mxfp4")
"""Those of 8 bits come first."""
_IN_8_BITS = {"int8": torch.int8, "fp8": torch.uint8}
_SCALES = {"mxfp4": torch.bfloat16, "fp8": torch.float32}
"""Their types, if they are not float16."""
_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Of mxfp4: twice the numbers of 4 bits, which are halves (Open Compute Project, Microscaling Formats 1.0)."""
_MIDDLE = 8
"""The integer of int4 that stands for 0."""


class QuantizedMatrix(NamedTuple):
    """A matrix [columns, depth], or one for each expert: then every tensor has one more dimension before the others.

    numbers: [parts, columns, 32] bytes
    scales:  [groups, columns]; 0 beyond the depth
    zeros:   [groups, columns], of int4_zeros
    group:   numbers of a column that share a scale
    """

    kind: str
    columns: int
    depth: int
    numbers: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    group: int = GROUP

    @classmethod
    def empty(
        cls, kind: str, columns: int, depth: int, device: torch.device, experts: int = 0, group: int = GROUP
    ) -> QuantizedMatrix:
        """Without numbers, which `fill` brings. experts: how many matrices there are; 0 for one matrix"""
        size = _part_size(kind)
        parts, count = -(-depth // size), (experts,) if experts else ()
        groups = -(-parts * size // group)
        numbers = torch.zeros(*count, parts, columns, GROUP, dtype=_IN_8_BITS.get(kind, torch.uint8), device=device)
        dtype = _SCALES.get(kind, torch.float16)
        scales = torch.zeros(*count, groups, columns, dtype=dtype, device=device)
        zeros = torch.zeros_like(scales) if kind == "int4_zeros" else None
        return cls(kind, columns, depth, numbers, scales, zeros, group)

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
        columns, (parts, _, _), size = slice(first, first + len(numbers)), self.numbers.shape, _part_size(self.kind)
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
        if _part_size(self.kind) > GROUP:
            codes = torch.stack([codes & 15, codes >> 4], dim=2)
        elif self.kind == "fp8":
            codes = codes.contiguous().view(torch.float8_e4m3fn)
        groups = codes.reshape(codes.shape[0], -1, GROUP).float()
        if self.kind == "mxfp4":
            groups = torch.tensor(_LEVELS, device=codes.device).float()[groups.long()]
        if self.zeros is not None:
            groups -= self.zeros[:, columns].T[..., None]
        elif self.kind == "int4":
            groups -= _MIDDLE
        scales = self.scales[:, columns].T.float().repeat_interleave(self.group // GROUP, dim=1)
        return (groups * scales[:, : groups.shape[1], None]).flatten(1)[:, : self.depth]


def _part_size(kind: str) -> int:
    """Numbers of the depth in a part."""
    return GROUP if kind in _IN_8_BITS else 2 * GROUP
