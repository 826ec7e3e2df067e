"""Writes keys and values into the panels of the cache (see `paged_kv`), with vector instructions.

All panels consist of words of 32 bits: one float32, two bfloat16 or four bytes. A word of keys holds consecutive
numbers of one token, a word of values one number of consecutive tokens. The keys of 16 tokens of a sequence are a
matrix of words, which is transposed in registers. A token that comes alone is stored word by word.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from cbatch.kernels.cpu.fast_math import from_float32, to_float32
from cbatch.kernels.cpu.jit import entry, kernel
from cbatch.kernels.cpu.kv_rounding import SCALE_BYTES, round_to_bytes, write_float
from cbatch.kernels.cpu.matmul.microkernel import LANES, VectorEmitter
from cbatch.kernels.cpu.paged_kv import AttentionPlan, PagedKV
from cbatch.kernels.cpu.work_queue import Worker, claim, next_task

_WORD = 4
_INT8, _INT16, _INT32, _INT64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_WORDS = ir.VectorType(_INT32, LANES)


class _WordEmitter(VectorEmitter):
    """Emits code for vectors of 16 words."""

    def pointer(self, address: Any, offset: Any, kind: Any) -> Any:
        offset = _INT64(offset) if isinstance(offset, int) else offset
        return self.builder.inttoptr(self.builder.add(address, offset), kind.as_pointer())

    def load(self, address: Any, offset: Any, kind: Any = _WORDS) -> Any:
        return self.builder.load(self.pointer(address, offset, kind), align=1)

    def store(self, vector: Any, address: Any, offset: Any) -> None:
        self.builder.store(vector, self.pointer(address, offset, vector.type), align=1)

    def elements(self, address: Any, offset: Any, bits: int) -> Any:
        """16 numbers of so many bits, each in a word of its own."""
        loaded = self.load(address, offset, ir.VectorType(ir.IntType(bits), LANES))
        return loaded if bits == 32 else self.builder.zext(loaded, _WORDS)

    def shifted(self, words: Any, bits: Any) -> Any:
        bits = self.broadcast(bits) if not isinstance(bits, int) else ir.Constant(_WORDS, [bits] * LANES)
        return self.builder.shl(words, bits)


@intrinsic  # type: ignore[untyped-decorator]
def _transpose_words(context: Any, source: Any, stride: Any, target: Any) -> Any:
    """Writes 16 rows of 16 words, `stride` bytes apart, as columns of a matrix [16, 16] at an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, stride, target = args
        emitter = _WordEmitter(builder)
        rows = [emitter.load(source, builder.mul(stride, _INT64(row))) for row in range(LANES)]
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
            emitter.store(words, target, number * LANES * _WORD)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _copy_word(context: Any, source: Any, target: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emitter = _WordEmitter(builder)
        emitter.store(emitter.load(args[0], 0, _INT32), args[1], 0)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _interleave(context: Any, like: Any, source: Any, stride: Any, target: Any) -> Any:
    """Writes 16 words, each of one number of as many tokens as fit.

    like:   such a number
    stride: bytes between tokens
    """
    size = like.bitwidth

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, source, stride, target = args
        emitter, words = _WordEmitter(builder), None
        for place in range(32 // size):
            numbers = emitter.elements(source, builder.mul(stride, _INT64(place)), size)
            words = numbers if words is None else builder.or_(words, emitter.shifted(numbers, place * size))
        emitter.store(words, target, 0)
        return context.get_dummy_value()

    return types.void(like, types.int64, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _insert(context: Any, like: Any, source: Any, target: Any, place: Any) -> Any:
    """Writes 16 numbers of a token to its place in as many words. What is for later tokens becomes 0."""
    size = like.bitwidth

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, source, target, place = args
        emitter = _WordEmitter(builder)
        words = emitter.elements(source, 0, size)
        if size < 32:
            shift = builder.mul(builder.trunc(place, _INT32), _INT32(size))
            before = builder.sub(builder.shl(_INT32(1), shift), _INT32(1))
            kept = builder.and_(emitter.load(target, 0), emitter.broadcast(before))
            words = builder.or_(kept, emitter.shifted(words, shift))
        emitter.store(words, target, 0)
        return context.get_dummy_value()

    return types.void(like, types.int64, types.int64, types.int64), generate


@kernel
def _spread_words(source: Any, target: int, count: int) -> None:
    """Copies so many words of a token to its column of a panel."""
    for word in range(count):
        _copy_word(source + word * _WORD, target + word * LANES * _WORD)


@kernel
def _store_keys(source: Any, stride: int, count: int, target: int) -> None:
    """Stores 16 rows of so many words as a panel of keys."""
    whole = count // LANES * LANES
    for word in range(0, whole, LANES):
        _transpose_words(source + word * _WORD, stride, target + word * LANES * _WORD)
    for token in range(LANES if whole < count else 0):
        at = source + token * stride + whole * _WORD
        _spread_words(at, target + (whole * LANES + token) * _WORD, count - whole)


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
            write_float(scale, scales + i * SCALE_BYTES)


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
                _store_keys(source, stride, words, panel)
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
    num_tasks = len(plan.chunks) - 1
    task = claim(worker, 0, num_tasks)
    while task >= 0:
        first, stop = plan.chunks[task], plan.chunks[task + 1]
        store_kv(kv, plan.slots, first, stop, keys, 0, values, 0, kv.heads, rows[worker.thread])
        task = next_task(worker, 0, num_tasks)
