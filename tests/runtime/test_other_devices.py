"""Engines on GPUs of Intel and Apple, which are faked: same output as on a CPU, and nothing that they lack."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from cbatch.base.config import EngineConfig
from cbatch.base.errors import ConfigError, ModelError
from cbatch.base.params import SamplingParams
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.model.load_plan import LoadPlan
from cbatch.model.loader import load_model
from cbatch.runtime.triton_setup import triton_problem
from tests.support.generation import generate
from tests.support.gpu_machine import Gpu, Machine
from tests.support.other_device import DeviceTensor, OtherDevice
from tests.support.tiny_models import loaded, make_engine, make_network, make_prompts

PARAMS = [
    SamplingParams(max_tokens=5),
    SamplingParams(max_tokens=5, temperature=0.9, top_p=0.9, seed=5, logprobs=3),
    SamplingParams(max_tokens=5, temperature=0.9, top_k=5, presence_penalty=0.5, prompt_logprobs=2),
    SamplingParams(max_tokens=5, allowed_token_ids=[3, 4, 5], logit_bias={4: 1.0}),
]
PROMPTS = make_prompts([9, 3, 14, 5])


@pytest.fixture(params=["xpu", "mps"])
def device(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OtherDevice:
    """A machine with such a GPU, which has memory for the cache, and counts no peak if it is Apple's."""
    Machine(
        tmp_path, monkeypatch, gpus=(), driver=None, nodes=(), cuda=None, xpus=[Gpu("Intel Arc B580")], has_mps=True
    ).install()
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.xpu, name, lambda *_: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.xpu, name, lambda *_: 0)
    monkeypatch.setattr(torch.xpu, "mem_get_info", lambda device: (2**33, 2**33))
    monkeypatch.setattr(torch.mps, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 2**33)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 0)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**33))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    return OtherDevice(f"{request.param}:0")


def engine_on(device: OtherDevice, network: Any, **options: Any) -> SteppingEngine:
    settings: dict[str, Any] = {"block_size": 4, "kv_blocks": 24, "max_seqs": 8, "device": device.device.type} | options
    return SteppingEngine(EngineConfig(**settings), loaded(device.place(network)))


@cache
def on_a_cpu() -> Any:
    return generate(make_engine(make_network("gemma2"), kv_blocks=24), PROMPTS, PARAMS)


@pytest.mark.parametrize("run_ahead", [None, True])
def test_output_is_that_of_a_cpu(device: OtherDevice, run_ahead: bool | None) -> None:
    """Guards every step against tensors of the wrong device, pinned memory and float64, with all that sampling does."""
    expected = on_a_cpu()
    with device:
        engine = engine_on(device, make_network("gemma2"), run_ahead=run_ahead)
        assert (str(engine.device), engine.attention) == (str(device.device), "reference")
        assert isinstance(engine.runner.kv_cache.keys[0], DeviceTensor)
        assert engine.stats().fallback.endswith(f"{triton_problem(device.device)}")
        found = generate(engine, PROMPTS, PARAMS)
        assert engine.limits.max_seqs == 8 and engine.limits.max_batch_tokens == 2048
        engine.close()
    assert "embedding" in device.used and not device.used & {"sort", "topk", "max", "argmax", "log_softmax", "item"}
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert [one.logprobs for one in found] == [one.logprobs for one in expected]


def test_a_device_that_computes_wrongly_is_refused(device: OtherDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards devices that nobody has tested: the self-check runs on them, and decides."""
    attention = torch.nn.functional.scaled_dot_product_attention

    def wrong(*args: Any, **options: Any) -> torch.Tensor:
        return attention(*args, **options | {"attn_mask": None})

    monkeypatch.setattr("cbatch.attention.reference.scaled_dot_product_attention", wrong)
    with device, pytest.raises(ModelError, match="its output on a ragged batch differs from its own"):
        engine_on(device, make_network("llama"))


def test_there_is_no_fast_path(device: OtherDevice) -> None:
    """Guards models of the Llama family, whose fast path was once that of a CPU, whatever device was named."""
    for attention in ("cpu", "triton"):
        with pytest.raises(ConfigError, match=rf"backend {attention} runs on .*, not on {device.device}; choose auto"):
            SteppingEngine(EngineConfig(device=device.device.type, attention=attention))
    taken: list[bool] = []

    def load(plan: LoadPlan) -> Any:
        taken.append(plan.fast)
        raise ModelError("nothing is loaded here")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ModelError, match="nothing is loaded"):
        patch.setattr("cbatch.engine.loading.load_model", load)
        SteppingEngine(EngineConfig(device=device.device.type))
    assert taken == [False] and load_model is not load
