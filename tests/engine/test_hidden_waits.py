"""No step of any kind of model makes the host wait for a GPU: prompts, decoding, and admissions with a state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cbatch.base.config import EngineConfig
from cbatch.base.params import SamplingParams
from cbatch.base.quantization import Quantization
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.model.cuda import CudaModel
from cbatch.model.load_plan import LoadPlan
from cbatch.model.loader import LoadedModel, load_model
from cbatch.runtime.state_pool import StatePool
from tests.support.adapters import draw_adapter, save_adapter
from tests.support.device import HAS_GPU
from tests.support.fake_cuda import CUDA, FakeCuda, HiddenWait
from tests.support.programs import saved_model
from tests.support.quantized_folders import awq, awq_settings, fp8, fp8_settings, mxfp4, tiny_model, write_folder

pytest.importorskip("triton", reason="the kernels for a GPU need Triton")

pytestmark = pytest.mark.skipif(HAS_GPU, reason="torch has a real device")

MODELS = {
    "gated delta": "qwen3_5_text", "mamba 2": "granitemoehybrid", "short convolution": "lfm2", "experts": "qwen3_moe",
    "adapters": "llama", "FP8 cache": "llama", "int8": "llama",
}  # fmt: skip
FOLDERS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "int4": ("qwen3", awq_settings(), awq()),
    "FP8": ("qwen3", fp8_settings(), fp8()),
    "MXFP4": ("gpt_oss", {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, mxfp4),
}
KERNELS = {
    "gated delta": "_gated_delta_kernel", "mamba 2": "_selective_scan_kernel", "short convolution": "_convolve_kernel",
    "experts": "_expert_linear_kernel", "adapters": "_expand_kernel", "MXFP4": "_expert_linear_kernel",
    "int8": "_linear_kernel", "int4": "_linear_kernel", "FP8": "_linear_kernel",
}  # fmt: skip
"""One that shows that a model is of its kind."""
PROMPT = list(range(1, 41))


@pytest.fixture
def device() -> Iterator[FakeCuda]:
    with FakeCuda() as device:
        yield device


def loaded_model(kind: str, folder: Path) -> LoadedModel:
    """A model on the device that is entered."""
    if kind in FOLDERS:
        name, settings, encode = FOLDERS[kind]
        write_folder(folder, tiny_model(name), settings, encode)
        return load_model(LoadPlan(source=str(folder), device=CUDA, dtype="float16"))
    saved = saved_model(MODELS[kind])
    quantize = Quantization("int8") if kind == "int8" else None
    model = CudaModel(saved.config, saved.tensors, torch.float16, CUDA, quantize=quantize)
    return LoadedModel(kind, lambda: None, None, SamplingParams(), frozenset(), fast_model=model)


def make_engine(kind: str, folder: Path, **config: Any) -> SteppingEngine:
    if kind == "adapters":
        place = save_adapter(folder, draw_adapter(saved_model("llama").network))
        config["lora"] = {"own": str(place)}
    if kind == "FP8 cache":
        config["kv_dtype"] = "fp8"
    settings: dict[str, Any] = {"max_seqs": 4, "kv_blocks": 60, "max_batch_tokens": 24, "block_size": 16}
    return SteppingEngine(EngineConfig(device="cuda", **settings | config), loaded_model(kind, folder))


def run(engine: SteppingEngine) -> None:
    """Requests that come in pairs, alike, the second of which goes on from what the first has left."""
    for _ in range(2):
        for length in (40, 40, 7):
            lora = next(iter(engine.config.lora or {}), "")
            engine.add(PROMPT[:length], SamplingParams(max_tokens=4, ignore_eos=True, lora=lora))
        while engine.has_work:
            engine.step()


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "launches"])
@pytest.mark.parametrize("kind", [*MODELS, *FOLDERS])
def test_no_kind_of_model_waits(
    kind: str, graphs: bool, device: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards what only some models do in a step, which the demo model's steps do not show."""
    calls = Counter[str]()
    for name in ("zero", "copy"):
        right = getattr(StatePool, name)

        def counted(*arguments: Any, name: str = name, right: Any = right) -> None:
            calls[name] += 1
            right(*arguments)

        monkeypatch.setattr(StatePool, name, counted)
    engine = make_engine(kind, tmp_path / "model", cuda_graphs=graphs)
    with device.no_waits():
        run(engine)
    assert isinstance(engine.model, CudaModel) and engine.attention == "triton"
    assert device.launches[KERNELS.get(kind, "_decode_kernel")] > 0
    assert (calls["zero"] > 0 and calls["copy"] > 0) == bool(engine.model.states)


def test_a_wait_in_an_admission_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the test above against states whose slots are copied to the device by waiting for it."""
    with pytest.raises(HiddenWait), FakeCuda() as device:
        engine = make_engine("gated delta", tmp_path)
        with device.no_waits(), monkeypatch.context() as patch:
            patch.setattr(
                "cbatch.runtime.state_pool.to_device",
                lambda arrays, there: [torch.tensor(array.tolist(), device=there) for array in arrays],
            )
            run(engine)
