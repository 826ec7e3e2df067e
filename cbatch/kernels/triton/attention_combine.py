"""Merges the partial results of sequences that are split, whichever kernel has computed them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbatch.kernels.triton.attention_metadata import AttentionMetadata
from cbatch.kernels.triton.attention_tile import LAUNCH, first_seen, power_of_2

CHUNK = 16
"""Partial results that are merged at once."""


class Partials(NamedTuple):
    """Partial results of tokens [P], see `AttentionMetadata.sequences`.

    results  [P, query heads, value_dim] float32
    sums     [P, query heads] float32, logarithms to base 2 of the sums of weights
    """

    results: Tensor
    sums: Tensor

    @classmethod
    def empty(cls, metadata: AttentionMetadata, out: Tensor, window: int | None) -> Partials:
        """Room for the partial results of a layer; none if no sequence can have several splits in its window."""
        decode = metadata.decode
        split = metadata.prefill is not None or (decode is not None and decode.levels(window) > 1)
        shape = metadata.partials if split else 0, *out.shape[1:]
        return cls(out.new_empty(shape, dtype=torch.float32), out.new_empty(shape[:2], dtype=torch.float32))


def combine(out: Tensor, parts: Partials, metadata: AttentionMetadata, options: dict[str, Any]) -> None:
    """Writes the rows of out [T, query heads, value_dim] that have partial results, and no other rows."""
    if not len(parts.results):
        return
    heads, value_dim = out.shape[1:]
    _combine_kernel[(len(metadata.merges), heads)](
        out, *parts, metadata.sequences, metadata.merges, options["window"], HAS_WINDOW=options["HAS_WINDOW"],
        IS_CHUNKED=options["IS_CHUNKED"],
        HEADS=heads, VALUE_DIM=value_dim, VALUE_TILE=max(16, power_of_2(value_dim)), CHUNK=CHUNK, **LAUNCH,
    )  # fmt: skip


@triton.jit(do_not_specialize=["window"])
def _combine_kernel(
    out: tl.tensor, partials: tl.tensor, sums: tl.tensor, sequences: tl.tensor, merges: tl.tensor, window: tl.tensor,
    HAS_WINDOW: tl.constexpr, IS_CHUNKED: tl.constexpr, HEADS: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_TILE: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """Merges the splits that one token sees, for one head, in their order.

    If the window of the sequence's tokens lies in one split, they have their results already.
    """
    merge, head = merges + tl.program_id(0) * 2, tl.program_id(1)
    number, token = tl.load(merge), tl.load(merge + 1)
    if number < 0:
        return
    sequence = sequences + number * 6
    length, count, size = tl.load(sequence + 1), tl.load(sequence + 2), tl.load(sequence + 4)
    begin = first_seen(length - count, window, IS_CHUNKED) if HAS_WINDOW else 0
    if begin // size < tl.maximum(length - 1, 0) // size:
        limit = length - count + 1 + token
        first = first_seen(limit - 1, window, IS_CHUNKED) // size if HAS_WINDOW else 0
        last = (limit - 1) // size
        column = tl.arange(0, VALUE_TILE)
        acc = tl.zeros([VALUE_TILE], tl.float32)
        largest, total = float("-inf"), 0.0
        base = tl.load(sequence + 5).to(tl.int64) + token
        for place in range(first, last + 1, CHUNK):
            split = place + tl.arange(0, CHUNK)
            row = (base + split * count) * HEADS + head
            weight = tl.load(sums + row, mask=split <= last, other=float("-inf"))
            kept = (split <= last)[:, None] & (column < VALUE_DIM)[None, :]
            part = tl.load(partials + row[:, None] * VALUE_DIM + column[None, :], mask=kept, other=0.0)
            peak = tl.maximum(largest, tl.max(weight, 0))
            weight = tl.exp2(weight - peak)
            fade = tl.exp2(largest - peak)
            acc = acc * fade + tl.sum(part * weight[:, None], 0)
            total = total * fade + tl.sum(weight, 0)
            largest = peak
        there = out + ((tl.load(sequence) + token).to(tl.int64) * HEADS + head) * VALUE_DIM + column
        tl.store(there, (acc / total).to(out.dtype.element_ty), mask=column < VALUE_DIM)
