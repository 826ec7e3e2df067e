"""Programs run operation by operation, by torch and by Triton's kernels, against transformers, and with planted faults.

Without a GPU, Triton's interpreter runs the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cbatch.attention.cpu import CpuAttention
from cbatch.attention.reference import ReferenceAttention
from cbatch.base.params import SamplingParams
from cbatch.model.base import DeviceInputs
from cbatch.model.cpu import CpuModel
from cbatch.model.families import declared_kinds, read_program
from cbatch.model.ops.device_kernel import DeviceOps, by_torch
from cbatch.runtime.batch import RaggedBatch
from tests.support.architectures import CLASSES
from tests.support.cuda_model import engine_around, kv_cache_of, logits_of
from tests.support.device import DEVICE
from tests.support.generation import generate
from tests.support.model_checks import is_greedy_output
from tests.support.program_faults import FAULTS
from tests.support.programs import PROMPT, error_of, expected_logits, logits_in_chunks, saved_model, typical_error
from tests.support.samples import sampled
from tests.support.tiny_models import make_prompts

pytest.importorskip("triton", reason="the kernels for a GPU need Triton")

from cbatch.attention.triton import TritonAttention
from cbatch.model.cuda import CudaModel

pytestmark = pytest.mark.kernels

KINDS = [kind for kind in declared_kinds() if kind in CLASSES]
VARIED = [
    "llama", "qwen3", "gemma2", "gemma4_text", "phi", "opt", "cohere", "olmo2", "stablelm", "glm4", "apertus",
    "hunyuan_v1_dense", "smollm3", "mixtral", "gpt_oss", "afmoe", "llama4_text", "deepseek_v2", "deepseek_v3",
]  # fmt: skip
"""Types whose programs have every operation in every form that the kernels know."""


def device_model(kind: str, ops: Any = None, dtype: torch.dtype = torch.float32) -> CudaModel:
    """ops: None for Triton's kernels"""
    saved = saved_model(kind)
    return CudaModel(saved.config, saved.tensors, dtype, DEVICE, ops)


def logits_by_torch(kind: str) -> Tensor:
    return logits_in_chunks(device_model(kind, by_torch()), ReferenceAttention())


@pytest.mark.parametrize("kind", sampled(KINDS, 15, keep=["gpt_oss", "deepseek_v3", "qwen3_5_text", "lfm2"]))
def test_torch_equals_the_network(kind: str) -> None:
    """Guards every declaration without a kernel of ours: the logits of a prompt in chunks."""
    assert error_of(logits_by_torch(kind), expected_logits(kind)) < 2e-4


@pytest.mark.slow
@pytest.mark.parametrize("kind", VARIED)
def test_triton_equals_the_network(kind: str) -> None:
    """Guards every operation by Triton's kernels, as models call them."""
    found = logits_in_chunks(device_model(kind), TritonAttention(DEVICE), PROMPT[:40], [0, 18, 19, 40])
    assert error_of(found, expected_logits(kind)[:40]) < 2e-4


