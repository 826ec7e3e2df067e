"""Decode steps as CUDA graphs. Without a GPU, a replay calls the function again on the same tensors."""

from __future__ import annotations

import weakref
from dataclasses import replace
from queue import SimpleQueue

import pytest
import torch
from torch import Tensor

from cbatch.engine.base.outputs import TokenEvent
from cbatch.engine.base.params import SamplingParams
from cbatch.engine.engine_thread import EngineThread
from cbatch.engine.execution.cuda_graphs import DecodeGraphs, GraphRecorder, Run, graph_size_for
from cbatch.engine.requests.request import EncodedRequest, RequestHandle
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
    network_of,
    run,
)
from tests.support.tiny_models import make_prompts, no_collector

pytest.importorskip("triton", reason="the kernels for a GPU need Triton")

from cbatch.engine.attention.triton import TritonAttention

pytestmark = [pytest.mark.slow, pytest.mark.kernels]


class Repeater:
    """Does what a graph does: runs the same again and returns the same tensor."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0
        self.error: Exception | None = None

    def __call__(self, run: Run) -> Run:
        if self.error is not None:
            raise self.error
        self.recorded += 1
        out = run()

        def replay() -> Tensor:
            self.replayed += 1
            return out.copy_(run())

        return replay


def recorder() -> GraphRecorder | Repeater:
    return GraphRecorder(DEVICE) if DEVICE.type == "cuda" else Repeater()


def test_sizes() -> None:
    """Guards the sizes of graphs: none is too small, there are few, and padding is small."""
    sizes = {rows: graph_size_for(rows) for rows in range(1, 513)}
    assert all(rows <= size <= max(rows + 31, 4) for rows, size in sizes.items())
    assert len(set(sizes.values())) < 40 and sizes[1] == 1 and sizes[256] == 256


@pytest.mark.parametrize("name", ["qwen3, norms", "mistral, window"])
def test_equals_generate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the engine with graphs and overlap: requests come and go, batches are padded, tokens stay the same."""
    model = model_of(network_of(name))
    engine = engine_around(monkeypatch, model, max_batch_tokens=8, run_ahead=True)
    record = recorder()
    engine.runner._graphs = DecodeGraphs(model, engine.runner.attention, engine.runner.kv_cache, 4, record)
    assert run(engine) == expected_of(name)
    assert run(engine) == expected_of(name)
    if isinstance(record, Repeater):
        assert record.recorded >= 2 and record.replayed > record.recorded


def test_other_steps_run_without_graphs() -> None:
    """Guards the choice: prompts, too many rows, and rows that do not fit in the buffers run without graphs."""
    model, prompts = model_of(network_of("llama")), make_prompts([9, 9])
    kv_cache = kv_cache_of(model)
    graphs = DecodeGraphs(model, TritonAttention(DEVICE), kv_cache, 2, recorder())
    with torch.inference_mode():
        assert graphs.forward(batch_of(prompts)) is None
        assert graphs.forward(batch_of(make_prompts([1, 1, 1]))) is None
        step = batch_of(prompts, start=8)
        assert graphs.forward(replace(step, rows=step.rows[:1])) is None
        assert graphs.forward(replace(step, stops=[9, 100_000])) is None
        for _ in range(3):  # run, recorded, replayed
            logits_of(model, batch_of([prompt[:8] for prompt in prompts]), kv_cache)
            found = graphs.forward(step)
            assert found is not None
            torch.testing.assert_close(found, logits_of(model, step, kv_cache))


def test_a_step_that_cannot_be_captured_runs(caplog: pytest.LogCaptureFixture) -> None:
    """Guards devices and libraries that cannot be captured: all steps run without graphs."""
    model, prompts = model_of(network_of("llama")), make_prompts([9, 9])
    kv_cache, record = kv_cache_of(model), Repeater()
    graphs = DecodeGraphs(model, TritonAttention(DEVICE), kv_cache, 2, record)
    alone, both = batch_of(prompts[:1], start=8), batch_of(prompts, start=8)
    with torch.inference_mode():
        logits_of(model, batch_of([prompt[:8] for prompt in prompts]), kv_cache)
        assert all(graphs.forward(step) is not None for step in (alone, alone, both))
        record.error = RuntimeError("not while recording")
        assert graphs.forward(both) is None and "not while recording" in caplog.text
        assert graphs.forward(alone) is None and len(caplog.records) == 1


