"""The largest of many numbers, found as integers in the same order, of which the vector unit compares many at once."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from cbatch.engine.kernels.cpu.jit import kernel

BLOCK = 64
"""Numbers of which the largest is found first."""

_INFINITY = np.float32(np.inf)


@intrinsic  # type: ignore[untyped-decorator]
def to_ordered_int(context: Any, x: Any) -> Any:
    """An int32 for a float32: in the same order, and the compiler can find the largest of many."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _flip(builder, builder.bitcast(args[0], ir.IntType(32)))

    return types.int32(types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def from_ordered_int(context: Any, order: Any) -> Any:
    """The float32 of such an int32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(_flip(builder, args[0]), ir.FloatType())

    return types.float32(types.int32), generate


def _flip(builder: Any, bits: Any) -> Any:
    """All bits but the sign, where that is set."""
    sign = builder.ashr(bits, ir.Constant(bits.type, 31))
    return builder.xor(bits, builder.and_(sign, ir.Constant(bits.type, 0x7FFFFFFF)))


@kernel
def max_of(part: Any) -> Any:
    """The largest of some numbers; where one of them is none, a number that means nothing."""
    most = to_ordered_int(-_INFINITY)
    for i in range(len(part)):
        order = to_ordered_int(part[i])
        most = order if order > most else most
    return from_ordered_int(most)


@kernel
def argmax(row: Any) -> Any:
    """The place of a row's largest number, the first of equal ones, and that number; NaN where any of them is none."""
    place, most, wrong = 0, -_INFINITY, np.int32(0)
    for start in range(0, len(row), BLOCK):
        part = row[start : start + BLOCK]
        for i in range(len(part)):
            wrong = np.int32(wrong + (part[i] != part[i]))
        top = max_of(part)
        if top > most:
            place, most = start, top
    if wrong > 0:
        return 0, np.float32(np.nan)
    while row[place] != most:
        place += 1
    return place, most
