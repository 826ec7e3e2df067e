"""Runs a model with recurrent layers step by step, without an engine: sequences in any chunks, each with its slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from cbatch.attention.base import AttentionBackend
from cbatch.model.base import Model
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.state_pool import StatePool, StateShape, StepStates
from tests.support.programs import BLOCK_SIZE

_BLOCKS = 8
"""Of each sequence."""


@dataclass
class Chunk:
    """The next tokens of a sequence.

    snapshot: after how many of them its state is copied, and to which slot
    """

    sequence: int
    tokens: list[int]
    snapshot: tuple[int, int] = (0, -1)


@dataclass
class Runner:
    """Sequences have the cache's blocks and the pool's slots by their numbers; what nobody owns is NaN.

    slots: of sequences that have another one than their number
    """

    model: Model
    attention: AttentionBackend
    sequences: int
    extra_slots: int = 1
    state_dtype: torch.dtype = torch.float32
    slots: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        model = self.model
        shapes = [self.attention.block_shapes(layer, BLOCK_SIZE, model.dtype) for layer in model.layers]
        self.kv_cache = KVCache(shapes, self.sequences * _BLOCKS, BLOCK_SIZE, model.dtype, model.layer_devices)
        states = [StateShape(state.shape, self.state_dtype) for state in model.states]
        self.pool = StatePool(states, self.sequences + self.extra_slots, model.device)
        for tensor in (*self.kv_cache.keys, *self.kv_cache.values, *self.pool.tensors):
            tensor.fill_(torch.nan)
        self.pool.zero(range(self.sequences))
        self.lengths = [0] * self.sequences

    def step(self, chunks: Sequence[Chunk]) -> Tensor:
        """Logits [T, vocabulary] of all tokens of the chunks."""
        with torch.inference_mode():
            logits = self.model.forward(self.batch(chunks), self.kv_cache, self.attention).values.float().clone()
        for chunk in chunks:
            self.lengths[chunk.sequence] += len(chunk.tokens)
        return logits

    def batch(self, chunks: Sequence[Chunk]) -> RaggedBatch:
        starts = [self.lengths[chunk.sequence] for chunk in chunks]
        stops = [start + len(chunk.tokens) for start, chunk in zip(starts, chunks, strict=True)]
        positions = np.concatenate([np.arange(*span) for span in zip(starts, stops, strict=True)])
        numbers = np.array([chunk.sequence for chunk in chunks])
        tables = (numbers[:, None] * _BLOCKS + np.arange(_BLOCKS)).astype(np.int32)
        owners = np.repeat(numbers, [len(chunk.tokens) for chunk in chunks])
        states = StepStates(
            self.pool,
            np.array([self.slots.get(chunk.sequence, chunk.sequence) for chunk in chunks], np.int64),
            *(np.array([chunk.snapshot[part] for chunk in chunks], np.int64) for part in (0, 1)),
        )
        return RaggedBatch(
            ids=np.concatenate([np.array(chunk.tokens, np.int64) for chunk in chunks]),
            positions=positions,
            slots=owners * _BLOCKS * BLOCK_SIZE + positions,
            rows=np.arange(len(positions)),
            tables=tables,
            starts=starts,
            stops=stops,
            device=self.model.device,
            states=states,
        )
