"""Guards the conversions of bytes that compiled kernels bring as PTX, for every byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels for a GPU need Triton")

import triton
import triton.language as tl

from cbatch.kernels.formats import LEVELS, MXFP4
from cbatch.kernels.triton.conversion import from_four_bits, from_int8, ones_like, quotient
from tests.support.device import DEVICE
from tests.support.ptx import emulated_ptx, needs_interpreter

pytestmark = pytest.mark.kernels


@triton.jit
def _convert_kernel(codes: Any, low: Any, high: Any, KIND: tl.constexpr) -> None:
    place = tl.arange(0, 256)
    code, dtype = tl.load(codes + place), low.dtype.element_ty
    if KIND == "int8":
        first = from_int8(code.to(tl.int8, bitcast=True), dtype)
        second = ones_like(first)
    else:
        first, second = from_four_bits(code, dtype, KIND == "e2m1")
    tl.store(low + place, first)
    tl.store(high + place, second)


def _levels(codes: Tensor) -> Tensor:
    return torch.tensor(LEVELS[MXFP4])[codes]


MEANINGS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "int8": lambda codes: (torch.where(codes < 128, codes, codes - 256), torch.ones(256)),
    "e2m1": lambda codes: (_levels(codes & 15), _levels(codes >> 4)),
    "int4": lambda codes: ((codes & 15) - 8, (codes >> 4) - 8),
}


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", MEANINGS)
def test_every_byte(kind: str, dtype: torch.dtype) -> None:
    """Guards the order of numbers, masks, offsets and factors in either type; products are tested with one."""
    codes = torch.arange(256)
    low, high = torch.empty(256, dtype=dtype), torch.empty(256, dtype=dtype)
    with emulated_ptx(80):
        _convert_kernel[(1,)](codes.to(torch.uint8), low, high, kind)
    expected = MEANINGS[kind](codes)
    assert torch.equal(low.float(), expected[0].float())
    assert torch.equal(high.float(), expected[1].float())


@triton.jit
def _divide_kernel(numbers: Any, divisors: Any, out: Any, COUNT: tl.constexpr) -> None:
    place = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    tl.store(out + place, quotient(tl.load(numbers + place), tl.load(divisors + tl.program_id(0))))


def test_quotients_are_the_nearest() -> None:
    """Guards tokens whose logits are equal, and bytes of FP8: every quotient has the bits of torch's."""
    chance = torch.Generator().manual_seed(0)
    divisors = torch.cat(
        [
            torch.tensor([1.0, 3.0, 0.7, 1e-5, 2.0**-126, 2.0 - 2.0**-23, 1.0 + 2.0**-23]),
            torch.rand(57, generator=chance),
        ]
    )
    bits = torch.randint(27 << 23, 254 << 23, (64, 4096), generator=chance, dtype=torch.int32)
    numbers = bits.view(torch.float32) * torch.where(torch.rand(bits.shape, generator=chance) < 0.5, 1, -1)
    numbers[:, ::3] = torch.randn(64, 1366, generator=chance) * 10
    numbers[:, :4] = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan])
    out = torch.empty_like(numbers, device=DEVICE)
    _divide_kernel[(64,)](numbers.to(DEVICE), divisors.to(DEVICE), out, 4096)
    torch.testing.assert_close(out.cpu(), numbers / divisors[:, None], rtol=0, atol=0, equal_nan=True)
