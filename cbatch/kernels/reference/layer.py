"""The operations of a layer by torch alone, for any device: the reference of the kernels, and what replaces them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from cbatch.kernels.float8_matrix import Float8Matrix, rounded_rows
from cbatch.kernels.layer_ops import (
    ActivationSettings,
    Addend,
    Convolution,
    DeltaHeads,
    Embedding,
    ExpertWeights,
    Heads,
    NormWeights,
    Positions,
    Recurrence,
    Router,
    Routing,
    ScanHeads,
    head_logits,
    multiply,
)
from cbatch.kernels.quantized_matrix import QuantizedMatrix
from cbatch.kernels.reference import recurrence as recurrence_ops
from cbatch.runtime.kv_cache import as_bytes, as_stored

_COLUMNS_AT_ONCE = 4096
"""Of a quantized matrix, which become numbers together."""


@dataclass(frozen=True, slots=True)
class TorchLayerOps:
    """See `LayerOps`. Nothing here waits for a device, except experts, whose steps cannot be captured as graphs.

    heads_first: whether blocks are [kv_heads, block_size, head_dim], as Triton's attention has them, and not
                 [block_size, kv_heads, head_dim], as the reference has them
    """

    heads_first: bool = False
    batch_invariant = False

    def embed_and_norm(
        self,
        embedding: Embedding,
        ids: Tensor,
        positions: Tensor,
        residual: Tensor,
        norm: NormWeights | None,
        out: Tensor | None,
    ) -> None:
        residual.copy_(embedding.table[ids])
        if embedding.scale != 1:
            residual *= embedding.scale
        if embedding.positions is not None:
            residual += embedding.positions[positions + embedding.offset]
        self.add_and_norm(residual, (), norm, out)

    def add_and_norm(
        self, residual: Tensor, addends: tuple[Addend, ...], norm: NormWeights | None, out: Tensor | None
    ) -> None:
        for addend in addends:
            residual += _value_of(addend)
        if out is not None and norm is not None:
            out.copy_(_normed(residual, norm))

    def select_and_norm(
        self,
        residual: Tensor,
        addends: tuple[Addend, ...],
        rows: Tensor,
        norm: NormWeights,
        factor: float,
        out: Tensor,
    ) -> None:
        chosen = residual[rows]
        for addend in addends:
            chosen += _value_of(addend._replace(value=addend.value[rows]))
        out.copy_(_scaled(_normed(chosen, norm), factor))

    def normalize(
        self, source: Tensor, norm: NormWeights, groups: int, factor: float, out: Tensor, *, add: bool = False
    ) -> None:
        normed = _scaled(_normed(source.view(len(source), groups, -1), norm).flatten(1), factor)
        out.copy_(out + normed if add else normed)

    def prepare_heads(
        self,
        qkv: Tensor,
        heads: Heads,
        positions: Positions,
        query: Tensor,
        keys: Tensor | None,
        values: Tensor | None,
    ) -> None:
        if heads.clip:
            qkv = qkv.clamp(-heads.clip, heads.clip)
        kv_heads = heads.kv_heads if heads.stores else 0
        sizes = [heads.heads * heads.key_dim, kv_heads * heads.key_dim, kv_heads * heads.value_dim]
        new_query, new_keys, new_values = torch.split(qkv, sizes, dim=1)
        prepared = _prepared(new_query.view(len(qkv), -1, heads.key_dim), heads.query_norm, heads, positions)
        if positions.query_scales is not None:
            prepared = prepared * positions.query_scales[:, None, None]
        query.copy_(prepared)
        if keys is not None and values is not None:
            new_keys = _prepared(new_keys.view(len(qkv), -1, heads.key_dim), heads.key_norm, heads, positions)
            new_values = _normed_heads(new_values.view(len(qkv), -1, heads.value_dim), heads.value_norm)
            store_in_blocks(keys, new_keys, positions.slots, heads_first=self.heads_first)
            store_in_blocks(values, new_values, positions.slots, heads_first=self.heads_first)

    def activate(self, up: Tensor, activation: ActivationSettings, out: Tensor) -> None:
        up = up.float()
        if not activation.gated:
            out.copy_(_activated(up, activation))
            return
        gate, up = up.chunk(2, dim=-1)
        if activation.limit:
            gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
        out.copy_(_activated(gate, activation) * (up + activation.up_offset))

    def gate(self, gate: Tensor, width: int, function: str, factor: float, target: Tensor) -> None:
        factors = gate.float()
        if function != "identity":
            factors = torch.sigmoid(factors) if function == "sigmoid" else functional.softplus(factors)
        target.copy_(factor * factors.repeat_interleave(width, dim=1) * target)

    def linear(self, source: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor) -> None:
        multiply(source, matrix, bias, out)

    def quantized_linear(self, source: Tensor, matrix: QuantizedMatrix, bias: Tensor | None, out: Tensor) -> None:
        for first in range(0, matrix.columns, _COLUMNS_AT_ONCE):
            columns = slice(first, first + _COLUMNS_AT_ONCE)
            product = functional.linear(source, matrix.values(columns).to(source.dtype))
            out[:, columns] = product if bias is None else product + bias[columns]

    def float8_linear(self, source: Tensor, matrix: Float8Matrix, bias: Tensor | None, out: Tensor) -> None:
        codes, scales = rounded_rows(source)
        rows = codes.float()
        for first in range(0, matrix.columns, _COLUMNS_AT_ONCE):
            columns = slice(first, first + _COLUMNS_AT_ONCE)
            product = functional.linear(rows, matrix.numbers[columns].float()) * scales * matrix.scales[:, columns]
            out[:, columns] = product if bias is None else product + bias[columns]

    def look_up(self, matrix: QuantizedMatrix, ids: Tensor, out: Tensor) -> None:
        out.copy_(matrix.values(ids))

    def logits(self, hidden: Tensor, lm_head: Tensor | QuantizedMatrix, out: Tensor | None = None) -> Tensor:
        return head_logits(self, hidden, lm_head, out)

    def finish_logits(self, logits: Tensor, bias: Tensor | None, softcap: float) -> None:
        if bias is not None:
            logits += bias
        if softcap:
            logits.copy_(softcap * torch.tanh(logits / softcap))

    def route(self, scores: Tensor, router: Router) -> Routing:
        num_experts = scores.shape[1]
        if router.scores in ("softmax", "sigmoid"):
            scores = torch.softmax(scores, 1) if router.scores == "softmax" else torch.sigmoid(scores)
        wanted = scores if router.choice_bias is None else scores + router.choice_bias
        if router.groups > router.top_groups:
            wanted = _without_groups(wanted, router)
        chosen = wanted.argsort(dim=1, descending=True, stable=True)[:, : router.top_k]
        weights = scores.gather(1, chosen)
        if router.scores.endswith("_of_chosen"):
            weights = torch.softmax(weights, 1) if router.scores.startswith("softmax") else torch.sigmoid(weights)
        factors = torch.full_like(weights, router.factor)
        if router.normalize:
            factors = factors / (weights.sum(1, keepdim=True) + router.epsilon).clamp(min=router.least_sum)
        if router.expert_scales is not None:
            factors = factors * router.expert_scales[chosen]
        order = chosen.flatten().argsort(stable=True)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        counts = torch.bincount(chosen.flatten(), minlength=num_experts)
        return Routing(weights * factors, places.view_as(chosen).int(), order.int(), counts.int())

    def expert_linear(
        self, source: Tensor, routing: Routing, experts: ExpertWeights, out: Tensor, *, gathers: bool, weighs: bool
    ) -> None:
        top_k, start = routing.weights.shape[1], 0
        for expert, count in enumerate(routing.counts.tolist()):
            if count == 0:
                continue
            pairs = routing.order[start : start + count]
            rows = source[pairs // top_k] if gathers else source[start : start + count]
            product = rows @ _matrix_of(experts, expert).to(rows.dtype).T
            if weighs:
                product = product * routing.weights.flatten()[pairs, None]
            if experts.bias is not None:
                product = product + experts.bias[expert]
            out[start : start + count] = product
            start += count

    def combine(self, rows: Tensor, routing: Routing, factor: float, out: Tensor, *, weighs: bool, add: bool) -> None:
        total = torch.zeros_like(out, dtype=torch.float32)
        for place, weight in zip(routing.places.T, routing.weights.T, strict=True):
            total += rows[place] * weight[:, None] if weighs else rows[place]
        out.copy_(out + factor * total if add else factor * total)

    def convolve(
        self,
        source: Tensor,
        convolution: Convolution,
        state: Tensor,
        recurrence: Recurrence,
        out: Tensor,
        input_gate: Tensor | None,
        output_gate: Tensor | None,
    ) -> None:
        gated = source if input_gate is None else source.float() * input_gate
        found = recurrence_ops.convolve(gated, convolution, state, recurrence)
        out.copy_(found if output_gate is None else found * output_gate)

    def gated_delta(
        self, qkv: Tensor, controls: Tensor, heads: DeltaHeads, state: Tensor, recurrence: Recurrence, out: Tensor
    ) -> None:
        out.copy_(recurrence_ops.gated_delta(qkv, controls, heads, state, recurrence).flatten(1))

    def selective_scan(
        self, xbc: Tensor, steps: Tensor, heads: ScanHeads, state: Tensor, recurrence: Recurrence, out: Tensor
    ) -> None:
        out.copy_(recurrence_ops.selective_scan(xbc, steps, heads, state, recurrence).flatten(1))

    def gated_norm(
        self, source: Tensor, gate: Tensor, norm: NormWeights, groups: int, out: Tensor, *, gate_first: bool
    ) -> None:
        factor = functional.silu(gate.float())
        x = source.float() * factor if gate_first else source.float()
        weight = None if norm.weight is None else norm.weight.view(groups, -1)
        normed = _normed(x.reshape(len(x), groups, -1), norm._replace(weight=weight)).flatten(1)
        out.copy_(normed if gate_first else normed * factor)


def _matrix_of(experts: ExpertWeights, number: int) -> Tensor:
    """[columns, depth] of an expert, as numbers"""
    weight = experts.weight
    return weight.expert(number).values(slice(None)) if isinstance(weight, QuantizedMatrix) else weight[number]


def store_in_blocks(cache: Tensor, new: Tensor, slots: Tensor, *, heads_first: bool) -> None:
    """Writes new [T, kv_heads, dim] to the slots [T] that are not negative, without asking the device which these are.

    cache: [num_blocks, *block] of one layer; for `heads_first` see `TorchLayerOps`
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


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else factor * x


