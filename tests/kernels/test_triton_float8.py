"""Guards products with rows that are rounded to FP8, by Triton's kernel and by torch, against plain arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.support.device import DEVICE
from tests.support.float8 import needs_float8
from tests.support.kernels import draw

pytest.importorskip("triton", reason="the kernels for a GPU need Triton")

from cbatch.kernels.formats import Integers
from cbatch.kernels.quantized_matrix import Float8Matrix, rounded_rows
from cbatch.kernels.triton.linear import round_rows
from cbatch.model.ops.device_kernel import by_torch, by_triton
from scripts.gpu.bound_kernels import BoundKernels

pytestmark = pytest.mark.kernels

OPS = {"triton": BoundKernels(by_triton(DEVICE)), "torch": BoundKernels(by_torch(heads_first=True))}
TOLERANCES = {torch.float16: 5e-3, torch.bfloat16: 1e-2}  # some matrix units for FP8 sum in few bits
LEVELS = np.array([code % 8 * 2.0**-9 if code < 8 else (8 + code % 8) * 2.0 ** (code // 8 - 10) for code in range(127)])
"""The numbers of e4m3 from 0 to 448, by their codes, as the format's description has them."""


def plainly_rounded(source: Tensor) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
    """Rounded rows [T, depth], in units of their scales, and the scales [T, 1].

    To the nearest number of e4m3, of two equally near ones to that with an even code.
    """
    numbers = source.float().cpu().numpy()
    scales = np.maximum(np.abs(numbers).max(1, keepdims=True) / np.float32(448), np.float32(2.0**-126))
    sizes, middles = np.abs(numbers / scales).astype(np.float64), (LEVELS[1:] + LEVELS[:-1]) / 2
    low, high = np.searchsorted(middles, sizes, "left"), np.searchsorted(middles, sizes, "right")
    return np.copysign(LEVELS[np.where(low % 2 == 0, low, high)], numbers), scales


def drawn_matrix(columns: int, depth: int) -> tuple[Float8Matrix, Tensor]:
    """A matrix that is filled in two pieces, and its numbers [columns, depth] in float64."""
    matrix, numbers = Float8Matrix.empty(columns, depth, DEVICE), draw(columns, depth, seed=1).to(torch.float8_e4m3fn)
    scales, cut = draw(columns, 1, seed=2).abs() + 0.01, columns // 3
    for first, stop in ((0, cut), (cut, columns)):
        matrix.fill(first, Integers(numbers.view(torch.uint8)[first:stop], scales[first:stop]))
    return matrix, numbers.double() * scales.double()


def rows_of(rows: int, depth: int, dtype: torch.dtype) -> Tensor:
    """Rows of very different sizes, as far as products fit into the type; some are zeros."""
    least, most = (-3, 2) if dtype == torch.float16 else (-20, 20)
    sizes = 10.0 ** torch.randint(least, most, (rows, 1), generator=torch.Generator().manual_seed(0))
    source = draw(rows, depth) * sizes.to(DEVICE)
    source[2::5] = 0
    return source.to(dtype)


def expected_of(source: Tensor, numbers: Tensor) -> Tensor:
    """[T, columns] float64: rows that are rounded plainly, times a matrix of numbers."""
    codes, scales = (torch.from_numpy(each).to(DEVICE).double() for each in plainly_rounded(source))
    return codes * scales @ numbers.T


def error_of(found: Tensor, expected: Tensor) -> float:
    """The largest of a row's differences, beside its largest number; rows of zeros must be zeros."""
    if not bool(found.isfinite().all()):
        return float("inf")
    differences = (found.double() - expected).abs().amax(1)
    return float((differences / expected.abs().amax(1).clamp(min=1e-30)).max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rounded", [round_rows, rounded_rows])
def test_rows_are_rounded_to_the_nearest(rounded: Any, dtype: torch.dtype) -> None:
    """Guards the rounding: ragged sizes, rows of zeros, ties, and rows of the largest and smallest numbers."""
    ties = torch.from_numpy(np.concatenate([[448.0], (LEVELS[1:] + LEVELS[:-1]) / 2, -LEVELS])).to(DEVICE)[None]
    huge, tiny = torch.finfo(dtype).max * 0.9, torch.finfo(dtype).tiny * 500
    extremes = torch.cat([draw(1, 48).clamp(-1, 1) * huge, draw(1, 48) * tiny, torch.zeros(1, 48, device=DEVICE)])
    cases = [ties, extremes, *(rows_of(rows, depth, dtype) for rows, depth in ((1, 33), (3, 8208), (37, 80)))]
    for case in cases:
        source = case.to(dtype)
        codes, scales = rounded(source)
        expected, expected_scales = plainly_rounded(source)
        np.testing.assert_array_equal(scales.cpu().numpy(), expected_scales)
        np.testing.assert_array_equal(codes.cpu().double().numpy(), expected)


@needs_float8
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", OPS)
def test_linear(name: str, dtype: torch.dtype) -> None:
    """Guards products of 1 to 200 rows, biases, depths and columns of all multiples of 16, and memory beyond the rows,
    which holds NaN."""
    for rows, columns, depth in ((1, 48, 64), (2, 16, 16), (7, 80, 112), (33, 144, 272), (130, 32, 48), (200, 64, 96)):
        matrix, numbers = drawn_matrix(columns, depth)
        source, bias = torch.full((rows + 3, depth), torch.nan, dtype=dtype, device=DEVICE), draw(columns, dtype=dtype)
        source[:rows] = rows_of(rows, depth, dtype)
        out = torch.full((rows + 3, columns), torch.nan, dtype=dtype, device=DEVICE)
        expected = expected_of(source[:rows], numbers)
        OPS[name].float8_linear(source[:rows], matrix, None, out[:rows])
        assert error_of(out[:rows], expected) < TOLERANCES[dtype]
        OPS[name].float8_linear(source[:rows], matrix, bias, out[:rows])
        assert error_of(out[:rows], expected + bias.double()) < TOLERANCES[dtype]
        assert bool(out[rows:].isnan().all())


@needs_float8
@pytest.mark.parametrize("name", OPS)
def test_a_row_that_is_no_number_spoils_no_other(name: str) -> None:
    """Guards `nan_logits`: a row with NaN or infinity gives no numbers, and its neighbours the same as without it."""
    matrix, _ = drawn_matrix(48, 64)
    source = draw(4, 64, dtype=torch.float16)
    right, found = (torch.empty(4, 48, dtype=torch.float16, device=DEVICE) for _ in range(2))
    OPS[name].float8_linear(source, matrix, None, right)
    source[1, 5], source[2, 60] = torch.nan, torch.inf
    OPS[name].float8_linear(source, matrix, None, found)
    assert bool(found[1:3].isnan().all()) and torch.equal(found[[0, 3]], right[[0, 3]])
