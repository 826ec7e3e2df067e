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

from cbatch.engine.attention.base import AttentionBackend
from cbatch.engine.kernels.cpu.decoder import Buffers, Inputs, Outputs, Sizes, step
from cbatch.engine.kernels.cpu.linear import new_tiles
from cbatch.engine.kernels.cpu.pages import cut, new_workspace
from cbatch.engine.kernels.cpu.team import shared_team
from cbatch.engine.kernels.cpu.tensors import block_shapes, fits, pages_of
from cbatch.engine.kernels.cpu.tile import COLUMNS, LANES, filled_up
from cbatch.engine.models.base import Linears
from cbatch.engine.models.family import Unfit, check_tensors, read_family
from cbatch.engine.models.packing import pack_weights
from cbatch.engine.runtime.aligned import empty
from cbatch.engine.runtime.batch import Likeliest, Logits, RaggedBatch
from cbatch.engine.runtime.kv_cache import KVPool, LayerShape
from cbatch.engine.runtime.threads import num_threads

_KEPT_ROWS = 256
"""Rows of logits for which room is kept from step to step."""

_Room = tuple[NDArray[np.float32], Tensor]
"""Memory for logits [R, columns of a packed matrix], and what of it are logits [R, vocabulary]."""


class Decoder:
    """A model of the Llama family, ready to run ragged batches over a paged cache."""

    has_own_threads = True

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], dtype: torch.dtype, *, quantize: bool = False
    ) -> None:
        """Raises Unfit where another path has to serve the model.

        tensors:  the weights by their names in the files
        quantize: keep matrices as int8, and compute in bfloat16
        """
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
        if quantize and dtype != torch.bfloat16:
            raise Unfit(f"int8 weights are multiplied in bfloat16, not in {dtype}")
        self.num_parameters = check_tensors(family, tensors)
        self._weights = pack_weights(family, tensors, dtype, quantize)
        self._sizes = Sizes(family.heads, family.eps, family.head_dim**-0.5, np.array(family.windows))
        self._team = shared_team(num_threads())
        self._element = np.dtype(np.float32 if dtype == torch.float32 else np.uint16)
        self._work = new_workspace(
            self._team.size, family.heads // family.kv_heads, family.head_dim, family.head_dim, self._element
        )
        self._tiles = new_tiles(
            self._team.size,
            self._weights.matrices.dtype,
            max(family.hidden, family.inner, family.heads * family.head_dim),
        )
        self._buffers = self._make_buffers(16)
        self._logits = np.empty((0, 0), np.float32)
        self._rooms: dict[int, _Room] = {}
        self._cosines, self._sines = self._rotations(16)
        self._warm_up()

    @property
    def weight_bytes(self) -> int:
        return sum(array.nbytes for array in self._weights if isinstance(array, np.ndarray))

    @property
    def linears(self) -> Linears:
        family, weights = self.family, self._weights
        head = family.vocabulary * family.hidden
        bytes_ = weights.matrices.nbytes
        return Linears(bytes_, self.num_parameters - head * (1 if family.is_tied else 2), head)

    def forward(self, batch: RaggedBatch, pool: KVPool, attention: AttentionBackend) -> Logits:
        """Logits [R, vocabulary] float32 of the rows that are wanted, which hold until the next step."""
        outputs, logits = self._room_for_outputs(len(batch.rows))
        self._team.run(step, *self._arguments(batch, pool, outputs))
        return Logits(logits, Likeliest(outputs.tokens, outputs.largest))

    def _warm_up(self) -> None:
        """Compiles the kernels, or finds them in their cache."""
        one = np.zeros(1, np.int64)
        batch = RaggedBatch(one, one, one, one, np.zeros((1, 1), np.int32), [0], [1], self.device)
        pool = KVPool([block_shapes(self.layers[0], LANES, self.dtype)] * 2, 1, LANES, self.dtype, self.device)
        self._team.prepare(step, *self._arguments(batch, pool, self._room_for_outputs(1)[0]))

    def _arguments(self, batch: RaggedBatch, pool: KVPool, outputs: Outputs) -> tuple[Any, ...]:
        """What the kernel of a step takes behind the board and the thread."""
        family, length, furthest = self.family, len(batch.ids), max(batch.stops)
        if length > len(self._buffers.stream):
            self._buffers = self._make_buffers(length)
        if furthest > len(self._cosines):
            self._cosines, self._sines = self._rotations(2 * furthest)
        inputs = Inputs(
            batch.ids,
            batch.positions,
            self._cosines,
            self._sines,
            np.arange(length),
            batch.rows,
        )
        shape = family.heads, family.heads // family.kv_heads, family.head_dim
        slices = cut(batch.tables, batch.starts, batch.stops, batch.slots, *shape)
        buffers = Buffers(*(array[:length] for array in self._buffers))
        if pool.kept is None:
            if pool.stacks is None:
                raise ValueError("The layers' caches have to lie in one tensor.")
            pool.kept = pages_of(*pool.stacks)
        return self._weights, self._sizes, pool.kept, slices, inputs, buffers, self._tiles, self._work, outputs

    def _rotations(self, places: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Cosines and sines of the angles of so many places, by which queries and keys are turned."""
        angles = torch.arange(places)[:, None].float() * self.family.frequencies
        return angles.cos().numpy(), angles.sin().numpy()

    def _room_for_outputs(self, rows: int) -> tuple[Outputs, Tensor]:
        """What so many rows give, and its logits [R, vocabulary] as a tensor."""
        room, logits = self._room_for_logits(rows)
        return Outputs(room, self.vocab_size, np.empty(rows, np.int64), np.empty(rows, np.float32)), logits

    def _room_for_logits(self, rows: int) -> _Room:
        """Room for so many rows of logits, which is kept.

        Fresh memory would have to be cleared by the system in every step, which takes as long as the product, and even
        a view of torch's takes a while where the weights have just gone through the processor's caches. Steps of more
        rows than are kept, for prompts that are scored or very many seats, pay that.
        """
        if rows > _KEPT_ROWS:
            return self._as_room(empty((rows, filled_up(self.vocab_size)), np.float32))
        if rows > len(self._logits):
            self._logits, self._rooms = empty((rows, filled_up(self.vocab_size)), np.float32), {}
        if rows not in self._rooms:
            self._rooms[rows] = self._as_room(self._logits[:rows])
        return self._rooms[rows]

    def _as_room(self, memory: NDArray[np.float32]) -> _Room:
        return memory, torch.from_numpy(memory)[:, : self.vocab_size]

    def _make_buffers(self, length: int) -> Buffers:
        family = self.family
        attended = family.heads * family.head_dim
        mixed = filled_up(attended + 2 * family.kv_heads * family.head_dim)
        return Buffers(
            empty((length, family.hidden), np.float32),
            empty((length, family.hidden), self._element),
            empty((length, mixed), np.float32),
            empty((length, attended), self._element),
            empty((length, attended), self._element),
            empty((length, family.inner), self._element),
        )
