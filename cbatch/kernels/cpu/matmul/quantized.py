"""The inner loop of products with quantized weights: a few rows times 32 columns, in integers.

Left-hand rows are quantized too, to int8 or int16, in the same groups of 32 or 16 numbers as the weights, each in units
of a 127th or a 32767th of its largest number. In memory a group is its numbers, the last one's padded with zeros; then
their float32 scale; then a word: what the offset of the stored weights adds too much, as an int32, or for weights with
zero points minus the sum of the group as a float32. So one number says where a loop is in each of its rows.

Of int8, one large number would round all others of its group coarsely, and most of what models lose is lost there. So
quads of numbers that are far larger than most groups' largest (see `_OUTLIER`) are marked: they have 16 bits, and the
unit is that of the others. The list of marks follows the groups: how many there are, as an int32; then for each which
quad of the row it is, its four high bytes, and 256 times the unit. The high bytes are multiplied row by row, after all
low ones.

A vector of weights holds four bytes for each of 16 columns, which are multiplied with four numbers of a row: at once
for int8, if the processor can (see `instructions`), by pairs for int16, whose quads lie in the order 0, 2, 1, 3 for
that. Where 4 bits are the place of a level in a table, they become levels in registers. Sums of a group are exact
integers. They begin with what the offset of the stored weights adds too much, unless weights are multiplied without it,
and at the group's end they become float32, times the scales of both groups. The integers of 6 rows fill the registers;
the sums of groups stay beside them, or in memory.

Each result is summed in the same order, whatever the other rows are: a row has the same result, to the last bit, in
every batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import product
from typing import Any

from llvmlite import ir
from numba import types

from cbatch.kernels.cpu.emit import (
    FLOAT,
    FLOATS,
    INT16,
    INT32,
    INT64,
    LANES,
    LIKE,
    LINE,
    LITERAL,
    PARTS,
    SHORTS,
    WORDS,
    Place,
    Value,
    Variable,
    emitted,
    for_range,
    if_then,
    load_floats,
    switch,
)
from cbatch.kernels.cpu.instruction_sets import CHOSEN
from cbatch.kernels.cpu.jit import call_loop, kernel, loop_address, shared
from cbatch.kernels.cpu.matmul.formats import MOST_WEIGHT, OFFSETS, group_bytes, group_size, number_bytes
from cbatch.kernels.cpu.matmul.instructions import (
    QUADS,
    add_integers,
    add_pairs,
    add_quads,
    add_shorts,
    float16_to_float32,
    look_up,
    most_products,
    needs_sign,
    read_again,
    split_quads,
)
from cbatch.kernels.cpu.matmul.microkernel import (
    SECOND_CACHE,
    Ahead,
    Rows,
    add_in_pairs,
    emit_for_panels,
    emit_for_rows,
    emit_prefetch,
    paired,
    read_broadcast,
    read_number,
    row_sums,
)
from cbatch.kernels.cpu.rounding import IN_QUADS, MOST_SHORT, largest_of, rounded
from cbatch.kernels.formats import GROUP, INT4_ZEROS, INT8, LEVELS, MXFP4

MAX_ROWS = min(6, CHOSEN.rows(panels=1))

_OUTLIER = 1.15
"""Quads of int8 are marked if a number is so many times as large as most groups' largest: the mean of roots, squared,
which a few outliers hardly raise."""

_MOST_BYTE = 127

_MARK_BYTES, _MARKS_BEYOND = 12, GROUP // 4
"""Of a mark; and how many more there may be than groups: once there are more, no further quad is marked."""

ROW_COUNTS = tuple(range(1, MAX_ROWS + 1))
"""Numbers of rows that there is code for: all up to the largest, the sums of which fill the registers."""


@shared
def left_group_bytes(weights: int, left_bytes: int) -> int:
    """Bytes of a group of a row, for weights of a format: its numbers, a scale and a word."""
    return group_size(weights) * left_bytes + 8


@shared
def quantized_row_bytes(weights: int, left_bytes: int, depth: int) -> int:
    """Bytes from one row to the next."""
    groups = -(-depth // group_size(weights))
    marks = 4 + (groups + _MARKS_BEYOND) * _MARK_BYTES if left_bytes == 1 else 0
    return whole_lines(groups * left_group_bytes(weights, left_bytes) + marks)


@shared
def whole_lines(size: int) -> int:
    """At least so many bytes: an odd number of cache lines, so that rows do not compete for the same sets."""
    return (-(-size // LINE) | 1) * LINE


def _split(numbers: list[Value], limit: Value, largest: Value) -> tuple[Value, Value]:
    """A bit for each quad of a group that is marked, an int64, and the number that becomes _MOST_BYTE.

    limit:   the bits of a number; quads with larger ones are marked
    largest: of all numbers
    """
    marks, inside = Variable(limit.constant(0, INT64)), Variable(largest)
    with if_then(largest.bits(INT32).is_(">", limit), likely=False):
        others = []
        for index, number in enumerate(numbers):
            of_quad = number.bits(WORDS) & 0x7FFFFFFF
            for places in ((1, 0, 3, 2), (2, 3, 0, 1)):
                other = of_quad.shuffle([4 * (lane // 4) + places[lane % 4] for lane in range(LANES)])
                of_quad = other.is_(">", of_quad).choose(other, of_quad)
            is_marked = of_quad.is_(">", limit.broadcast())
            others.append(is_marked.choose(number.constant(None), number))
            found = is_marked.shuffle(range(0, LANES, 4)).bits(ir.IntType(LANES // 4)).to("zext", INT64)
            marks.value = marks.value | (found << (index * LANES // 4))
        least, most = largest * (1 / 257), largest_of(others)  # 127 times 257 are two bytes with signs
        inside.value = least.bits(INT32).is_(">", most.bits(INT32)).choose(least, most)
    return marks.value, inside.value


def _write_marks(marks: Value, integers: list[Value], first: Value, unit: Value, start: Value, count: Variable) -> None:
    """Adds to a list of marks those of a group.

    first: the number of its first quad
    start: the address of the list
    count: of marks in it
    """
    for index, each in enumerate(integers):
        high = ((each + 128) >> 8).to("trunc", ir.VectorType(ir.IntType(8), LANES)).bits(ir.VectorType(INT32, 4))
        for lane in range(4):
            quad, place = 4 * index + lane, start + 4 + count.value * _MARK_BYTES
            place.write((first + quad).to("trunc", INT32))
            (place + 4).write(high.lane(lane))
            (place + 8).write(unit * 256)
            count.value = count.value + (marks >> quad & 1)  # if it is not marked, the next one takes the place


def _emit_row(
    like: Any, left_bytes: int, group: int, weights: Value, source: Value, depth: Value, target: Value
) -> None:
    """Quantizes a row from an address to another. like: one of its numbers"""
    element, number = ir.IntType(like.bitwidth), ir.VectorType(ir.IntType(8 * left_bytes), LANES)
    size, end, step = like.bitwidth // 8, group * left_bytes, group * left_bytes + 8
    whole, rest, groups = depth // group, depth % group, (depth + (group - 1)) // group
    padded = Variable(depth.constant(None, ir.ArrayType(element, group))).address
    with for_range(rest) as index:
        (padded + index * size).write((source + (whole * group + index) * size).read(element))

    def read_group(index: Value) -> list[Value]:
        start = index.is_("<", whole).choose(source + index * (group * size), padded)
        return [load_floats(start, half, like) for half in range(group // LANES)]

    roots, count = Variable(depth.constant(0, FLOAT)), Variable(depth.constant(0))
    if left_bytes == 1:
        with for_range(groups) as index:
            largest = largest_of(read_group(index))
            (target + index * step + end).write(largest)
            roots.value = roots.value + largest.call("sqrt.f32")
    mean = roots.value / groups.to("sitofp", FLOAT)
    limit = (mean * mean * _OUTLIER).bits(INT32)
    with for_range(groups) as index:
        numbers, here = read_group(index), target + index * step
        if left_bytes == 1:
            limit_here = count.value.is_("<=", groups).choose(limit, 0x7FFFFFFF)
            marks, inside = _split(numbers, limit_here, (here + end).read(FLOAT))
            found, total, unit = rounded(numbers, _MOST_BYTE, inside)
            with if_then(marks.is_("!=", 0), likely=False):
                _write_marks(marks, found, index * (group // 4), unit, target + groups * step, count)
        else:
            found, total, unit = rounded(numbers, MOST_SHORT)
        for half, integers in enumerate(found):
            ordered = integers.shuffle(IN_QUADS) if left_bytes == 2 else integers
            (here + half * LANES * left_bytes).write(ordered.to("trunc", number))
        (here + end).write(unit)
        word = (-total.to("sitofp", FLOAT)).bits(INT32)
        for kind, offset in OFFSETS.items():
            word = weights.is_("==", kind).choose(total * -offset, word)
        (here + end + 4).write(word)
    if left_bytes == 1:
        (target + groups * step).write(count.value.to("trunc", INT32))


@emitted(types.void, LIKE, types.int64, types.int64, PARTS)
def _quantize(like: Any, left_bytes: Value, group: Value, row: Any) -> None:
    """See `_emit_row`."""
    kinds = product((1, 2), (GROUP, LANES))
    switch(left_bytes + group, {size + count: partial(_emit_row, like, size, count, *row) for size, count in kinds})


@kernel
def quantize_row(row: Any, memory: Any, weights: int, left_bytes: int) -> None:
    """Writes a row [depth] of float32 or bfloat16, for weights of that format, to `quantized_row_bytes` of memory."""
    source, target = row.ctypes.data, memory.ctypes.data
    _quantize(row[0], left_bytes, group_size(weights), (weights, source, len(row), target))


class _QuantizedEmitter:
    """Emits the loop for one format of weights, one size of left-hand numbers in bytes, and one number of rows."""

    def __init__(self, weights: int, left_bytes: int, num_rows: int) -> None:
        self.format, self.left_bytes, self.num_rows = weights, left_bytes, num_rows
        self.is_signed = left_bytes == 1 and needs_sign(MOST_WEIGHT[weights])
        """Whether integers are multiplied without their offset."""
        self.is_single = left_bytes == 2 and not CHOSEN.pairs
        self.in_pairs = bool(left_bytes == 1 and num_rows > 1 and CHOSEN.quads_squares)
        self.panels: Sequence[Any] = (0, 1)
        """Those whose sums are made at once."""
        self.coming: tuple[Value, Value]
        """The address of what a group prefetches, and the bytes from one line of it to the next."""

    def multiply(
        self, totals: Mapping[tuple[int, int], Variable], vectors: Iterable[list[Value]], rows: list[Value]
    ) -> None:
        """Adds products. vectors: of each panel; rows: the addresses of what they are multiplied with"""
        for number, weights in enumerate(vectors):
            for row, address in enumerate(rows):
                left = read_number(address, number, INT16 if self.is_single else INT32)
                for i, weight in enumerate(weights):
                    totals[row, i].value = add_integers(totals[row, i].value, weight, left, self.left_bytes)

    def quads(self, there: Value, number: int | Value) -> list[Value]:
        """Four bytes for each column of the panels; of 4 bits the first or the second four."""
        place = read_again(there)
        words = [(place + panel * LINE).read(WORDS) for panel in self.panels]
        if self.format == INT8:
            return [each ^ 0x80808080 for each in words] if self.is_signed else words
        shift = (number * 4).broadcast() if isinstance(number, Value) else 4 * number
        quads = [(each >> shift) & 0x0F0F0F0F for each in words]
        if self.format not in LEVELS:
            return quads
        levels = [level + OFFSETS[self.format] * (not self.is_signed) for level in LEVELS[self.format]]
        return [look_up(places.bits(QUADS), levels).bits(WORDS) for places in quads]

    def vectors(self, start: Value, first: Value, count: int) -> Iterator[list[Value]]:
        """Those of a group that begins there, from the first of so many: quads, or parts of them as int16.

        Of two cache lines that one pass needs, the first is prefetched. The processor brings the other one as well, and
        half as many requests wait for memory at once.
        """
        for vector in range(count):
            along = first + vector
            emit_prefetch(self.coming[0] + self.coming[1] * along, near=SECOND_CACHE)
            for number in range(1 if self.format == INT8 else 2):
                read = partial(self.quads, start + along * (2 * LINE), number)
                yield from [read()] if self.left_bytes == 1 else split_quads(read)

    def scales(self, start: Value, place: int) -> list[Value]:
        """Numbers of 16 bits of the panels as float32, which lie so far behind the start of a group."""
        addresses = [start + place + panel * (2 * LANES) for panel in self.panels]
        if self.format == MXFP4:
            return [load_floats(address, 0, types.uint16) for address in addresses]
        return [float16_to_float32(address.read(SHORTS)) for address in addresses]

    def emit(self, left: Any, weights: Value, groups: Value, ahead: Any, out: Any, add: Value) -> None:
        """Code for all rows. weights: address of the tile; groups: of the depth; ahead: see `Ahead`"""
        rows, outs = (
            [address + stride * stride.constant(row) for row in range(self.num_rows)] for address, stride in (left, out)
        )
        coming, stride = weights + ahead[0], ahead[1]
        part = stride // (number_bytes(self.format) // (2 * LINE))

        def emit_panels(panels: Sequence[Any]) -> None:
            self.panels = panels
            in_memory = 2 * self.num_rows > CHOSEN.rows(len(panels))
            with row_sums(outs, panels, add, in_memory=in_memory) as sums, for_range(groups) as index:
                self.coming = coming + panels[0] * LINE + index * stride, part
                first = index * left_group_bytes(self.format, self.left_bytes)
                self.emit_group(sums, weights + index * group_bytes(self.format), [row + first for row in rows])

        alone = self.in_pairs or (self.is_single and self.num_rows > 1)  # registers are needed for more than sums
        emit_for_panels(self.num_rows, alone, groups, emit_panels)

    def add_marked(self, left: Any, weights: Value, groups: Value, out: Any, count: Value) -> None:
        """Adds the products with high bytes to so many rows. See `emit`."""
        per_group, nothing = group_size(self.format) // 4, groups.constant(0, WORDS)
        with for_range(count) as row:
            marks = left[0] + left[1] * row + groups * left_group_bytes(self.format, 1)
            targets = [Place(out[0] + out[1] * row + panel * LINE) for panel in (0, 1)]
            sums = [Variable(target.value) for target in targets]
            with for_range(marks.read(INT32).to("zext", INT64)) as index:
                mark = marks + 4 + index * _MARK_BYTES
                quad = mark.read(INT32)
                start = weights + (quad // per_group).to("zext", INT64) * group_bytes(self.format)
                along = quad % per_group
                vector = (along if self.format == INT8 else along >> 1).to("zext", INT64)
                quads = self.quads(start + vector * (2 * LINE), along & 1)
                high, unit = read_broadcast(mark + 4, INT32), read_broadcast(mark + 8, FLOAT)
                scales = self.scales(start, number_bytes(self.format))
                for both, weight, scale in zip(sums, quads, scales, strict=True):
                    if CHOSEN.quads:
                        total = add_quads(nothing, weight, high)
                    else:
                        ones = groups.constant(0x00010001, WORDS)
                        total = add_pairs(nothing, add_shorts(nothing, weight, high), ones)
                    both.value = total.to("sitofp", FLOATS).fma(unit * scale, both.value)
            for target, both in zip(targets, sums, strict=True):
                target.value = both.value

    def emit_group(self, sums: Mapping[tuple[int, int], Variable], start: Value, rows: list[Value]) -> None:
        """A group, which begins at `start` in the weights and at these addresses in the rows."""
        has_zeros, size = self.format == INT4_ZEROS, group_size(self.format)
        scale = size * self.left_bytes
        nothing = start.constant(0, WORDS)
        if self.in_pairs and len(rows) % 2:
            rows = [*rows, rows[-1]]
        begins = [nothing if has_zeros or self.is_signed else read_broadcast(row + scale + 4, INT32) for row in rows]
        places = [(row, i) for row in range(len(rows)) for i in range(len(self.panels))]
        totals = {place: Variable(begins[place[0]]) for place in places}
        vectors, quads_of = number_bytes(self.format) // (2 * LINE), 1 if self.format == INT8 else 2
        in_shorts = self.left_bytes == 1 and not CHOSEN.quads
        at_once = min(vectors, most_products(MOST_WEIGHT[self.format]) // quads_of) if in_shorts else vectors
        row_step = 4 * self.left_bytes * quads_of
        together = max(1, CHOSEN.row_bytes // row_step)
        for first in range(0, vectors, at_once):
            adds = {place: Variable(nothing) for place in places} if in_shorts else totals
            with paired(adds, self.in_pairs), for_range(start.constant(at_once // together)) as index:
                along = index * together + first
                multiply = add_in_pairs if self.in_pairs else self.multiply
                multiply(adds, self.vectors(start, along, together), [row + along * row_step for row in rows])
            for place, each in adds.items() if in_shorts else ():
                ones = start.constant(0x00010001, WORDS)
                totals[place].value = add_pairs(totals[place].value, each.value, ones)
        end = number_bytes(self.format)
        scales = self.scales(start, end)
        zeros = self.scales(start, end + 4 * LANES) if has_zeros else []
        for row, address in enumerate(rows[: self.num_rows]):
            factor = read_broadcast(address + scale, FLOAT)
            for i in range(len(scales)):
                total = totals[row, i].value.to("sitofp", FLOATS)
                if has_zeros:  # what the row has in place of an offset is minus the sum of its numbers
                    total = zeros[i].fma(read_broadcast(address + scale + 4, FLOAT), total)
                both = sums[row, i]
                both.value = total.fma(factor * scales[i], both.value)


@emitted(types.void, LITERAL, LITERAL, PARTS)
def _emit_loop(weights: int, left_bytes: int, numbers: Any) -> None:
    left, (place, groups), ahead, out, (count, add) = (numbers[at : at + 2] for at in range(0, 10, 2))

    def emit(num_rows: int) -> None:
        _QuantizedEmitter(weights, left_bytes, num_rows).emit(left, place, groups, ahead, out, add)

    emit_for_rows(count, ROW_COUNTS, emit)
    if left_bytes == 1:
        _QuantizedEmitter(weights, 1, 1).add_marked(left, place, groups, out, count)


@cache
def quantized_address(weights: int, left_bytes: int) -> int:
    """The address of the loop for a format of weights, and left-hand numbers of 1 byte or 2."""

    def loop(numbers: Any) -> None:
        _emit_loop(weights, left_bytes, numbers)

    return loop_address(loop, 10)


@kernel
def multiply_quantized(
    address: int, left: Rows, place: int, groups: int, ahead: Ahead, out: Rows, count: int, add: int
) -> None:
    """out [count, 32] float32 = left [count, so many groups] times a tile; added to `out` if `add` is 1.

    address: see `quantized_address`
    left:    see the beginning of this file
    place:   the address of the tile
    count:   rows, 1 to MAX_ROWS
    """
    call_loop(address, (left, place, groups, ahead.start, ahead.stride, out, count, add))
