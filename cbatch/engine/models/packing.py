"""Packs the weights of a model of the Llama family for the CPU kernels."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.engine.kernels.cpu.decoder import Weights
from cbatch.engine.kernels.cpu.linear import pack_weight
from cbatch.engine.kernels.cpu.microkernel import COLUMNS, LANES, pad_columns
from cbatch.engine.kernels.cpu.tensors import as_array
from cbatch.engine.models.llama_spec import LlamaSpec, weight_shapes
from cbatch.engine.models.packed_file import Arrays, ArrayShape, PackedFile
from cbatch.engine.runtime.cpu import empty

_log = logging.getLogger("cbatch")

PACKING = {"version": 1, "lanes": LANES, "columns": COLUMNS}
"""The order of packed numbers. It is the same for every processor; whoever changes it raises the version."""


def pack_weights(
    spec: LlamaSpec, tensors: Mapping[str, Tensor], dtype: torch.dtype, quantize: bool, shared: PackedFile | None = None
) -> Weights:
    """The weights as the kernels take them, in memory of this process or mapped.

    tensors:  by their names in the files; `check_weights` has accepted them. Not read if the shared file is there
    quantize: to int8, with a scale for each column
    shared:   the file that other processes map too; if it cannot be used, a line in the log says why
    """

    def fill(arrays: Arrays) -> None:
        _Packer(arrays, quantize).add_all(spec, tensors, dtype)

    shapes = array_shapes(spec, dtype, quantize)
    if shared is not None:
        try:
            return _weights(spec, shared.arrays(shapes, fill))
        except OSError as error:
            _log.warning("Packed weights are not shared with other engines in %s: %s.", shared.folder, error)
    arrays = {name: empty(*array) for name, array in shapes.items()}
    fill(arrays)
    return _weights(spec, arrays)


def array_shapes(spec: LlamaSpec, dtype: torch.dtype, quantize: bool) -> dict[str, ArrayShape]:
    """The arrays of `Weights` that hold the model's numbers."""
    names, linears = weight_shapes(spec), _linears(spec)
    layers, hidden = spec.num_layers, spec.hidden_size
    has_bias = "model.layers.0.self_attn.q_proj.bias" in names
    has_qk_norms = "model.layers.0.self_attn.q_norm.weight" in names
    single = np.dtype(np.float32)
    element = single if dtype == torch.float32 else np.dtype(np.uint16)
    size = sum(columns * depth for columns, depth in linears)
    scales = sum(columns for columns, _ in linears) if quantize else 0
    return {
        "matrices": ArrayShape((size,), np.dtype(np.int8) if quantize else element),
        "scales": ArrayShape((scales,), single),
        "qkv_bias": ArrayShape((layers, linears[0][0]) if has_bias else (0, 1), single),
        "norms": ArrayShape((layers, 2, hidden), single),
        "final_norm": ArrayShape((hidden,), single),
        "qk_norms": ArrayShape((layers, 2, spec.head_dim) if has_qk_norms else (0, 2, 1), single),
        "embedding": ArrayShape((0 if spec.is_tied else spec.vocab_size, hidden), element),
    }


def _linears(spec: LlamaSpec) -> list[tuple[int, int]]:
    """Columns, padded, and depth of each matrix, in their order: four of each layer, then that of the logits."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    query, cache = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    layer = [(query + 2 * cache, hidden), (hidden, query), (2 * inner, hidden), (hidden, inner)]
    return [(pad_columns(columns), depth) for columns, depth in layer * spec.num_layers + [(spec.vocab_size, hidden)]]


def _weights(spec: LlamaSpec, arrays: Arrays) -> Weights:
    """Adds where each matrix and its scales begin."""
    linears = _linears(spec)
    starts = [0, *accumulate(columns * depth for columns, depth in linears)]
    scale_starts = [0, *accumulate(columns for columns, _ in linears)]
    *layers, head = scale_starts[:-1]
    return Weights(
        starts=np.array(starts[:-2]).reshape(-1, 4),
        lm_head=starts[-2],
        scale_starts=np.array([*layers, *[head] * 4]).reshape(-1, 4),
        **arrays,
    )


class _Packer:
    """Writes weights into the arrays. Matrices are added one at a time, so that no weight is in memory twice."""

    def __init__(self, arrays: Arrays, quantize: bool) -> None:
        self.arrays = arrays
        self.quantize = quantize
        self.used = 0
        self.columns = 0

    def add(self, weight: Tensor) -> None:
        """Packs a weight [columns, depth] behind those that were added before."""
        columns = pad_columns(len(weight))
        if self.quantize:
            weight, scale = quantized(weight)
            padded = np.pad(scale.numpy(), (0, columns - len(scale)))
            self.arrays["scales"][self.columns : self.columns + columns] = padded
        packed = pack_weight(as_array(weight))
        self.arrays["matrices"][self.used : self.used + packed.size] = packed
        self.used += packed.size
        self.columns += columns

    def add_all(self, spec: LlamaSpec, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        """In the order of `_linears`."""

        def read(name: str) -> Tensor:
            return tensors[name].to(dtype)

        for layer in range(spec.num_layers):
            attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
            self.add(torch.cat([read(f"{attention}{part}_proj.weight") for part in "qkv"]))
            self.add(read(attention + "o_proj.weight"))
            self.add(interleave(read(mlp + "gate_proj.weight"), read(mlp + "up_proj.weight")))
            self.add(read(mlp + "down_proj.weight"))
        embedding = "model.embed_tokens.weight"
        self.add(read(embedding if spec.is_tied else "lm_head.weight"))
        if not spec.is_tied:
            self.arrays["embedding"][:] = as_array(read(embedding))
        self._add_vectors(tensors)

    def _add_vectors(self, tensors: Mapping[str, Tensor]) -> None:
        arrays = self.arrays
        arrays["final_norm"][:] = _plain(tensors, "model.norm.weight")
        for layer, (before_attention, before_mlp) in enumerate(arrays["norms"]):
            before_attention[:] = _plain(tensors, f"model.layers.{layer}.input_layernorm.weight")
            before_mlp[:] = _plain(tensors, f"model.layers.{layer}.post_attention_layernorm.weight")
        for layer, norms in enumerate(arrays["qk_norms"]):
            for norm, part in zip(norms, "qk", strict=True):
                norm[:] = _plain(tensors, f"model.layers.{layer}.self_attn.{part}_norm.weight")
        for layer, bias in enumerate(arrays["qkv_bias"]):
            parts = [_plain(tensors, f"model.layers.{layer}.self_attn.{part}_proj.bias") for part in "qkv"]
            joined = np.concatenate(parts)
            bias[:] = np.pad(joined, (0, len(bias) - len(joined)))


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight [columns, depth] rounded to int8, and the float32 scale of each column: its largest number / 127."""
    weight = weight.float()
    scale = weight.abs().amax(dim=1).clamp(min=1e-30) / 127
    return (weight / scale[:, None]).round().to(torch.int8), scale


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """Two weights [columns, depth] as one, 16 columns of each in turn: a tile has both factors of 16 results."""
    padding = -len(gate) % LANES
    both = torch.stack([torch.nn.functional.pad(weight, (0, 0, 0, padding)) for weight in (gate, up)])
    return both.view(2, -1, LANES, gate.shape[1]).transpose(0, 1).reshape(-1, gate.shape[1])


def _plain(tensors: Mapping[str, Tensor], name: str) -> NDArray[np.float32]:
    array: NDArray[np.float32] = tensors[name].float().numpy()
    return array
