"""The fast path of the Llama family on a GPU: fused weights, and at most ten kernels for a layer of a decode step.

What it computes is what transformers computes for the same files (`models/transformers.py`). It rounds less: norms,
rotations, gates and the residual stream are float32 whatever the weights are, and so are the logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from cbatch.engine.attention.base import AttentionBackend
from cbatch.engine.attention.triton import fits
from cbatch.engine.kernels.triton.layer import add_norm, begin, end, gate, place
from cbatch.engine.models.base import Linears
from cbatch.engine.models.family import Family, Unfit, check_tensors, read_family, shapes_of
from cbatch.engine.runtime.batch import Logits, RaggedBatch
from cbatch.engine.runtime.kv_cache import KVPool, LayerShape


class Layer(NamedTuple):
    """Weights of a layer, on the device.

    mixing:     [(heads + 2 * kv_heads) * head_dim, hidden] of queries, keys and values; `bias` is theirs
    head_norms: [2 * head_dim] of queries, then of keys
    gated:      [2 * inner, hidden] of the gate, then of what it lets through
    """

    norm: Tensor
    mixing: Tensor
    bias: Tensor | None
    head_norms: Tensor | None
    output: Tensor
    inner_norm: Tensor
    gated: Tensor
    down: Tensor


class _Step(NamedTuple):
    """What the layers of a step share: where its T tokens stand, and room that every layer uses again.

    cosines, sines: [T, head_dim / 2] float32
    stream: [T, hidden] float32, the residual stream. In a decode step it stays in the device's cache; for 2,000 tokens
            of an 8B model, half the bytes would save 67 MB of memory traffic beside 0.9 TFLOP, by arithmetic a
            hundredth of a layer's time. Rounding it in every layer is much of what a model loses in bfloat16.
    input:  [T, hidden] what goes into a linear; `inner` [T, inner] likewise
    query:  [T, heads, head_dim]
    """

    slots: Tensor
    metadata: Any
    pool: KVPool
    attention: AttentionBackend
    cosines: Tensor
    sines: Tensor
    stream: Tensor
    input: Tensor
    query: Tensor
    inner: Tensor


class GpuDecoder:
    """A model of the Llama family, ready to run ragged batches over a paged cache.

    The cache's blocks have to be laid out as [kv_heads, block_size, head_dim].
    """

    has_own_threads = False

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raises Unfit where another path has to serve the model.

        tensors: the weights by their names in the files, each asked for when it is brought to the device
        """
        self.config = config
        self.family = family = read_family(config)
        self.name = str((config.get("architectures") or [family.kind])[0])
        self.kind = family.kind
        self.dtype = dtype
        self.device = device
        self.vocab_size = family.vocabulary
        self.max_model_len = family.max_model_len
        self.layers = [LayerShape(family.kv_heads, family.head_dim, family.head_dim)] * family.layers
        self.windows: list[int | None] = [window or None for window in family.windows]
        if not fits(self.layers, dtype):
            raise Unfit(
                f"its heads of {family.head_dim} are too large for the kernels, or they do not compute in {dtype}"
            )
        self.num_parameters = check_tensors(family, tensors)
        loader = _Loader(family, tensors, dtype, device)
        self._layers = [loader.layer(number) for number in range(family.layers)]
        self._last_norm = loader.read("model.norm.weight")
        self._embedding = loader.read("model.embed_tokens.weight")
        self._head = self._embedding if family.is_tied else loader.read("lm_head.weight")
        self._frequencies = family.frequencies.to(device)

    @property
    def weight_bytes(self) -> int:
        weights = {self._embedding, self._head, self._last_norm}
        for layer in self._layers:
            weights |= {weight for weight in layer if weight is not None}
        return sum(weight.nbytes for weight in weights)

    @property
    def linears(self) -> Linears:
        family = self.family
        head = family.vocabulary * family.hidden
        matrices = [self._head]
        for layer in self._layers:
            matrices += [layer.mixing, layer.output, layer.gated, layer.down]
        parameters = self.num_parameters - head * (1 if family.is_tied else 2)
        return Linears(sum(matrix.nbytes for matrix in matrices), parameters, head)

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch, pool: KVPool, attention: AttentionBackend) -> Logits:
        """Logits [R, vocabulary] float32 of the rows that are wanted."""
        metadata = attention.prepare(batch, pool.block_size)
        inputs = batch.input_ids, batch.position_ids, batch.slot_mapping, batch.logit_rows
        return Logits(self.compute(*inputs, metadata, pool, attention))

    def compute(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        slot_mapping: Tensor,
        logit_rows: Tensor,
        metadata: Any,
        pool: KVPool,
        attention: AttentionBackend,
        out: Tensor | None = None,
    ) -> Tensor:
        """The part of `forward` that runs on the device alone; returns logits [R, vocabulary] float32.

        It never waits for the device, and takes nothing from the host but the shapes of tensors, as far as `attend`
        does so too: it can be captured as a graph, and replayed with other numbers in the same tensors. Before that it
        has to have run once, with as many tokens, so that its kernels are compiled.

        input_ids, position_ids, slot_mapping: [T] integers, the slot of a token that is not to be kept negative
        logit_rows: [R] integers
        metadata:   what `attention.prepare` made of the step
        out:        [R, vocabulary] float32 for the logits, where there is room for them already

        The device has to be torch's current one, for Triton launches there wherever the tensors lie.

        Raises ValueError where the cache is laid out in another way than the kernels write it.
        """
        family = self.family
        if pool.keys[0].shape[1:] != (family.kv_heads, pool.block_size, family.head_dim):
            raise ValueError("The cache's blocks have to be laid out as [kv_heads, block_size, head_dim].")
        step = self._begin(position_ids, slot_mapping, metadata, pool, attention)
        begin(self._embedding, input_ids, step.stream, self._layers[0].norm, family.eps, step.input)
        added = self._layer(0, step)
        for number in range(1, family.layers):
            add_norm(step.stream, added, self._layers[number].norm, family.eps, step.input)
            added = self._layer(number, step)
        return self._logits(step.stream, added, logit_rows, out)

    def _begin(
        self, position_ids: Tensor, slots: Tensor, metadata: Any, pool: KVPool, attention: AttentionBackend
    ) -> _Step:
        family, tokens = self.family, len(position_ids)
        # By torch's own functions, which are exact for large angles too; a kernel's may not be.
        angles = position_ids[:, None].float() * self._frequencies
        stream = angles.new_empty(tokens, family.hidden)
        kept = stream.new_empty(0, dtype=self.dtype)
        return _Step(
            slots,
            metadata,
            pool,
            attention,
            angles.cos(),
            angles.sin(),
            stream,
            kept.new_empty(tokens, family.hidden),
            kept.new_empty(tokens, family.heads, family.head_dim),
            kept.new_empty(tokens, family.inner),
        )

    def _layer(self, number: int, step: _Step) -> Tensor:
        """A layer up to what its gated part adds to the stream, [T, hidden]; its keys and values are cached then."""
        layer, eps = self._layers[number], self.family.eps
        keys, values = step.pool.keys[number], step.pool.values[number]
        mixed = linear(step.input, layer.mixing, layer.bias)
        place(mixed, step.cosines, step.sines, step.slots, layer.head_norms, eps, step.query, keys, values)
        scale, window = self.family.head_dim**-0.5, self.windows[number]
        attended = step.attention.attend(step.query, keys, values, step.metadata, scale=scale, window=window)
        added = linear(attended.flatten(1), layer.output)
        add_norm(step.stream, added, layer.inner_norm, eps, step.input)
        gate(linear(step.input, layer.gated), step.inner)
        return linear(step.inner, layer.down)

    def _logits(self, stream: Tensor, added: Tensor, rows: Tensor, out: Tensor | None) -> Tensor:
        if len(rows) == 0:  # chunks of prompts only; kernels cannot be launched for no rows
            return stream.new_empty(0, self.vocab_size)
        chosen = stream.new_empty(len(rows), self.family.hidden, dtype=self.dtype)
        end(stream, added, rows, self._last_norm, self.family.eps, chosen)
        # In bfloat16, many a token would have the same logit as the best. The device's sums are float32 in any case,
        # and to write them as they are takes less than a kernel that widens them for the sampler.
        if self.device.type == "cuda" and self.dtype != torch.float32:
            return torch.mm(chosen, self._head.t(), out_dtype=torch.float32, out=out)
        logits = linear(chosen, self._head).float()
        return logits if out is None else out.copy_(logits)


class _Loader:
    """Brings weights to a device, those that are multiplied together as one."""

    def __init__(self, family: Family, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
        self.shapes = shapes_of(family)
        self.tensors = tensors
        self.dtype = dtype
        self.device = device

    def read(self, *names: str) -> Tensor:
        """Tensors one below the other. They are copied one at a time into their place on the device."""
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
            norm=self.read(prefix + "input_layernorm.weight"),
            mixing=self.read(*(f"{attention}{part}_proj.weight" for part in "qkv")),
            bias=self.read(*biases) if biases[0] in self.shapes else None,
            head_norms=self.read(*norms) if norms[0] in self.shapes else None,
            output=self.read(attention + "o_proj.weight"),
            inner_norm=self.read(prefix + "post_attention_layernorm.weight"),
            gated=self.read(mlp + "gate_proj.weight", mlp + "up_proj.weight"),
            down=self.read(mlp + "down_proj.weight"),
        )
