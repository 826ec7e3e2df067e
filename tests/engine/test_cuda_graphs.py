"""Steps as CUDA graphs. Without a GPU, a replay runs the captured function again."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cbatch.base.outputs import TokenEvent
from cbatch.base.params import SamplingParams
from cbatch.base.request import Request
from cbatch.engine import kv_cache_sizing as sizing
from cbatch.engine.cuda_graphs import (
    GRAPH_BYTES,
    WORKSPACE_BYTES,
    GraphCapturer,
    GraphSizes,
    Run,
    StepGraphs,
    StepParts,
    graph_size_for,
    graph_tokens_for,
)
from cbatch.engine.model_runner import Execution, ModelRunner
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.engine.thread import EngineThread
from cbatch.model.cuda import CudaModel
from cbatch.model.hf.adapter import TransformersModel
from cbatch.runtime.kv_cache import KVCache
from cbatch.sample.sampler import PARAM_WORDS, Sampler
from cbatch.schedule.limits import StepLimits
from tests.support.architectures import make_architecture
from tests.support.cuda_model import (
    DEVICE,
    LENGTHS,
    OUTPUTS,
    batch_of,
    engine_around,
    expected_of,
    kv_cache_of,
    logits_of,
    model_of,
    run,
)
from tests.support.fake_cuda import CUDA, FakeCuda
from tests.support.model_checks import is_greedy_output
from tests.support.programs import saved_model
from tests.support.samples import sampled
from tests.support.tiny_models import make_engine, make_network, make_prompts, network_of, no_collector

pytest.importorskip("triton", reason="the kernels for a GPU need Triton")

from cbatch.attention.triton import TritonAttention

pytestmark = [pytest.mark.slow, pytest.mark.kernels]


RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {}, "lfm2": {}, "granitemoehybrid": {"num_local_experts": 0},
}  # fmt: skip


class Repeated:
    """Captures a step so that its replay runs it again; `test_deferred_device` has graphs that keep their numbers."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def __call__(self, run: Run) -> Run:
        self.captured += 1
        run()

        def replay() -> None:
            self.replayed += 1
            run()

        return replay


def capturer() -> GraphCapturer | Repeated:
    return GraphCapturer(DEVICE) if DEVICE.type == "cuda" else Repeated()


def parts_of(model: CudaModel, kv_cache: KVCache) -> StepParts:
    return StepParts(model, TritonAttention(DEVICE), kv_cache, Sampler(DEVICE, kernel=True))


def engine_with_graphs(
    monkeypatch: pytest.MonkeyPatch, model: CudaModel, capture: Callable[[Run], Run], **config: Any
) -> SteppingEngine:
    """An engine that captures its steps at start, also on a CPU."""

    def parts(runner: Any, sampler: Sampler, limits: StepLimits) -> StepParts:
        assert limits.graphs
        sampler = Sampler(DEVICE, kernel=True)
        return StepParts(runner.model.capturable, runner.attention, runner.kv_cache, sampler, runner.state_pool)

    monkeypatch.setattr(ModelRunner, "step_parts", parts)
    monkeypatch.setattr("cbatch.engine.cuda_graphs.GraphCapturer", lambda device: capture)
    return engine_around(monkeypatch, model, max_batch_tokens=6, **config)


def test_sizes() -> None:
    """Guards the sizes of graphs: none is too small, there are few, and padding is small."""
    sizes = {rows: graph_size_for(rows) for rows in range(1, 513)}
    assert all(rows <= size <= max(rows + 15, 4) for rows, size in sizes.items())
    assert len(set(sizes.values())) < 45 and sizes[1] == 1 and sizes[256] == 256
    tokens = {count: graph_tokens_for(count) for count in range(2, 4097)}
    assert all(count <= size <= max(count + 63, count * 9 / 8) for count, size in tokens.items())
    assert sum(tokens[count] / count - 1 for count in range(512, 4097)) / 3584 < 0.05
    sizes_of_engine = GraphSizes.of(StepLimits(256, 2048))
    assert len(sizes_of_engine.decode) == 23 and len(sizes_of_engine.mixed) == 24
    assert GraphSizes.of(StepLimits(3, 6)) == GraphSizes([1, 2, 4], [6], 3)
    assert GraphSizes.of(StepLimits(4, 1)) == GraphSizes([1], [], 4)
    assert max(GraphSizes.of(StepLimits(1, 9999)).mixed) == 2048
    largest_first = [(4, True), (1, True), (8, False), (6, False)]  # smaller steps find memory in what larger have left
    assert list(GraphSizes([1, 4], [6, 8], 4).in_order()) == largest_first


