"""Scalar functions of the kernels: bfloat16, kept as its 16 bits, and functions that the compiler can vectorize."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from cbatch.kernels.cpu.emit import FLOAT, INT32, Value, emitted
from cbatch.kernels.cpu.jit import by_types, kernel

_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
TO_INTEGER = np.float32(1.5 * 2**23)
"""The low bits of a smaller number that is added to this are the nearest integer, ties to even."""

_LOWEST, _HIGHEST = np.float32(-87.0), np.float32(88.0)


@emitted(types.uint32, types.float32)
def bits_of(x: Value) -> Value:
    """The bits of a float32 as a uint32."""
    return x.bits(INT32)


@emitted(types.float32, types.uint32)
def from_bits(bits: Value) -> Value:
    """The float32 with these bits."""
    return bits.bits(FLOAT)


@by_types
def to_float32(x: Any) -> Any:
    """An element of a tensor as float32."""
    if x == types.uint16:
        return lambda x: from_bits(np.uint32(x) << np.uint32(16))
    return lambda x: np.float32(x)


@by_types
def from_float32(x: Any, like: Any) -> Any:
    """A float32 as an element of the tensor `like`: itself, or rounded to the nearest bfloat16."""
    if like.dtype == types.uint16:
        return lambda x, like: round_to_bfloat16(x)
    return lambda x, like: np.float32(x)


@kernel
def copy_row(source: Any, target: Any) -> None:
    """Copies a row to one of another type, maybe a longer one."""
    for i in range(len(source)):
        target[i] = from_float32(to_float32(source[i]), target)


@kernel
def round_to_bfloat16(x: Any) -> Any:
    """The 16 bits of the bfloat16 nearest to a float32, ties to even; NaN stays NaN."""
    bits = bits_of(x)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.uint16(rounded) if x == x else np.uint16(0x7FC0)


@kernel
def exp(x: Any) -> Any:
    """e^x of a float32 within 2 units in the last place; e^88 above 88, 0 below -87 (Cephes' expf)."""
    is_tiny = x < _LOWEST
    x = _LOWEST if is_tiny else x
    x = _HIGHEST if x > _HIGHEST else x  # above it the exponent would overflow into the sign
    n = np.floor(x * _LOG2_E + np.float32(0.5))
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1)
    power = p * from_bits(np.uint32(np.int32(n) + np.int32(127)) << np.uint32(23))
    return np.float32(0) if is_tiny else power


@kernel
def silu(x: Any) -> Any:
    return x / (np.float32(1) + exp(-x))


@kernel
def tanh(x: Any) -> Any:
    return np.float32(1) - np.float32(2) / (exp(np.float32(2) * x) + np.float32(1))
