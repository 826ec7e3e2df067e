"""Programs on the CPU: packed weights, and one call of compiled kernels for a step.

They compute what transformers computes for the same files (`hf/adapter.py`), with less rounding: the residual stream,
sums and logits are float32 whatever the weights are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.attention.base import AttentionBackend
from cbatch.base.quantization import Quantization
from cbatch.kernels.cpu import program as kernels
from cbatch.kernels.cpu.build import Builders
from cbatch.kernels.cpu.jit import Part, address_of, compile_free, compiling, is_known
from cbatch.kernels.cpu.matmul.experts import Routing
from cbatch.kernels.cpu.matmul.linear import new_linear_workspace
from cbatch.kernels.cpu.matmul.lora import NO_LORA
from cbatch.kernels.cpu.matmul.microkernel import LANES, pad_columns
from cbatch.kernels.cpu.paged_kv import NO_PLAN, AttentionPlan, PagedCaches, new_attention_workspace, plan_attention
from cbatch.kernels.cpu.recurrent import NO_RECURRENCE, Recurrence, new_recurrence, state_layout
from cbatch.kernels.cpu.tensors import as_array, block_shapes, element_of, fits, paged_caches_of
from cbatch.kernels.cpu.thread_pool import shared_thread_pool
from cbatch.kernels.formats import FORMATS
from cbatch.kernels.operands import NormWeights
from cbatch.model.config import UnsupportedConfig
from cbatch.model.lora.cpu import CpuAdapters
from cbatch.model.lora.sites import sites_of
from cbatch.model.lora_files import Adapter
from cbatch.model.ops.attention import Attend
from cbatch.model.ops.cpu_layout import CpuLayout
from cbatch.model.ops.head import Head
from cbatch.model.ops.residual import normed
from cbatch.model.packed_file import PackedFile
from cbatch.model.program_model import ProgramModel
from cbatch.model.stored import StoredWeights
from cbatch.model.weight import RESIDUAL
from cbatch.runtime.batch import Logits, RaggedBatch, SampledTokens
from cbatch.runtime.cpu import empty, near_weights, num_threads
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.state_pool import StatePool, StepStates

_KEPT_LOGIT_ROWS = 256
"""Rows of logits whose memory is kept from step to step."""


class CpuModel(ProgramModel):
    """A model with a program, ready to run ragged batches over a paged cache.

    formats, left_bytes: see `CpuLayout`
    """

    has_own_threads = True
    batch_invariant = True
    capturable = None
    chunk_multiple = 1  # recurrent layers go from token to token

    def __init__(
        self,
        config: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        *,
        quantize: Quantization | None = None,
        shared: PackedFile | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """Raises UnsupportedConfig if another path has to serve the model.

        tensors:  the weights by their names in the files
        quantize: keep the matrices as integers; what is not one stays bfloat16
        shared:   a file of packed weights, which engines of this machine map
        kv_dtype: of the KV cache for which kernels are compiled now, None: `dtype`; for others, with their first step
        """
        super().__init__(config, dtype, torch.device("cpu"))
        program = self.program
        if not program.is_causal or not fits(self.layers, LANES, dtype):
            raise UnsupportedConfig(f"the kernels do not support its sizes, or do not compute in {dtype}")
        if quantize is not None and dtype != torch.bfloat16:
            raise UnsupportedConfig(f"{quantize.weights} weights need bfloat16, not {dtype}")
        self.quantization, self._kv_dtype = quantize, kv_dtype or dtype
        tensors = self.accept(tensors)
        self.stored_weights = tensors if isinstance(tensors, StoredWeights) else None
        try:
            self._packed = packed = CpuLayout(program, dtype, quantize, self.stored_weights)
        except (TypeError, ValueError, OverflowError) as error:  # what unexpected values of a config.json cause
            raise UnsupportedConfig(f"its config.json is unusual ({error})") from error
        self.formats, self.left_bytes = frozenset(packed.formats), packed.left_bytes
        with near_weights(packed.num_bytes), self._builders() as builders:
            self._prepare(packed)
            builders.compile(self._parts())
            self._weights = packed.load(tensors, shared)
            self._warm_up()
        self.weight_bytes = sum(array.nbytes for array in self._weights if isinstance(array, np.ndarray))
        self.linear_cost = program.linear_cost(self._weights.matrices.nbytes)

    def _prepare(self, packed: CpuLayout) -> None:
        """Makes all that a step needs but the weights."""
        self._weights = packed.no_weights()
        self._thread_pool = shared_thread_pool(num_threads())
        self._element = element_of(self.dtype)
        calls = [operation for operation in self.program.operations if isinstance(operation, Attend)]
        group = max((call.heads // call.shape.heads for call in calls), default=1)
        key_dim, value_dim = (
            max((getattr(call.shape, f"{part}_dim") for call in calls), default=LANES) for part in ("key", "value")
        )
        self._largest_heads = max((call.heads for call in calls), default=1), group, value_dim
        threads = self._thread_pool.size
        self._buffers = kernels.Buffers(
            kernels.Arenas(np.empty(0, np.float32), np.empty(0, self._element)),
            new_linear_workspace(threads, packed.formats, packed.deepest, left_bytes=packed.left_bytes),
            new_attention_workspace(threads, group, key_dim, value_dim, self._element),
            self._new_routing(0),
        )
        self._paged_caches: WeakKeyDictionary[KVCache, PagedCaches] = WeakKeyDictionary()
        self._state_memories: WeakKeyDictionary[StatePool, tuple[NDArray[Any], NDArray[np.int64]]] = WeakKeyDictionary()
        self._programs: dict[tuple[np.dtype[Any], Any], NDArray[np.int64]] = {}
        """By the type of recurrent states."""
        self._adapters: CpuAdapters | None = None
        self._logits = np.empty((0, 0), np.float32)
        self._logit_buffers: dict[int, tuple[NDArray[np.float32], Tensor]] = {}
        self._num_positions = 0
        self._grow_rotary_tables(16)

    @property
    def packed(self) -> str:
        """How its weights are kept as integers, for people; empty if they are not."""
        if self.quantization is None:
            return ""
        bits = 8 * self.weight_bytes / self.num_parameters
        formats = ", ".join(sorted(FORMATS[format] for format in self.formats))
        return f"{bits:.2f} bits a weight ({formats}), multiplied with {self.quantization.activations} activations"

    def forward(self, batch: RaggedBatch, kv_cache: KVCache, attention: AttentionBackend) -> Logits:
        """Logits [R, vocabulary] float32 of the wanted rows, valid until the next step."""
        outputs, logits = self._outputs_for(len(batch.rows))
        self._thread_pool.run(kernels.run_step, *self._arguments(batch, kv_cache, outputs))
        sums = None if batch.pooled is None else batch.pooled.sums(self.device, partial(self._hidden, len(batch.ids)))
        return Logits(logits, SampledTokens(outputs.tokens, outputs.largest), sums=sums)

    def _hidden(self, tokens: int, rows: Tensor) -> Tensor:
        """The hidden states [P, hidden size] float32 of rows of a step of so many tokens, which has just run."""
        (start, width), size = self._packed.read(RESIDUAL), self.program.hidden_size
        residual = torch.from_numpy(self._buffers.arenas.floats[start * tokens : (start + width) * tokens])
        norm = cast(Head, self.program.operations[-1]).norm
        _, eps, *places = self._packed.head_norm
        vectors = [torch.from_numpy(self._weights.vectors[at : at + size]) if at >= 0 else None for at in places]
        return normed(residual.view(tokens, width)[rows, :size], NormWeights(norm.kind, eps, *vectors))

    def with_adapters(self, adapters: Sequence[Adapter]) -> CpuModel:
        model = copy(self)
        model._adapters = CpuAdapters(sites_of(self.program, adapters), len(adapters), self._thread_pool.size)
        model._packed = CpuLayout(
            self.program, self.dtype, self.quantization, self.stored_weights, model._adapters.places
        )
        nothing = kernels.Arenas(np.empty(0, np.float32), np.empty(0, self._element))
        model._buffers = self._buffers._replace(arenas=nothing)
        model._programs = {}
        with model._builders() as builders:
            builders.compile(model._parts())
            model._warm_up()
        return model

    def _builders(self) -> Builders:
        """They begin at once if a step of no model is kept."""
        return Builders(num_threads() - 1, "cbatch.model.ops.all", at_once=not is_known(kernels.run_step))

    def _parts(self) -> list[Part]:
        """All that `_warm_up` would compile."""
        step, state_type = self._step(*self._smallest_batch(), self._outputs_for(1)[0], NO_PLAN)
        return [*kernels.parts_of(self._packed.records(state_type), step).values(), kernels.entry_of(step)]

    def _warm_up(self) -> None:
        """Compiles the kernels, or loads them from their cache on disk."""
        with compiling():  # also what plans a step
            self._arguments(*self._smallest_batch(), self._outputs_for(1)[0])

    def _smallest_batch(self) -> tuple[RaggedBatch, KVCache]:
        one = np.zeros(1, np.int64)
        states = StepStates(StatePool(self.states, 1, self.device), one, one, one - 1) if self.states else None
        batch = RaggedBatch(one, one, one, one, np.zeros((1, 1), np.int32), [0], [1], self.device, states=states)
        shapes = [block_shapes(layer, LANES, self._kv_dtype) for layer in self.layers]
        return batch, KVCache(shapes, 1, LANES, self._kv_dtype, self.device)

    def _arguments(self, batch: RaggedBatch, kv_cache: KVCache, outputs: kernels.StepOutputs) -> tuple[Any, ...]:
        """The arguments of `run_step` after the worker."""
        if (furthest := max(batch.stops)) > self._num_positions:
            self._grow_rotary_tables(2 * furthest)
        plan = plan_attention(batch, kv_cache.block_size, *self._largest_heads)
        step, state_type = self._step(batch, kv_cache, outputs, plan)
        types = state_type, step.caches.whole.packed
        if types not in self._programs:
            self._programs[types] = self._compile(step, state_type)
        return self._programs[types], step

    def _step(
        self, batch: RaggedBatch, kv_cache: KVCache, outputs: kernels.StepOutputs, plan: AttentionPlan
    ) -> tuple[kernels.Step, np.dtype[Any]]:
        """Arrays and numbers that the instructions share, and the type of recurrent states."""
        ids = batch.ids
        for replaced, instead in self.program.replaced_ids.items():
            ids = np.where(ids == replaced, instead, ids)
        positions = batch.positions
        if self.short_context is not None:  # rows for long sequences come after those for short ones
            shift = self._num_positions - self.max_model_len
            positions = np.where(positions >= self.max_model_len, positions + shift, positions)
        length = len(ids)
        images, image_rows = np.empty((0, 0), np.float32), np.empty(0, np.int64)
        if batch.images is not None:
            images, image_rows = batch.images.values.float().numpy(), np.full(length, -1)
            image_rows[batch.images.places] = np.arange(len(images))
            if batch.images.positions is not None:
                positions = positions.copy()
                positions[batch.images.places] = self._rotate_by_axes(batch.images.positions)
        inputs = kernels.StepInputs(
            ids, positions, self._rotary, self._rotary_layout, np.arange(length), batch.rows, images, image_rows
        )
        if kv_cache not in self._paged_caches:
            self._paged_caches[kv_cache] = paged_caches_of(kv_cache, self._element)
        caches, buffers = self._paged_caches[kv_cache], self._buffers_for(length)
        recurrence, state_type = self._recurrence_of(batch)
        lora = NO_LORA if self._adapters is None else self._adapters.step(batch.adapters)
        return kernels.Step(self._weights, caches, plan, inputs, buffers, recurrence, lora, outputs), state_type

    def _compile(self, step: kernels.Step, state_type: np.dtype[Any]) -> NDArray[np.int64]:
        """Compiles what such steps run with recurrent states of that type, or loads it from disk."""
        records = self._packed.records(state_type)
        parts = kernels.parts_of(records, step)
        with compiling():
            self._thread_pool.compile(kernels.run_step, kernels.NO_PROGRAM, step)
            compile_free(parts.values())
            return self._packed.instructions(records, lambda kind: address_of(parts[kind]))

    def _recurrence_of(self, batch: RaggedBatch) -> tuple[Recurrence, np.dtype[Any]]:
        """Where the kernels find the states of a step, and the type of their numbers; float32 if there are none.

        Raises ValueError if they do not lie in one tensor.
        """
        if batch.states is None:
            return NO_RECURRENCE, np.dtype(np.float32)
        pool = batch.states.pool
        if pool not in self._state_memories:
            if pool.flat is None:
                raise ValueError("The states must lie in one tensor.")
            self._state_memories[pool] = as_array(pool.flat), state_layout(pool)
        memory, layout = self._state_memories[pool]
        return new_recurrence(batch, memory.view(np.uint8), layout), memory.dtype

    def _buffers_for(self, length: int) -> kernels.Buffers:
        """Memory for a step of so many tokens, which is kept."""
        packed, buffers = self._packed, self._buffers
        if length * packed.float_columns > len(buffers.arenas.floats):
            length = max(length, 16)
            arenas = kernels.Arenas(
                empty(length * packed.float_columns, np.float32), empty(length * packed.element_columns, self._element)
            )
            linear = buffers.linear._replace(rows=empty(length * packed.prepared_bytes, np.uint8))
            self._buffers = buffers._replace(arenas=arenas, linear=linear, routing=self._new_routing(length))
        return self._buffers

    def _new_routing(self, length: int) -> Routing:
        """Memory for the routing of so many tokens."""
        pairs, experts = (length, self._packed.routing_columns), self._packed.num_experts
        starts, active = (empty(experts + 1, np.int64) for _ in range(2))
        scratch = empty((self._thread_pool.size, self.program.hidden_size + 2 * experts), np.float32)
        return Routing(
            empty(pairs, np.int64), empty(pairs, np.float32), empty(pairs, np.int64), starts, active, scratch
        )

    def _grow_rotary_tables(self, positions: int, others: int = 0) -> None:
        """Makes the rotary tables of so many positions (see `StepInputs`).  others: further rows"""
        every, tables, layout, start = torch.arange(positions + others), [], [], 0
        for rotary in self.program.rotaries:
            variants = [rotary.inv_freq, rotary.long_inv_freq][: 1 + (self.short_context is not None)]
            for inv_freq in variants:
                cosines, sines = rotary.tables(every, torch.tensor(inv_freq or rotary.inv_freq))
                tables.append(torch.cat([cosines, sines, rotary.query_scales(every)[:, None]], dim=1).flatten())
            layout.append((start, len(rotary.inv_freq)))
            start += len(variants) * tables[-1].numel()
        self._num_positions, self._num_rotary_rows = positions, positions + others
        self._rotary = torch.cat([torch.empty(0), *tables]).numpy()
        self._rotary_layout = np.array(layout, np.int64).reshape(-1, 2)

    def _rotate_by_axes(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Writes rows into the rotary tables for positions [3, E] of tokens in images, and returns the rows' numbers.

        They are the last ones of the tables, which plain positions do not reach.
        """
        count = positions.shape[1]
        if self._num_positions + count > self._num_rotary_rows:
            self._grow_rotary_tables(self._num_positions, count)
        first = self._num_rotary_rows - count
        for rotary, (start, half) in zip(self.program.rotaries, self._rotary_layout.tolist(), strict=True):
            rows = self._rotary[start:].reshape(-1)[first * (2 * half + 1) : (first + count) * (2 * half + 1)]
            cosines, sines = rotary.tables(torch.from_numpy(positions))
            rows.reshape(count, -1)[:, : 2 * half] = torch.cat([cosines, sines], 1).numpy()
        return np.arange(first, first + count)

    def _outputs_for(self, rows: int) -> tuple[kernels.StepOutputs, Tensor]:
        """Memory for the outputs of so many rows, and its logits [R, vocabulary] as a tensor.

        Memory for logits [R, padded vocabulary] is kept. The system would have to clear fresh memory in every step,
        which takes as long as the matrix product; and torch takes a while even for a view, after the weights of a step
        have evicted its code from the processor's caches. Only steps of more rows than are kept, such as scored
        prompts, pay that.
        """
        buffer = self._logit_buffers.get(rows)
        if buffer is None:
            memory = self._logits[:rows]
            if rows > len(memory):
                memory = empty((rows, pad_columns(self.vocab_size)), np.float32)
            buffer = memory, torch.from_numpy(memory)[:, : self.vocab_size]
            if rows <= _KEPT_LOGIT_ROWS:
                if len(self._logits) < rows:
                    self._logits, self._logit_buffers = memory, {}
                self._logit_buffers[rows] = buffer
        tokens, largest = np.empty(rows, np.int64), np.empty(rows, np.float32)
        return kernels.StepOutputs(buffer[0], self.vocab_size, tokens, largest), buffer[1]
