"""Matrices on a GPU in packed formats (see `formats.py`), and how they lie in memory.

A product goes along the depth, so what it reads at once lies together: a part is 32 bytes of every column. In 8 bits
these are 32 numbers of the depth. In 4 bits they are 64: byte i holds number i in its low bits and number i + 32 in its
high ones. Scales of 2 bytes lie in pairs, those of two groups that follow each other: asynchronous copies take 4 bytes
at least.

FP8 matrices can also be multiplied with rows that are rounded to FP8, by the matrix units that a GPU has for it:
`torch._scaled_mm` takes both sides in e4m3 (4 bits of exponent and 3 of mantissa), and multiplies a sum by the scale of
its row and by that of its column. A row's scale makes its largest number 448, the largest of e4m3, and depends on
nothing but the row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from cbatch.kernels.formats import FP8, GROUP, INT4_ZEROS, INT8, MXFP4, Integers, group_of
from cbatch.runtime.kv_cache import FP8 as E4M3
from cbatch.runtime.kv_cache import FP8_MAX, as_stored

_IN_8_BITS = {INT8: torch.int8, FP8: torch.uint8}
_SCALES = {MXFP4: torch.bfloat16, FP8: torch.float32}
"""Their types, if they are not float16."""


LEAST_SCALE = 2.0**-126
"""The smallest scale of a row: the smallest normal float32. Rows of zeros have it."""

_COLUMNS_OF_ARRIVAL = 64
"""At most as many as a tile for few rows has."""

_MULTIPLE = 16
"""Columns and depth of what a GPU multiplies are multiples of it."""


class QuantizedMatrix(NamedTuple):
    """A matrix [columns, depth], or one for each expert: then every tensor has one more dimension before the others.

    format:  one of ON_GPU
    numbers: [parts, columns, 32] bytes
    scales:  [words, columns, groups of a word]; 0 beyond the depth
    arrivals: [columns / 64] int32 zeros, in which a product counts splits of the depth that are done; one at a time
    zeros:   as scales, of INT4_ZEROS
    group:   numbers of a column that share a scale
    """

    format: int
    columns: int
    depth: int
    numbers: Tensor
    scales: Tensor
    arrivals: Tensor
    zeros: Tensor | None = None
    group: int = GROUP

    @classmethod
    def empty(
        cls, format: int, columns: int, depth: int, device: torch.device, experts: int = 0, group: int = 0
    ) -> QuantizedMatrix:
        """Without numbers, which `fill` brings.

        experts: how many matrices there are; 0 for one matrix
        group:   0 for as many as the format says
        """
        size, group = _part_size(format), group or group_of(format)
        parts, count = -(-depth // size), (experts,) if experts else ()
        together = 4 // _SCALES.get(format, torch.float16).itemsize
        words = -(-parts * size // (group * together))
        numbers = torch.zeros(*count, parts, columns, GROUP, dtype=_IN_8_BITS.get(format, torch.uint8), device=device)
        dtype = _SCALES.get(format, torch.float16)
        scales = torch.zeros(*count, words, columns, together, dtype=dtype, device=device)
        zeros = torch.zeros_like(scales) if format == INT4_ZEROS else None
        arrivals = torch.zeros(-(-columns // _COLUMNS_OF_ARRIVAL), dtype=torch.int32, device=device)
        return cls(format, columns, depth, numbers, scales, arrivals, zeros, group)

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
        for kept, new in ((self.scales, scales), (self.zeros, zeros)):
            if kept is not None and new is not None:
                words, _, together = kept.shape
                padded = pad(new, (0, words * together - new.shape[1])).view(-1, words, together)
                kept[:, columns] = padded.transpose(0, 1).to(kept.dtype)

    def values(self, columns: slice | Tensor) -> Tensor:
        """Some columns as numbers [columns, depth] float32."""
        codes = self.numbers[:, columns].transpose(0, 1)
        if _part_size(self.format) > GROUP:
            codes = torch.stack([codes & 15, codes >> 4], dim=2)
        scales, *zeros = (each[:, columns].transpose(0, 1).flatten(1) for each in self.tensors[1:])
        integers = Integers(codes.reshape(len(codes), -1), scales, *zeros)
        return integers.values(self.format, self.group)[:, : self.depth]


def _part_size(format: int) -> int:
    """Numbers of the depth in a part."""
    return GROUP if format in _IN_8_BITS else 2 * GROUP


class Float8Matrix(NamedTuple):
    """A matrix [columns, depth] with a scale for each column, as `torch._scaled_mm` takes it.

    numbers: [columns, depth] e4m3
    scales:  [1, columns] float32
    """

    numbers: Tensor
    scales: Tensor

    @classmethod
    def empty(cls, columns: int, depth: int, device: torch.device) -> Float8Matrix:
        """Without numbers, which `fill` brings."""
        numbers = torch.zeros(columns, depth, dtype=torch.uint8, device=device).view(E4M3)
        return cls(numbers, torch.zeros(1, columns, dtype=torch.float32, device=device))

    @staticmethod
    def takes(columns: int, depth: int) -> bool:
        """Whether a GPU multiplies matrices of this size."""
        return columns % _MULTIPLE == 0 and depth % _MULTIPLE == 0

    @property
    def columns(self) -> int:
        return len(self.numbers)

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.scales.nbytes

    def fill(self, first: int, integers: Integers) -> None:
        """Writes columns from `first` on, each with one scale."""
        columns = slice(first, first + len(integers.numbers))
        self.numbers.view(torch.uint8)[columns] = integers.numbers
        self.scales[:, columns] = integers.scales.T

    def multiply(self, rows: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """out [T, columns] = scales [T, 1] * rows [T, depth] e4m3 times the matrix, plus bias [columns]."""
        torch._scaled_mm(rows, self.numbers.t(), scales, self.scales, bias=bias, out_dtype=out.dtype, out=out)


def rounded_rows(source: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [T, depth] in e4m3, and their scales [T, 1] float32, by operations of torch."""
    numbers = source.float()
    scales = (numbers.abs().amax(1, keepdim=True) / FP8_MAX).clamp(min=LEAST_SCALE)
    return as_stored(numbers / scales, E4M3), scales
