"""Helpers of kernel tests: numbers to compute with, and calls of kernels that only other kernels call."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from numba import njit
from torch import Tensor

from cbatch.compat import compilers
from cbatch.kernels.cpu.jit import OPTIONS
from tests.support.device import DEVICE


@cache
def callable_kernel(kernel: Any) -> Callable[..., Any]:
    """A kernel, compiled by itself."""
    compiled: Callable[..., Any] = njit(pipeline_class=compilers().outer, **OPTIONS)(kernel.py_func)
    return compiled


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normal numbers on the device of these tests."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)
