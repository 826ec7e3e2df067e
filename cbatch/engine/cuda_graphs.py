"""Steps as CUDA graphs: captured at start for some sizes, then launched by one call.

A step is a few hundred short kernels. With few tokens, the host takes longer to launch them one by one than the device
needs to run them.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from cbatch.attention.base import AttentionBackend
from cbatch.kernels.operands import AdapterRows, Recurrence
from cbatch.kernels.triton.attention_metadata import StepBuffers
from cbatch.model.base import CapturableModel, DeviceInputs, HiddenStates
from cbatch.model.lora.device import in_order
from cbatch.runtime.batch import Logits, RaggedBatch, SampledTokens
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.memory import is_out_of_memory
from cbatch.runtime.process_group import ProcessGroup
from cbatch.runtime.state_pool import StatePool
from cbatch.runtime.transfer import FixedTensors, padded
from cbatch.sample.sampler import PARAM_WORDS, Sampler
from cbatch.schedule.limits import StepLimits

Run = Callable[[], None]

GRAPH_BYTES = 8 * 2**20
"""An allowance for what a graph takes beside the memory of its tensors: its nodes, with their arguments."""

WORKSPACE_BYTES = 64 * 2**20
"""An allowance for the workspaces of cuBLAS on the stream of the captures."""

MAX_GRAPH_TOKENS = 2048
"""Tokens of the largest mixed step that is captured. A larger one takes the device longer than the host launches it."""

CHEAP_PADDING = 256
"""A step of up to so many tokens takes about as long as one of a few, because the device reads the same weights."""


def graph_size_for(rows: int) -> int:
    """Rows of the graph that decodes `rows` sequences: few sizes in all, and little padding."""
    if rows <= 2:
        return rows
    step = 4 if rows <= 8 else 8 if rows <= 64 else 16 if rows <= 512 else 32
    return -(-rows // step) * step


def graph_tokens_for(tokens: int) -> int:
    """Tokens of the graph that computes a mixed step of `tokens` tokens.

    With few tokens a step takes as long as reading the weights, and padding costs nothing. From some hundred tokens on
    it takes as long as the arithmetic, so at most an eighth is padding, and a twenty-fourth on average.
    """
    step = max(64, 1 << (tokens - 1).bit_length() >> 4)
    return -(-tokens // step) * step


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """The sizes of steps that are captured, ascending.

    decode:   numbers of sequences, with one token each
    mixed:    numbers of tokens, in chunks of any length
    max_seqs: most sequences of a mixed step
    """

    decode: Sequence[int]
    mixed: Sequence[int]
    max_seqs: int

    @classmethod
    def of(cls, limits: StepLimits) -> GraphSizes:
        rows = min(limits.max_seqs, limits.max_batch_tokens)
        tokens = min(limits.max_batch_tokens, MAX_GRAPH_TOKENS)
        decode = {graph_size_for(count) for count in range(1, rows + 1)}
        mixed = {min(graph_tokens_for(count), tokens) for count in range(2, tokens + 1)}
        return cls(sorted(decode), sorted(mixed), limits.max_seqs)

    @property
    def largest(self) -> list[GraphSizes]:
        """The largest step of each kind, alone."""
        alone = [GraphSizes(self.decode[-1:], (), self.max_seqs), GraphSizes((), self.mixed[-1:], self.max_seqs)]
        return [sizes for sizes in alone if len(sizes)]

    def __len__(self) -> int:
        return len(self.decode) + len(self.mixed)

    def in_order(self) -> Iterator[tuple[int, bool]]:
        """Tokens of each size, and whether it is one of decode steps, in the order in which they are captured.

        Decode steps come first, since most steps are. The largest comes first of either kind: the others find their
        memory in what it has left in the pool.
        """
        yield from ((size, True) for size in reversed(self.decode))
        yield from ((size, False) for size in reversed(self.mixed))


class StepParts(NamedTuple):
    """All that takes part in a step. state_pool: None for a model without recurrent layers"""

    model: CapturableModel
    attention: AttentionBackend
    kv_cache: KVCache
    sampler: Sampler
    state_pool: StatePool | None = None


def _recurrence_arrays(size: int, counts: NDArray[np.int64], *slots: NDArray[np.int64]) -> list[NDArray[np.int32]]:
    """Those of a `Recurrence` of up to so many chunks: others have negative slots, and begin where the tokens end."""
    starts = np.concatenate([[0], counts.cumsum()])
    arrays = padded(starts, size + 1, starts[-1]), *(padded(each, size, -1) for each in slots)
    return [each.astype(np.int32) for each in arrays]


@dataclass(frozen=True, slots=True)
class _CapturedStep:
    """A captured step of so many tokens, and where its inputs are.

    states:   see `_recurrence_arrays`
    adapters: see `AdapterRows`
    """

    size: int
    buffers: StepBuffers
    states: FixedTensors | None
    adapters: FixedTensors | None
    replay: Run

    def holds(self, batch: RaggedBatch) -> bool:
        """Whether a step fits."""
        return self.buffers.holds(batch) and (batch.adapters is None or self.adapters is not None)

    def fill(self, batch: RaggedBatch) -> None:
        """Overwrites the inputs with those of a step."""
        self.buffers.fill(batch)
        if self.states is not None:
            now = batch.states
            assert now is not None, "a step of a model with recurrent layers, and no slots"
            slots = now.slots, now.snapshot_counts, now.snapshot_slots
            self.states.fill(*_recurrence_arrays(len(self.states.tensors[1]), batch.counts, *slots))
        if batch.adapters is not None:
            assert self.adapters is not None
            self.adapters.fill(*in_order(padded(batch.adapters, self.size)))
        elif self.adapters is not None:
            self.adapters.zero()


class _Shared:
    """Tensors that all graphs share; one of each for each graph would take gigabytes.

    hidden:          of all tokens of a step
    logits:          [R, vocabulary] float32, of the tokens that have an output
    words:           [R, PARAM_WORDS] int32, the sampling parameters of a decode step
    tokens, largest: [R], what is sampled in a decode step, see `SampledTokens`
    """

    def __init__(self, model: CapturableModel, sizes: GraphSizes) -> None:
        rows, device = max(sizes.decode, default=0), model.device
        self.hidden = model.new_hidden_states(max([*sizes.decode, *sizes.mixed]))
        self.logits = torch.empty(rows, model.vocab_size, device=device)
        self._fixed = FixedTensors([np.empty((rows, PARAM_WORDS), np.int32)], device)
        (self.words,) = self._fixed.tensors
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.largest = torch.zeros(rows, device=device)

    def fill_words(self, words: NDArray[np.int32], size: int) -> None:
        """Overwrites the sampling parameters; rows after the last are greedy."""
        if words.any():
            self._fixed.fill(padded(words, size))
        else:
            self._fixed.zero()

    def sampled(self, count: int) -> SampledTokens[torch.Tensor]:
        """The first tokens. They are a copy: the next step has them as its input, and may have to be tried again."""
        return SampledTokens(self.tokens[:count].clone(), self.largest[:count])


class StepGraphs:
    """Graphs of the steps of a model over one KV cache, all in one memory pool, captured when this is made.

    A decode step is captured with its head and sampling. A mixed step is captured up to its last layer, because the
    number of tokens that need logits differs between steps of one size.

    reason: why some sizes could not be captured; empty if all were
    """

    def __init__(
        self,
        parts: StepParts,
        sizes: GraphSizes,
        capture: Callable[[Run], Run] | None = None,
        *,
        has_room: Callable[[], bool] = lambda: True,
        num_blocks: int | None = None,
    ) -> None:
        """
        capture:    captures a step that has run once; see `GraphCapturer`
        has_room:   whether there is memory for another graph
        num_blocks: of the cache that the graphs are made for, if not of this one
        """
        self._parts = parts
        self._sizes = sizes
        self._num_blocks = num_blocks or parts.kv_cache.num_blocks
        self._samples = parts.sampler.uses_kernel
        self._shared: _Shared | None = None
        self._decode: dict[int, _CapturedStep] = {}
        self._mixed: dict[int, _CapturedStep] = {}
        self._has_failed = False
        self.reason = self._capture_all(capture or GraphCapturer(parts.model.device), has_room)
        if not len(self):
            self._shared = None

    @property
    def problem(self) -> str:
        """A sentence on the sizes that could not be captured; empty if all were."""
        if self.reason and len(self):
            captured = f"{len(self)} of {len(self._sizes)}"
            return f"Only {captured} CUDA graphs were captured, so that some steps are slower: {self.reason}."
        return f"Steps run without CUDA graphs: {self.reason}." if self.reason else ""

    def __len__(self) -> int:
        return len(self._decode) + len(self._mixed)

    def agree(self, group: ProcessGroup) -> None:
        """Drops all graphs if a process of a group could not capture one: a step has the same padding in all of them.

        The processes have asked each other before each capture whether there is room. One that has failed since
        answers here that there is none.
        """
        if self._has_failed or not self.reason:
            group.smallest(int(not self._has_failed))
        if group.smallest(int(not self._has_failed)) == [0]:
            self._decode.clear()
            self._mixed.clear()
            self._shared, self.reason = None, self.reason or "another process could not capture them"

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch) -> Logits | None:
        """Logits of a step, valid until the next one; None if no graph serves it."""
        tokens, shared = len(batch.ids), self._shared
        is_decode = tokens == len(batch.stops) and batch.pooled is None
        decode = self._find(self._decode, tokens) if is_decode else None
        step = decode or self._find(self._mixed, tokens)
        if shared is None or step is None or not step.holds(batch):
            return None
        buffers, count = step.buffers, len(batch.rows)
        step.fill(batch)
        if decode is None:
            step.replay()
            out = shared.logits[:count] if count <= len(shared.logits) else None
            model = self._parts.model
            logits = model.run_head(shared.hidden, buffers.logit_rows[:count], out)
            return Logits(logits, sums=model.pool(shared.hidden, batch.pooled))
        words = batch.sampling_params() if self._samples and batch.sampling_params is not None else None
        if words is not None:
            shared.fill_words(words, step.size)
        step.replay()
        return Logits(shared.logits[:count], sampled=shared.sampled(count) if words is not None else None)

    def _find(self, steps: dict[int, _CapturedStep], tokens: int) -> _CapturedStep | None:
        """The smallest that so many tokens fit into; None if its padding would take longer than single launches."""
        size = min((size for size in steps if size >= tokens), default=0)
        return steps[size] if tokens <= size <= max(CHEAP_PADDING, 2 * tokens) else None

    @torch.inference_mode()
    def _capture_all(self, capture: Callable[[Run], Run], has_room: Callable[[], bool]) -> str:
        """Captures steps of all sizes. Returns why not all were captured; then there are none, or too little memory.

        After a capture that ran out of memory there is no other: torch loses memory with each that fails
        (https://github.com/pytorch/pytorch/pull/190348).
        """
        try:
            self._shared = _Shared(self._parts.model, self._sizes)
            for size, is_decode in self._sizes.in_order():
                if not has_room():
                    return "the memory reserved for them is used up"
                steps = self._decode if is_decode else self._mixed
                steps[size] = self._capture(size, is_decode, capture)
            return ""
        except Exception as error:  # whatever a driver or library does not allow during a capture
            self._has_failed = True
            is_full = is_out_of_memory(error)
            reason = "out of memory" if is_full else f"{error}" or type(error).__name__
        # After the except block, since its traceback held the memory of what failed.
        if not is_full:
            self._decode.clear()
            self._mixed.clear()
        return reason

    def _capture(self, size: int, is_decode: bool, capture: Callable[[Run], Run]) -> _CapturedStep:
        """Runs a step of padding, so that its kernels are compiled, and captures it. It stores nothing in the cache."""
        model, attention, kv_cache, sampler, state_pool = self._parts
        assert self._shared is not None and attention.graph_buffers is not None
        longest = min(-(-model.max_model_len // kv_cache.block_size), self._num_blocks)
        # Sequences may share blocks, so that together they may be longer than the cache.
        most = 2 * self._num_blocks * kv_cache.block_size
        sequences = size if is_decode else min(self._sizes.max_seqs, size)
        buffers = attention.graph_buffers(size, sequences, longest, kv_cache.block_size, most, decode_only=is_decode)
        given = buffers.input_ids, buffers.position_ids, buffers.slots
        inputs = DeviceInputs(*given, kv_cache, attention, buffers.metadata)
        states = None
        if state_pool is not None:
            none = _recurrence_arrays(sequences, *[np.empty(0, np.int64)] * 4)
            states = FixedTensors(none, model.device)
            states.fill(*none)
            starts, *slots = states.tensors
            recurrence = Recurrence(starts, slots[0], slots[1], slots[2], longest=1 if is_decode else size)
            inputs = inputs._replace(recurrence=recurrence, states=state_pool.tensors)
        adapters = FixedTensors([np.empty(size, np.int32)] * 2, model.device)
        inputs = inputs._replace(adapters=model.adding(AdapterRows(*adapters.tensors)))
        shared, samples = self._shared, self._samples
        hidden = HiddenStates(*(part[:size] for part in shared.hidden))
        logits, words, tokens, largest = (
            part[:size] for part in (shared.logits, shared.words, shared.tokens, shared.largest)
        )

        def run() -> None:  # does not hold this object, so that the cache is freed with its engine
            model.run_layers(inputs, hidden)
            if is_decode:
                model.run_head(hidden, buffers.logit_rows, logits)
                if samples:
                    sampler.sample_on_device(logits, words, tokens, largest)

        run()
        return _CapturedStep(size, buffers, states, adapters if inputs.adapters else None, capture(run))


_MAX_STREAMS = 32
"""Streams of a device that torch gives to everybody in turn: the next one is the first again."""


class GraphCapturer:
    """Captures what a function launches on the GPU; returns a function that replays it.

    stream: of torch, which no other living capturer has, nor any graph of one. A graph that is freed clears the cuBLAS
            workspaces of the stream it was captured on, into which the graphs of another would be replayed
            (https://github.com/pytorch/pytorch/issues/193402)
    """

    def __init__(self, device: torch.device) -> None:
        """Raises RuntimeError if others have all streams."""
        self._memory: Any = None
        for _ in range(_MAX_STREAMS):
            self.stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            if _capturers.setdefault((device, self.stream.cuda_stream), self) is self:
                return
        raise RuntimeError(f"all {_MAX_STREAMS} streams of {device} belong to graphs of other engines")

    def __call__(self, run: Run) -> Run:
        stream = self.stream
        before = torch.cuda.current_stream(stream.device)
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: other threads may use the device meanwhile.
            with (
                _one_at_a_time,
                _no_garbage_collection(),
                torch.cuda.graph(graph, self._memory, stream, "thread_local"),
            ):
                run()
        except BaseException:
            torch.cuda.set_stream(before)  # a capture that cannot be ended leaves its own stream current
            raise
        self._memory = graph.pool()  # the pool of the first capture that succeeded, for all
        return partial(_replay, graph, self)


def _replay(graph: torch.cuda.CUDAGraph, _: GraphCapturer) -> None:
    """Replays a graph, which keeps its stream from others for as long as it may be replayed."""
    graph.replay()


_capturers: WeakValueDictionary[tuple[torch.device, int], GraphCapturer] = WeakValueDictionary()
"""Those of the process, by device and handle of their stream."""

_one_at_a_time = threading.Lock()
"""Held during a capture, by all engines of the process."""


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """During a capture, nothing may be freed on the device, such as the graphs of an engine that nobody closed."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()
