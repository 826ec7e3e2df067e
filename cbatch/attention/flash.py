"""Attention of long chunks of prompts by FlashInfer, if it is installed; Triton's kernels compute everything else.

Blocks of the cache are pages of FlashInfer as they are (its layout HND). It plans a step on the host, so what CUDA
graphs capture is Triton's alone: it serves steps that are launched one by one, which are those of most tokens.

Source: https://docs.flashinfer.ai/api/attention.html, `BatchPrefillWithPagedKVCacheWrapper`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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
    """The step that a plan is made for, by FlashInfer's names. A window of -1 is none."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    page_size: int
    q_data_type: torch.dtype
    sm_scale: float
    window_left: int
    logits_soft_cap: float

    @classmethod
    def of(cls, query: Tensor, keys: Tensor, values: Tensor, options: AttendOptions) -> Form | None:
        """None if FlashInfer does not compute that."""
        (_, heads, dim), (_, kv_heads, block_size, _) = query.shape, keys.shape
        if query.dtype != keys.dtype or query.dtype not in DTYPES or dim not in HEADS or values.shape[-1] != dim:
            return None
        if options.get("sinks") is not None or options.get("chunk") is not None:
            return None
        window, softcap = (options.get("window") or 0) - 1, options.get("softcap") or 0.0
        return cls(heads, kv_heads, dim, block_size, query.dtype, options["scale"], window, softcap)


@dataclass(eq=False)
class FlashMetadata:
    """Metadata of a step with long chunks. From the first of them to the last, all sequences are FlashInfer's.

    rows:    those of the batch that FlashInfer computes
    pages:   what its plans begin with, int32: where each sequence begins among these rows, and at the end their number;
             the same of their blocks; block ids, on the device; tokens in the last block of each
    others:  metadata of Triton's kernels for the other sequences
    turn:    which of two planners of each form the step has
    all_by_triton: metadata of Triton's kernels for all sequences, once a layer has asked for it
    """

    batch: RaggedBatch
    rows: slice
    pages: tuple[Tensor, ...]
    others: AttentionMetadata
    turn: int
    planned: dict[Form, Any] = field(default_factory=dict)
    all_by_triton: AttentionMetadata | None = None


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
        if not len(long) or batch.ends_seen is not None:
            return super().prepare(batch, block_size)
        mine, self._turn = slice(int(long[0]), int(long[-1]) + 1), 1 - self._turn
        counts, lengths, tables = batch.counts[mine], batch.lengths[mine], batch.tables[mine]
        first, blocks = int(batch.counts[: mine.start].sum()), -(-lengths // block_size)
        (block_ids,) = to_device([tables[np.arange(tables.shape[1]) < blocks[:, None]]], batch.device)
        last = torch.from_numpy((lengths - (blocks - 1) * block_size).astype(np.int32))
        pages, rows = (_offsets(counts), _offsets(blocks), block_ids, last), slice(first, first + int(counts.sum()))
        return FlashMetadata(batch, rows, pages, self._metadata(batch, without=mine), self._turn)

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
        query, rows = in_rows(query), metadata.rows
        out = super().attend(query, keys, values, metadata.others, **options)
        self._planned(form, metadata).run(query[rows], (keys, values), out=out[rows])
        return out

    def _planned(self, form: Form, metadata: FlashMetadata) -> Any:
        """The planner with the plan of a step, which layers of one form share."""
        if form not in metadata.planned:
            place = form, metadata.turn
            if place not in self._planners:
                workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=self.device)
                make = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
                self._planners[place] = make(workspace, kv_layout="HND")
            metadata.planned[form] = planner = self._planners[place]
            kind = form.q_data_type
            planner.plan(*metadata.pages, **form._asdict(), kv_data_type=kind, causal=True, disable_split_kv=True)
        return metadata.planned[form]
