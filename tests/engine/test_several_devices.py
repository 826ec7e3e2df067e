"""A model whose layers are on two devices: the CPU, and a GPU that is as late as it may be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cbatch.attention import registry
from cbatch.attention.reference import ReferenceAttention
from cbatch.attention.registry import PerDeviceAttention
from cbatch.base.config import EngineConfig
from cbatch.base.params import SamplingParams
from cbatch.engine import fallback, kv_cache_sizing
from cbatch.engine.kv_cache_sizing import make_runner, measure_cache
from cbatch.engine.model_runner import Execution
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.model.hf.placement import placement_of
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.kv_cache import KVCache, LayerShape
from cbatch.runtime.memory import DeviceMemory
from cbatch.schedule.limits import StepLimits
from tests.support.device import HAS_GPU
from tests.support.fake_cuda import CUDA, DeferredDevice
from tests.support.generation import generate
from tests.support.tiny_models import loaded, make_engine, make_network, make_prompts

accelerate = pytest.importorskip("accelerate", reason="models are spread by accelerate")

pytestmark = pytest.mark.skipif(HAS_GPU, reason="torch has a real device")

CPU, GPU = "cpu", str(CUDA)
PROMPTS = make_prompts([5, 20, 9])
ASKED = [SamplingParams(max_tokens=3), SamplingParams(max_tokens=4, temperature=0.9, seed=3)] * 2
# Layers change devices twice, and the last one is not where the tokens go in.
PLACES = {
    "model.embed_tokens": GPU,
    "model.rotary_emb": GPU,
    "model.layers.0": GPU,
    "model.layers.1": CPU,
    "model.layers.2": GPU,
    "model.norm": CPU,
    "lm_head": CPU,
}


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr("accelerate.hooks.set_module_tensor_to_device", _move)
    monkeypatch.setattr(fallback, "is_accelerator", lambda _: False)
    memory = DeviceMemory("a device", "90%", lambda: 2**30)
    monkeypatch.setattr(kv_cache_sizing, "device_memory", lambda _: memory)
    return monkeypatch


def _move(module: Any, name: str, device: Any, value: Any = None, **_: Any) -> None:
    """Moves a weight like accelerate, without making a Parameter of it, which no tensor of the test's device is."""
    parent, _dot, name = name.rpartition(".")
    module = module.get_submodule(parent)
    tensors = module._parameters if name in module._parameters else module._buffers
    old = tensors[name]
    if str(device) == "meta":
        tensors[name] = torch.empty(old.shape, dtype=old.dtype, device="meta")
    else:
        tensors[name] = (old if value is None else value).detach().to(device)


@cache
def expected() -> list[Sequence[int]]:
    return _tokens(make_engine(_network()))


def _tokens(engine: SteppingEngine) -> list[Sequence[int]]:
    return [completion.token_ids for completion in generate(engine, PROMPTS, ASKED[:3])]


def _network() -> Any:
    return make_network("mistral", num_hidden_layers=3)


def _engine(network: Any) -> SteppingEngine:
    settings: dict[str, Any] = {"max_seqs": 4, "block_size": 4, "kv_blocks": 40, "max_batch_tokens": 16}
    return SteppingEngine(EngineConfig(device="cuda", attention="reference", **settings), loaded(network))


def test_tokens_are_those_of_one_device(patch: pytest.MonkeyPatch) -> None:
    """Guards all that must arrive where a layer is: hidden states, positions, rows of logits, tables, the cache.

    The GPU refuses tensors of another device, and what is read too early is not a number there. The CPU stands for a
    second GPU: accelerate itself lets it compute only where there is no GPU.
    """
    want = expected()
    with DeferredDevice():
        network = _network()
        accelerate.hooks.attach_align_device_hook_on_blocks(
            network, execution_device=PLACES | {"": GPU}, offload=dict.fromkeys(PLACES, False)
        )
        engine = _engine(network)
        devices = [CUDA, torch.device(CPU), CUDA]
        assert engine.model.layer_devices == devices and engine.device == CUDA
        assert [keys.device for keys in engine.runner.kv_cache.keys] == devices
        assert _tokens(engine) == want


def test_layers_in_memory_compute_on_the_gpu(patch: pytest.MonkeyPatch) -> None:
    """Guards the usual case, one GPU that is too small: weights come from the host for the time of their layer."""
    want = expected()
    with DeferredDevice():
        network = accelerate.dispatch_model(_network(), PLACES, main_device=GPU)
        engine = _engine(network)
        assert engine.model.layer_devices == [CUDA] * 3
        gpu, memory = placement_of(network).places
        assert (gpu.layers, gpu.read_bytes, memory.layers) == ({0, 2}, 0, {1}) and memory.read_bytes > 0
        assert network.model.layers[1].mlp.up_proj.weight.is_meta
        assert _tokens(engine) == want


