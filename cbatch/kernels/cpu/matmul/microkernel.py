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
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.numpy_support import from_dtype

from cbatch.kernels.cpu.jit import HAS_AVX512, HAS_BFLOAT16, LIKE, PARTS, Part, address_of, emitted, kernel, shared

LANES = 16
"""Columns of a panel."""

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

_FLOAT, _INT8 = ir.FloatType(), ir.IntType(8)
_INT32, _INT64 = ir.IntType(32), ir.IntType(64)
_SUMS = ir.VectorType(_FLOAT, LANES)
_WORDS = ir.VectorType(_INT32, LANES)
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


class VectorEmitter:
    """Emits code for vectors of 16 lanes."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def broadcast(self, value: Any) -> Any:
        """A number in all lanes."""
        vector = ir.VectorType(value.type, LANES)
        first = self.builder.insert_element(ir.Constant(vector, ir.Undefined), value, _INT32(0))
        return self.builder.shuffle_vector(first, first, ir.Constant(_WORDS, [0] * LANES))

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls an intrinsic of LLVM, whose result has the type of its first argument."""
        kind = ir.FunctionType(arguments[0].type, [argument.type for argument in arguments])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.{name}"), arguments)

    def fma(self, one: Any, other: Any, total: Any) -> Any:
        return self.call(f"fma.v{LANES}f32", one, other, total)

    def address(self, start: Any, offset: Any, kind: Any) -> Any:
        """A pointer so many bytes behind an address."""
        offset = _INT64(offset) if isinstance(offset, int) else offset
        return self.builder.inttoptr(self.builder.add(start, offset), kind.as_pointer())

    def read(self, start: Any, offset: Any, kind: Any) -> Any:
        return self.builder.load(self.address(start, offset, kind), align=1)

    def write(self, value: Any, start: Any, offset: Any) -> None:
        self.builder.store(value, self.address(start, offset, value.type), align=1)

    def read_broadcast(self, start: Any, offset: Any, kind: Any) -> Any:
        """A number from memory in all lanes."""
        return self.broadcast(self.read(start, offset, kind))

    def words(self, value: int) -> Any:
        """A constant in all lanes, of 32 bits each."""
        return ir.Constant(_WORDS, [value] * LANES)

    @contextmanager
    def sums(self, outs: list[Any], add: Any) -> Iterator[dict[tuple[int, int], Any]]:
        """The sums of rows and panels, which are written to these rows at the end; they begin there if `add` is 1."""
        builder, places = self.builder, [(row, panel) for row in range(len(outs)) for panel in (0, 1)]
        sums = {place: cgutils.alloca_once_value(builder, ir.Constant(_SUMS, None)) for place in places}
        targets = {(row, panel): self.address(outs[row], panel * LANES * 4, _SUMS) for row, panel in places}
        with builder.if_then(builder.icmp_signed("!=", add, _INT64(0))):
            for place in places:
                builder.store(builder.load(targets[place], align=4), sums[place])
        yield sums
        for place in places:
            builder.store(builder.load(sums[place]), targets[place], align=4)


def emit_for_rows(builder: Any, count: Any, row_counts: tuple[int, ...], emit: Callable[[int], None]) -> None:
    """Code for each number of rows that there is code for, and the choice among them: the least that suffices."""
    end = builder.append_basic_block("end")
    blocks = {num_rows: builder.append_basic_block(f"rows.{num_rows}") for num_rows in row_counts}
    switch = builder.switch(count, end)
    for number in range(1, max(row_counts) + 1):
        switch.add_case(_INT64(number), blocks[min(num_rows for num_rows in row_counts if num_rows >= number)])
    for num_rows, block in blocks.items():
        with builder.goto_block(block):
            emit(num_rows)
            builder.branch(end)
    builder.position_at_end(end)


@intrinsic  # type: ignore[untyped-decorator]
def call_loop(context: Any, address: Any, arguments: Any) -> Any:
    """Calls a loop by its address. arguments: a tuple, of exactly the types that it was compiled for"""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [context.get_value_type(each) for each in arguments])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), cgutils.unpack_tuple(builder, args[1]))
        return context.get_dummy_value()

    return types.void(address, arguments), generate


