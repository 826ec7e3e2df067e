"""Arguments of operations on a device beside plain tensors."""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

from cbatch.kernels.quantized_matrix import QuantizedMatrix


class NormForm(NamedTuple):
    """The part of a norm that a kernel is compiled for; see `NormWeights`."""

    kind: str
    eps: float


class NormWeights(NamedTuple):
    """A norm of rows of a number of columns, in float32.

    kind:         RMSNorm (Zhang and Sennrich, 2019), LayerNorm (Ba et al., 2016), or none
    weight, bias: [columns] float32; None for 1 and 0. Of heads also [heads * columns], for each its own
    """

    kind: Literal["none", "rms", "layer"]
    eps: float = 0.0
    weight: Tensor | None = None
    bias: Tensor | None = None

    @property
    def form(self) -> NormForm:
        return NormForm(self.kind, self.eps)


class Embedding(NamedTuple):
    """scale * table[token id] + positions[position + offset].

    table:     [vocabulary, columns]
    positions: [positions, columns], or None
    """

    table: Tensor
    scale: float = 1.0
    positions: Tensor | None = None
    offset: int = 0


class Addend(NamedTuple):
    """factor * norm(value), which is added to the residual.  value: [T, hidden]"""

    value: Tensor
    factor: float = 1.0
    norm: NormWeights | None = None


class Positions(NamedTuple):
    """Where the T tokens of a step stand.

    cosines, sines: [T, rotary_dim / 2] float32, of their rotary angles; None if nothing is rotated
    slots:          [T] places in the cache; a token with a negative slot is not stored
    query_scales:   [T] float32 factors of the queries, or None
    """

    cosines: Tensor | None
    sines: Tensor | None
    slots: Tensor
    query_scales: Tensor | None = None


class Routing(NamedTuple):
    """Which experts the T tokens of a step go to. Pairs of a token and an expert are sorted by expert.

    weights: [T, top_k] float32
    places:  [T, top_k] where each pair stands among the sorted ones
    order:   [T * top_k] which pair, token * top_k + k, stands at each place
    counts:  [experts] pairs of each expert
    """

    weights: Tensor
    places: Tensor
    order: Tensor
    counts: Tensor


class ExpertWeights(NamedTuple):
    """One matrix of every expert.  weight: [experts, columns, depth]; bias: [experts, columns], or None"""

    weight: Tensor | QuantizedMatrix
    bias: Tensor | None


class Recurrence(NamedTuple):
    """Where the S chunks of a step have their states (see `StepStates`).

    starts:          [S + 1] int32, first row of each chunk, and T
    slots:           [S] int32; a chunk with a negative slot is padding: its rows are undefined, nothing is kept
    snapshot_counts: [S] int32, number of the chunk's tokens after which its state is copied
    snapshot_slots:  [S] int32, where to; negative if it is not
    longest:         tokens of the longest chunk; 1 in a step that only decodes
    """

    starts: Tensor
    slots: Tensor
    snapshot_counts: Tensor
    snapshot_slots: Tensor
    longest: int


ADAPTED_COLUMNS = 64
"""Columns of a tile of `AdapterWeights`."""


class AdapterWeights(NamedTuple):
    """LoRA adapters, each of which adds to the product of a matrix [columns, depth] by two matrices of low rank.

    slots:  [adapters + 1] int32, which matrices the adapter of each number has; -1 for none, as number 0
    down:   [slots, ranks, depth], and up: [slots, columns, width], both zero where an adapter has a lower rank
    ranges: first column, the one after the last, and first of the `width` ranks that are added to these columns
    tiles:  [N, 3] int32, the ranges in pieces of at most `ADAPTED_COLUMNS` columns
    """

    slots: Tensor
    down: Tensor
    up: Tensor
    ranges: tuple[tuple[int, int, int], ...]
    tiles: Tensor


class AdapterRows(NamedTuple):
    """The T tokens of a step by their adapters, those without one last.

    order:   [T] int32, rows of the step
    numbers: [T] int32, number of the adapter of each from 1 on, or 0
    """

    order: Tensor
    numbers: Tensor
