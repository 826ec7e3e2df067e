"""Engines of several processes: the text of one process, the death of one of them, and graphs that all have alike."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from cbatch.attention.reference import ReferenceAttention
from cbatch.base.config import EngineConfig
from cbatch.base.errors import ConfigError, EngineError
from cbatch.base.params import SamplingParams
from cbatch.engine import loading
from cbatch.engine.cuda_graphs import GraphSizes, Run, StepGraphs, StepParts
from cbatch.engine.loading import choose_devices
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.model.load_plan import LoadPlan
from cbatch.model.ops.device_kernel import by_torch
from cbatch.model.ops.shards import Part
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.process_group import ProcessGroup
from cbatch.sample.sampler import Sampler
from tests.support.command import Command
from tests.support.cuda_model import batch_of
from tests.support.faults import wait_until
from tests.support.generation import generate
from tests.support.model_folder import save_model
from tests.support.process_groups import together
from tests.support.programs import saved_model
from tests.support.tiny_models import make_prompts

pytest.importorskip("triton", reason="a model for a GPU is imported with its kernels")

from cbatch.model.cuda import CudaModel

COMMON: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_blocks": 120, "max_seqs": 6}
CPU = torch.device("cpu")


def outputs_of(engine: SteppingEngine) -> list[list[int]]:
    """Plain and sampled requests, constrained ones, several outputs, and a prompt whose beginning is in the cache."""
    prompts = ["Tell me of the sea and the ships", "Tell me of the sea and the wind", "1 2 3 4", "Hello"]
    settings = [
        SamplingParams(max_tokens=12), SamplingParams(max_tokens=9, temperature=0.9, seed=3, n=2),
        SamplingParams(max_tokens=30, regex='[a-f]{4}-[0-9]+;'), SamplingParams(max_tokens=8, presence_penalty=1.0),
    ]  # fmt: skip
    found = []
    for _ in range(2):
        for prompt, params in zip(prompts, settings, strict=True):
            found += [list(output.token_ids) for output in generate(engine, [prompt], params)]
    return found


@pytest.mark.parametrize(("kind", "size"), [("llama", 4), ("qwen3_5_text", 2)])
def test_processes_give_the_text_of_one(kind: str, size: int, tmp_path: Path) -> None:
    """Guards every part of a step that others must know: slots, tables, states, drafts, and ids that were sampled."""
    model = str(save_model(tmp_path / kind, kind=kind))
    config = {**COMMON, "model": model, "block_size": 16, "max_batch_tokens": 40}
    with SteppingEngine(EngineConfig(**config)) as engine:
        expected = outputs_of(engine)
    with SteppingEngine(EngineConfig(**config, tensor_parallel=size, speculate=3)) as engine:
        assert outputs_of(engine) == expected
        assert engine.stats().num_cached_tokens
        followers = children()
        assert len(followers) == size - 1
    assert not any(process.is_running() for process in followers)


def children() -> list[psutil.Process]:
    return [one for one in psutil.Process().children() if "engine.follower" in " ".join(one.cmdline())]


def test_a_process_that_dies_ends_the_engine() -> None:
    """Guards an engine that waits for ever for a process that is gone; all of them are gone then."""
    config = EngineConfig(**COMMON, tensor_parallel=3)
    with SteppingEngine(config) as engine:
        generate(engine, ["Hello"], SamplingParams(max_tokens=2))
        first, second = children()
        second.kill()
        with pytest.raises(EngineError, match=r"process [23] died: killed by signal 9"):
            generate(engine, ["Hello"], SamplingParams(max_tokens=20))
        wait_until(lambda: not (first.is_running() or second.is_running()))
        with pytest.raises(EngineError, match=r"process [23] died"):
            generate(engine, ["Hello"], SamplingParams(max_tokens=2))


@pytest.mark.slow
def test_a_run_whose_process_dies_is_resumed(tmp_path: Path) -> None:
    """Guards rows of a run that a process has left unfinished: `--resume` gives the same bytes."""
    command = Command(tmp_path, save_model(tmp_path / "model"), [{"id": i, "prompt": f"row {i}"} for i in range(120)])
    command.options += ("--device", "cpu", "--max-tokens", 30, "--kv-blocks", 200, "--quiet")
    assert command() == 0
    expected = command.out.read_bytes()
    command.out.unlink()

    def kill() -> None:
        wait_until(lambda: command.out.exists() and command.out.stat().st_size > 0)
        for process in children():
            process.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    assert command("--tensor-parallel", 2) == 3
    killer.join()
    assert command.out.read_bytes() != expected
    assert command("--tensor-parallel", 2, "--resume") == 0
    assert command.out.read_bytes() == expected


def test_what_cannot_be_split_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards errors that say what to change, before any process is started or after one could not load its part."""
    with pytest.raises(ConfigError, match="gives each device whole layers"):
        EngineConfig(device_map="auto", tensor_parallel=2)
    with pytest.raises(ConfigError, match="tensor_parallel must be auto or a whole number"):
        EngineConfig(tensor_parallel=0)
    with pytest.raises(ConfigError, match="fast path"):
        SteppingEngine(EngineConfig(**COMMON, tensor_parallel=2, attention="reference"))
    with pytest.raises(ConfigError, match="use --attention auto"):
        SteppingEngine(EngineConfig(**COMMON, tensor_parallel=2, attention="cpu"))
    assert not children()


