"""Checkpoints of compressed-tensors (https://github.com/vllm-project/compressed-tensors).

| format | tensors of a matrix [rows, depth] |
|---|---|
| pack-quantized | `weight_packed` [rows, depth * bits / 32] int32, integers plus 8 or 128; `weight_shape` [2] |
| int-quantized | `weight` [rows, depth] int8 |
| float-quantized | `weight` [rows, depth] float8_e4m3fn |
| mxfp8-quantized | the same, with exponents of 2, plus 127, as scales of 32 numbers |
| naive-quantized | one of these |
| mxfp4-pack-quantized | `weight_packed` [rows, depth / 2] uint8; scales are exponents of 2, plus 127 |
| nvfp4-pack-quantized | the same; scales are e4m3, and divided by `weight_global_scale` |

`weight_scale` is [rows, groups], one number, or [blocks, blocks] for numbers of 8 bits. `weight_zero_point` is the same
in int8; in pack-quantized, several rows may be in a word. `weight_g_idx` [depth] is the group of each number. Which of
these a module has says how it is read: checkpoints may mix them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbatch.model.formats.fp4 import fp4_matrix
from cbatch.model.formats.matrices import (
    EncodedMatrix,
    FloatMatrix,
    GroupedMatrix,
    RoundedNumbers,
    as_float32,
    unpacked,
    unpacked_rows,
)
from cbatch.model.formats.settings import FLOATS, Headers, Matrices, Method, Reader, Settings
from cbatch.model.stored import Rows

_FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp8-quantized", "mxfp4-pack-quantized",
    "nvfp4-pack-quantized", "mixed-precision", "dense",
)  # fmt: skip


def _read(settings: Settings) -> Reader:
    settings.expect("format", *_FORMATS)
    settings.expect("quantization_status", "compressed", "frozen")
    settings.ignore("ignore", "kv_cache_scheme", "global_compression_ratio", "version")
    sparsity = settings.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format") not in (None, "dense"):
        raise settings.unsupported("sparsity_config", sparsity)
    given = settings.get("config_groups")
    if not isinstance(given, Mapping):
        raise settings.unsupported("config_groups", given)
    groups, blocks = set(), set()
    for name in sorted(given):
        values = given[name]
        weights = values.get("weights") if isinstance(values, Mapping) else None
        if not isinstance(weights, Mapping):
            raise settings.unsupported("config_groups", {name: values})
        scheme = Settings({"quant_method": settings.method, **weights})
        is_float = scheme.expect("type", "int", "float") == "float"
        format = str(values.get("format") or settings.get("format"))
        scheme.expect("num_bits", *((8, 4) if not is_float or "fp4" in format or "mixed" in format else (8,)))
        scheme.expect("dynamic", False)
        floats = ("block", "tensor_group") if is_float else ()
        strategy = scheme.expect("strategy", "tensor", "channel", "group", *floats)
        if strategy == "group":
            groups.add(scheme.group_size())
            blocks.add((1, scheme.group_size()))
        if strategy == "block":
            blocks.add(scheme.block("block_structure"))
        Settings({"quant_method": settings.method, **values}).expect("format", *_FORMATS)
    rounded = settings.get("rounded") or []  # of `cbatch quantize`: modules of numbers that are read as int8
    if not isinstance(rounded, list) or not all(isinstance(module, str) for module in rounded):
        raise settings.unsupported("rounded", rounded)
    return partial(_matrices, groups, blocks, rounded)


def _matrices(
    sizes: Collection[int], blocks: Collection[tuple[int, int]], rounded: Collection[str], headers: Headers
) -> Matrices:
    """sizes: numbers of a row that may share a scale; blocks: rows and columns that may"""
    for name in (f"{module}.weight" for module in rounded):
        rows, depth = headers.shape(name, FLOATS, 2)
        yield name, RoundedNumbers(headers.tensors, name, rows, depth, "")
    packed = list(headers.modules(".weight_packed"))
    for module in packed:
        name = f"{module}.weight"
        if headers.tensors.header(f"{name}_packed").type == "U8":
            yield name, fp4_matrix(headers, f"{name}_packed", f"{name}_scale", f"{name}_global_scale", divides=True)
        else:
            yield name, _packed(sizes, headers, module)
    for module in headers.modules(".weight_scale"):
        if module not in packed:
            yield f"{module}.weight", _whole(sizes, blocks, headers, module)


def _packed(sizes: Collection[int], headers: Headers, module: str) -> EncodedMatrix:
    name = f"{module}.weight_packed"
    rows, words = headers.shape(name, ("I32",), 2)
    headers.check(f"{module}.weight_shape", ("I64", "I32"), (2,))
    given_rows, depth = headers.tensors[f"{module}.weight_shape"].tolist()
    bits = next((bits for bits in (4, 8) if depth > 0 and -(-depth * bits // 32) == words), 0)
    if given_rows != rows or not bits:
        raise headers.misshaped(name, f"packed integers of a matrix [{given_rows}, {depth}]")
    return _integers(sizes, headers, module, name, rows, depth, bits)


def _whole(sizes: Collection[int], blocks: Collection[tuple[int, int]], headers: Headers, module: str) -> EncodedMatrix:
    name, scale, zero = (f"{module}.weight{part}" for part in ("", "_scale", "_zero_point"))
    rows, depth = headers.shape(name, ("I8", "F8_E4M3"), 2)
    if headers.tensors.header(name).type == "I8":
        return _integers(sizes, headers, module, name, rows, depth, 8)
    if zero in headers.tensors and headers.is_nonzero(zero):
        raise headers.misshaped(zero, "zeros beside numbers of float8")
    block = headers.block(scale, rows, depth, blocks)
    return FloatMatrix(headers.tensors, name, rows, depth, scale, block=block)


def _integers(
    sizes: Collection[int], headers: Headers, module: str, name: str, rows: int, depth: int, bits: int
) -> EncodedMatrix:
    scale, zero, place = (f"{module}.weight_{part}" for part in ("scale", "zero_point", "g_idx"))
    groupings = [headers.groups(size, depth) for size in (-1, *sizes)]
    shapes: dict[tuple[int, ...], int] = {(rows, count): size for size, count in groupings}
    headers.check(scale, FLOATS, *shapes, (1,), ())
    found = headers.tensors.header(scale).shape
    group = shapes.get(found, depth)
    groups = -(-depth // group)
    if zero in headers.tensors:
        is_packed = headers.tensors.header(zero).type == "I32"
        headers.check(zero, ("I8", "I32"), (-(-rows * bits // 32), groups) if is_packed else found)
    order = headers.order(place, depth, group, groups)
    return CompressedMatrix(headers.tensors, name, rows, depth, scale, bits=bits, group=group, order=order, zero=zero)


METHOD = Method("compressed-tensors", "compressed-tensors", _read)


class CompressedMatrix(GroupedMatrix):
    def codes(self, rows: Rows) -> NDArray[Any]:
        numbers = self.tensors.take(self.name, rows).numpy()
        return numbers if numbers.dtype == np.int8 else unpacked(numbers, self.bits)[:, : self.depth]

    def scales(self, rows: Rows) -> NDArray[np.float32]:
        if len(self.tensors.header(self.scale).shape) < 2:
            return np.broadcast_to(as_float32(self.tensors[self.scale]).reshape(1, 1), (len(rows), 1))
        return as_float32(self.tensors.take(self.scale, rows))

    def zeros(self, rows: Rows) -> NDArray[np.float32]:
        header = self.tensors.header(self.zero)
        if header.type == "I32":
            return unpacked_rows(self.tensors, self.zero, rows, self.bits, axis=0).astype(np.float32)
        given = self.tensors[self.zero].numpy().reshape(1, 1) if len(header.shape) < 2 else None
        zeros = np.repeat(given, len(rows), 0) if given is not None else self.tensors.take(self.zero, rows).numpy()
        return zeros.astype(np.float32) + self.usual_zero
