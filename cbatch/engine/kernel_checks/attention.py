"""Checks attention over the paged cache, with the options with which a model calls it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Unpack

import torch
from torch import Tensor

from cbatch.attention.base import AttendOptions, AttentionBackend
from cbatch.attention.reference import ReferenceAttention, ReferenceMetadata
from cbatch.engine.cuda_graphs import GraphCapturer, Run
from cbatch.engine.kernel_checks.kernel_check import (
    TOLERANCES,
    KernelCheck,
    Workload,
    error_of_cache,
    largest_error,
    run_check,
)
from cbatch.engine.kernel_checks.made_up_steps import draw, empty_cache, num_blocks, ragged_batch
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.device import is_accelerator
from cbatch.runtime.kv_cache import U8, U8_SCALE_BYTES, LayerShape, as_numbers

CHUNKS = {
    "decode attention": [(0, 1), (16, 17), (299, 300), (1099, 1100)],
    "short chunk attention": [(0, 2), (40, 44), (700, 703), (30, 31)],
    "prefill attention": [(0, 40), (50, 190), (2200, 2240)],
}
"""The first token and the end of each chunk of a step. They begin and end within blocks, tiles and splits."""

CAPTURED_STEPS = [(1100, 1101), (9000, 9001), (16, 17)], [(1100, 1101), (8999, 9001), (16, 17), (1110, 1130)]
"""The chunks of two steps that are captured: decoding alone, and a mix with short and longer chunks.

