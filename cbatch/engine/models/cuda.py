"""The fast path of the Llama family on a GPU: fused weights, and at most ten kernels for each layer of a decode step.

It computes what transformers computes for the same files (`hf_adapter.py`), with less rounding: norms, rotations,
gates, the residual stream and logits are float32 whatever the weights are.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from cbatch.engine.attention.base import AttentionBackend
from cbatch.engine.kernels.layer_ops import LayerOps, Positions
from cbatch.engine.models.base import DeviceInputs, HiddenStates, LinearCost
from cbatch.engine.models.llama_spec import check_weights, read_llama_spec, weight_shapes
from cbatch.engine.models.programs.config_reader import UnsupportedConfig
from cbatch.engine.runtime.batch import Logits, RaggedBatch
from cbatch.engine.runtime.kv_cache import KVCache, LayerShape


class Layer(NamedTuple):
    """Weights of a layer, on the device.

    qkv_proj:     [(heads + 2 * kv_heads) * head_dim, hidden]
    qk_norms:     [2 * head_dim], that of queries, then that of keys
    gate_up_proj: [2 * intermediate size, hidden]
    """

    input_norm: Tensor
    qkv_proj: Tensor
    qkv_bias: Tensor | None
    qk_norms: Tensor | None
    o_proj: Tensor
    post_attention_norm: Tensor
    gate_up_proj: Tensor
    down_proj: Tensor


class _StepTensors(NamedTuple):
    """What the layers of a step share, and the activations of its T tokens, which every layer uses again.

    residual: [T, hidden] float32. In a decode step it stays in the device's cache. For 2,000 tokens of an 8B model,
              half the bytes would save 67 MB of memory traffic beside 0.9 TFLOP, by calculation a hundredth of a
              layer's time; and rounding it in every layer is much of what a model loses in bfloat16.
    added:    [T, hidden] what attention or feed-forward adds to it
    linear_input: [T, hidden] what goes into a linear, as does `intermediate` [T, intermediate size]
    query:    [T, heads, head_dim]
    """

    metadata: Any
    kv_cache: KVCache
    attention: AttentionBackend
    positions: Positions
    residual: Tensor
    added: Tensor
    linear_input: Tensor
    query: Tensor
    intermediate: Tensor


class CudaModel:
    """A model of the Llama family, ready to run ragged batches over a paged cache.

    It needs a cache whose blocks are laid out as its `ops` write them (`LayerOps.heads_first`).
    """

    has_own_threads = False

    def __init__(
        self,
        config: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        ops: LayerOps | None = None,
    ) -> None:
        """Raises UnsupportedConfig if another path has to serve the model.

        tensors: the weights by their names in the files, each read when it is copied to the device
        ops:     what computes between the matrix products; None: Triton's kernels
        """
        # In bfloat16 and float16, cuBLAS may otherwise add parts of a product in 16 bits.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        self.config = config
        self.spec = spec = read_llama_spec(config)
        self.name = str((config.get("architectures") or [spec.model_type])[0])
        self.kind = spec.model_type
        self.dtype = dtype
        self.device = device
        self.vocab_size = spec.vocab_size
        self.max_model_len = spec.max_model_len
        self.layers = [LayerShape(spec.num_kv_heads, spec.head_dim, spec.head_dim)] * spec.num_layers
        self.windows: list[int | None] = [window or None for window in spec.windows]
        self.layer_devices = [self.device] * spec.num_layers
        self.ops = ops or _triton_ops(self.layers, dtype)
        self.num_parameters = check_weights(spec, tensors)
        loader = _Loader(weight_shapes(spec), tensors, dtype, device)
        self._layers = [loader.layer(number) for number in range(spec.num_layers)]
        self._final_norm = loader.read("model.norm.weight")
        self._embedding = loader.read("model.embed_tokens.weight")
        self._lm_head = self._embedding if spec.is_tied else loader.read("lm_head.weight")
        self._inv_freq = spec.inv_freq.to(device)

    def with_ops(self, ops: LayerOps) -> CudaModel:
        """The same model with the same weights, and other operations."""
        model = copy(self)
        model.ops = ops
        return model

    @property
    def weight_bytes(self) -> int:
        weights = {self._embedding, self._lm_head, self._final_norm}
        for layer in self._layers:
            weights |= {weight for weight in layer if weight is not None}
        return sum(weight.nbytes for weight in weights)

    @property
    def linear_cost(self) -> LinearCost:
        spec = self.spec
        head = spec.vocab_size * spec.hidden_size
        matrices = [self._lm_head]
        for layer in self._layers:
            matrices += [layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj]
        parameters = self.num_parameters - head * (1 if spec.is_tied else 2)
        return LinearCost(sum(matrix.nbytes for matrix in matrices), parameters, head)

    @property
    def capturable(self) -> CudaModel:
        return self

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch, kv_cache: KVCache, attention: AttentionBackend) -> Logits:
        """Logits [R, vocabulary] float32 of the wanted rows."""
        metadata = attention.prepare(batch, kv_cache.block_size)
        inputs = DeviceInputs(batch.input_ids, batch.position_ids, batch.slot_mapping)
        return Logits(self.run_head(self.run_layers(inputs, metadata, kv_cache, attention), batch.logit_rows))

    def new_hidden_states(self, tokens: int) -> HiddenStates:
        residual = torch.empty(tokens, self.spec.hidden_size, dtype=torch.float32, device=self.device)
        return HiddenStates(residual, torch.empty_like(residual, dtype=self.dtype))

    def run_layers(
        self,
        inputs: DeviceInputs,
        metadata: Any,
        kv_cache: KVCache,
        attention: AttentionBackend,
        out: HiddenStates | None = None,
    ) -> HiddenStates:
        """See `CapturableModel`. The device must be torch's current one, on which Triton launches all kernels.

        Raises ValueError if the cache is not laid out as the kernels write it.
        """
        spec = self.spec
        block = [kv_cache.block_size, spec.num_kv_heads]
        if self.ops.heads_first:
            block.reverse()
        if kv_cache.keys[0].shape[1:] != (*block, spec.head_dim):
            raise ValueError("The cache's blocks are not laid out as the model writes them.")
        residual, added = hidden = self.new_hidden_states(len(inputs.input_ids)) if out is None else out
        step = self._prepare_step(inputs, metadata, kv_cache, attention, hidden)
        norm, eps = self._layers[0].input_norm, spec.rms_norm_eps
        self.ops.embed_and_norm(self._embedding, inputs.input_ids, residual, norm, eps, step.linear_input)
        self._layer(0, step)
        for number in range(1, spec.num_layers):
            self.ops.add_and_norm(residual, added, self._layers[number].input_norm, eps, step.linear_input)
            self._layer(number, step)
        return hidden

    def run_head(self, hidden: HiddenStates, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """See `CapturableModel`."""
        residual, added = hidden
        if len(rows) == 0:  # chunks of prompts only: a kernel cannot be launched for no rows
            return residual.new_empty(0, self.vocab_size)
        chosen = added.new_empty(len(rows), self.spec.hidden_size)
        self.ops.select_and_norm(residual, added, rows, self._final_norm, self.spec.rms_norm_eps, chosen)
        return self.ops.logits(chosen, self._lm_head, out)

    def _prepare_step(
        self,
        inputs: DeviceInputs,
        metadata: Any,
        kv_cache: KVCache,
        attention: AttentionBackend,
        hidden: HiddenStates,
    ) -> _StepTensors:
        spec, tokens = self.spec, len(inputs.position_ids)
        # By torch's own functions, which are exact for large angles too; a kernel's may not be.
        angles = inputs.position_ids[:, None].float() * self._inv_freq
        residual, added = hidden
        return _StepTensors(
            metadata,
            kv_cache,
            attention,
            Positions(angles.cos(), angles.sin(), inputs.slot_mapping),
            residual,
            added,
            torch.empty_like(added),
            added.new_empty(tokens, spec.num_heads, spec.head_dim),
            added.new_empty(tokens, spec.intermediate_size),
        )

    def _layer(self, number: int, step: _StepTensors) -> None:
        """A layer but for its last sum: leaves in `added` what its feed-forward part adds to the residual."""
        layer, eps = self._layers[number], self.spec.rms_norm_eps
        keys, values = step.kv_cache.keys[number], step.kv_cache.values[number]
        qkv = linear(step.linear_input, layer.qkv_proj, layer.qkv_bias)
        self.ops.rope_and_store_kv(qkv, step.positions, layer.qk_norms, eps, step.query, keys, values)
        scale, window = self.spec.head_dim**-0.5, self.windows[number]
        attended = step.attention.attend(step.query, keys, values, step.metadata, scale=scale, window=window)
        torch.mm(attended.flatten(1), layer.o_proj.t(), out=step.added)
        self.ops.add_and_norm(step.residual, step.added, layer.post_attention_norm, eps, step.linear_input)
        self.ops.silu_and_mul(linear(step.linear_input, layer.gate_up_proj), step.intermediate)
        torch.mm(step.intermediate, layer.down_proj.t(), out=step.added)


def _triton_ops(layers: list[LayerShape], dtype: torch.dtype) -> LayerOps:
    """Raises UnsupportedConfig if the kernels do not serve such layers, and ImportError without Triton."""
    from cbatch.engine.attention.triton import fits
    from cbatch.engine.kernels.triton import layer

    if not fits(layers, dtype):
        raise UnsupportedConfig(
            f"the kernels do not support heads of {layers[0].key_dim}, or do not compute in {dtype}"
        )
    return layer


class _Loader(NamedTuple):
    """Copies weights to a device; those that are multiplied together become one."""

    shapes: Mapping[str, tuple[int, ...]]
    tensors: Mapping[str, Tensor]
    dtype: torch.dtype
    device: torch.device

    def read(self, *names: str) -> Tensor:
        """Tensors stacked along their rows, each copied straight to its place on the device."""
        heights = [self.shapes[name][0] for name in names]
        out = torch.empty(sum(heights), *self.shapes[names[0]][1:], dtype=self.dtype, device=self.device)
        for part, name in zip(torch.split(out, heights), names, strict=True):
            part.copy_(self.tensors[name])
        return out

    def layer(self, number: int) -> Layer:
        prefix = f"model.layers.{number}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        biases = [f"{attention}{part}_proj.bias" for part in "qkv"]
        norms = attention + "q_norm.weight", attention + "k_norm.weight"
        return Layer(
            input_norm=self.read(prefix + "input_layernorm.weight"),
            qkv_proj=self.read(*(f"{attention}{part}_proj.weight" for part in "qkv")),
            qkv_bias=self.read(*biases) if biases[0] in self.shapes else None,
            qk_norms=self.read(*norms) if norms[0] in self.shapes else None,
            o_proj=self.read(attention + "o_proj.weight"),
            post_attention_norm=self.read(prefix + "post_attention_layernorm.weight"),
            gate_up_proj=self.read(mlp + "gate_proj.weight", mlp + "up_proj.weight"),
            down_proj=self.read(mlp + "down_proj.weight"),
        )
