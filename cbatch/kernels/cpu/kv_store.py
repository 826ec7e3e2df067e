"""Writes keys and values into the panels of the cache (see `paged_kv`).

All panels consist of words of 32 bits: one float32, two bfloat16 or four bytes. A word of keys holds consecutive
numbers of one token, a word of values one number of consecutive tokens. The keys of 16 tokens of a sequence are a
matrix of words, which is transposed in registers. A token that comes alone is stored word by word.

A byte is 128 more than an integer. The numbers of a token's head are these integers times one float32 scale, 1/127 of
the largest. The scale does not take part in products: it multiplies scores, or weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from cbatch.kernels.cpu.emit import INT32, LANES, LIKE, LINE, WORDS, Value, emitted, for_range
from cbatch.kernels.cpu.fast_math import TO_INTEGER, bits_of, copy_row, from_bits, to_float32
from cbatch.kernels.cpu.jit import by_types, entry, kernel, view_as
from cbatch.kernels.cpu.matmul.microkernel import prefetch_to_write
from cbatch.kernels.cpu.paged_kv import AttentionPlan, PagedKV
from cbatch.kernels.cpu.work_queue import Worker, claimed
from cbatch.runtime.kv_cache import U8_OFFSET, U8_SCALE_BYTES

_WORD = 4
_SMALLEST = np.float32(1e-30)
"""Numbers are 0 if all of a head are smaller: the inverse of their scale would overflow."""


@emitted(types.float32, types.float32, types.float32, types.float32)
def _fma(one: Value, other: Value, total: Value) -> Value:
    """one * other + total in float32, rounded once."""
    return one.fma(other, total)


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
        row[i] = np.uint8(bits_of(_fma(to_float32(numbers[i]), inverse, TO_INTEGER)) + np.uint32(U8_OFFSET))
    return scale


@emitted(types.void, types.int64, types.int64)
def copy_vector(source: Value, target: Value) -> None:
    """Copies 16 words from one address to another."""
    target.write(source.read(WORDS))


@emitted(types.void, types.float32, types.int64)
def _write_float(number: Value, target: Value) -> None:
    target.write(number)


@emitted(types.void, types.int64, types.int64, types.int64)
def _transpose_words(source: Value, stride: Value, target: Value) -> None:
    """Writes 16 rows of 16 words, `stride` bytes apart, as columns of a matrix [16, 16] at an address."""
    rows = [(source + stride * row).read(WORDS) for row in range(LANES)]
    step = 1
    while step < LANES:  # exchanges the two blocks beside the diagonal in each square of 2 * step
        upper = [(lane ^ step) + LANES if lane & step else lane for lane in range(LANES)]
        lower = [lane + LANES if lane & step else lane ^ step for lane in range(LANES)]
        for row in range(LANES):
            if not row & step:
                one, other = rows[row], rows[row | step]
                rows[row], rows[row | step] = one.shuffle(upper, other), one.shuffle(lower, other)
        step *= 2
    for number, words in enumerate(rows):
        (target + number * LANES * _WORD).write(words)


def _read_elements(address: Value, bits: int) -> Value:
    """16 numbers of so many bits, each in a word of its own."""
    loaded = address.read(ir.VectorType(ir.IntType(bits), LANES))
    return loaded if bits == 32 else loaded.to("zext", WORDS)


@emitted(types.void, LIKE, types.int64, types.int64, types.int64)
def _interleave(like: Any, source: Value, stride: Value, target: Value) -> None:
    """Writes 16 words, each of one number of as many tokens as fit.

    like:   such a number
    stride: bytes between tokens
    """
    size = like.bitwidth
    words = _read_elements(source, size)
    for place in range(1, 32 // size):
        words = words | _read_elements(source + stride * place, size) << place * size
    target.write(words)


@emitted(types.void, LIKE, types.int64, types.int64, types.int64)
def _insert(like: Any, source: Value, target: Value, place: Value) -> None:
    """Writes 16 numbers of a token to its place in as many words. What is for later tokens becomes 0."""
    size = like.bitwidth
    words = _read_elements(source, size)
    if size < 32:
        shift = place.to("trunc", INT32) * size
        before = (shift.constant(1) << shift) - 1
        words = (target.read(WORDS) & before.broadcast()) | words << shift.broadcast()
    target.write(words)


@emitted(types.void, types.int64, types.int64, types.int64)
def _spread_words(source: Value, target: Value, count: Value) -> None:
    """Copies so many words of a token to its column of a panel."""
    with for_range(count) as word:
        (target + word * LINE).write((source + word * _WORD).read(INT32))


@by_types
def _round_row(numbers: Any, row: Any) -> Any:
    """Rounds numbers to the type of the row; returns their scale, if that is of bytes."""
    if row.dtype == types.uint8:
        return lambda numbers, row: round_to_bytes(numbers, row)

    def rounded(numbers: Any, row: Any) -> Any:
        copy_row(numbers, row)
        return np.float32(1)

    return rounded


@kernel
def _panel_of(kv: PagedKV, cache: Any, dim: int, itemsize: int, page: int, offset: int, width: int) -> Any:
    """The address of the panel of a token, 16 tokens times `width` numbers beside those of others."""
    address = np.int64(cache.ctypes.data)
    if itemsize == 1:
        return address + (page * kv.block_size + offset) // LANES * LANES * (dim + U8_SCALE_BYTES)
    return address + page * kv.block_size * dim * itemsize + offset // LANES * LANES * width * itemsize


@kernel
def _round_rows(source: Any, first: int, count: int, column: int, dim: int, rows: Any, scales: int) -> None:
    """Rounds numbers of so many rows from the first on to the type of `rows`; scales of bytes go to an address."""
    for i in range(count):
        scale = _round_row(source[first + i, column : column + dim], rows[i])
        if rows.itemsize == 1:
            _write_float(scale, scales + i * U8_SCALE_BYTES)


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
            _round_rows(keys, row, count, column, key_dim, rows, panel + LANES * key_dim + place * U8_SCALE_BYTES)
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
            _round_rows(values, row, count, column, value_dim, rows, panel + LANES * value_dim + place * U8_SCALE_BYTES)
            for part in range(value_dim // LANES):
                at, target = source + part * LANES * itemsize, panel + part * value_stride
                target += place // per_word * LANES * _WORD
                if is_panel:
                    for step in range(LANES // per_word):
                        _interleave(rows[0, 0], at + step * per_word * stride, stride, target + step * LANES * _WORD)
                else:
                    _insert(rows[0, 0], at, target, place % per_word)


@kernel
def prefetch_stored(kv: PagedKV, slots: Any, first: int, stop: int, heads: int) -> None:
    """Prefetches the lines that `store_kv` writes: one word in each of many lines, which rows of a panel share."""
    itemsize, per_word = kv.itemsize, _WORD // kv.itemsize
    value_stride = LANES * (LANES if itemsize == 1 else kv.block_size) * itemsize
    for row in range(first, stop):
        if row > first and slots[row] // LANES == slots[row - 1] // LANES:
            continue
        for head in range(heads):
            page, offset = slots[row] // kv.block_size * kv.heads + head, slots[row] % kv.block_size
            panel = _panel_of(kv, kv.keys, kv.key_dim, itemsize, page, offset, kv.key_dim)
            for word in range(kv.key_dim // per_word):
                prefetch_to_write(panel + word * LINE)
            panel = _panel_of(kv, kv.values, kv.value_dim, itemsize, page, offset, LANES)
            for part in range(kv.value_dim // LANES):
                prefetch_to_write(panel + part * value_stride + offset % LANES // per_word * LINE)


@kernel
def store_kv(
    kv: PagedKV, packed: Any, slots: Any, first: int, stop: int, keys: Any, key_column: int, values: Any,
    value_column: int, heads: int, rows: Any,
) -> None:  # fmt: skip
    """Stores keys and values of the rows of a chunk (see `AttentionPlan.chunks`) in the cache.

    keys:   [T, ...], of which `heads` * key_dim numbers from `key_column` on are stored; values likewise
    slots:  [T] where each row goes
    rows:   [16, the larger of key_dim and value_dim] scratch in the type that goes into products
    """
    if packed is None:
        _store_rows(kv, slots, first, stop, keys, key_column, values, value_column, heads, rows)
    else:
        _store_rows(kv, slots, first, stop, keys, key_column, values, value_column, heads, view_as(rows, np.uint8(0)))


@entry
def store_kv_layer(worker: Worker, kv: PagedKV, plan: AttentionPlan, keys: Any, values: Any, rows: Any) -> None:
    """Stores keys [T, heads * key_dim] and values [T, heads * value_dim] in the cache of a layer.

    rows: [threads, 16, the larger of key_dim and value_dim] scratch in the type that goes into products
    """
    for task in claimed(worker, 0, len(plan.chunks) - 1):
        first, stop = plan.chunks[task], plan.chunks[task + 1]
        store_kv(kv, kv.packed, plan.slots, first, stop, keys, 0, values, 0, kv.heads, rows[worker.thread])
