"""Steps of made-up tokens, caches to run them on, and random numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cbatch.attention.base import AttentionBackend
from cbatch.base.params import SamplingParams
from cbatch.base.request import Request
from cbatch.model.base import Model
from cbatch.model.cuda import CudaModel
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.kv_cache import U8, KVCache, LayerShape
from cbatch.runtime.state_pool import StatePool, StepStates
from cbatch.schedule.sequence import TokenSequence

_SPARE_BLOCKS = 3


def ragged_batch(
    chunks: Sequence[tuple[int, int]],
    block_size: int,
    device: torch.device,
    vocabulary: int = 1,
    lengths: Sequence[int] | None = None,
) -> RaggedBatch:
    """A step of chunks of tokens of every kind. Each of its sequences gets logits, and its blocks lie in no order.

    lengths: of the whole sequences, which have the same tokens and blocks in each of their steps; by default they end
             with their chunks
    """
    starts, stops = [start for start, _ in chunks], [stop for _, stop in chunks]
    needed = [-(-length // block_size) for length in lengths or stops]
    counts = np.array(stops) - np.array(starts)
    sequence = np.repeat(np.arange(len(chunks)), counts)
    positions = np.concatenate([np.arange(start, stop) for start, stop in chunks])
    tables = np.zeros((len(chunks), max(needed)), np.int32)
    free = np.random.default_rng(0).permutation(sum(needed) + _SPARE_BLOCKS)
    for row, count in enumerate(needed):
        tables[row, :count], free = free[:count], free[count:]
    slots = tables[sequence, positions // block_size] * np.int64(block_size) + positions % block_size
    tokens = (positions * 7919 + sequence * 104729 + 13) % vocabulary
    return RaggedBatch(tokens, positions, slots, counts.cumsum() - 1, tables, starts, stops, device)


def num_blocks(chunks: Sequence[tuple[int, int]], block_size: int) -> int:
    """Blocks of a cache for `ragged_batch`."""
    return sum(-(-stop // block_size) for _, stop in chunks) + _SPARE_BLOCKS


def empty_cache(
    attention: AttentionBackend, layers: list[LayerShape], blocks: int, block_size: int, dtype: torch.dtype,
    device: torch.device | Sequence[torch.device],
) -> KVCache:  # fmt: skip
    """A cache in which nobody wrote: a kernel that reads too far gives NaN."""
    dtype = attention.kv_dtype or dtype
    shapes = [attention.block_shapes(layer, block_size, dtype) for layer in layers]
    kv_cache = KVCache(shapes, blocks, block_size, dtype, device)
    for tensor in (*kv_cache.keys, *kv_cache.values):
        tensor.fill_(255 if dtype == U8 else math.nan)  # a scale of these bytes is NaN
    return kv_cache


def empty_states(model: Model, sequences: int) -> StatePool:
    """Slots for sequences that begin, every second one from the second on; in the others nobody wrote."""
    pool = StatePool(model.states, 2 * sequences + 1, model.state_devices)
    for tensor in pool.tensors:
        tensor.fill_(math.nan)
    pool.zero(range(1, 2 * sequences, 2))
    return pool


def made_up_states(pool: StatePool, batch: RaggedBatch) -> StepStates:
    """The slots of a step over such a pool; a snapshot of the first sequence is made after one token."""
    count = len(batch.stops)
    snapshots = np.full(count, -1)
    snapshots[0] = pool.num_slots - 1
    return StepStates(pool, np.arange(1, 2 * count, 2), np.ones(count, np.int64), snapshots)


def made_up_adapters(model: Model, batch: RaggedBatch) -> RaggedBatch:
    """The step with adapters for some of its tokens, if the model has any on the path of a GPU."""
    count = model.num_adapters if isinstance(model, CudaModel) else 0
    return replace(batch, adapters=np.arange(len(batch.ids)) % (count + 1)) if count else batch


def made_up_sequences(params: Sequence[SamplingParams], seeds: Iterable[int]) -> list[TokenSequence]:
    """An output of a request with each of these parameters."""
    requests = [Request(params=one, max_new_tokens=1, seed=seed) for one, seed in zip(params, seeds, strict=True)]
    return [TokenSequence(number, [1], request) for number, request in enumerate(requests)]


def draw(seed: int, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random numbers that are the same on every device of a kind."""
    generator: Any = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(dtype)
