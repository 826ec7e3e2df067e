"""The inner loop of attention over a cache of bytes: a few rows of int16 times two panels of bytes, in integers.

A step of a panel is a vector: four bytes for each of 16 columns, each 128 more than the number that is meant. Rows are
rounded to 16 bits in units of a 32767th of their largest number. Their quads lie in the order 0, 2, 1, 3, because
bytes 0 and 2 of all words are multiplied at once, and then 1 and 3. At the end a sum becomes float32, times its row's
unit. What the 128 adds too much is a row's second number beside the unit.

So bytes are never unpacked, and no instruction set needs more than products of pairs of int16. Sums of up to 256
numbers fit into an int32 whatever they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import numpy as np
from numba import types

from cbatch.kernels.cpu.emit import (
    FLOAT,
    FLOATS,
    INT16,
    INT32,
    INT64,
    LANES,
    PARTS,
    WORDS,
    Place,
    Value,
    Variable,
    emitted,
    for_range,
)
from cbatch.kernels.cpu.fast_math import TO_INTEGER, bits_of, from_bits, to_float32
from cbatch.kernels.cpu.instruction_sets import CHOSEN
from cbatch.kernels.cpu.jit import call_loop, kernel, loop_address
from cbatch.kernels.cpu.matmul.instructions import add_integers, read_again, split_quads
from cbatch.kernels.cpu.matmul.microkernel import (
    ROW_COUNTS,
    Panels,
    Rows,
    emit_for_panels,
    emit_for_rows,
    emit_prefetch,
    emit_prefetching,
    read_broadcast,
    read_number,
    repeated_rows,
)
from cbatch.kernels.cpu.rounding import MOST_SHORT, SMALLEST
from cbatch.runtime.kv_cache import U8_OFFSET

GROUP = 256
"""Numbers of a row whose products are summed as integers."""

HEADER_BYTES = 8
"""Of a row: its unit in float32, and minus U8_OFFSET times the sum of its integers in int32."""

_BITS_OF_ZERO = TO_INTEGER.view(np.int32)
_MOST, _SMALLEST = np.float32(MOST_SHORT), np.float32(SMALLEST)


class _Emitter:
    """Emits the loop for one number of rows."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def words(self, places: list[Value], down: Value) -> list[Value]:
        """A vector of each panel."""
        down = read_again(down)
        return [(place + down).read(WORDS) for place in places]

    def emit(self, left: Any, headers: Any, panels: Any, out: Any, count: Value, add: Value) -> None:
        """Code for up to so many rows. If there are fewer, it computes the last one several times."""
        table, run, stride, depth, ahead = panels
        outs, heads, rows = repeated_rows(count, self.num_rows, out, headers, left)

        def emit_panels(which: Sequence[Any]) -> None:
            sums = {
                (row, i): Variable(read_broadcast(head + 4, INT32))
                for row, head in enumerate(heads)
                for i in range(len(which))
            }
            with for_range(depth // run) as number:
                first = number * run
                starts = [table + number * 32 + panel * 8 for panel in which]
                places, further = ([(start + after).read(INT64) for start in starts] for after in (0, 16))

                def emit_run(ahead_places: list[Value]) -> None:
                    with for_range(run) as step:
                        for place in ahead_places:
                            emit_prefetch(place + step * ahead)
                        here, down = [row + (first + step) * 8 for row in rows], step * stride
                        for part, weights in enumerate(split_quads(partial(self.words, places, down))):
                            for row, address in enumerate(here):
                                one = read_number(address, part, INT32 if CHOSEN.pairs else INT16, limit=8)
                                for i, weight in enumerate(weights):
                                    total = sums[row, i]
                                    total.value = add_integers(total.value, weight, one, 2)

                emit_prefetching(further, self.num_rows, emit_run)
            targets = {(row, i): Place(outs[row] + which[i] * (LANES * 4)) for row, i in sums}
            found = {}
            for (row, i), total in sums.items():
                before = add.is_("!=", 0).choose(targets[row, i].value, None)
                found[row, i] = total.value.to("sitofp", FLOATS).fma(read_broadcast(heads[row], FLOAT), before)
            for place, value in found.items():  # when all are there: the last row may be there several times
                targets[place].value = value

        emit_for_panels(self.num_rows, not CHOSEN.pairs, add, emit_panels)


@emitted(types.void, PARTS)
def _emit_loop(numbers: Any) -> None:
    left, headers, panels, out, (count, add) = (
        numbers[:2], numbers[2:4], numbers[4:9], numbers[9:11], numbers[11:],
    )  # fmt: skip
    emit_for_rows(count, ROW_COUNTS, lambda rows: _Emitter(rows).emit(left, headers, panels, out, count, add))


def _byte_loop(numbers: Any) -> None:
    _emit_loop(numbers)


@cache
def byte_tile_address() -> int:
    """The address of the loop."""
    return loop_address(_byte_loop, 13)


@kernel
def multiply_byte_tile(
    address: int, left: Rows, headers: Rows, panels: Panels, out: Rows, count: int, add: int
) -> None:
    """out [count, 32] float32 = left [count, at most GROUP numbers] times two panels; added to `out` if `add` is 1.

    address: see `byte_tile_address`
    headers: of the rows, each of HEADER_BYTES
    panels:  in steps of four numbers, a multiple of the steps of a run
    count:   rows, 1 to `microkernel.MAX_ROWS`
    """
    call_loop(address, (left, headers, panels, out, count, add))


@kernel
def round_row(row: Any, integers: Any, header: Any) -> None:
    """Rounds a row of at most GROUP numbers, a multiple of 4, to integers in the order of quads.

    header: [2] int32, see HEADER_BYTES; the unit of a row with NaN or infinity is NaN
    """
    most, total = np.uint32(0), np.int32(0)
    for i in range(len(row)):
        bits = bits_of(to_float32(row[i])) & np.uint32(0x7FFFFFFF)  # in the order of magnitudes, NaN above all
        most = bits if bits > most else most
    largest, factor = from_bits(most), np.float32(0)
    unit = largest / _MOST
    if most >= np.uint32(0x7F800000):
        unit = np.float32(np.nan)
    elif largest > _SMALLEST:
        factor = _MOST / largest
    for i in range(len(row)):
        scaled = to_float32(row[i]) * factor if factor > 0 else np.float32(0)
        integer = np.int32(bits_of(scaled + TO_INTEGER)) - _BITS_OF_ZERO
        integers[i] = integer
        total += integer
    for quad in range(0, len(row), 4):
        integers[quad + 1], integers[quad + 2] = integers[quad + 2], integers[quad + 1]
    header[0], header[1] = np.int32(bits_of(unit)), np.int32(-U8_OFFSET) * total
