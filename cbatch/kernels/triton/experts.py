"""Mixtures of experts: a router chooses experts for each token, and each expert's tokens go through it together.

Pairs of a token and one of its experts are sorted by expert. A program multiplies a tile of one expert's rows, and
finds on the device which: nothing waits for the numbers of rows, so steps can be captured, and of experts that nobody
has chosen nothing is read. Which pair of an expert comes first is left to chance; no result depends on it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbatch.kernels.operands import ExpertWeights, Routing
from cbatch.kernels.quantized_matrix import QuantizedMatrix
from cbatch.kernels.triton.attention_tile import LAUNCH, further, launch_options, power_of_2
from cbatch.kernels.triton.linear import FIXED_ROWS, Tile, multiply, operands


@triton.jit
def _without_groups(wanted, expert, SIZE, GROUPS, TOP_GROUPS, TWO_HIGHEST):
    """The wanted scores, with those of all groups but the best ones replaced; of equal ones, the first stay.

    SIZE: experts of a group
    """
    group = tl.arange(0, GROUPS)
    best = tl.full([GROUPS], float("-inf"), tl.float32)
    for number in tl.static_range(GROUPS):
        part = tl.where(expert // SIZE == number, wanted, float("-inf"))
        score = tl.max(part, 0)
        if TWO_HIGHEST:
            first = tl.min(tl.where(part == score, expert, 1 << 30), 0)
            score += tl.max(tl.where(expert == first, float("-inf"), part), 0)
        best = tl.where(group == number, score, best)
    kept = tl.zeros([GROUPS], tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        left = tl.where(kept == 1, float("-inf"), best)
        first = tl.min(tl.where((left == tl.max(left, 0)) & (kept == 0), group, 1 << 30), 0)
        kept = tl.where(group == first, 1, kept)
    is_kept = tl.zeros(wanted.shape, tl.int32)
    for number in tl.static_range(GROUPS):
        stays = tl.sum(tl.where(group == number, kept, 0), 0)
        is_kept = tl.where(expert // SIZE == number, stays, is_kept)
    dropped = float("-inf") if TWO_HIGHEST else 0.0
    return tl.where(is_kept == 1, wanted, dropped)


@triton.jit
def _route_kernel(
    scores, choice_bias, expert_scales, weights, chosen, ranks, counts, EXPERTS: tl.constexpr, TILE: tl.constexpr,
    TOP_K: tl.constexpr, K_TILE: tl.constexpr, SCORES: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    TWO_HIGHEST: tl.constexpr, NORMALIZES: tl.constexpr, EPSILON: tl.constexpr, LEAST_SUM: tl.constexpr,
    FACTOR: tl.constexpr, TOLERANCE: tl.constexpr,
):  # fmt: skip
    """One program per token. ranks [T, top_k]: how many pairs of the same expert were counted before."""
    token = tl.program_id(0).to(tl.int64)
    expert, k = tl.arange(0, TILE), tl.arange(0, K_TILE)
    inside = expert < EXPERTS
    score = tl.load(scores + token * EXPERTS + expert, mask=inside, other=float("-inf"))
    if SCORES == "softmax":
        score = tl.exp(score - tl.max(score, 0))
        score /= tl.sum(score, 0)
    elif SCORES == "sigmoid":
        score = tl.sigmoid(score)
    wanted = score
    if choice_bias is not None:
        wanted += tl.load(choice_bias + expert, mask=inside, other=0.0)
    wanted = tl.where(inside, wanted, float("-inf"))
    if GROUPS > TOP_GROUPS:
        wanted = _without_groups(wanted, expert, EXPERTS // GROUPS, GROUPS, TOP_GROUPS, TWO_HIGHEST)
        wanted = tl.where(inside, wanted, float("-inf"))
    choice = tl.zeros([K_TILE], tl.int32)
    weight = tl.full([K_TILE], float("-inf"), tl.float32)
    for number in tl.static_range(TOP_K):
        # Of equals the first; a row of NaN chooses the last expert every time.
        best = tl.minimum(tl.min(tl.where(wanted == tl.max(wanted, 0), expert, TILE), 0), EXPERTS - 1)
        choice = tl.where(k == number, best, choice)
        value = tl.sum(tl.where(expert == best, score, 0.0), 0)
        if SCORES == "sparse_mixer":
            is_near = (wanted > float("-inf")) & (value - wanted <= TOLERANCE * tl.maximum(tl.abs(wanted), value))
            value = 1.0 / tl.sum(tl.where(is_near, tl.exp(wanted - value), 0.0), 0)
        weight = tl.where(k == number, value, weight)
        wanted = tl.where(expert == best, float("-inf"), wanted)
    there = k < TOP_K
    if SCORES == "softmax_of_chosen":
        weight = tl.exp(weight - tl.max(weight, 0))
        weight /= tl.sum(weight, 0)
    elif SCORES == "sigmoid_of_chosen":
        weight = tl.sigmoid(weight)
    weight = tl.where(there, weight, 0.0)
    if NORMALIZES:
        weight *= FACTOR / tl.maximum(tl.sum(weight, 0) + EPSILON, LEAST_SUM)
    elif FACTOR != 1.0:
        weight *= FACTOR
    if expert_scales is not None:
        weight *= tl.load(expert_scales + choice)
    place = token * TOP_K + k
    tl.store(weights + place, weight, mask=there)
    tl.store(chosen + place, choice, mask=there)
    tl.store(ranks + place, tl.atomic_add(counts + choice, 1, mask=there), mask=there)


@triton.jit(do_not_specialize=["pairs"])
def _place_kernel(
    chosen, ranks, counts, places, order, pairs, EXPERTS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per block of pairs: where each stands once all are sorted by expert."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < pairs
    expert = tl.arange(0, TILE)
    count = tl.load(counts + expert, mask=expert < EXPERTS, other=0)
    choice = tl.load(chosen + pair, mask=inside, other=0)
    before = tl.sum(tl.where(expert[None, :] < choice[:, None], count[None, :], 0), 1)
    place = before + tl.load(ranks + pair, mask=inside, other=0)
    tl.store(places + pair, place, mask=inside)
    tl.store(order + place, pair, mask=inside)


def route(scores: Tensor, router: Any, given: tuple[Tensor | None, Tensor | None]) -> Routing:
    """See `model/ops/experts.py`."""
    tokens, experts = scores.shape
    top_k, device = router.top_k, scores.device
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=device)
    pairs, block = tokens * top_k, 32
    # Each begins at a multiple of 16 bytes: a kernel is compiled once more for others.
    whole = torch.empty(4, -(-pairs // 4) * 4, dtype=torch.int32, device=device)
    chosen, ranks, places, order = whole[:, :pairs]
    counts = torch.zeros(experts, dtype=torch.int32, device=device)
    tile = power_of_2(experts)
    _route_kernel[(tokens,)](
        scores, *given, weights, chosen, ranks, counts, experts, tile, top_k, power_of_2(top_k), router.scores,
        router.groups, router.top_groups, router.group_score == "two_highest", router.normalize, router.epsilon,
        router.least_sum, router.factor, router.tolerance, num_warps=1, **LAUNCH,
    )  # fmt: skip
    _place_kernel[(-(-pairs // block),)](
        chosen, ranks, counts, places, order, pairs, experts, tile, block, **launch_options(block * tile // 16)
    )
    return Routing(weights, places.view(tokens, top_k), order, counts)


@triton.jit
def _expert_linear_kernel(
    source, matrices, scales, zeros, biases, weights, order, counts, out, matrix_size: tl.constexpr,
    scales_size: tl.constexpr, EXPERTS: tl.constexpr, TILE: tl.constexpr, TOP_K: tl.constexpr, GATHERS: tl.constexpr,
    WEIGHS: tl.constexpr, FORM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One program per tile of one expert's rows, and of the columns of its matrix.  FORM, STEP: see `multiply`"""
    tile = tl.program_id(0)
    number = tl.arange(0, TILE)
    count = tl.load(counts + number, mask=number < EXPERTS, other=0)
    tiles = (count + ROWS - 1) // ROWS
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    if expert >= EXPERTS:
        return
    first = tl.sum(tl.where(number < expert, count, 0), 0)
    stop = first + tl.sum(tl.where(number == expert, count, 0), 0)
    first += (tile - tl.sum(tl.where(number < expert, tiles, 0), 0)) * ROWS
    place = first + tl.arange(0, ROWS)
    there = place < stop
    pair = place
    if GATHERS or WEIGHS:
        pair = tl.load(order + place, mask=there, other=0)
    row = (pair // TOP_K if GATHERS else place).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < FORM.columns
    begin = expert.to(tl.int64)
    matrix = matrices + begin * matrix_size, further(scales, begin * scales_size), further(zeros, begin * scales_size)
    left, total = source + row * FORM.depth, tl.zeros([ROWS, WIDTH], tl.float32)
    total = multiply(left, there, matrix, column, inside, total, FORM, STEP, 1)
    if WEIGHS:
        total *= tl.load(weights + pair, mask=there, other=0.0)[:, None]
    if biases is not None:
        bias = tl.load(biases + expert * FORM.columns + column, mask=inside, other=0.0)
        total += bias.to(tl.float32)[None, :]
    to = out + place.to(tl.int64)[:, None] * FORM.columns + column[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=there[:, None] & inside[None, :])


def expert_linear(
    source: Tensor, routing: Routing, experts: ExpertWeights, out: Tensor, *, gathers: bool, weighs: bool,
    capability: int, batch_invariant: bool,
) -> None:  # fmt: skip
    """See `model/ops/experts.py`. capability: of the chip, 90 for 9.0"""
    weight, number, pairs = experts.weight, len(routing.counts), len(routing.order)
    mean, (tensors, form) = FIXED_ROWS if batch_invariant else pairs / number, operands(weight)
    if isinstance(weight, QuantizedMatrix):
        rows = 16 if 4 < mean < 16 else mean  # some experts have more than others
        tile, sizes = Tile.of_packed(rows, source.dtype, capability), weight.sizes
    else:
        tile, sizes = Tile.of_experts(mean, source.dtype, capability), (form.columns * form.depth, 0)
    tiles = min(pairs, number) + pairs // tile.rows  # at most: each expert may have one that is not full
    _expert_linear_kernel[(tiles, -(-form.columns // tile.columns))](
        source, *tensors, experts.bias, routing.weights, routing.order, routing.counts, out, *sizes, number,
        power_of_2(number), routing.weights.shape[1], gathers, weighs, form, *tile[:3], num_warps=tile.warps,
        num_stages=tile.stages, **LAUNCH,
    )  # fmt: skip


@triton.jit
def _combine_experts_kernel(
    rows, weights, places, out, TOP_K: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, FACTOR: tl.constexpr,
    WEIGHS: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """One program per token and block of columns; experts are added in the order of their choice."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        place = tl.load(places + token * TOP_K + k).to(tl.int64)
        part = tl.load(rows + place * COLUMNS + column, mask=inside, other=0.0).to(tl.float32)
        if WEIGHS:
            part *= tl.load(weights + token * TOP_K + k)
        total += part
    if FACTOR != 1.0:
        total *= FACTOR
    to = out + token * COLUMNS + column
    if ADDS:
        total += tl.load(to, mask=inside, other=0.0)
    tl.store(to, total, mask=inside)


def combine(rows: Tensor, routing: Routing, factor: float, out: Tensor, *, weighs: bool, add: bool) -> None:
    """See `model/ops/experts.py`."""
    tokens, columns = out.shape
    block = min(power_of_2(columns), 1024)
    _combine_experts_kernel[(tokens, -(-columns // block))](
        rows, routing.weights, routing.places, out, routing.weights.shape[1], columns, block, factor, weighs, add,
        **launch_options(block // 8),
    )  # fmt: skip