@pytest.mark.parametrize("name", sampled(FAULTS, 8))
def test_wrong_operations_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the comparison: each of these mistakes in a program changes its logits."""
    kind, plant = FAULTS[name]
    monkeypatch.setattr("cbatch.model.program_model.read_program", lambda config: plant(read_program(config)))
    monkeypatch.setattr("cbatch.model.program_model.check_weights", lambda *_: 0)
    assert error_of(logits_by_torch(kind), expected_logits(kind)) > 5e-4


@pytest.mark.parametrize("kind", ["gemma2", "qwen3_moe", "deepseek_v3"])
def test_torch_equals_the_kernels_of_a_cpu(kind: str) -> None:
    """Guards both ways to run a program against each other."""
    saved = saved_model(kind)
    found = logits_in_chunks(CpuModel(saved.config, saved.tensors, torch.float32), CpuAttention())
    assert error_of(found, logits_by_torch(kind)) < 2e-4


@pytest.mark.parametrize("kind", ["gemma3_text", "starcoder2", "gpt_oss", "deepseek_v2", "olmo2"])
def test_half_precision_is_near_float32(kind: str) -> None:
    """Guards float16, with rounding as all that it may differ by."""
    found = logits_in_chunks(device_model(kind, by_torch(), torch.float16), ReferenceAttention())
    assert typical_error(found, expected_logits(kind)) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_moe"])
def test_generated_text(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards whole runs of an engine: decoding beside chunks of prompts, tokens that only the device knows."""
    engine = engine_around(monkeypatch, device_model(kind), max_batch_tokens=8, block_size=16)
    prompts = make_prompts([3, 14, 1], seed=5)
    outputs = generate(engine, prompts, [SamplingParams(max_tokens=length) for length in (6, 4, 7)])
    network = saved_model(kind).network
    for prompt, output in zip(prompts, outputs, strict=True):
        assert is_greedy_output(network, prompt, list(output.token_ids))


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "phi", "qwen3"])
def test_padding_changes_nothing(kind: str) -> None:
    """Guards steps that are filled up for a graph: rows without a slot change neither the cache nor other rows."""
    model, attention = device_model(kind), TritonAttention(DEVICE)
    prompts = make_prompts([9, 5], seed=2)
    positions = [np.arange(len(prompt)) for prompt in prompts]
    ids, ends = np.concatenate([np.array(prompt) for prompt in prompts]), np.cumsum([9, 5])
    slots = np.concatenate([16 * index + position for index, position in enumerate(positions)])
    tables = np.arange(2, dtype=np.int32)[:, None]
    first = RaggedBatch(ids, np.concatenate(positions), slots, ends - 1, tables, [0, 0], [9, 5], DEVICE)
    kv_cache, other = kv_cache_of(model), kv_cache_of(model)
    for each in (kv_cache, other):
        logits_of(model, first, each)
    last = np.array([9, 5])
    step = RaggedBatch(np.array([3, 7]), last, 16 * np.arange(2) + last, np.arange(2), tables, [9, 5], [10, 6], DEVICE)
    expected = logits_of(model, step, other)
    buffers = attention.graph_buffers(4, 4, 1, 16, decode_only=True)
    buffers.fill(step)
    inputs = DeviceInputs(buffers.input_ids, buffers.position_ids, buffers.slots)
    with torch.inference_mode():
        hidden = model.run_layers(inputs, buffers.metadata, kv_cache, attention)
        found = model.run_head(hidden, torch.arange(4, device=DEVICE))
    torch.testing.assert_close(found[:2], expected)
    for mine, theirs in zip(kv_cache.keys + kv_cache.values, other.keys + other.values, strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True)


def test_what_is_added_waits_for_a_norm() -> None:
    """Guards the launches of a step: products of parallel blocks and post-norms are added by the norm that follows."""
    counted: dict[str, int] = {}

    @dataclass(frozen=True)
    class Counting(DeviceOps):
        def call(self, kernel: Any, arguments: Any, keywords: Any) -> Any:
            counted[kernel.name] = counted.get(kernel.name, 0) + 1
            return super().call(kernel, arguments, keywords)

    for kind, norms, left in (("phi", 1, 1), ("gemma2", 2, 1), ("olmo2", 2, 1), ("llama", 2, 0)):
        counted.clear()
        model = device_model(kind, Counting())
        logits_in_chunks(model, ReferenceAttention(), make_prompts([3], seed=1)[0] * 20)
        layers, steps = len(model.program.caches), 5
        assert counted["embed_and_norm"] == steps
        # The head adds one product; what else the last layer has is added on its own.
        assert counted["add_and_norm"] == steps * (norms * layers - 1 + left), kind


def test_experts_are_counted_as_they_are_used() -> None:
    """Guards estimates of speed: a token is multiplied with the experts that it chooses."""
    model = device_model("mixtral", by_torch())
    config, hidden = model.config, model.program.hidden_size
    experts, chosen, inner = config["num_local_experts"], config["num_experts_per_tok"], config["intermediate_size"]
    cost, layers = model.linear_cost, len(model.program.caches)
    all_of_them = model.num_parameters - 2 * cost.head_parameters - (2 * layers + 1) * hidden
    unused = layers * (experts - chosen) * 3 * hidden * inner
    assert cost.parameters == all_of_them - unused and "experts" in cost.assumed[0]
    assert replace(cost, weight_bytes=0, assumed=()) == replace(
        CpuModel(model.config, saved_model("mixtral").tensors, torch.float32).linear_cost, weight_bytes=0, assumed=()
    )
