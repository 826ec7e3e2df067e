"""The Triton kernels' places taken by operations of torch that a `DeferredDevice` queues as one launch each.

Like a kernel, each reads all its tensors when its turn comes. The interpreter would take seconds for the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from cbatch.attention import reference
from cbatch.attention.base import AttendOptions
from cbatch.attention.triton import TritonAttention
from cbatch.kernels.triton.attention_metadata import AttentionMetadata
from cbatch.model.ops.attention import store_in_blocks
from cbatch.model.ops.device_kernel import DeviceKernel, DeviceOps
from cbatch.sample import sampler
from tests.support.fake_cuda import DeviceTensor, mapped_numbers


def launch(function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    """Queues a call of the function with the numbers of these tensors, all of which must be on the device."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    assert all(isinstance(tensor, DeviceTensor) for tensor in tensors)
    values, named = mapped_numbers(args), mapped_numbers(kwargs)
    tensors[0].memory.device.enqueue(lambda: function(*values, **named))  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class QueuedOps(DeviceOps):
    """Operations of torch that wait in the queue, for blocks of the layout [kv_heads, block_size, head_dim]."""

    heads_first: bool = True

    def call(self, kernel: DeviceKernel[Any, Any], arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        if kernel.name == "multiply_logits" and arguments[-1] is None:
            hidden, lm_head, _ = arguments
            arguments = hidden, lm_head, hidden.new_empty(len(hidden), len(lm_head), dtype=torch.float32)
        launch(kernel.function_for(self), *arguments, **keywords)
        return arguments[-1]


class QueuedAttention(TritonAttention):
    """`TritonAttention`, with its metadata and its buffers."""

    def store_kv(
        self, keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, metadata: AttentionMetadata
    ) -> None:
        for cache, new in ((keys, new_keys), (values, new_values)):
            launch(store_in_blocks, cache, new, metadata.slots, heads_first=True)

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, metadata: AttentionMetadata, **options: Unpack[AttendOptions]
    ) -> Tensor:
        out = query.new_empty(*query.shape[:2], values.shape[-1])
        decode, prefill = metadata.decode, metadata.prefill
        lists = decode and (decode.items, decode.totals), prefill and (prefill.pieces, prefill.count)
        launch(_attend, out, query, keys, values, metadata.sequences, metadata.block_ids, *lists, **options)
        return out


def _attend(
    out: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    sequences: Tensor,
    block_ids: Tensor,
    *lists: tuple[Tensor, Tensor] | None,
    **options: Any,
) -> None:
    """lists: two lists of sequences, of each its records and how many of them there are"""
    block_size = keys.shape[2]
    listed = {number for one in lists if one for number in one[0][: int(one[1][-1]), 0].tolist()}
    for number in sorted(listed):
        first, length, count, page, *_ = sequences[number].tolist()
        rows, start = slice(first, first + count), length - count
        if length == 0:
            out[first] = 0.0
            continue
        blocks = block_ids[page : page - (-length // block_size)].long()
        k, v = (cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length] for cache in (keys, values))
        sequence = reference.Sequence(rows, blocks, start, length)
        mask = reference.causal_mask(sequence, query.device, options.get("window"), options.get("chunk"))
        attended = reference._explicit(query[rows].transpose(0, 1), k, v, mask, options)  # type: ignore[arg-type]
        out[rows] = attended.transpose(0, 1)


def sample_rows(logits: Tensor, words: Tensor, tokens: Tensor, largest: Tensor, masks: Tensor | None = None) -> None:
    """Stand-in for that of `kernels/triton/sampling.py`."""
    launch(_sample_rows, logits, words, tokens, largest, masks)


def _sample_rows(logits: Tensor, words: Tensor, tokens: Tensor, largest: Tensor, masks: Tensor | None) -> None:
    logits = logits.float().clone()
    for row, number in enumerate(words[:, 6].tolist()):
        if number:
            assert masks is not None
            bits = np.unpackbits(masks[number - 1].numpy().view(np.uint8), bitorder="little")
            logits[row, ~torch.from_numpy(bits[: logits.shape[1]]).bool()] = -torch.inf
    highest, best = logits.max(dim=-1)
    rows = words[:, 0].nonzero()[:, 0]
    if len(rows):
        temperature, top_p, min_p = words[rows, :3].T.contiguous().view(torch.float32)
        keys = words[rows, 4:6].long() & 0xFFFFFFFF
        filters = {"top_k": words[rows, 3].float(), "top_p": top_p, "min_p": min_p}
        columns = {name: one[:, None] for name, one in filters.items()}
        best[rows] = sampler._draw(logits[rows], temperature, keys, columns)
    tokens.copy_(best)
    largest.copy_(highest)
