"""Programs run operation by operation, by torch and by Triton's kernels, against transformers, and with planted faults.

Without a GPU, Triton's interpreter runs the kernels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cbatch.attention.reference import ReferenceAttention
from cbatch.model.cpu import CpuModel
from cbatch.model.families import declared_kinds
from cbatch.model.ops.device_kernel import by_torch
from tests.support.architectures import CLASSES
from tests.support.device import DEVICE
from tests.support.programs import PROMPT, error_of, expected_logits, logits_in_chunks, saved_model
from tests.support.samples import sampled

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
