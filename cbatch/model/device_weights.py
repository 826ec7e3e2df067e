"""Copies the weights of a program to a device, as numbers or in the bits that they are kept in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from cbatch.base.quantization import Quantization
from cbatch.kernels.formats import FP8, ON_GPU, Integers, quantized
from cbatch.kernels.operands import ExpertWeights, NormWeights
from cbatch.kernels.quantized_matrix import Float8Matrix, QuantizedMatrix
from cbatch.model.float8 import Float8Use
from cbatch.model.stored import Packing, kept_weights, packing_of, rows_of
from cbatch.model.weight import Activation, Matrix, Norm, Weight
from cbatch.runtime.cpu import num_threads

_NO_NORM = NormWeights("none")
_NUMBERS_AT_ONCE = 2**22
"""Of a matrix, which a thread reads and unpacks together."""


class DeviceWeights:
    """Copies weights to a device; those that are multiplied together become one."""

    def __init__(
        self, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device,
        quantize: Quantization | None = None, tied: Matrix | None = None, float8: Float8Use | None = None,
    ) -> None:  # fmt: skip
        """tensors:  by their names in the program; each is read when it is copied
        quantize: keep matrices as integers; those of the files need StoredWeights
        tied:     the matrix of a head that is the embedding
        float8:   counts FP8 matrices; without a problem, those of linears become `Float8Matrix`. None: none does
        """
        self.loaded: list[Tensor] = []
        self.matrices: list[Tensor | QuantizedMatrix | Float8Matrix] = []
        self._float8 = float8 or Float8Use()
        self._tensors, self._dtype, self.device = tensors, dtype, device
        self._quantize, self._tied = quantize, tied
        self._stored = kept_weights(tensors, quantize)
        self._tables: dict[Weight, Tensor | QuantizedMatrix] = {}

    def embedding(self, weight: Weight) -> Tensor | QuantizedMatrix:
        """[rows, columns] as it is looked up."""
        if weight not in self._tables:
            is_head, matrix = self._tied is not None and self._tied.parts == (weight,), Matrix((weight,))
            packing = self._packing([matrix], is_head=True) if is_head or self._stored is not None else None
            self._tables[weight] = self._matrix([matrix], packing)
        return self._tables[weight]

    def table(self, weight: Weight) -> Tensor:
        """[rows, columns] numbers"""
        return self._stacked([weight], self._dtype)

    def output_head(self, matrix: Matrix) -> Tensor | QuantizedMatrix:
        """The embedding if it is tied."""
        lm_head = self._tables.get(matrix.parts[0])
        if lm_head is None or len(matrix.parts) > 1:
            lm_head = self._matrix([matrix], self._packing([matrix], is_head=True))
        self.matrices.append(lm_head)
        return lm_head

    def linear(self, matrix: Matrix) -> tuple[Tensor | QuantizedMatrix | Float8Matrix, Tensor | None]:
        """A matrix [columns, depth], and its biases."""
        bias, packing = self._stacked(matrix.biases, self._dtype) if matrix.biases else None, self._packing([matrix])
        kind, found = "", None  # the kind of an FP8 matrix without products with activations rounded to FP8
        if packing is not None and packing.format == FP8:
            if packing.group < matrix.depth:
                kind = "with scales for blocks"
            elif not Float8Matrix.takes(matrix.columns, matrix.depth):
                kind = "whose sizes are no multiples of 16"
            elif not self._float8.problem:
                found = Float8Matrix.empty(matrix.columns, matrix.depth, self.device)
                self._fill_packed(found, matrix, FP8)
                self._float8.rounded += 1
                self.loaded += found
        self.matrices.append(self._matrix([matrix], packing, kind) if found is None else found)
        return self.matrices[-1], bias

    def router(self, matrix: Matrix) -> tuple[Tensor, Tensor | None]:
        """Likewise, as float32."""
        weight = self._stacked(matrix.parts, torch.float32)
        self.matrices.append(weight)
        return weight, self._stacked(matrix.biases, torch.float32) if matrix.biases else None

    def experts(self, matrices: Sequence[Matrix]) -> ExpertWeights:
        """One matrix of every expert."""
        first, weight = matrices[0], self._matrix(matrices, self._packing(matrices), "of experts", stacks=True)
        bias = self._empty(len(matrices), first.columns) if first.biases else None
        if bias is not None:
            for out, matrix in zip(bias, matrices, strict=True):
                self._fill(out, matrix.biases)
        self.matrices.append(weight)
        return ExpertWeights(weight, bias)

    def norm(self, norm: Norm) -> NormWeights:
        weight, bias = (self.vector(*part) if part else None for part in (norm.weight, norm.bias))
        return NormWeights(norm.kind, norm.eps, weight, bias)

    def head_norm(self, norm: Norm | None, dim: int) -> NormWeights:
        """Of heads of so many numbers; weights that are the same for all are kept once."""
        if norm is None:
            return _NO_NORM
        found = self.norm(norm)
        rows = [part.view(-1, dim) for part in (found.weight, found.bias) if part is not None]
        if any((part != part[0]).any() for part in rows):
            return found
        weight, bias = (None if part is None else part[:dim] for part in (found.weight, found.bias))
        return found._replace(weight=weight, bias=bias)

    def vector(self, *weights: Weight, factor: float = 1.0) -> Tensor:
        """Weights side by side, in float32."""
        sizes = [math.prod(weight.size) for weight in weights]
        out = torch.empty(sum(sizes), dtype=torch.float32, device=self.device)
        for part, weight in zip(torch.split(out, sizes), weights, strict=True):
            part.copy_(weight.read(self._tensors[weight.name]).flatten())
        self.loaded.append(out)
        return out if factor == 1 else out.mul_(factor)

    def decay(self, log: Weight) -> Tensor:
        """-exp of a weight, in float32."""
        return self.vector(log).exp_().neg_()

    def activation(self, activation: Activation) -> Activation:
        """With numbers as its parameters."""
        params = [
            float(one.read(self._tensors[one.name])) if isinstance(one, Weight) else one for one in activation.params
        ]
        return replace(activation, params=tuple(params))

    def indices(self, columns: Tensor) -> Tensor:
        return columns.to(self.device)

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        out = torch.empty(shape, dtype=dtype or self._dtype, device=self.device)
        self.loaded.append(out)
        return out

    def _stacked(self, weights: Sequence[Weight], dtype: torch.dtype) -> Tensor:
        out = self._empty(sum(weight.size[0] for weight in weights), *weights[0].size[1:], dtype=dtype)
        self._fill(out, weights)
        return out

    def _fill(self, out: Tensor, weights: Sequence[Weight]) -> None:
        """Copies weights below each other, each straight to its place on the device."""
        for part, weight in zip(torch.split(out, [weight.size[0] for weight in weights]), weights, strict=True):
            part.copy_(rows_of(self._tensors, weight, 0, weight.size[0]))

    def _packing(self, matrices: Sequence[Matrix], *, is_head: bool = False) -> Packing | None:
        return packing_of(matrices, self._quantize, self._stored, ON_GPU, is_head=is_head)

    def _matrix(
        self, matrices: Sequence[Matrix], packing: Packing | None, kind: str = "of embeddings and heads", *,
        stacks: bool = False,
    ) -> Tensor | QuantizedMatrix:  # fmt: skip
        """A matrix, or one of every expert.

        kind:   what it is said to be if it is FP8, whose activations are not rounded
        stacks: all matrices become one of three dimensions
        """
        columns, depth, count = matrices[0].columns, matrices[0].depth, len(matrices) if stacks else 0
        if packing is None:
            numbers = self._empty(len(matrices), columns, depth)
            for out, matrix in zip(numbers, matrices, strict=True):
                self._fill(out, matrix.parts)
            return numbers if stacks else numbers[0]
        if packing.format == FP8:
            self._float8.others[kind] += count or 1
        packed = QuantizedMatrix.empty(packing.format, columns, depth, self.device, count, packing.group)
        self.loaded += packed.tensors
        for number, matrix in enumerate(matrices):
            self._fill_packed(packed.expert(number) if stacks else packed, matrix, packing.format)
        return packed

    def _fill_packed(self, out: QuantizedMatrix | Float8Matrix, matrix: Matrix, format: int) -> None:
        """Reads and unpacks a matrix by several threads, a part of it at a time; or rounds it on the device."""
        step, column = max(1, _NUMBERS_AT_ONCE // matrix.depth), 0
        spans = [
            (weight, first, min(first + step, weight.size[0]))
            for weight in matrix.parts
            for first in range(0, weight.size[0], step)
        ]

        def read(span: tuple[Weight, int, int]) -> Integers:
            if self._stored is not None:
                return self._stored.packed([span], format)
            return quantized(rows_of(self._tensors, *span).to(self.device), format)

        with ThreadPoolExecutor(num_threads(), "cbatch-read") as executor:
            found = (map if self._stored is None else executor.map)(read, spans)
            for (_, first, stop), integers in zip(spans, found, strict=True):
                out.fill(column, integers.map(lambda part: part.to(self.device)))
                column += stop - first
