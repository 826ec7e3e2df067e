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

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import product, zip_longest
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from cbatch.kernels.cpu.emit import (
    FLOAT,
    FLOATS,
    INT8,
    INT32,
    INT64,
    LINE,
    LITERAL,
    PARTS,
    WORDS,
    Place,
    Value,
    Variable,
    deinterleave,
    emitted,
    for_range,
    if_then,
    interleave,
    switch,
)
from cbatch.kernels.cpu.emit import LANES as LANES
from cbatch.kernels.cpu.instruction_sets import CHOSEN
from cbatch.kernels.cpu.jit import call_loop, kernel, loop_address, shared
from cbatch.kernels.cpu.matmul.instructions import BFLOATS, add_bfloat16, add_squares

COLUMNS = 2 * LANES
"""Columns of a tile."""

MAX_ROWS = CHOSEN.rows(panels=2 if CHOSEN.lanes == LANES else 1)
"""Rows whose sums fill the registers that the columns leave. Where registers are short, panels come one by one."""

ROW_COUNTS = tuple(rows for rows in (1, 2, 3, 4, 6, 8, 12) if rows <= MAX_ROWS)
"""Numbers of rows that there is code for."""

FIRST_CACHE, SECOND_CACHE = 3, 2
"""How near something is prefetched, for `llvm.prefetch`."""

_ROWS_WITHOUT_CHOICE = 6
"""Rows whose products take less time than reading: a second place to prefetch from costs nothing if it is the first."""

_AHEAD = 4096
"""Bytes that weights are prefetched ahead. Some processors read a sixth less a second without."""

_FETCHING_PASSES = 4
"""The most passes over a tile that share in prefetching the next one."""


class Rows(NamedTuple):
    """Rows of a matrix: the address of the first, and the bytes from one to the next."""

    address: int | np.int64
    stride: int


class Panels(NamedTuple):
    """Two panels side by side, in runs that may lie anywhere.

    table:  address of [N, 4] int64, for each run the addresses of both panels, and of two places from which something
            is prefetched meanwhile, or twice that of one
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
    second: bytes to the line that a step prefetches too; 0 if it prefetches one only
    """

    start: int
    stride: int
    second: int = 0


@shared
def prefetch_ahead(step_bytes: int, steps: int, number: int, passes: int) -> Ahead:
    """The lines that a pass over a tile prefetches. There is one for each block of rows.

    The first would read the tile from memory, for longer than its products take, while memory would be idle in all
    others. So if there are several, they share in prefetching the next tile.

    step_bytes, steps: of a tile
    """
    if passes == 1:
        return Ahead(_AHEAD, step_bytes, LINE)
    stride = step_bytes // min(passes, _FETCHING_PASSES)
    if number >= _FETCHING_PASSES:  # all of it has been
        return Ahead(0, stride, 0)
    return Ahead((step_bytes + number * stride) * steps, stride, 0)


@kernel
def panels_of_tile(table: Any, place: Any, steps: int, ahead: Ahead) -> Panels:
    """The panels of a tile, which lie in one run.  table: [4] int64 memory, place: the address of the tile"""
    table[0], table[1] = place, place + 4 * LANES
    table[2], table[3] = place + ahead.start, place + ahead.start + ahead.second
    return Panels(np.int64(table.ctypes.data), steps, 4 * COLUMNS, steps, ahead.stride)


