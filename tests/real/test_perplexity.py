"""How much worse real models get at prose in each data type, quantization and type of KV cache."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from scripts.real_model import GEMMA3, SMOLLM2, RealModel
from tests.support.real_models import engine_of, perplexity

pytestmark = pytest.mark.real

QUICK_TOKENS, MANY_TOKENS = 300, 1200

BOUNDS: list[tuple[str, dict[str, Any], float, float | None]] = [
    ("hf", {"dtype": "bfloat16"}, 1.01, 1.01),
    ("hf", {"dtype": "float16"}, 1.01, None),
    ("hf", {"kv_dtype": "u8"}, 1.02, 1.02),
    ("hf", {"quantize": "int8"}, 1.03, 1.03),
    ("hf", {"quantize": "int8", "activations": "bf16"}, 1.02, 1.02),
    ("hf", {"quantize": "int4"}, 1.35, 1.7),
    ("hf", {"quantize": "int4", "activations": "bf16"}, 1.35, 1.7),
    ("gguf", {"dtype": "float32"}, 1.01, 1.01),
    ("gguf", {}, 1.03, 1.03),
    ("gguf", {"kv_dtype": "u8"}, 1.03, 1.03),
]
"""The file or type that is loaded, and its highest perplexity, as a multiple of float32's: SmolLM2's and Gemma's.

Gemma 3's hidden states exceed float16."""

QUICK = [0, 2, 3, 5, 8]
"""Those of SmolLM2 that are tried on few tokens."""


def measured(model: RealModel, kind: str, num_tokens: int, **options: Any) -> float:
    with engine_of(model.gguf if kind == "gguf" else model.folder, **options) as engine:
        return perplexity(engine, num_tokens)


@cache
def exact(model: RealModel, num_tokens: int) -> float:
    return measured(model, "hf", num_tokens, dtype="float32")


def check(model: RealModel, number: int, num_tokens: int) -> None:
    kind, options, *bounds = BOUNDS[number]
    bound, float32 = bounds[model is GEMMA3], exact(model, num_tokens)
    assert bound is not None
    assert 10 < float32 < 100, "the model reads prose"
    found = measured(model, kind, num_tokens, **options)
    assert float32 / 1.03 < found < float32 * bound, f"{found / float32:.4f} times float32's {float32:.3f}"


def test_few_tokens() -> None:
    """Guards against a precision that loses more than it says, on what most people use."""
    for number in QUICK:
        check(SMOLLM2, number, QUICK_TOKENS)


CASES = [(model, number) for model in (SMOLLM2, GEMMA3) for number in range(len(BOUNDS))]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("model", "number"), [case for case in CASES if BOUNDS[case[1]][2 + (case[0] is GEMMA3)]])
def test_many_tokens(model: RealModel, number: int) -> None:
    """Guards the same for all of them, beyond one step and one window of Gemma's."""
    check(model, number, MANY_TOKENS)


@pytest.mark.exhaustive
def test_overflow_is_an_error() -> None:
    """Guards against a score made of numbers that are none."""
    with engine_of(GEMMA3.folder, dtype="float16") as engine:
        error = engine.score("The capital of France is Paris.").error
    assert error is not None and error.code == "nan_logits"
