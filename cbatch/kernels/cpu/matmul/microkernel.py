"""The inner loop of every matrix product: a few rows times 32 columns, accumulated in registers.

The right-hand matrix lies in panels of 16 columns. For each step of the depth, a panel holds one vector: one number of
each of its columns in float32, two consecutive numbers in bfloat16, because there are instructions that multiply pairs.
The loop loads two such vectors and broadcasts one number (or pair) of each left-hand row. On a processor without these
instructions, left-hand rows are float32: only the vectors then have to be widened, each for all rows. Products with
quantized weights have loops of their own (`quantized.py`).

Each result is summed over the depth in the same order, whatever the other rows are: a row has the same result, to the
last bit, in every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.np.numpy_support import from_dtype

from cbatch.kernels.cpu.emit import (
    FLOAT,
    FLOATS,
    INT8,
    INT32,
    INT64,
    LIKE,
    PARTS,
    WORDS,
    Value,
    Variable,
    emitted,
    for_range,
    if_then,
    switch,
)
from cbatch.kernels.cpu.emit import LANES as LANES
from cbatch.kernels.cpu.jit import HAS_AVX512, HAS_BFLOAT16, Part, address_of, call_loop, kernel, shared

COLUMNS = 2 * LANES
"""Columns of a tile."""

ROW_COUNTS = (1, 2, 3, 4, 6, 8, 12) if HAS_AVX512 else (1, 2)
"""Numbers of rows that there is code for. The sums of the largest fill the registers that the columns leave."""

MAX_ROWS = max(ROW_COUNTS)

FIRST_CACHE, SECOND_CACHE = 3, 2
"""How near something is prefetched, for `llvm.prefetch`."""

FEW_ROWS = 6
"""Rows whose products take less time than reading the columns, so that both panels are prefetched."""

_AHEAD = 4096
"""Bytes that weights are prefetched ahead. Some processors read a sixth less a second without."""

_FETCHING_PASSES = 4
"""The most passes over a tile that share in prefetching the next one."""

_NUM_ARGUMENTS = 11
"""int64 arguments of the compiled loop: the fields of Rows, Panels and Rows, a count, and a flag."""


class Rows(NamedTuple):
    """Rows of a matrix: the address of the first, and the bytes from one to the next."""

    address: int | np.int64
    stride: int


class Panels(NamedTuple):
    """Two panels side by side, in runs that may lie anywhere.

    table:  address of [N, 4] int64, for each run the addresses of both panels, and of what is prefetched meanwhile
    run:    steps of a run
    stride: bytes from one step to the next
    depth:  steps in all; a step is one number in float32, a pair otherwise
    ahead:  bytes from what one step prefetches to what the next does
    """

    table: int | np.int64
    run: int
    stride: int
    depth: int
    ahead: int


class Ahead(NamedTuple):
    """The lines prefetched during a pass over a tile of weights.

    start:  bytes from the beginning of the tile
    stride: bytes that each step goes on
    """

    start: int
    stride: int


@shared
def prefetch_ahead(step_bytes: int, steps: int, number: int, passes: int) -> Ahead:
    """The lines that a pass over a tile prefetches. There is one for each block of rows.

    The first would read the tile from memory, for longer than its products take, while memory would be idle in all
    others. So if there are several, they share in prefetching the next tile.

    step_bytes, steps: of a tile
    """
    if passes == 1:
        return Ahead(_AHEAD, step_bytes)
    stride = step_bytes // min(passes, _FETCHING_PASSES)
    if number >= _FETCHING_PASSES:  # all of it has been
        return Ahead(0, stride)
    return Ahead((step_bytes + number * stride) * steps, stride)


def left_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type of left-hand rows for panels of float32 or uint16 (bfloat16)."""
    return dtype if HAS_BFLOAT16 else np.dtype(np.float32)


