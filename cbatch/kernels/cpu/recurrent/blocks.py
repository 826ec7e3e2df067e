"""Blocks of a state, in vector registers: a token fetches and writes each of their numbers once.

A block has some columns of a state [keys, columns], which are independent of each other. It lies in one piece, so that
it stays in the processor's first cache from token to token: within a slot, a state is [heads, blocks, keys, columns of
a block].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cbatch.kernels.cpu.jit import HAS_AVX512, kernel
from cbatch.kernels.cpu.matmul.microkernel import LANES
from cbatch.kernels.cpu.softmax import FloatEmitter

_PANELS = (4, 2, 1) if HAS_AVX512 else (2, 1)
"""Numbers of vectors that a block may have. Sums of the most wait for no other, and fit into the registers."""

_FLOAT, _INT64 = ir.FloatType(), ir.IntType(64)
_FLOATS = ir.VectorType(_FLOAT, LANES)


@kernel
def block_width(columns: int) -> int:
    """Columns of a block, for a multiple of 16."""
    panels = _PANELS[0]
    while columns % (panels * LANES):
        panels //= 2
    return panels * LANES


class DeltaAddresses(NamedTuple):
    """Where the numbers of a token are for a block."""

    state: int
    keys: int
    query: int
    key: int
    value: int
    out: int


class DeltaFactors(NamedTuple):
    """Of a token, with its key k and query q as they are in the source.

    error = rate * (v - seen * k S); out = old * q S + new * error; S = decay * S + key * k outer error
    """

    decay: np.float32
    rate: np.float32
    seen: np.float32
    old: np.float32
    new: np.float32
    key: np.float32


class ScanAddresses(NamedTuple):
    """Where the numbers of a token are for a block of a scan."""

    state: int
    keys: int
    b: int
    c: int
    x: int
    out: int


class ScanFactors(NamedTuple):
    """Of a token: S = decay * S + b outer step * x; out = c S + skip * x."""

    decay: np.float32
    step: np.float32
    skip: np.float32


class _BlockEmitter(FloatEmitter):
    """Emits code for one type of state and one number of panels."""

    def __init__(self, builder: Any, element: Any, panels: int) -> None:
        super().__init__(builder)
        self.element = element
        self.panels = range(panels)
        self.stride = panels * LANES * (2 if element == types.uint16 else 4)

    def number(self, start: Any, index: Any) -> Any:
        """A float32 of a row, in all lanes."""
        at = self.builder.add(start, self.builder.mul(index, _INT64(4)))
        return self.broadcast(self.builder.load(self.builder.inttoptr(at, _FLOAT.as_pointer()), align=4))

    def key_row(self, state: Any, index: Any) -> Any:
        """The address of the numbers of a key."""
        return self.builder.add(state, self.builder.mul(_INT64(self.stride), index))

    def zeros(self) -> list[Any]:
        """Sums in registers, one for each panel."""
        return [cgutils.alloca_once_value(self.builder, ir.Constant(_FLOATS, None)) for _ in self.panels]

    def add(self, sums: Any, one: Any, other: Any) -> None:
        self.builder.store(self.fma(one, other, self.builder.load(sums)), sums)

    def emit_delta(self, addresses: Any, factors: Any) -> None:
        """Reads the state twice, the second time from the first cache, and writes it."""
        state, keys, query, key, value, out = addresses
        decay, rate, seen, old, new, key_factor = map(self.broadcast, factors)
        builder, by_key, by_query, changes = self.builder, self.zeros(), self.zeros(), []
        with cgutils.for_range(builder, keys) as loop:
            row = self.key_row(state, loop.index)
            one, other = (self.number(start, loop.index) for start in (key, query))
            for panel in self.panels:
                numbers = self.load(row, panel, self.element)
                self.add(by_key[panel], one, numbers)
                self.add(by_query[panel], other, numbers)
        for panel in self.panels:
            error = builder.fmul(seen, builder.load(by_key[panel]))
            error = builder.fmul(rate, builder.fsub(self.load(value, panel, types.float32), error))
            result = self.fma(new, error, builder.fmul(old, builder.load(by_query[panel])))
            self.store(result, out, panel, types.float32)
            changes.append(builder.fmul(key_factor, error))
        with cgutils.for_range(builder, keys) as loop:
            row, number = self.key_row(state, loop.index), self.number(key, loop.index)
            for panel in self.panels:
                numbers = builder.fmul(decay, self.load(row, panel, self.element))
                self.store(self.fma(number, changes[panel], numbers), row, panel, self.element)

    def emit_scan(self, addresses: Any, factors: Any) -> None:
        """Reads and writes the state once."""
        state, keys, b, c, x, out = addresses
        decay, step, skip = map(self.broadcast, factors)
        builder, sums = self.builder, self.zeros()
        inputs = [self.load(x, panel, types.float32) for panel in self.panels]
        changes = [builder.fmul(step, one) for one in inputs]
        with cgutils.for_range(builder, keys) as loop:
            row = self.key_row(state, loop.index)
            one, other = (self.number(start, loop.index) for start in (b, c))
            for panel in self.panels:
                numbers = builder.fmul(decay, self.load(row, panel, self.element))
                numbers = self.fma(one, changes[panel], numbers)
                self.store(numbers, row, panel, self.element)
                self.add(sums[panel], other, numbers)
        for panel, one in zip(self.panels, inputs, strict=True):
            self.store(self.fma(skip, one, builder.load(sums[panel])), out, panel, types.float32)


def _emit(context: Any, builder: Any, like: Any, args: Any, name: str) -> Any:
    """The code for each number of panels, and the choice among them."""
    _, width, *records = args
    unpacked = [cgutils.unpack_tuple(builder, record) for record in records]
    end = builder.append_basic_block("end")
    switch = builder.switch(width, end)
    for panels in _PANELS:
        block = builder.append_basic_block(f"panels.{panels}")
        switch.add_case(_INT64(panels * LANES), block)
        with builder.goto_block(block):
            getattr(_BlockEmitter(builder, like, panels), name)(*unpacked)
            builder.branch(end)
    builder.position_at_end(end)
    return context.get_dummy_value()


@intrinsic  # type: ignore[untyped-decorator]
def step_delta(context: Any, like: Any, width: Any, addresses: Any, factors: Any) -> Any:
    """One token of a block of so many columns.  like: a number of the state"""
    signature = types.void(like, types.int64, addresses, factors)
    return signature, lambda context, builder, _, args: _emit(context, builder, like, args, "emit_delta")


@intrinsic  # type: ignore[untyped-decorator]
def step_scan(context: Any, like: Any, width: Any, addresses: Any, factors: Any) -> Any:
    """Likewise of a scan."""
    signature = types.void(like, types.int64, addresses, factors)
    return signature, lambda context, builder, _, args: _emit(context, builder, like, args, "emit_scan")
