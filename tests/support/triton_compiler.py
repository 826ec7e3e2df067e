"""Compiles Triton kernels for a GPU on a machine without one: what the interpreter accepts, the compiler may not.

`TRITON_INTERPRET=0 python -m tests.support.triton_compiler` compiles what steps launch, and prints the kernels' names.
"""

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
    """Compiles each launched kernel for its arguments instead of running it.

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


def attention() -> None:
    """A mixed step, plain, and with all that attention can be asked for."""
    from cbatch.engine.attention.triton import TritonAttention
    from cbatch.engine.kernels.triton.attention_metadata import build_metadata

    backend = TritonAttention(torch.device("cpu"))
    slots, tables = torch.zeros(11, dtype=torch.int64), torch.zeros(2, 64, dtype=torch.int32)
    metadata = build_metadata(slots, tables, [0, 999], [10, 1000], backend.decode.split)
    for dim, window, softcap in ((32, None, None), (48, 100, 30.0)):
        keys = torch.zeros(4, 2, 16, dim, dtype=torch.bfloat16)
        new, query = torch.zeros(11, 2, dim, dtype=torch.bfloat16), torch.zeros(11, 6, dim, dtype=torch.bfloat16)
        sinks = None if window is None else torch.zeros(6)
        backend.store_kv(keys, keys, new, new, metadata)
        backend.attend(query, keys, keys, metadata, scale=0.1, window=window, softcap=softcap, sinks=sinks)


def decoder() -> None:
    """A decode step of a model with norms of heads, and of one of odd sizes."""
    from tests.support.cuda_model import batch_of, kv_cache_of, logits_of, model_of, network_of
    from tests.support.tiny_models import make_prompts

    for name in ("qwen3, norms", "odd sizes"):
        model = model_of(network_of(name), torch.bfloat16)
        logits_of(model, batch_of(make_prompts([1])), kv_cache_of(model))


def sampling() -> None:
    """Rows of logits as the head leaves them, and as a model of transformers does."""
    from cbatch.engine.kernels.triton.sampling import sample_rows

    for dtype in (torch.float32, torch.bfloat16):
        sample_rows(torch.zeros(3, 1000, dtype=dtype), torch.zeros(6, 3, dtype=torch.int32))


if __name__ == "__main__":
    with launches_compiled() as compiled:
        attention()
        decoder()
        sampling()
    print(*(key.split()[0] for key in compiled))
