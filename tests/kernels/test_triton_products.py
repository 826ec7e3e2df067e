"""Guards products with weights of 8 and 4 bits, by Triton's kernels and by torch, against products in float64.

With numbers in tiles of one size: right for every shape, and a row's bits depend on nothing but the row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from scripts.gpu.bound_kernels import BoundKernels, router
from tests.support.device import DEVICE
from tests.support.kernels import draw
from tests.support.samples import sampled

pytest.importorskip("triton", reason="the kernels for a GPU need Triton")

from cbatch.kernels.formats import FORMATS, FP8, INT4, INT4_ZEROS, INT8, MXFP4, NVFP4, ON_GPU, Integers, group_of
from cbatch.kernels.operands import ExpertWeights
from cbatch.kernels.quantized_matrix import QuantizedMatrix
from cbatch.kernels.triton.linear import Tile
from cbatch.model.ops.device_kernel import DeviceOps, by_torch, by_triton
from tests.support.ptx import emulated_ptx, needs_interpreter

pytestmark = pytest.mark.kernels

OPS = {
    "triton": BoundKernels(by_triton(DEVICE)),
    "triton, without matrix units": BoundKernels(DeviceOps(True, True, capability=75)),
    "torch": BoundKernels(by_torch(heads_first=True)),
}
LEVELS = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]
DTYPES = [torch.float32, torch.float16]  # Triton's interpreter cannot multiply bfloat16
SIZES = [(1, 40, 64), (3, 33, 100), (12, 65, 256), (5, 70, 1100), (20, 130, 288), (70, 70, 32)]
"""Rows, columns and depth, few of which are multiples of anything."""


WAYS = list(product(ON_GPU, DTYPES))


@pytest.fixture(params=[*OPS, pytest.param("triton, by PTX", marks=needs_interpreter)])
def ops(request: pytest.FixtureRequest) -> Iterator[BoundKernels]:
    with emulated_ptx(90) if request.param == "triton, by PTX" else nullcontext():
        yield OPS[request.param.removesuffix(", by PTX")]


def drawn_matrix(kind: int, columns: int, depth: int, out: QuantizedMatrix, seed: int = 0) -> Tensor:
    """Fills a matrix in two pieces. Returns its numbers [columns, depth] in float64."""
    generator, group = np.random.default_rng(seed), group_of(kind)
    groups = -(-depth // group)
    scales = generator.uniform(0.01, 0.1, (columns, groups)).astype(np.float16)
    if kind == FP8:
        return drawn_float8(columns, depth, out, seed)
    if kind == MXFP4:
        scales = np.exp2(generator.integers(-6, -2, (columns, groups))).astype(np.float16)
    zeros = generator.uniform(0, 15, (columns, groups)).astype(np.float16) if kind == INT4_ZEROS else None
    low, high = (-128, 128) if kind == INT8 else (0, 16)
    numbers = generator.integers(low, high, (columns, depth)).astype(np.int8 if kind == INT8 else np.uint8)
    cut = columns // 3
    for first, stop in ((0, cut), (cut, columns)):
        parts = (None if part is None else part[first:stop] for part in (numbers, scales, zeros))
        out.fill(first, Integers.of_arrays(*parts).map(lambda part: part.to(DEVICE)))
    middle = {INT8: 0.0, INT4: 8.0}.get(kind) if zeros is None else np.repeat(zeros, 32, 1)[:, :depth]
    wide = np.array(LEVELS)[numbers] if kind in (MXFP4, NVFP4) else numbers - np.asarray(middle, np.float64)
    exact = np.repeat(scales, group, 1)[:, :depth].astype(np.float64) * wide
    return torch.from_numpy(exact).to(DEVICE)


def drawn_float8(columns: int, depth: int, out: QuantizedMatrix, seed: int) -> Tensor:
    """The same for FP8, with a scale for as many numbers as `out` has."""
    numbers = draw(columns, depth, seed=seed).to(torch.float8_e4m3fn)
    scales = draw(columns, -(-depth // out.group), seed=seed + 1).abs() + 1e-9
    out.fill(0, Integers(numbers.view(torch.uint8), scales))
    return numbers.double() * scales.double().repeat_interleave(out.group, dim=1)[:, :depth]


def check(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Weights are rounded to the type of the rows, and so are the sums."""
    assert bool(found.isfinite().all())
    error = (found.double() - expected).abs().amax(1) / expected.abs().amax(1)
    assert float(error.max()) < (1e-5 if dtype == torch.float32 else 2e-3)


