"""FP8 checkpoints as DeepSeek, Qwen and Mistral ship them.

A matrix is `weight` [rows, depth] float8_e4m3fn. `weight_scale_inv` has the factor of each block of
`weight_block_size`; without blocks it is one number, or one for each row, and may be called `weight_scale`.
"""

from __future__ import annotations

from cbatch.model.formats.matrices import FloatMatrix, StoredMatrix
from cbatch.model.formats.method import Headers, Settings

Blocks = frozenset[tuple[int, int]]


def read_settings(settings: Settings) -> Blocks:
    """The size of blocks, if there are any. Raises UnreadQuantization for what is not read."""
    settings.expect("fmt", "e4m3", "float8_e4m3fn")
    settings.expect("scale_fmt", "float", "ue8m0")
    settings.expect("activation_scheme", "dynamic", "static")
    settings.ignore("modules_to_not_convert", "ignored_layers", "dequantize")
    blocks = settings.get("weight_block_size")
    found = frozenset() if blocks is None else frozenset({settings.block("weight_block_size")})
    settings.finish()
    return found


def matrices(blocks: Blocks, headers: Headers) -> dict[str, StoredMatrix]:
    """By the names of their weights. Raises ModelError for missing or misshaped tensors."""
    found: dict[str, StoredMatrix] = {}
    for name in headers.modules(""):
        if not name.endswith(".weight") or headers.tensors.header(name).type != "F8_E4M3":
            continue
        rows, depth = headers.shape(name, ("F8_E4M3",), 2)
        scale = f"{name}_scale_inv"
        scale = f"{name}_scale" if scale not in headers.tensors and f"{name}_scale" in headers.tensors else scale
        block = headers.block(scale, rows, depth, blocks)
        found[name] = FloatMatrix(headers.tensors, name, rows, depth, scale=scale, block=block)
    return found
