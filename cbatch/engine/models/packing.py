"""Packs the weights of a model of the Llama family for the CPU kernels."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.engine.kernels.cpu.decoder import Weights
from cbatch.engine.kernels.cpu.linear import pack_weight
from cbatch.engine.kernels.cpu.microkernel import LANES, pad_columns
from cbatch.engine.kernels.cpu.tensors import as_array
from cbatch.engine.models.llama_spec import LlamaSpec
from cbatch.engine.runtime.cpu import empty


class _Packer:
    """One array for all matrices. They are added one at a time, so that no weight is in memory twice.

    quantize: to int8, with a scale for each column
    """

    def __init__(self, size: int, dtype: torch.dtype, quantize: bool) -> None:
        self.quantize = quantize
        element = np.int8 if quantize else np.float32 if dtype == torch.float32 else np.uint16
        self.matrices = empty(size, element)
        self.scales: list[NDArray[np.float32]] = []
        self.used = 0
        self.columns = 0

    def add(self, weight: Tensor) -> tuple[int, int]:
        """Packs a weight [columns, depth]; returns where it begins, and where its columns begin among all columns."""
        place = self.used, self.columns
        columns = pad_columns(len(weight))
        if self.quantize:
            weight, scale = quantized(weight)
            self.scales.append(np.pad(scale.numpy(), (0, columns - len(scale))))
        packed = pack_weight(as_array(weight))
        self.matrices[self.used : self.used + packed.size] = packed
        self.used += packed.size
        self.columns += columns
        return place


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


def _size(spec: LlamaSpec) -> int:
    """How many numbers all matrices have, their columns padded."""
    query, cache = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    layer = spec.hidden_size * (pad_columns(query + 2 * cache) + pad_columns(2 * spec.intermediate_size))
    layer += pad_columns(spec.hidden_size) * (query + spec.intermediate_size)
    return spec.num_layers * layer + pad_columns(spec.vocab_size) * spec.hidden_size


def pack_weights(spec: LlamaSpec, tensors: Mapping[str, Tensor], dtype: torch.dtype, quantize: bool) -> Weights:
    """tensors: by their names in the files; `check_weights` has accepted them."""

    def read(name: str) -> Tensor:
        return tensors[name].to(dtype)

    packer = _Packer(_size(spec), dtype, quantize)
    places = []
    for layer in range(spec.num_layers):
        attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        places.append(
            [
                packer.add(torch.cat([read(f"{attention}{part}_proj.weight") for part in "qkv"])),
                packer.add(read(attention + "o_proj.weight")),
                packer.add(interleave(read(mlp + "gate_proj.weight"), read(mlp + "up_proj.weight"))),
                packer.add(read(mlp + "down_proj.weight")),
            ]
        )
    embedding = "model.embed_tokens.weight"
    head = packer.add(read(embedding if spec.is_tied else "lm_head.weight"))
    return Weights(
        matrices=packer.matrices,
        starts=np.array([[start for start, _ in layer] for layer in places]),
        lm_head=head[0],
        scales=np.concatenate(packer.scales) if quantize else np.empty(0, np.float32),
        scale_starts=np.array([[column for _, column in layer] for layer in [*places, [head] * 4]]),
        qkv_bias=_biases(spec, tensors),
        norms=_stack(tensors, spec, ["input_layernorm", "post_attention_layernorm"]),
        final_norm=_plain(tensors, "model.norm.weight"),
        qk_norms=_stack(tensors, spec, ["self_attn.q_norm", "self_attn.k_norm"]),
        embedding=as_array(torch.empty(0, spec.hidden_size, dtype=dtype) if spec.is_tied else read(embedding).clone()),
    )


def _plain(tensors: Mapping[str, Tensor], name: str) -> NDArray[np.float32]:
    array: NDArray[np.float32] = tensors[name].float().clone().numpy()
    return array


def _stack(tensors: Mapping[str, Tensor], spec: LlamaSpec, names: list[str]) -> NDArray[np.float32]:
    """Vectors of each layer: [layers, names, size]; no layers if the family has none."""
    if f"model.layers.0.{names[0]}.weight" not in tensors:
        return np.empty((0, len(names), 1), np.float32)
    rows = [
        [_plain(tensors, f"model.layers.{layer}.{name}.weight") for name in names] for layer in range(spec.num_layers)
    ]
    return np.array(rows)


def _biases(spec: LlamaSpec, tensors: Mapping[str, Tensor]) -> NDArray[np.float32]:
    """The biases of queries, keys and values: [layers, columns], padded; no layers if the family has none."""
    names = [[f"model.layers.{layer}.self_attn.{part}_proj.bias" for part in "qkv"] for layer in range(spec.num_layers)]
    if names[0][0] not in tensors:
        return np.empty((0, 1), np.float32)
    rows = np.array([np.concatenate([_plain(tensors, name) for name in layer]) for layer in names])
    padding = pad_columns(rows.shape[1]) - rows.shape[1]
    return np.pad(rows, ((0, 0), (0, padding)))
