"""The engine on a GPU that is as late as it may be: the same tokens, whatever the host does meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from cbatch.base.config import EngineConfig
from cbatch.base.params import SamplingParams
from cbatch.engine import fallback, kv_cache_sizing
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.model.cuda import CudaModel
from cbatch.model.load_plan import LoadPlan
from cbatch.model.loader import LoadedModel, load_model
from cbatch.runtime import transfer
from cbatch.runtime.memory import DeviceMemory
from cbatch.runtime.transfer import HostCopy
from cbatch.sample.output import PendingSample
from tests.engine import test_overlap as overlap
from tests.support.architectures import make_architecture
from tests.support.device import HAS_GPU
from tests.support.fake_cuda import CUDA, DeferredDevice
from tests.support.samples import sampled
from tests.support.tiny_models import FAMILIES, generate_alone, loaded, make_engine, make_network, make_prompts

pytest.importorskip("triton", reason="the kernels for a GPU need Triton")

from cbatch.kernels.triton import attention_metadata
from tests.support import queued_kernels
from tests.support.queued_kernels import QueuedAttention, QueuedOps

pytestmark = pytest.mark.skipif(HAS_GPU, reason="torch has a real device")

LENGTHS = [5, 40, 3, 12, 9, 21]
ASKED = [
    SamplingParams(max_tokens=12),
    SamplingParams(max_tokens=9),
    SamplingParams(max_tokens=4, repetition_penalty=1.5),
    SamplingParams(max_tokens=9, temperature=1.0, top_p=0.9, seed=3, logprobs=2, frequency_penalty=0.5),
    SamplingParams(max_tokens=4, prompt_logprobs=1, logit_bias=((3, 1.0),), allowed_token_ids=tuple(range(30))),
    SamplingParams(max_tokens=7, temperature=0.8, seed=8, stop_token_ids=(1, 2, 3, 4), min_tokens=3),
]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Kernels that are quick here. No steps are run to measure their memory."""
    monkeypatch.setattr("cbatch.kernels.triton.sampling.sample_rows", queued_kernels.sample_rows)
    select = fallback.select_attention
    monkeypatch.setattr(
        fallback,
        "select_attention",
        lambda name, device, *rest: QueuedAttention(CUDA) if device == CUDA else select(name, device, *rest),
    )
    monkeypatch.setattr(fallback, "is_accelerator", lambda _: False)
    without_measuring(monkeypatch)
    return monkeypatch


def without_measuring(patch: pytest.MonkeyPatch) -> None:
    memory = DeviceMemory("a device", "90%", lambda: 2**30)
    patch.setattr(kv_cache_sizing, "device_memory", lambda _: memory)


@cache
def network(family: str) -> Any:
    return make_network(family) if family in FAMILIES else make_architecture(family, eos_token_id=None)


def make(family: str = "llama", ops: Any = None, **config: Any) -> SteppingEngine:
    """An engine on the device that is entered, with the CudaModel of a tiny network."""
    weights = network(family).config.to_dict(), network(family).state_dict()
    model = CudaModel(*weights, torch.float32, CUDA, ops or QueuedOps())
    fast = LoadedModel("tiny", lambda: None, None, SamplingParams(), frozenset(), fast_model=model)
    settings: dict[str, Any] = {"max_seqs": 4, "block_size": 4, "kv_blocks": 40, "max_batch_tokens": 24} | config
    return SteppingEngine(EngineConfig(device="cuda", **settings), fast)


def run(engine: SteppingEngine, *, failures: int = 0, every: int = 1) -> list[list[int | None]]:
    """Tokens of every so manyth request. failures: how many steps may fail"""
    work = list(zip(make_prompts(LENGTHS), ASKED, strict=True))[::every]
    ids = [engine.add(prompt, asked) for prompt, asked in work]
    found: dict[int | None, list[int | None]] = {number: [] for number in ids}
    while engine.has_work:
        try:
            events = engine.step()
        except overlap.Hiccup:
            failures -= 1
            assert failures >= 0
            continue
        for event in events:
            assert event.error is None
            found[event.request_id].append(event.token_id)
    assert engine.scheduler.pool.num_used == 0
    return list(found.values())


