"""Programs that run operation by operation, by torch and by Triton's kernels: against transformers, and in engines.

Without a GPU, Triton's interpreter runs the kernels.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cbatch.attention.reference import ReferenceAttention
from cbatch.model.base import DeviceInputs
from cbatch.model.config import UnsupportedConfig
from cbatch.model.cpu import CpuModel
from cbatch.model.ops.device_kernel import by_torch
from cbatch.runtime.kv_cache import KVCache
from tests.support.architectures import CLASSES, VARIANTS, WITHOUT_CAUSAL_CLASS
from tests.support.cuda_model import (
    DEVICE,
    batch_of,
    engine_around,
    expected_of,
    kv_cache_of,
    logits_of,
    model_of,
    run,
)
from tests.support.declared import declared_kinds
from tests.support.kernel_faults import replace_kernel
from tests.support.programs import PROMPT, error_of, expected_logits, logits_in_chunks, saved_model, typical_error
from tests.support.samples import sampled
from tests.support.tiny_models import MODELS, make_network, make_prompts, network_of

pytest.importorskip("triton", reason="the kernels for a GPU need Triton")

from cbatch.attention.triton import TritonAttention
from cbatch.model.cuda import CudaModel

pytestmark = pytest.mark.kernels

KINDS = [*(kind for kind in declared_kinds() if kind in CLASSES | WITHOUT_CAUSAL_CLASS), *VARIANTS]
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
@pytest.mark.parametrize("kind", sampled(VARIED, 8, keep=["gemma2", "gpt_oss", "deepseek_v3", "apertus"]))
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


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(MODELS, 3, keep=["odd sizes", "mistral, window"]))
def test_equals_generate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards steps that mix decoding with chunks of prompts, token for token in float32."""
    engine = engine_around(monkeypatch, model_of(network_of(name)), max_batch_tokens=8)
    assert run(engine) == expected_of(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float16, 0.02),
        pytest.param(torch.bfloat16, 0.1, marks=pytest.mark.gpu),  # Triton's interpreter cuts off what a GPU rounds
    ],
)
def test_half_precision_is_near_float32(dtype: torch.dtype, tolerance: float) -> None:
    """Guards the other kinds of numbers, with rounding as all that they may differ by."""
    found = logits_in_chunks(device_model("qwen3", dtype=dtype), TritonAttention(DEVICE), PROMPT[:40], [0, 18, 40])
    assert typical_error(found, expected_logits("qwen3")[:40]) < tolerance


def test_chunk_without_logits() -> None:
    """Guards a step that only computes parts of prompts: no rows of logits, and the cache is written."""
    model = model_of(network_of("llama"))
    kv_cache, prompts = kv_cache_of(model), make_prompts([12])
    batch = batch_of([prompts[0][:7]])
    nothing = replace(batch, rows=batch.rows[:0])
    assert logits_of(model, nothing, kv_cache).shape == (0, model.vocab_size)
    found = logits_of(model, batch_of(prompts, start=7), kv_cache)
    torch.testing.assert_close(found, logits_of(model, batch_of(prompts), kv_cache_of(model)))


class Operations(TorchDispatchMode):
    """Notes the names of torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **kwargs or {})


class NoAttention(TritonAttention):
    def attend(self, query: Tensor, *rest: Any, **settings: Any) -> Tensor:
        return query


def operations_of(layers: int) -> list[str]:
    """Names of torch's operations in a decode step, attention left out."""
    model = model_of(make_network("qwen2", num_hidden_layers=layers), torch.float16)
    batch, kv_cache = batch_of(make_prompts([1, 1])), kv_cache_of(model)
    given = batch.input_ids, batch.position_ids, batch.slot_mapping
    inputs = DeviceInputs(*given, kv_cache, NoAttention(DEVICE), None)
    rows = batch.logit_rows
    with torch.inference_mode(), Operations() as noted:
        model.run_head(model.run_layers(inputs), rows)
    return noted.names


@pytest.mark.slow
def test_launches_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the time of a decode step: four products and four kernels for a layer, and no waiting for the device."""
    launches: list[str] = []
    for name in ("embed_and_norm", "add_and_norm", "prepare_heads", "activate", "select_and_norm"):
        replace_kernel(monkeypatch, name, lambda *_, name=name: launches.append(name))
    of_two = operations_of(2)
    assert Counter(launches) == {
        "embed_and_norm": 1,
        "add_and_norm": 3,
        "prepare_heads": 2,
        "activate": 2,
        "select_and_norm": 1,
    }
    assert not {"item", "_local_scalar_dense", "is_nonzero", "nonzero"} & set(of_two)
    assert Counter(operations_of(3)) - Counter(of_two) == {
        **{"addmm": 1, "mm": 3},
        **{"t": 4, "view": 2, "flatten": 1},  # only views
    }


class Files(dict[str, Tensor]):
    """Tensors that are read when they are asked for; `held` are those that somebody still holds."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__(tensors)
        self.held: WeakSet[Tensor] = WeakSet()
        self.most = 0

    def __getitem__(self, name: str) -> Tensor:
        tensor = super().__getitem__(name).clone()
        self.held.add(tensor)
        self.most = max(self.most, len(self.held))
        return tensor


@pytest.mark.parametrize("is_tied", [False, True])
def test_weights_are_held_once(is_tied: bool) -> None:
    """Guards memory: weights are brought to the device one by one, and an embedding that is the head too once."""
    network = make_network("qwen2", tie_word_embeddings=is_tied)
    tensors = {name: tensor for name, tensor in network.state_dict().items() if not is_tied or name != "lm_head.weight"}
    files = Files(tensors)
    model = CudaModel(network.config.to_dict(), files, torch.float16, DEVICE)
    assert files.most <= 2
    parameters = sum(tensor.numel() for tensor in tensors.values())
    norms = sum(tensor.numel() for name, tensor in tensors.items() if "norm" in name)  # in float32
    assert model.num_parameters == parameters and model.weight_bytes == 2 * (parameters + norms)
    head = network.lm_head.weight.numel()
    matrices = sum(tensor.numel() for name, tensor in tensors.items() if tensor.dim() == 2 and "embed" not in name)
    assert model.linear_cost.weight_bytes == 2 * (matrices + (head if is_tied else 0))
    assert model.linear_cost.head_parameters == head
    assert model.linear_cost.parameters == matrices - (0 if is_tied else head)


def test_what_does_not_fit_is_refused() -> None:
    """Guards against models, numbers and caches that would be computed wrongly."""
    network = network_of("llama")
    config, tensors = network.config.to_dict(), network.state_dict()
    for other, dtype in (
        (config | {"hidden_act": "tanh"}, torch.float16),
        (config | {"head_dim": 520}, torch.float16),
        (config, torch.float64),
    ):
        with pytest.raises(UnsupportedConfig):
            CudaModel(other, tensors, dtype, DEVICE)
    with pytest.raises(UnsupportedConfig):
        CudaModel(config, tensors | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}, torch.float16, DEVICE)
    model, reference = model_of(network), ReferenceAttention()
    shapes = [reference.block_shapes(layer, 16, model.dtype) for layer in model.layers]
    kv_cache = KVCache(shapes, 8, 16, model.dtype, DEVICE)
    with pytest.raises(ValueError, match="laid out"):
        model.forward(batch_of(make_prompts([3])), kv_cache, reference)
