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

from llvmlite import ir
from numba import types

from cbatch.kernels.cpu.emit import INT8, INT16, INT64, LANES, PARTS, Value, Variable, emitted, for_range, if_then
from cbatch.kernels.cpu.instruction_sets import CHOSEN
from cbatch.kernels.cpu.jit import loop_address
from cbatch.kernels.cpu.matmul.microkernel import emit_prefetch

ROWS_AT_ONCE = 2 * LANES

MAX_ROWS = 4 * ROWS_AT_ONCE
"""Rows of a call: setting the sizes of the tiles takes as long as ten products."""

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
"""Numbers of Linux: the system call, what is asked, and for which registers."""

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
    if not CHOSEN.has_amx or platform.system() != "Linux":
        return False
    return int(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)) == 0


def _call(name: str, like: Value, *arguments: Any) -> None:
    """Calls an instruction of the unit. arguments: addresses, values, and numbers of tiles"""
    first, *others = (like.constant(each, INT8) if isinstance(each, int) else each for each in arguments)
    first.call(f"x86.{name}", *others, result=ir.VoidType())


def _load(tile: int, address: Value, stride: Value) -> None:
    _call("tileloadd64", stride, tile, _pointer(address), stride)


def _pointer(address: Value) -> Value:
    return Value(address.builder, address.pointer(INT8))


def _configure(config: Variable, rows: list[Value], pairs: Value) -> None:
    """Sets the sizes of all tiles: these rows, and so many pairs along the depth. It clears the tiles."""
    start, width = config.address, pairs.constant(_TILE_BYTES)
    config.value = pairs.constant(None, ir.ArrayType(INT8, 64))
    shapes = dict.fromkeys(_RIGHT, (width, pairs))
    for number, count in enumerate(rows):
        shapes[_LEFT[number]] = pairs * 4, count
        shapes |= dict.fromkeys(_SUMS[number], (width, count))
    start.write(pairs.constant(1, INT8))
    for tile, (columns, height) in shapes.items():
        (start + (16 + 2 * tile)).write(columns.to("trunc", INT16))
        (start + (48 + tile)).write(height.to("trunc", INT8))
    _call("ldtilecfg", start, _pointer(start))


def _emit_groups(left: Any, panels: Any, out: Any, rows: list[Value], groups: Value, add: Value) -> None:
    """Multiplies groups of rows, of one or two tiles each. rows: of each tile of a group"""
    table, _, stride, depth, _ = panels
    config = Variable(groups.constant(None, ir.ArrayType(INT8, 64)))
    columns = [(table + 8 * panel).read(INT64, align=8) for panel in (0, 1)]
    whole, rest, nothing = depth // _PAIRS, depth % _PAIRS, depth.constant(0)
    parts = (nothing, whole, depth.constant(_PAIRS), add), (whole, depth.constant(1), rest, add | whole)
    for (first, blocks, pairs, adds), is_there in zip(parts, (whole, rest), strict=True):
        with if_then(is_there.is_(">", 0)):
            _configure(config, rows, pairs)
            with for_range(groups) as group:
                one, other = ((address + group * (width * ROWS_AT_ONCE), width) for address, width in (left, out))
                _emit_blocks(one, columns, stride, other, len(rows), first, blocks, adds, group.is_("==", 0))


def _emit_blocks(
    left: Any, columns: list[Value], stride: Value, out: Any, row_tiles: int, first: Value, blocks: Value, add: Value,
    fetches: Value,
) -> None:  # fmt: skip
    """Multiplies so many blocks of the depth; added to what is in `out` unless `add` is 0.

    fetches: whether to ask for the columns of the next block
    """
    (left_address, left_stride), (out_address, out_stride), numbers = left, out, range(row_tiles)
    rows = [left_address + left_stride * left_stride.constant(LANES * number) for number in numbers]
    places = {
        _SUMS[number][panel]: out_address + (out_stride * (LANES * number) + panel * _TILE_BYTES)
        for number in numbers
        for panel in (0, 1)
    }
    with add.builder.if_else(add.is_("!=", 0).of) as (adds, begins):
        with adds:
            for tile, place in places.items():
                _load(tile, place, out_stride)
        with begins:
            for tile in places:
                _call("tilezero", add, tile)
    with for_range(blocks) as index:
        block = first + index
        along, down = block * _TILE_BYTES, block * (stride * _PAIRS)
        with if_then(fetches):
            coming = columns[0] + (down + stride * _PAIRS)
            for line in range(2 * _PAIRS):  # both panels of a block lie side by side
                emit_prefetch(coming + 64 * line)
        for panel in (0, 1):
            _load(_RIGHT[panel], columns[panel] + down, stride)
        for number in numbers:
            _load(_LEFT[number], rows[number] + along, left_stride)
            for panel in (0, 1):
                _call("tdpbf16ps", add, _SUMS[number][panel], _LEFT[number], _RIGHT[panel])
    for tile, place in places.items():
        _call("tilestored64", add, tile, _pointer(place), out_stride)


@emitted(types.void, PARTS)
def _emit_loop(numbers: Any) -> None:
    left, panels, out, (count, add) = numbers[:2], numbers[2:7], numbers[7:9], numbers[9:]
    groups, lanes = count // ROWS_AT_ONCE, count.constant(LANES)
    done = groups * ROWS_AT_ONCE
    rest = count - done
    with if_then(groups.is_(">", 0)):
        _emit_groups(left, panels, out, [lanes, lanes], groups, add)
    with if_then(rest.is_(">", 0)):
        there, one = [(address + done * width, width) for address, width in (left, out)], count.constant(1)
        with count.builder.if_else(rest.is_(">", LANES).of) as (many, few):
            with many:
                _emit_groups(there[0], panels, there[1], [lanes, rest - LANES], one, add)
            with few:
                _emit_groups(there[0], panels, there[1], [rest], one, add)


def _amx_loop(numbers: Any) -> None:
    _emit_loop(numbers)


@cache
def amx_address() -> int:
    """The address of the loop, which is called as that of `microkernel_address` for bfloat16 is, for MAX_ROWS at most.

    All of a panel has to lie in one run.
    """
    return loop_address(_amx_loop, 11)
