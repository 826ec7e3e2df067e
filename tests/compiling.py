"""Compiles Triton kernels for a GPU on a machine without one: what the interpreter accepts, the compiler may not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
}


@contextmanager
def launches_compiled() -> Iterator[dict[str, Any]]:
    """Compiles each kernel where it is launched, for the types of its arguments, and does not run it.

    Yields what has been compiled, by the name of the kernel and its types and constants. For a process that does not
    interpret kernels.
    """
    compiled: dict[str, Any] = {}

    def compile_launch(kernel: Any, *values: Any, grid: Any, warmup: bool, **options: Any) -> None:
        arguments = dict(zip(kernel.arg_names, values, strict=False))
        arguments |= {name: options.pop(name) for name in kernel.arg_names if name in options}
        fixed = {param.name for param in kernel.params if param.is_constexpr or arguments[param.name] is None}
        types = {name: "constexpr" if name in fixed else type_of(arguments[name]) for name in kernel.arg_names}
        constants = {(kernel.arg_names.index(name),): arguments[name] for name in fixed}
        key = f"{kernel.__name__} {sorted(types.items())} {sorted(constants.items())} {options}"
        if key not in compiled:
            compiled[key] = triton.compile(ASTSource(kernel, types, constants), target=TARGET, options=options)

    with patch("triton.runtime.jit.JITFunction.run", compile_launch):
        yield compiled


def type_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return "*" + TYPES[value.dtype]
    return "i32" if isinstance(value, int) else "fp32"
