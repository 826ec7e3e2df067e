"""Guards the fast path of the Llama family on a GPU; without one, Triton's interpreter runs its kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from torch.utils._python_dispatch import TorchDispatchMode

from cbatch.engine.attention.reference import ReferenceAttention
from cbatch.engine.batch import RaggedBatch
from cbatch.engine.config import EngineConfig
from cbatch.engine.engine import Engine
from cbatch.engine.kv_pool import KVPool
from cbatch.engine.loader import LoadedModel
from cbatch.engine.models.family import Unfit
from cbatch.engine.params import SamplingParams
from tests import interpreter
from tests.tiny import draw_weights, generate_alone, make_network, make_prompts

pytest.importorskip("triton", reason="the kernels for a GPU need Triton")

from cbatch.engine.attention.triton import TritonAttention
from cbatch.engine.gpu.layer import add_norm, begin, end, gate, place
from cbatch.engine.models import gpu_decoder
from cbatch.engine.models.gpu_decoder import GpuDecoder

interpreter.mend()

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
ROPE = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama 3 places, tied": (
        "llama",
        {"rope_parameters": ROPE | {"original_max_position_embeddings": 32}, "tie_word_embeddings": True},
    ),
    "odd sizes": ("llama", {"num_attention_heads": 6, "head_dim": 10, "intermediate_size": 70}),
    "mistral, window": ("mistral", {"sliding_window": 9}),
    "qwen2, biases": ("qwen2", {}),
    "qwen3, norms": ("qwen3", {"tie_word_embeddings": True}),
}
LENGTHS = [3, 14, 1]
OUTPUTS = [6, 4, 7]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm in float64, with an epsilon that shows."""
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + 0.01).sqrt() * weight.double()


