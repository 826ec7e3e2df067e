"""Sparse attention with an index: indexers are served sequence by sequence, over pages of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cbatch.attention.reference import ReferenceAttention
from cbatch.base.errors import ConfigError
from cbatch.base.params import SamplingParams
from cbatch.engine.kernel_checks.made_up_steps import ragged_batch
from cbatch.model.hf.attention_calls import placeholder_mask
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.kv_cache import KVCache, LayerShape
from tests.support.architectures import make_architecture
from tests.support.generation import generate
from tests.support.tiny_models import make_engine, make_prompts


@pytest.fixture(scope="module")
def network() -> Any:
    return make_architecture("deepseek_v32")


def test_keys_of_indexers_are_counted_and_cached(network: Any) -> None:
    """Guards memory and prefixes: an indexer's keys are paged like the others, so a shared prefix has them."""
    with make_engine(network) as engine:
        assert engine.attention == "reference"
        assert [layer.value_dim for layer in engine.model.layers].count(0) == 2
        [prompt] = make_prompts([40])
        params = SamplingParams(max_tokens=8)
        first, second = (generate(engine, [prompt], params)[0] for _ in range(2))
        assert second.usage.cached_tokens > 30 and list(first.token_ids) == list(second.token_ids)


def test_other_backends_are_refused_by_name(network: Any) -> None:
    """Guards a user who names a backend: it must not be replaced in silence."""
    with pytest.raises(ConfigError, match="sparse attention"):
        make_engine(network, attention="cpu", block_size=16)


def test_chosen_positions_are_all_that_a_token_sees() -> None:
    """Guards `attend_to`: positions that were not chosen, -1, and chosen ones that come later do not count."""
    generator = torch.Generator().manual_seed(0)
    attention, block_size = ReferenceAttention(), 4
    batch: RaggedBatch = ragged_batch([(0, 6), (0, 3)], block_size, torch.device("cpu"))
    shapes = [attention.block_shapes(LayerShape(1, 8, 8), block_size, torch.float32)]
    cache = KVCache(shapes, 16, block_size, torch.float32, torch.device("cpu"))
    query, key, value = (torch.randn(9, 1, 8, generator=generator) for _ in range(3))
    metadata = attention.prepare(batch, block_size)
    attention.store_kv(cache.keys[0], cache.values[0], key, value, metadata)
    indices = torch.tensor([[0, 5], [0, 5], [2, -1], [1, 3], [4, 0], [5, 2], [0, 1], [1, 2], [2, 2]])
    out = attention.attend_to(indices, query, cache.keys[0], cache.values[0], metadata, scale=1.0)
    for row, (first, position) in enumerate([*((0, p) for p in range(6)), *((6, p) for p in range(3))]):
        seen = sorted({place for place in indices[row].tolist() if 0 <= place <= position})
        keys, values = key[first:, 0][seen], value[first:, 0][seen]
        expected = torch.softmax(query[row, 0] @ keys.T, dim=-1) @ values
        torch.testing.assert_close(out[row, 0], expected)


def test_a_placeholder_for_masks_takes_no_memory() -> None:
    """Guards long steps: a mask that nobody reads must not take a byte for each pair of tokens."""
    mask = placeholder_mask(q_length=100_000, kv_length=100_000)
    assert mask.shape == (1, 1, 100_000, 100_000) and mask.untyped_storage().nbytes() == 1