def _value_of(addend: Addend) -> Tensor:
    value = addend.value if addend.norm is None else _normed(addend.value, addend.norm)
    return _scaled(value.float(), addend.factor)


def _normed(x: Tensor, norm: NormWeights) -> Tensor:
    """The last dimension, normed in float32."""
    x = x.float()
    if norm.kind == "none":
        return x
    if norm.kind == "layer":
        x = x - x.mean(dim=-1, keepdim=True)
    x = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + norm.eps)
    x = x if norm.weight is None else x * norm.weight
    return x if norm.bias is None else x + norm.bias


def _normed_heads(heads: Tensor, norm: NormWeights) -> Tensor:
    """Heads [T, heads, dim], each normed by itself; see `NormWeights`."""
    shape = heads.shape[1:]
    weight, bias = (
        part if part is None or part.numel() == shape[1] else part.view(shape) for part in (norm.weight, norm.bias)
    )
    return _normed(heads, norm._replace(weight=weight, bias=bias))


def _prepared(x: Tensor, norm: NormWeights, heads: Heads, positions: Positions) -> Tensor:
    """Heads [T, heads, dim] normed and rotated by their positions, float32."""
    x = x.float() if heads.norm_last else _normed_heads(x, norm)
    if positions.cosines is not None and positions.sines is not None:
        half = positions.cosines.shape[1]
        left, right, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], dim=-1)
        cosines, sines = positions.cosines[:, None], positions.sines[:, None]
        x = torch.cat([left * cosines - right * sines, right * cosines + left * sines, rest], dim=-1)
    return _normed_heads(x, norm) if heads.norm_last else x


