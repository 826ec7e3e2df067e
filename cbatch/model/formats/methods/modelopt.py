"""Checkpoints of NVIDIA's ModelOpt (https://github.com/NVIDIA/Model-Optimizer), whose settings name no other method.

They stand in config.json, or in hf_quant_config.json beside it, within `quantization`.

The tensors show what a matrix is. NVFP4 has `weight` [rows, depth / 2] uint8, `weight_scale` [rows, depth / 16] e4m3,
and the number `weight_scale_2`; FP8 is that of `fp8.py`. Scales of MXFP4 and MXFP8 are exponents of 2, plus 127.
"""

from __future__ import annotations

from cbatch.model.formats.fp4 import fp4_matrix, nvfp4_stack
from cbatch.model.formats.matrices import EncodedMatrix, FloatMatrix
from cbatch.model.formats.methods.fp8 import fp8_matrix
from cbatch.model.formats.settings import FLOATS, Headers, Matrices, Method, Reader, Settings

_ALGORITHMS = (
    "NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8", "MXFP4", "W4A8_MXFP4_FP8", "FP8", "FP8_PER_CHANNEL_PER_TOKEN",
    "FP8_PB_WO", "FP8_PB_REAL", "MXFP8",
)  # fmt: skip


def _read(settings: Settings) -> Reader:
    blocks = {(128, 128), (1, 32)}
    if settings.get("weight_block_size") is not None:
        blocks.add(settings.block("weight_block_size"))
    settings.expect("fmt", "e4m3")
    settings.expect("scale_fmt", "float", "ue8m0")
    settings.ignore(
        "config_groups", "ignore", "exclude_modules", "kv_cache_scheme", "kv_cache_quant_algo", "producer",
        "activation_scheme",
    )  # fmt: skip
    _check_algorithm("", settings)
    settings.rules("quantized_layers", _check_algorithm)

    may_be_wide = str(settings.get("quant_algo")).upper() in ("W4A8_NVFP4_FP8", "MIXED_PRECISION")
    sizes = (16, 32) if may_be_wide else (16,)

    def matrices(headers: Headers) -> Matrices:
        for module in headers.modules(".weight"):
            name = f"{module}.weight"
            kind = headers.tensors.header(name).type
            if kind == "U8":
                yield name, fp4_matrix(headers, name, f"{name}_scale", f"{name}_scale_2", sizes=sizes)
            elif kind == "F8_E4M3":
                yield name, fp8_matrix(headers, name, blocks)
        for name in headers.modules("_weight_scale"):
            if name in headers.tensors:
                yield name, _stack(headers, name)

    return matrices


def _stack(headers: Headers, name: str) -> EncodedMatrix:
    """The matrices of all experts [experts, depth, rows], as those of Llama 4 and GPT-OSS."""
    if headers.tensors.header(name).type == "U8":
        return nvfp4_stack(headers, name)
    (experts, depth, rows), scale = headers.shape(name, ("F8_E4M3",), 3), f"{name}_weight_scale"
    headers.check(scale, FLOATS, (), (1,))
    return FloatMatrix(headers.tensors, name, rows, depth, scale, experts, True, (rows, depth))


def _check_algorithm(module: str, settings: Settings) -> None:
    """Raises UnreadQuantization for an algorithm whose matrices are not read."""
    for key in ("quant_algo", "moe_quant_algo"):
        name = settings.get(key)
        if str(name).upper() not in (*_ALGORITHMS, "NONE", *(() if module else ("MIXED_PRECISION",))):
            raise settings.unsupported(key, name)
    settings.ignore("group_size")
    settings.expect("pre_quant_scale", False)
    settings.expect("has_zero_point", False)


METHOD = Method("modelopt", "ModelOpt", _read)
