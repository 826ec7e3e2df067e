"""Checkpoints of bitsandbytes in 4 bits (https://github.com/bitsandbytes-foundation/bitsandbytes), NF4 and FP4.

`weight` [rows * depth / 2, 1] uint8 has two numbers in a byte, that of its high bits first: places in
`weight.quant_map` [16]. Numbers follow each other over all rows, and each block of them shares a scale,
`weight.absmax`. With double quantization these are places in `weight.nested_quant_map` [256] themselves, times
`weight.nested_absmax` for each block of them, plus an offset. Sizes stand in `weight.quant_state.bitsandbytes__nf4`,
the bytes of a JSON object.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cbatch.base.errors import ModelError
from cbatch.kernels.formats import INT8
from cbatch.model.formats.matrices import EncodedMatrix
from cbatch.model.formats.settings import Headers, Matrices, Method, Reader, Settings
from cbatch.model.stored import Packing, Rows

_STATE = ".weight.quant_state.bitsandbytes__"


def _read(settings: Settings) -> Reader:
    settings.expect("load_in_4bit", True)
    settings.expect("_load_in_4bit", True)
    kind = settings.expect("bnb_4bit_quant_type", "fp4", "nf4")
    settings.expect("bnb_4bit_quant_storage", "uint8")
    settings.ignore(
        "bnb_4bit_compute_dtype", "bnb_4bit_use_double_quant", "llm_int8_threshold", "llm_int8_skip_modules",
        "llm_int8_has_fp16_weight", "llm_int8_enable_fp32_cpu_offload",
    )  # fmt: skip

    def matrices(headers: Headers) -> Matrices:
        for module in headers.modules(_STATE + kind):
            yield f"{module}.weight", _matrix(headers, module, kind)

    return matrices


METHOD = Method("bitsandbytes", "bitsandbytes", _read)


def _matrix(headers: Headers, module: str, kind: str) -> NestedMatrix:
    name = f"{module}.weight"
    state, size, nested = _sizes(headers, module, kind)
    rows, depth = state["shape"]
    headers.check(name, ("U8",), (rows * depth // 2, 1), (rows, depth // 2))
    headers.check(f"{name}.quant_map", ("F32",), (16,))
    blocks = -(-rows * depth // size)
    headers.check(f"{name}.absmax", ("U8",) if nested else ("F32",), (blocks,))
    if nested:
        headers.check(f"{name}.nested_absmax", ("F32",), (-(-blocks // nested),))
        headers.check(f"{name}.nested_quant_map", ("F32",), (256,))
    offset = state["nested_offset"]
    return NestedMatrix(headers.tensors, name, rows, depth, f"{name}.absmax", 0, False, kind, size, nested, offset)


def _sizes(headers: Headers, module: str, kind: str) -> tuple[dict[str, Any], int, int]:
    """The format of a matrix, the numbers of a block, and its scales that share one, 0 for none."""
    name = f"{module}{_STATE}{kind}"
    headers.shape(name, ("U8",), 1)
    try:
        state = json.loads(headers.tensors[name].numpy().tobytes())
        sizes = [state["blocksize"], state.get("nested_blocksize", 0), *state["shape"], 2]
        state["nested_offset"] = float(state.get("nested_offset", 0))
        is_whole = all(type(size) is int and 0 <= size < 2**31 for size in sizes) and sizes[0] > 0
        if not is_whole or len(state["shape"]) != 2 or state["shape"][1] % 2 or state["quant_type"] != kind:
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"Cannot load {headers.tensors.folder}: {name} does not say how it is stored.") from error
    return state, sizes[0], sizes[1]


@dataclass(eq=False)
class NestedMatrix(EncodedMatrix):
    """block: numbers that share a scale; nested: scales that share one, 0 if they are numbers; offset: of these"""

    kind: str = ""
    block: int = 64
    nested: int = 0
    offset: float = 0.0
    packing = Packing(INT8)

    @property
    def label(self) -> str:
        return self.kind.upper()

    def lost(self, held: Collection[int]) -> set[str]:
        return {self.label}

    def values(self, rows: Rows) -> Tensor:
        pairs = self.tensors.take(self.name, rows, shape=(self.rows, self.depth // 2)).int()
        places = torch.stack([pairs >> 4, pairs & 15], dim=2).flatten(1)
        blocks = (rows[:, None] * self.depth + np.arange(self.depth)) // self.block
        return self.tensors[f"{self.name}.quant_map"][places] * self._scales[torch.from_numpy(blocks)]

    @cached_property
    def _scales(self) -> Tensor:
        """[blocks]"""
        stored = self.tensors[self.scale]
        if not self.nested:
            return stored
        steps = self.tensors[f"{self.name}.nested_absmax"].repeat_interleave(self.nested)[: len(stored)]
        return self.tensors[f"{self.name}.nested_quant_map"][stored.int()] * steps + self.offset
