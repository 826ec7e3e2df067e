"""Attention on the CPU over the pages where they lie, for models of transformers.

The fast path of the Llama family calls the same kernels from its own step (`models/decoder.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.engine.kernels.cpu.attention import attend_layer, store_layer
from cbatch.engine.kernels.cpu.pages import Rule, Slices, Workspace, cut, new_workspace
from cbatch.engine.kernels.cpu.team import shared_team
from cbatch.engine.kernels.cpu.tensors import as_array, block_shapes, pages_of
from cbatch.engine.runtime.batch import RaggedBatch
from cbatch.engine.runtime.kv_cache import LayerShape, Shape
from cbatch.engine.runtime.threads import num_threads


@dataclass(slots=True)
class Metadata:
    """What the layers of a step share: its slices, cut up for each shape of heads."""

    tables: NDArray[np.int32]
    starts: Sequence[int]
    stops: Sequence[int]
    slots: NDArray[np.int64]
    cuts: dict[tuple[int, int, int], Slices] = field(default_factory=dict)

    def cut(self, heads: int, group: int, value_dim: int) -> Slices:
        kind = heads, group, value_dim
        if kind not in self.cuts:
            self.cuts[kind] = cut(self.tables, self.starts, self.stops, self.slots, *kind)
        return self.cuts[kind]


class CpuAttention:
    """Compiled kernels over panels of keys and values (`cpu/attention.py`)."""

    name = "cpu"
    copies_past = False

    def __init__(self) -> None:
        self._team = shared_team(num_threads())
        self._workspaces: dict[tuple[int, int, int, torch.dtype], Workspace] = {}

    def block_shapes(self, layer: LayerShape, block_size: int, dtype: torch.dtype) -> tuple[Shape, Shape]:
        return block_shapes(layer, block_size, dtype)

    def prepare(self, batch: RaggedBatch, block_size: int) -> Metadata:
        return Metadata(batch.tables, batch.starts, batch.stops, batch.slots)

    def write(self, keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, metadata: Metadata) -> None:
        pages = pages_of(keys[None], values[None])
        self._team.run(store_layer, pages, metadata.cut(1, 1, 0), as_array(new_keys), as_array(new_values))

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        metadata: Metadata,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        pages = pages_of(keys[None], values[None])
        tokens, heads, _ = query.shape
        group = heads // pages.heads
        shape = (group, pages.key_dim, pages.value_dim, query.dtype)
        if shape not in self._workspaces:
            self._workspaces[shape] = new_workspace(self._team.size, *shape[:3], pages.keys.dtype)
        nothing = np.empty(0, np.float32)
        rule = Rule(scale, window or 0, softcap or 0.0, nothing if sinks is None else sinks.float().numpy())
        out = keys.new_empty(tokens, heads * pages.value_dim)
        slices = metadata.cut(heads, group, pages.value_dim)
        self._team.run(
            attend_layer, pages, slices, rule, as_array(query.flatten(1).to(keys.dtype)), as_array(out),
            self._workspaces[shape],
        )  # fmt: skip
        return out.view(tokens, heads, pages.value_dim).to(query.dtype)