def check(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected.to(found.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("hidden", [64, 90, 1000])
def test_norms(hidden: int, dtype: torch.dtype) -> None:
    """Guards the stream: begun from embeddings, added to, and ended with the wanted rows only."""
    embedding, weight = draw(7, hidden, dtype=dtype), 1 + draw(hidden, dtype=dtype, seed=1)
    ids, stream = torch.tensor([3, 0, 6, 3], device=DEVICE), draw(4, hidden)
    out = torch.empty(4, hidden, dtype=dtype, device=DEVICE)
    begin(embedding, ids, stream, weight, 0.01, out)
    assert torch.equal(stream, embedding[ids].float())
    check(out, normed(stream, weight))
    added = draw(4, hidden, dtype=dtype, seed=2)
    expected = stream + added.float()
    add_norm(stream, added, weight, 0.01, out)
    assert torch.equal(stream, expected)
    check(out, normed(expected, weight))
    rows = torch.tensor([2, 0], device=DEVICE)
    end(stream, added, rows, weight, 0.01, out[:2])
    check(out[:2], normed((stream + added.float())[rows], weight))
    assert torch.equal(stream, expected)


def turned(heads: Tensor, angles: Tensor) -> Tensor:
    """Heads [T, N, dim] as numbers of the complex plane, each turned by its angle."""
    left, right = heads.double().chunk(2, -1)
    rotated = torch.complex(left, right) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([rotated.real, rotated.imag], -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(
    ("kv_heads", "group", "dim", "block_size"), [(2, 2, 16, 4), (1, 5, 10, 5), (3, 1, 40, 1)], ids=str
)
def test_place(kv_heads: int, group: int, dim: int, block_size: int, has_norms: bool, dtype: torch.dtype) -> None:
    """Guards queries, and the places of keys and values in the cache, of which nothing else may change."""
    slots, heads = torch.tensor([7, -1, 0, 11], device=DEVICE), group * kv_heads
    mixed = draw(4, (group + 2) * kv_heads * dim, dtype=dtype)
    angles = torch.tensor([[0.0], [1.0], [5.0], [90.0]], device=DEVICE).double() * draw(dim // 2, seed=1).double()
    norms = 1 + draw(2 * dim, dtype=dtype, seed=2) if has_norms else None
    cache = torch.full((2, -(-12 // block_size), kv_heads, block_size, dim), torch.nan, dtype=dtype, device=DEVICE)
    query = torch.empty(4, heads, dim, dtype=dtype, device=DEVICE)
    place(mixed, angles.cos().float(), angles.sin().float(), slots, norms, 0.01, query, *cache)

    queries, keys, values = mixed.view(4, -1, dim).split([heads, kv_heads, kv_heads], 1)
    weights = (None, None) if norms is None else norms.chunk(2)
    queries, keys = (
        turned(heads if weight is None else normed(heads, weight), angles)
        for heads, weight in zip((queries, keys), weights, strict=True)
    )
    check(query, queries)
    expected = torch.full_like(cache, torch.nan)
    for token in (0, 2, 3):
        block, offset = divmod(int(slots[token]), block_size)
        expected[0, block, :, offset] = keys[token].to(dtype)
        expected[1, block, :, offset] = values[token]
    torch.testing.assert_close(cache, expected, equal_nan=True)
    assert torch.equal(cache[1].nan_to_num(), expected[1].nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:overflow")  # of the interpreter, for a gate that is shut
@pytest.mark.parametrize("inner", [64, 1100])
def test_gate(inner: int, dtype: torch.dtype) -> None:
    """Guards the gate, also where it is shut or wide open."""
    both = draw(3, 2 * inner, dtype=dtype)
    both[0, 0], both[1, 1], both[2, inner - 1] = -100, 100, -20
    out = torch.empty(3, inner, dtype=dtype, device=DEVICE)
    gate(both, out)
    check(out, silu(both[:, :inner].double()) * both[:, inner:].double())


@cache
def network_of(name: str) -> Any:
    family, overrides = MODELS[name]
    network = make_network(family, **overrides)
    draw_weights(network)
    return network


@cache
def expected_of(name: str) -> list[list[int]]:
    return generate_alone(network_of(name), make_prompts(LENGTHS), OUTPUTS)


def decoder_of(network: Any, dtype: torch.dtype = torch.float32) -> GpuDecoder:
    return GpuDecoder(network.config.to_dict(), network.state_dict(), dtype, DEVICE)


@pytest.fixture
def make_engine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """Makes an engine around a decoder, also on a CPU, where it would choose another."""

    def make(decoder: GpuDecoder, **config: Any) -> Engine:
        monkeypatch.setattr("cbatch.engine.engine.has_fast_path", lambda *_: True)
        monkeypatch.setattr("cbatch.engine.engine.select_attention", lambda *_: TritonAttention(DEVICE))
        loaded = LoadedModel("tiny", lambda: None, None, SamplingParams(), frozenset(), decoder=decoder)
        settings: dict[str, Any] = {"block_size": 5, "kv_blocks": 30, "max_seqs": 4, "device": str(DEVICE)} | config
        return Engine(EngineConfig(**settings), loaded)

    return make


def run(engine: Engine) -> list[list[int]]:
    params = [SamplingParams(max_tokens=length) for length in OUTPUTS]
    outputs = engine.generate(make_prompts(LENGTHS), params)
    engine.scheduler.check_integrity()
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("name", MODELS)
def test_equals_generate(name: str, make_engine: Callable[..., Engine]) -> None:
    """Guards every kind of model, token for token in float32, in steps that mix decoding with chunks of prompts."""
    engine = make_engine(decoder_of(network_of(name)), max_batch_tokens=8)
    assert run(engine) == expected_of(name)


def batch_of(prompts: list[list[int]], start: int = 0) -> RaggedBatch:
    """Prompts from a token on, each in the two blocks of 16 tokens that follow those of the one before."""
    parts = [prompt[start:] for prompt in prompts]
    positions = [torch.arange(start, len(prompt)) for prompt in prompts]
    ends = torch.tensor([len(part) for part in parts]).cumsum(0)
    return RaggedBatch(
        input_ids=torch.tensor(list(chain.from_iterable(parts))).to(DEVICE),
        position_ids=torch.cat(positions).to(DEVICE),
        slot_mapping=torch.cat([32 * index + position for index, position in enumerate(positions)]).to(DEVICE),
        logit_rows=(ends - 1).to(DEVICE),
        block_tables=torch.arange(2 * len(prompts), dtype=torch.int32, device=DEVICE).view(-1, 2),
        starts=[start] * len(prompts),
        stops=[len(prompt) for prompt in prompts],
    )


def pool_of(decoder: GpuDecoder) -> KVPool:
    shapes = [TritonAttention(DEVICE).block_shapes(layer, 16, decoder.dtype) for layer in decoder.layers]
    pool = KVPool(shapes, 8, 16, decoder.dtype, DEVICE)
    for layer in (*pool.keys, *pool.values):
        layer.fill_(torch.nan)
    return pool


def logits_of(decoder: GpuDecoder, batch: RaggedBatch, pool: KVPool) -> Tensor:
    with torch.inference_mode():
        return decoder.forward(batch, pool, TritonAttention(DEVICE))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16,
        pytest.param(
            torch.bfloat16,
            marks=pytest.mark.skipif(DEVICE.type == "cpu", reason="Triton's interpreter cuts off what a GPU rounds"),
        ),
    ],
)
@pytest.mark.parametrize("name", ["qwen2, biases", "qwen3, norms"])
def test_half_precision_is_near_float32(name: str, dtype: torch.dtype) -> None:
    """Guards the other kinds of numbers: as near to float32 as transformers' own are, or nearer."""
    network, prompts = network_of(name), make_prompts([26, 9], seed=2)
    halves = make_network(MODELS[name][0], **MODELS[name][1])
    draw_weights(halves)
    halves = halves.to(dtype)
    decoder, batch = decoder_of(network, dtype), batch_of(prompts)
    batch = replace(batch, logit_rows=torch.arange(len(batch.input_ids), device=DEVICE))
    ours = logits_of(decoder, batch, pool_of(decoder)).cpu()
    with torch.inference_mode():
        exact, theirs = (
            torch.cat([model(torch.tensor([prompt])).logits[0] for prompt in prompts]).float().log_softmax(-1)
            for model in (network, halves)
        )
    assert (ours.log_softmax(-1) - exact).square().mean() <= 1.2**2 * (theirs - exact).square().mean()


def test_padded_rows_change_nothing() -> None:
    """Guards a step that is filled up for a graph: rows without a slot write nothing, and the others are the same."""
    decoder, prompts = decoder_of(network_of("qwen3, norms")), make_prompts([9, 9])
    attention, pool, other = TritonAttention(DEVICE), pool_of(decoder), pool_of(decoder)
    for each in (pool, other):
        logits_of(decoder, batch_of([prompt[:8] for prompt in prompts]), each)
    step = batch_of(prompts, start=8)
    expected = logits_of(decoder, step, other)
    buffers = attention.buffers(4, 2, 16)
    buffers.fill(step.block_tables.cpu().numpy(), step.stops)
    inputs = [torch.cat([part, torch.zeros_like(part)]) for part in (step.input_ids, step.position_ids)]
    rows = torch.arange(4, device=DEVICE)
    with torch.inference_mode():
        found = decoder.compute(*inputs, buffers.metadata.slots, rows, buffers.metadata, pool, attention)
    check(found[:2], expected)
    for mine, theirs in zip(pool.keys + pool.values, other.keys + other.values, strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True)


def test_chunk_without_logits() -> None:
    """Guards a step that only computes parts of prompts: no rows of logits, and the cache is written."""
    decoder = decoder_of(network_of("llama"))
    pool, prompts = pool_of(decoder), make_prompts([12])
    batch = batch_of([prompts[0][:7]])
    nothing = replace(batch, logit_rows=batch.logit_rows[:0])
    assert logits_of(decoder, nothing, pool).shape == (0, decoder.vocab_size)
    check(logits_of(decoder, batch_of(prompts, start=7), pool), logits_of(decoder, batch_of(prompts), pool_of(decoder)))


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
    decoder = decoder_of(make_network("qwen2", num_hidden_layers=layers), torch.float16)
    batch, pool = batch_of(make_prompts([1, 1])), pool_of(decoder)
    inputs = batch.input_ids, batch.position_ids, batch.slot_mapping, batch.logit_rows
    with torch.inference_mode(), Operations() as noted:
        decoder.compute(*inputs, None, pool, NoAttention(DEVICE))
    return noted.names


def test_launches_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the time of a decode step: four products and four kernels for a layer, and no waiting for the device."""
    launches: list[str] = []
    for name in ("begin", "add_norm", "place", "gate", "end"):
        monkeypatch.setattr(gpu_decoder, name, lambda *_, name=name: launches.append(name))
    of_two = operations_of(2)
    assert Counter(launches) == {"begin": 1, "add_norm": 3, "place": 2, "gate": 2, "end": 1}
    assert not {"item", "_local_scalar_dense", "is_nonzero", "nonzero"} & set(of_two)
    assert Counter(operations_of(3)) - Counter(of_two) == {"linear": 4, "flatten": 1}  # the latter only a view


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
    decoder = GpuDecoder(network.config.to_dict(), files, torch.float16, DEVICE)
    assert files.most <= 2
    parameters = sum(tensor.numel() for tensor in tensors.values())
    assert decoder.num_parameters == parameters and decoder.weight_bytes == 2 * parameters
    head = network.lm_head.weight.numel()
    matrices = sum(tensor.numel() for name, tensor in tensors.items() if tensor.dim() == 2 and "embed" not in name)
    assert decoder.linears.weight_bytes == 2 * (matrices + (head if is_tied else 0))
    assert decoder.linears.head_parameters == head
    assert decoder.linears.parameters == parameters - head * (1 if is_tied else 2)


def test_what_does_not_fit_is_refused() -> None:
    """Guards against models, numbers and caches that would be computed wrongly."""
    network = network_of("llama")
    config, tensors = network.config.to_dict(), network.state_dict()
    for other, dtype in (
        (config | {"hidden_act": "gelu"}, torch.float16),
        (config | {"head_dim": 512}, torch.float16),
        (config, torch.float64),
    ):
        with pytest.raises(Unfit):
            GpuDecoder(other, tensors, dtype, DEVICE)
    with pytest.raises(Unfit):
        GpuDecoder(config, tensors | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}, torch.float16, DEVICE)
    decoder, reference = decoder_of(network), ReferenceAttention()
    shapes = [reference.block_shapes(layer, 16, decoder.dtype) for layer in decoder.layers]
    pool = KVPool(shapes, 8, 16, decoder.dtype, DEVICE)
    with pytest.raises(ValueError, match="laid out"):
        decoder.forward(batch_of(make_prompts([3])), pool, reference)


def compile_kernels() -> None:
    """Compiles what steps of a model with norms of heads and of one of odd sizes launch; prints each kernel's name."""
    from tests.compiling import launches_compiled

    with launches_compiled() as compiled, torch.inference_mode():
        for name in ("qwen3, norms", "odd sizes"):
            decoder = decoder_of(network_of(name), torch.bfloat16)
            decoder.forward(batch_of(make_prompts([1])), pool_of(decoder), NoAttention(DEVICE))
    print(*sorted(key.split()[0] for key in compiled))


def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """Guards kernels that only the interpreter accepts."""
    settings = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    code = "from tests.test_gpu_decoder import compile_kernels; compile_kernels()"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | settings, capture_output=True, text=True)
    kernels = ["_gate_kernel"] * 2 + ["_norm_kernel"] * 3 + ["_place_kernel"] * 2
    assert done.stdout.split() == kernels, done.stderr
