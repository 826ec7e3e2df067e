"""The inner loop of products in bfloat16 by the processor's matrix unit (Intel AMX): up to 128 rows times 32 columns.

It takes the panels of `microkernel.py`, whose pairs lie as the unit wants them. 32 rows are multiplied at once: for
each 32 numbers of the depth, it loads two tiles of 16 rows and two of 16 columns, and adds four products. A row's sum
does not depend on the other rows: pairs are added within 32 numbers first, then these in the order of the depth. That
is another order than that of the vector units, so on a processor with such a unit, products of one row are computed by
it, too.

The tile registers are not released: that took as long as ten products, and the system only saves them when a thread is
interrupted.

Source: Intel Architecture Instruction Set Extensions Programming Reference, chapter “Intel AMX”.
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.np.numpy_support import from_dtype

from cbatch.kernels.cpu.jit import FEATURES, PARTS, Part, address_of, emitted
from cbatch.kernels.cpu.matmul.microkernel import LANES, emit_prefetch

ROWS_AT_ONCE = 2 * LANES

MAX_ROWS = 4 * ROWS_AT_ONCE
"""Rows of a call: setting the sizes of the tiles takes as long as ten products."""

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
"""Numbers of Linux: the system call, what is asked, and for which registers."""

_INT8, _INT16, _INT64 = ir.IntType(8), ir.IntType(16), ir.IntType(64)
_PAIRS = LANES
"""Pairs of numbers along the depth that are multiplied at once."""
_TILE_BYTES = 4 * LANES
"""Bytes of a row of a tile: 16 float32, or 16 pairs."""
_SUMS, _LEFT, _RIGHT = ((0, 1), (2, 3)), (4, 5), (6, 7)
"""Numbers of the tile registers, by row and column of the result."""


@cache
def has_amx() -> bool:
    """Whether the processor has the unit, and the system lets this process use its registers.

    Linux gives them to a process that asks; all its threads have them then.
    """
    if not {"amx-tile", "amx-bf16"} <= FEATURES or platform.system() != "Linux":
        return False
    return int(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)) == 0


class _Emitter:
    """Emits code for groups of rows, of one or two tiles each."""

    def __init__(self, builder: Any, row_tiles: int) -> None:
        self.builder = builder
        self.row_tiles = row_tiles
        self.config = cgutils.alloca_once(builder, ir.ArrayType(_INT8, 64))

    def call(self, name: str, *arguments: Any) -> None:
        kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
        self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.x86.{name}"), arguments)

    def pointer(self, address: Any) -> Any:
        return self.builder.inttoptr(address, _INT8.as_pointer())

    def load(self, tile: int, address: Any, stride: Any) -> None:
        self.call("tileloadd64", _INT8(tile), self.pointer(address), stride)

    def configure(self, rows: list[Any], pairs: Any) -> None:
        """Sets the sizes of all tiles: these rows, and so many pairs along the depth. It clears the tiles."""
        builder, start = self.builder, self.builder.ptrtoint(self.config, _INT64)
        self.builder.store(ir.Constant(ir.ArrayType(_INT8, 64), None), self.config)
        shapes = {tile: (_INT64(_TILE_BYTES), pairs) for tile in _RIGHT}
        for number, count in enumerate(rows):
            shapes[_LEFT[number]] = builder.mul(pairs, _INT64(4)), count
            shapes |= {tile: (_INT64(_TILE_BYTES), count) for tile in _SUMS[number]}
        builder.store(_INT8(1), self.pointer(start))
        for tile, (width, height) in shapes.items():
            there = builder.inttoptr(builder.add(start, _INT64(16 + 2 * tile)), _INT16.as_pointer())
            builder.store(builder.trunc(width, _INT16), there)
            builder.store(builder.trunc(height, _INT8), self.pointer(builder.add(start, _INT64(48 + tile))))
        self.call("ldtilecfg", self.pointer(start))

    def emit(
        self, left: tuple[Any, Any], panels: tuple[Any, ...], out: tuple[Any, Any], rows: list[Any], groups: Any,
        add: Any,
    ) -> None:  # fmt: skip
        """Multiplies groups of rows. rows: of each tile of a group"""
        (table, _, stride, depth), builder = panels, self.builder
        columns = [
            builder.load(builder.inttoptr(builder.add(table, _INT64(8 * panel)), _INT64.as_pointer()))
            for panel in (0, 1)
        ]
        whole, rest = builder.udiv(depth, _INT64(_PAIRS)), builder.urem(depth, _INT64(_PAIRS))
        parts = (_INT64(0), whole, _INT64(_PAIRS), add), (whole, _INT64(1), rest, builder.or_(add, whole))
        for (first, blocks, pairs, adds), is_there in zip(parts, (whole, rest), strict=True):
            with builder.if_then(builder.icmp_signed(">", is_there, _INT64(0))):
                self.configure(rows, pairs)
                with cgutils.for_range(builder, groups) as loop:
                    is_first = builder.icmp_signed("==", loop.index, _INT64(0))
                    there = [
                        (builder.add(address, builder.mul(loop.index, builder.mul(width, _INT64(ROWS_AT_ONCE)))), width)
                        for address, width in (left, out)
                    ]
                    self.multiply(there[0], columns, stride, there[1], first, blocks, adds, is_first)

    def multiply(
        self, left: tuple[Any, Any], columns: list[Any], stride: Any, out: tuple[Any, Any], first: Any, blocks: Any,
        add: Any, fetches: Any,
    ) -> None:  # fmt: skip
        """Multiplies so many blocks of the depth; added to what is in `out` unless `add` is 0.

        fetches: whether to ask for the columns of the next block
        """
        builder, numbers = self.builder, range(self.row_tiles)
        (left_address, left_stride), (out_address, out_stride) = left, out
        rows = [builder.add(left_address, builder.mul(left_stride, _INT64(LANES * number))) for number in numbers]
        places = {
            _SUMS[number][panel]: builder.add(
                out_address,
                builder.add(builder.mul(out_stride, _INT64(LANES * number)), _INT64(panel * _TILE_BYTES)),
            )
            for number in numbers
            for panel in (0, 1)
        }
        with builder.if_else(builder.icmp_signed("!=", add, _INT64(0))) as (adds, begins):
            with adds:
                for tile, place in places.items():
                    self.load(tile, place, out_stride)
            with begins:
                for tile in places:
                    self.call("tilezero", _INT8(tile))
        with cgutils.for_range(builder, blocks) as loop:
            block = builder.add(first, loop.index)
            along = builder.mul(block, _INT64(_TILE_BYTES))
            down = builder.mul(block, builder.mul(stride, _INT64(_PAIRS)))
            with builder.if_then(fetches):
                coming = builder.add(columns[0], builder.add(down, builder.mul(stride, _INT64(_PAIRS))))
                for line in range(2 * _PAIRS):  # both panels of a block lie side by side
                    emit_prefetch(builder, builder.add(coming, _INT64(64 * line)))
            for panel in (0, 1):
                self.load(_RIGHT[panel], builder.add(columns[panel], down), stride)
            for number in numbers:
                self.load(_LEFT[number], builder.add(rows[number], along), left_stride)
                for panel in (0, 1):
                    tiles = _SUMS[number][panel], _LEFT[number], _RIGHT[panel]
                    self.call("tdpbf16ps", *(_INT8(tile) for tile in tiles))
        for tile, place in places.items():
            self.call("tilestored64", _INT8(tile), self.pointer(place), out_stride)


@emitted(types.void, PARTS, PARTS, PARTS, types.int64, types.int64)
def _emit_loop(builder: Any, left: Any, panels: Any, out: Any, count: Any, add: Any) -> None:
    groups = builder.udiv(count, _INT64(ROWS_AT_ONCE))
    done = builder.mul(groups, _INT64(ROWS_AT_ONCE))
    rest = builder.sub(count, done)
    with builder.if_then(builder.icmp_signed(">", groups, _INT64(0))):
        _Emitter(builder, 2).emit(left, panels, out, [_INT64(LANES)] * 2, groups, add)
    with builder.if_then(builder.icmp_signed(">", rest, _INT64(0))):
        there = [(builder.add(address, builder.mul(done, width)), width) for address, width in (left, out)]
        with builder.if_else(builder.icmp_signed(">", rest, _INT64(LANES))) as (many, few):
            with many:
                rows = [_INT64(LANES), builder.sub(rest, _INT64(LANES))]
                _Emitter(builder, 2).emit(there[0], panels, there[1], rows, _INT64(1), add)
            with few:
                _Emitter(builder, 1).emit(there[0], panels, there[1], [rest], _INT64(1), add)


# Called by its address, like the loops of `microkernel.py`.
def _amx_loop(
    like: Any, left: int, left_stride: int, table: int, run: int, stride: int, depth: int, ahead: int, out: int,
    out_stride: int, count: int, add: int,
) -> None:  # fmt: skip
    _emit_loop((left, left_stride), (table, run, stride, depth), (out, out_stride), count, add)


@cache
def amx_address() -> int:
    """The address of the loop, which is called as that of `microkernel_address` for bfloat16 is, for MAX_ROWS at most.

    All of a panel has to lie in one run.
    """
    return address_of(Part(_amx_loop, types.void(from_dtype(np.dtype(np.uint16)), *[types.int64] * 11)))
