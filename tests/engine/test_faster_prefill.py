"""The choice between FlashInfer, for which a double stands in, and Triton's kernels for long chunks of prompts."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels for a GPU need Triton")

from cbatch.attention import flash
from cbatch.attention import triton as triton_attention
from cbatch.attention.flash import FlashAttention
from cbatch.attention.triton import TritonAttention
from cbatch.base.config import EngineConfig
from cbatch.engine import fallback
from cbatch.engine.fallback import choose_execution
from cbatch.engine.kernel_checks import attention as attention_checks
from cbatch.engine.kernel_checks.all_checks import ModelChecks
from tests.support import fake_flashinfer
from tests.support.cuda_model import DEVICE, model_of
from tests.support.tiny_models import make_network

pytestmark = [pytest.mark.slow, pytest.mark.kernels]

PLANNER = fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Chooses the execution of a model on a machine with FlashInfer, whose runs take so many seconds, or fail.

    Triton's kernels pass their checks, and take a second for a long chunk.
    """
    now = [0.0]
    monkeypatch.setattr(fallback, "is_accelerator", lambda _: True)
    monkeypatch.setattr(fallback, "triton_problem", lambda _: None)
    monkeypatch.setattr(fallback, "select_attention", lambda *_: TritonAttention(DEVICE))
    for part in ("attention_kernels", "layers", "captured_steps"):
        monkeypatch.setattr(ModelChecks, part, lambda _: [])
    monkeypatch.setattr(attention_checks, "LONG_CHUNKS", {"FlashInfer's prefill attention": [(3, 4), (3, 140), (0, 5)]})
    monkeypatch.setattr(attention_checks, "_TIMED_RUNS", 1)
    monkeypatch.setattr(attention_checks, "clock", lambda: now[0])
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.setattr(flash, "find_spec", lambda name: name)
    attend_prefill, run = triton_attention.attend_prefill, PLANNER.run

    def timed_prefill(*arguments: Any) -> None:
        if arguments[5].prefill is not None and len(arguments[0]) > 200:
            now[0] += 1.0  # what it computes is not looked at
        else:
            attend_prefill(*arguments)

    monkeypatch.setattr(triton_attention, "attend_prefill", timed_prefill)

    def choose(seconds: float, damage: Any = lambda out: None, attention: str = "auto", head_dim: int = 64) -> Any:
        def timed_run(self: Any, *arguments: Any, out: Tensor) -> None:
            now[0] += seconds
            run(self, *arguments, out=out)
            damage(out)

        monkeypatch.setattr(PLANNER, "run", timed_run)
        network = make_network("qwen3", num_hidden_layers=1, max_position_embeddings=16, head_dim=head_dim)
        return choose_execution(EngineConfig(attention=attention), model_of(network, torch.float16))

    return choose


def test_the_faster_one_computes_prompts(choose: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Guards the measurement: FlashInfer is taken if it is faster, without a word, and never if Triton was named
    or no layer has heads for it.
    """
    assert isinstance(choose(0.9).attention, FlashAttention)
    for chosen in choose(1.1), choose(0.9, attention="triton"), choose(0.9, head_dim=32):
        assert type(chosen.attention) is TritonAttention and chosen.fallback == ""
    assert not caplog.records


def without_compiler(out: Tensor) -> None:
    raise RuntimeError("Could not find nvcc")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [(lambda out: out[-1].mul_(1.1), "differs from torch by 0.1"), (without_compiler, "fails (Could not find nvcc)")],
)
def test_a_failed_check_leaves_it_out(damage: Any, reason: str, choose: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Guards users of a FlashInfer that is wrong, or cannot be compiled: Triton stays, and one sentence says why."""
    chosen = choose(0.1, damage)
    assert type(chosen.attention) is TritonAttention and chosen.graphs
    sentence = f"FlashInfer is not used on {DEVICE}: FlashInfer's prefill attention (heads of 64) {reason}"
    assert chosen.fallback.startswith(sentence)
    assert [record.getMessage() for record in caplog.records if record.name == "cbatch"] == [chosen.fallback]
