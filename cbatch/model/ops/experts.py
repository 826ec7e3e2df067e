"""Mixtures of experts: a router chooses some for each token, and their results are added by its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from cbatch.kernels.cpu.fast_math import from_float32, to_float32
from cbatch.kernels.cpu.jit import as_rows
from cbatch.kernels.cpu.matmul.experts import choose, expert_matmul, sort_pairs
from cbatch.kernels.cpu.matmul.linear import ACTIVATED, GATED, WRITE
from cbatch.kernels.cpu.matmul.microkernel import pad_columns
from cbatch.kernels.cpu.program import (
    ACTIVATION,
    BUFFER,
    MATRIX,
    activation_of,
    elements_of,
    floats_of,
    instruction,
    matrix_of,
)
from cbatch.kernels.cpu.work_queue import Worker, claimed
from cbatch.kernels.operands import ExpertWeights
from cbatch.kernels.operands import Routing as DeviceRouting
from cbatch.model.base import ALL_EXPERTS_READ
from cbatch.model.device_weights import DeviceWeights
from cbatch.model.ops.cpu_layout import CpuLayout
from cbatch.model.ops.device_kernel import device_kernel
from cbatch.model.ops.device_plan import Buffer, Step
from cbatch.model.ops.linear import ACTIVATED_PRODUCT, PRODUCT, activate, activated_width
from cbatch.model.ops.operation import Operation, operation, reads, writes
from cbatch.model.ops.products import linear
from cbatch.model.ops.shards import Columns, Made, Shards
from cbatch.model.weight import Activation, Matrix, Weight

_SCORES = ("softmax", "sigmoid", "softmax_of_chosen", "sigmoid_of_chosen", "sparse_mixer")
_GROUP_SCORES = ("highest", "two_highest")


@operation
class Route(Operation):
    """Chooses `top_k` experts for each token by its scores source times matrix + biases, in float32.

    scores:      function of the scores: over all experts, or over those that were chosen; sparse_mixer (Liu et al.,
                 https://arxiv.org/abs/2310.00811) is the softmax over those that are not chosen before
    tolerance:   of sparse_mixer: others count if they are less than this share of their size below
    choice_bias: added to the scores for the choice only
    groups:      experts lie in so many groups, of which the `top_groups` with the highest score are used: the score
                 of a group is its highest, or the sum of its two highest
    normalize:   the weights of a token are divided by their sum + epsilon, or by least_sum if that is more
    factor:      of the weights
    expert_scales: [experts] factors of the weights
    """

    source: str = reads()
    matrix: Matrix
    top_k: int
    scores: Literal["softmax", "sigmoid", "softmax_of_chosen", "sigmoid_of_chosen", "sparse_mixer"]
    choice_bias: Weight | None = None
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["highest", "two_highest"] = "highest"
    normalize: bool = False
    epsilon: float = 0.0
    least_sum: float = 0.0
    factor: float = 1.0
    expert_scales: Weight | None = None
    tolerance: float = 0.0
    is_product = True

    @property
    def multiplied(self) -> int:
        return self.matrix.size

    def on_cpu(self, layout: CpuLayout) -> None:
        matrix, experts = self.matrix, self.matrix.columns
        layout.add(
            choose_experts, self, depth=matrix.depth, num_experts=experts, weight=layout.vector(*matrix.parts),
            bias=layout.vector(matrix.biases[0]) if matrix.biases else None, scores=_SCORES.index(self.scores),
            group_score=_GROUP_SCORES.index(self.group_score),
        )  # fmt: skip
        layout.routing_columns = max(layout.routing_columns, self.top_k)
        layout.num_experts = max(layout.num_experts, experts)

    def load(self, weights: DeviceWeights) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        choice_bias, scales = (
            None if weight is None else weights.vector(weight) for weight in (self.choice_bias, self.expert_scales)
        )
        return *weights.router(self.matrix), choice_bias, scales

    def run(
        self, step: Step, weights: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None], *, source: Tensor
    ) -> None:
        matrix, bias, choice_bias, scales = weights
        rows = source.float()
        scores = rows.new_empty(len(rows), len(matrix))
        linear(step.ops, rows, matrix, bias, scores)
        step.routing = route(step.ops, scores, self, (choice_bias, scales))


@operation
class Experts(Operation):
    """target = sum over the experts of the last `Route` of weight * down(activation(up(source))).

    top_k:       of that `Route`
    weigh_input: the weight multiplies the source, and not the result
    is_summed:   each of several processes has a part of every expert, and results are summed over them
    """

    source: str = reads()
    target: str = writes()
    up: tuple[Matrix, ...]
    down: tuple[Matrix, ...]
    activation: Activation
    top_k: int
    add: bool = False
    factor: float = 1.0
    weigh_input: bool = False
    is_summed: bool = False
    is_product = True
    assumed: ClassVar[str] = ALL_EXPERTS_READ

    @property
    def keeps_sum(self) -> bool:
        return True

    @property
    def multiplied(self) -> int:
        return self.top_k * (self.up[0].size + self.down[0].size)

    def on_shard(self, shards: Shards) -> Made:
        alike, inner = shards.alike(self), Columns(self.down[0].depth)
        inner.need_any(shards.grain(self.down))
        own = inner.take(shards.share_of(inner))
        if own is None:
            return alike
        columns = torch.cat([own, inner.width + own]) if self.activation.gated else own
        up = tuple(shards.matrix(one, columns) for one in self.up)
        down = tuple(shards.matrix(one, None, inner.depth) for one in self.down)
        return lambda: (replace(self, up=up, down=down, is_summed=True),)

    def on_cpu(self, layout: CpuLayout) -> None:
        """Gathers the source of each pair of a token and an expert, then the linears, then the weighted sums."""
        top_k, is_gated = self.top_k, self.activation.gated
        source, depth = layout.read(self.source)
        hidden, inner = self.down[0].columns, activated_width(self.down[0].depth, is_gated=is_gated)
        given = layout.elements("expert_input", top_k * depth)
        activated = layout.elements("expert_intermediate", top_k * inner)
        result = layout.floats("expert_output", top_k * pad_columns(hidden))
        target = layout.read(self.target) if self.add else layout.floats(self.target, hidden)
        shared: dict[str, Any] = {"top_k": top_k, "num_experts": len(self.up), "weigh_input": self.weigh_input}
        layout.add(gather_for_experts, source=(source, depth), target=given, **shared)
        layout.add(
            expert_product, source=given, target=activated, activation=layout.activation(self.activation),
            **layout.expert_matrices(self.up, depth, top_k, is_gated=is_gated), mode=GATED if is_gated else ACTIVATED,
            **shared,
        )  # fmt: skip
        layout.add(
            expert_product, source=activated, target=result, activation=layout.activation(None),
            **layout.expert_matrices(self.down, inner, top_k, is_gated=False), mode=WRITE, **shared,
        )  # fmt: skip
        layout.add(combine_experts, source=result, target=target, factor=self.factor, add=self.add, **shared)

    def target_width(self, width: Callable[[str], int]) -> int:
        return self.down[0].columns

    def load(self, weights: DeviceWeights) -> tuple[ExpertWeights, ExpertWeights, Activation]:
        return weights.experts(self.up), weights.experts(self.down), weights.activation(self.activation)

    def run(
        self, step: Step, weights: tuple[ExpertWeights, ExpertWeights, Activation], *, source: Tensor, target: Tensor
    ) -> None:
        (up, down, activation), ops, routing = weights, step.ops, step.routing
        assert routing is not None
        widths = {
            PRODUCT: self.up[0].columns,
            ACTIVATED_PRODUCT: self.down[0].depth,
            "(rows of experts)": self.down[0].columns,
        }
        first, second, last = (step[Buffer(name, self.top_k * width)].view(-1, width) for name, width in widths.items())
        expert_linear(ops, source, routing, up, first, gathers=True, weighs=self.weigh_input)
        activate(ops, first, activation, second)
        expert_linear(ops, second, routing, down, last, gathers=False, weighs=False)
        out = step[Buffer("(share of experts)", self.down[0].columns)] if self.is_summed else target
        combine(ops, last, routing, self.factor, out, weighs=not self.weigh_input, add=self.add and not self.is_summed)
        if self.is_summed:
            step.all_reduce(out)
            target.copy_(target + out if self.add else out)


@device_kernel("experts:route", waits=True)
def route(scores: Tensor, router: Route, weights: tuple[Tensor | None, Tensor | None]) -> DeviceRouting:
    """Chooses experts by what the router's matrix gives for each token, [T, experts] float32.

    weights: choice_bias and expert_scales
    """
    choice_bias, expert_scales = weights
    num_experts = scores.shape[1]
    if router.scores in ("softmax", "sigmoid"):
        scores = torch.softmax(scores, 1) if router.scores == "softmax" else torch.sigmoid(scores)
    wanted = scores if choice_bias is None else scores + choice_bias
    if router.groups > router.top_groups:
        wanted = _without_groups(wanted, router)
    chosen = wanted.argsort(dim=1, descending=True, stable=True)[:, : router.top_k]
    found = scores.gather(1, chosen)
    if router.scores.endswith("_of_chosen"):
        found = torch.softmax(found, 1) if router.scores.startswith("softmax") else torch.sigmoid(found)
    if router.scores == "sparse_mixer":
        found = _mixed(scores, chosen, router.tolerance)
    factors = torch.full_like(found, router.factor)
    if router.normalize:
        factors = factors / (found.sum(1, keepdim=True) + router.epsilon).clamp(min=router.least_sum)
    if expert_scales is not None:
        factors = factors * expert_scales[chosen]
    order = chosen.flatten().argsort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    counts = torch.bincount(chosen.flatten(), minlength=num_experts)
    return DeviceRouting(found * factors, places.view_as(chosen).int(), order.int(), counts.int())


def _mixed(scores: Tensor, chosen: Tensor, tolerance: float) -> Tensor:
    """The softmax [T, top_k] of each chosen score over those that are left and not much lower."""
    found = []
    for expert in chosen.T:
        most = scores.gather(1, expert[:, None])
        is_near = (most - scores <= tolerance * torch.maximum(scores.abs(), most)) & scores.isfinite()
        found.append(1 / ((scores - most).exp() * is_near).sum(1, keepdim=True))
        scores = scores.scatter(1, expert[:, None], float("-inf"))
    return torch.cat(found, dim=1)


def _without_groups(wanted: Tensor, router: Route) -> Tensor:
    """The wanted scores [T, experts], with those of all groups but the best ones replaced."""
    grouped = wanted.view(len(wanted), router.groups, -1)
    best = grouped.topk(1 if router.group_score == "highest" else 2, dim=-1).values.sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool)
    kept.scatter_(1, best.argsort(dim=1, descending=True, stable=True)[:, : router.top_groups], True)
    dropped = 0.0 if router.group_score == "highest" else float("-inf")
    return grouped.masked_fill(~kept[:, :, None], dropped).flatten(1)


@device_kernel("experts:expert_linear", is_product=True, waits=True)
def expert_linear(
    source: Tensor, routing: DeviceRouting, experts: ExpertWeights, out: Tensor, *, gathers: bool, weighs: bool
) -> None:
    """out [T * top_k, columns] = each sorted row times the matrix of its expert, plus its bias.

    source:  [T, depth] if it `gathers` the rows of the pairs' tokens; else [T * top_k, depth], sorted
    weighs:  the product is multiplied by the weight of the pair, before the bias
    """
    weight, top_k, start = experts.weight, routing.weights.shape[1], 0
    for expert, count in enumerate(routing.counts.tolist()):
        if count == 0:
            continue
        pairs = routing.order[start : start + count]
        rows = source[pairs // top_k] if gathers else source[start : start + count]
        matrix: Tensor = weight[expert] if isinstance(weight, Tensor) else weight.expert(expert).values(slice(None))
        product = rows @ matrix.to(rows.dtype).T
        if weighs:
            product = product * routing.weights.flatten()[pairs, None]
        if experts.bias is not None:
            product = product + experts.bias[expert]
        out[start : start + count] = product
        start += count


@device_kernel("experts:combine")
def combine(rows: Tensor, routing: DeviceRouting, factor: float, out: Tensor, *, weighs: bool, add: bool) -> None:
    """out [T, columns] = factor * the sum of each token's rows [T * top_k, columns], by their weights if `weighs`.

    add: to what `out` holds
    """
    total = torch.zeros_like(out, dtype=torch.float32)
    for place, weight in zip(routing.places.T, routing.weights.T, strict=True):
        total += rows[place] * weight[:, None] if weighs else rows[place]
    out.copy_(out + factor * total if add else factor * total)


@instruction(
    "depth num_experts weight bias choice_bias expert_scales top_k scores groups top_groups group_score normalize",
    "epsilon least_sum factor tolerance", source=BUFFER,
)  # fmt: skip
def choose_experts(worker: Worker, phase: int, op: Any, step: Any) -> int:
    source, routing, vectors = elements_of(step, op.source), step.buffers.routing, step.weights.vectors
    for task in claimed(worker, phase, len(source)):
        chosen, weights = routing.chosen[task], routing.weights[task, : op.top_k]
        choose(op, vectors, source[task], routing.scratch[worker.thread], chosen, weights)
    for _ in claimed(worker, phase + 1, 1):
        sort_pairs(op, routing, len(source))
    return phase + 2


@instruction("top_k weigh_input", source=BUFFER, target=BUFFER)
def gather_for_experts(worker: Worker, phase: int, op: Any, step: Any) -> int:
    """The source of each pair of a token and an expert, times its weight if `weigh_input`."""
    source, target, tokens = elements_of(step, op.source), elements_of(step, op.target), len(step.inputs.ids)
    rows, routing = as_rows(target, tokens * op.top_k, op.source.width), step.buffers.routing
    for task in claimed(worker, phase, tokens):
        for k in range(op.top_k):
            row, weight = rows[routing.places[task, k]], routing.weights[task, k]
            if op.weigh_input:
                for i in range(len(row)):
                    row[i] = from_float32(weight * to_float32(source[task, i]), rows)
            else:
                for i in range(len(row)):
                    row[i] = source[task, i]
    return phase + 1


@instruction(
    "stride columns mode top_k num_experts", source=BUFFER, target=BUFFER, matrix=MATRIX, activation=ACTIVATION
)
def expert_product(worker: Worker, phase: int, op: Any, step: Any) -> int:
    """stride, columns: how far apart the matrices of experts are, in bytes, and their biases"""
    pairs, workspace = len(step.inputs.ids) * op.top_k, step.buffers.linear
    width, columns = op.source.width // op.top_k, op.target.width // op.top_k
    source, first = as_rows(elements_of(step, op.source), pairs, width), matrix_of(step.weights, op.matrix)
    activation, routing = activation_of(step.weights, op.activation), step.buffers.routing
    if op.mode == WRITE:
        out = as_rows(floats_of(step, op.target), pairs, columns)
        return expert_matmul(worker, phase, op, source, routing, first, out, activation, workspace)
    activated = as_rows(elements_of(step, op.target), pairs, columns)
    return expert_matmul(worker, phase, op, source, routing, first, activated, activation, workspace)


@instruction("top_k weigh_input add", "factor", source=BUFFER, target=BUFFER)
def combine_experts(worker: Worker, phase: int, op: Any, step: Any) -> int:
    """The sum of each token's rows, times their weights unless those have multiplied what went in."""
    tokens, out = len(step.inputs.ids), floats_of(step, op.target)
    rows, routing = floats_of(step, op.source), step.buffers.routing
    rows = as_rows(rows, tokens * op.top_k, op.source.width // op.top_k)
    for task in claimed(worker, phase, tokens):
        target = out[task]
        if not op.add:
            for i in range(len(target)):
                target[i] = np.float32(0)
        for k in range(op.top_k):
            row = rows[routing.places[task, k]]
            weight = op.factor if op.weigh_input else op.factor * routing.weights[task, k]
            for i in range(len(target)):
                target[i] += weight * row[i]
    return phase + 1