@pytest.mark.parametrize("way", sampled(WAYS, 6), ids=str)
def test_linear(ops: BoundKernels, way: tuple[int, torch.dtype]) -> None:
    """Guards every format, tiles that are not full, depths that end within a part, biases, and logits."""
    kind, dtype = way
    for rows, columns, depth in SIZES:
        matrix = QuantizedMatrix.empty(kind, columns, depth, DEVICE)
        exact = drawn_matrix(kind, columns, depth, matrix)
        torch.testing.assert_close(matrix.values(slice(1, columns)).double(), exact[1:], rtol=1e-6, atol=1e-6)
        source, bias = draw(rows, depth, dtype=dtype), draw(columns, dtype=dtype, seed=1)
        out = torch.full((rows, columns), torch.nan, dtype=dtype, device=DEVICE)
        expected = source.double() @ exact.T
        ops.quantized_linear(source, matrix, None, out)
        check(out, expected, dtype)
        ops.quantized_linear(source, matrix, bias, out)
        check(out, expected + bias.double(), dtype)
        logits = ops.logits(source, matrix)
        assert logits.dtype == torch.float32
        check(logits, expected, dtype)


@pytest.mark.parametrize("rows", [3, 12])
def test_splits_of_the_depth(rows: int) -> None:
    """Guards sums of splits added before all are there, or twice, and a count that spoils the next product."""
    matrix = QuantizedMatrix.empty(INT4_ZEROS, 70, 2000, DEVICE)
    exact = drawn_matrix(INT4_ZEROS, 70, 2000, matrix)
    assert Tile.of_packed(rows, torch.float16, 90).splits(70, 2000, 2) == 4
    source, out = draw(rows, 2000, dtype=torch.float16), torch.empty(rows, 70, device=DEVICE)
    for _ in range(2):
        out.fill_(torch.nan)
        OPS["triton"].logits(source, matrix, out)
        check(out, source.double() @ exact.T, torch.float16)
        assert not matrix.arrivals.any()