class _TileEmitter(VectorEmitter):
    """Emits the loop for one element type and one number of rows."""

    def __init__(self, builder: Any, element: Any, num_rows: int) -> None:
        super().__init__(builder)
        self.element = element
        self.num_rows = num_rows
        self.step_bytes = 8 if element != types.float32 and not HAS_BFLOAT16 else 4
        """Of a left-hand row: what is multiplied with one vector of a panel."""

    def weights(self, at: Any, offset: Any) -> Any:
        """One vector of a panel, as `multiply_add` takes it."""
        if self.element == types.float32:
            return self.read(at, offset, _SUMS)
        if HAS_BFLOAT16:
            return self.read(at, offset, _PAIRS)
        words = self.read(at, offset, _WORDS)
        halves = self.builder.shl(words, self.words(16)), self.builder.and_(words, self.words(0xFFFF0000))
        return [self.builder.bitcast(half, _SUMS) for half in halves]

    def left(self, at: Any, offset: Any) -> Any:
        """A number or a pair of a left-hand row, as `multiply_add` takes it."""
        if self.element == types.float32:
            return self.read_broadcast(at, offset, _FLOAT)
        if HAS_BFLOAT16:
            return self.builder.bitcast(self.read_broadcast(at, offset, _INT32), _PAIRS)
        return [self.read_broadcast(at, self.builder.add(offset, _INT64(place)), _FLOAT) for place in (0, 4)]

    def multiply_add(self, total: Any, left: Any, right: Any) -> Any:
        if self.element != types.float32 and HAS_BFLOAT16:
            return self.call("x86.avx512bf16.dpbf16ps.512", total, left, right)
        both = [(left, right)] if self.element == types.float32 else zip(left, right, strict=True)
        for one, other in both:
            total = self.fma(one, other, total)
        return total

    def emit(self, left: tuple[Any, Any], panels: tuple[Any, ...], out: tuple[Any, Any], count: Any, add: Any) -> None:
        """Code for up to so many rows. If there are fewer, it computes the last one several times."""
        (left_address, left_stride), (table, run, stride, depth, ahead), (out_address, out_stride) = left, panels, out
        builder = self.builder
        last = builder.sub(count, _INT64(1))
        numbers = [
            builder.select(builder.icmp_signed("<", _INT64(row), last), _INT64(row), last)
            for row in range(self.num_rows)
        ]
        outs = [builder.add(out_address, builder.mul(out_stride, number)) for number in numbers]
        rows = [builder.add(left_address, builder.mul(left_stride, number)) for number in numbers]
        with (
            self.sums(outs, add) as sums,
            cgutils.for_range_slice(builder, _INT64(0), depth, run, inc=True) as (first, number),
        ):
            rest = builder.sub(depth, first)
            steps = builder.select(builder.icmp_signed("<", rest, run), rest, run)
            at = builder.mul(number, _INT64(32))
            where = [self.read(table, builder.add(at, _INT64(8 * i)), _INT64) for i in range(4)]
            self.emit_run(rows, where, builder.mul(first, _INT64(self.step_bytes)), steps, (stride, ahead), sums)

    def emit_run(self, rows: list[Any], places: list[Any], start: Any, steps: Any, strides: Any, sums: Any) -> None:
        """Code for the steps of one run.

        places: of both panels, and of what is prefetched
        start:  bytes from the beginning of a left-hand row
        """
        builder, panels, ahead = self.builder, places[:2], places[2:]
        with cgutils.for_range(builder, steps) as loop:
            there = builder.add(start, builder.mul(loop.index, _INT64(self.step_bytes)))
            down, further = (builder.mul(loop.index, stride) for stride in strides)
            if self.num_rows > FEW_ROWS:  # products take longer than reading
                emit_prefetch(builder, builder.add(ahead[0], further))
            else:
                for place in ahead:
                    emit_prefetch(builder, builder.add(place, further), near=SECOND_CACHE)
            weights = [self.weights(panel, down) for panel in panels]
            for row in range(self.num_rows):
                number = self.left(rows[row], there)
                for panel in (0, 1):
                    total = self.multiply_add(builder.load(sums[row, panel]), number, weights[panel])
                    builder.store(total, sums[row, panel])


@emitted(types.void, LIKE, PARTS, PARTS, PARTS, types.int64, types.int64)
def _emit_tile(builder: Any, like: Any, left: Any, panels: Any, out: Any, count: Any, add: Any) -> None:
    """The loop for each number of rows there is code for, and the choice among them."""

    def emit(num_rows: int) -> None:
        _TileEmitter(builder, like, num_rows).emit(left, panels, out, count, add)

    emit_for_rows(builder, count, ROW_COUNTS, emit)


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


def emit_prefetch(builder: Any, address: Any, *, near: int = FIRST_CACHE, writes: bool = False) -> None:
    """Prefetches the cache line at an address, an int64."""
    kind = ir.FunctionType(ir.VoidType(), [_INT8.as_pointer(), _INT32, _INT32, _INT32])
    fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(fetch, [builder.inttoptr(address, _INT8.as_pointer()), _INT32(int(writes)), _INT32(near), _INT32(1)])


@emitted(types.void, types.int64)
def prefetch(builder: Any, address: Any) -> None:
    """Prefetches the cache line at an address."""
    emit_prefetch(builder, address)


@emitted(types.void, types.int64)
def prefetch_to_write(builder: Any, address: Any) -> None:
    """Prefetches the cache line at an address, which will be written."""
    emit_prefetch(builder, address, writes=True)
