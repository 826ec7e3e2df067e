"""Decode steps as CUDA graphs: recorded once for each number of rows, and then started by one call.

A decode step is some hundred short kernels. To launch them one by one takes the host longer than the device needs for
them, when there are few rows.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cbatch.engine.attention.base import CapturableAttention, GraphBuffers
from cbatch.engine.models.base import CapturableModel, DeviceInputs
from cbatch.engine.runtime.batch import RaggedBatch
from cbatch.engine.runtime.kv_cache import KVCache
from cbatch.engine.runtime.memory import is_out_of_memory

Run = Callable[[], Tensor]

_log = logging.getLogger("cbatch")


@dataclass(slots=True)
class _Recording:
    """A step of so many rows, whose inputs always lie at the same addresses."""

    buffers: GraphBuffers
    run: Run
    has_run: bool = False
    replay: Run | None = None


def graph_size_for(rows: int) -> int:
    """Rows of the graph that serves so many: few sizes in all, and few rows computed for nothing."""
    if rows <= 2:
        return rows
    step = 4 if rows <= 8 else 8 if rows <= 64 else 16 if rows <= 256 else 32
    return -(-rows // step) * step


class DecodeGraphs:
    """Graphs of a model's decode steps over one cache, all in one pool of memory.

    A size is computed in the usual way when it is first needed, for kernels may have to be compiled, and recorded when
    it is needed again: nobody waits for sizes that never come. Where memory does not suffice for that, sizes as large
    go without a graph from then on; to try again would cost memory, which torch loses with each recording that fails
    (https://github.com/pytorch/pytorch/pull/190348).
    """

    def __init__(
        self,
        model: CapturableModel,
        attention: CapturableAttention,
        kv_cache: KVCache,
        max_rows: int,
        record: Callable[[Run], Run] | None = None,
    ) -> None:
        """record: captures a step; see `GraphRecorder`"""
        self.model = model
        self.attention = attention
        self.kv_cache = kv_cache
        self.max_rows = max_rows
        self._smallest_failed = graph_size_for(max_rows) + 1
        """Rows of the smallest size for which memory did not suffice."""
        self._record = record or GraphRecorder(model.device)
        self._recordings: dict[int, _Recording] = {}
        widest = graph_size_for(max_rows)
        self._ids = torch.zeros(widest, dtype=torch.int64, device=model.device)
        self._positions = torch.zeros_like(self._ids)
        self._rows = torch.arange(widest, device=model.device)
        # One for all graphs: each would keep its own else, together as much as some gigabytes.
        self._logits = torch.empty(widest, model.vocab_size, device=model.device)

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch) -> Tensor | None:
        """Logits [R, vocabulary] of a decode step, which hold until the next one; None for any other step."""
        rows = len(batch.stops)
        if not len(batch.ids) == len(batch.rows) == rows <= self.max_rows:
            return None
        size = graph_size_for(rows)
        if size >= self._smallest_failed and not self._is_recorded(size):
            return None
        recording = self._recording(size)
        if not recording.buffers.holds(batch.stops):
            return None
        self._ids[:rows].copy_(batch.input_ids)
        self._positions[:rows].copy_(batch.position_ids)
        recording.buffers.fill(batch.tables, batch.stops)
        if not recording.has_run:
            logits = recording.run()
            recording.has_run = True
        elif recording.replay is not None or self._make_replay(size, recording):
            assert recording.replay is not None
            logits = recording.replay()
        else:
            return None
        return logits[:rows]

    def _make_replay(self, size: int, recording: _Recording) -> bool:
        """Records a step; False where that fails, and what it took is free again."""
        try:
            recording.replay = self._record(recording.run)
            return True
        except Exception as error:  # whatever a driver or a library does not allow while it is recorded
            is_full, trouble = is_out_of_memory(error), f"{error}"
        if is_full:
            self._smallest_failed = size
            del self._recordings[size]
            _log.warning("Decode steps of %d rows and more go without CUDA graphs, for memory does not suffice.", size)
        else:
            self.max_rows = 0
            self._recordings.clear()
            _log.warning("Decode steps go without CUDA graphs, for one could not be recorded: %s", trouble)
        return False

    def _is_recorded(self, size: int) -> bool:
        return size in self._recordings and self._recordings[size].replay is not None

    def _recording(self, size: int) -> _Recording:
        if size not in self._recordings:
            self._recordings[size] = self._make(size)
        return self._recordings[size]

    def _make(self, size: int) -> _Recording:
        model, kv_cache = self.model, self.kv_cache
        blocks = len(kv_cache.keys[0])
        longest = min(-(-model.max_model_len // kv_cache.block_size), blocks)
        # Rows may share what they begin with, so all together may be longer than the cache.
        attention, most = self.attention, 2 * blocks * kv_cache.block_size
        buffers = attention.graph_buffers(size, longest, kv_cache.block_size, most)
        metadata = buffers.metadata
        ids, positions, rows, out = (tensor[:size] for tensor in (self._ids, self._positions, self._rows, self._logits))

        def run() -> Tensor:  # holds nothing of this object, so that the cache goes when its engine does
            inputs = DeviceInputs(ids, positions, metadata.slots, rows)
            return model.forward_on_device(inputs, metadata, kv_cache, attention, out)

        return _Recording(buffers, run)


class GraphRecorder:
    """Records what a function launches on the GPU; what it returns replays that, and returns the same tensor again."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _recording_stream(device)
        self._memory: Any = None

    def __call__(self, run: Run) -> Run:
        with _one_at_a_time:
            return self._recorded(run)

    def _recorded(self, run: Run) -> Run:
        before = torch.cuda.current_stream(self._stream.device)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may use the device meanwhile.
            with torch.cuda.graph(graph, self._memory, self._stream, "thread_local"):
                out = run()
        except BaseException:
            torch.cuda.set_stream(before)  # a recording that cannot be ended leaves its own
            raise
        self._memory = graph.pool()  # of the first that came to its end, for all

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


_one_at_a_time = threading.Lock()
"""Held while something is recorded."""


@cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """One for the process, not one for each engine: cuBLAS keeps a workspace for every stream it has been used on."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream
