"""A KV cache of bytes with a scale for each token and head: rounding, invariants, and the engine around it."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from cbatch.attention.cpu import CpuAttention
from cbatch.attention.reference import ReferenceAttention
from cbatch.attention.registry import check_kv_dtype
from cbatch.base.config import EngineConfig
from cbatch.base.errors import ConfigError
from cbatch.base.params import SamplingParams
from cbatch.engine.kernel_checks import attention as attention_checks
from cbatch.engine.kernel_checks.attention import AttentionCall, AttentionChecks
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.model.cpu import CpuModel
from cbatch.runtime.kv_cache import U8, U8_SCALE_BYTES, KVCache, LayerShape, as_numbers, as_stored
from tests.support.architectures import make_architecture
from tests.support.attention_cases import AttentionCase
from tests.support.generation import generate
from tests.support.programs import logits_in_chunks, saved_model, typical_error
from tests.support.samples import sampled
from tests.support.tiny_models import loaded, make_fast_engine, make_network, make_prompts

from .test_cpu_attention import make_batch, poisoned_cache

pytestmark = pytest.mark.kernels

CPU = torch.device("cpu")
HYBRID = "qwen3_5_text"
"""Gated delta nets and attention."""
CASE = AttentionCase(LayerShape(2, 48, 32), group=3, block_size=32)
TABLE = [[2, 0, 3, 5], [1] * 4]
LENGTH = 70


def random_kv(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    layer = CASE.layer
    key, value = (
        torch.randn(LENGTH, layer.heads, dim, generator=generator) for dim in (layer.key_dim, layer.value_dim)
    )
    size = torch.randn(LENGTH, 1, 1, generator=generator).exp()  # scales differ from token to token
    return (key * size).to(dtype), (value / size).to(dtype)


def stored_in_chunks(cuts: list[int], dtype: torch.dtype) -> KVCache:
    backend, (key, value) = CpuAttention(U8), random_kv(dtype)
    kv_cache = poisoned_cache(backend, CASE.layer, 6, CASE.block_size, dtype)
    for start, stop in pairwise(cuts):  # beside another sequence that decodes
        metadata = backend.prepare(make_batch([(1, start, start + 1), (0, start, stop)], TABLE, 32), 32)
        new = (torch.cat([part[:1] + 1, part[start:stop]]) for part in (key, value))
        backend.store_kv(kv_cache.keys[0], kv_cache.values[0], *new, metadata)
    return kv_cache


def numbers_of(cache: Tensor, dim: int, *, of_values: bool) -> tuple[Tensor, Tensor]:
    """Bytes [T, heads, dim] and scales [T, heads] of the first sequence."""
    blocks = cache[TABLE[0]]
    numbers, scales = blocks[..., :-U8_SCALE_BYTES, :], blocks[..., -U8_SCALE_BYTES:, :].flatten(-2).contiguous()
    if of_values:  # block, head, panel, part, step, number, token -> block, panel, step, token; head; part, number
        split = numbers.unflatten(-2, (dim // 16, 16)).flatten(-2).unflatten(-1, (4, 16, 4))
        numbers = split.permute(0, 2, 4, 6, 1, 3, 5)
    else:  # block, head, panel, word, token, number -> block, panel, token; head; word, number
        numbers = numbers.flatten(-2).unflatten(-1, (dim // 4, 16, 4)).permute(0, 2, 4, 1, 3, 5)
    heads = cache.shape[1]
    return (
        numbers.reshape(-1, heads, dim)[:LENGTH],
        scales.view(torch.float32).permute(0, 2, 3, 1).reshape(-1, heads)[:LENGTH],
    )


def test_rounding() -> None:
    """Guards the conversion: half a step is lost at most, the largest stays, signs and zeros too, NaN shows."""
    numbers = (
        torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 50)[:, None, None]
    )
    read = as_numbers(as_stored(numbers, U8))
    largest = numbers.abs().amax(-1, keepdim=True)
    assert ((read - numbers).abs() <= largest / 253.9).all() and (read.sign() * numbers.sign() >= 0).all()
    torch.testing.assert_close(read.abs().amax(-1, keepdim=True), largest)
    assert not as_numbers(as_stored(torch.zeros(2, 16), U8)).any()
    assert as_numbers(as_stored(torch.tensor([[1.0, torch.nan]]), U8)).isnan().all()


@pytest.mark.parametrize("dtype", sampled([torch.float32, torch.bfloat16], 1, keep=[torch.float32]), ids=str)
def test_stored_bytes(dtype: torch.dtype) -> None:
    """Guards what kernels write: each number in its place as plain torch rounds it, the same bits in any chunks."""
    whole = stored_in_chunks([0, LENGTH], dtype)
    for side, new in enumerate(random_kv(dtype)):
        part = (whole.keys, whole.values)[side][0]
        found, scales = numbers_of(part, new.shape[-1], of_values=bool(side))
        expected = as_stored(new, U8)
        assert torch.equal(scales, expected[..., -U8_SCALE_BYTES:].contiguous().view(torch.float32)[..., 0])
        assert torch.equal(found, expected[..., :-U8_SCALE_BYTES])
    for cuts in ([0, 48, LENGTH], [0, 16, 17, 21, 53, 64, LENGTH], list(range(LENGTH + 1))):
        other = stored_in_chunks(cuts, dtype)
        for one, same, of_values in (whole.keys, other.keys, False), (whole.values, other.values, True):
            dim = one[0].shape[3] - U8_SCALE_BYTES
            for found, wanted in zip(
                numbers_of(one[0], dim, of_values=of_values), numbers_of(same[0], dim, of_values=of_values), strict=True
            ):
                assert torch.equal(found, wanted)


def attended(kv_cache: KVCache, backend: Any, dtype: torch.dtype) -> Tensor:
    query = torch.randn(1, 6, 48, generator=torch.Generator().manual_seed(5)).to(dtype)
    metadata = backend.prepare(make_batch([(0, LENGTH - 1, LENGTH)], TABLE, 32), 32)
    found: Tensor = backend.attend(query, kv_cache.keys[0], kv_cache.values[0], metadata, scale=0.05)
    return found.float()


def test_attention_equals_float64() -> None:
    """Guards the bytes and scales that attention reads: it loses nothing that rounding has not."""
    kv_cache, (key, value) = stored_in_chunks([0, LENGTH], torch.float32), random_kv()
    query = torch.randn(1, 6, 48, generator=torch.Generator().manual_seed(5)).double()
    key, value = (as_numbers(as_stored(part, U8)).double().repeat_interleave(3, 1) for part in (key, value))
    weights = torch.softmax(torch.einsum("qhd,thd->qht", query, key) * 0.05, -1)
    expected = torch.einsum("qht,thd->qhd", weights, value).float()
    error = float((attended(kv_cache, CpuAttention(U8), torch.float32) - expected).abs().max() / expected.std())
    assert error < 1e-3


@pytest.mark.parametrize("kind", sampled(["gemma2", "llama", "gpt_oss", "deepseek_v3", HYBRID], 1, keep=["gemma2"]))
def test_programs_give_the_same_bits_in_any_chunks(kind: str) -> None:
    """Guards the fused write of a program, in every form of attention: near the logits of a cache of floats, and the
    same bits whether a prompt is cut."""
    saved = saved_model(kind)
    model = CpuModel(saved.config, saved.tensors, torch.float32)
    found = logits_in_chunks(model, CpuAttention(U8))
    assert torch.equal(found, logits_in_chunks(model, CpuAttention(U8), chunks=[0, 16, 60]))
    assert 1e-5 < typical_error(found, logits_in_chunks(model, CpuAttention())) < 0.1


@cache
def engine_network(kind: str) -> Any:
    if kind == HYBRID:
        return make_architecture(HYBRID)
    return make_network("llama", hidden_size=64, intermediate_size=96, head_dim=16, max_position_embeddings=256)


@pytest.mark.parametrize("kind", sampled(["llama", "transformers", HYBRID], 2, keep=["llama", "transformers"]))
def test_requests_do_not_depend_on_company(kind: str) -> None:
    """Guards sampled tokens and their probabilities: alone, in small steps, preempted, behind a cached prefix, `n`."""
    begin, *prompts = make_prompts([40, 3, 70, 17])
    prompts = [*(begin + prompt for prompt in prompts), begin]
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=5, n=2, logprobs=1)
    expected = None
    for settings in (
        {"max_seqs": 1, "prefix_cache": False, "kv_blocks": 64},
        {"max_batch_tokens": 7, "kv_blocks": 64},
        {"kv_blocks": 20},
        {"kv_blocks": 64},
    ):
        config = {"block_size": 16, "device": "cpu", "kv_dtype": "u8", "max_seqs": 8} | settings
        if kind == "transformers":
            engine = SteppingEngine(EngineConfig(**config), loaded(engine_network("llama")))
        else:
            engine = make_fast_engine(engine_network(kind), **config)
        with engine:
            assert engine.attention == "cpu" and engine.runner.kv_cache.keys[0].dtype == U8
            found = []
            for prompt in prompts if settings.get("max_seqs") == 1 else [None]:
                done = generate(engine, prompts if prompt is None else [prompt], params)
                choices = [choice for completion in done for choice in completion.choices]
                # Products of torch may depend on the batch, so that probabilities do.
                found += [(one.token_ids, None if kind == "transformers" else one.logprobs) for one in choices]
        assert found == (expected := expected or found)


@pytest.mark.parametrize(("name", "bytes_of_head"), [("u8", 16 + 4), ("fp8", 16)])
def test_an_engine_counts_its_bytes(name: str, bytes_of_head: int) -> None:
    """Guards what counts the cache: bytes of a token, blocks that fit, what people are shown, `--resume`'s key."""
    network = engine_network("llama")
    config: dict[str, Any] = {"kv_blocks": None, "kv_cache_memory": "1MiB", "max_seqs": 400}
    config["attention"] = "reference" if name == "fp8" else "auto"
    heads = network.config.num_key_value_heads * network.config.num_hidden_layers
    with make_fast_engine(network, **config) as plain, make_fast_engine(network, kv_dtype=name, **config) as small:
        assert small.limits.kv_bytes_per_token == 2 * heads * bytes_of_head
        assert plain.limits.kv_bytes_per_token == 2 * heads * 16 * 4
        assert small.limits.num_blocks == 2**20 // (16 * small.limits.kv_bytes_per_token) > 3 * plain.limits.num_blocks
        kv_cache = small.runner.kv_cache
        assert sum(part.nbytes for part in (*kv_cache.keys, *kv_cache.values)) <= 2**20
        assert f"{small.limits.cache_tokens:,} tokens" in small.describe()["KV cache"]
        assert small.fingerprint != plain.fingerprint
        (output,) = generate(small, make_prompts([20]), SamplingParams(max_tokens=6))
        assert len(output.token_ids) == 6