@pytest.mark.parametrize(
    ("gpus", "size", "wanted", "expected"),
    [(4, 70, "auto", 1), (4, 100, "auto", 2), (4, 300, "auto", 4), (4, 400, "auto", 1), (3, 200, "auto", 3),
     (4, 10, 3, 3), (1, 300, "auto", 1), (4, 300, 1, 1)],
)  # fmt: skip
def test_as_few_gpus_as_hold_the_model(
    gpus: int, size: int, wanted: Any, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards `auto`: one GPU if it holds the weights, as few as hold them else, and one if not even all do.

    A context takes memory of each GPU that is tried: if the first one suffices, no other is.
    """
    devices = [torch.device("cuda", number) for number in range(gpus)]
    memory = type("Memory", (), {"free": lambda self: 100})()
    tried: list[torch.device] = []

    def usable_gpus(name: str, device: torch.device) -> list[torch.device]:
        tried.extend(devices[1:])
        return devices

    monkeypatch.setattr(loading, "usable_gpus", usable_gpus)
    monkeypatch.setattr(loading, "device_memory", lambda device: memory)
    monkeypatch.setattr(loading, "weight_bytes", lambda plan: size)
    found = choose_devices(EngineConfig(tensor_parallel=wanted), LoadPlan(device=devices[0]))
    assert found == devices[:expected]
    assert not tried or size > 80 or wanted != "auto"


def test_more_gpus_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a number of processes that would share GPUs."""
    device = torch.device("cuda", 0)
    monkeypatch.setattr(loading, "usable_gpus", lambda name, first: [device])
    with pytest.raises(ConfigError, match="needs so many GPUs"):
        choose_devices(EngineConfig(tensor_parallel=2), LoadPlan(device=device))


def graphs_of(group: ProcessGroup, capture: Any) -> tuple[StepGraphs, CudaModel, KVCache]:
    saved = saved_model("llama")
    part = Part(group.rank, group.size)
    model = CudaModel(saved.config, saved.tensors, torch.float32, CPU, by_torch(), part=part).in_group(group)
    attention: Any = ReferenceAttention()
    shapes = [attention.block_shapes(layer, 16, torch.float32) for layer in model.layers]
    kv_cache = KVCache(shapes, 8, 16, torch.float32, CPU)
    parts = StepParts(model, attention, kv_cache, Sampler(CPU, kernel=False))
    has_room = lambda: group.smallest(1) == [1]  # noqa: E731
    graphs = StepGraphs(parts, GraphSizes([1, 2], [8], 4), capture, has_room=has_room)
    graphs.agree(group)
    return graphs, model, kv_cache


@pytest.mark.parametrize("last", [0, 1, 2, None])
def test_all_processes_have_the_same_graphs(last: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards sums of steps with another padding in each process, after one of them could not capture a size.

    last: how many sizes one of them captures; None for all
    """

    class FakeBuffers:
        def __init__(self, size: int) -> None:
            self.input_ids, self.position_ids = torch.zeros(size, dtype=torch.int64), torch.arange(size)
            self.slots, self.logit_rows = torch.full((size,), -1), torch.arange(size)
            self.metadata = None

    monkeypatch.setattr(
        ReferenceAttention, "graph_buffers", lambda self, size, *_, **__: FakeBuffers(size), raising=False
    )
    monkeypatch.setattr(ReferenceAttention, "attend", lambda self, query, *_, **__: query)

    def run(group: ProcessGroup) -> int:
        captured = 0

        def capture(run: Run) -> Run:
            nonlocal captured
            if group.rank == 1 and captured == last:
                raise RuntimeError("not while a stream is captured")
            captured += 1
            return run

        return len(graphs_of(group, capture)[0])

    assert together(2, run) == [3 if last is None else 0] * 2


def test_tokens_that_only_the_first_process_knows() -> None:
    """Guards overlapped steps: ids that were sampled on the first device reach the others before they are embedded."""
    prompts = make_prompts([5, 3])

    def run(group: ProcessGroup) -> Tensor:
        saved, part = saved_model("llama"), Part(group.rank, group.size)
        model = CudaModel(saved.config, saved.tensors, torch.float32, CPU, by_torch(), part=part).in_group(group)
        attention = ReferenceAttention()
        shapes = [attention.block_shapes(layer, 16, torch.float32) for layer in model.layers]
        kv_cache = KVCache(shapes, 8, 16, torch.float32, CPU)
        batch = batch_of(prompts)
        if group.rank:
            batch.ids[:] = 0
        return model.forward(batch, kv_cache, attention).values

    first, second = together(2, run)
    assert torch.equal(first, second)