class _NotingBackend:
    """A backend that says which one it is."""

    gathers_kv, batch_invariant, kv_dtype, graph_buffers = False, False, None, None

    def __init__(self, device: torch.device, name: str) -> None:
        self.device, self.name = device, name
        self.calls: list[str] = []

    def prepare(self, batch: RaggedBatch, block_size: int) -> str:
        return f"prepared on {self.device}"

    def store_kv(self, keys: Any, values: Any, new_keys: Any, new_values: Any, metadata: str) -> None:
        self.calls.append(metadata)

    def attend(self, query: Any, keys: Any, values: Any, metadata: str, **options: Any) -> str:
        self.calls.append(metadata)
        return f"attended on {self.device}"


def test_each_gpu_has_a_backend_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards kernels that are launched on the current GPU whatever their tensors say. Unlike devices share a layout."""
    current: list[torch.device] = []

    @contextmanager
    def use_device(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield

    monkeypatch.setattr(registry, "use_device", use_device)
    names = {0: "triton", 1: "triton", 2: "reference"}
    monkeypatch.setattr(
        fallback, "select_attention", lambda name, device, *_: _NotingBackend(device, names[device.index])
    )
    gpus = [torch.device("cuda", number) for number in names]

    def chosen(*numbers: int) -> Any:
        devices = [gpus[number] for number in numbers]
        model: Any = SimpleNamespace(
            layer_devices=devices, layers=[LayerShape(1, 8, 8)] * len(devices), dtype=torch.float32, is_causal=True
        )
        return fallback._attention_of(EngineConfig(), model, None)

    assert isinstance(chosen(0, 0), _NotingBackend)
    assert isinstance(chosen(0, 2, 0), ReferenceAttention)
    backend = chosen(0, 1, 0)
    assert isinstance(backend, PerDeviceAttention) and backend.name == "triton"
    for gpu in gpus[:2]:
        keys: Any = SimpleNamespace(device=gpu)
        there: Any = SimpleNamespace(device=gpu)
        metadata = backend.prepare(there, 16)
        backend.store_kv(keys, keys, keys, keys, metadata)
        assert backend.attend(keys, keys, keys, metadata, scale=1.0) == f"attended on {gpu}"
    assert current == [gpus[0]] * 3 + [gpus[1]] * 3


def test_the_scarcest_device_sizes_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a cache that one device cannot hold: each block takes room on every device that has layers."""
    host, other = torch.device("cpu"), torch.device("meta")
    free = {host: 64_000, other: 8_000}
    monkeypatch.setattr(
        kv_cache_sizing, "device_memory", lambda device: DeviceMemory(str(device), "50%", lambda: free[device])
    )
    layers = [LayerShape(1, 8, 8)] * 3
    model: Any = SimpleNamespace(
        layers=layers, layer_devices=[host, other, host], dtype=torch.float32, device=host, max_model_len=10_000,
        states=[], state_devices=[],
    )  # fmt: skip
    sampler: Any = None

    def blocks(**config: Any) -> int:
        options: Any = {"block_size": 4} | config
        limits, execution = StepLimits(8, 64, graphs=False), Execution(model, ReferenceAttention(), sampler, False)
        engine_config = EngineConfig(**options)
        measured = measure_cache(engine_config, execution, limits)
        runner = make_runner(engine_config, execution, limits, measured)
        assert [keys.device for keys in runner.kv_cache.keys] == model.layer_devices
        return runner.num_blocks

    a_layer = 4 * (8 + 8) * 4
    assert blocks() == 4_000 // a_layer
    free[host] = 8_000
    assert blocks() == 4_000 // (2 * a_layer)
    assert blocks(kv_cache_memory="9000") == 9_000 // (3 * a_layer), "an amount is for all devices together"


def test_only_layers_of_one_device_lie_in_one_tensor() -> None:
    """Guards layers that would otherwise all be on the first device."""
    host, other = torch.device("cpu"), torch.device("meta")
    kv_cache = KVCache([((4, 3), (4, 5))] * 2, 2, 4, torch.float32, [host, other])
    assert kv_cache.flat is None
    assert [keys.device for keys in kv_cache.keys] == [values.device for values in kv_cache.values] == [host, other]
