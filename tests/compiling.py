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
    """Compiles each kernel where it is launched, as for a launch with these arguments, and does not run it.

    Yields what has been compiled; a key begins with the kernel's name. For a process that does not interpret kernels.
    """
    compiled: dict[str, Any] = {}

    def compile_launch(kernel: Any, *values: Any, grid: Any, warmup: bool, **options: Any) -> None:
        arguments = dict(zip(kernel.arg_names, values, strict=False))
        arguments |= {name: options.pop(name) for name in kernel.arg_names if name in options}
        places = {param.name: (place,) for place, param in enumerate(kernel.params)}
        fixed = {param.name for param in kernel.params if is_fixed(param, arguments[param.name])}
        types = {name: "constexpr" if name in fixed else type_of(arguments[name]) for name in kernel.arg_names}
        constants = {places[name]: arguments[name] for name in fixed}
        aligned = [param.name for param in kernel.params if param.name not in fixed]
        aligned = [name for name in aligned if is_aligned(kernel.params[places[name][0]], arguments[name])]
        key = f"{kernel.__name__} {types} {constants} {aligned} {options}"
        if key not in compiled:
            attributes = {places[name]: [["tt.divisibility", 16]] for name in aligned}
            source = ASTSource(kernel, types, constants, attributes)
            compiled[key] = triton.compile(source, target=TARGET, options=options)

    with patch("triton.runtime.jit.JITFunction.run", compile_launch):
        yield compiled


def is_fixed(param: Any, value: Any) -> bool:
    """Whether a launch compiles the kernel for this very value."""
    return param.is_constexpr or value is None or (type(value) is int and value == 1 and not param.do_not_specialize)


def is_aligned(param: Any, value: Any) -> bool:
    """Whether a launch compiles the kernel for addresses and numbers that are multiples of 16."""
    if isinstance(value, Tensor):
        return not param.do_not_specialize_on_alignment and value.data_ptr() % 16 == 0
    return type(value) is int and value % 16 == 0 and not param.do_not_specialize


def type_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return "*" + TYPES[value.dtype]
    return "i32" if isinstance(value, int) else "fp32"
