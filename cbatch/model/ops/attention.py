"""Attention: heads are prepared and stored, and queries attend to what is stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cbatch.attention.base import AttendOptions
from cbatch.kernels.cpu.attention import attend as attend_paged
from cbatch.kernels.cpu.fast_math import from_float32
from cbatch.kernels.cpu.jit import kernel
from cbatch.kernels.cpu.kv_store import prefetch_stored, store_kv
from cbatch.kernels.cpu.norm import NormParams
from cbatch.kernels.cpu.norm import normalize as normalize_row
from cbatch.kernels.cpu.paged_kv import AttentionParams, kv_of_layer
from cbatch.kernels.cpu.program import BUFFER, NORM, elements_of, floats_of, instruction, norm_of, vector_of
from cbatch.kernels.cpu.work_queue import Worker, claimed
from cbatch.kernels.operands import NormWeights, Positions
from cbatch.model.config import UnsupportedConfig
from cbatch.model.device_weights import DeviceWeights
from cbatch.model.ops.cpu_layout import CpuLayout
from cbatch.model.ops.device_kernel import device_kernel
from cbatch.model.ops.device_plan import DevicePlan, Run, Step
from cbatch.model.ops.normalize import NormAcross
from cbatch.model.ops.operation import Operation, numbers_a, operation, reads, writes
from cbatch.model.ops.residual import normalize, normed
from cbatch.model.ops.shards import Made, Shards, columns_of, norm_for, taken
from cbatch.model.weight import Norm, Weight
from cbatch.runtime.kv_cache import LayerShape, as_bytes, as_stored


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorms:
    """Norms of queries, keys and values. Weights are as long as all heads side by side.

    by_row: a norm takes all heads of a row together; else each by itself
    last:   those of queries and keys come after the rotation
    """

    query: Norm | None = None
    key: Norm | None = None
    value: Norm | None = None
    by_row: bool = False
    last: bool = False


@operation
class PrepareHeads(Operation):
    """Norms, rotates and stores the heads of `source`: queries, then keys, then values, side by side.

    query:  target [T, heads * key_dim]
    cache:  number of the KV cache in which keys and values are stored
    stores: else the source has queries only, for a cache that another layer fills
    rotary: number of the program's `Rotary`; None if positions do not matter
    clip:   0, or the largest size of a number, before anything else
    """

    source: str = reads()
    query: str = writes()
    heads: int
    shape: LayerShape
    cache: int = numbers_a("cache")
    stores: bool = True
    rotary: int | None = numbers_a("rotary", default=None)
    norms: HeadNorms = HeadNorms()
    clip: float = 0.0

    @property
    def parts(self) -> tuple[tuple[Norm | None, int, int], ...]:
        """Norm, number and width of the heads of queries, of keys and of values, side by side in the source."""
        norms, shape = self.norms, self.shape
        query = norms.query, self.heads, shape.key_dim
        if not self.stores:
            return query, (None, 0, shape.key_dim), (None, 0, shape.value_dim)
        return query, (norms.key, shape.heads, shape.key_dim), (norms.value, shape.heads, shape.value_dim)

    def on_shard(self, shards: Shards) -> Made:
        query, source = shards.written(self.query), shards.read(self.source)
        query.take()
        heads = shards.heads.get(self.cache)
        if heads is None:
            source.need_all()
            return lambda: (self,)
        starts = list(accumulate((number * width for _, number, width in self.parts), initial=0))
        ranges = (heads.queries, *[heads.keys if self.stores else range(0)] * 2)
        own = [columns_of(some, width) for some, (_, _, width) in zip(ranges, self.parts, strict=True)]
        columns = torch.cat([start + part for start, part in zip(starts, own, strict=False)])
        source.need(lambda: columns)
        query_norm, key_norm, value_norm = (norm_for(one[0], part) for one, part in zip(self.parts, own, strict=True))
        norms, across = HeadNorms(query_norm, key_norm, value_norm, last=self.norms.last), list[Operation]()
        if self.norms.by_row:
            norms, copies = HeadNorms(), max(shards.part.size // self.shape.heads, 1)
            if query_norm is not None:
                across.append(NormAcross(self.source, query_norm, 0, own[0], starts[1]))
            if key_norm is not None:
                width = starts[2] - starts[1]
                across.append(NormAcross(self.source, key_norm, len(own[0]), own[1], width, copies=copies))

        def made() -> tuple[Operation, ...]:
            source.start_of(columns)
            shape = shards.caches[self.cache]
            return *across, replace(self, heads=len(heads.queries), shape=shape, norms=norms)

        return made

    def on_cpu(self, layout: CpuLayout) -> None:
        norms, source = self.norms, layout.read(self.source)
        layout.add(
            prepare, self, source=source, query=layout.elements(self.query, self.heads * self.shape.key_dim),
            by_row=norms.by_row, last=norms.last, query_norm=layout.norm(norms.query), key_norm=layout.norm(norms.key),
            value_norm=layout.norm(norms.value),
        )  # fmt: skip

    def target_width(self, width: Callable[[str], int]) -> int:
        return self.heads * self.shape.key_dim

    def load(self, weights: DeviceWeights) -> tuple[list[tuple[slice, NormWeights]], tuple[NormWeights, ...]]:
        """Norms of all heads of a row together, with their columns; and those of each head by itself."""
        if not self.norms.by_row:
            return [], tuple(weights.head_norm(norm, width) for norm, _, width in self.parts)
        if self.norms.last or self.clip:
            raise UnsupportedConfig("its heads are normed together after the rotation, or after a clip")
        ends = accumulate(number * width for _, number, width in self.parts)
        by_row = [
            (slice(end - number * width, end), weights.norm(norm))
            for (norm, number, width), end in zip(self.parts, ends, strict=True)
            if norm is not None
        ]
        return by_row, tuple(weights.head_norm(None, width) for _, _, width in self.parts)

    def run(self, step: Step, weights: Any, *, source: Tensor, query: Tensor) -> None:
        by_row, norms = weights
        for columns, norm in by_row:
            normalize(step.ops, source[:, columns], norm, 1, 1.0, source[:, columns])
        cache = step.inputs.kv_cache
        keys, values = (cache.keys[self.cache], cache.values[self.cache]) if self.stores else (None, None)
        positions = step.positions[-1 if self.rotary is None else self.rotary]
        queries = query.view(-1, self.heads, self.shape.key_dim)
        prepare_heads(step.ops, source, self, norms, positions, queries, keys, values)


@device_kernel("heads:prepare_heads")
def prepare_heads(
    qkv: Tensor, one: PrepareHeads, norms: tuple[NormWeights, ...], positions: Positions, query: Tensor,
    keys: Tensor | None, values: Tensor | None, *, heads_first: bool = False,
) -> None:  # fmt: skip
    """Norms and rotates a step's queries and keys (RoPE, Su et al., 2021), and stores keys and values.

    qkv:          [T, columns] queries, keys and values as their matrix gives them
    norms:        of queries, keys and values, each head by itself
    query:        [T, heads, key_dim], written
    keys, values: [num_blocks, *block] of one layer, written; None if nothing is stored
    """
    if one.clip:
        qkv = qkv.clamp(-one.clip, one.clip)
    shape = one.shape
    new_query, new_keys, new_values = torch.split(qkv, [number * width for _, number, width in one.parts], dim=1)
    prepared = _prepared(new_query.view(len(qkv), -1, shape.key_dim), norms[0], one, positions)
    if positions.query_scales is not None:
        prepared = prepared * positions.query_scales[:, None, None]
    query.copy_(prepared)
    if keys is not None and values is not None:
        new_keys = _prepared(new_keys.view(len(qkv), -1, shape.key_dim), norms[1], one, positions)
        new_values = _normed_heads(new_values.view(len(qkv), -1, shape.value_dim), norms[2])
        store_in_blocks(keys, new_keys, positions.slots, heads_first=heads_first)
        store_in_blocks(values, new_values, positions.slots, heads_first=heads_first)


def _normed_heads(heads: Tensor, norm: NormWeights) -> Tensor:
    """Heads [T, heads, dim], each normed by itself; see `NormWeights`."""
    shape = heads.shape[1:]
    weight, bias = (
        part if part is None or part.numel() == shape[1] else part.view(shape) for part in (norm.weight, norm.bias)
    )
    return normed(heads, norm._replace(weight=weight, bias=bias))


def _prepared(x: Tensor, norm: NormWeights, one: PrepareHeads, positions: Positions) -> Tensor:
    """Heads [T, heads, dim] normed and rotated by their positions, float32."""
    x = x.float() if one.norms.last else _normed_heads(x, norm)
    if positions.cosines is not None and positions.sines is not None:
        half = positions.cosines.shape[1]
        left, right, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], dim=-1)
        cosines, sines = positions.cosines[:, None], positions.sines[:, None]
        x = torch.cat([left * cosines - right * sines, right * cosines + left * sines, rest], dim=-1)
    return _normed_heads(x, norm) if one.norms.last else x


def store_in_blocks(cache: Tensor, new: Tensor, slots: Tensor, *, heads_first: bool) -> None:
    """Writes new [T, kv_heads, dim] to the slots [T] that are not negative, without asking the device which these are.

    cache: [num_blocks, *block] of one layer; for `heads_first` see `DeviceOps`
    """
    blocks = as_bytes(cache).transpose(1, 2) if heads_first else as_bytes(cache)
    block_size = blocks.shape[1]
    is_stored = slots >= 0
    # A token without a slot does again what the first one with a slot does; if there is none, nothing changes.
    doer = torch.where(is_stored, torch.arange(len(slots), device=slots.device), is_stored.byte().argmax())
    place = slots[doer].clamp(min=0)
    block, offset = torch.div(place, block_size, rounding_mode="floor"), place % block_size
    blocks[block, offset] = torch.where(
        is_stored.any(), as_bytes(as_stored(new[doer], cache.dtype)), blocks[block, offset]
    )


@kernel
def _rotate(head: Any, cosines: Any, sines: Any) -> None:
    half = len(cosines)
    for i in range(half):
        left, right = head[i], head[half + i]
        head[i] = left * cosines[i] - right * sines[i]
        head[half + i] = right * cosines[i] + left * sines[i]


@kernel
def _norm_heads(part: Any, norm: NormParams, width: int, by_row: int) -> None:
    """Norms heads of `width` numbers side by side, each by itself or all together, in place."""
    if norm.kind == 0:
        return
    size = len(part) if by_row else width
    for start in range(0, len(part), size):
        weight = norm.weight[start : start + size] if len(norm.weight) else norm.weight
        bias = norm.bias[start : start + size] if len(norm.bias) else norm.bias
        head = part[start : start + size]
        normalize_row(head, NormParams(norm.kind, norm.eps, weight, bias), head)


@instruction(
    "cache stores heads rotary by_row last", "clip", source=BUFFER, query=BUFFER, query_norm=NORM, key_norm=NORM,
    value_norm=NORM,
)  # fmt: skip
def prepare(worker: Worker, phase: int, op: Any, step: Any) -> int:
    """Norms and rotates queries and keys, and stores keys and values in the cache."""
    kv, plan, inputs = kv_of_layer(step.caches, op.cache), step.plan, step.inputs
    source, query = floats_of(step, op.source), elements_of(step, op.query)
    width, kv_heads = kv.key_dim, kv.heads if op.stores else 0
    first_key, first_value = op.heads * width, (op.heads + kv_heads) * width
    end = first_value + kv_heads * kv.value_dim
    query_norm = norm_of(step.weights, op.query_norm, first_key)
    key_norm = norm_of(step.weights, op.key_norm, first_value - first_key)
    value_norm = norm_of(step.weights, op.value_norm, end - first_value)
    for task in claimed(worker, phase, len(plan.chunks) - 1):
        first, stop = plan.chunks[task], plan.chunks[task + 1]
        prefetch_stored(kv, plan.slots, first, stop, kv_heads)
        for number in range(first, stop):
            row = source[number]
            if op.clip > 0:
                for i in range(end):
                    row[i] = min(max(row[i], -op.clip), op.clip)
            queries, keys, values = row[:first_key], row[first_key:first_value], row[first_value:end]
            if not op.last:
                _norm_heads(queries, query_norm, width, op.by_row)
                _norm_heads(keys, key_norm, width, op.by_row)
            _norm_heads(values, value_norm, kv.value_dim, op.by_row)
            scale = np.float32(1)
            if op.rotary >= 0:
                half = inputs.rotary_layout[op.rotary, 1]
                at = inputs.rotary_layout[op.rotary, 0] + inputs.positions[number] * (2 * half + 1)
                cosines, sines = inputs.rotary[at : at + half], inputs.rotary[at + half : at + 2 * half]
                scale = inputs.rotary[at + 2 * half]
                for head in range(op.heads + kv_heads):
                    _rotate(row[head * width : (head + 1) * width], cosines, sines)
            if op.last:
                _norm_heads(queries, query_norm, width, op.by_row)
                _norm_heads(keys, key_norm, width, op.by_row)
            if scale != 1:
                for i in range(first_key):
                    queries[i] *= scale
            for i in range(first_key):
                query[number, i] = from_float32(queries[i], query)
        stored = step.buffers.attention.stored[worker.thread]
        store_kv(kv, kv.packed, plan.slots, first, stop, source, first_key, source, first_value, kv_heads, stored)
    return phase + 1


@operation
class Attend(Operation):
    """target [T, heads * value_dim] = causal attention of the query over a KV cache.

    window:  a token sees itself and the window - 1 tokens before it; 0: all
    chunk:   a token sees those of its chunk only, up to itself; 0: no chunks
    softcap: 0, or a score becomes softcap * tanh(score / softcap)
    sinks:   [heads] scores that take part in the softmax and carry no value
    """

    query: str = reads()
    target: str = writes()
    cache: int = numbers_a("cache")
    heads: int
    shape: LayerShape
    scale: float
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    sinks: Weight | None = None

    def target_width(self, width: Callable[[str], int]) -> int:
        return self.heads * self.shape.value_dim

    def on_shard(self, shards: Shards) -> Made:
        target, query, shape = shards.written(self.target), shards.read(self.query), self.shape
        heads = shards.heads_of(self.heads, shape.heads, shape.value_dim, target.grain)
        heads = heads if target.may_be_shared else None
        shards.keep_heads(self.cache, heads)
        if heads is None:
            target.take()
            query.need_all()
            return lambda: (self,)
        target.take(columns_of(heads.queries, shape.value_dim))
        query.need(lambda: columns_of(heads.queries, shape.key_dim))
        sinks = None if self.sinks is None else taken((self.sinks,), columns_of(heads.queries, 1))[0]
        shape = shards.caches[self.cache]
        return lambda: (replace(self, heads=len(heads.queries), shape=shape, sinks=sinks),)

    def on_cpu(self, layout: CpuLayout) -> None:
        layout.add(attend, self, elements=self.heads * self.shape.value_dim)

    def on_device(self, plan: DevicePlan) -> Run:
        if self.window and self.chunk:
            raise UnsupportedConfig("a layer of it has a window and chunks")
        query, target = plan.read(self.query), plan.written(self.target, self.heads * self.shape.value_dim)
        options = AttendOptions(
            scale=self.scale, window=self.window or None, chunk=self.chunk or None, softcap=self.softcap or None,
            sinks=None if self.sinks is None else plan.weights.vector(self.sinks),
        )  # fmt: skip

        def run(step: Step) -> None:
            inputs = step.inputs
            keys, values = inputs.kv_cache.keys[self.cache], inputs.kv_cache.values[self.cache]
            queries = step[query].view(-1, self.heads, self.shape.key_dim)
            step.buffers.pop(target, None)  # that of the layer before need not wait for this one
            attended = inputs.attention.attend(queries, keys, values, inputs.metadata, **options)
            step.buffers[target] = attended.flatten(1)

        return run


@instruction("cache heads window chunk sinks", "scale softcap", query=BUFFER, target=BUFFER)
def attend(worker: Worker, phase: int, op: Any, step: Any) -> int:
    params = AttentionParams(op.scale, op.window, op.chunk, op.softcap, vector_of(step.weights, op.sinks, op.heads))
    kv, query, out = kv_of_layer(step.caches, op.cache), elements_of(step, op.query), elements_of(step, op.target)
    return attend_paged(worker, phase, kv, step.plan, params, query, out, step.buffers.attention)