@cache
def expected(family: str = "llama") -> list[list[int | None]]:
    return run(make_engine(network(family)))


@pytest.fixture
def device() -> Iterator[DeferredDevice]:
    with DeferredDevice() as device:
        yield device


WAYS: list[tuple[bool, dict[str, Any]]] = [
    *product((False, True), ({}, {"cuda_graphs": False}, {"run_ahead": False}, {"kv_blocks": 14})),
]


@pytest.mark.parametrize("way", sampled(WAYS, 2, keep=[WAYS[3], WAYS[4]]), ids=str)
def test_tokens_are_those_of_a_cpu(way: tuple[bool, dict[str, Any]], kernels: pytest.MonkeyPatch) -> None:
    """Guards the order of copies, kernels, graphs and frees: a device that is late gives the same tokens."""
    others_first, config = way
    with DeferredDevice(others_first=others_first) as device:
        engine = make(**config)
        with device.no_waits():
            assert run(engine) == expected()
            assert run(engine) == expected()
    assert (engine.stats().num_preemptions > 0) == ("kv_blocks" in config)


def test_engines_do_not_disturb_each_other(device: DeferredDevice, kernels: pytest.MonkeyPatch) -> None:
    """Guards two engines on one device, whose steps alternate, and which end while work of the other is queued."""
    engines, work = [make(), make("qwen3")], list(zip(make_prompts(LENGTHS), ASKED, strict=True))
    found: list[dict[int | None, list[int | None]]] = [
        {engine.add(*one): [] for one in work[:number]} for engine, number in zip(engines, (3, 6), strict=True)
    ]
    with device.no_waits():
        while any(engine.has_work for engine in engines):
            for engine, tokens in zip(engines, found, strict=True):
                for event in engine.step() if engine.has_work else ():
                    tokens[event.request_id].append(event.token_id)
    engines[0].close()
    assert list(found[0].values()) == expected()[:3] and list(found[1].values()) == expected("qwen3")
    assert run(engines[1]) == expected("qwen3")


@pytest.mark.parametrize("where", ["forward", "sample", "get"])
def test_steps_that_fail_change_no_token(where: str, device: DeferredDevice, kernels: pytest.MonkeyPatch) -> None:
    """Guards retries: what a failed step has queued still runs, on buffers that its next attempt fills again."""
    engine = make()
    assert run(engine) == expected()
    if where == "forward":
        kernels.setattr(engine.runner, "forward", overlap.every(5, engine.runner.forward))
    else:
        name = "__init__" if where == "sample" else "get"
        kernels.setattr(PendingSample, name, overlap.every(5, getattr(PendingSample, name)))
    assert run(engine, failures=99) == expected()


def is_close(found: Any, wanted: Any) -> bool:
    """Whether outcomes are the same but for the last decimals of log-probabilities, which depend on orders of sums."""
    if isinstance(found, float) and isinstance(wanted, float):
        return abs(found - wanted) < 1e-3
    if isinstance(found, tuple | list) and isinstance(wanted, tuple | list):
        return len(found) == len(wanted) and all(map(is_close, found, wanted))
    return bool(found == wanted)


@pytest.mark.exhaustive
def test_all_features_are_those_of_a_cpu(kernels: pytest.MonkeyPatch) -> None:
    """Guards every feature that reads or writes something beside the logits, through preemption."""
    with DeferredDevice() as device:
        fast = load_model(LoadPlan(device=CUDA, dtype="float32"))
        assert isinstance(fast.fast_model, CudaModel)
        fast.fast_model.ops = QueuedOps()
        engine = SteppingEngine(EngineConfig(device="cuda", max_seqs=9, max_batch_tokens=100), fast)
        with device.no_waits():
            found = overlap.run(engine, shaken=True)
    wrong = [name for name, outcome in overlap.expected().items() if not is_close(found[name], outcome)]
    assert not wrong


