"""Kinds of attention with which every backend is tested, and steps of chunks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.kv_cache import LayerShape

ScheduledChunk = tuple[int, int, int]
"""Sequence, first token, end."""


@dataclass(frozen=True)
class AttentionCase:
    layer: LayerShape
    group: int = 1
    block_size: int = 16
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: bool = False

    @property
    def options(self) -> dict[str, object]:
        """Arguments of `attend`, except for the sinks."""
        return {"scale": 0.3, "window": self.window, "chunk": self.chunk, "softcap": self.softcap}


def make_batch(
    chunks: list[ScheduledChunk], tables: list[list[int]], block_size: int, device: torch.device
) -> RaggedBatch:
    """A step of chunks of sequences with these blocks."""
    places = [(one, place) for one, start, stop in chunks for place in range(start, stop)]
    width = max((len(tables[one]) for one, _, _ in chunks), default=1)
    slots = [tables[one][place // block_size] * block_size + place % block_size for one, place in places]
    padded = [tables[one] + [0] * (width - len(tables[one])) for one, _, _ in chunks]
    nothing, positions = np.zeros(len(places), np.int64), np.array([place for _, place in places], np.int64)
    starts, stops = [start for _, start, _ in chunks], [stop for _, _, stop in chunks]
    blocks = np.array(padded, np.int32).reshape(-1, width)
    return RaggedBatch(nothing, positions, np.array(slots, np.int64), nothing[:1], blocks, starts, stops, device)
