"""The fast path of the Llama family on the CPU: packed weights, and one call of compiled kernels for a step.

It computes what transformers computes for the same files (`hf_adapter.py`), with less rounding: the residual stream,
sums and logits are float32 whatever the weights are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.engine.attention.base import AttentionBackend
from cbatch.engine.kernels.cpu import decoder
from cbatch.engine.kernels.cpu.linear import new_linear_workspace
from cbatch.engine.kernels.cpu.microkernel import COLUMNS, LANES, pad_columns
from cbatch.engine.kernels.cpu.paged_kv import PagedKV, new_attention_workspace, plan_attention
from cbatch.engine.kernels.cpu.tensors import block_shapes, fits, paged_kv_of
from cbatch.engine.kernels.cpu.thread_pool import shared_thread_pool
from cbatch.engine.models.base import LinearCost
from cbatch.engine.models.llama_spec import UnsupportedConfig, check_weights, read_llama_spec
from cbatch.engine.models.packed_file import PackedFile
from cbatch.engine.models.packing import pack_weights
from cbatch.engine.runtime.batch import Argmax, Logits, RaggedBatch
from cbatch.engine.runtime.cpu import empty, num_threads
from cbatch.engine.runtime.kv_cache import KVCache, LayerShape

_KEPT_LOGIT_ROWS = 256
"""Rows of logits whose memory is kept from step to step."""


class CpuModel:
    """A model of the Llama family, ready to run ragged batches over a paged cache."""

    has_own_threads = True
    capturable = None

    def __init__(
        self,
        config: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        *,
        quantize: bool = False,
        shared: PackedFile | None = None,
    ) -> None:
        """Raises UnsupportedConfig if another path has to serve the model.

        tensors:  the weights by their names in the files
        quantize: keep the matrices as int8, and compute in bfloat16
        shared:   a file of packed weights, which engines of this machine map
        """
        self.config = config
        self.spec = spec = read_llama_spec(config)
        self.name = str((config.get("architectures") or [spec.model_type])[0])
        self.kind = spec.model_type
        self.dtype = dtype
        self.device = torch.device("cpu")
        self.vocab_size = spec.vocab_size
        self.max_model_len = spec.max_model_len
        self.layers = [LayerShape(spec.num_kv_heads, spec.head_dim, spec.head_dim)] * spec.num_layers
        self.windows: list[int | None] = [window or None for window in spec.windows]
        self.layer_devices = [self.device] * spec.num_layers
        if not fits(self.layers, LANES, dtype) or spec.hidden_size % COLUMNS or spec.intermediate_size % LANES:
            raise UnsupportedConfig(f"the kernels do not support its sizes, or do not compute in {dtype}")
        if quantize and dtype != torch.bfloat16:
            raise UnsupportedConfig(f"int8 weights need bfloat16, not {dtype}")
        self.is_quantized = quantize
        self.num_parameters = check_weights(spec, tensors)
        self._weights = pack_weights(spec, tensors, dtype, quantize, shared)
        self._params = decoder.DecoderParams(
            spec.num_heads, spec.rms_norm_eps, spec.head_dim**-0.5, np.array(spec.windows)
        )
        self._thread_pool = shared_thread_pool(num_threads())
        self._element = np.dtype(np.float32 if dtype == torch.float32 else np.uint16)
        self._activations = self._new_activations(16)
        self._buffers = decoder.Buffers(
            self._activations,
            new_linear_workspace(
                self._thread_pool.size,
                self._weights.matrices.dtype,
                max(spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_dim),
            ),
            new_attention_workspace(
                self._thread_pool.size, spec.num_heads // spec.num_kv_heads, spec.head_dim, spec.head_dim, self._element
            ),
        )
        """Those of the last step."""
        self._paged_kvs: WeakKeyDictionary[KVCache, PagedKV] = WeakKeyDictionary()
        self._logits = np.empty((0, 0), np.float32)
        self._logit_buffers: dict[int, tuple[NDArray[np.float32], Tensor]] = {}
        self._cos, self._sin = self._rotary_tables(16)
        self._warm_up()

    @property
    def weight_bytes(self) -> int:
        return sum(array.nbytes for array in self._weights if isinstance(array, np.ndarray))

    @property
    def linear_cost(self) -> LinearCost:
        spec, weights = self.spec, self._weights
        head = spec.vocab_size * spec.hidden_size
        return LinearCost(weights.matrices.nbytes, self.num_parameters - head * (1 if spec.is_tied else 2), head)

    def forward(self, batch: RaggedBatch, kv_cache: KVCache, attention: AttentionBackend) -> Logits:
        """Logits [R, vocabulary] float32 of the wanted rows, valid until the next step."""
        outputs, logits = self._outputs_for(len(batch.rows))
        self._thread_pool.run(decoder.decoder_step, *self._arguments(batch, kv_cache, outputs))
        return Logits(logits, Argmax(outputs.tokens, outputs.largest))

    def _warm_up(self) -> None:
        """Compiles the kernels, or loads them from their cache on disk."""
        one = np.zeros(1, np.int64)
        batch = RaggedBatch(one, one, one, one, np.zeros((1, 1), np.int32), [0], [1], self.device)
        shapes = [block_shapes(self.layers[0], LANES, self.dtype)] * 2
        kv_cache = KVCache(shapes, 1, LANES, self.dtype, self.device)
        self._thread_pool.compile(decoder.decoder_step, *self._arguments(batch, kv_cache, self._outputs_for(1)[0]))

    def _arguments(self, batch: RaggedBatch, kv_cache: KVCache, outputs: decoder.StepOutputs) -> tuple[Any, ...]:
        """What `decoder_step` takes after the worker."""
        spec, length, furthest = self.spec, len(batch.ids), max(batch.stops)
        if furthest > len(self._cos):
            self._cos, self._sin = self._rotary_tables(2 * furthest)
        inputs = decoder.StepInputs(batch.ids, batch.positions, self._cos, self._sin, np.arange(length), batch.rows)
        shape = spec.num_heads, spec.num_heads // spec.num_kv_heads, spec.head_dim
        plan = plan_attention(batch, *shape)
        kv, buffers = self._paged_kv(kv_cache), self._buffers_for(length)
        return self._weights, self._params, kv, plan, inputs, buffers, outputs

    def _buffers_for(self, length: int) -> decoder.Buffers:
        """Memory for a step of so many tokens, which is kept."""
        if length > len(self._activations.residual):
            self._activations = self._new_activations(length)
        if length != len(self._buffers.activations.residual):
            activations = decoder.Activations(*(array[:length] for array in self._activations))
            self._buffers = self._buffers._replace(activations=activations)
        return self._buffers

    def _paged_kv(self, kv_cache: KVCache) -> PagedKV:
        """The cache as the kernels take it."""
        paged_kv = self._paged_kvs.get(kv_cache)
        if paged_kv is None:
            if kv_cache.stacked is None:
                raise ValueError("The layers' caches must lie in one tensor.")
            paged_kv = self._paged_kvs[kv_cache] = paged_kv_of(*kv_cache.stacked)
        return paged_kv

    def _rotary_tables(self, positions: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Cosines and sines of the rotary angles, [positions, head_dim / 2] each."""
        angles = torch.arange(positions)[:, None].float() * self.spec.inv_freq
        return angles.cos().numpy(), angles.sin().numpy()

    def _outputs_for(self, rows: int) -> tuple[decoder.StepOutputs, Tensor]:
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
        return decoder.StepOutputs(buffer[0], self.vocab_size, tokens, largest), buffer[1]

    def _new_activations(self, length: int) -> decoder.Activations:
        spec = self.spec
        attended = spec.num_heads * spec.head_dim
        qkv = pad_columns(attended + 2 * spec.num_kv_heads * spec.head_dim)
        return decoder.Activations(
            empty((length, spec.hidden_size), np.float32),
            empty((length, spec.hidden_size), self._element),
            empty((length, qkv), np.float32),
            empty((length, attended), self._element),
            empty((length, attended), self._element),
            empty((length, spec.intermediate_size), self._element),
        )
