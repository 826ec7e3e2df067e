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
from cbatch.kernels.triton.conversion import from_four_bits, from_int8, ones_like
from tests.support.ptx import emulated_ptx, needs_interpreter

pytestmark = [pytest.mark.kernels, needs_interpreter]


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
