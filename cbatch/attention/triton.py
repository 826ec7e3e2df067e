"""Attention on a GPU over the paged cache."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from cbatch.attention.base import AttendOptions
from cbatch.attention.reference import ReferenceAttention, ReferenceMetadata
from cbatch.kernels.triton.attention_decode import DecodeGrid, DecodeTuning, attend_decode
from cbatch.kernels.triton.attention_metadata import AttentionMetadata, StepBuffers, build_metadata
from cbatch.kernels.triton.attention_prefill import PrefillTuning, attend_prefill
from cbatch.kernels.triton.attention_tile import Partials, attend_arguments, combine, store_kv
from cbatch.kernels.triton.occupancy import DeviceLimits, device_limits
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.kv_cache import LayerShape, Shape, as_bytes

LARGEST_HEAD, LARGEST_HEAD_BELOW_80 = 512, 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def fits(layers: list[LayerShape], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels serve layers of these sizes in this type, on a device."""
    largest = LARGEST_HEAD if device_limits(device).capability >= 80 else LARGEST_HEAD_BELOW_80
    return dtype in DTYPES and all(max(layer.key_dim, layer.value_dim) <= largest for layer in layers)


class TritonAttention:
    """One kernel for decode rows and chunks of few tokens (`kernels/triton/attention_decode.py`), another for longer
    chunks (`attention_prefill.py`), and one that merges those that are split over the keys (`attention_tile.py`).

    A block is [heads, block_size, dim]: what a program reads of it is contiguous.

    If it is batch-invariant, one kernel takes everything and nothing is split: a token has the same bits however its
    sequence was cut into steps. A few sequences with a long past take longer, because few programs read it.

    The kernels are causal. Steps with tokens that see later ones are left to the reference.
    """

    name = "triton"
    gathers_kv = False

    def __init__(
        self,
        device: torch.device,
        decode: DecodeTuning | None = None,
        prefill: PrefillTuning | None = None,
        limits: DeviceLimits | None = None,
        kv_dtype: torch.dtype | None = None,
        *,
        batch_invariant: bool = False,
    ) -> None:
        """limits: of the chip that kernels are compiled for; None: those of the device"""
        self.device = device
        self.kv_dtype = kv_dtype
        self.limits = limits or device_limits(device)
        self.decode = decode or DecodeTuning.for_chip(self.limits)
        self.prefill = prefill or PrefillTuning()
        self.batch_invariant = batch_invariant
        self._grid = DecodeGrid(self.limits)
        self._reference = ReferenceAttention(kv_dtype)

    def block_shapes(self, layer: LayerShape, block_size: int, dtype: torch.dtype) -> tuple[Shape, Shape]:
        return (layer.heads, block_size, layer.key_dim), (layer.heads, block_size, layer.value_dim)

    def prepare(self, batch: RaggedBatch, block_size: int) -> AttentionMetadata | ReferenceMetadata:
        if batch.ends_seen is not None:
            return self._reference.prepare(batch, block_size)
        return build_metadata(batch, self.decode.split, whole=self.batch_invariant)

    def graph_buffers(
        self,
        tokens: int,
        sequences: int,
        max_blocks: int,
        block_size: int,
        max_tokens: int | None = None,
        *,
        decode_only: bool,
    ) -> StepBuffers:
        """Buffers for a graph of so many tokens of so many sequences, of so many blocks each.

        max_tokens:  limit of the tokens of all sequences, with those in the cache; None: each may fill its blocks
        decode_only: every sequence has one token, so there are as many; else any mix of chunks, whose programs are
                     found on the device
        """
        return StepBuffers(
            tokens, sequences, max_blocks, block_size, self.decode.split, self.device, max_tokens,
            decode_only=decode_only, whole=self.batch_invariant,
        )  # fmt: skip

    def store_kv(
        self, keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor,
        metadata: AttentionMetadata | ReferenceMetadata,
    ) -> None:  # fmt: skip
        store_kv(as_bytes(keys), as_bytes(values), in_rows(new_keys), in_rows(new_values), metadata.slots)

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, metadata: AttentionMetadata | ReferenceMetadata,
        **options: Unpack[AttendOptions],
    ) -> Tensor:  # fmt: skip
        if isinstance(metadata, ReferenceMetadata):
            return self._reference.attend(query, keys.transpose(1, 2), values.transpose(1, 2), metadata, **options)
        query, keys, values = in_rows(query), as_bytes(keys), as_bytes(values)
        arguments = attend_arguments(**options)
        # No decode kernel writes the zeros of padding then.
        make = query.new_zeros if self.batch_invariant else query.new_empty
        out = make((*query.shape[:2], values.shape[-1]))
        parts = Partials.empty(metadata, out, arguments["window"])
        attend_decode(query, keys, values, out, parts, metadata, arguments, self._grid, self.decode)
        attend_prefill(query, keys, values, out, parts, metadata, arguments, self.prefill, self.limits)
        combine(out, parts, metadata, arguments, query.shape[1] // keys.shape[1], self.limits)
        return out


def in_rows(tensor: Tensor) -> Tensor:
    """The tensor [T, heads, dim] with contiguous heads, and strides of rows and heads that are multiples of 16 or not
    whatever T is: kernels are compiled for each of both. Models of transformers give [heads, T, dim], transposed.
    """
    heads, dim = tensor.shape[1:]
    if tensor.stride(-1) == 1 and (dim % 16 == 0 or tensor.stride() == (heads * dim, dim, 1)):
        return tensor
    return tensor.contiguous().flatten().view(tensor.shape)  # one row may have any stride and be contiguous