def pad_columns(columns: int) -> int:
    """The number of columns, rounded up to whole tiles."""
    return -(-columns // COLUMNS) * COLUMNS


class BFloat16(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite has no class for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat16)

    def __hash__(self) -> int:
        return hash(BFloat16)


_PAIRS = ir.VectorType(BFloat16(), 2 * LANES)


def read_broadcast(address: Value, kind: Any) -> Value:
    """A number from memory in all lanes."""
    return address.read(kind).broadcast()


@contextmanager
def row_sums(outs: list[Value], add: Value) -> Iterator[dict[tuple[int, int], Variable]]:
    """The sums of rows and panels, which are written to these rows at the end; they begin there if `add` is 1."""
    places = [(row, panel) for row in range(len(outs)) for panel in (0, 1)]
    sums = {place: Variable(add.constant(None, FLOATS)) for place in places}
    # Each pointer is made once: of two alike, the compiler would keep both.
    targets = {(row, panel): (outs[row] + panel * LANES * 4).pointer(FLOATS) for row, panel in places}
    with if_then(add.is_("!=", 0)):
        for place, target in targets.items():
            sums[place].value = Value(add.builder, add.builder.load(target, align=4))
    yield sums
    for place, target in targets.items():
        add.builder.store(sums[place].value.of, target, align=4)


def emit_for_rows(count: Value, row_counts: tuple[int, ...], emit: Callable[[int], None]) -> None:
    """Code for each number of rows that there is code for, and the choice among them: the least that suffices."""
    cases = {num_rows: partial(emit, num_rows) for num_rows in row_counts}
    numbers = range(1, max(row_counts) + 1)
    switch(count, {number: cases[min(each for each in row_counts if each >= number)] for number in numbers})


class _TileEmitter:
    """Emits the loop for one element type and one number of rows."""

    def __init__(self, element: Any, num_rows: int) -> None:
        self.is_float, self.num_rows = element == types.float32, num_rows
        self.step_bytes = 4 if self.is_float or HAS_BFLOAT16 else 8
        """Of a left-hand row: what is multiplied with one vector of a panel."""

    def weights(self, at: Value) -> list[Value]:
        """The part of a panel for `multiply_add`: one vector, or those of the first and second numbers of pairs."""
        if self.is_float or HAS_BFLOAT16:
            return [at.read(FLOATS if self.is_float else _PAIRS)]
        words = at.read(WORDS)
        return [(words << 16).bits(FLOATS), (words & 0xFFFF0000).bits(FLOATS)]

    def left(self, at: Value) -> list[Value]:
        """The same of a left-hand row, in all lanes."""
        if not self.is_float and HAS_BFLOAT16:
            return [read_broadcast(at, INT32).bits(_PAIRS)]
        return [read_broadcast(at + place, FLOAT) for place in range(0, self.step_bytes, 4)]

    def multiply_add(self, total: Value, left: list[Value], right: list[Value]) -> Value:
        for one, other in zip(left, right, strict=True):
            is_pairs = one.type == _PAIRS
            total = total.call("x86.avx512bf16.dpbf16ps.512", one, other) if is_pairs else one.fma(other, total)
        return total

    def emit(self, left: list[Value], panels: list[Value], out: list[Value], count: Value, add: Value) -> None:
        """Code for up to so many rows. If there are fewer, it computes the last one several times."""
        table, run, stride, depth, ahead = panels
        last = count - 1
        numbers = [last.constant(row) for row in range(self.num_rows)]
        numbers = [number.is_("<", last).choose(number, last) for number in numbers]
        outs, rows = ([start + stride * number for number in numbers] for start, stride in (out, left))
        slices = cgutils.for_range_slice(depth.builder, INT64(0), depth.of, run.of, inc=True)
        with row_sums(outs, add) as sums, slices as (at, index):
            first, number = (Value(depth.builder, each) for each in (at, index))
            rest = depth - first
            steps = rest.is_("<", run).choose(rest, run)
            where = [(table + (number * 32 + 8 * i)).read(INT64) for i in range(4)]
            self.emit_run(rows, where, first * self.step_bytes, steps, (stride, ahead), sums)

    def emit_run(
        self, rows: list[Value], places: list[Value], start: Value, steps: Value, strides: Any, sums: Any
    ) -> None:
        """Code for the steps of one run.

        places: of both panels, and of what is prefetched
        start:  bytes from the beginning of a left-hand row
        """
        panels, ahead = places[:2], places[2:]
        with for_range(steps) as step:
            there, (down, further) = start + step * self.step_bytes, (step * stride for stride in strides)
            if self.num_rows > FEW_ROWS:  # products take longer than reading
                emit_prefetch(ahead[0] + further)
            else:
                for place in ahead:
                    emit_prefetch(place + further, near=SECOND_CACHE)
            weights = [self.weights(panel + down) for panel in panels]
            for row, address in enumerate(rows):
                number = self.left(address + there)
                for panel in (0, 1):
                    total = sums[row, panel]
                    total.value = self.multiply_add(total.value, number, weights[panel])


@emitted(types.void, LIKE, PARTS, PARTS, PARTS, types.int64, types.int64)
def _emit_tile(like: Any, left: Any, panels: Any, out: Any, count: Value, add: Value) -> None:
    """The loop for each number of rows there is code for, and the choice among them."""
    emit_for_rows(count, ROW_COUNTS, lambda rows: _TileEmitter(like, rows).emit(left, panels, out, count, add))


# Called by its address, which passes numbers only.
def _tile_loop(
    like: Any, left: int, left_stride: int, table: int, run: int, stride: int, depth: int, ahead: int, out: int,
    out_stride: int, count: int, add: int,
) -> None:  # fmt: skip
    _emit_tile(like, (left, left_stride), (table, run, stride, depth, ahead), (out, out_stride), count, add)


@cache
def microkernel_address(dtype: np.dtype[Any]) -> int:
    """The address of the loop for right-hand matrices of float32 or uint16 (bfloat16).

    It is compiled by itself: as a part of each kernel that calls it, it would be compiled that often.
    """
    return address_of(Part(_tile_loop, types.void(from_dtype(dtype), *[types.int64] * _NUM_ARGUMENTS)))


@kernel
def multiply_tile(microkernel: int, like: Any, left: Rows, panels: Panels, out: Rows, count: int, add: int) -> None:
    """out [count, 32] float32 = left [count, depth] times two panels; added to `out` if `add` is 1.

    microkernel: see `microkernel_address`
    like:        an element of the right-hand matrix
    left:        of `left_dtype`
    count:       rows, 1 to MAX_ROWS
    """
    where = left.address, left.stride, panels.table, panels.run, panels.stride, panels.depth, panels.ahead
    call_loop(microkernel, (like, *where, out.address, out.stride, count, add))


def emit_prefetch(address: Value, *, near: int = FIRST_CACHE, writes: bool = False) -> None:
    """Prefetches the cache line at an address."""
    pointer = Value(address.builder, address.pointer(INT8))
    pointer.call("prefetch.p0", INT32(int(writes)), INT32(near), INT32(1), result=ir.VoidType())


@emitted(types.void, types.int64)
def prefetch(address: Value) -> None:
    """Prefetches the cache line at an address."""
    emit_prefetch(address)


@emitted(types.void, types.int64)
def prefetch_to_write(address: Value) -> None:
    """Prefetches the cache line at an address, which will be written."""
    emit_prefetch(address, writes=True)
