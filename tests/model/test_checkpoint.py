"""The dtype that a model gets, the path that leaves it, and whether its weights fit."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cbatch.attention.cpu import CpuAttention
from cbatch.attention.reference import ReferenceAttention
from cbatch.attention.registry import select_attention
from cbatch.base.errors import ConfigError, ModelError
from cbatch.model import load_plan, loader
from cbatch.model.config import read_model_config
from cbatch.model.config_classes import class_of
from cbatch.model.cpu import CpuModel
from cbatch.model.device_map import DeviceMap
from cbatch.model.hf.adapter import TransformersModel
from cbatch.model.hf.memory_check import check_weights_fit
from cbatch.model.hf.self_check import _paged_logits
from cbatch.model.load_plan import DEMO_MODEL, LoadPlan, choose_dtype
from cbatch.model.loader import NoFastPath, end_ids, load_fast_model, load_model
from cbatch.model.tensor_files import Tensors
from cbatch.runtime import memory
from cbatch.runtime.kv_cache import LayerShape
from cbatch.runtime.processors import control_groups
from tests.support.gpu_machine import Gpu, Machine
from tests.support.model_checks import reference_logits
from tests.support.programs import PROMPT, error_of, logits_in_chunks, saved_model
from tests.support.tiny_models import make_network

GPU = torch.device("cuda", 0)
T4 = Gpu("Tesla T4", (7, 5), total_memory=15 * 2**30)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


@pytest.fixture
def t4(machine: Machine) -> Machine:
    machine.gpus = [T4]
    machine.install()
    load_plan._warn_once.cache_clear()
    return machine


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_gpu_without_bfloat16_gets_float16(t4: Machine, caplog: pytest.LogCaptureFixture) -> None:
    """Guards free T4s: Triton has no bfloat16 there, and float16 overflows, which nobody may learn from nan_logits."""
    assert choose_dtype("auto", "bfloat16", GPU) == torch.float16
    assert choose_dtype("auto", torch.bfloat16, GPU) == torch.float16
    assert said(caplog) == [
        "Tesla T4 (compute capability 7.5) does not compute in bfloat16, so the model runs in float16, whose numbers "
        "end at 65504; if it gives no numbers (nan_logits), use --dtype float32."
    ]
    for name, stored in (("auto", "float16"), ("auto", "float32"), ("float32", "bfloat16"), ("float16", "bfloat16")):
        expected = stored if name == "auto" else name
        assert choose_dtype(name, stored, GPU) == getattr(torch, expected)
    assert len(said(caplog)) == 1


def test_bfloat16_is_emulated_if_it_is_asked_for(t4: Machine, caplog: pytest.LogCaptureFixture) -> None:
    """Guards a model that overflows in float16: slow and right, without kernels that do not compile there."""
    assert choose_dtype("bfloat16", "bfloat16", GPU) == torch.bfloat16
    assert said(caplog) == [
        "Tesla T4 (compute capability 7.5) does not compute in bfloat16: torch emulates it, without the kernels of "
        "this program; use --dtype float16 if that is too slow."
    ]
    layers = [LayerShape(2, 64, 64)]
    assert isinstance(select_attention("auto", GPU, layers, 16, torch.bfloat16), ReferenceAttention)
    with pytest.raises(ConfigError, match=r"triton does not serve this model in torch\.bfloat16"):
        select_attention("triton", GPU, layers, 16, torch.bfloat16)


def test_emulated_logits_are_sampled_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the sampling kernel, which would be compiled for bfloat16 at the first step."""
    network = make_network("llama").to(torch.bfloat16)
    assert _paged_logits(TransformersModel(network), [[1, 2], [3]], [[(0, 2), (0, 1)]]).dtype == torch.bfloat16
    monkeypatch.setattr("cbatch.model.hf.adapter.has_bfloat16", lambda device: False)
    assert _paged_logits(TransformersModel(network), [[1, 2], [3]], [[(0, 2), (0, 1)]]).dtype == torch.float32


