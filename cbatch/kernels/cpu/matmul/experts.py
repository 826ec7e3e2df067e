"""Mixtures of experts: a router chooses experts for each token, and each expert's tokens go through it together.

Pairs of a token and one of its experts are sorted by expert, so each expert that was chosen is read once, and no other
is. A row's result is the sum over its own experts in their order, so it has the same bits in every batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch.kernels.cpu.activation import ActivationParams
from cbatch.kernels.cpu.fast_math import exp, from_float32, to_float32
from cbatch.kernels.cpu.jit import kernel
from cbatch.kernels.cpu.matmul.linear import (
    GATED,
    LinearWorkspace,
    PackedMatrix,
    multiply_tiles,
    prepare_rows,
    row_block,
)
from cbatch.kernels.cpu.matmul.microkernel import COLUMNS, LANES, Rows
from cbatch.kernels.cpu.work_queue import Worker, claimed

SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN, SIGMOID_OF_CHOSEN = range(4)
HIGHEST, TWO_HIGHEST = range(2)

_TASKS_PER_THREAD = 8
_MINUS_INFINITY = np.float32(-np.inf)


class RouterParams(NamedTuple):
    """How experts are chosen (see `Route` in `model/ops`).

    weight: [experts, hidden] float32; bias, choice_bias, expert_scales: [experts], or empty
    """

    weight: NDArray[np.float32]
    bias: NDArray[np.float32]
    choice_bias: NDArray[np.float32]
    expert_scales: NDArray[np.float32]
    top_k: int
    scores: int
    groups: int
    top_groups: int
    group_score: int
    normalize: int
    epsilon: float
    least_sum: float
    factor: float


class Routing(NamedTuple):
    """Which experts the T tokens of a step go to.

    chosen:  [T, top_k] int64
    weights: [T, top_k] float32
    places:  [T, top_k] where each pair stands once all are sorted by expert
    tokens:  [T * top_k] the token of each sorted pair
    starts:  [experts + 1] where the pairs of each expert begin
    active:  [experts + 1] the experts that have any, and in the last place their number
    """

    chosen: NDArray[np.int64]
    weights: NDArray[np.float32]
    places: NDArray[np.int64]
    tokens: NDArray[np.int64]
    starts: NDArray[np.int64]
    active: NDArray[np.int64]


class ExpertMatrix(NamedTuple):
    """One matrix of each expert, side by side: the first, and how far apart they [bytes] and their biases are."""

    first: PackedMatrix
    stride: int
    columns: int


@kernel
def _scores_of(row: Any, router: RouterParams, scores: Any) -> None:
    """The router's scores of a row [hidden], before any choice."""
    num_experts = len(scores)
    for expert in range(num_experts):
        total = np.float32(0)
        for i in range(router.weight.shape[1]):
            total += row[i] * router.weight[expert, i]
        scores[expert] = total + router.bias[expert] if len(router.bias) else total
    if router.scores == SOFTMAX:
        _softmax(scores)
    elif router.scores == SIGMOID:
        for expert in range(num_experts):
            scores[expert] = np.float32(1) / (np.float32(1) + exp(-scores[expert]))


@kernel
def _softmax(scores: Any) -> None:
    most, total = _MINUS_INFINITY, np.float32(0)
    for i in range(len(scores)):
        most = scores[i] if scores[i] > most else most
    for i in range(len(scores)):
        scores[i] = exp(scores[i] - most)
        total += scores[i]
    for i in range(len(scores)):
        scores[i] /= total


@kernel
def _largest(numbers: Any) -> int:
    """The index of the first of the largest numbers; 0 if all are NaN."""
    index = 0
    for i in range(1, len(numbers)):
        if numbers[i] > numbers[index]:
            index = i
    return index


@kernel
def _drop_groups(wanted: Any, router: RouterParams) -> None:
    """Sets the wanted scores of all groups but the best ones to 0 [softmax] or minus infinity."""
    size = len(wanted) // router.groups
    left = router.groups - router.top_groups
    dropped = np.float32(0) if router.group_score == HIGHEST else _MINUS_INFINITY
    for _ in range(left):
        worst, lowest = -1, np.float32(np.inf)
        for group in range(router.groups - 1, -1, -1):  # of equal ones, the first stay
            part = wanted[group * size : (group + 1) * size]
            first = _largest(part)
            score = part[first]
            if router.group_score == TWO_HIGHEST:
                second = _MINUS_INFINITY
                for i in range(size):
                    if i != first and part[i] > second:
                        second = part[i]
                score += second
            if score < lowest and part[first] != dropped:
                worst, lowest = group, score
        if worst >= 0:
            for i in range(worst * size, (worst + 1) * size):
                wanted[i] = dropped


@kernel
def _choose(row: Any, router: RouterParams, scratch: Any, chosen: Any, weights: Any) -> None:
    """Chooses experts for one row [hidden] float32. scratch: [2, experts]"""
    scores, wanted = scratch[0], scratch[1]
    _scores_of(row, router, scores)
    for expert in range(len(scores)):
        wanted[expert] = scores[expert] + router.choice_bias[expert] if len(router.choice_bias) else scores[expert]
    if router.groups > router.top_groups:
        _drop_groups(wanted, router)
    for k in range(router.top_k):
        chosen[k] = _largest(wanted)
        weights[k] = scores[chosen[k]]
        wanted[chosen[k]] = _MINUS_INFINITY
    if router.scores == SOFTMAX_OF_CHOSEN:
        _softmax(weights)
    elif router.scores == SIGMOID_OF_CHOSEN:
        for k in range(router.top_k):
            weights[k] = np.float32(1) / (np.float32(1) + exp(-weights[k]))
    factor = np.float32(router.factor)
    if router.normalize:
        total = np.float32(0)
        for k in range(router.top_k):
            total += weights[k]
        factor /= max(total + np.float32(router.epsilon), np.float32(router.least_sum))
    for k in range(router.top_k):
        weights[k] *= factor
        if len(router.expert_scales):
            weights[k] *= router.expert_scales[chosen[k]]