def left_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type of left-hand rows for panels of float32 or uint16 (bfloat16)."""
    return dtype if CHOSEN.bfloat16 else np.dtype(np.float32)


def pad_columns(columns: int) -> int:
    """The number of columns, rounded up to whole tiles."""
    return -(-columns // COLUMNS) * COLUMNS


def read_broadcast(address: Value, kind: Any) -> Value:
    """A number from memory in all lanes."""
    return address.read(kind).broadcast()


def read_number(address: Value, number: int, kind: Any, *, limit: int = 16) -> Value:
    """One of several numbers that begin at an address, in all lanes. limit: bytes that may be read at once"""
    size = getattr(kind, "width", 32) // 8
    at_once = min(CHOSEN.row_bytes, limit) // size
    if at_once <= 1:
        return read_broadcast(address + size * number, kind)
    place = number % at_once
    return (address + size * (number - place)).read(ir.VectorType(kind, at_once)).shuffle([place] * LANES)


@contextmanager
def paired(sums: Mapping[tuple[int, int], Variable], wanted: bool) -> Iterator[None]:
    """Keeps the sums of two rows by turns, if that is wanted."""
    pairs = [(sums[row, i], sums[row + 1, i]) for row, i in sums if row % 2 == 0 and wanted]
    for operation in (interleave, deinterleave):
        for pair in pairs:
            for each, value in zip(pair, operation(*(each.value for each in pair)), strict=True):
                each.value = value
        if operation is interleave:
            yield


def add_in_pairs(sums: Mapping[tuple[int, int], Variable], vectors: Iterator[list[Value]], rows: list[Value]) -> None:
    """Adds products to sums of two rows by turns (see `add_squares`).

    vectors: of each panel; a single one is of pairs of bfloat16, others are multiplied two at once
    rows:    the addresses of what they are multiplied with
    """
    for number, (one, other) in enumerate(zip_longest(vectors, vectors)):
        squares = [interleave(*(each.bits(WORDS) for each in both)) for both in zip(one, other or one, strict=True)]
        for row in range(0, len(rows), 2):
            pair = rows[row : row + 2]
            if other:
                halves = [(at + number // 2 * 16).read(ir.VectorType(INT64, 2)) for at in pair]
                left = halves[0].shuffle([number % 2, 2 + number % 2], halves[1])
            else:
                left = interleave(*(read_broadcast(at, FLOAT) for at in pair))[0]
            for (i, sides), side in product(enumerate(squares), (0, 1)):
                total, add = sums[row + side, i], add_squares if other else add_bfloat16
                total.value = add(total.value, left, sides[side])


@contextmanager
def row_sums(
    outs: list[Value], panels: Sequence[Any], add: Value, *, in_memory: bool = False
) -> Iterator[Mapping[tuple[int, int], Variable]]:
    """The sums of rows and panels, which are written to these rows at the end; they begin there if `add` is 1.

    panels:    0, 1 or both
    in_memory: they stay there meanwhile, and leave registers to others
    """
    addresses = {(row, i): out + panel * (LANES * 4) for row, out in enumerate(outs) for i, panel in enumerate(panels)}
    # Each pointer is made once: of two alike, the compiler would keep both.
    targets = {place: Place(address) for place, address in addresses.items()}
    nothing = add.constant(None, FLOATS)
    if in_memory:
        with if_then(add.is_("==", 0)):
            for target in targets.values():
                target.value = nothing
        yield targets
        return
    sums: dict[tuple[int, int], Variable] = {place: Variable(nothing) for place in targets}
    with if_then(add.is_("!=", 0)):
        for place, target in targets.items():
            sums[place].value = target.value
    yield sums
    for place, target in targets.items():
        target.value = sums[place].value


def emit_for_panels(num_rows: int, alone: bool, like: Value, emit: Callable[[Sequence[Any]], None]) -> None:
    """Code for both panels at once, if the sums of so many rows fit into registers; else for one after the other."""
    if num_rows <= CHOSEN.rows(panels=2) and not alone:
        emit((0, 1))
    else:
        with for_range(like.constant(2)) as panel:
            emit((panel,))


def repeated_rows(count: Value, num_rows: int, *places: Any) -> list[list[Value]]:
    """Addresses of so many rows of each place; if there are fewer, the last one several times.

    places: the address of the first row, and the bytes from one to the next
    """
    last = count - 1
    numbers = [last.constant(row) for row in range(num_rows)]
    numbers = [number.is_("<", last).choose(number, last) for number in numbers]
    return [[start + stride * number for number in numbers] for start, stride in places]


def emit_prefetching(places: list[Value], num_rows: int, emit: Callable[[list[Value]], None]) -> None:
    """Code for each number of different places to prefetch from; `emit` makes it for some of them."""
    if len(places) == 1 or num_rows <= _ROWS_WITHOUT_CHOICE:
        emit(places)
        return
    one, other = places
    switch(one.is_("==", other).to("zext", INT64), {1: partial(emit, places[:1]), 0: partial(emit, places)})


def emit_for_rows(count: Value, row_counts: tuple[int, ...], emit: Callable[[int], None]) -> None:
    """Code for each number of rows that there is code for, and the choice among them: the least that suffices."""
    cases = {num_rows: partial(emit, num_rows) for num_rows in row_counts}
    numbers = range(1, max(row_counts) + 1)
    switch(count, {number: cases[min(each for each in row_counts if each >= number)] for number in numbers})


class _TileEmitter:
    """Emits the loop for one element type and one number of rows."""

    def __init__(self, is_float: int, num_rows: int) -> None:
        self.is_float = is_float
        self.in_pairs = bool(num_rows > 1 and CHOSEN.bfloat16_squares and not self.is_float)
        self.num_rows = num_rows + num_rows % 2 * self.in_pairs
        self.step_bytes = 4 if self.is_float or CHOSEN.bfloat16 else 8
        """Of a left-hand row: what is multiplied with one vector of a panel."""

    def weight(self, at: Value, part: int) -> Value:
        """A vector of a panel; where pairs are widened, their first or second numbers."""
        if self.is_float or CHOSEN.bfloat16:
            return at.read(FLOATS if self.is_float else BFLOATS)
        words = at.read(WORDS)
        return (words & 0xFFFF0000 if part else words << 16).bits(FLOATS)

    def multiply_add(self, total: Value, left: Value, right: Value) -> Value:
        return add_bfloat16(total, left, right) if right.type == BFLOATS else left.fma(right, total)

    def emit(self, left: list[Value], panels: list[Value], out: list[Value], count: Value, add: Value) -> None:
        """Code for up to so many rows. If there are fewer, it computes the last one several times."""
        table, run, stride, depth, ahead = panels
        outs, rows = repeated_rows(count, self.num_rows, out, left)

        def emit_panels(which: Sequence[Any]) -> None:
            slices = cgutils.for_range_slice(depth.builder, INT64(0), depth.of, run.of, inc=True)
            with row_sums(outs, which, add) as sums, paired(sums, self.in_pairs), slices as (at, index):
                first, number = (Value(depth.builder, each) for each in (at, index))
                rest = depth - first
                steps = rest.is_("<", run).choose(rest, run)
                starts = [table + number * 32 + panel * 8 for panel in which]
                where = [[(start + after).read(INT64) for start in starts] for after in (0, 16)]
                self.emit_run(rows, where, first * self.step_bytes, steps, (stride, ahead), sums)

        emit_for_panels(self.num_rows, self.in_pairs, add, emit_panels)

    def emit_run(
        self, rows: list[Value], places: list[list[Value]], start: Value, steps: Value, strides: Any, sums: Any
    ) -> None:
        """Code for the steps of one run.

        places: of the panels, and of what is prefetched
        start:  bytes from the beginning of a left-hand row
        """
        (panels, places_ahead), parts = places, self.step_bytes // 4
        at_once = max(1, CHOSEN.row_bytes // self.step_bytes)

        def weights_of(step: Value, ahead: list[Value]) -> Iterator[list[Value]]:
            down, further = (step * stride for stride in strides)
            for place in ahead:
                emit_prefetch(place + further)
            for part in range(parts):
                yield [self.weight(panel + down, part) for panel in panels]

        def emit_steps(first: Value, count: int, ahead: list[Value]) -> None:
            here = [row + (start + first * self.step_bytes) for row in rows]
            vectors = (each for number in range(count) for each in weights_of(first + number, ahead))
            if self.in_pairs:
                add_in_pairs(sums, vectors, here)
                return
            for number, weights in enumerate(vectors):
                for row, address in enumerate(here):
                    left = read_number(address, number, FLOAT, limit=4 if count == 1 else 16)
                    for i, weight in enumerate(weights):
                        total = sums[row, i]
                        total.value = self.multiply_add(total.value, left, weight)

        def emit_all(ahead: list[Value]) -> None:
            with for_range(steps // at_once) as index:
                emit_steps(index * at_once, at_once, ahead)
            if at_once > 1:
                whole = steps // at_once * at_once
                with for_range(steps - whole) as index:
                    emit_steps(whole + index, 1, ahead)

        emit_prefetching(places_ahead, self.num_rows, emit_all)


@emitted(types.void, LITERAL, PARTS)
def _emit_tile(is_float: int, numbers: Any) -> None:
    left, panels, out, (count, add) = numbers[:2], numbers[2:7], numbers[7:9], numbers[9:]
    emit_for_rows(count, ROW_COUNTS, lambda rows: _TileEmitter(is_float, rows).emit(left, panels, out, count, add))


@cache
def microkernel_address(dtype: np.dtype[Any]) -> int:
    """The address of the loop for right-hand matrices of float32 or uint16 (bfloat16)."""
    is_float = int(dtype == np.float32)

    def loop(numbers: Any) -> None:
        _emit_tile(is_float, numbers)

    return loop_address(loop, 11)


@kernel
def multiply_tile(microkernel: int, left: Rows, panels: Panels, out: Rows, count: int, add: int) -> None:
    """out [count, 32] float32 = left [count, depth] times two panels; added to `out` if `add` is 1.

    microkernel: see `microkernel_address`
    left:        of `left_dtype`
    count:       rows, 1 to MAX_ROWS
    """
    call_loop(microkernel, (left, panels, out, count, add))


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