Each has sequences of several splits, and one of so many that merging them takes a second turn.
"""

_SPARE_TOKENS = 3

Attend = Callable[[Tensor, Tensor, Tensor, RaggedBatch, AttendOptions], Tensor]
"""Attention of a query over the keys and values of a cache, for a step."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """How the layers of a model call attention. Layers that differ in the window only are one call for each window."""

    heads: int
    layer: LayerShape
    scale: float
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False

    @property
    def form(self) -> str:
        """Words for what is not plain about it."""
        parts = [f"window {self.window}" if self.window else "", "softcap" if self.softcap else ""]
        parts += ["sinks" if self.has_sinks else "", f"heads of {self.layer.key_dim}"]
        return ", ".join(part for part in parts if part)

    def options(self, device: torch.device) -> AttendOptions:
        sinks = torch.linspace(-1.0, 2.0, self.heads, device=device) if self.has_sinks else None
        return {"scale": self.scale, "window": self.window, "softcap": self.softcap, "sinks": sinks}


class NotingAttention(ReferenceAttention):
    """The reference, which notes how it is called."""

    def __init__(self, kv_dtype: torch.dtype | None = None) -> None:
        super().__init__(kv_dtype)
        self.calls: dict[AttentionCall, None] = {}

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, metadata: ReferenceMetadata, **options: Unpack[AttendOptions]
    ) -> Tensor:
        value_dim = values.shape[-1] - (U8_SCALE_BYTES if values.dtype == U8 else 0)
        layer = LayerShape(keys.shape[2], query.shape[2], value_dim)
        window, softcap, has_sinks = options.get("window"), options.get("softcap"), options.get("sinks") is not None
        self.calls[AttentionCall(query.shape[1], layer, options["scale"], window, softcap, has_sinks)] = None
        return super().attend(query, keys, values, metadata, **options)


@dataclass(frozen=True, slots=True)
class AttentionChecks:
    """The checks of a backend.

    calls:          how a model calls it
    workload_bytes: bytes of the keys and values that a workload reads
    """

    attention: AttentionBackend
    block_size: int
    dtype: torch.dtype
    device: torch.device
    calls: Sequence[AttentionCall]
    workload_bytes: int = 2**29

    def run(self) -> Iterator[KernelCheck]:
        """One check for each kernel and each way in which it is called."""
        check = partial(run_check, device=self.device, tolerance=TOLERANCES[self.dtype])
        for layer in dict.fromkeys(call.layer for call in self.calls):
            shape, _ = self.attention.block_shapes(layer, self.block_size, self.dtype)
            if shape == (layer.heads, self.block_size, layer.key_dim):  # else attention shows what is written
                yield check(f"cache write (heads of {layer.key_dim})", measure=partial(self._write_error, layer))
        for call in self.calls:
            for name, chunks in CHUNKS.items():
                workload = None if name.startswith("short") else partial(self._workload, name, call)
                measure = partial(self._error, replace(call, window=_shortened(call.window)), chunks)
                yield check(f"{name} ({call.form})", measure=measure, workload=workload)

    def check_captured(self, capture: Callable[[Run], Run] | None = None) -> KernelCheck:
        """Attention of steps that are split, replayed from CUDA graphs. One call has the same launches as any other.

        capture: captures what has run once; see `GraphCapturer`
        """
        call = min(self.calls, key=lambda call: call.window is not None)  # a window may hide all splits but one

        def measure() -> float:
            return max(self._error(call, chunks, partial(self._replayed, capture)) for chunks in CAPTURED_STEPS)

        return run_check("captured attention", self.device, TOLERANCES[self.dtype], measure)

    def _filled(
        self, attention: AttentionBackend, layer: LayerShape, chunks: Sequence[tuple[int, int]]
    ) -> tuple[Tensor, Tensor]:
        """The cache of one layer with the keys and values of chunks, always the same ones, as a backend writes them."""
        past = ragged_batch([(0, stop) for _, stop in chunks], self.block_size, self.device)
        blocks, tokens = num_blocks(chunks, self.block_size), len(past.ids)
        kv_cache = empty_cache(attention, [layer], blocks, self.block_size, self.dtype, self.device)
        keys, values = kv_cache.keys[0], kv_cache.values[0]
        new = self._draw(1, tokens, layer.heads, layer.key_dim), self._draw(2, tokens, layer.heads, layer.value_dim)
        attention.store_kv(keys, values, *new, attention.prepare(past, self.block_size))
        return keys, values

    def _write_error(self, layer: LayerShape) -> float:
        chunks = [(0, 1), (0, 21), (0, 2)]
        found = self._filled(self.attention, layer, chunks)
        expected = self._filled(ReferenceAttention(self.attention.kv_dtype), layer, chunks)
        return max(error_of_cache(mine.transpose(1, 2), one) for mine, one in zip(found, expected, strict=True))

    def _error(self, call: AttentionCall, chunks: Sequence[tuple[int, int]], attend: Attend | None = None) -> float:
        """Of a step, compared with the reference in float64. attend: in place of the backend's"""
        batch, options = ragged_batch(chunks, self.block_size, self.device), call.options(self.device)
        query = self._draw(0, len(batch.ids), call.heads, call.layer.key_dim)
        kv = self._filled(self.attention, call.layer, chunks)
        if attend is None:
            metadata = self.attention.prepare(batch, self.block_size)
            found = self.attention.attend(query, *kv, metadata, **options)
        else:
            found = attend(query, *kv, batch, options)
        kv = self._filled(ReferenceAttention(self.attention.kv_dtype), call.layer, chunks)
        return largest_error(found, _attend_by_heads(query, *kv, batch, options))

    def _draw(self, seed: int, *shape: int) -> Tensor:
        return draw(seed, *shape, dtype=self.dtype, device=self.device)

    def _replayed(
        self, capture: Callable[[Run], Run] | None, query: Tensor, keys: Tensor, values: Tensor, batch: RaggedBatch,
        options: AttendOptions,
    ) -> Tensor:  # fmt: skip
        """Attention of a step that is captured without tokens."""
        attention, count, sequences = self.attention, len(query), len(batch.stops) + 1
        assert attention.graph_buffers is not None
        is_decode, blocks = count < sequences, max(len(table) for table in batch.tables)
        tokens = sequences if is_decode else count + _SPARE_TOKENS
        buffers = attention.graph_buffers(tokens, sequences, blocks, self.block_size, decode_only=is_decode)
        padded = torch.cat([query, query.new_zeros(tokens - count, *query.shape[1:])])
        out = query.new_full((tokens, query.shape[1], values.shape[-1]), math.nan)

        def run() -> None:
            out.copy_(attention.attend(padded, keys, values, buffers.metadata, **options))

        run()
        # One for each step: a memory pool whose graphs are freed takes no others.
        replay = (capture or GraphCapturer(self.device))(run)
        buffers.fill(batch)
        for _ in range(2):  # the second finds what the first has left in the buffers
            out.fill_(math.nan)
            replay()
        return out[:count]

    def _workload(self, name: str, call: AttentionCall) -> Workload:
        """Sequences that decode, 64 behind long pasts or more behind a window, or a prompt behind as long a past."""
        layer = call.layer
        per_token = layer.bytes_per_token(self.attention.kv_dtype or self.dtype)
        total = max(self.workload_bytes // per_token, 64)
        if name.startswith("decode"):
            length = min(total // 64, call.window or total)
            chunks = [(length - 1, length)] * (total // length)
        else:
            length = min(total // 2, 2048 if is_accelerator(self.device) else 256)
            chunks = [(length, 2 * length)]
        batch = ragged_batch(chunks, self.block_size, self.device)
        keys, values = self._filled(self.attention, layer, chunks)
        query = self._draw(0, len(batch.ids), call.heads, layer.key_dim)
        metadata, options = self.attention.prepare(batch, self.block_size), call.options(self.device)
        run = partial(self.attention.attend, query, keys, values, metadata, **options)
        seen = [min(token + 1, call.window or token + 1) for start, stop in chunks for token in range(start, stop)]
        if name.startswith("decode"):
            return Workload(run, bytes_read=sum(seen) * per_token)
        return Workload(run, flops=2 * sum(seen) * call.heads * (layer.key_dim + layer.value_dim))


def _attend_by_heads(query: Tensor, keys: Tensor, values: Tensor, batch: RaggedBatch, options: AttendOptions) -> Tensor:
    """The reference in float64, for one head of the keys after the other: all at once could take gigabytes."""
    reference, results = ReferenceAttention(), []
    keys, values = (as_numbers(part) if part.dtype == U8 else part for part in (keys, values))
    metadata, group, sinks = reference.prepare(batch, keys.shape[1]), query.shape[1] // keys.shape[2], options["sinks"]
    for head in range(keys.shape[2]):
        served, one = slice(head * group, (head + 1) * group), slice(head, head + 1)
        wide = query[:, served].double(), keys[:, :, one].double(), values[:, :, one].double()
        mine: AttendOptions = {**options, "sinks": None if sinks is None else sinks[served]}
        results.append(reference.attend(*wide, metadata, **mine))
    return torch.cat(results, 1)


def _shortened(window: int | None) -> int | None:
    """A window that the chunks are longer than. The kernel is the same: compilers look whether 16 divides a number."""
    return window and (window if window < 200 else 96 if window % 16 == 0 else 101)
