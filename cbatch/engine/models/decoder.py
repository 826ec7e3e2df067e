"""The fast path of the Llama family on the CPU: packed weights, and a step that is one call of compiled kernels.

What it computes is what transformers computes for the same files (`models/transformers.py`); it only rounds less: the
residual stream, the sums and the logits are float32 whatever the weights are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.engine.attention.interface import AttentionBackend
from cbatch.engine.batch import RaggedBatch
from cbatch.engine.cpu.attention import cut, new_workspace
from cbatch.engine.cpu.decoder import Buffers, Inputs, Sizes, Weights, step
from cbatch.engine.cpu.linear import interleave, new_tiles, pack
from cbatch.engine.cpu.team import Team
from cbatch.engine.cpu.tensors import as_array, fits, pages_of
from cbatch.engine.cpu.tile import COLUMNS, LANES
from cbatch.engine.kv_pool import KVPool, LayerShape
from cbatch.engine.models.family import Family, Unfit, check_tensors, read_family
from cbatch.engine.models.interface import Linears


class Decoder:
    """A model of the Llama family, ready to run ragged batches over a paged cache."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        """tensors: the weights by their names in the files. Raises Unfit where another path has to serve the model."""
        self.config = config
        self.family = family = read_family(config)
        self.name = str((config.get("architectures") or [family.kind])[0])
        self.kind = family.kind
        self.dtype = dtype
        self.device = torch.device("cpu")
        self.vocab_size = family.vocabulary
        self.max_model_len = family.max_model_len
        self.layers = [LayerShape(family.kv_heads, family.head_dim, family.head_dim)] * family.layers
        self.windows: list[int | None] = [window or None for window in family.windows]
        if not fits(self.layers, LANES, dtype) or family.hidden % COLUMNS or family.inner % LANES:
            raise Unfit(f"its sizes do not suit the kernels, or they do not compute in {dtype}")
        self.num_parameters = check_tensors(family, tensors)
        self._weights = _pack_weights(family, tensors, dtype)
        self._sizes = Sizes(family.heads, family.eps, family.head_dim**-0.5, np.array(family.windows))
        self._team = Team(torch.get_num_threads())
        self._element = self._weights.matrices.dtype
        self._work = new_workspace(
            self._team.size, family.heads // family.kv_heads, family.head_dim, family.head_dim, self._element
        )
        self._tiles = new_tiles(self._team.size, self._element)
        self._buffers = self._make_buffers(16)

    @property
    def weight_bytes(self) -> int:
        return sum(array.nbytes for array in self._weights if isinstance(array, np.ndarray))

    @property
    def linears(self) -> Linears:
        family, weights = self.family, self._weights
        head = family.vocabulary * family.hidden
        bytes_ = weights.matrices.nbytes
        return Linears(bytes_, self.num_parameters - head * (1 if family.is_tied else 2), head)

    def forward(self, batch: RaggedBatch, pool: KVPool, attention: AttentionBackend) -> Tensor:
        """Logits [R, vocabulary] float32 of the rows that are wanted."""
        family, length = self.family, len(batch.input_ids)
        if length > len(self._buffers.stream):
            self._buffers = self._make_buffers(length)
        angles = batch.position_ids[:, None].float() * family.frequencies
        inputs = Inputs(
            batch.input_ids.numpy(),
            angles.cos().numpy(),
            angles.sin().numpy(),
            np.arange(length),
            batch.logit_rows.numpy(),
        )
        tables, slots = batch.block_tables.numpy(), batch.slot_mapping.numpy()
        slices = cut(tables, batch.starts, batch.stops, slots, family.heads // family.kv_heads)
        buffers = Buffers(*(array[:length] for array in self._buffers))
        width = -(-family.vocabulary // COLUMNS) * COLUMNS
        logits = np.empty((len(batch.logit_rows), width), np.float32)
        if pool.stacks is None:
            raise ValueError("The layers' caches have to lie in one tensor.")
        pages = pages_of(*pool.stacks)
        self._team.run(
            step, self._weights, self._sizes, pages, slices, inputs, buffers, self._tiles, self._work, logits
        )
        return torch.from_numpy(logits)[:, : family.vocabulary]

    def _make_buffers(self, length: int) -> Buffers:
        family = self.family
        attended = family.heads * family.head_dim
        mixed = self._weights.bias.shape[1]
        return Buffers(
            np.empty((length, family.hidden), np.float32),
            np.empty((length, family.hidden), self._element),
            np.empty((length, mixed), np.float32),
            np.empty((length, attended), self._element),
            np.empty((length, attended), self._element),
            np.empty((length, family.inner), self._element),
        )


def _pack_weights(family: Family, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Weights:
    def get(name: str) -> NDArray[Any]:
        return as_array(tensors[name].to(dtype))

    def plain(name: str) -> NDArray[Any]:
        return tensors[name].float().numpy()

    parts: list[NDArray[Any]] = []
    starts, columns = [], []
    at = column = 0

    def add(weight: NDArray[Any]) -> tuple[int, int]:
        nonlocal at, column
        packed = pack(weight)
        where = at, column
        parts.append(packed)
        at += packed.size
        column += -(-len(weight) // COLUMNS) * COLUMNS
        return where

    norms, bias, head_norms = [], [], []
    for layer in range(family.layers):
        prefix = f"model.layers.{layer}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        places = [
            add(np.concatenate([get(f"{attention}{x}_proj.weight") for x in "qkv"])),
            add(get(attention + "o_proj.weight")),
            add(interleave(get(mlp + "gate_proj.weight"), get(mlp + "up_proj.weight"))),
            add(get(mlp + "down_proj.weight")),
        ]
        starts.append([place[0] for place in places])
        columns.append([place[1] for place in places])
        norms.append([plain(prefix + "input_layernorm.weight"), plain(prefix + "post_attention_layernorm.weight")])
        width = (family.heads + 2 * family.kv_heads) * family.head_dim
        row = np.zeros(-(-width // COLUMNS) * COLUMNS, np.float32)
        if attention + "q_proj.bias" in tensors:
            row[:width] = np.concatenate([plain(f"{attention}{x}_proj.bias") for x in "qkv"])
        bias.append(row)
        if attention + "q_norm.weight" in tensors:
            head_norms.append([plain(attention + "q_norm.weight"), plain(attention + "k_norm.weight")])
    name = "model.embed_tokens.weight"
    head, column_of_head = add(get(name if family.is_tied else "lm_head.weight"))
    columns.append([column_of_head] * 4)
    matrices = np.concatenate(parts)
    return Weights(
        matrices,
        np.array(starts),
        head,
        np.ones(column, np.float32),
        np.array(columns),
        np.array(bias),
        np.array(norms),
        plain("model.norm.weight"),
        np.array(head_norms) if head_norms else np.empty((0, 2, family.head_dim), np.float32),
        get(name) if not family.is_tied else np.empty((0, family.hidden), matrices.dtype),
        np.zeros(column, np.float32),
    )
