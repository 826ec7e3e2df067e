"""Programs on a GPU: fused weights, and at most ten kernels for each layer of a decode step of a Llama.

They compute what transformers computes for the same files (`hf/adapter.py`), with less rounding: norms, rotations,
gates, the residual stream and logits are float32 whatever the weights are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cbatch.attention.base import AttentionBackend
from cbatch.base.quantization import STORED, Quantization
from cbatch.kernels.formats import ON_GPU
from cbatch.kernels.operands import AdapterRows, Addend, Recurrence
from cbatch.model.base import AddAdapters, DeviceImages, DeviceInputs, HiddenStates
from cbatch.model.config import UnsupportedConfig
from cbatch.model.device_weights import DeviceWeights
from cbatch.model.float8 import Float8Use, activations_in, float8_problem
from cbatch.model.lora.device import DeviceAdapters, rows_on
from cbatch.model.lora.sites import sites_of
from cbatch.model.lora_files import Adapter
from cbatch.model.ops.device_kernel import DeviceOps, by_triton
from cbatch.model.ops.device_plan import DevicePlan
from cbatch.model.ops.products import finish_logits, logits
from cbatch.model.ops.residual import select_and_norm
from cbatch.model.ops.shards import WHOLE, Part, shard_of
from cbatch.model.program_model import ProgramModel
from cbatch.model.stored import StoredWeights, kept_weights, packing_of
from cbatch.model.weight import Matrix
from cbatch.runtime.batch import Logits, PooledRows, RaggedBatch
from cbatch.runtime.device import gpu_name, has_bfloat16
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.memory import check_room
from cbatch.runtime.process_group import ProcessGroup
from cbatch.runtime.transfer import to_device


class CudaModel(ProgramModel):
    """A model with a program, ready to run ragged batches over a paged cache.

    It needs a cache whose blocks are laid out as its `ops` write them (`DeviceOps.heads_first`).
    """

    has_own_threads = False
    chunk_multiple = 64  # of the kernels for prompts of recurrent layers

    def __init__(
        self,
        config: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        ops: DeviceOps | None = None,
        *,
        quantize: Quantization | None = None,
        part: Part = WHOLE,
        weights_type: type[DeviceWeights] = DeviceWeights,
    ) -> None:
        """Raises UnsupportedConfig if another path has to serve the model, and ImportError without Triton.

        tensors: the weights by their names in the files, each read when it is copied to the device
        ops:     what computes between the matrix products, and those with quantized weights; None: Triton's kernels
        quantize: round matrices to integers; None: those that are integers in the files stay what they are. If its
                  activations are fp8, they are rounded for the FP8 matrices of the files, as `float8` says
        part:     the place of this process among several, each of which has its part of the weights
        weights_type: reads the weights
        """
        if dtype == torch.bfloat16 and not has_bfloat16(device):
            raise UnsupportedConfig(f"{gpu_name(device)} does not compute in bfloat16")
        super().__init__(config, dtype, device)
        if ops is None:
            from cbatch.attention.triton import fits

            if not fits(self.layers, dtype, device):
                largest = max(max(layer.key_dim, layer.value_dim) for layer in self.layers)
                raise UnsupportedConfig(f"the kernels do not support heads of {largest}, or do not compute in {dtype}")
        self.ops = ops or by_triton(device)
        tensors = self.accept(tensors)
        least_bits = 2 if isinstance(tensors, StoredWeights) else 4 if quantize is not None else 8 * dtype.itemsize
        check_room("The weights", self.num_parameters * least_bits // 8 // part.size, device)
        if isinstance(tensors, StoredWeights):
            quantize = quantize or Quantization(STORED)
        self._head_widths = [self.program.head.columns]
        if part.size > 1:
            self._head_widths = part.widths_of(self.program.head.columns)
            self.use(shard_of(self.program, part, partial(_group_of, quantize, tensors)))
        self.part = part
        self._group: ProcessGroup | None = None
        asks = quantize is not None and quantize.activations == "fp8"
        self.float8 = Float8Use(float8_problem(device, dtype)) if asks else Float8Use()
        tied = self.program.head if self.program.head.parts == (self.program.embedding,) else None
        weights = weights_type(tensors, dtype, device, quantize, tied, self.float8)
        self._on_device = DevicePlan(self.program, weights)
        self.head = self._on_device.head
        self.weight_bytes = sum(weight.nbytes for weight in weights.loaded)
        self.linear_cost = self.program.linear_cost(sum(matrix.nbytes for matrix in weights.matrices))
        self._adapters: DeviceAdapters | None = None
        self.num_adapters = 0
        if quantize is not None:
            activations = "fp8" if self.float8.rounded else activations_in(dtype)
            self.quantization = Quantization(quantize.weights, activations)

    def with_ops(self, ops: DeviceOps) -> CudaModel:
        """The same model with the same weights, and other operations."""
        model = copy(self)
        model.ops = ops
        return model

    def in_group(self, group: ProcessGroup) -> CudaModel:
        """The same model that computes every step together with other processes, which have the other parts.

        Without them, steps take the same time and memory, and give other numbers.
        """
        model = copy(self)
        model._group = group
        return model

    def with_adapters(self, adapters: Sequence[Adapter]) -> CudaModel:
        model = copy(self)
        model._adapters = DeviceAdapters(sites_of(self.program, adapters), self.dtype, self.device)
        model.num_adapters = len(adapters)
        return model

    def as_batch_invariant(self) -> CudaModel:
        """The same model with operations that are batch-invariant, if Triton computes them."""
        return self.with_ops(replace(self.ops, batch_invariant=True)) if self.ops.triton else self

    @property
    def batch_invariant(self) -> bool:
        """Recurrent layers are not: they go tile by tile in prompts and token by token afterwards. Nor is torch."""
        return self.ops.batch_invariant and not self.states and not self.ops.without

    @property
    def capturable(self) -> CudaModel:
        return self

    def adding(self, rows: AdapterRows) -> AddAdapters | None:
        return None if self._adapters is None else self._adapters.adding(self.ops, rows)

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch, kv_cache: KVCache, attention: AttentionBackend) -> Logits:
        metadata = attention.prepare(batch, kv_cache.block_size)
        inputs = DeviceInputs(batch.input_ids, batch.position_ids, batch.slot_mapping, kv_cache, attention, metadata)
        if batch.adapters is not None:
            inputs = inputs._replace(adapters=self.adding(rows_on(self.device, batch.adapters)))
        if batch.images is not None:
            places, positions = batch.images.places, batch.images.positions
            there = to_device([places] if positions is None else [places, positions], self.device)
            images = DeviceImages(there[0], batch.images.values.to(self.device), there[1] if len(there) > 1 else None)
            inputs = inputs._replace(images=images)
        if batch.states is not None:
            inputs = inputs._replace(recurrence=_recurrence_of(batch), states=batch.states.pool.tensors)
        hidden = self.run_layers(inputs)
        return Logits(self.run_head(hidden, batch.logit_rows), sums=self.pool(hidden, batch.pooled))

    def new_hidden_states(self, tokens: int) -> HiddenStates:
        residual = torch.empty(tokens, self.program.hidden_size, dtype=torch.float32, device=self.device)
        return HiddenStates(residual, torch.empty_like(residual, dtype=self.dtype))

    def run_layers(self, inputs: DeviceInputs, out: HiddenStates | None = None) -> HiddenStates:
        """The device must be torch's current one, on which Triton launches all kernels.

        Raises ValueError if the cache is not laid out as the kernels write it.
        """
        for keys, layer in zip(inputs.kv_cache.keys[:1], self.layers, strict=False):
            block = [inputs.kv_cache.block_size, layer.heads]
            if self.ops.heads_first:
                block.reverse()
            if keys.shape[1:] != (*block, layer.key_dim):
                raise ValueError("The cache's blocks are not laid out as the model writes them.")
        hidden = self.new_hidden_states(len(inputs.input_ids)) if out is None else out
        if self._group is not None:  # the first process may know tokens by its device only
            self._group.broadcast(inputs.input_ids)
        step = self._on_device.new_step(self.ops, inputs, hidden, self._group)
        for call in self._on_device.calls:
            call(step)
        return hidden

    def run_head(self, hidden: HiddenStates, rows: Tensor, out: Tensor | None = None) -> Tensor:
        if len(rows) == 0:  # chunks of prompts only: a kernel cannot be launched for no rows
            return hidden.residual.new_empty(0, self.vocab_size)
        chosen = self.head_input(hidden, rows)
        if self.part.size == 1:
            return self.finished(logits(self.ops, chosen, self.head.lm_head, out))
        found = self.finished(logits(self.ops, chosen, self.head.lm_head))
        out = found.new_empty(len(rows), sum(self._head_widths)) if out is None else out
        if self._group is None:
            return out.zero_()
        self._group.gather_columns(found, self._head_widths, out)
        return out

    def pool(self, hidden: HiddenStates, pooled: PooledRows | None) -> Tensor | None:
        if pooled is None:
            return None
        return pooled.sums(self.device, lambda rows: self._normed(hidden, rows, 1.0, torch.float32))

    def head_input(self, hidden: HiddenStates, rows: Tensor) -> Tensor:
        """The rows that are multiplied with the matrix of the head, [R, hidden size]."""
        return self._normed(hidden, rows, self.head.factor, self.dtype)

    def _normed(self, hidden: HiddenStates, rows: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
        (residual, added), head = hidden, self.head
        addends = () if head.added is None else (Addend(added, head.added),)
        chosen = added.new_empty(len(rows), self.program.hidden_size, dtype=dtype)
        select_and_norm(self.ops, residual, addends, rows, head.norm, factor, chosen)
        return chosen

    def finished(self, products: Tensor) -> Tensor:
        """Logits, in place of products with the matrix of the head."""
        if self.head.bias is not None or self.head.softcap:
            finish_logits(self.ops, products, self.head.bias, self.head.softcap)
        return products


def _group_of(quantize: Quantization | None, tensors: Mapping[str, Tensor], matrices: Sequence[Matrix]) -> int:
    """How many numbers of the depth of matrices share a scale; 1 if they stay numbers."""
    packing = packing_of(matrices, quantize, kept_weights(tensors, quantize), ON_GPU)
    return 1 if packing is None else packing.group


def _recurrence_of(batch: RaggedBatch) -> Recurrence:
    """Where the chunks of a step have their states, on the device."""
    states, counts = batch.states, batch.counts
    assert states is not None
    arrays = [np.append(0, counts.cumsum()), states.slots, states.snapshot_counts, states.snapshot_slots]
    there = to_device([array.astype(np.int32) for array in arrays], batch.device)
    starts, slots, snapshot_counts, snapshot_slots = there
    return Recurrence(starts, slots, snapshot_counts, snapshot_slots, int(counts.max()))