@pytest.mark.parametrize(("dtype", "expected"), [("auto", torch.float16), ("bfloat16", None)])
def test_the_fast_path_gets_a_dtype_that_its_kernels_have(
    dtype: str, expected: torch.dtype | None, t4: Machine, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the fused path, which would compile bfloat16 kernels for a GPU that has none."""
    made: list[torch.dtype] = []

    def make(config: Any, tensors: Any, number: torch.dtype, *rest: Any, **options: Any) -> Any:
        made.append(number)
        return object()

    read = loader.read_model_config
    monkeypatch.setattr(loader, "read_model_config", lambda path: read(path) | {"dtype": "bfloat16"})
    if expected is None:
        with pytest.raises(NoFastPath, match="does not compute in bfloat16"):
            load_fast_model(LoadPlan(str(model_folder), device=GPU, dtype=dtype))
    else:
        monkeypatch.setattr("cbatch.model.cuda.CudaModel", make)
        load_fast_model(LoadPlan(str(model_folder), device=GPU, dtype=dtype))
    assert made == ([] if expected is None else [expected])


def test_newer_gpus_and_those_of_others_keep_bfloat16(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    """Guards every other device against a dtype that is not the checkpoint's."""
    machine.gpus = [Gpu("NVIDIA A100", (8, 0))]
    machine.install()
    assert choose_dtype("auto", "bfloat16", GPU) == torch.bfloat16
    assert choose_dtype("auto", "bfloat16", torch.device("xpu", 0)) == torch.bfloat16
    machine.cuda, machine.hip, machine.gpus = None, "6.4", [Gpu("AMD Radeon", (7, 0))]
    machine.install()
    assert choose_dtype("auto", "bfloat16", GPU) == torch.bfloat16
    assert said(caplog) == []
    with pytest.raises(ConfigError, match="There is no dtype 'int4'"):
        choose_dtype("int4", None, GPU)


@pytest.mark.parametrize(("multiplies", "widens"), [(True, False), (False, True), (False, False)])
def test_bfloat16_on_a_cpu(multiplies: bool, widens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards processors without bfloat16: kernels that widen it keep half the memory, and torch gets float32."""
    monkeypatch.setattr(load_plan, "_cpu_has_bfloat16", lambda: multiplies)
    monkeypatch.setattr(load_plan, "_kernels_widen_bfloat16", lambda: widens)
    cpu, narrow = torch.device("cpu"), {False: torch.float32, True: torch.bfloat16}
    assert choose_dtype("auto", "bfloat16", cpu) == narrow[multiplies]
    assert choose_dtype("auto", "bfloat16", cpu, by_kernels=True) == narrow[multiplies or widens]
    assert choose_dtype("auto", "float16", cpu, by_kernels=True) == torch.float32


@pytest.mark.parametrize("path", ["fast", "transformers"])
def test_all_end_tokens_count(tmp_path: Path, path: str) -> None:
    """Guards chat models that run on into the user's next turn: every level and every file may name an end token."""
    saved_model("gemma4_unified").network.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())

    def ends(outer: Any, inner: Any, generation: Any) -> frozenset[int]:
        levels: list[tuple[dict[str, Any], Any]] = [(config, outer), (config["text_config"], inner)]
        for level, value in levels:
            level.pop("eos_token_id", None)
            level.update({} if value is None else {"eos_token_id": value})
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
        loaded = load_model(LoadPlan(str(tmp_path), dtype="float32", fast=path == "fast"))
        assert loaded.path == path
        return loaded.eos_ids

    assert ends([3, 4], 5, [6, 10**6]) == {3, 4, 5, 6}
    if path == "fast":
        assert ends(None, 7, None) == {7}
        assert ends(None, None, None) == {class_of("gemma4_unified_text").ends}  # type: ignore[union-attr]


def test_the_end_token_of_the_tokenizer_counts() -> None:
    """Guards models whose files name no end token but in the tokenizer's settings, and ids that cannot be tokens."""
    tokenizer = load_model(LoadPlan(str(DEMO_MODEL))).tokenizer
    assert tokenizer is not None and tokenizer.eos_id is not None
    assert end_ids(10**6, {"eos_token_id": 2}, {}, tokenizer=tokenizer, default=9) == {2, tokenizer.eos_id}
    assert end_ids(2, {"eos_token_id": [1, 2]}, tokenizer=None) == {1}
    assert end_ids(10, {}, tokenizer=None, default=9) == {9}


def test_a_head_that_differs_from_the_embedding_is_used(tmp_path: Path) -> None:
    """Guards files that hold a head although their config.json ties it to the embedding: as in transformers."""
    make_network("llama", head_dim=16).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    model = load_fast_model(LoadPlan(str(tmp_path), dtype="float32"))
    assert not model.program.is_tied
    expected = reference_logits(AutoModelForCausalLM.from_pretrained(tmp_path), [PROMPT])[0]
    assert error_of(logits_in_chunks(model, CpuAttention()), expected) < 2e-4


CPU = torch.device("cpu")


def check(folder: Path, device_map: DeviceMap | None = None, **sizes: Any) -> None:
    config = AutoConfig.from_pretrained(folder)
    for name, size in sizes.items():
        setattr(config, name, size)
    check_weights_fit(LoadPlan(str(folder), device_map=device_map), config, torch.float32)


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves 100 KiB of the host's memory."""
    monkeypatch.setattr(memory, "free_cgroup_bytes", lambda: 100 * 1024)


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"num_hidden_layers": 1000}, r"asks for 1000 layers, and the files of .* hold 21 tensors\.$"),
        ({"vocab_size": 10**6}, r"asks for weights of 366\.4 MiB, and the files of .* hold 252\.2 KiB\.$"),
        ({"hidden_size": 2**40}, r"asks for weights of [\d,.]+ TiB, and the files of .* hold 252\.2 KiB\.$"),
    ],
)
def test_weights_that_the_files_do_not_hold(model_folder: Path, sizes: dict[str, int], sentence: str) -> None:
    """Guards memory and minutes: transformers makes weights that are missing at random, then says that they are."""
    with pytest.raises(ModelError, match=sentence):
        check(model_folder, **sizes)


