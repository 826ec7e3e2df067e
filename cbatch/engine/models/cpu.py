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
from cbatch.engine.kernels.cpu.decoder import Activations, DecoderParams, StepInputs, StepOutputs, decoder_step
from cbatch.engine.kernels.cpu.linear import new_linear_workspace
from cbatch.engine.kernels.cpu.microkernel import COLUMNS, LANES, pad_columns
from cbatch.engine.kernels.cpu.paged_kv import new_attention_workspace, plan_attention
from cbatch.engine.kernels.cpu.tensors import block_shapes, fits, paged_kv_of
from cbatch.engine.kernels.cpu.thread_pool import shared_thread_pool
from cbatch.engine.models.base import LinearCost
from cbatch.engine.models.llama_spec import UnsupportedConfig, check_weights, read_llama_spec
from cbatch.engine.models.packing import pack_weights
from cbatch.engine.runtime.aligned import empty
from cbatch.engine.runtime.batch import Argmax, Logits, RaggedBatch
from cbatch.engine.runtime.kv_cache import KVCache, LayerShape
from cbatch.engine.runtime.threads import num_threads

_KEPT_LOGIT_ROWS = 256
"""Rows of logits for which room is kept from step to step."""

_LogitBuffer = tuple[NDArray[np.float32], Tensor]
"""Memory for logits [R, columns of a packed matrix], and what of it are logits [R, vocabulary]."""


