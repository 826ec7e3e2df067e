"""Attention of long chunks of prompts by FlashInfer, if it is installed; Triton's kernels compute everything else.

Blocks of the cache are pages of FlashInfer as they are (its layout HND). It plans a step on the host, so what CUDA
graphs capture is Triton's alone: it serves steps that are launched one by one, which are those of most tokens.

Source: https://docs.flashinfer.ai/api/attention.html, `BatchPrefillWithPagedKVCacheWrapper`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, Unpack

import numpy as np
import torch
from torch import Tensor

from cbatch.attention.base import AttendOptions, AttentionBackend
from cbatch.attention.triton import TritonAttention, in_rows
from cbatch.kernels.triton.attention_metadata import SHORT, AttentionMetadata, Ints
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.transfer import to_device

CAPABILITY = 90
"""Of the oldest chip, 90 for 9.0, for which FlashInfer has kernels that Triton's do not equal."""
HEADS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)

_WORKSPACE = 2**20
"""Bytes for partial results, of which there are none: keys are not split."""


class Form(NamedTuple):
    """What a plan is made for.

    window: tokens that one sees before itself; -1 for all
    """

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scale: float
    window: int
    softcap: float

    @classmethod
    def of(cls, query: Tensor, keys: Tensor, values: Tensor, options: AttendOptions) -> Form | None:
        """None if FlashInfer does not compute that."""
        dim, kinds = query.shape[-1], {query.dtype, keys.dtype}
        if len(kinds) > 1 or query.dtype not in DTYPES or dim not in HEADS or values.shape[-1] != dim:
            return None
        if options.get("sinks") is not None or options.get("chunk") is not None:
            return None
        window, softcap = (options.get("window") or 0) - 1, options.get("softcap") or 0.0
        return cls(query.shape[1], keys.shape[1], dim, query.dtype, options["scale"], window, softcap)


class Pages(NamedTuple):
    """Where the sequences of FlashInfer have their queries, and the blocks of their keys.

    queries, blocks: [N + 1] int32 on the host: the first of each among all of them, and their number
    last:            [N] int32 on the host: tokens in the last block of each
    block_ids:       int32 on the device
    """

    queries: Tensor
    blocks: Tensor
    block_ids: Tensor
    last: Tensor


@dataclass(eq=False)
class FlashMetadata:
    """Metadata of a step with long chunks. From the first of them to the last, all sequences are FlashInfer's.

    sequences: those of FlashInfer
    others:    metadata of Triton's kernels for the other sequences
    turn:      which of two planners of each form the step has
    all_by_triton: metadata of Triton's kernels for all sequences, once a layer has asked for it
    """

    batch: RaggedBatch
    block_size: int
    sequences: slice
    others: AttentionMetadata
    turn: int
    planned: dict[Form, Any] = field(default_factory=dict)
    all_by_triton: AttentionMetadata | None = None

    @cached_property
    def rows(self) -> slice:
        ends = self.batch.counts.cumsum()
        return slice(int(ends[self.sequences][0] - self.batch.counts[self.sequences][0]), int(ends[self.sequences][-1]))

    @cached_property
    def pages(self) -> Pages:
        counts, lengths = self.batch.counts[self.sequences], self.batch.lengths[self.sequences]
        tables, blocks = self.batch.tables[self.sequences], -(-lengths // self.block_size)
        (block_ids,) = to_device([tables[np.arange(tables.shape[1]) < blocks[:, None]]], self.batch.device)
        last = torch.from_numpy((lengths - (blocks - 1) * self.block_size).astype(np.int32))
        return Pages(_offsets(counts), _offsets(blocks), block_ids, last)


def _offsets(sizes: Ints) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], sizes.cumsum()]).astype(np.int32))


def with_flash(attention: AttentionBackend) -> FlashAttention | None:
    """The backend with FlashInfer for long chunks; None if that is not there, or cannot serve on this device.

    Does not import FlashInfer.
    """
    if not isinstance(attention, TritonAttention) or attention.limits.capability < CAPABILITY:
        return None
    if attention.batch_invariant or attention.kv_dtype is not None or find_spec("flashinfer") is None:
        return None
    return FlashAttention(attention.device, attention.decode, attention.prefill, attention.limits)


class FlashAttention(TritonAttention):
    """`TritonAttention` with FlashInfer for chunks of so many tokens that it would not split them.

    A plan lies in memory of the host until the device has copied it, so two planners take turns: one step at most waits
    while the next is prepared.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._planners: dict[tuple[Form, int], Any] = {}
        self._turn = 0

    @property
    def is_used(self) -> bool:
        """Whether FlashInfer has computed anything."""
        return bool(self._planners)

    def prepare(self, batch: RaggedBatch, block_size: int) -> Any:
        (long,) = (batch.counts > SHORT).nonzero()
        if not len(long):
            return super().prepare(batch, block_size)
        mine, self._turn = slice(int(long[0]), int(long[-1]) + 1), 1 - self._turn
        return FlashMetadata(batch, block_size, mine, self._metadata(batch, without=mine), self._turn)

    def store_kv(self, keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, metadata: Any) -> None:
        if isinstance(metadata, FlashMetadata):
            metadata = metadata.others
        super().store_kv(keys, values, new_keys, new_values, metadata)

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, metadata: Any, **options: Unpack[AttendOptions]
    ) -> Tensor:
        if not isinstance(metadata, FlashMetadata):
            return super().attend(query, keys, values, metadata, **options)
        form = Form.of(query, keys, values, options)
        if form is None:
            metadata.all_by_triton = metadata.all_by_triton or self._metadata(metadata.batch)
            return super().attend(query, keys, values, metadata.all_by_triton, **options)
        query = in_rows(query)
        out = super().attend(query, keys, values, metadata.others, **options)
        rows = metadata.rows
        self._planned(form, metadata).run(query[rows], (keys, values), out=out[rows])
        return out

    def _planned(self, form: Form, metadata: FlashMetadata) -> Any:
        """The planner with the plan of a step, which layers of one form share."""
        if form not in metadata.planned:
            place, pages = (form, metadata.turn), metadata.pages
            if place not in self._planners:
                self._planners[place] = self._new_planner()
            metadata.planned[form] = self._planners[place]
            metadata.planned[form].plan(
                pages.queries, pages.blocks, pages.block_ids, pages.last, form.heads, form.kv_heads, form.head_dim,
                metadata.block_size, causal=True, sm_scale=form.scale, window_left=form.window,
                logits_soft_cap=form.softcap, q_data_type=form.dtype, kv_data_type=form.dtype, disable_split_kv=True,
            )  # fmt: skip
        return metadata.planned[form]

    def _new_planner(self) -> Any:
        workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=self.device)
        return import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout="HND")
