"""Guards the fast path on a GPU; without one, Triton's interpreter runs its kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cbatch.attention.reference import ReferenceAttention
from cbatch.model.base import DeviceInputs
from cbatch.model.config import UnsupportedConfig
from cbatch.model.ops.device_kernel import by_torch
from cbatch.runtime.kv_cache import KVCache
from tests.support.cuda_model import (
    DEVICE,
    MODELS,
    batch_of,
    engine_around,
    expected_of,
    kv_cache_of,
    logits_of,
    model_of,
    network_of,
    run,
)
from tests.support.kernel_faults import replace_kernel
from tests.support.tiny_models import draw_weights, make_network, make_prompts

pytest.importorskip("triton", reason="the kernels for a GPU need Triton")

from cbatch.attention.triton import TritonAttention
from cbatch.model.cuda import CudaModel

pytestmark = [pytest.mark.slow, pytest.mark.kernels]


@pytest.mark.parametrize("name", MODELS)
def test_equals_generate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards every kind of model, token for token in float32, in steps that mix decoding with chunks of prompts."""
    engine = engine_around(monkeypatch, model_of(network_of(name)), max_batch_tokens=8)
    assert run(engine) == expected_of(name)


def test_torch_operations_with_triton_attention_equal_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards torch's operations over blocks as Triton's attention lays them out."""
    model = model_of(network_of("qwen3, norms")).with_ops(by_torch(heads_first=True))
    assert run(engine_around(monkeypatch, model, max_batch_tokens=8)) == expected_of("qwen3, norms")


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16,
        pytest.param(torch.bfloat16, marks=pytest.mark.gpu),  # Triton's interpreter cuts off what a GPU rounds
    ],
)
@pytest.mark.parametrize("name", ["qwen2, biases", "qwen3, norms"])
def test_half_precision_is_near_float32(name: str, dtype: torch.dtype) -> None:
    """Guards the other kinds of numbers: as near to float32 as transformers' own are, or nearer."""
    network, prompts = network_of(name), make_prompts([26, 9], seed=2)
    halves = make_network(MODELS[name][0], **MODELS[name][1])
    draw_weights(halves)
    halves = halves.to(dtype)
    model, batch = model_of(network, dtype), batch_of(prompts)
    batch = replace(batch, rows=np.arange(len(batch.ids)))
    ours = logits_of(model, batch, kv_cache_of(model)).cpu()
    with torch.inference_mode():
        exact, theirs = (
            torch.cat([model(torch.tensor([prompt])).logits[0] for prompt in prompts]).float().log_softmax(-1)
            for model in (network, halves)
        )
    assert (ours.log_softmax(-1) - exact).square().mean() <= 1.2**2 * (theirs - exact).square().mean()


def test_products_are_summed_in_float32() -> None:
    """Guards the sums of products in half precision, which torch lets cuBLAS round to 16 bits by default."""
    flags = torch.backends.cuda.matmul
    flags.allow_bf16_reduced_precision_reduction = flags.allow_fp16_reduced_precision_reduction = True
    model_of(network_of("llama"), torch.float16)
    assert not flags.allow_bf16_reduced_precision_reduction and not flags.allow_fp16_reduced_precision_reduction


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
    inputs = DeviceInputs(batch.input_ids, batch.position_ids, batch.slot_mapping)
    rows = batch.logit_rows
    with torch.inference_mode(), Operations() as noted:
        model.run_head(model.run_layers(inputs, None, kv_cache, NoAttention(DEVICE)), rows)
    return noted.names


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


class Files(Mapping[str, Tensor]):
    """Tensors that are read when they are asked for; `held` are those that somebody still holds."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.held: WeakSet[Tensor] = WeakSet()
        self.most = 0

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.tensors[name].clone()
        self.held.add(tensor)
        self.most = max(self.most, len(self.held))
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


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
