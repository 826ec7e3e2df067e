"""Products with the matrices of LoRA adapters: of all adapters of a step at once, in two launches for each linear.

Rows come in the order of their adapters. A program takes a tile of them, and multiplies it once for each adapter that
has a row there; so a tile of one adapter reads its matrices once, and one without any ends at once.

The first product is cut along the depth, since there are few ranks to share among multiprocessors; the second adds the
parts in their order. Cuts and orders depend on nothing but the sizes of the matrices, so a row's bits depend on nothing
but the row, as long as tiles have one size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbatch.kernels.operands import ADAPTED_COLUMNS, AdapterRows, AdapterWeights
from cbatch.kernels.triton.attention_tile import LAUNCH
from cbatch.kernels.triton.linear import has_no_units

_MOST_DEPTH = 1024
"""Of a part."""
_FEW_ROWS = 128
_MOST_RANKS = 64
"""That a program has at once."""


@triton.jit
def _slots_of(numbers, slots, place, rows):
    """Which matrices the rows at these places have; -1 for none."""
    return tl.load(slots + tl.load(numbers + place, mask=place < rows, other=0))


@triton.jit(do_not_specialize=["rows"])
def _shrink_kernel(
    source, order, numbers, slots, down, out, rows, RANKS: tl.constexpr, DEPTH: tl.constexpr, PART: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One program per tile of rows, `WIDTH` ranks, and part of the depth.  out: [parts, rows, RANKS] float32"""
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = _slots_of(numbers, slots, place, rows)
    current = tl.max(slot, 0)
    if current < 0:
        return
    row = tl.load(order + place, mask=place < rows, other=0).to(tl.int64)
    rank, step = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH), tl.arange(0, STEP)
    begin = tl.program_id(2) * PART
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    left = slot
    while current >= 0:
        mine = left == current
        product = tl.zeros([ROWS, WIDTH], tl.float32)
        for start in range(0, PART, STEP):
            depth = begin + start + step
            within = (depth < DEPTH)[None, :]
            a = tl.load(source + row[:, None] * DEPTH + depth[None, :], mask=mine[:, None] & within, other=0.0)
            right = down + (current.to(tl.int64) * RANKS + rank)[:, None] * DEPTH + depth[None, :]
            b = tl.load(right, mask=within, other=0.0)
            product = tl.dot(a, tl.trans(b), product, input_precision="ieee")
        total = tl.where(mine[:, None], product, total)
        left = tl.where(mine, -1, left)
        current = tl.max(left, 0)
    to = out + (tl.program_id(2) * rows + place)[:, None] * RANKS + rank[None, :]
    tl.store(to, total, mask=(slot >= 0)[:, None])


@triton.jit(do_not_specialize=["rows"])
def _expand_kernel(
    inner, order, numbers, slots, up, tiles, out, rows, out_stride, RANKS: tl.constexpr, COLUMNS: tl.constexpr,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program per tile of rows and tile of columns.  inner: [PARTS, rows, RANKS]; WIDTH: ranks of a column"""
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = _slots_of(numbers, slots, place, rows)
    current = tl.max(slot, 0)
    if current < 0:
        return
    tile, step = tiles + tl.program_id(1) * 3, tl.arange(0, STEP)
    column = tl.load(tile) + tl.arange(0, TILE)
    inside = column < tl.load(tile + 1)
    from_ = inner + place[:, None] * RANKS + tl.load(tile + 2)
    row = tl.load(order + place, mask=place < rows, other=0).to(tl.int64)
    to = out + row[:, None] * out_stride + column[None, :]
    kept = (slot >= 0)[:, None] & inside[None, :]
    total = tl.load(to, mask=kept, other=0.0).to(tl.float32)
    left = slot
    while current >= 0:
        mine = left == current
        product = tl.zeros([ROWS, TILE], tl.float32)
        for first in range(0, WIDTH, STEP):
            rank = first + step
            a = tl.zeros([ROWS, STEP], tl.float32)
            for part in range(PARTS):
                a += tl.load(from_ + part * rows * RANKS + rank[None, :], mask=mine[:, None], other=0.0)
            right = up + (current.to(tl.int64) * COLUMNS + column)[:, None] * WIDTH + rank[None, :]
            b = tl.load(right, mask=inside[:, None], other=0.0)
            product = tl.dot(a.to(b.dtype), tl.trans(b), product, input_precision="ieee")
        total = tl.where(mine[:, None], total + product, total)
        left = tl.where(mine, -1, left)
        current = tl.max(left, 0)
    tl.store(to, total.to(out.dtype.element_ty), mask=kept)


def add_adapters(
    source: Tensor, rows: AdapterRows, weights: AdapterWeights, out: Tensor, *, capability: int, batch_invariant: bool
) -> None:
    """See `model/lora/device.py`.  capability: of the chip, 90 for 9.0"""
    (count, depth), (_, ranks, _) = source.shape, weights.down.shape
    _, columns, width = weights.up.shape
    slow = has_no_units(source.dtype, capability)
    tile = 16 if slow or count <= _FEW_ROWS or batch_invariant else 64
    at_once, step = min(width, 16 if slow else _MOST_RANKS), 32 if slow else 64
    part = min(-(-depth // step) * step, _MOST_DEPTH)
    parts = -(-depth // part)
    inner = torch.empty(parts, count, ranks, dtype=torch.float32, device=source.device)
    given = rows.order, rows.numbers, weights.slots
    _shrink_kernel[(-(-count // tile), ranks // at_once, parts)](
        source, *given, weights.down, inner, count, ranks, depth, part, tile, at_once, step, num_warps=4, **LAUNCH
    )
    _expand_kernel[(-(-count // tile), len(weights.tiles))](
        inner, *given, weights.up, weights.tiles, out, count, out.stride(0), ranks, columns, parts, width, tile,
        at_once, ADAPTED_COLUMNS, num_warps=4, **LAUNCH,
    )  # fmt: skip
