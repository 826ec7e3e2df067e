"""Decode steps as CUDA graphs: captured once for each batch size, then launched by one call.

A decode step is a few hundred short kernels. With few rows, the host takes longer to launch them one by one than the
device needs to run them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
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
    """A step with a fixed number of rows, whose inputs always have the same addresses."""

    buffers: GraphBuffers
    run: Run
    has_run: bool = False
    replay: Run | None = None


def graph_size_for(rows: int) -> int:
    """Rows of the graph that serves `rows` sequences: few sizes in all, and little padding."""
    if rows <= 2:
        return rows
    step = 4 if rows <= 8 else 8 if rows <= 64 else 16 if rows <= 256 else 32
    return -(-rows // step) * step


class DecodeGraphs:
    """Graphs of a model's decode steps over one KV cache, all in one memory pool.

    The first step of a size runs without a graph, since kernels may have to be compiled; the second one is captured. So
    no time is lost on sizes that never come. If a capture runs out of memory, steps of that size or larger go without a
    graph from then on: torch loses memory with each capture that fails
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
        self._record = record or GraphRecorder(model.device)
        self._recordings: dict[int, _Recording] = {}
        widest = graph_size_for(max_rows)
        self._smallest_failed = widest + 1
        """Rows of the smallest size that ran out of memory."""
        self._ids = torch.zeros(widest, dtype=torch.int64, device=model.device)
        self._positions = torch.zeros_like(self._ids)
        self._rows = torch.arange(widest, device=model.device)
        # Shared by all graphs: one for each would take gigabytes.
        self._logits = torch.empty(widest, model.vocab_size, device=model.device)

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch) -> Tensor | None:
        """Logits [R, vocabulary] of a decode step, valid until the next one; None for any other step."""
        rows = len(batch.stops)
        if not len(batch.ids) == len(batch.rows) == rows <= self.max_rows:
            return None
        size = graph_size_for(rows)
        recording = self._recordings.get(size)
        if size >= self._smallest_failed and (recording is None or recording.replay is None):
            return None
        if recording is None:
            recording = self._recordings[size] = self._make(size)
        if not recording.buffers.holds(batch):
            return None
        self._ids[:rows].copy_(batch.input_ids)
        self._positions[:rows].copy_(batch.position_ids)
        recording.buffers.fill(batch)
        if not recording.has_run:
            logits = recording.run()
            recording.has_run = True
            return logits[:rows]
        replay = recording.replay = recording.replay or self._capture(size, recording.run)
        return None if replay is None else replay()[:rows]

    def _capture(self, size: int, run: Run) -> Run | None:
        """Captures a step; None if that fails. The memory of a failed capture is free again."""
        try:
            return self._record(run)
        except Exception as error:  # whatever a driver or library does not allow during a capture
            is_full, reason = is_out_of_memory(error), f"{error}"
        if is_full:
            self._smallest_failed = size
            del self._recordings[size]
            _log.warning("Decode steps of %d or more sequences run without CUDA graphs: out of memory.", size)
        else:
            self.max_rows = 0
            self._recordings.clear()
            _log.warning("Decode steps run without CUDA graphs, because one could not be captured: %s", reason)
        return None

    def _make(self, size: int) -> _Recording:
        model, kv_cache = self.model, self.kv_cache
        blocks = len(kv_cache.keys[0])
        longest = min(-(-model.max_model_len // kv_cache.block_size), blocks)
        # Sequences may share blocks, so that together they may be longer than the cache.
        attention, most = self.attention, 2 * blocks * kv_cache.block_size
        buffers = attention.graph_buffers(size, size, longest, kv_cache.block_size, most, decode_only=True)
        metadata = buffers.metadata
        ids, positions, rows, out = (tensor[:size] for tensor in (self._ids, self._positions, self._rows, self._logits))

        def run() -> Tensor:  # does not hold this object, so that the cache is freed with its engine
            hidden = model.run_layers(DeviceInputs(ids, positions, metadata.slots), metadata, kv_cache, attention)
            return model.run_head(hidden, rows, out)

        return _Recording(buffers, run)


class GraphRecorder:
    """Captures what a function launches on the GPU; returns a function that replays it and returns the same tensor."""

    def __init__(self, device: torch.device) -> None:
        # Not shared with other recorders: a graph that is freed clears the cuBLAS workspaces of the stream it was
        # captured on, into which the graphs of another would be replayed (https://github.com/pytorch/pytorch/issues/193402).
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._memory: Any = None

    def __call__(self, run: Run) -> Run:
        before = torch.cuda.current_stream(self._stream.device)
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: other threads may use the device meanwhile.
            with _one_at_a_time, torch.cuda.graph(graph, self._memory, self._stream, "thread_local"):
                out = run()
        except BaseException:
            torch.cuda.set_stream(before)  # a capture that cannot be ended leaves its own stream current
            raise
        self._memory = graph.pool()  # the pool of the first capture that succeeded, for all

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


_one_at_a_time = threading.Lock()
"""Held during a capture, by all engines of the process."""
