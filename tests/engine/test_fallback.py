"""Fallbacks of an engine when a kernel fails its check. Without a GPU, Triton's interpreter runs the kernels."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from cbatch.attention.registry import select_attention
from cbatch.base.config import EngineConfig
from cbatch.base.errors import ConfigError, ModelError
from cbatch.base.params import SamplingParams
from cbatch.engine import fallback
from cbatch.engine.fallback import choose_execution
from cbatch.engine.kernel_checks import attention as attention_checks
from cbatch.engine.kernel_checks import kernel_check
from cbatch.engine.kernel_checks import whole_step as step_checks
from cbatch.engine.kernel_checks.all_checks import ModelChecks
from cbatch.engine.kernel_checks.kernel_check import KernelCheck
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.model.ops.device_kernel import KERNELS, by_torch
from cbatch.sample.sampler import Sampler
from tests.support.cuda_model import DEVICE, engine_around, model_of
from tests.support.generation import generate
from tests.support.kernel_faults import replace_kernel
from tests.support.tiny_models import generate_alone, make_engine, make_network, make_prompts

pytest.importorskip("triton", reason="the kernels for a GPU need Triton")

from cbatch.attention import triton as triton_attention
from cbatch.attention.triton import TritonAttention

pytestmark = pytest.mark.kernels
LENGTHS, OUTPUT = [5, 3], 3
STEPS = [(0, 3), (0, 1)], [(3, 4), (1, 3)], [(4, 5), (3, 4)], [(5, 6), (4, 5)]
RIGHT = KernelCheck("right", 0.0, 0.1)


@cache
def network() -> Any:
    return make_network("qwen3", num_hidden_layers=1, max_position_embeddings=16)


@cache
def expected() -> list[list[int]]:
    return generate_alone(network(), make_prompts(LENGTHS), [OUTPUT] * len(LENGTHS))


class OutOfResources(Exception):
    """As Triton raises it at a launch."""


def does_not_fit(*_: Any, **__: Any) -> None:
    raise OutOfResources("out of resource: shared memory, Required: 131072, Hardware limit: 101376.")


def wrong(name: str, kernel: str = "") -> KernelCheck:
    return KernelCheck(name, 0.5, 0.01, kernel=kernel)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are checked on this device, on a few tokens, and a graph is a function that is called again."""
    monkeypatch.setattr(fallback, "is_accelerator", lambda _: True)
    monkeypatch.setattr(fallback, "triton_problem", lambda _: None)
    monkeypatch.setattr(attention_checks, "CHUNKS", {"decode attention": [(0, 3), (4, 5)]})
    monkeypatch.setattr(step_checks, "steps_of", lambda _: STEPS)
    monkeypatch.setattr(attention_checks, "CAPTURED_STEPS", [[(4, 5), (0, 2)]])
    for module in (attention_checks, step_checks):
        monkeypatch.setattr(module, "GraphCapturer", lambda _: lambda run: run)


def kernel_engine(monkeypatch: pytest.MonkeyPatch, samples: bool = False, **config: Any) -> SteppingEngine:
    """samples: whether it samples by the kernel"""
    monkeypatch.setattr(fallback, "Sampler", lambda device, kernel=None: Sampler(device, kernel=samples))
    return engine_around(monkeypatch, model_of(network()), block_size=4, **config)


def check_text(engine: SteppingEngine) -> None:
    params = [SamplingParams(max_tokens=OUTPUT)] * len(LENGTHS)
    outputs = generate(engine, make_prompts(LENGTHS), params)
    assert [list(output.token_ids) for output in outputs] == expected()


def rung_of(engine: SteppingEngine) -> str:
    attention, ops = engine.attention, engine.model.ops  # type: ignore[attr-defined]
    without = "".join(f" without {name}" for name in ops.without)
    return attention + without if ops.triton else f"{attention}, torch"


