"""Compiles kernels for a GPU where there is none, up to machine code: the interpreter takes what the compiler does not.

`python -m tests.compiler` compiles what the attention backend launches for a mixed step in some forms.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip


def type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def compile_only(self: Any, *arguments: Any, **options: Any) -> None:
    """Stands in for a kernel's launch: compiles it for these arguments."""
    given = dict(zip(self.arg_names, arguments, strict=False))
    given |= {name: options[name] for name in self.arg_names if name in options}
    constants = {one.name: given[one.name] for one in self.params if one.is_constexpr}
    signature = {name: "constexpr" if name in constants else type_of(given[name]) for name in self.arg_names}
    aligned = [(index,) for index, name in enumerate(self.arg_names) if isinstance(given[name], torch.Tensor)]
    source = ASTSource(self, signature, constants, {key: [["tt.divisibility", 16]] for key in aligned})
    wanted = {name: options[name] for name in ("num_warps", "num_stages") if name in options}
    kernel = triton.compile(source, target=HOPPER, options=wanted)
    print(self.fn.__name__, f"{kernel.metadata.shared} bytes of shared memory", flush=True)


def main() -> None:
    from cbatch.engine.attention.triton import TritonAttention
    from cbatch.engine.gpu.metadata import prepare

    JITFunction.run = compile_only
    attention = TritonAttention(torch.device("cpu"))
    slots, tables = torch.zeros(11, dtype=torch.int64), torch.zeros(2, 64, dtype=torch.int32)
    metadata = prepare(slots, tables, [0, 999], [10, 1000], attention.decode.split)
    for dim, window, softcap in ((32, None, None), (48, 100, 30.0)):
        keys = torch.zeros(4, 2, 16, dim, dtype=torch.bfloat16)
        new, query = torch.zeros(11, 2, dim, dtype=torch.bfloat16), torch.zeros(11, 6, dim, dtype=torch.bfloat16)
        sinks = None if window is None else torch.zeros(6)
        attention.write(keys, keys, new, new, metadata)
        attention.attend(query, keys, keys, metadata, scale=0.1, window=window, softcap=softcap, sinks=sinks)


if __name__ == "__main__":
    main()