@pytest.mark.parametrize("family", ["gemma2", pytest.param("gpt2", marks=pytest.mark.exhaustive)])
def test_models_of_transformers_are_not_waited_for(family: str, kernels: pytest.MonkeyPatch) -> None:
    """Guards the path of models that have no kernels of their own: same tokens as `generate`, and no hidden wait."""
    lengths = [5, 20, 3]
    with DeferredDevice() as device:
        with torch.inference_mode():
            there = make_network(family).to(CUDA)
        config = EngineConfig(device="cuda", block_size=4, kv_blocks=64, max_seqs=8)
        engine = SteppingEngine(config, loaded(there))
        ids = [engine.add(prompt, SamplingParams(max_tokens=5)) for prompt in make_prompts(lengths)]
        found: dict[int | None, list[int | None]] = {number: [] for number in ids}
        with device.no_waits():
            while engine.has_work:
                for event in engine.step():
                    found[event.request_id].append(event.token_id)
    assert list(found.values()) == generate_alone(network(family), make_prompts(lengths), [5] * 3)


def test_checks_of_kernels_pass(device: DeferredDevice, kernels: pytest.MonkeyPatch) -> None:
    """Guards the checks at load against mixed devices, and against numbers read too early: all would step down."""
    kernels.setattr(fallback, "is_accelerator", lambda _: True)
    engine = make("qwen3")
    assert engine.stats().fallback == "" and engine.runner.graph_problem == ""
    with device.no_waits():
        assert run(engine) == expected("qwen3")


@pytest.mark.slow
@pytest.mark.kernels
@pytest.mark.parametrize("family", sampled(["qwen3", "qwen3_5_text"], 1, keep=["qwen3_5_text"]))
def test_kernels_give_the_tokens_of_a_cpu(family: str, device: DeferredDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the real kernels with their buffers, captured and replayed: the numbers of a capture stay what they are,
    states are read where slots say, and padding touches none.
    """
    from cbatch.model.ops.device_kernel import DeviceOps

    without_measuring(monkeypatch)
    monkeypatch.setattr(fallback, "is_accelerator", lambda _: False)
    engine = make(family, ops=DeviceOps(True, True, capability=90), max_seqs=2, max_batch_tokens=8)
    with device.no_waits():
        assert run(engine, every=3) == expected(family)[::3]
    assert {"_decode_kernel", "_prefill_kernel", "_scan_kernel", "_norm_kernel"} <= device.launches.keys()


# The device itself.


def reuse_host_buffers(patch: pytest.MonkeyPatch) -> None:
    kept: dict[int, Tensor] = {}

    def pack(arrays: Any, layout: Any, *, pin: bool) -> Tensor:
        made = original(arrays, layout, pin=pin)
        if len(made):
            made = kept.setdefault(len(made), made).copy_(made)
        return made

    original = transfer.pack
    patch.setattr(transfer, "pack", pack)


def read_tokens_too_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostCopy, "get", lambda copy: copy._tensors)


def fill_graphs_from_a_stream_of_their_own(patch: pytest.MonkeyPatch) -> None:
    fill = attention_metadata.StepBuffers.fill

    def aside(buffers: Any, batch: Any) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            fill(buffers, batch)

    patch.setattr(attention_metadata.StepBuffers, "fill", aside)


@pytest.mark.parametrize(
    "plant",
    [reuse_host_buffers, read_tokens_too_early, fill_graphs_from_a_stream_of_their_own],
)
def test_planted_faults_are_found(plant: Callable[[pytest.MonkeyPatch], None], kernels: pytest.MonkeyPatch) -> None:
    """Guards the tests of this file against a device on which every order is right."""
    with pytest.raises((AssertionError, IndexError, ValueError)), DeferredDevice():
        plant(kernels)
        assert run(make()) == expected()
