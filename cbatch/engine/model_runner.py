"""Runs a model on ragged batches over the paged KV cache."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import linear

from cbatch.attention.base import AttentionBackend
from cbatch.base.errors import EngineError
from cbatch.engine.cuda_graphs import GraphSizes, StepGraphs, StepParts
from cbatch.engine.followers import Followers
from cbatch.model.base import Model
from cbatch.runtime.batch import Logits, RaggedBatch
from cbatch.runtime.device import is_nvidia
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.process_group import ProcessGroup
from cbatch.runtime.state_pool import StatePool, StateShape
from cbatch.runtime.transfer import computing_on
from cbatch.sample.sampler import Sampler
from cbatch.schedule.limits import StepLimits

_log = logging.getLogger("cbatch")


@dataclass(frozen=True, slots=True)
class Execution:
    """The parts that compute the steps of an engine.

    graphs:   whether steps are captured as CUDA graphs, if the device and the model allow it
    fallback: sentences that say what was stepped down from and why; empty if nothing was
    """

    model: Model
    attention: AttentionBackend
    sampler: Sampler
    graphs: bool
    fallback: str = ""


def stored_states(model: Model, dtype: torch.dtype | None) -> list[StateShape]:
    """The states of a model as they are kept: in `dtype` if that is smaller than the model's own; None: in its own."""
    if dtype is None:
        return model.states
    return [replace(state, dtype=dtype) if dtype.itemsize < state.dtype.itemsize else state for state in model.states]


class ModelRunner:
    """Owns a model, its KV cache and its CUDA graphs until it is closed. Knows nothing of requests.

    followers: other processes, which compute each step together with this one
    """

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        num_blocks: int,
        block_size: int,
        num_slots: int = 0,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        """num_slots, state_dtype: of recurrent states, if the model has any (see `stored_states`)"""
        self.attention = attention
        self.num_blocks = num_blocks
        self.kv_dtype = attention.kv_dtype or model.dtype
        shapes = [attention.block_shapes(layer, block_size, self.kv_dtype) for layer in model.layers]
        kv_cache = KVCache(shapes, num_blocks, block_size, self.kv_dtype, model.layer_devices)
        self.state_pool: StatePool | None = None
        if model.states:
            self.state_pool = StatePool(stored_states(model, state_dtype), num_slots, model.state_devices)
        self._open: tuple[Model, KVCache] | None = model, kv_cache
        self._graphs: StepGraphs | None = None
        self.followers: Followers | None = None

    def step_parts(self, sampler: Sampler, limits: StepLimits) -> StepParts | None:
        """The parts of a step, if steps are to be captured as CUDA graphs and can be."""
        if not limits.graphs or not is_nvidia(self.model.device):
            return None
        model = self.model.capturable
        if model is None or self.attention.graph_buffers is None:
            return None
        return StepParts(model, self.attention, self.kv_cache, sampler, self.state_pool)

    def capture_graphs(
        self, sampler: Sampler, limits: StepLimits, has_room: Callable[[], bool], group: ProcessGroup | None = None
    ) -> None:
        """Captures steps of an engine with these limits as CUDA graphs, if model and attention allow it.

        It writes nothing to the cache, and takes some seconds. What cannot be captured is launched kernel by kernel.

        has_room: whether there is memory for another graph
        group:    the processes that compute every step together; all have the same graphs, or none
        """
        if parts := self.step_parts(sampler, limits):
            agreed = has_room if group is None else lambda: group.smallest(int(has_room())) == [1]
            with computing_on(self.model.device):
                self._graphs = StepGraphs(parts, GraphSizes.of(limits), has_room=agreed)
                if group is not None:
                    self._graphs.agree(group)
            if self.graph_problem:
                _log.warning(self.graph_problem)

    def warm_up_thread(self) -> None:
        """Makes what torch keeps for each thread that multiplies on an NVIDIA GPU: a handle of cuBLAS, and its memory.

        Otherwise the first step that is not captured makes it, while its requests wait.
        """
        if not is_nvidia(self.model.device):
            return
        with computing_on(self.model.device), torch.inference_mode():
            ones = torch.ones(16, 16, dtype=self.model.dtype, device=self.model.device)
            linear(ones, ones)
            if ones.dtype != torch.float32:
                torch.mm(ones, ones, out_dtype=torch.float32)  # as logits are computed

    @property
    def model(self) -> Model:
        return self.check_open()[0]

    @property
    def kv_cache(self) -> KVCache:
        return self.check_open()[1]

    @property
    def graph_problem(self) -> str:
        """A sentence on steps that were to be captured as CUDA graphs and could not be; empty if there are none."""
        return self._graphs.problem if self._graphs is not None else ""

    @property
    def is_closed(self) -> bool:
        return self._open is None

    def check_open(self) -> tuple[Model, KVCache]:
        """The model and the cache. Raises EngineError after `close`."""
        if self._open is None:
            raise EngineError("The engine is closed.")
        return self._open

    def forward(self, batch: RaggedBatch) -> Logits:
        """Logits [R, vocabulary] of the batch's `rows`.

        Stores the keys and values of its tokens in the cache, and the recurrent states after them in their slots.
        """
        with nullcontext() if self.followers is None else self.followers.leading(batch):
            return self._forward(batch)

    def _forward(self, batch: RaggedBatch) -> Logits:
        if batch.states is not None:
            batch.states.prepare()
        if batch.copies is not None:
            self.kv_cache.copy_blocks(batch.copies)
        if self._graphs is not None and batch.images is None and (logits := self._graphs.forward(batch)) is not None:
            return logits
        return self.model.forward(batch, self.kv_cache, self.attention)

    def close(self) -> None:
        """Drops the model, the cache and the graphs; to use one of them afterwards raises EngineError."""
        if self.followers is not None:
            self.followers.close()
        self._graphs = self._open = self.state_pool = None
