"""Faults planted into the kernels of operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from cbatch.model.ops.device_kernel import DeviceKernel, DeviceOps


def replace_kernel(
    patch: pytest.MonkeyPatch, name: str, wrong: Callable[..., Any], *, triton: bool = True, of_torch: bool = False
) -> None:
    """Where the kernel of that name is called, `wrong` is, with the right function before the arguments.

    triton, of_torch: which of both
    """
    right_for = DeviceKernel.function_for

    def function_for(self: DeviceKernel[Any, Any], ops: DeviceOps) -> Callable[..., Any]:
        right = right_for(self, ops)
        by_kernel = ops.triton and name not in ops.without
        return partial(wrong, right) if self.name == name and (triton if by_kernel else of_torch) else right

    patch.setattr(DeviceKernel, "function_for", function_for)
