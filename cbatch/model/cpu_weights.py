"""Tiles of matrices in the packed formats of the CPU's kernels."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from cbatch.kernels.cpu.matmul.formats import is_quantized, pack_integers, pack_weight
from cbatch.kernels.cpu.matmul.microkernel import COLUMNS, LANES
from cbatch.kernels.cpu.tensors import as_array
from cbatch.kernels.formats import quantized
from cbatch.model.stored import StoredWeights
from cbatch.model.weight import Matrix, Weight


def packed_columns(
    matrix: Matrix, tensors: Mapping[str, Tensor], format: int, dtype: torch.dtype, depth: int, first: int, stop: int,
    *, is_gated: bool, keeps_stored: bool,
) -> NDArray[np.uint8]:  # fmt: skip
    """Some columns of a matrix as packed bytes, whole tiles of them.

    dtype:    numbers are rounded to it before they are packed, or rounded to integers
    depth:    padded to so many
    is_gated: columns are those of gate and up, in the order of `interleaved`
    keeps_stored: tensors are StoredWeights whose integers are taken as they are
    """
    spans = [(first, stop)]
    if is_gated:
        half = matrix.columns // 2
        spans = [(first // 2 + up, min(stop // 2, half) + up) for up in (0, half)]
    parts = [part for span in spans for part in _part_rows(matrix, *span)]

    def ordered(rows: Tensor) -> Tensor:
        return interleaved(rows) if is_gated else rows

    if keeps_stored and is_quantized(format):
        assert isinstance(tensors, StoredWeights)
        integers = tensors.packed(parts, format).map(ordered)
    else:
        read = [_rows(tensors, *part) for part in parts]
        rows = ordered(torch.cat(read) if len(read) > 1 else read[0]).to(dtype)
        if not is_quantized(format):
            return pack_weight(as_array(rows), depth)
        integers = quantized(rows, format)
    return pack_integers(format, integers, depth)


def _part_rows(matrix: Matrix, first: int, stop: int) -> list[tuple[Weight, int, int]]:
    """The parts of a matrix that have some of its columns, and which rows these are of each."""
    parts, begin = [], 0
    for part in matrix.parts:
        end = begin + part.size[0]
        if first < end and begin < stop:
            parts.append((part, max(first - begin, 0), min(stop, end) - begin))
        begin = end
    return parts


def _rows(tensors: Mapping[str, Tensor], weight: Weight, first: int, stop: int) -> Tensor:
    if isinstance(tensors, StoredWeights):
        return tensors.rows(weight, first, stop)
    return weight.read(tensors[weight.name])[first:stop]


def gated_columns(columns: int) -> int:
    """Columns of gate and up, once both are padded to whole halves of tiles."""
    return 2 * -(-columns // COLUMNS) * LANES


def interleaved(both: Tensor) -> Tensor:
    """Gate and up, one after the other, as 16 columns of each in turn: a tile has both factors of 16 results."""
    halves = both.view(2, -1, both.shape[1])
    padded = pad(halves, (0, 0, 0, -halves.shape[1] % LANES))
    return padded.view(2, -1, LANES, both.shape[1]).transpose(0, 1).reshape(-1, both.shape[1])
