"""Guards `--deterministic`: the same bits in any company and any chunks, and a refusal where nobody can promise that.

Without a GPU, Triton's interpreter runs the kernels of a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from cbatch.attention.reference import ReferenceAttention
from cbatch.base.config import EngineConfig
from cbatch.base.errors import ConfigError
from cbatch.base.params import SamplingParams
from cbatch.engine.fallback import check_batch_invariant
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.model.ops.device_kernel import by_torch
from cbatch.requests.completion import Completion
from tests.support.cuda_model import DEVICE, engine_around, model_of
from tests.support.generation import generate
from tests.support.programs import PROMPT, logits_in_chunks, saved_model
from tests.support.samples import sampled
from tests.support.tiny_models import make_engine, make_fast_engine, make_network, make_prompts, network_of

pytest.importorskip("triton", reason="the kernels for a GPU need Triton")

from cbatch.attention.triton import TritonAttention
from cbatch.model.cuda import CudaModel

PROMPTS = make_prompts([3, 21, 1], seed=3)
WAYS = [[0, 26], [0, 3, 4, 5, 20, 26], [0, 19, 20, 21, 26]]
"""Where a prompt of 26 tokens is cut into steps."""


def invariant_attention() -> TritonAttention:
    return TritonAttention(DEVICE, batch_invariant=True)


def exact(completion: Completion) -> list[Any]:
    """Tokens and log-probabilities, to the last bit."""
    assert completion.logprobs is not None
    return [(one.token_id, one.logprob, [top.logprob for top in one.top]) for one in completion.logprobs]


def results(engine: SteppingEngine, prompts: Sequence[list[int]] = PROMPTS) -> list[Any]:
    with engine:
        params = [SamplingParams(max_tokens=5, temperature=1.0, logprobs=2, seed=len(prompt)) for prompt in prompts]
        return [exact(completion) for completion in generate(engine, prompts, params)]


@pytest.mark.slow
@pytest.mark.kernels
@pytest.mark.usefixtures("placeless_products")
@pytest.mark.parametrize("kind", sampled(["llama", "gemma2", "mixtral", "gpt_oss"], 1, keep=["gpt_oss"]))
def test_a_token_has_the_same_bits_in_any_chunks(kind: str) -> None:
    """Guards programs on a GPU: a prompt in one step, in chunks and token by token, as after a preemption."""
    saved = saved_model(kind)
    model = CudaModel(saved.config, saved.tensors, torch.float32, DEVICE).as_batch_invariant()
    first, *others = (logits_in_chunks(model, invariant_attention(), PROMPT[:26], chunks) for chunks in WAYS)
    assert first.isfinite().all() and all(torch.equal(first, other) for other in others)
    plain = logits_in_chunks(model.with_ops(by_torch()), ReferenceAttention(), PROMPT[:26], WAYS[0])
    torch.testing.assert_close(first, plain, atol=2e-3, rtol=2e-3)


@pytest.mark.slow
@pytest.mark.kernels
@pytest.mark.usefixtures("placeless_products")
def test_a_row_has_the_same_bits_in_any_company(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards whole runs on a GPU: log-probabilities alone, and beside others whose prompts are cut."""
    model = model_of(network_of("qwen2, biases"))

    def engine(**config: Any) -> SteppingEngine:
        return engine_around(monkeypatch, model, invariant_attention(), deterministic=True, **config)

    together = results(engine(max_batch_tokens=7))
    assert together == [found for prompt in PROMPTS for found in results(engine(), [prompt])]
    assert not model.batch_invariant, "the option changes the engine, not the model that it was given"


def test_a_cpu_needs_nothing_for_it() -> None:
    """Guards the CPU's fast path, where the option changes nothing: same bits with and without, alone and together."""
    network = make_network("qwen3")
    plain = results(make_fast_engine(network, max_batch_tokens=7))
    assert results(make_fast_engine(network, max_batch_tokens=9, deterministic=True)) == plain
    for prompt, expected in zip(PROMPTS, plain, strict=True):
        assert results(make_fast_engine(network, max_seqs=1, deterministic=True), [prompt]) == [expected]


def test_what_cannot_be_promised_is_refused() -> None:
    """Guards the promise: products of torch, attention by torch, recurrent layers on a GPU, and products of FP8."""
    with pytest.raises(ConfigError, match="operations of torch compute the layers of this model on cpu"):
        make_engine(make_network("qwen2"), deterministic=True)
    model = model_of(network_of("llama"))
    with pytest.raises(ConfigError, match="operations of torch compute the layers"):
        check_batch_invariant(model, invariant_attention())
    model = model.as_batch_invariant()
    check_batch_invariant(model, invariant_attention())
    with pytest.raises(ConfigError, match="operations of torch compute attention"):
        check_batch_invariant(model, ReferenceAttention())
    model.states = [None]  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="recurrent layers"):
        check_batch_invariant(model, invariant_attention())
    with pytest.raises(ConfigError, match="leave it out with --deterministic"):
        EngineConfig(deterministic=True, activations="fp8")
    with pytest.raises(ConfigError, match="deterministic must be True or False"):
        EngineConfig(deterministic="yes")  # type: ignore[arg-type]
