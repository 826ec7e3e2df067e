"""A CudaModel for tests, and steps for it; without a GPU, Triton's interpreter runs its kernels."""

from __future__ import annotations

from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cbatch.attention.base import AttentionBackend
from cbatch.base.config import EngineConfig
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.kv_cache import KVCache
from tests.support.device import DEVICE
from tests.support.generation import generate_greedily
from tests.support.tiny_models import generate_alone, loaded, make_prompts, network_of

pytest.importorskip("triton", reason="the kernels for a GPU need Triton")

from cbatch.attention.triton import TritonAttention
from cbatch.model.cuda import CudaModel

LENGTHS = [3, 14, 1]
OUTPUTS = [6, 4, 7]


@cache
def expected_of(name: str) -> list[list[int]]:
    return generate_alone(network_of(name), make_prompts(LENGTHS), OUTPUTS)


def model_of(network: Any, dtype: torch.dtype = torch.float32) -> CudaModel:
    return CudaModel(network.config.to_dict(), network.state_dict(), dtype, DEVICE)


def engine_around(
    monkeypatch: pytest.MonkeyPatch, model: CudaModel, attention: AttentionBackend | None = None, **config: Any
) -> SteppingEngine:
    """Makes an engine with a CudaModel, also on a CPU, for which an engine would choose another.

    attention: Triton's by default
    """
    chosen = attention or TritonAttention(DEVICE)
    monkeypatch.setattr("cbatch.model.load_plan.has_fast_path", lambda *_: True)
    monkeypatch.setattr("cbatch.engine.fallback.select_attention", lambda *_: chosen)
    settings: dict[str, Any] = {"block_size": 5, "kv_blocks": 30, "max_seqs": 4, "device": str(DEVICE)} | config
    return SteppingEngine(EngineConfig(**settings), loaded(None, fast_model=model))


def run(engine: SteppingEngine) -> list[list[int]]:
    return generate_greedily(engine, make_prompts(LENGTHS), OUTPUTS)


def batch_of(prompts: list[list[int]], start: int = 0) -> RaggedBatch:
    """Prompts from a token on, each in the two blocks of 16 tokens that follow those of the one before."""
    parts = [prompt[start:] for prompt in prompts]
    positions = [np.arange(start, len(prompt)) for prompt in prompts]
    ends = np.cumsum([len(part) for part in parts])
    return RaggedBatch(
        ids=np.array(list(chain.from_iterable(parts))),
        positions=np.concatenate(positions),
        slots=np.concatenate([32 * index + position for index, position in enumerate(positions)]),
        rows=ends - 1,
        tables=np.arange(2 * len(prompts), dtype=np.int32).reshape(-1, 2),
        starts=[start] * len(prompts),
        stops=[len(prompt) for prompt in prompts],
        device=DEVICE,
    )


def kv_cache_of(model: CudaModel) -> KVCache:
    shapes = [TritonAttention(DEVICE).block_shapes(layer, 16, model.dtype) for layer in model.layers]
    kv_cache = KVCache(shapes, 8, 16, model.dtype, DEVICE)
    for layer in (*kv_cache.keys, *kv_cache.values):
        layer.fill_(torch.nan)
    return kv_cache


def logits_of(model: CudaModel, batch: RaggedBatch, kv_cache: KVCache) -> Tensor:
    with torch.inference_mode():
        return model.forward(batch, kv_cache, TritonAttention(DEVICE)).values