def _activated(x: Tensor, activation: ActivationSettings) -> Tensor:
    match activation.name:
        case "silu":
            return x * torch.sigmoid(activation.slope * x)
        case "gelu":
            return functional.gelu(x)
        case "gelu_tanh":
            return functional.gelu(x, approximate="tanh")
        case "relu":
            return torch.relu(x)
        case "relu2":
            return torch.relu(x).square()
        case "sigmoid":
            return torch.sigmoid(x)
        case "xielu":
            positive, negative, beta, largest = activation.params
            below = (negative + beta) * (torch.expm1(x.clamp(max=largest)) - x) + beta * x
            return torch.where(x > 0, positive * x * x + beta * x, below)
    return x


def _without_groups(wanted: Tensor, router: Router) -> Tensor:
    """The wanted scores [T, experts], with those of all groups but the best ones replaced."""
    grouped = wanted.view(len(wanted), router.groups, -1)
    best = grouped.topk(1 if router.group_score == "highest" else 2, dim=-1).values.sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool)
    kept.scatter_(1, best.argsort(dim=1, descending=True, stable=True)[:, : router.top_groups], True)
    dropped = 0.0 if router.group_score == "highest" else float("-inf")
    return grouped.masked_fill(~kept[:, :, None], dropped).flatten(1)