@pytest.mark.parametrize("kind", sampled(["gemma2", "cohere", "gpt2", *RECURRENT], 1, keep=["gemma2"]))
def test_other_models_equal_generate(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards captured steps of models of transformers, decoder and head by themselves, and the slots of recurrent
    layers: they are read on the device, and padding touches no state.
    """
    if kind in RECURRENT:
        network = make_architecture(kind, eos_token_id=None, **RECURRENT[kind]).to(DEVICE)
        model: Any = model_of(network)
    else:
        network = saved_model(kind).network.to(DEVICE)
        model = TransformersModel(network)
        assert model.capturable is not None
    capture = capturer()
    engine = engine_with_graphs(monkeypatch, model, capture, run_ahead=True)
    if isinstance(capture, Repeated):
        monkeypatch.setattr(type(model), "forward", None)
    for prompt, output in zip(make_prompts(LENGTHS), run(engine), strict=True):
        assert is_greedy_output(network, prompt, output)
    if isinstance(capture, Repeated):
        assert capture.replayed == engine.stats().num_steps


def test_networks_that_are_more_than_decoder_and_head_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards logits that come about in a way that is not known, and networks without a decoder."""
    network = make_network("gemma2", final_logit_softcapping=30.0)
    forward = type(network).forward

    def biased(self: Any, *arguments: Any, **keywords: Any) -> Any:
        output = forward(self, *arguments, **keywords)
        output.logits[..., 3] += 1
        return output

    assert TransformersModel(network).capturable is not None
    with monkeypatch.context() as patch:
        patch.setattr(type(network), "forward", biased)
        assert TransformersModel(network).capturable is None
    monkeypatch.setattr(type(network), "get_decoder", lambda self: self)
    assert TransformersModel(network).capturable is None


def test_steps_of_all_kinds() -> None:
    """Guards steps in any order: without outputs, with an output of each token, cut prompts beside decode rows.

    What runs before a capture is padding: it touches no cached prompt.
    """
    model, prompts = model_of(network_of("qwen2, biases")), make_prompts([4, 2, 3])
    kv_cache = kv_cache_of(model)
    graphs = StepGraphs(parts_of(model, kv_cache), GraphSizes([4], [7], 3), capturer())
    assert all(layer.isnan().all() for layer in (*kv_cache.keys, *kv_cache.values))
    whole, last = batch_of([prompt[:-1] for prompt in prompts]), batch_of(prompts, start=1)
    one = batch_of([prompt[:2] for prompt in prompts], start=1)
    for batch, rows in ((whole, []), (last, [1, 2, 5]), (one, [0, 1, 2]), (one, [0, 2]), (last, last.rows)):
        step = replace(batch, rows=np.array(rows, np.int64))
        with torch.inference_mode():
            found = graphs.forward(step)
        assert found is not None
        torch.testing.assert_close(found.values, logits_of(model, step, kv_cache))


def test_other_steps_run_without_graphs() -> None:
    """Guards the buffers: too many tokens or sequences, and sequences that are too long, run without graphs."""
    model, prompts = model_of(network_of("llama")), make_prompts([9, 9])
    graphs = StepGraphs(parts_of(model, kv_cache_of(model)), GraphSizes([2], [16], 2), lambda run: run)
    step = batch_of(prompts, start=8)
    with torch.inference_mode():
        assert graphs.forward(step) is not None and graphs.forward(batch_of(make_prompts([8, 8]))) is not None
        assert graphs.forward(batch_of(prompts)) is None
        assert graphs.forward(batch_of(make_prompts([1, 1, 1]))) is None
        assert graphs.forward(batch_of(make_prompts([2, 1, 1]))) is None
        assert graphs.forward(replace(step, stops=[9, 100_000])) is None


DRAWN: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 3},
    {"max_tokens": 5},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": 4},
    {"temperature": 1.0, "repetition_penalty": 1.4, "max_tokens": 3},
    {"temperature": 1.0, "prompt_logprobs": 1, "max_tokens": 2},
]


def draw(engine: SteppingEngine, *, shaken: bool = False) -> dict[int | None, list[int | None]]:
    """The tokens of all `DRAWN` requests. shaken: running requests are preempted repeatedly"""
    for prompt, asked in zip(make_prompts([3, 7, 1, 2, 4]), DRAWN, strict=True):
        engine.add(prompt, SamplingParams(max_tokens=11).merged(asked), seed=7)
    found: dict[int | None, list[int | None]] = {}
    while engine.has_work:
        if shaken and engine.stats().num_steps % 8 == 5:
            while engine.shrink():
                pass
            while not engine.scheduler.grow():
                pass
        for event in engine.step():
            found.setdefault(event.request_id, []).append(event.token_id)
    return found


