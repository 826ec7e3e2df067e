"""Guards the benchmark of roundings: those of llama.cpp, and the comparison of logits."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from torch import Tensor

from scripts.benchmarks import rounding
from scripts.benchmarks.harness import main
from scripts.benchmarks.rounding import compare, rounded_to_q4_0, rounded_to_q8_0
from scripts.benchmarks.shapes import SHAPES, TINY


@pytest.mark.parametrize(
    ("rounded", "kind"),
    [(rounded_to_q8_0, GGMLQuantizationType.Q8_0), (rounded_to_q4_0, GGMLQuantizationType.Q4_0)],
)
def test_blocks_of_32(rounded: Callable[[Tensor], Tensor], kind: GGMLQuantizationType) -> None:
    """Guards the formats number by number, with a depth that ends within a block, and zeros."""
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(0))
    x[1, 32:64] = x[:, 80:] = 0
    expected = torch.from_numpy(dequantize(quantize(x.numpy(), kind), kind))
    assert torch.allclose(rounded(x[:, :80]), expected[:, :80], rtol=1e-6, atol=1e-12)


def test_comparison() -> None:
    """Guards divergence, share of equal tokens and perplexity against numbers that were computed by hand."""
    certain, even = torch.tensor([[0.0, math.log(3)]] * 2), torch.zeros(2, 2)
    same = compare([certain], [certain], [[0, 1]])
    assert same["divergence"] == 0 and same["same"] == 1 and math.isclose(same["perplexity"], 4 / 3, rel_tol=1e-6)
    other = compare([even], [certain], [[0, 1]])
    divergence = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    assert math.isclose(other["divergence"], divergence, rel_tol=1e-6)
    assert other["same"] == 0 and math.isclose(other["perplexity"], 2, rel_tol=1e-6)


@pytest.mark.kernels
@pytest.mark.slow
def test_every_rounding_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the benchmark from end to end: more bits lose less, in both implementations."""
    names = ["bfloat16", "int8, activations int8"]
    monkeypatch.setattr(rounding, "ROUNDINGS", {name: rounding.ROUNDINGS[name] for name in names})
    monkeypatch.setattr(rounding, "SHAPES", {"small": SHAPES["135m"] | TINY})
    assert main(["rounding", "--shape", "small", "--layers", "2", "--tokens", "24", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["small"]
    caches = ["float32, KV Q8_0 of llama.cpp", "float32, KV u8"]
    floats = ["float32, FP8, rows", "float32, FP8, rows, activations fp8"]
    assert list(found) == ["Q8_0 of llama.cpp", "Q4_0 of llama.cpp", *caches, *floats, *names]
    loss = {name: figures["divergence"] for name, figures in found.items()}
    assert 0 < loss[floats[0]] < loss[floats[1]] < loss["Q4_0 of llama.cpp"]
    assert 0 < loss["bfloat16"] < loss["int8, activations int8"] < loss["Q4_0 of llama.cpp"]
    assert all(0 < loss[cache] < loss["Q8_0 of llama.cpp"] < loss["Q4_0 of llama.cpp"] for cache in caches)
