"""Argmax of a row. Floats are compared as integers in the same order, which the compiler can vectorize."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from cbatch.kernels.cpu.jit import kernel

BLOCK = 64
"""Numbers whose maximum is found before they are searched."""

_INFINITY = np.float32(np.inf)


@intrinsic  # type: ignore[untyped-decorator]
def to_ordered_int(context: Any, x: Any) -> Any:
    """A float32 as an int32 in the same order."""
    signature = types.int32(types.float32)
    return signature, lambda _, builder, signature, args: _flip(builder, builder.bitcast(args[0], ir.IntType(32)))


@intrinsic  # type: ignore[untyped-decorator]
def from_ordered_int(context: Any, order: Any) -> Any:
    """The float32 of an int32 from `to_ordered_int`."""
    signature = types.float32(types.int32)
    return signature, lambda _, builder, signature, args: builder.bitcast(_flip(builder, args[0]), ir.FloatType())


def _flip(builder: Any, bits: Any) -> Any:
    """Flips all bits but the sign if the sign is set."""
    sign = builder.ashr(bits, ir.Constant(bits.type, 31))
    return builder.xor(bits, builder.and_(sign, ir.Constant(bits.type, 0x7FFFFFFF)))


@kernel
def max_of(part: Any) -> Any:
    """The maximum of some numbers; meaningless if one of them is NaN."""
    most = to_ordered_int(-_INFINITY)
    for i in range(len(part)):
        order = to_ordered_int(part[i])
        most = order if order > most else most
    return from_ordered_int(most)


@kernel
def argmax(row: Any) -> Any:
    """The index of a row's first maximum, and the maximum; (0, NaN) if any number of the row is NaN."""
    index, most, num_nan = 0, -_INFINITY, np.int32(0)
    for start in range(0, len(row), BLOCK):
        part = row[start : start + BLOCK]
        for i in range(len(part)):
            num_nan = np.int32(num_nan + (part[i] != part[i]))
        top = max_of(part)
        if top > most:
            index, most = start, top
    if num_nan > 0:
        return 0, np.float32(np.nan)
    while row[index] != most:
        index += 1
    return index, most
