"""Checks the kernels on this device against float64, torch and transformers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from cbatch.engine import SamplingParams
from cbatch.engine.attention.reference import ReferenceAttention
from cbatch.engine.attention.triton import TritonAttention
from cbatch.engine.models.cuda import CudaModel
from cbatch.engine.runtime.kv_cache import KVCache
from cbatch.engine.runtime.transfer import to_device
from cbatch.engine.sampling.sampler import Sampler, SamplingMetadata, _draw, pack_sampling_params
from cbatch.engine.scheduler.request import Request
from scripts.benchmarks.models import RandomTensors, make_network
from scripts.benchmarks.shapes import Config
from scripts.gpu.clock import make_batch

BLOCK_SIZE = 16

Check = tuple[str, bool, str]
"""What was checked, whether it is right, and the figure that decided."""

RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 100},
    "softcap and sinks": {"softcap": 20.0, "sinks": True},
}


def check_attention(
    heads: int, kv_heads: int, dim: int, sequences: int, longest: int, device: torch.device
) -> Iterator[Check]:
    """Compares random ragged steps with the reference in float64. Slots that nobody wrote hold NaN."""
    chance = random.Random(1)
    kinds = {"decode": (1, 1), "prefill": (2, longest // 2), "mixed": (1, longest // 4)}
    for kind, (fewest, most) in kinds.items():
        starts = [chance.randint(0, longest) for _ in range(sequences)]
        stops = [
            start + (1 if row % 2 and kind == "mixed" else chance.randint(fewest, most))
            for row, start in enumerate(starts)
        ]
        for rule, settings in RULES.items():
            error = _attention_error(starts, stops, heads, kv_heads, dim, settings, device)
            yield f"attention, {kind}, {rule}", error < 0.02, f"largest error {error:.4f} of the largest value"


def _attention_error(
    starts: list[int],
    stops: list[int],
    heads: int,
    kv_heads: int,
    dim: int,
    settings: dict[str, Any],
    device: torch.device,
) -> float:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16  # the interpreter has no bfloat16
    blocks = sum(-(-stop // BLOCK_SIZE) for stop in stops) + 3
    attention, reference = TritonAttention(device), ReferenceAttention()
    keys, values = (
        torch.full((blocks, kv_heads, BLOCK_SIZE, dim), float("nan"), dtype=dtype, device=device) for _ in range(2)
    )
    past = make_batch([0] * len(stops), stops, blocks, BLOCK_SIZE, 10, device)
    generator = torch.Generator(device).manual_seed(0)

    def draw(tokens: int, count: int) -> Tensor:
        return torch.randn(tokens, count, dim, generator=generator, device=device).to(dtype)

    tokens = len(past.input_ids)
    attention.store_kv(
        keys, values, draw(tokens, kv_heads), draw(tokens, kv_heads), attention.prepare(past, BLOCK_SIZE)
    )
    batch = make_batch(starts, stops, blocks, BLOCK_SIZE, 10, device)
    query = draw(len(batch.input_ids), heads)
    sinks = torch.ones(heads, device=device) if settings.get("sinks") else None
    options = {**settings, "sinks": sinks, "scale": dim**-0.5}
    found = attention.attend(query, keys, values, attention.prepare(batch, BLOCK_SIZE), **options)
    keys, values = (cache.transpose(1, 2).double().contiguous() for cache in (keys, values))
    options["sinks"] = None if sinks is None else sinks.double()
    expected = reference.attend(query.double(), keys, values, reference.prepare(batch, BLOCK_SIZE), **options)
    error = (found.double() - expected).abs().amax() / expected.abs().amax()
    return float(error) if bool(found.isfinite().all()) else float("inf")


def check_model(name: str, config: Config, device: torch.device) -> Check:
    """Checks that the logits of a few layers are about as near to float32 as transformers' own in the same dtype."""
    config = config | {"num_hidden_layers": min(4, config["num_hidden_layers"])}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tensors = RandomTensors(config, device, torch.bfloat16)
    prompts = [37, 12, 130]
    batch = make_batch([0] * len(prompts), prompts, 32, BLOCK_SIZE, config["vocab_size"], device)
    decoder, attention = CudaModel(config, tensors, dtype, device), TritonAttention(device)
    shapes = [attention.block_shapes(layer, BLOCK_SIZE, dtype) for layer in decoder.layers]
    kv_cache = KVCache(shapes, 32, BLOCK_SIZE, dtype, device)
    with torch.inference_mode():
        ours = decoder.forward(batch, kv_cache, attention).values.log_softmax(-1)
        exact, theirs = (
            torch.cat([network(part[None]).logits[0, -1:] for part in torch.split(batch.input_ids, prompts)])
            for network in (make_network(config, tensors, kind, device) for kind in (torch.float32, dtype))
        )
    exact, theirs = exact.float().log_softmax(-1), theirs.float().log_softmax(-1)
    mine, other = ((logits - exact).square().mean().sqrt().item() for logits in (ours, theirs))
    is_right = mine <= 1.2 * other + 1e-5
    return f"{name}, logits", is_right, f"error {mine:.5f}, transformers' own in {dtype} {other:.5f}"


def check_sampling(rows: int, vocabulary: int, device: torch.device) -> Check:
    """Compares tokens drawn from random logits with the definition, which sorts."""
    chance = random.Random(2)
    kinds: list[dict[str, Any]] = [{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.02}, {"top_k": 200, "top_p": 0.95}]
    requests = cast(
        list[Request],
        [
            SimpleNamespace(
                params=SamplingParams(temperature=chance.choice([0.5, 1.0, 1.5]), **kinds[row % len(kinds)]),
                seed=row,
                sample_index=0,
                token_ids=[0] * chance.randint(1, 1000),
            )
            for row in range(rows)
        ],
    )
    logits = 3 * torch.randn(rows, vocabulary, device=device, generator=torch.Generator(device).manual_seed(0))
    positions = [len(request.token_ids) for request in requests]
    (words,) = to_device([pack_sampling_params(requests, positions)], device)
    tokens, _ = Sampler(device, kernel=True).sample_on_device(logits, words)
    expected = _draw(logits, SamplingMetadata.build(requests, positions, device))
    same = int((tokens == expected).sum())
    return "sampling", same >= 0.99 * rows, f"{same} of {rows} tokens are those of the definition"


def check_all(shapes: dict[str, Config], device: torch.device) -> Iterator[Check]:
    sequences, longest = (32, 1500) if device.type == "cuda" else (4, 60)
    for name, config in shapes.items():
        sizes = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        for what, is_right, figure in check_attention(*sizes, sequences, longest, device):
            yield f"{name}, {what}", is_right, figure
        yield check_model(name, config, device)
    yield check_sampling(64 if device.type == "cuda" else 5, max(c["vocab_size"] for c in shapes.values()), device)
