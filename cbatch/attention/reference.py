"""Attention that gathers the blocks of each sequence: slow and plain, the reference for every faster kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Unpack

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cbatch.attention.base import AttendOptions
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.kv_cache import FP8, U8, U8_SCALE_BYTES, LayerShape, Shape, as_bytes, as_numbers, as_stored


@dataclass(frozen=True, slots=True)
class Sequence:
    """The part of a step that belongs to a sequence: rows of the ragged batch, block ids, and positions.

    ends: see `RaggedBatch.ends_seen`
    """

    rows: slice
    blocks: Tensor
    start: int
    stop: int
    ends: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ReferenceMetadata:
    """Metadata that the layers of a step share. slots [T]: the place of each token in a layer's cache.

    only_in_windows: see `RaggedBatch`
    """

    sequences: list[Sequence]
    slots: Tensor
    only_in_windows: bool = False


class ReferenceAttention:
    """One sequence at a time: gather its keys and values, then attend. A block is [block_size, heads, dim].

    is_causal: False: a token also sees those after it, as far as the step has them, within its window
    """

    name = "reference"
    gathers_kv = True
    batch_invariant = False
    graph_buffers = None

    def __init__(self, kv_dtype: torch.dtype | None = None, *, is_causal: bool = True) -> None:
        self.kv_dtype, self.is_causal = kv_dtype, is_causal

    def block_shapes(self, layer: LayerShape, block_size: int, dtype: torch.dtype) -> tuple[Shape, Shape]:
        more = U8_SCALE_BYTES if dtype == U8 else 0
        return (block_size, layer.heads, layer.key_dim + more), (block_size, layer.heads, layer.value_dim + more)

    def prepare(self, batch: RaggedBatch, block_size: int) -> ReferenceMetadata:
        sequences = []
        row, ends = 0, None if batch.ends_seen is None else torch.from_numpy(batch.ends_seen).to(batch.device)
        for table, start, stop in zip(batch.block_tables, batch.starts, batch.stops, strict=True):
            blocks, rows = table[: -(-stop // block_size)], slice(row, row + stop - start)
            sequences.append(Sequence(rows, blocks, start, stop, None if ends is None else ends[rows]))
            row += stop - start
        return ReferenceMetadata(sequences, batch.slot_mapping, batch.only_in_windows)

    def store_kv(
        self, keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, metadata: ReferenceMetadata
    ) -> None:
        for cache, new in (keys, new_keys), (values, new_values):
            as_bytes(cache).flatten(0, 1).index_copy_(0, metadata.slots, as_bytes(as_stored(new, cache.dtype)))

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, metadata: ReferenceMetadata, **options: Unpack[AttendOptions]
    ) -> Tensor:
        return self.attend_to(None, query, keys, values, metadata, **options)

    def attend_to(
        self,
        indices: Tensor | None,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        metadata: ReferenceMetadata,
        **options: Unpack[AttendOptions],
    ) -> Tensor:
        """`attend` where each token may only see the positions indices [T, K] of those before it; -1: none."""
        out = query.new_empty(*query.shape[:2], values.shape[-1] - (U8_SCALE_BYTES if values.dtype == U8 else 0))
        for sequence in metadata.sequences:
            k, v = (_gather(cache, sequence, query.dtype) for cache in (keys, values))
            q = query[sequence.rows].transpose(0, 1)
            window, chunk = options.get("window"), options.get("chunk")
            if metadata.only_in_windows and window is None:
                sequence = replace(sequence, ends=None)
            mask = causal_mask(sequence, query.device, window, chunk, sees_later=not self.is_causal)
            if indices is not None:
                chosen = _chosen(indices[sequence.rows], sequence.stop)
                mask = chosen if mask is None else mask & chosen
            if options.get("softcap") is None and options.get("sinks") is None:
                attended = scaled_dot_product_attention(
                    q[None], k[None], v[None], attn_mask=mask, scale=options["scale"], enable_gqa=True
                )[0]
            else:
                attended = _explicit(q, k, v, mask, options)
            out[sequence.rows] = attended.transpose(0, 1)
        return out


def _gather(cache: Tensor, sequence: Sequence, dtype: torch.dtype) -> Tensor:
    """[heads, tokens, dim] of a sequence; a cache of FP8 or U8 in the type of the queries."""
    blocks = as_bytes(cache)[sequence.blocks].view(cache.dtype)
    blocks = as_numbers(blocks) if cache.dtype == U8 else blocks
    blocks = blocks.to(dtype) if cache.dtype in (FP8, U8) else blocks
    return blocks.flatten(0, 1)[: sequence.stop].transpose(0, 1)


def causal_mask(
    sequence: Sequence, device: torch.device, window: int | None = None, chunk: int | None = None, *,
    sees_later: bool = False,
) -> Tensor | None:  # fmt: skip
    """[queries, keys], true for keys that a query may see; None if it may see all of them."""
    if sequence.stop - sequence.start == 1 and min(window or sequence.stop, chunk or sequence.stop) >= sequence.stop:
        return None
    keys = torch.arange(sequence.stop, device=device)
    queries = keys[sequence.start :, None]
    mask = (keys <= queries if sequence.ends is None else keys < sequence.ends[:, None]) | sees_later
    if window is not None:
        distance = queries - keys
        mask &= (distance.abs() if sees_later else distance) < window
    if chunk is not None:
        mask &= keys >= queries - queries % chunk
    return mask


def _chosen(indices: Tensor, stop: int) -> Tensor:
    """[queries, stop], true for the positions in indices [queries, K]."""
    chosen = torch.zeros(len(indices), stop + 1, dtype=torch.bool, device=indices.device)
    return chosen.scatter_(1, torch.where(indices < 0, stop, indices.long()), True)[:, :stop]


def _explicit(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, options: AttendOptions) -> Tensor:
    """Softmax attention written out, for options that torch's function does not have. All tensors are head first."""
    group = query.shape[0] // keys.shape[0]
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = (query @ keys.transpose(-1, -2)).float() * options["scale"]
    if (softcap := options.get("softcap")) is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if (sinks := options.get("sinks")) is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[1]]
    return weights.to(values.dtype) @ values