class CpuModel:
    """A model of the Llama family, ready to run ragged batches over a paged cache."""

    has_own_threads = True

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], dtype: torch.dtype, *, quantize: bool = False
    ) -> None:
        """Raises UnsupportedConfig where another path has to serve the model.

        tensors:  the weights by their names in the files
        quantize: keep matrices as int8, and compute in bfloat16
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
        if not fits(self.layers, LANES, dtype) or spec.hidden_size % COLUMNS or spec.intermediate_size % LANES:
            raise UnsupportedConfig(f"its sizes do not suit the kernels, or they do not compute in {dtype}")
        if quantize and dtype != torch.bfloat16:
            raise UnsupportedConfig(f"int8 weights are multiplied in bfloat16, not in {dtype}")
        self.num_parameters = check_weights(spec, tensors)
        self._weights = pack_weights(spec, tensors, dtype, quantize)
        self._params = DecoderParams(spec.num_heads, spec.rms_norm_eps, spec.head_dim**-0.5, np.array(spec.windows))
        self._thread_pool = shared_thread_pool(num_threads())
        self._element = np.dtype(np.float32 if dtype == torch.float32 else np.uint16)
        self._attention_workspace = new_attention_workspace(
            self._thread_pool.size, spec.num_heads // spec.num_kv_heads, spec.head_dim, spec.head_dim, self._element
        )
        self._linear_workspace = new_linear_workspace(
            self._thread_pool.size,
            self._weights.matrices.dtype,
            max(spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_dim),
        )
        self._activations = self._new_activations(16)
        self._logits = np.empty((0, 0), np.float32)
        self._logit_buffers: dict[int, _LogitBuffer] = {}
        self._cos, self._sin = self._rotary_tables(16)
        self._warm_up()

    @property
    def weight_bytes(self) -> int:
        return sum(array.nbytes for array in self._weights if isinstance(array, np.ndarray))

    @property
    def linear_cost(self) -> LinearCost:
        spec, weights = self.spec, self._weights
        head = spec.vocab_size * spec.hidden_size
        bytes_ = weights.matrices.nbytes
        return LinearCost(bytes_, self.num_parameters - head * (1 if spec.is_tied else 2), head)

    def forward(self, batch: RaggedBatch, kv_cache: KVCache, attention: AttentionBackend) -> Logits:
        """Logits [R, vocabulary] float32 of the rows that are wanted, which hold until the next step."""
        outputs, logits = self._outputs_for(len(batch.rows))
        self._thread_pool.run(decoder_step, *self._arguments(batch, kv_cache, outputs))
        return Logits(logits, Argmax(outputs.tokens, outputs.largest))

    def _warm_up(self) -> None:
        """Compiles the kernels, or finds them in their cache."""
        one = np.zeros(1, np.int64)
        batch = RaggedBatch(one, one, one, one, np.zeros((1, 1), np.int32), [0], [1], self.device)
        kv_cache = KVCache([block_shapes(self.layers[0], LANES, self.dtype)] * 2, 1, LANES, self.dtype, self.device)
        self._thread_pool.compile(decoder_step, *self._arguments(batch, kv_cache, self._outputs_for(1)[0]))

    def _arguments(self, batch: RaggedBatch, kv_cache: KVCache, outputs: StepOutputs) -> tuple[Any, ...]:
        """What the kernel of a step takes behind the board and the thread."""
        spec, length, furthest = self.spec, len(batch.ids), max(batch.stops)
        if length > len(self._activations.residual):
            self._activations = self._new_activations(length)
        if furthest > len(self._cos):
            self._cos, self._sin = self._rotary_tables(2 * furthest)
        inputs = StepInputs(
            batch.ids,
            batch.positions,
            self._cos,
            self._sin,
            np.arange(length),
            batch.rows,
        )
        shape = spec.num_heads, spec.num_heads // spec.num_kv_heads, spec.head_dim
        slices = plan_attention(batch.tables, batch.starts, batch.stops, batch.slots, *shape)
        buffers = Activations(*(array[:length] for array in self._activations))
        if kv_cache.kept is None:
            if kv_cache.stacked is None:
                raise ValueError("The layers' caches have to lie in one tensor.")
            kv_cache.kept = paged_kv_of(*kv_cache.stacked)
        return (
            self._weights,
            self._params,
            kv_cache.kept,
            slices,
            inputs,
            buffers,
            self._linear_workspace,
            self._attention_workspace,
            outputs,
        )

    def _rotary_tables(self, places: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Cosines and sines of the angles of so many places, by which queries and keys are turned."""
        angles = torch.arange(places)[:, None].float() * self.spec.inv_freq
        return angles.cos().numpy(), angles.sin().numpy()

    def _outputs_for(self, rows: int) -> tuple[StepOutputs, Tensor]:
        """What so many rows give, and its logits [R, vocabulary] as a tensor."""
        room, logits = self._logits_for(rows)
        return StepOutputs(room, self.vocab_size, np.empty(rows, np.int64), np.empty(rows, np.float32)), logits

    def _logits_for(self, rows: int) -> _LogitBuffer:
        """Room for so many rows of logits, which is kept.

        Fresh memory would have to be cleared by the system in every step, which takes as long as the product, and even
        a view of torch's takes a while where the weights have just gone through the processor's caches. Steps of more
        rows than are kept, for prompts that are scored or very many seats, pay that.
        """
        if rows > _KEPT_LOGIT_ROWS:
            return self._as_logit_buffer(empty((rows, pad_columns(self.vocab_size)), np.float32))
        if rows > len(self._logits):
            self._logits, self._logit_buffers = empty((rows, pad_columns(self.vocab_size)), np.float32), {}
        if rows not in self._logit_buffers:
            self._logit_buffers[rows] = self._as_logit_buffer(self._logits[:rows])
        return self._logit_buffers[rows]

    def _as_logit_buffer(self, memory: NDArray[np.float32]) -> _LogitBuffer:
        return memory, torch.from_numpy(memory)[:, : self.vocab_size]

    def _new_activations(self, length: int) -> Activations:
        spec = self.spec
        attended = spec.num_heads * spec.head_dim
        mixed = pad_columns(attended + 2 * spec.num_kv_heads * spec.head_dim)
        return Activations(
            empty((length, spec.hidden_size), np.float32),
            empty((length, spec.hidden_size), self._element),
            empty((length, mixed), np.float32),
            empty((length, attended), self._element),
            empty((length, attended), self._element),
            empty((length, spec.intermediate_size), self._element),
        )