def test_sampling_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards tokens that are sampled before the previous ones are known, through preemption, beside changed logits.

    Requests come and go, prompts are cut, and steps are padded; everything is captured at start, and replayed.
    """
    network = make_network("qwen3", tie_word_embeddings=True)
    expected = draw(make_engine(make_network("qwen3", tie_word_embeddings=True)))
    capture, sampled = capturer(), list[int]()
    engine = engine_with_graphs(monkeypatch, model_of(network), capture, run_ahead=True)
    graphs, sample = engine.runner._graphs, Sampler.sample
    assert graphs is not None and graphs._shared is not None and len(graphs) == 4
    monkeypatch.setattr(Sampler, "sample", lambda *args, **more: (sampled.append(1), sample(*args, **more))[1])
    assert draw(engine, shaken=True) == expected
    stats = engine.stats()
    assert stats.num_preemptions > 1 and len(sampled) < stats.num_steps * 2 / 3, "some steps are sampled in a graph"


def test_no_parameter_of_an_earlier_step_is_left() -> None:
    """Guards greedy rows after drawn ones in the same graph, and rows that were padding in between."""
    model, prompts = model_of(network_of("llama")), make_prompts([1, 1])
    kv_cache = kv_cache_of(model)
    parts = parts_of(model, kv_cache)
    graphs = StepGraphs(parts, GraphSizes([2], [], 2), capturer())
    drawn, greedy = np.zeros((2, PARAM_WORDS), np.int32), np.zeros((2, PARAM_WORDS), np.int32)
    drawn[:, :2], drawn[:, 4:6] = np.array([5, 1], np.float32).view(np.int32), [[1, 2], [3, 4]]
    for words in (drawn, greedy, drawn, drawn[:1], greedy):
        step = replace(batch_of(prompts[: len(words)]), sampling_params=lambda words=words: words)
        with torch.inference_mode():
            found = graphs.forward(step)
            assert found is not None and found.sampled is not None
            expected = parts.sampler.sample_on_device(found.values, torch.from_numpy(words).to(DEVICE))
        assert found.sampled.tokens.tolist() == expected.tokens.tolist()
        assert found.sampled.largest.tolist() == expected.largest.tolist()
        assert graphs._shared is not None and not graphs._shared.words[len(words) :].any(), "padding is not greedy"


def test_a_step_that_cannot_be_captured_runs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Guards devices and libraries that cannot be captured: all steps run without graphs, and a sentence says so."""
    calls = []

    def capture(run: Run) -> Run:
        calls.append(run)
        if len(calls) == 2:
            raise RuntimeError("not while capturing")
        return run

    engine = engine_with_graphs(monkeypatch, model_of(network_of("llama")), capture)
    assert engine.runner.graph_problem == caplog.messages[0] and "not while capturing" in caplog.messages[0]
    assert len(calls) == 2 and len(engine.runner._graphs or ()) == 0 and len(caplog.records) == 1
    engine.add(make_prompts(LENGTHS)[0], SamplingParams(max_tokens=2))
    found = [event.token_id for _ in range(2) for event in engine.step()]
    assert found == expected_of("llama")[0][:2]