@pytest.mark.usefixtures("little_memory")
def test_weights_that_memory_does_not_hold(model_folder: Path) -> None:
    """Guards a machine against a model that is larger than it, on both paths: the sentence has both figures."""
    with pytest.raises(ModelError, match=r"^The weights of .* need 252\.2 KiB, and 100\.0 KiB are free on cpu"):
        check(model_folder)
    check(model_folder, DeviceMap(CPU, {}))  # spread over devices
    with pytest.raises(ModelError, match=r"^The weights need [\d.]+ MiB, and 100\.0 KiB are free on cpu"):
        CpuModel(read_model_config(DEMO_MODEL), Tensors(DEMO_MODEL), torch.float32)


def test_the_limit_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards containers: they are killed at their own limit, while the machine has memory left."""
    group, process = tmp_path / "groups" / "outer" / "inner", tmp_path / "proc" / "self"
    group.mkdir(parents=True)
    process.mkdir(parents=True)
    (process / "cgroup").write_text("1:name=systemd:/x\n0::/outer/inner\n")
    (process / "mountinfo").write_text("28 1 0:25 / /groups rw - cgroup2 cgroup2 rw\n")
    monkeypatch.setattr(memory, "control_groups", partial(control_groups, root=tmp_path))
    unlimited = memory._free_host_bytes()
    for folder, most in ((group, "max"), (group.parent, "5000")):
        (folder / "memory.max").write_text(f"{most}\n")
        (folder / "memory.current").write_text("3000\n")
        (folder / "memory.stat").write_text("anon 1500\nfile 1500\n")
    assert memory.free_cgroup_bytes() == 5000 - 3000 + 1500 == memory._free_host_bytes() < unlimited
    (group.parent / "memory.max").write_text("max")
    assert memory.free_cgroup_bytes() > 2**60
