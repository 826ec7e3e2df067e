"""Guards the microkernel, the matrix products around it, and the functions of single numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from cbatch.kernels.cpu import fast_math
from cbatch.kernels.cpu.activation import SILU, ActivationParams
from cbatch.kernels.cpu.matmul import amx, linear
from cbatch.kernels.cpu.matmul.formats import pack_weight
from cbatch.kernels.cpu.matmul.linear import ADD, GATED, WRITE, PackedMatrix, new_linear_workspace
from cbatch.kernels.cpu.matmul.microkernel import MAX_ROWS, prefetch_ahead
from cbatch.kernels.cpu.work_queue import lone_worker
from cbatch.kernels.formats import BFLOAT16, FLOAT32
from cbatch.model.ops.cpu_layout import interleaved
from tests.support.kernels import callable_kernel

pytestmark = pytest.mark.kernels

NOTHING = np.empty(0, np.float32)
SILU_PARAMS = ActivationParams(SILU, NOTHING)
matmul, exp, silu, tanh, round_to_bfloat16 = map(
    callable_kernel, (linear.matmul, fast_math.exp, fast_math.silu, fast_math.tanh, fast_math.round_to_bfloat16)
)
DTYPES = [np.dtype(np.float32), np.dtype(np.uint16)]
UNITS = ["float32", "bfloat16", "bfloat16 by vectors"]
MOST_ROWS = max(MAX_ROWS, amx.MAX_ROWS)


@pytest.fixture(params=UNITS)
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> np.dtype[Any]:
    """Both kinds of numbers; bfloat16 as this processor multiplies it, and without a matrix unit."""
    if "vectors" in request.param:
        monkeypatch.setattr(amx, "has_amx", lambda: False)
    return DTYPES[request.param != "float32"]


def as_float(array: NDArray[Any]) -> NDArray[np.float32]:
    return (array.astype(np.uint32) << 16).view(np.float32) if array.dtype == np.uint16 else array


def draw(shape: tuple[int, ...], dtype: np.dtype[Any], seed: int = 0) -> NDArray[Any]:
    numbers = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return (numbers.view(np.uint32) >> 16).astype(np.uint16) if dtype == np.uint16 else numbers


def format_of(dtype: np.dtype[Any]) -> int:
    return FLOAT32 if dtype == np.float32 else BFLOAT16


def product(a: NDArray[Any], weight: NDArray[Any]) -> NDArray[np.float32]:
    columns = -(-len(weight) // 32) * 32
    out = np.full((len(a), columns), np.nan, np.float32)
    kind = format_of(weight.dtype)
    workspace = new_linear_workspace(1, [kind], weight.shape[1], rows=len(a))
    matrix = PackedMatrix(pack_weight(weight), 0, kind, NOTHING, NOTHING)
    matmul(lone_worker(), 0, a, matrix, out, WRITE, SILU_PARAMS, workspace)
    return out[:, : len(weight)]


@pytest.mark.slow
def test_products_of_every_number_of_rows(dtype: np.dtype[Any]) -> None:
    """Guards the tile for every number of rows, broken groups of columns, and depths that end in a block."""
    columns, depth = 70, 80
    weight = draw((columns, depth), dtype, 1)
    for rows in [*range(1, MOST_ROWS + 2), 3 * MOST_ROWS - 1]:
        a = draw((rows, depth), dtype, rows)
        np.testing.assert_allclose(product(a, weight), as_float(a) @ as_float(weight).T, rtol=1e-4, atol=1e-4)


def test_a_row_has_the_same_bits_in_every_batch(dtype: np.dtype[Any]) -> None:
    """Guards the promise that a result does not depend on what else is in the step, to the last bit."""
    weight, a = draw((64, 128), dtype, 1), draw((200, 128), dtype, 2)
    batched = product(a, weight)
    for first, stop in [(0, 1), (1, 3), (5, 11), (7, 19), (100, 141)]:
        assert np.array_equal(product(a[first:stop].copy(), weight), batched[first:stop])


@pytest.mark.parametrize("scaled", [False, True])
def test_products_that_are_added(dtype: np.dtype[Any], scaled: bool) -> None:
    """Guards sums with what was there before, and factors for columns."""
    weight, a, before = draw((32, 48), dtype, 1), draw((21, 48), dtype, 2), draw((21, 32), DTYPES[0], 3)
    scale = draw((32,), DTYPES[0], 4) if scaled else NOTHING
    out = before.copy()
    matrix = PackedMatrix(pack_weight(weight), 0, format_of(dtype), scale, NOTHING)
    matmul(
        lone_worker(), 0, a, matrix, out, ADD, SILU_PARAMS, new_linear_workspace(1, [format_of(dtype)], 48, rows=len(a))
    )
    expected = before + (as_float(a) @ as_float(weight).T) * (scale if scaled else 1)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("step_bytes", [128, 1088])
def test_passes_share_in_prefetching_the_next_tile(step_bytes: int) -> None:
    """Guards products of 13 rows and more: what they prefetch is the next tile, all of it, and nothing twice."""
    steps, line = 288, 64
    for passes in range(2, 13):
        lines: list[int] = []
        for number in range(passes):
            start, stride, second = prefetch_ahead(step_bytes, steps, number, passes)
            assert second == 0
            places = {(start + at) // line for at in range(0, steps * stride, min(stride, line))}
            lines += [place for place in places if place >= steps * step_bytes // line]
        first, count = steps * step_bytes // line, steps * step_bytes // line
        assert min(lines) == first and 0.98 * count < len(set(lines)) <= count and len(lines) - len(set(lines)) < 4


def test_a_single_pass_prefetches_the_lines_of_both_panels() -> None:
    """Guards products of 7 to 12 rows, which memory holds: they took a third longer when they prefetched one panel."""
    start, stride, second = prefetch_ahead(128, 288, 0, 1)
    places = [start + step * stride + panel for step in range(288) for panel in (0, second)]
    assert places == list(range(start, start + 288 * 128, 64))


def test_gated_products() -> None:
    """Guards the feed-forward part: both products of a tile belong to the same columns."""
    dtype = DTYPES[0]
    gate, up, a = draw((48, 32), dtype, 1), draw((48, 32), dtype, 2), draw((30, 32), dtype, 3)
    out = np.full((30, 48), np.nan, np.float32)
    packed = pack_weight(interleaved(torch.from_numpy(np.concatenate([gate, up]))).numpy())
    matrix = PackedMatrix(packed, 0, FLOAT32, NOTHING, NOTHING)
    matmul(lone_worker(), 0, a, matrix, out, GATED, SILU_PARAMS, new_linear_workspace(1, [FLOAT32], 32, rows=len(a)))
    left = a @ gate.T
    np.testing.assert_allclose(out, left / (1 + np.exp(-left)) * (a @ up.T), rtol=1e-4, atol=1e-5)


def test_functions_of_numbers() -> None:
    """Guards exponentials to the last places, at their far ends, and of NaN."""
    for x in np.linspace(-86, 88, 4001, dtype=np.float32):
        assert exp(x) == pytest.approx(np.exp(np.float64(x)), rel=6e-7)
    assert exp(np.float32(-np.inf)) == 0 and exp(np.float32(-88)) == 0 and np.isnan(exp(np.float32(np.nan)))
    for x in np.linspace(-20, 20, 501, dtype=np.float32):
        assert tanh(x) == pytest.approx(np.tanh(np.float64(x)), abs=3e-7)


def test_gates_of_any_size() -> None:
    """Guards the far ends: an exponential that overflowed turned a gate of -90 into -90 instead of 0."""
    for x in np.float32([-1e30, -1e5, -318, -90, -88.5, -87.5, 87.5, 90, 318, 1e5, 1e30]):
        expected = float(x) if x > 0 else 0.0
        assert silu(x) == pytest.approx(expected, rel=1e-6, abs=1e-7)
        assert tanh(x) == np.sign(x)
    assert tanh(np.float32(np.inf)) == 1 and tanh(np.float32(-np.inf)) == -1 and np.isnan(silu(np.float32(np.nan)))


def test_rounding_to_bfloat16() -> None:
    """Guards rounding to the nearest, ties to even, as torch does it; NaN stays NaN."""
    numbers = np.random.default_rng(0).integers(0, 2**32, 3000, dtype=np.uint32).view(np.float32)
    numbers = np.concatenate([numbers, np.float32([0, -0.0, np.inf, -np.inf, 1 + 2**-8, 1 + 3 * 2**-8])])
    expected = torch.from_numpy(numbers).bfloat16().float().numpy()
    with np.errstate(invalid="ignore"):
        found = as_float(np.array([round_to_bfloat16(x) for x in numbers], np.uint16))
    np.testing.assert_array_equal(found, expected)
    assert np.isnan(as_float(np.array([round_to_bfloat16(np.float32(np.nan))], np.uint16)))[0]