def doubled(right: Any, *arguments: Any) -> None:
    """A kernel that gives twice what it should."""
    right(*arguments)
    arguments[-1].mul_(2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name", "replacement", "rung", "sentence"),
    [
        (None, "", None, "triton", ""),
        ("kernel", "activate", doubled, "triton without activate",
         "Operations of torch take the place of the kernel activate on {device}: activate differs from torch by 1; "
         "rounding explains 0.0001."),
        (triton_attention, "attend_decode", does_not_fit, "reference, torch",
         "Attention runs by operations of torch, which is slow, on {device}: decode attention (heads of 16) fails "
         "(OutOfResources: out of resource: shared memory, Required: 131072, Hardware limit: 101376)."),
    ],
)  # fmt: skip
def test_each_rung_gives_the_right_text(
    module: Any, name: str, replacement: Any, rung: str, sentence: str, checked: None, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Guards the text of an engine whose kernel is wrong or does not fit, and that it says so once."""
    if module == "kernel":
        replace_kernel(monkeypatch, name, replacement)
    elif module is not None:
        monkeypatch.setattr(module, name, replacement)
    engine = kernel_engine(monkeypatch)
    sentence = sentence.format(device=DEVICE)
    assert rung_of(engine) == rung and engine.stats().fallback == sentence
    assert [record.getMessage() for record in caplog.records if record.name == "cbatch"] == [sentence] * bool(sentence)
    check_text(engine)


def test_sampling_falls_back_alone(checked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a sampling kernel that does not fit: everything else stays."""
    monkeypatch.setattr("cbatch.kernels.triton.sampling.sample_rows", does_not_fit)
    give(monkeypatch)
    engine = kernel_engine(monkeypatch, samples=True)
    assert rung_of(engine) == "triton"
    sentence = f"Tokens are sampled by operations of torch on {DEVICE}: sampling fails (OutOfResources: "
    assert engine.stats().fallback.startswith(sentence)
    check_text(engine)


def give(monkeypatch: pytest.MonkeyPatch, **results: Any) -> None:
    """Gives the checks these results; those that are not named agree."""
    for part in ("attention_kernels", "layers", "step_by_torch", "captured_steps"):
        given = results.get(part, RIGHT if part == "step_by_torch" else [RIGHT])
        monkeypatch.setattr(ModelChecks, part, lambda _, given=given: given)


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({}, "graphs triton kernels"),
    "attention": ({"attention_kernels": [RIGHT, wrong("decode attention")]}, "reference torch: decode attention"),
    "layers": ({"layers": [wrong("embed_and_norm"), RIGHT]}, "triton torch: embed_and_norm"),
    "steps": ({"layers": [RIGHT, wrong("a")], "step_by_torch": wrong("b")}, "reference torch: b"),
    "graph": ({"captured_steps": [wrong("a captured step")]}, "triton kernels: a captured step"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["auto", "triton"])
def test_the_first_rung_that_agrees(name: str, fault: str, checked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the order of the rungs: only what fails is left out, and a named backend is never replaced."""
    results, found = FAULTS[fault]
    give(monkeypatch, **results)
    monkeypatch.setattr(fallback, "select_attention", lambda *_: TritonAttention(DEVICE))
    config, model = EngineConfig(attention=name), model_of(network())
    if name == "triton" and results:
        with pytest.raises(ConfigError, match=rf"^The attention backend triton cannot be used on {DEVICE}: "):
            choose_execution(config, model)
        return
    chosen = choose_execution(config, model)
    ops = chosen.model.ops  # type: ignore[attr-defined]
    told = [chosen.attention.name, "kernels" if ops.triton else "torch"]
    reason = chosen.fallback.partition(f"{DEVICE}: ")[2].partition(" differs")[0]
    assert " ".join(["graphs"] * chosen.graphs + told) + (f": {reason}" if reason else "") == found
    if not ops.triton:
        assert ops == by_torch(heads_first=chosen.attention.name == "triton")


@pytest.mark.parametrize(
    ("kernels", "graphs", "start"),
    [
        (["activate"], True, "Operations of torch take the place of the kernel activate on "),
        (["combine", "activate"], True, "Operations of torch take the place of the kernels activate and combine on "),
        (["route"], False, "Operations of torch take the place of the kernel route, and steps run without CUDA graphs"),
    ],
)
def test_one_kernel_is_left_out(
    kernels: list[str], graphs: bool, start: str, checked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards all other kernels, and graphs, of an engine one of whose kernels failed: only it is replaced."""
    give(monkeypatch)

    def layers(checks: ModelChecks) -> list[KernelCheck]:
        left = [name for name in kernels if name not in checks.model.ops.without]  # type: ignore[attr-defined]
        return [RIGHT, *(wrong(f"{name} (2)", name) for name in left)]

    monkeypatch.setattr(ModelChecks, "layers", layers)
    monkeypatch.setattr(fallback, "select_attention", lambda *_: TritonAttention(DEVICE))
    model = model_of(network())
    chosen = choose_execution(EngineConfig(), model)
    ops = chosen.model.ops  # type: ignore[attr-defined]
    assert ops == replace(model.ops, without=frozenset(kernels)) and chosen.graphs == graphs
    assert chosen.fallback.startswith(start) and all(f"{name} (2) differs" in chosen.fallback for name in kernels)
    for name, kernel in KERNELS.items():
        by_torch_now = kernel.function_for(ops) is kernel.function_for(by_torch(heads_first=True))
        assert by_torch_now or name not in kernels
    with pytest.raises(ConfigError, match=r"operations of torch take the place of the kernels? "):
        choose_execution(EngineConfig(deterministic=True), model)


def test_memory_that_ran_out_condemns_no_kernel(checked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a kernel whose check found the device full: it is tried once more after memory was given back."""
    failures, released = [0], list[Any]()

    def full(right: Any, *arguments: Any) -> None:
        failures[0] -= 1
        if failures[0] >= 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        right(*arguments)

    def run() -> Any:
        with monkeypatch.context() as patch:
            replace_kernel(patch, "activate", full)
            return kernel_engine(patch)

    monkeypatch.setattr(kernel_check, "release_memory", released.append)
    failures[0] = 1
    assert rung_of(engine := run()) == "triton" and engine.stats().fallback == "" and released == [DEVICE]
    failures[0] = 2
    assert rung_of(engine := run()) == "triton without activate"
    assert "activate fails (CUDA out of memory" in engine.stats().fallback


@pytest.mark.parametrize("name", ["auto", "triton"])
def test_a_machine_on_which_triton_cannot_launch(name: str, checked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a GPU without a C compiler: nothing is launched, neither attention nor sampling."""
    monkeypatch.setattr(fallback, "triton_problem", lambda _: "There is no C compiler.")
    monkeypatch.setattr("cbatch.engine.kernel_checks.all_checks.ModelChecks", None)
    monkeypatch.setattr(fallback, "select_attention", lambda *_: TritonAttention(DEVICE))
    if name == "triton":
        with pytest.raises(ConfigError, match=r"cannot be used on .*: There is no C compiler\."):
            choose_execution(EngineConfig(attention=name), model_of(network()))
        return
    engine = kernel_engine(monkeypatch, samples=True)
    assert rung_of(engine) == "reference, torch" and not engine._sampler.uses_kernel
    assert engine.stats().fallback.endswith(f"on {DEVICE}: There is no C compiler.")
    check_text(engine)


@pytest.mark.slow
def test_a_model_of_transformers(checked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards other families: Triton's attention is checked as the layers call it; the reference replaces it."""
    gemma = make_network("gemma2", num_hidden_layers=2, max_position_embeddings=16, attn_logit_softcapping=20.0)
    monkeypatch.setattr(fallback, "select_attention", lambda *_: TritonAttention(DEVICE))
    right, forms, without = triton_attention.attend_arguments, set(), dict[str, Any]()

    def noting(**options: Any) -> Any:
        forms.add((options["window"], options["softcap"]))
        return right(**options | without)

    monkeypatch.setattr(triton_attention, "attend_arguments", noting)
    assert make_engine(gemma, device=str(DEVICE)).attention == "triton" and forms == {(None, 20.0), (12, 20.0)}
    without["softcap"] = None
    engine = make_engine(gemma, device=str(DEVICE))
    assert engine.attention == "reference"
    assert "softcap, heads of 16) differs from torch by" in engine.stats().fallback


def test_a_model_that_runs_nowhere(checked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against blaming a kernel for a device on which not even torch runs."""

    def fail(*_: Any) -> None:
        raise RuntimeError("CUDA error: no kernel image is available")

    replace_kernel(monkeypatch, "embed_and_norm", fail, of_torch=True)
    with pytest.raises(ModelError, match=r"even by operations of torch alone .*no kernel image is available"):
        kernel_engine(monkeypatch)


def test_nothing_is_checked_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the time to start on a CPU, and users who ask for the reference there or anywhere."""
    monkeypatch.setattr(fallback, "_step_down", None)
    with make_engine(network()) as engine:
        assert engine.stats().fallback == ""
    cpu = torch.device("cpu")
    assert select_attention("reference", cpu, [], 16, torch.float32).name == "reference"
    asked = choose_execution(EngineConfig(attention="reference"), model_of(network()))
    assert not asked.sampler.uses_kernel
