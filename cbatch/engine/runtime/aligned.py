"""Arrays for vector units."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LINE = 64
"""Bytes of a line of the processor's cache, and of its longest vector."""


def empty(shape: int | tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """An array that begins with a line, so that no vector of it lies in two; numpy begins large ones 16 bytes later."""
    dtype = np.dtype(dtype)
    size = math.prod(shape if isinstance(shape, tuple) else (shape,)) * dtype.itemsize
    room = np.empty(size + _LINE, np.uint8)
    start = -room.ctypes.data % _LINE
    array: NDArray[Any] = room[start : start + size].view(dtype).reshape(shape)
    return array
