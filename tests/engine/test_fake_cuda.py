"""The engine on a GPU that only has shapes: no step mixes devices, and none makes the host wait for the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cbatch.attention.reference import ReferenceAttention
from cbatch.base.config import EngineConfig
from cbatch.base.params import SamplingParams
from cbatch.engine import loading
from cbatch.engine.kernel_checks.all_checks import without_kernels
from cbatch.engine.model_runner import Execution
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.model.cuda import CudaModel
from cbatch.model.families import read_program
from cbatch.model.load_plan import _warn_once
from cbatch.model.loader import LoadedModel
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.transfer import HostCopy
from tests.engine.test_overlap import add_all
from tests.support.adapters import draw_adapter, save_adapter
from tests.support.device import HAS_GPU
from tests.support.fake_cuda import CUDA, DeviceFault, DeviceMix, FakeCuda, HiddenWait
from tests.support.programs import saved_model
from tests.support.samples import sampled

pytest.importorskip("triton", reason="the kernels for a GPU need Triton")

pytestmark = pytest.mark.skipif(HAS_GPU, reason="torch has a real device")


@pytest.fixture
def device() -> Iterator[FakeCuda]:
    with FakeCuda() as device:
        yield device


def make_engine(**config: Any) -> SteppingEngine:
    """The demo model on the fake device."""
    settings: dict[str, Any] = {"device": "cuda", "max_seqs": 8, "kv_blocks": 60, "max_batch_tokens": 48} | config
    return SteppingEngine(EngineConfig(**settings))


def run(engine: SteppingEngine) -> None:
    """Requests with all features, to their end. Tokens are made up, which may be an error where output has a form."""
    names = add_all(engine)
    rarer: list[dict[str, Any]] = [
        {"logit_bias": ((3, 1.0), (4, -100.0)), "n": 2, "temperature": 1.0},
        {"prompt_logprobs": 3, "logprobs": 2, "repetition_penalty": 1.2, "top_k": 5, "min_p": 0.1, "temperature": 0.5},
    ]
    for asked in rarer:
        engine.add([7, 8, 9, 10], SamplingParams(max_tokens=6).merged(asked))
    while engine.has_work:
        for event in engine.step():
            assert event.error is None or "form" in names.get(event.request_id or 0, "")


@pytest.mark.parametrize(
    "config",
    [{"kv_dtype": "fp8"}, {"dtype": "float32", "run_ahead": False, "cuda_graphs": False, "kv_blocks": 12}],
    ids=str,
)
def test_no_step_waits_for_the_device(config: dict[str, Any], device: FakeCuda) -> None:
    """Guards every feature against hidden waits and against tensors on the wrong device."""
    engine = make_engine(**config)
    with device.no_waits():
        run(engine)
    assert engine.attention == "triton" and engine.stats().num_steps > 20
    assert {"_decode_kernel", "_prefill_kernel", "_scan_kernel", "_norm_kernel"} <= device.launches.keys()
    assert (engine.stats().num_preemptions > 0) == ("kv_blocks" in config)


def test_adapters_do_not_wait_for_the_device(device: FakeCuda, tmp_path: Path) -> None:
    """Guards steps with several adapters, which left the graphs and waited for a copy of the rows of each."""
    saved = saved_model("llama")
    folders = {
        name: str(save_adapter(tmp_path / name, draw_adapter(saved.network, seed=seed)))
        for seed, name in enumerate(("one", "other"))
    }
    model = CudaModel(saved.config, saved.tensors, torch.float16, CUDA)
    loaded = LoadedModel("llama", lambda: None, None, SamplingParams(), frozenset(), fast_model=model)
    engine = SteppingEngine(EngineConfig(device="cuda", max_seqs=8, kv_blocks=60, lora=folders), loaded)
    asked: list[dict[str, Any]] = [{}, {"lora": "one"}, {"lora": "other"}]
    captured = Counter(device.launches)
    assert captured["_shrink_kernel"] == captured["_expand_kernel"] > 0
    with device.no_waits():
        for number in range(6):
            engine.add([1 + number] * 20, SamplingParams(max_tokens=8, ignore_eos=True, **asked[number % 3]))
        while engine.has_work:
            engine.step()
    assert engine.attention == "triton" and engine.stats().num_steps >= 8
    assert device.launches["_shrink_kernel"] == captured["_shrink_kernel"], "a step with adapters was not replayed"


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_thread_is_warmed_up_by_products(dtype: str, device: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the first request: what cuBLAS keeps for a thread is made by both kinds of products of a step."""
    engine, dispatch = make_engine(dtype=dtype), device.dispatch
    products = list[str]()

    def note(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func._overloadpacket.__name__ in ("linear", "mm"):
            products.append(f"{func} in {args[0].dtype}")
        return dispatch(func, args, kwargs)

    monkeypatch.setattr(device, "dispatch", note)
    with device.no_waits():
        engine.runner.warm_up_thread()
    expected = ["aten.linear.default in torch.float16", "aten.mm.dtype in torch.float16"]
    assert products == (expected if dtype == "float16" else ["aten.linear.default in torch.float32"])


def test_an_old_gpu_computes_in_float16(caplog: pytest.LogCaptureFixture) -> None:
    """Guards a T4, whose kernels have no bfloat16, in all that a bfloat16 model launches; and that it is said."""
    _warn_once.cache_clear()
    with FakeCuda(capability=(7, 5)) as device:
        engine = make_engine(kv_blocks=30)
        assert engine.model.dtype == torch.float16 and isinstance(engine.model, CudaModel)
        assert engine.runner.kv_cache.keys[0].dtype == torch.float16
        run(engine)
    assert device.launches and "runs in float16" in caplog.text


def layers_by_torch(chosen: Execution) -> Execution:
    return replace(chosen, model=without_kernels(chosen.model, heads_first=True), graphs=False)


def all_by_torch(chosen: Execution) -> Execution:
    chosen.sampler.disable_kernel()
    return replace(chosen, model=without_kernels(chosen.model), attention=ReferenceAttention(), graphs=False)


@pytest.mark.parametrize("step_down", sampled([layers_by_torch, all_by_torch], 1, keep=[layers_by_torch]))
def test_no_rung_waits_for_the_device(
    step_down: Callable[[Execution], Execution], device: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards what an engine steps down to: without kernels it is slower, and waits and mixes devices no more."""
    choose = loading.choose_execution
    monkeypatch.setattr(loading, "choose_execution", lambda *asked: step_down(choose(*asked)))
    engine = make_engine()
    with device.no_waits():
        run(engine)
    assert ("_decode_kernel" in device.launches) == bool(device.launches) == (step_down is layers_by_torch)
    assert "_norm_kernel" not in device.launches


def leave_on_the_host(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RaggedBatch, "logit_rows", property(lambda batch: torch.from_numpy(batch.rows)))


def copy_back_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostCopy, "__init__", lambda self, *tensors: setattr(self, "_tensors", [t.cpu() for t in tensors]))


@pytest.mark.parametrize(
    ("plant", "fault"),
    [(copy_back_at_once, HiddenWait), (leave_on_the_host, DeviceMix)],
)
def test_planted_faults_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], fault: type[DeviceFault], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the tests of this file against a device that notices nothing in an engine's steps."""
    with pytest.raises(fault), FakeCuda() as device:
        engine = make_engine(cuda_graphs=False)
        with device.no_waits(), monkeypatch.context() as patch:
            plant(patch)
            run(engine)


def test_a_fault_that_is_caught_is_raised_in_the_end() -> None:
    """Guards against faults that the engine takes for a device that fails, and steps around."""
    with pytest.raises(HiddenWait), FakeCuda() as device, device.no_waits(), suppress(AssertionError):
        torch.zeros(1, device=CUDA).item()


LLAMA_8B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": False,
}


def test_steps_fit_beside_the_cache() -> None:
    """Guards the size of the cache: on a device that it fills, the largest steps do not run out of memory.

    With the bytes of an 8B model, all of whose operations only have shapes.
    """
    with FakeCuda(memory_bytes=24 * 2**30) as device:
        shapes = read_program(LLAMA_8B).shapes
        weights = {name: torch.zeros(()).expand(shape) for name, shape in shapes.items()}
        model = CudaModel(LLAMA_8B, weights, torch.bfloat16, CUDA)
        loaded = LoadedModel("8B", lambda: None, None, SamplingParams(), frozenset(), fast_model=model)
        engine = SteppingEngine(EngineConfig(device="cuda", max_seqs=64), loaded)
        cache = engine.limits.num_blocks * engine.limits.block_size * engine.limits.kv_bytes_per_token
        assert 0.5 * (24 * 2**30 - model.weight_bytes) < cache
        params = SamplingParams(max_tokens=3, temperature=1.0, top_p=0.9, presence_penalty=1.0, logprobs=5)
        for number in range(64):
            engine.add([number + 1] * 700, params)
        device.peak = 0
        with device.no_waits():
            while engine.has_work:
                engine.step()
        assert engine.stats().num_preemptions == 0 and cache < device.peak < device.memory_bytes