def test_a_step_runs_if_its_capture_runs_out_of_memory(caplog: pytest.LogCaptureFixture) -> None:
    """Guards a full device: the step is not made smaller, and existing and smaller graphs stay in use.

    A recording that fails is not tried again: each attempt would cost memory for good.
    """
    model, prompts = model_of(network_of("llama")), make_prompts([9, 9, 9, 9])
    kv_cache, record, held = kv_cache_of(model), Repeater(), weakref.WeakSet[Tensor]()
    graphs = DecodeGraphs(model, TritonAttention(DEVICE), kv_cache, 4, record)
    steps = {rows: batch_of(prompts[:rows], start=8) for rows in (1, 2, 4)}

    def full(run: Run) -> Run:
        activations = torch.zeros(3)
        held.add(activations)
        try:
            raise torch.OutOfMemoryError("full")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    with torch.inference_mode():
        logits_of(model, batch_of([prompt[:8] for prompt in prompts]), kv_cache)
        expected = {rows: graphs.forward(steps[rows]).clone() for rows in (1, 2, 4)}  # type: ignore[union-attr]
        graphs.forward(steps[4])
        graphs._record = full
        with no_collector():
            assert graphs.forward(steps[2]) is None and not held, "what failed still holds memory"
        graphs._record = record
        assert graphs.forward(steps[2]) is None and "out of memory" in caplog.text
        for rows in (4, 1, 1):
            found = graphs.forward(steps[rows])
            assert found is not None
            torch.testing.assert_close(found, expected[rows])
    assert record.recorded == 2 and sorted(graphs._recordings) == [1, 4] and len(caplog.records) == 1


def test_a_failed_capture_does_not_shrink_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the size of steps: a graph that does not fit in memory does not mean that the step does not."""
    model, record = model_of(network_of("qwen3, norms")), Repeater()
    record.error = torch.OutOfMemoryError("CUDA out of memory")
    with engine_around(monkeypatch, model) as engine:
        engine.runner._graphs = DecodeGraphs(model, engine.runner.attention, engine.runner.kv_cache, 4, record)
        engine_thread, events = EngineThread(engine), [SimpleQueue[TokenEvent]() for _ in LENGTHS]
        for prompt, length, sink in zip(make_prompts(LENGTHS), OUTPUTS, events, strict=True):
            request = EncodedRequest(prompt_ids=prompt, params=SamplingParams(max_tokens=length))
            engine_thread.submit(RequestHandle(request, sink.put))
        found = [[sink.get(timeout=60).token_id for _ in range(n)] for n, sink in zip(OUTPUTS, events, strict=True)]
        engine_thread.close()
    assert found == expected_of("qwen3, norms") and engine_thread.num_retries == engine_thread.num_shrinks == 0


def test_the_first_run_has_to_succeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards captures against kernels that are not compiled yet because the first run failed."""
    model, record = model_of(network_of("llama")), Repeater()
    graphs = DecodeGraphs(model, TritonAttention(DEVICE), kv_cache_of(model), 2, record)
    step = batch_of(make_prompts([1]))
    forward = model.run_layers
    with torch.inference_mode():
        monkeypatch.setattr(model, "run_layers", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
        with pytest.raises(torch.OutOfMemoryError):
            graphs.forward(step)
        monkeypatch.setattr(model, "run_layers", forward)
        graphs.forward(step)
        assert record.recorded == 0
        graphs.forward(step)
        assert record.recorded == 1


def test_the_cache_goes_with_its_graphs() -> None:
    """Guards a device's memory: the cache is freed without waiting for the garbage collector."""
    model = model_of(network_of("llama"))
    kv_cache = kv_cache_of(model)
    graphs, alive = DecodeGraphs(model, TritonAttention(DEVICE), kv_cache, 2, Repeater()), weakref.ref(kv_cache)
    with torch.inference_mode():
        for _ in range(2):
            graphs.forward(batch_of(make_prompts([1])))
    with no_collector():
        del graphs, kv_cache
        assert alive() is None


def test_each_recorder_has_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards two engines in one process: graphs that one frees clear their stream's workspaces."""
    made: list[object] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.append(object()) or made[-1])
    recorders = [GraphRecorder(torch.device("cuda:0")) for _ in range(2)]
    assert len(made) == 2 and [one._stream for one in recorders] == made