@kernel
def route(worker: Worker, phase: int, source: Any, router: RouterParams, routing: Routing, scratch: Any) -> int:
    """Chooses the experts of each row of the source [T, hidden], and sorts the pairs. Returns the next phase.

    scratch: [threads, hidden + 2 * experts] float32
    """
    num_tasks, hidden = len(source), router.weight.shape[1]
    row = scratch[worker.thread, :hidden]
    num_experts = len(router.weight)
    scores = scratch[worker.thread, hidden : hidden + 2 * num_experts].reshape(2, num_experts)
    for task in claimed(worker, phase, num_tasks):
        for i in range(hidden):
            row[i] = to_float32(source[task, i])
        _choose(row, router, scores, routing.chosen[task], routing.weights[task])
    for _ in claimed(worker, phase + 1, 1):
        _sort(routing)
    return phase + 2


@kernel
def _sort(routing: Routing) -> None:
    """Counts the pairs of each expert, and gives each its place: those of a token that comes first come first."""
    starts, active, chosen = routing.starts, routing.active, routing.chosen
    num_experts = len(starts) - 1
    for expert in range(num_experts + 1):
        starts[expert] = 0
    for token in range(len(chosen)):
        for k in range(chosen.shape[1]):
            starts[chosen[token, k] + 1] += 1
    count = 0
    for expert in range(num_experts):
        if starts[expert + 1] > 0:
            active[count] = expert
            count += 1
        starts[expert + 1] += starts[expert]
    active[num_experts] = count
    for token in range(len(chosen)):
        for k in range(chosen.shape[1]):
            place = starts[chosen[token, k]]
            starts[chosen[token, k]] += 1
            routing.places[token, k] = place
            routing.tokens[place] = token
    for expert in range(num_experts, 0, -1):
        starts[expert] = starts[expert - 1]
    starts[0] = 0


@kernel
def gather_rows(worker: Worker, phase: int, source: Any, routing: Routing, weigh: int, out: Any) -> int:
    """out [T * top_k, hidden] = the rows of the sorted pairs, times their weights if `weigh`."""
    top_k = routing.chosen.shape[1]
    for task in claimed(worker, phase, len(source)):
        for k in range(top_k):
            row = out[routing.places[task, k]]
            if weigh:
                weight = routing.weights[task, k]
                for i in range(len(row)):
                    row[i] = from_float32(weight * to_float32(source[task, i]), out)
            else:
                for i in range(len(row)):
                    row[i] = source[task, i]
    return phase + 1


@kernel
def expert_matmul(
    worker: Worker, phase: int, a: Any, routing: Routing, matrix: ExpertMatrix, out: Any, mode: int,
    activation: ActivationParams, workspace: LinearWorkspace,
) -> int:  # fmt: skip
    """out [T * top_k, columns] = each sorted row of `a` times the matrix of its expert; see `matmul`."""
    first = matrix.first
    columns = LANES if mode == GATED else COLUMNS
    num_tiles, active = out.shape[1] // columns, routing.active[len(routing.active) - 1]
    tiles = min(num_tiles, max(1, active * num_tiles // (_TASKS_PER_THREAD * len(workspace.sums))))
    parts = -(-num_tiles // tiles)
    phase, left = prepare_rows(worker, phase, a, first.format, workspace)
    num_tasks, block = active * parts, row_block(left, workspace.max_rows[first.format])
    for task in claimed(worker, phase, num_tasks):
        expert = routing.active[task // parts]
        each = PackedMatrix(
            first.data,
            first.start + expert * matrix.stride,
            first.format,
            first.scale[expert * matrix.columns if len(first.scale) else 0 :],
            first.bias[expert * matrix.columns if len(first.bias) else 0 :],
        )
        first_tile, stop = task % parts * tiles, routing.starts[expert + 1]
        for begin in range(routing.starts[expert], stop, block):
            part = Rows(left.address + begin * left.stride, left.stride)
            multiply_tiles(
                a, part, first_tile, min(num_tiles, first_tile + tiles), each,
                out[begin : min(stop, begin + block)], mode, activation, workspace, worker.thread,
            )  # fmt: skip
    return phase + 1


@kernel
def combine_rows(
    worker: Worker, phase: int, rows: Any, routing: Routing, weigh: int, factor: float, add: int, out: Any
) -> int:
    """out [T, hidden] = factor * the sum of each token's rows [T * top_k, hidden] times their weights."""
    num_tasks, scale = len(routing.chosen), np.float32(factor)
    for task in claimed(worker, phase, num_tasks):
        target = out[task]
        if not add:
            for i in range(len(target)):
                target[i] = np.float32(0)
        for k in range(routing.chosen.shape[1]):
            row = rows[routing.places[task, k]]
            weight = scale * routing.weights[task, k] if weigh else scale
            for i in range(len(target)):
                target[i] += weight * row[i]
    return phase + 1