@pytest.mark.parametrize("kind", ON_GPU, ids=lambda kind: FORMATS[kind])
def test_look_up(ops: BoundKernels, kind: int) -> None:
    """Guards embeddings: rows by their ids, exactly, whichever stand beside them."""
    matrix = QuantizedMatrix.empty(kind, 50, 1100, DEVICE)
    exact = drawn_matrix(kind, 50, 1100, matrix)
    ids, out = torch.tensor([7, 0, 49, 7], device=DEVICE), torch.full((4, 1100), torch.nan, device=DEVICE)
    ops.look_up(matrix, ids, out)
    torch.testing.assert_close(out.double(), exact[ids], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ON_GPU, ids=lambda kind: FORMATS[kind])
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 2), (40, 3)])
def test_experts(ops: BoundKernels, tokens: int, top_k: int, kind: int) -> None:
    """Guards the matrices of experts, also of those without rows."""
    matrices = QuantizedMatrix.empty(kind, 50, 72, DEVICE, experts=6)
    exact = torch.stack([drawn_matrix(kind, 50, 72, matrices.expert(number), number) for number in range(6)])
    routing = ops.route(draw(tokens, 6, seed=3), router(top_k, "softmax"))
    source, bias = draw(tokens, 72), draw(6, 50, seed=2)
    rows = torch.full((tokens * top_k, 50), torch.nan, device=DEVICE)
    pairs = routing.order.long()
    chosen = torch.repeat_interleave(torch.arange(6, device=DEVICE), routing.counts.long())
    product = torch.einsum("pd,pcd->pc", source[pairs // top_k].double(), exact[chosen])
    ops.expert_linear(source, routing, ExpertWeights(matrices, bias), rows, gathers=True, weighs=True)
    weights = routing.weights.flatten()[pairs, None].double()
    check(rows, product * weights + bias.double()[chosen], torch.float32)
    ops.expert_linear(source[pairs // top_k], routing, ExpertWeights(matrices, None), rows, gathers=False, weighs=False)
    check(rows, product, torch.float32)


@pytest.mark.parametrize("group", [64, 128, 320])
def test_float8(ops: BoundKernels, group: int) -> None:
    """Guards FP8 with a scale for a block, and for a row, of a depth that is no multiple of either."""
    matrix = QuantizedMatrix.empty(FP8, 70, 290, DEVICE, group=group)
    exact = drawn_matrix(FP8, 70, 290, matrix)
    source, out = draw(5, 290), torch.full((5, 70), torch.nan, device=DEVICE)
    ops.quantized_linear(source, matrix, None, out)
    check(out, source.double() @ exact.T, torch.float32)
    found = torch.full((5, 290), torch.nan, device=DEVICE)
    ops.look_up(matrix, torch.tensor([9, 0, 69, 9, 1], device=DEVICE), found)
    torch.testing.assert_close(found.double(), exact[[9, 0, 69, 9, 1]], rtol=1e-6, atol=1e-6)


def deterministic(capability: int) -> BoundKernels:
    return BoundKernels(DeviceOps(True, True, True, capability))


def product(ops: BoundKernels, source: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    out = torch.full((len(source), len(matrix)), torch.nan, device=DEVICE)
    ops.linear(source, matrix, bias, out)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("capability", [90, 75])
def test_numbers_in_tiles_of_one_size(capability: int, dtype: torch.dtype) -> None:
    """Guards tiles that are not full, depths that end within one, biases, both types of results, and logits."""
    ops = deterministic(capability)
    for rows, columns, depth in [(1, 40, 64), (3, 33, 100), (70, 130, 160)]:
        source, matrix = draw(rows, depth, dtype=dtype), draw(columns, depth, dtype=dtype, seed=1)
        bias = draw(columns, dtype=dtype, seed=2)
        exact = source.double() @ matrix.double().T
        torch.testing.assert_close(product(ops, source, matrix).double(), exact, rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(ops.logits(source, matrix).double(), exact, rtol=1e-5, atol=2e-5)
        out = torch.full((rows, columns), torch.nan, dtype=dtype, device=DEVICE)
        ops.linear(source, matrix, bias, out)
        torch.testing.assert_close(out.double(), exact + bias.double(), rtol=2e-3, atol=2e-3)


def differing(multiply: Callable[[Tensor], Tensor], source: Tensor) -> int:
    """How many rows have other bits alone than among all others, or in another place among some of them."""
    whole, reversed_ = multiply(source), multiply(source[:40].flip(0).contiguous()).flip(0)
    alone = torch.cat([multiply(row) for row in source[:40].split(1)])
    assert whole.isfinite().all()
    return int(((whole[:40] != alone) | (whole[:40] != reversed_)).any(1).sum())


@pytest.mark.usefixtures("placeless_products")
@pytest.mark.parametrize("kind", ["numbers", "int4", "experts"])
def test_a_row_has_the_same_bits_in_any_company(kind: str) -> None:
    """Guards `--deterministic`: numbers of rows for which there would be other tiles otherwise."""
    ops, source, chooser = (deterministic(90), draw(70, 160, dtype=torch.float16), router(2, "softmax"))
    matrix, scores = draw(70, 160, dtype=torch.float16, seed=1), draw(160, 6, seed=2)
    packed = QuantizedMatrix.empty(INT4, 70, 160, DEVICE)
    drawn_matrix(INT4, 70, 160, packed)
    experts = ExpertWeights(draw(6, 70, 160, dtype=torch.float16, seed=4), None)

    def multiply(rows: Tensor) -> Tensor:
        if kind == "numbers":
            return product(ops, rows, matrix)
        if kind == "int4":
            return ops.logits(rows, packed)
        routing = ops.route(rows.float() @ scores, chooser)
        each = torch.empty(2 * len(rows), 70, dtype=torch.float16, device=DEVICE)
        ops.expert_linear(rows, routing, experts, each, gathers=True, weighs=False)
        out = torch.empty(len(rows), 70, device=DEVICE)
        weights = torch.ones_like(routing.weights)  # those of another product would differ
        ops.combine(each, routing._replace(weights=weights), 1.0, out, weighs=True, add=False)
        return out

    assert differing(multiply, source) == 0
