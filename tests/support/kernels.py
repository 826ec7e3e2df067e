"""Calls single kernels from Python, which only other kernels call otherwise."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from numba import njit

from cbatch.kernels.cpu.jit import OPTIONS


@cache
def callable_kernel(kernel: Any) -> Callable[..., Any]:
    """A kernel, compiled by itself."""
    compiled: Callable[..., Any] = njit(**OPTIONS)(kernel.py_func)
    return compiled
