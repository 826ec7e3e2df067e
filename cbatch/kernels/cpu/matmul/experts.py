"""Mixtures of experts: a router chooses experts for each token, and each expert's tokens go through it together.

Pairs of a token and one of its experts are sorted by expert, so each expert that was chosen is read once, and no other
is. A row's result is the sum over its own experts in their order, so it has the same bits in every batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch.kernels.cpu.activation import ActivationParams
from cbatch.kernels.cpu.fast_math import copy_row, exp
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

SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN, SIGMOID_OF_CHOSEN, SPARSE_MIXER = range(5)
HIGHEST, TWO_HIGHEST = range(2)

_TASKS_PER_THREAD = 8
_MINUS_INFINITY = np.float32(-np.inf)


class Routing(NamedTuple):
    """Which experts the T tokens of a step go to. It has room for the largest `top_k`, and for the most experts.

    chosen:  [T, top_k] int64
    weights: [T, top_k] float32
    places:  [T, top_k] where each pair stands once all are sorted by expert
    starts:  [experts + 1] where the pairs of each expert begin
    active:  [experts + 1] the experts of a layer that have any; their number is at place `num_experts`
    scratch: [threads, hidden + 2 * experts] float32 memory
    """

    chosen: NDArray[np.int64]
    weights: NDArray[np.float32]
    places: NDArray[np.int64]
    starts: NDArray[np.int64]
    active: NDArray[np.int64]
    scratch: NDArray[np.float32]


@kernel
def _scores_of(op: Any, vectors: Any, row: Any, scores: Any) -> None:
    """The router's scores of a row [hidden], before any choice."""
    for expert in range(len(scores)):
        total, weight = np.float32(0), vectors[op.weight + expert * op.depth :]
        for i in range(op.depth):
            total += row[i] * weight[i]
        scores[expert] = total + vectors[op.bias + expert] if op.bias >= 0 else total
    if op.scores == SOFTMAX:
        _softmax(scores)
    elif op.scores == SIGMOID:
        for expert in range(len(scores)):
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
def _mixed(scores: Any, chosen: int, tolerance: float) -> Any:
    """The softmax of a score over those that are left and not much lower."""
    most, total = scores[chosen], np.float32(0)
    for score in scores:
        if score > _MINUS_INFINITY and most - score <= tolerance * max(abs(score), most):
            total += exp(score - most)
    return np.float32(1) / total


@kernel
def _drop_groups(op: Any, wanted: Any) -> None:
    """Sets the wanted scores of all groups but the best ones to 0 [softmax] or minus infinity."""
    size = len(wanted) // op.groups
    left = op.groups - op.top_groups
    dropped = np.float32(0) if op.group_score == HIGHEST else _MINUS_INFINITY
    for _ in range(left):
        worst, lowest = -1, np.float32(np.inf)
        for group in range(op.groups - 1, -1, -1):  # of equal ones, the first stay
            part = wanted[group * size : (group + 1) * size]
            first = _largest(part)
            score = part[first]
            if op.group_score == TWO_HIGHEST:
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
def choose(op: Any, vectors: Any, source: Any, scratch: Any, chosen: Any, weights: Any) -> None:
    """Chooses experts for one row [hidden] of the source, as a record says (see `Route`), and their weights."""
    row, scores = scratch[: op.depth], scratch[op.depth : op.depth + op.num_experts]
    wanted = scratch[op.depth + op.num_experts :][: op.num_experts]
    copy_row(source[: op.depth], row)
    _scores_of(op, vectors, row, scores)
    for expert in range(op.num_experts):
        bias = vectors[op.choice_bias + expert] if op.choice_bias >= 0 else np.float32(0)
        wanted[expert] = scores[expert] + bias
    if op.groups > op.top_groups:
        _drop_groups(op, wanted)
    for k in range(op.top_k):
        chosen[k] = _largest(wanted)
        weights[k] = scores[chosen[k]]
        if op.scores == SPARSE_MIXER:
            weights[k] = _mixed(wanted, chosen[k], op.tolerance)
        wanted[chosen[k]] = _MINUS_INFINITY
    if op.scores == SOFTMAX_OF_CHOSEN:
        _softmax(weights)
    elif op.scores == SIGMOID_OF_CHOSEN:
        for k in range(op.top_k):
            weights[k] = np.float32(1) / (np.float32(1) + exp(-weights[k]))
    factor = op.factor
    if op.normalize:
        total = np.float32(0)
        for k in range(op.top_k):
            total += weights[k]
        factor /= max(total + op.epsilon, op.least_sum)
    for k in range(op.top_k):
        weights[k] *= factor
        if op.expert_scales >= 0:
            weights[k] *= vectors[op.expert_scales + chosen[k]]


@kernel
def sort_pairs(op: Any, routing: Routing, tokens: int) -> None:
    """Counts the pairs of each expert, and gives each its place: those of a token that comes first come first."""
    starts, chosen, count = routing.starts, routing.chosen, 0
    for expert in range(op.num_experts + 1):
        starts[expert] = 0
    for token in range(tokens):
        for k in range(op.top_k):
            starts[chosen[token, k] + 1] += 1
    for expert in range(op.num_experts):
        if starts[expert + 1] > 0:
            routing.active[count] = expert
            count += 1
        starts[expert + 1] += starts[expert]
    routing.active[op.num_experts] = count
    for token in range(tokens):
        for k in range(op.top_k):
            routing.places[token, k] = starts[chosen[token, k]]
            starts[chosen[token, k]] += 1
    for expert in range(op.num_experts, 0, -1):
        starts[expert] = starts[expert - 1]
    starts[0] = 0


@kernel
def expert_matmul(
    worker: Worker, phase: int, op: Any, a: Any, routing: Routing, first: PackedMatrix, out: Any,
    activation: ActivationParams, workspace: LinearWorkspace,
) -> int:  # fmt: skip
    """out [T * top_k, columns] = each sorted row of `a` times the matrix of its expert; see `matmul`.

    op: a record, which says the mode, and how far apart the matrices [bytes] and their biases [columns] are
    """
    columns = LANES if op.mode == GATED else COLUMNS
    num_tiles, active = out.shape[1] // columns, routing.active[op.num_experts]
    tiles = min(num_tiles, max(1, active * num_tiles // (_TASKS_PER_THREAD * len(workspace.sums))))
    parts = -(-num_tiles // tiles)
    phase, left = prepare_rows(worker, phase, a, first.format, workspace)
    num_tasks, block = active * parts, row_block(left, workspace.max_rows[first.format])
    for task in claimed(worker, phase, num_tasks):
        expert = routing.active[task // parts]
        each = PackedMatrix(
            first.data,
            first.start + expert * op.stride,
            first.format,
            first.scale[expert * op.columns if len(first.scale) else 0 :],
            first.bias[expert * op.columns if len(first.bias) else 0 :],
        )
        first_tile, stop = task % parts * tiles, routing.starts[expert + 1]
        for begin in range(routing.starts[expert], stop, block):
            part = Rows(left.address + begin * left.stride, left.stride)
            multiply_tiles(
                a, part, first_tile, min(num_tiles, first_tile + tiles), each,
                out[begin : min(stop, begin + block)], op.mode, activation, workspace, worker.thread,
            )  # fmt: skip
    return phase + 1
