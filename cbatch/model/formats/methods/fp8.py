"""FP8 checkpoints as DeepSeek, Qwen and Mistral ship them.

A matrix is `weight` [rows, depth] float8_e4m3fn. `weight_scale_inv` has the factor of each block of
`weight_block_size`; without blocks it is one number, or one for each row, and may be called `weight_scale`. So AutoFP8
has it, with scales of a KV cache beside, `k_scale` and `v_scale`.
"""

from __future__ import annotations

from collections.abc import Collection

from cbatch.model.formats.matrices import FloatMatrix
from cbatch.model.formats.settings import Headers, Matrices, Method, Reader, Settings


def _read(settings: Settings) -> Reader:
    settings.expect("fmt", "e4m3", "float8_e4m3fn")
    settings.expect("scale_fmt", "float", "ue8m0")
    settings.expect("activation_scheme", "dynamic", "static")
    settings.ignore("modules_to_not_convert", "ignored_layers", "dequantize", "kv_cache_scheme")
    blocks = [] if settings.get("weight_block_size") is None else [settings.block("weight_block_size")]

    def matrices(headers: Headers) -> Matrices:
        for module in headers.modules(".weight"):
            name = f"{module}.weight"
            if headers.tensors.header(name).type == "F8_E4M3":
                yield name, fp8_matrix(headers, name, blocks)

    return matrices


def fp8_matrix(headers: Headers, name: str, blocks: Collection[tuple[int, int]]) -> FloatMatrix:
    """blocks: rows and columns that may share a scale"""
    rows, depth = headers.shape(name, ("F8_E4M3",), 2)
    scale = f"{name}_scale_inv"
    scale = f"{name}_scale" if scale not in headers.tensors and f"{name}_scale" in headers.tensors else scale
    return FloatMatrix(headers.tensors, name, rows, depth, scale, block=headers.block(scale, rows, depth, blocks))


METHOD = Method("fp8", "FP8", _read)
