"""The size of the KV cache beside the largest step. The GPU is simulated; the steps are real."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch

from cbatch.attention.reference import ReferenceAttention
from cbatch.base.config import EngineConfig
from cbatch.base.errors import ConfigError
from cbatch.base.params import SamplingParams
from cbatch.engine import kv_cache_sizing as sizing
from cbatch.engine.cuda_graphs import GRAPH_BYTES
from cbatch.engine.kv_cache_sizing import (
    RESERVED_BYTES,
    CacheSizeRequest,
    MemoryProfiler,
    choose_cache_size,
)
from cbatch.engine.model_runner import Execution, ModelRunner
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.model.hf.adapter import TransformersModel
from cbatch.model.hf.self_check import checked_model
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.memory import DeviceMemory
from cbatch.sample.sampler import Sampler
from cbatch.schedule.limits import StepLimits
from tests.support.fake_cuda import CUDA, FakeCuda
from tests.support.generation import generate
from tests.support.tiny_models import VOCABULARY, loaded, make_engine, make_network, make_prompts, no_collector

MIB, GIB = 2**20, 2**30
BYTES_PER_TOKEN = MIB // 8
"""Bytes that the simulated device counts for each token of a step."""


@dataclass
class Gpu:
    """A device of 10 GiB, on which a step takes `BYTES_PER_TOKEN`, and keeps some of them, as libraries do."""

    total: int = 10 * GIB
    left_behind: int = 0
    for_activations: int = 10 * GIB
    taken: int = 0
    steps: list[RaggedBatch] = field(default_factory=list)

    @property
    def memory(self) -> DeviceMemory:
        return DeviceMemory("gpu:7", "90%", lambda: self.total - self.taken, self._peak_of)

    def _peak_of(self, step: Callable[[], object]) -> int:
        before = len(self.steps)
        step()
        assert len(self.steps) == before + 1, "nothing was computed"
        self.taken = self.left_behind
        peak = len(self.steps[-1].input_ids) * BYTES_PER_TOKEN
        if peak > self.for_activations:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return peak


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Makes every engine of the test see this device."""
    made = Gpu()
    see_steps(made, monkeypatch)
    monkeypatch.setattr(sizing, "device_memory", lambda device: made.memory)
    return made


def see_steps(device: Gpu, patch: pytest.MonkeyPatch) -> None:
    forward = TransformersModel.forward

    def seen(model: TransformersModel, batch: RaggedBatch, *others: Any) -> Any:
        device.steps.append(batch)
        return forward(model, batch, *others)

    patch.setattr(TransformersModel, "forward", seen)


def make(**config: Any) -> SteppingEngine:
    """An engine whose cache is as large as the device allows: blocks of 4 tokens of 384 bytes."""
    settings: dict[str, Any] = {"block_size": 4, "max_seqs": 6, "max_batch_tokens": 64, "device": "cpu"} | config
    return SteppingEngine(EngineConfig(**settings), loaded(make_network("llama")))


def by_torch(model: TransformersModel) -> Execution:
    return Execution(model, ReferenceAttention(), Sampler(model.device), graphs=False)


@cache
def tiny() -> Any:
    return checked_model(make_network("llama"))


def choose(memory: str | None = None, num_blocks: int | None = None, **gpu: int) -> int:
    """Chooses from blocks of 1 MiB, of which 100,000 would be useful, on such a device."""
    device, cache_size = Gpu(**gpu), CacheSizeRequest(memory or "90%", num_blocks, MIB, 100_000)
    with pytest.MonkeyPatch.context() as patch:
        see_steps(device, patch)
        return choose_cache_size(cache_size, by_torch(tiny()), 4, StepLimits(2, 64), device.memory)[0].num_blocks


STEP = 64 * BYTES_PER_TOKEN + RESERVED_BYTES


def test_the_cache_gets_what_is_requested_if_it_fits() -> None:
    """Guards the contract: 90% of what is free after the weights, or an amount, or a number of blocks."""
    assert choose() == 9 * GIB // MIB and choose("50%") == 5 * GIB // MIB
    assert choose("4GiB") == 4096 and choose(num_blocks=7) == 7


def test_a_percentage_leaves_memory_for_a_step() -> None:
    """Guards steps on full devices: a percentage that is too large is reduced to what a step and the reserve leave."""
    assert choose("100%") == (10 * GIB - STEP) // MIB
    assert choose("100%", left_behind=100 * MIB) == (10 * GIB - STEP) // MIB - 100
    assert choose(total=2 * STEP) == STEP // MIB, "less than the 90% of the default"


@pytest.mark.parametrize("asked", [{"memory": "9.99GiB"}, {"num_blocks": 10_230}])
def test_an_amount_that_leaves_too_little_for_a_step_is_refused(asked: dict[str, Any]) -> None:
    """Guards against a run that fails at its first full step; the message has the figures."""
    takes = r"A step of 64 tokens in up to 2 sequences takes 264.0 MiB of the 10.0 GiB that are free on gpu:7"
    with pytest.raises(ConfigError, match=rf"10.0 GiB was asked for. {takes}, so 9.7 GiB are left.*--max-batch-tokens"):
        choose(**asked)


