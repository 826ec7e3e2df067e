"""Writes keys and values into the panels of the cache (see `paged_kv`), and makes numbers of a cache of bytes.

All panels consist of words of 32 bits: one float32, two bfloat16 or four bytes. A word of keys holds consecutive
numbers of one token, a word of values one number of consecutive tokens. The keys of 16 tokens of a sequence are a
matrix of words, which is transposed in registers. A token that comes alone is stored word by word.

A byte is a sign and 7 bits of magnitude. The numbers of a token's head are its bytes times one float32 scale, 1/127 of
the largest. The scale does not take part in products: it multiplies scores, or weights. So bytes become numbers without
rounding, since bfloat16 holds every integer up to 127.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import overload

from cbatch.kernels.cpu.fast_math import bits_of, from_bits, from_float32, to_float32
from cbatch.kernels.cpu.jit import FEATURES, LIKE, emitted, entry, kernel
from cbatch.kernels.cpu.matmul.microkernel import LANES, VectorEmitter
from cbatch.kernels.cpu.paged_kv import AttentionPlan, PagedKV
from cbatch.kernels.cpu.work_queue import Worker, claimed

SCALE_BYTES = 4

_WORD, _LINE = 4, 64
_INT8, _INT32, _INT64 = (ir.IntType(bits) for bits in (8, 32, 64))
_WORDS, _BYTES = ir.VectorType(_INT32, LANES), ir.VectorType(_INT8, _LINE)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_HAS_BYTE_TABLES = "avx512vbmi" in FEATURES
"""Whether one instruction looks 64 bytes up in a table of 128."""

_INTEGER = np.float32(2**23)
"""The low bits of a smaller number that is added to this are the nearest integer, ties to even."""

_SMALLEST = np.float32(1e-30)
"""Numbers are 0 if all of a head are smaller: the inverse of their scale would overflow."""


@emitted(types.float32, types.float32, types.float32, types.float32)
def _fma(builder: Any, one: Any, other: Any, total: Any) -> Any:
    """one * other + total in float32, rounded once."""
    return VectorEmitter(builder).call("fma.f32", one, other, total)


@kernel
def round_to_bytes(numbers: Any, row: Any) -> Any:
    """Rounds numbers to bytes; returns their scale, which is NaN if one of them is not finite."""
    most = np.uint32(0)
    for i in range(len(numbers)):
        bits = bits_of(to_float32(numbers[i])) & np.uint32(0x7FFFFFFF)  # in the order of magnitudes, NaN above all
        most = bits if bits > most else most
    largest, inverse = from_bits(most), np.float32(0)
    scale = largest * np.float32(1 / 127)
    if most >= np.uint32(0x7F800000):
        scale = np.float32(np.nan)
    elif largest < _SMALLEST:
        scale = np.float32(0)
    else:
        inverse = np.float32(127) / largest
    for i in range(len(numbers)):
        bits = bits_of(to_float32(numbers[i]))
        magnitude = bits_of(_fma(from_bits(bits & np.uint32(0x7FFFFFFF)), inverse, _INTEGER))
        row[i] = np.uint8((magnitude & np.uint32(0x7F)) | ((bits >> np.uint32(24)) & np.uint32(0x80)))
    return scale


class _ByteEmitter(VectorEmitter):
    """Emits the code that turns 16 words of 4 bytes into numbers."""

    def floats(self, words: Any) -> list[Any]:
        """Four vectors of float32, as words: one for each byte."""
        builder, found = self.builder, []
        for place in range(4):
            magnitude = builder.lshr(words, self.words(8 * place)) if place else words
            sign = builder.shl(words, self.words(24 - 8 * place)) if place < 3 else words
            number = builder.sitofp(builder.and_(magnitude, self.words(0x7F)), _FLOATS)
            found.append(builder.or_(builder.bitcast(number, _WORDS), builder.and_(sign, self.words(0x80000000))))
        return found

    def pairs(self, words: Any) -> list[Any]:
        """Two vectors of pairs of bfloat16, as words: of the first two bytes, and of the others."""
        builder = self.builder
        if not _HAS_BYTE_TABLES:
            found = self.floats(words)
            low = [builder.lshr(found[place], self.words(16)) for place in (0, 2)]
            return [builder.or_(one, other) for one, other in zip(low, (found[1], found[3]), strict=True)]
        indices = builder.bitcast(words, _BYTES)
        bits = np.arange(128, dtype=np.float32).view(np.uint32) >> 16
        low, high = (self.look_up(indices, (bits >> shift) & 0xFF) for shift in (0, 8))
        high = builder.or_(high, builder.and_(indices, ir.Constant(_BYTES, [0x80] * _LINE)))
        found = []
        for half in (0, 2):
            places = [
                4 * word + half + place + side for word in range(LANES) for place in (0, 1) for side in (0, _LINE)
            ]
            mask = ir.Constant(ir.VectorType(_INT32, _LINE), places)
            found.append(builder.bitcast(builder.shuffle_vector(low, high, mask), _WORDS))
        return found

    def look_up(self, indices: Any, table: Any) -> Any:
        """Numbers [128] at the lower 7 bits of each index."""
        halves = [ir.Constant(_BYTES, [int(number) for number in half]) for half in (table[:_LINE], table[_LINE:])]
        return self.call("x86.avx512.vpermi2var.qi.512", halves[0], indices, halves[1])


@emitted(types.void, LIKE, types.int64, types.int64, types.int64)
def bytes_to_numbers(builder: Any, like: Any, source: Any, count: Any, target: Any) -> None:
    """Turns 16 * count words of 4 bytes into numbers, without their scales.

    like:   such a number: float32, or uint16 for bfloat16
    source: address of vectors of 16 words
    target: address of as many groups of vectors of 16 words: of float32 the first bytes of all words, then the second
            ones, and so on; of bfloat16 the first two bytes of all words, then the others
    """
    emitter, size = _ByteEmitter(builder), 4 * _LINE if like == types.float32 else 2 * _LINE
    with cgutils.for_range(builder, count) as loop:
        words = emitter.read(source, builder.mul(loop.index, _INT64(_LINE)), _WORDS)
        there = builder.add(target, builder.mul(loop.index, _INT64(size)))
        for number, vector in enumerate(emitter.floats(words) if like == types.float32 else emitter.pairs(words)):
            emitter.write(vector, there, number * _LINE)


@emitted(types.void, types.int64, types.int64)
def copy_vector(builder: Any, source: Any, target: Any) -> None:
    """Copies 16 words from one address to another."""
    emitter = VectorEmitter(builder)
    emitter.write(emitter.read(source, 0, _WORDS), target, 0)


@emitted(types.void, types.int64, types.int64)
def _copy_word(builder: Any, source: Any, target: Any) -> None:
    emitter = VectorEmitter(builder)
    emitter.write(emitter.read(source, 0, _INT32), target, 0)


@emitted(types.void, types.float32, types.int64)
def _write_float(builder: Any, number: Any, target: Any) -> None:
    VectorEmitter(builder).write(number, target, 0)


@emitted(types.void, types.int64, types.int64, types.int64)
def _transpose_words(builder: Any, source: Any, stride: Any, target: Any) -> None:
    """Writes 16 rows of 16 words, `stride` bytes apart, as columns of a matrix [16, 16] at an address."""
    emitter = VectorEmitter(builder)
    rows = [emitter.read(source, builder.mul(stride, _INT64(row)), _WORDS) for row in range(LANES)]
    step = 1
    while step < LANES:  # exchanges the two blocks beside the diagonal in each square of 2 * step
        upper = ir.Constant(_WORDS, [(lane ^ step) + LANES if lane & step else lane for lane in range(LANES)])
        lower = ir.Constant(_WORDS, [lane + LANES if lane & step else lane ^ step for lane in range(LANES)])
        for row in range(LANES):
            if not row & step:
                pair = rows[row], rows[row | step]
                rows[row] = builder.shuffle_vector(*pair, upper)
                rows[row | step] = builder.shuffle_vector(*pair, lower)
        step *= 2
    for number, words in enumerate(rows):
        emitter.write(words, target, number * LANES * _WORD)


def _read_elements(emitter: VectorEmitter, address: Any, offset: Any, bits: int) -> Any:
    """16 numbers of so many bits, each in a word of its own."""
    loaded = emitter.read(address, offset, ir.VectorType(ir.IntType(bits), LANES))
    return loaded if bits == 32 else emitter.builder.zext(loaded, _WORDS)


@emitted(types.void, LIKE, types.int64, types.int64, types.int64)
def _interleave(builder: Any, like: Any, source: Any, stride: Any, target: Any) -> None:
    """Writes 16 words, each of one number of as many tokens as fit.

    like:   such a number
    stride: bytes between tokens
    """
    emitter, size = VectorEmitter(builder), like.bitwidth
    words = _read_elements(emitter, source, 0, size)
    for place in range(1, 32 // size):
        numbers = _read_elements(emitter, source, builder.mul(stride, _INT64(place)), size)
        words = builder.or_(words, builder.shl(numbers, emitter.words(place * size)))
    emitter.write(words, target, 0)


@emitted(types.void, LIKE, types.int64, types.int64, types.int64)
def _insert(builder: Any, like: Any, source: Any, target: Any, place: Any) -> None:
    """Writes 16 numbers of a token to its place in as many words. What is for later tokens becomes 0."""
    emitter, size = VectorEmitter(builder), like.bitwidth
    words = _read_elements(emitter, source, 0, size)
    if size < 32:
        shift = builder.mul(builder.trunc(place, _INT32), _INT32(size))
        before = builder.sub(builder.shl(_INT32(1), shift), _INT32(1))
        kept = builder.and_(emitter.read(target, 0, _WORDS), emitter.broadcast(before))
        words = builder.or_(kept, builder.shl(words, emitter.broadcast(shift)))
    emitter.write(words, target, 0)


@kernel
def _spread_words(source: Any, target: int, count: int) -> None:
    """Copies so many words of a token to its column of a panel."""
    for word in range(count):
        _copy_word(source + word * _WORD, target + word * LANES * _WORD)


def _round_row(numbers: Any, row: Any) -> Any:
    """Rounds numbers to the type of the row; returns their scale, if that is of bytes."""
    raise TypeError("Only kernels can call this.")


@overload(_round_row, strict=False)  # type: ignore[untyped-decorator]
def _overload_round_row(numbers: Any, row: Any) -> Any:
    if row.dtype == types.uint8:
        return lambda numbers, row: round_to_bytes(numbers, row)

    def rounded(numbers: Any, row: Any) -> Any:
        for i in range(len(numbers)):
            row[i] = from_float32(to_float32(numbers[i]), row)
        return np.float32(1)

    return rounded


@kernel
def _panel_of(kv: PagedKV, cache: Any, dim: int, itemsize: int, page: int, offset: int, width: int) -> Any:
    """The address of the panel of a token, 16 tokens times `width` numbers beside those of others."""
    address = np.int64(cache.ctypes.data)
    if itemsize == 1:
        return address + (page * kv.block_size + offset) // LANES * LANES * (dim + SCALE_BYTES)
    return address + page * kv.block_size * dim * itemsize + offset // LANES * LANES * width * itemsize


@kernel
def _round_rows(source: Any, first: int, count: int, column: int, dim: int, rows: Any, scales: int) -> None:
    """Rounds numbers of so many rows from the first on to the type of `rows`; scales of bytes go to an address."""
    for i in range(count):
        scale = _round_row(source[first + i, column : column + dim], rows[i])
        if rows.itemsize == 1:
            _write_float(scale, scales + i * SCALE_BYTES)


@kernel
def _store_rows(
    kv: PagedKV, slots: Any, first: int, stop: int, keys: Any, key_column: int, values: Any, value_column: int,
    heads: int, rows: Any,
) -> None:  # fmt: skip
    itemsize, per_word = rows.itemsize, _WORD // rows.itemsize
    source, stride = np.int64(rows.ctypes.data), rows.shape[1] * itemsize
    key_dim, value_dim, words = kv.key_dim, kv.value_dim, kv.key_dim // per_word
    value_stride = LANES * (LANES if itemsize == 1 else kv.block_size) * itemsize
    is_panel = stop - first == LANES and slots[first] % LANES == 0 and slots[stop - 1] == slots[first] + LANES - 1
    for head in range(heads):
        for row in range(first, first + 1 if is_panel else stop):
            page, offset = slots[row] // kv.block_size * kv.heads + head, slots[row] % kv.block_size
            place, count = offset % LANES, LANES if is_panel else 1
            panel = _panel_of(kv, kv.keys, key_dim, itemsize, page, offset, key_dim)
            column = key_column + head * key_dim
            _round_rows(keys, row, count, column, key_dim, rows, panel + LANES * key_dim + place * SCALE_BYTES)
            if is_panel:
                whole = words // LANES * LANES
                for word in range(0, whole, LANES):
                    _transpose_words(source + word * _WORD, stride, panel + word * LANES * _WORD)
                for token in range(LANES if whole < words else 0):
                    at = source + token * stride + whole * _WORD
                    _spread_words(at, panel + (whole * LANES + token) * _WORD, words - whole)
            else:
                _spread_words(source, panel + place * _WORD, words)
            panel = _panel_of(kv, kv.values, value_dim, itemsize, page, offset, LANES)
            column = value_column + head * value_dim
            _round_rows(values, row, count, column, value_dim, rows, panel + LANES * value_dim + place * SCALE_BYTES)
            for part in range(value_dim // LANES):
                at, target = source + part * LANES * itemsize, panel + part * value_stride
                target += place // per_word * LANES * _WORD
                if is_panel:
                    for step in range(LANES // per_word):
                        _interleave(rows[0, 0], at + step * per_word * stride, stride, target + step * LANES * _WORD)
                else:
                    _insert(rows[0, 0], at, target, place % per_word)


@kernel
def store_kv(
    kv: PagedKV, slots: Any, first: int, stop: int, keys: Any, key_column: int, values: Any, value_column: int,
    heads: int, rows: Any,
) -> None:  # fmt: skip
    """Stores keys and values of the rows of a chunk (see `AttentionPlan.chunks`) in the cache.

    keys:   [T, ...], of which `heads` * key_dim numbers from `key_column` on are stored; values likewise
    slots:  [T] where each row goes
    rows:   [16, the larger of key_dim and value_dim] scratch in the type that goes into products
    """
    if kv.itemsize == 1:
        _store_rows(kv, slots, first, stop, keys, key_column, values, value_column, heads, rows.view(np.uint8))
    else:
        _store_rows(kv, slots, first, stop, keys, key_column, values, value_column, heads, rows)


@entry
def store_kv_layer(worker: Worker, kv: PagedKV, plan: AttentionPlan, keys: Any, values: Any, rows: Any) -> None:
    """Stores keys [T, heads * key_dim] and values [T, heads * value_dim] in the cache of a layer.

    rows: [threads, 16, the larger of key_dim and value_dim] scratch in the cache's type
    """
    for task in claimed(worker, 0, len(plan.chunks) - 1):
        first, stop = plan.chunks[task], plan.chunks[task + 1]
        store_kv(kv, plan.slots, first, stop, keys, 0, values, 0, kv.heads, rows[worker.thread])
