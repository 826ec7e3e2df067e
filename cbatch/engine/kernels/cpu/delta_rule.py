"""The gated delta rule, in vector registers: a token reads and writes each number of a state once.

Columns of a state, one for each number of a value, are independent of each other. A block of them stays in the
processor's first cache from token to token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from cbatch.engine.kernels.cpu.fast_math import exp
from cbatch.engine.kernels.cpu.jit import HAS_AVX512, kernel
from cbatch.engine.kernels.cpu.matmul.microkernel import LANES
from cbatch.engine.kernels.cpu.recurrence import Recurrence, snapshot_slot, softplus, state_of
from cbatch.engine.kernels.cpu.softmax import FloatEmitter
from cbatch.engine.kernels.cpu.work_queue import Worker, claim, next_task

_PANELS = 4 if HAS_AVX512 else 2
"""Vectors of a block: so many that sums wait for no other, and that they fit into the registers."""

_FLOAT, _INT64 = ir.FloatType(), ir.IntType(64)
_FLOATS = ir.VectorType(_FLOAT, LANES)


class DeltaParams(NamedTuple):
    """The heads of a gated delta rule (see `GatedDelta` in `models/programs/program.py`).

    decay, decay_bias: [value_heads]; the decay is -exp(decay_log)
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    decay: NDArray[np.float32]
    decay_bias: NDArray[np.float32]


class _Addresses(NamedTuple):
    """Where a token's block lies: its state [keys, columns], with `stride` bytes from one key to the next."""

    state: int
    stride: int
    keys: int
    query: int
    key: int
    value: int
    out: int


class _Factors(NamedTuple):
    """Of a token, with its key k and query q as they are in the source.

    error = rate * (v - seen * k S); out = old * q S + new * error; S = decay * S + key * k outer error
    """

    decay: np.float32
    rate: np.float32
    seen: np.float32
    old: np.float32
    new: np.float32
    key: np.float32


class _DeltaEmitter(FloatEmitter):
    """Emits code for one type of state and one number of panels."""

    def __init__(self, builder: Any, element: Any, panels: int) -> None:
        super().__init__(builder)
        self.element = element
        self.panels = range(panels)
        self.bytes = LANES * (2 if element == types.uint16 else 4)

    def number(self, start: Any, index: Any) -> Any:
        """A float32 of a row, in all lanes."""
        at = self.builder.add(start, self.builder.mul(index, _INT64(4)))
        return self.broadcast(self.builder.load(self.builder.inttoptr(at, _FLOAT.as_pointer()), align=4))

    def row(self, start: Any, stride: Any, index: Any) -> Any:
        return self.builder.add(start, self.builder.mul(stride, index))

    def emit(self, addresses: Any, factors: Any) -> None:
        state, stride, keys, query, key, value, out = addresses
        decay, rate, seen, old, new, key_factor = (self.broadcast(factor) for factor in factors)
        builder = self.builder
        zero = ir.Constant(_FLOATS, None)
        found = [[cgutils.alloca_once_value(builder, zero) for _ in self.panels] for _ in range(2)]
        with cgutils.for_range(builder, keys) as loop:
            place = self.row(state, stride, loop.index)
            both = self.number(key, loop.index), self.number(query, loop.index)
            for panel in self.panels:
                numbers = self.load(place, panel, self.element)
                for sums, number in zip(found, both, strict=True):
                    builder.store(self.fma(number, numbers, builder.load(sums[panel])), sums[panel])
        changes = []
        for panel in self.panels:
            by_key, by_query = (builder.load(sums[panel]) for sums in found)
            error = builder.fsub(self.load(value, panel, types.float32), builder.fmul(seen, by_key))
            error = builder.fmul(rate, error)
            self.store(self.fma(new, error, builder.fmul(old, by_query)), out, panel, types.float32)
            changes.append(builder.fmul(key_factor, error))
        with cgutils.for_range(builder, keys) as loop:
            place = self.row(state, stride, loop.index)
            number = self.number(key, loop.index)
            for panel in self.panels:
                numbers = builder.fmul(decay, self.load(place, panel, self.element))
                self.store(self.fma(number, changes[panel], numbers), place, panel, self.element)