def test_a_capture_that_runs_out_of_memory_is_the_last(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards a full device: what failed holds no memory, steps are not made smaller, graphs that exist are used.

    No other capture is tried: each that fails costs memory for good.
    """
    held, capture = weakref.WeakSet[Tensor](), Repeated()

    def full(run: Run) -> Run:
        if capture.captured < 2:
            return capture(run)
        activations = torch.zeros(3)
        held.add(activations)
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    with no_collector(), engine_with_graphs(monkeypatch, model_of(network_of("qwen3, norms")), full) as engine:
        graphs = engine.runner._graphs
        assert graphs is not None and not held, "what failed still holds memory"
        assert list(graphs._decode) == [4, 2] and not graphs._mixed and capture.captured == 2
        assert "Only 2 of 4" in caplog.text and len(caplog.records) == 1
        engine_thread, events = EngineThread(engine), SimpleQueue[TokenEvent]()
        request = Request(prompt_ids=make_prompts(LENGTHS)[0], params=SamplingParams(max_tokens=OUTPUTS[0]))
        engine_thread.submit(request, events.put)
        found = [events.get(timeout=60).token_id for _ in range(OUTPUTS[0])]
        engine_thread.close()
    assert found == expected_of("qwen3, norms")[0] and engine_thread.num_retries == engine_thread.num_shrinks == 0
    assert capture.replayed > 2, "a step of one sequence is a replay of two"


def test_graphs_take_no_more_than_their_reserve() -> None:
    """Guards the memory of steps: when what graphs may take is used up, smaller ones are given up."""
    model, room = model_of(network_of("llama")), iter([True, True, False, False])
    parts = parts_of(model, kv_cache_of(model))
    graphs, none = (
        StepGraphs(parts, sizes, lambda run: run, has_room=lambda: next(room))
        for sizes in (GraphSizes([1, 2, 4], [8], 4), GraphSizes([1], [], 1))
    )
    assert list(graphs._decode) == [4, 2] and "used up" in graphs.problem and len(none) == 0


def test_the_memory_of_graphs_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the reserve: the largest graph of each kind, made for the largest cache, and something for each graph."""
    model, attention, made = model_of(network_of("llama")), TritonAttention(DEVICE), []
    monkeypatch.setattr(ModelRunner, "step_parts", lambda runner, *_: parts_of(model, runner.kv_cache))

    def measure_peak(step: Callable[[], Any]) -> int:
        made.append(step())
        return 1000

    limits, execution = StepLimits(4, 6, graphs=True), Execution(model, attention, Sampler(DEVICE), graphs=True)
    profiler = sizing.MemoryProfiler(execution, 16, limits, cache_tokens=70)
    assert profiler._measure_graphs(measure_peak) == 2 * 1000 + WORKSPACE_BYTES + 4 * GRAPH_BYTES
    assert [(sorted(one._decode), sorted(one._mixed)) for one in made] == [([4], []), ([], [6])]
    assert not any(one.problem for one in made)
    assert made[0]._decode[4].buffers.holds(replace(batch_of(make_prompts([1])), starts=[79], stops=[80]))


def test_the_cache_goes_with_its_graphs() -> None:
    """Guards a device's memory: the cache is freed without waiting for the garbage collector."""
    model = model_of(network_of("llama"))
    kv_cache = kv_cache_of(model)
    graphs, alive = StepGraphs(parts_of(model, kv_cache), GraphSizes([1], [2], 1), Repeated()), weakref.ref(kv_cache)
    with torch.inference_mode():
        assert graphs.forward(batch_of(make_prompts([1]))) is not None
    with no_collector():
        del graphs, kv_cache
        assert alive() is None


def test_a_capture_is_not_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards captures against the garbage collector, which may free what a capture forbids, and what follows a failure.

    All captures of a capturer share a pool and a stream; another has its own, as graphs clear the workspaces of theirs.
    """
    handles = itertools.cycle(range(1000, 1032))
    seen: list[object] = []
    graph = SimpleNamespace(pool=lambda: "pool", replay=lambda: seen.append("replayed"))

    @contextmanager
    def capture(captured: object, *options: object) -> Iterator[None]:
        seen.append((captured is graph, *options, gc.isenabled()))
        yield

    for name, fake in {
        "Stream": lambda device: SimpleNamespace(device=device, cuda_stream=next(handles)),
        "CUDAGraph": lambda: graph,
        "current_stream": lambda device: "stream before",
        "graph": capture,
        "set_stream": seen.append,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    capture = GraphCapturer(torch.device("cuda:0"))

    def fail() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        capture(fail)
    for _ in range(2):
        capture(lambda: None)()
    stream = capture.stream
    first, after_failure, second, replayed, third, _ = seen
    assert first == second == (True, None, stream, "thread_local", False) and after_failure == "stream before"
    assert third == (True, "pool", stream, "thread_local", False) and replayed == "replayed" and gc.isenabled()


def test_graphs_of_living_engines_never_share_a_stream() -> None:
    """Guards graphs against others that are freed, which clear the workspaces of their stream: torch has 32 for all."""
    with FakeCuda(), no_collector():

        def capturer() -> GraphCapturer:
            return GraphCapturer(CUDA)

        replay = capturer()(lambda: None)  # its capturer is gone, and its graph is not
        others = [capturer() for _ in range(31)]
        streams = {replay.args[1].stream.cuda_stream, *(one.stream.cuda_stream for one in others)}
        assert len(streams) == 32
        with pytest.raises(RuntimeError, match="all 32 streams of cuda:0 belong to graphs of other engines"):
            capturer()
        free = others.pop(7).stream.cuda_stream
        assert capturer().stream.cuda_stream == free
