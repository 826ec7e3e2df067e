"""MXFP4 as GPT-OSS has it, for the matrices of experts (https://www.opencompute.org, Microscaling Formats 1.0).

`*_blocks` [experts, rows, groups, 16] uint8 has 32 numbers of a row in 16 bytes, of which each has two, that of its low
bits first. `*_scales` [experts, rows, groups] uint8 are exponents of 2, plus 127.
"""

from __future__ import annotations

from cbatch.kernels.formats import GROUP
from cbatch.model.formats.fp4 import Mxfp4Matrix
from cbatch.model.formats.settings import Headers, Matrices, Method, Reader, Settings


def _read(settings: Settings) -> Reader:
    settings.ignore("modules_to_not_convert", "dequantize")
    return _matrices


def _matrices(headers: Headers) -> Matrices:
    for module in headers.modules("_blocks"):
        blocks, scale = f"{module}_blocks", f"{module}_scales"
        experts, rows, groups, _size = headers.shape(blocks, ("U8",), 4)
        headers.check(blocks, ("U8",), (experts, rows, groups, GROUP // 2))
        headers.check(scale, ("U8",), (experts, rows, groups))
        yield module, Mxfp4Matrix(headers.tensors, blocks, rows, GROUP * groups, scale, experts, is_transposed=True)


METHOD = Method("mxfp4", "MXFP4", _read)