@intrinsic  # type: ignore[untyped-decorator]
def _step_block(context: Any, like: Any, is_wide: Any, addresses: Any, factors: Any) -> Any:
    """One token of a block of _PANELS panels if it is wide, else of one.  like: a number of the state"""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, is_wide, *records = args
        where, numbers = (cgutils.unpack_tuple(builder, record) for record in records)
        with builder.if_else(is_wide) as (wide, narrow):
            with wide:
                _DeltaEmitter(builder, like, _PANELS).emit(where, numbers)
            with narrow:
                _DeltaEmitter(builder, like, 1).emit(where, numbers)
        return context.get_dummy_value()

    return types.void(like, types.boolean, addresses, factors), generate


@kernel
def _factors(query: Any, key: Any, decay: Any, rate: Any) -> _Factors:
    queries, keys, both = np.float32(0), np.float32(0), np.float32(0)
    for i in range(len(key)):
        queries += query[i] * query[i]
        keys += key[i] * key[i]
        both += query[i] * key[i]
    unit = np.float32(1) / np.sqrt(keys + np.float32(1e-6))
    scale = np.float32(1) / np.sqrt((queries + np.float32(1e-6)) * np.float32(len(key)))
    return _Factors(decay, rate, decay * unit, decay * scale, scale * unit * both, unit)


@kernel
def _copy_block(source: Any, target: Any, keys: int, stride: int, width: int) -> None:
    for i in range(keys):
        for j in range(width):
            target[i * stride + j] = source[i * stride + j]


@kernel
def _delta_chunk(
    recurrence: Recurrence, state: int, chunk: int, head: int, left: int, width: int, params: DeltaParams, source: Any,
    controls: Any, out: Any,
) -> None:  # fmt: skip
    """The columns from `left` of a head."""
    keys, columns = params.key_dim, params.value_dim
    begin = head * keys * columns + left
    memory = state_of(recurrence, state, recurrence.slots[chunk])[begin:]
    key_head, inner = head // (params.value_heads // params.key_heads), params.key_heads * keys
    value_column, first = head * columns + left, recurrence.starts[chunk]
    for row in range(first, recurrence.starts[chunk + 1]):
        query = source[row, key_head * keys : (key_head + 1) * keys]
        key = source[row, inner + key_head * keys :][:keys]
        rate = np.float32(1) / (np.float32(1) + exp(-controls[row, head]))
        speed = softplus(controls[row, params.value_heads + head] + params.decay_bias[head])
        factors = _factors(query, key, exp(params.decay[head] * speed), rate)
        addresses = _Addresses(
            memory.ctypes.data, columns * memory.itemsize, keys, query.ctypes.data, key.ctypes.data,
            source[row, 2 * inner + value_column :].ctypes.data, out[row, value_column:].ctypes.data,
        )  # fmt: skip
        _step_block(memory[0], width > LANES, addresses, factors)
        copied_to = snapshot_slot(recurrence, chunk, row + 1 - first)
        if copied_to >= 0:
            _copy_block(memory, state_of(recurrence, state, copied_to)[begin:], keys, columns, width)


@kernel
def gated_delta(
    worker: Worker, phase: int, recurrence: Recurrence, state: int, params: DeltaParams, source: Any, controls: Any,
    out: Any,
) -> int:  # fmt: skip
    """out [T, value_heads * value_dim] = the gated delta rule over queries, keys and values (see `GatedDelta`).

    controls: [T, 2 * value_heads] b, then a; value_dim is a multiple of 16
    """
    width = _PANELS * LANES if params.value_dim % (_PANELS * LANES) == 0 else LANES
    parts = params.value_dim // width
    per_chunk = params.value_heads * parts
    num_tasks = (len(recurrence.starts) - 1) * per_chunk
    task = claim(worker, phase, num_tasks)
    while task >= 0:
        chunk, head, left = task // per_chunk, task % per_chunk // parts, task % parts * width
        _delta_chunk(recurrence, state, chunk, head, left, width, params, source, controls, out)
        task = next_task(worker, phase, num_tasks)
    return phase + 1
