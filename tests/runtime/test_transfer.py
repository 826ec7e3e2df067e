"""Settings of torch while it computes on a GPU."""

from __future__ import annotations

import pytest
import torch

from cbatch.runtime.transfer import computing_on
from tests.support.fake_cuda import CUDA, FakeCuda

ROUNDS = "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"


def test_products_are_summed_in_float32_by_the_engine_alone() -> None:
    """Guards sums of products in half precision, which torch rounds to 16 bits by default, and a program's settings."""
    settings = torch.backends.cuda.matmul
    before = [getattr(settings, name) for name in ROUNDS]
    try:
        for chosen in ([True, True], [False, False], [True, False]):
            for name, one in zip(ROUNDS, chosen, strict=True):
                setattr(settings, name, one)
            with FakeCuda(), pytest.raises(KeyError), computing_on(CUDA):  # also in a step that fails
                assert [getattr(settings, name) for name in ROUNDS] == [False, False]
                raise KeyError
            assert [getattr(settings, name) for name in ROUNDS] == chosen
            with computing_on(torch.device("cpu")):
                assert [getattr(settings, name) for name in ROUNDS] == chosen
    finally:
        for name, one in zip(ROUNDS, before, strict=True):
            setattr(settings, name, one)
