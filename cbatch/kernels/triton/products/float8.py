"""Rounds rows to FP8 for the library's products (see `kernels/float8_matrix.py`), by one kernel where torch has six.

Divisions round as those of torch do, so the bytes are the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbatch.kernels.float8_matrix import LEAST_SCALE, Float8Matrix
from cbatch.kernels.triton.attention_tile import power_of_2, to_fp8
from cbatch.kernels.triton.launch import launch_options
from cbatch.runtime.kv_cache import FP8, FP8_MAX

_LARGEST, _LEAST_SCALE = tl.constexpr(FP8_MAX), tl.constexpr(LEAST_SCALE)
_MOST_AT_ONCE = 8192
"""Numbers of a row that a program holds."""


@triton.jit
def _round_rows_kernel(
    source: tl.tensor, codes: tl.tensor, scales: tl.tensor, DEPTH: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    step = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    for first in range(0, DEPTH, BLOCK):
        column = first + step
        number = tl.load(source + row * DEPTH + column, mask=column < DEPTH, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(number))
    scale = tl.maximum(tl.div_rn(tl.max(largest, 0), _LARGEST), _LEAST_SCALE)
    tl.store(scales + row, scale)
    for first in range(0, DEPTH, BLOCK):
        column = first + step
        number = tl.load(source + row * DEPTH + column, mask=column < DEPTH, other=0.0).to(tl.float32)
        tl.store(codes + row * DEPTH + column, to_fp8(tl.div_rn(number, scale)), mask=column < DEPTH)


def round_rows(source: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [T, depth] in e4m3, and their scales [T, 1] float32; see `rounded_rows`."""
    rows, depth = source.shape
    codes = torch.empty(rows, depth, dtype=torch.uint8, device=source.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=source.device)
    block = min(power_of_2(depth), _MOST_AT_ONCE)
    _round_rows_kernel[(rows,)](source, codes, scales, depth, block, **launch_options(block // 8))
    return codes.view(FP8), scales


def float8_linear(source: Tensor, matrix: Float8Matrix, bias: Tensor | None, out: Tensor) -> None:
    """See `model/ops/products.py`."""
    matrix.multiply(*round_rows(source), bias, out)