@pytest.mark.parametrize(
    ("device", "told"),
    [
        ({"total": STEP}, r"A step of 64 tokens.* takes 264.0 MiB of the 264.0 MiB.*leaves no room.*"),
        ({"for_activations": 4 * MIB}, r"takes more than the 10.0 GiB that are free.*--max-batch-tokens"),
    ],
)
def test_a_step_that_does_not_fit_is_refused(device: dict[str, int], told: str) -> None:
    """Guards the message: how much such a step takes, even without a cache, and what makes it smaller."""
    with pytest.raises(ConfigError, match=told) as caught:
        choose(**device)
    assert caught.value.__context__ is None, "what was raised before holds the tensors of the step"


def test_errors_while_profiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the first large step on a GPU with little shared memory, and reasons that nobody foresaw."""
    small = pytest.importorskip("triton.runtime.errors").OutOfResources(131072, 101376, "shared memory")
    told = r"gpu:7: a kernel needs 131072 of shared memory, and this GPU has 101376; --attention reference"
    raised: list[Exception] = [small, RuntimeError("no such kernel")]

    def launch(*_: Any) -> Any:
        raise raised.pop(0)

    monkeypatch.setattr(sizing, "PendingSample", launch)
    for kind, message in ((ConfigError, f"cannot run on {told}"), (RuntimeError, "no such kernel")):
        with pytest.raises(kind, match=message) as caught:
            choose()
        assert caught.value.__context__ is None, "what was raised before holds the tensors of the step"


def test_the_largest_steps_are_profiled(gpu: Gpu) -> None:
    """Guards the profile: most tokens in few prompts, all in many chunks, and long contexts for both kinds of rows."""
    engine = make(kv_cache_memory="20%")
    gpu.steps, seen = [], gpu.steps[-3:]
    few, many, decode = ([stop - start for start, stop in zip(one.starts, one.stops, strict=True)] for one in seen)
    assert few == [59, 1, 1, 1, 1, 1] and many == [11, 11, 11, 11, 10, 10] and decode == [1] * 6
    assert seen[0].stops[0] == 160, "attention that copies the past is tried at the end of the context"
    assert seen[1].stops == seen[2].stops == (160,) * 6 and [len(one.logit_rows) for one in seen] == [6, 6, 6]
    assert engine.limits.num_blocks == 6 * 40, "no more than every seat can use"


def test_budgets_beyond_the_context_are_profiled_in_several_prompts() -> None:
    """Guards budgets beyond the context, caches smaller than the context, and a single slot."""

    def bounds(limits: StepLimits, cache_tokens: int) -> list[list[tuple[int, int]]]:
        trial = MemoryProfiler(by_torch(tiny()), 4, limits, cache_tokens)
        plans = [*trial.prompt_steps(), trial.decode_step()]
        return [[(one.start, one.stop) for one in scheduled.chunks] for scheduled in plans]

    few, many, decode = bounds(StepLimits(3, 400), 300)
    assert few == [(0, 160), (0, 160), (0, 80)] and many == [(26, 160), (7, 140), (1, 134)]
    assert decode == [(159, 160), (139, 140), (0, 1)]
    assert bounds(StepLimits(1, 7), 50) == [[(43, 50)], [(43, 50)], [(49, 50)]]
    assert bounds(StepLimits(1, 500), 50) == [[(0, 50)], [(0, 50)], [(49, 50)]]
    assert bounds(StepLimits(4, 2), 0) == [[(0, 1), (0, 1)], [(0, 1), (0, 1)], [(0, 1), (0, 1)]]


def test_every_profiled_request_uses_all_features(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the memory of sampling: constraints, penalties, filters and log-probabilities in all slots."""
    evaluation, seen = sizing.PendingSample, []

    def watch(*arguments: Any) -> Any:
        seen.append((arguments, evaluation(*arguments)))
        return seen[-1][1]

    monkeypatch.setattr(sizing, "PendingSample", watch)
    make()
    (scheduled, logits, _, _, masks), done = seen[1]
    assert logits.values.shape == (6, VOCABULARY) and masks.bitmasks.shape == (6, -(-VOCABULARY // 32))
    params = scheduled.to_sample[0].sequence.request.params
    assert not params.greedy and params.top_k and params.top_p < 1 and params.min_p and params.presence_penalty
    assert all(sample.error is None and len(sample.logprobs.top) == 20 for sample in done.get().samples)


def test_the_memory_of_graphs_is_left_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the reserve of CUDA graphs: it lessens a share of the memory, but not an amount that is asked for."""
    monkeypatch.setattr(MemoryProfiler, "_measure_graphs", lambda *_: 100 * MIB)
    assert choose("100%") == (10 * GIB - STEP) // MIB - 100 and choose("90%") == 9 * GIB // MIB
    assert choose("100%", total=STEP + 60 * MIB) == 30, "steps can do without graphs"
    assert choose("80MiB", total=STEP + 120 * MIB) == choose(num_blocks=80, total=STEP + 120 * MIB) == 80


def test_graphs_stop_where_the_memory_of_steps_begins(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the largest step of an engine whose graphs take more than was measured."""
    found: list[Callable[[], bool]] = []
    monkeypatch.setattr(ModelRunner, "capture_graphs", lambda *arguments: found.append(arguments[3]))
    make(kv_cache_memory="20%")
    (has_room,) = found
    for left, expected in ((STEP + GRAPH_BYTES, True), (STEP + GRAPH_BYTES - 1, False)):
        gpu.taken = gpu.total - left
        assert has_room() is expected


def test_profiling_leaves_nothing_behind(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards memory, blocks and outputs: all are as without profiling."""
    pools: list[weakref.ref[KVCache]] = []

    class Watched(KVCache):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            pools.append(weakref.ref(self))

    monkeypatch.setattr("cbatch.engine.model_runner.KVCache", Watched)
    with no_collector():
        engine = make(kv_cache_memory="20%")
        assert [pool() is None for pool in pools] == [True, False]
    assert len(engine.runner.kv_cache.keys[0]) == engine.limits.num_blocks
    assert engine.scheduler.pool.num_used == 0 and engine.scheduler.pool.get_cached_blocks([0] * 40) == []
    assert engine.scheduler.num_prompt_tokens == 0 and not engine.has_work
    prompts, params = make_prompts([30, 5, 17]), SamplingParams(max_tokens=12, temperature=1.0, logprobs=2)
    expected = generate(make_engine(make_network("llama")), prompts, params)
    assert [one.token_ids for one in generate(engine, prompts, params)] == [one.token_ids for one in expected]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_a_cache_that_cannot_be_allocated_is_a_clear_error(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Guards the moment between measuring and allocating: the message has figures, and no memory is held."""
    halves: list[weakref.ref[torch.Tensor]] = []

    class Full(KVCache):
        def __init__(self, shapes: Any, num_blocks: int, *others: Any) -> None:
            super().__init__(shapes, num_blocks, *others)
            if num_blocks > 1:
                halves.append(weakref.ref(self.keys[0]))
                raise error

    monkeypatch.setattr("cbatch.engine.model_runner.KVCache", Full)
    with pytest.raises(
        ConfigError, match=r"A KV cache of 360.0 KiB could not be made on gpu:7, where 10.0 GiB are"
    ) as e:
        make()
    error.__traceback__ = None  # this test's own name for it
    assert e.value.__context__ is None and halves[0]() is None


def test_an_engine_that_was_refused_holds_no_memory(gpu: Gpu) -> None:
    """Guards a second attempt with other options in the same process: the weights of the first are freed."""
    gpu.total = STEP
    with no_collector():
        network = make_network("llama")
        held = weakref.ref(network)
        with suppress(ConfigError):
            SteppingEngine(EngineConfig(device="cpu", max_seqs=6, max_batch_tokens=64), loaded(network))
            raise AssertionError("it was not refused")
        del network
        assert held() is None


@pytest.mark.parametrize("settings", [{"max_seqs": -1}, {"max_batch_tokens": -1}, {"kv_blocks": 0}])
def test_numbers_below_one_are_refused(settings: dict[str, int]) -> None:
    """Guards Python callers, whose numbers no option parser has checked, against errors inside torch."""
    with pytest.raises(ConfigError, match=r"of at least 1"):
        make_engine(make_network("llama"), **settings)


def host(memory: str = "25%", num_blocks: int | None = None) -> int:
    cache_size, device = CacheSizeRequest(memory, num_blocks, MIB, 50), DeviceMemory("cpu", "25%", lambda: 10 * GIB)
    return choose_cache_size(cache_size, by_torch(tiny()), 4, StepLimits(2, 64), device)[0].num_blocks


def test_the_size_of_a_cache_in_memory() -> None:
    """Guards a laptop: never more than the full context of every slot needs, than there is, or less than a block."""
    assert host("10MiB") == 10 and host("1GiB") == 50 and host() == 50 and host(num_blocks=7) == 7
    for memory, blocks in (("1KiB", None), ("100000GiB", None), ("25%", 10**12)):
        with pytest.raises(ConfigError, match=r"does not hold one block|are free"):
            host(memory, blocks)


def test_no_step_is_profiled_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the time to the first token there."""
    monkeypatch.setattr(sizing, "MemoryProfiler", None)
    assert make_engine(make_network("llama"), kv_blocks=None).scheduler.pool.num_blocks == 8 * 40


@pytest.mark.parametrize(
    ("memory_gib", "weights_gib", "expected"),
    [(24, 1, (256, 2048)), (48, 1, (512, 8192)), (80, 39, (512, 8192)), (80, 65, (256, 2048))],
)
def test_large_gpus_have_large_steps(memory_gib: int, weights_gib: int, expected: tuple[int, int]) -> None:
    """Guards the defaults of a large GPU, and against steps that do not fit beside weights that fill it."""
    with FakeCuda(memory_bytes=memory_gib * 2**30):
        assert sizing.default_step_size(CUDA, weights_gib * 2**30) == expected
    assert sizing.default_step_size(torch.device("cpu"), weights_gib * 2**30) == (32, 512)