def test_checks_know_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `info --check`: it compares with what the bytes stand for."""
    monkeypatch.setattr(attention_checks, "CHUNKS", {"decode": [(0, 1), (40, 41)], "prefill": [(3, 20)]})
    call = AttentionCall(6, CASE.layer, 0.05)
    assert all(one.agrees for one in AttentionChecks(CpuAttention(U8), 32, torch.float32, CPU, [call]).run())


def test_what_has_no_u8_cache_says_so() -> None:
    """Guards the option: a GPU, the reference and sizes that the panels cannot hold are refused in one sentence."""
    for attention, device in ("auto", "cuda"), ("reference", "cpu"), ("triton", "cuda"):
        with pytest.raises(ConfigError, match="Only the CPU's attention kernels have a KV cache in u8"):
            check_kv_dtype("u8", attention, torch.device(device))
    assert check_kv_dtype("u8", "auto", CPU) == check_kv_dtype("u8", "cpu", CPU) == U8
    with pytest.raises(ConfigError, match=r"do not serve this model .* choose --kv-dtype auto"):
        SteppingEngine(EngineConfig(block_size=8, kv_dtype="u8", device="cpu"), loaded(engine_network("llama")))
    with pytest.raises(ConfigError, match="do not serve this model"):
        odd = make_network("llama", head_dim=18, hidden_size=72)
        SteppingEngine(EngineConfig(kv_dtype="u8", device="cpu"), loaded(odd))
    assert ReferenceAttention(U8).block_shapes(LayerShape(2, 64, 32), 16, U8) == ((16, 2, 68), (16, 2, 36))
