"""Guards recorded decode steps. Without a GPU what is recorded is called again, on the same tensors."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cbatch.engine.graphs import DecodeGraphs, Recorder, Run, size_for
from tests.gpu import DEVICE, batch_of, decoder_of, engine_around, expected_of, logits_of, network_of, pool_of, run
from tests.tiny import make_prompts

pytest.importorskip("triton", reason="the kernels for a GPU need Triton")

from cbatch.engine.attention.triton import TritonAttention


class Repeater:
    """Does what a graph does: runs the same again, and gives the same tensor."""

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


def recorder() -> Recorder | Repeater:
    return Recorder(DEVICE) if DEVICE.type == "cuda" else Repeater()


def test_sizes() -> None:
    """Guards the sizes of graphs: none too small, few of them, and little computed for nothing."""
    sizes = {rows: size_for(rows) for rows in range(1, 513)}
    assert all(rows <= size <= max(rows + 31, 4) for rows, size in sizes.items())
    assert len(set(sizes.values())) < 40 and sizes[1] == 1 and sizes[256] == 256


@pytest.mark.parametrize("name", ["qwen3, norms", "mistral, window"])
def test_equals_generate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the engine with graphs, ahead of its host: rows that leave and come, filled-up sizes, the same tokens."""
    decoder = decoder_of(network_of(name))
    engine = engine_around(monkeypatch, decoder, max_batch_tokens=8, run_ahead=True)
    record = recorder()
    engine.runner._graphs = DecodeGraphs(decoder, engine.runner.attention, engine.runner.pool, 4, record)
    assert run(engine) == expected_of(name)
    assert run(engine) == expected_of(name)
    if isinstance(record, Repeater):
        assert record.recorded >= 2 and record.replayed > record.recorded


def test_other_steps_are_left_alone() -> None:
    """Guards the choice: prompts, more rows than there are graphs for, and rows that find no room go the usual way."""
    decoder, prompts = decoder_of(network_of("llama")), make_prompts([9, 9])
    pool = pool_of(decoder)
    graphs = DecodeGraphs(decoder, TritonAttention(DEVICE), pool, 2, recorder())
    with torch.inference_mode():
        assert graphs.forward(batch_of(prompts)) is None
        assert graphs.forward(batch_of(make_prompts([1, 1, 1]))) is None
        step = batch_of(prompts, start=8)
        assert graphs.forward(replace(step, logit_rows=step.logit_rows[:1])) is None
        assert graphs.forward(replace(step, stops=[9, 100_000])) is None
        for _ in range(3):  # run, recorded, replayed
            logits_of(decoder, batch_of([prompt[:8] for prompt in prompts]), pool)
            found = graphs.forward(step)
            assert found is not None
            torch.testing.assert_close(found, logits_of(decoder, step, pool))


def test_a_step_that_cannot_be_recorded_is_computed(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against devices and libraries that do not let themselves be recorded; only full memory is tried again."""
    decoder, prompts = decoder_of(network_of("llama")), make_prompts([9])
    pool, record = pool_of(decoder), Repeater()
    graphs = DecodeGraphs(decoder, TritonAttention(DEVICE), pool, 2, record)
    step = batch_of(prompts, start=8)
    with torch.inference_mode():
        logits_of(decoder, batch_of([prompts[0][:8]]), pool)
        expected = logits_of(decoder, step, pool)
        graphs.forward(step)
        record.error = torch.OutOfMemoryError("full")
        with pytest.raises(torch.OutOfMemoryError):
            graphs.forward(step)
        record.error = RuntimeError("not while recording")
        found = graphs.forward(step)
        assert found is not None and "not while recording" in caplog.text
        torch.testing.assert_close(found, expected)
        assert graphs.forward(step) is None


def test_the_first_run_has_to_come_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards recordings from kernels that are not compiled yet, where memory was full the first time."""
    decoder, record = decoder_of(network_of("llama")), Repeater()
    graphs = DecodeGraphs(decoder, TritonAttention(DEVICE), pool_of(decoder), 2, record)
    step = batch_of(make_prompts([1]))
    compute = decoder.compute
    with torch.inference_mode():
        monkeypatch.setattr(decoder, "compute", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
        with pytest.raises(torch.OutOfMemoryError):
            graphs.forward(step)
        monkeypatch.setattr(decoder, "compute", compute)
        graphs.forward(step)
        assert record.recorded == 0
        graphs.forward(step)
        assert record.recorded == 1


def test_the_cache_goes_with_its_graphs() -> None:
    """Guards a device's memory, which the cache takes most of: nothing waits for the collector of cycles."""
    decoder = decoder_of(network_of("llama"))
    pool = pool_of(decoder)
    graphs, alive = DecodeGraphs(decoder, TritonAttention(DEVICE), pool, 2, Repeater()), weakref.ref(pool)
    with torch.inference_mode():
        for _ in range(2):
            graphs.forward(batch_of(make_prompts([1])))
    gc.disable()
    try:
        del graphs, pool
        assert alive() is None
    finally:
        gc.enable()
