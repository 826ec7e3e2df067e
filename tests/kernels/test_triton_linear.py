"""Guards products in tiles of one size: right for every shape, and a row's bits depend on nothing but the row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cbatch.model.ops.device_kernel import DeviceOps
from scripts.gpu.bound_kernels import BoundKernels, router
from tests.support.device import DEVICE
from tests.support.kernels import draw

pytest.importorskip("triton", reason="the kernels for a GPU need Triton")

from cbatch.kernels.formats import INT4, Integers
from cbatch.kernels.operands import ExpertWeights
from cbatch.kernels.quantized_matrix import QuantizedMatrix

pytestmark = pytest.mark.kernels


def ops_for(capability: int) -> BoundKernels:
    return BoundKernels(DeviceOps(True, True, True, capability))


OPS = {"triton": ops_for(90), "triton, without matrix units": ops_for(75)}
DTYPES = [torch.float32, torch.float16]  # Triton's interpreter cannot multiply bfloat16


def product(ops: BoundKernels, source: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    out = torch.full((len(source), len(matrix)), torch.nan, device=DEVICE)
    ops.linear(source, matrix, bias, out)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ops", OPS.values(), ids=OPS)
def test_linear(ops: BoundKernels, dtype: torch.dtype) -> None:
    """Guards tiles that are not full, depths that end within one, biases, both types of results, and logits."""
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
    ops, source, chooser = (ops_for(90), draw(70, 160, dtype=torch.float16), router(2, "softmax"))
    matrix, scores = draw(70, 160, dtype=torch.float16, seed=1), draw(160, 6, seed=2)
    packed = QuantizedMatrix.empty(INT4, 70, 160, DEVICE)
    numbers = torch.randint(0, 16, (70, 160), dtype=torch.uint8).to(DEVICE)
    packed.fill(0, Integers(numbers, draw(70, 5, seed=3).half().abs()))
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
