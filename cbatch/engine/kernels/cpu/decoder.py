"""One step of a decoder of the Llama family, from token ids to logits, in one call."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch.engine.kernels.cpu.attention import attend, store
from cbatch.engine.kernels.cpu.board import finish, take
from cbatch.engine.kernels.cpu.jit import entry, kernel
from cbatch.engine.kernels.cpu.largest import find_largest
from cbatch.engine.kernels.cpu.linear import Tiles, multiply, multiply_gated
from cbatch.engine.kernels.cpu.numbers import narrow, widen
from cbatch.engine.kernels.cpu.pages import Pages, Rule, Slices, Workspace
from cbatch.engine.kernels.cpu.tile import COLUMNS

_ROWS = 8
"""Rows in a piece of what is done row by row."""


class Weights(NamedTuple):
    """A model's weights, for all layers side by side.

    matrices:  every linear, packed (see `linear.pack`), one after the other
    starts:    [layers, 4] where those of a layer begin: queries with keys and values, output, gate with up, down
    head:      where that of the logits begins
    scales:    flat float32, a factor for each column of each matrix; of no size where they are not quantized
    columns:   [layers + 1, 4] where the factors of each matrix begin; those of the logits in the last row
    bias:      [layers, columns] of queries, keys and values; no layers where there is none
    norms:     [layers, 2, hidden] float32 before attention and before the feed-forward part
    last_norm: [hidden]
    head_norms: [layers, 2, head_dim] of queries and of keys, no layers where there are none
    embedding: [vocabulary, hidden]; of no size where it is tied to the logits' matrix
    nothing:   of no size
    """

    matrices: NDArray[Any]
    starts: NDArray[np.int64]
    head: int
    scales: NDArray[np.float32]
    columns: NDArray[np.int64]
    bias: NDArray[np.float32]
    norms: NDArray[np.float32]
    last_norm: NDArray[np.float32]
    head_norms: NDArray[np.float32]
    embedding: NDArray[Any]
    nothing: NDArray[np.float32]


class Sizes(NamedTuple):
    """heads: of queries; eps: of all norms; windows: [layers], 0 for none; scale: of the scores."""

    heads: int
    eps: float
    scale: float
    windows: NDArray[np.int64]


class Inputs(NamedTuple):
    """What changes from step to step.

    ids:  [T] token ids
    positions: [T] place of each token in its sequence
    cosines, sines: [places, rotary_dim / 2] float32, of every place up to the furthest
    every, rows: [T] all rows, [R] those whose logits are wanted
    """

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    cosines: NDArray[np.float32]
    sines: NDArray[np.float32]
    every: NDArray[np.int64]
    rows: NDArray[np.int64]


class Buffers(NamedTuple):
    """Room for T tokens of a step, used by every layer again.

    stream:  [T, hidden] float32, the residual stream
    input:   [T, hidden] what goes into a linear; `attended` [T, heads * head_dim] and `inner` [T, ...] likewise
    mixed:   [T, ...] float32, queries, keys and values
    query:   [T, heads * head_dim]
    """

    stream: NDArray[np.float32]
    input: NDArray[Any]
    mixed: NDArray[np.float32]
    query: NDArray[Any]
    attended: NDArray[Any]
    inner: NDArray[Any]


class Outputs(NamedTuple):
    """What a step gives for R rows.

    logits:  [R, columns] float32, of which the first `vocabulary` mean something
    tokens:  [R] int64, the likeliest of each row, the first of equal ones
    largest: [R] float32, its logit; NaN where any of the row is no number
    """

    logits: NDArray[np.float32]
    vocabulary: int
    tokens: NDArray[np.int64]
    largest: NDArray[np.float32]


@kernel
def _embed(board: Any, phase: int, weights: Any, ids: Any, out: Any) -> int:
    pieces = -(-len(ids) // _ROWS)
    hidden = out.shape[1]
    pair = 1 if weights.matrices.itemsize == 4 else 2
    piece = take(board, phase, pieces)
    while piece >= 0:
        for row in range(piece * _ROWS, min(len(ids), (piece + 1) * _ROWS)):
            if len(weights.embedding):
                for i in range(hidden):
                    out[row, i] = widen(weights.embedding[ids[row], i])
            else:
                group, column = ids[row] // COLUMNS, ids[row] % COLUMNS
                base = weights.head + group * hidden * COLUMNS + column * pair
                factor = np.float32(1)
                if len(weights.scales):
                    factor = weights.scales[weights.columns[-1, 0] + ids[row]]
                for i in range(hidden):
                    out[row, i] = factor * widen(weights.matrices[base + i // pair * COLUMNS * pair + i % pair])
        finish(board, phase, pieces)
        piece = take(board, phase, pieces)
    return phase + 1


@kernel
def _one_over_rms(x: Any, eps: float) -> Any:
    """What brings x to a root mean square of 1 (RMSNorm, Zhang and Sennrich, 2019)."""
    squares = np.float32(0)
    for i in range(len(x)):
        squares += x[i] * x[i]
    return np.float32(1) / np.sqrt(squares / np.float32(len(x)) + np.float32(eps))


@kernel
def _norm(board: Any, phase: int, x: Any, rows: Any, weight: Any, eps: float, out: Any) -> int:
    """out [R, hidden] = x [T, hidden] of those rows, brought to a root mean square of 1, times weight."""
    pieces = -(-len(rows) // _ROWS)
    piece = take(board, phase, pieces)
    while piece >= 0:
        for i in range(piece * _ROWS, min(len(rows), (piece + 1) * _ROWS)):
            row = x[rows[i]]
            factor = _one_over_rms(row, eps)
            for j in range(len(row)):
                out[i, j] = narrow(row[j] * factor * weight[j], out)
        finish(board, phase, pieces)
        piece = take(board, phase, pieces)
    return phase + 1


@kernel
def _turn(head: Any, norm: Any, eps: float, cosines: Any, sines: Any) -> None:
    """Norm of a head's query or key, where it has one, and its rotation by the token's place (RoPE), in place."""
    if len(norm):
        factor = _one_over_rms(head, eps)
        for i in range(len(head)):
            head[i] = head[i] * factor * norm[i]
    half = len(cosines)
    for i in range(half):
        left, right = head[i], head[half + i]
        head[i] = left * cosines[i] - right * sines[i]
        head[half + i] = right * cosines[i] + left * sines[i]


@kernel
def _place(
    board: Any, phase: int, layer: int, pages: Any, slices: Any, sizes: Any, inputs: Any, weights: Any, mixed: Any,
    query: Any,
) -> int:  # fmt: skip
    """Turns queries and keys, and puts keys and values into the cache."""
    pieces = -(-len(mixed) // _ROWS)
    width = pages.key_dim
    piece = take(board, phase, pieces)
    while piece >= 0:
        for row in range(piece * _ROWS, min(len(mixed), (piece + 1) * _ROWS)):
            place = inputs.positions[row]
            cosines, sines = inputs.cosines[place], inputs.sines[place]
            if len(weights.bias):
                for i in range(mixed.shape[1]):
                    mixed[row, i] += weights.bias[layer, i]
            for head in range(sizes.heads + pages.heads):
                is_key = head >= sizes.heads
                norm = weights.head_norms[layer, 1 if is_key else 0] if len(weights.head_norms) else weights.nothing
                _turn(mixed[row, head * width : (head + 1) * width], norm, sizes.eps, cosines, sines)
            for i in range(sizes.heads * width):
                query[row, i] = narrow(mixed[row, i], query)
            for head in range(pages.heads):
                left = (sizes.heads + head) * width
                right = (sizes.heads + pages.heads + head) * width
                store(
                    pages, layer, slices.slots[row], head, mixed[row, left : left + width],
                    mixed[row, right : right + width], slices.lasts[row],
                )  # fmt: skip
        finish(board, phase, pieces)
        piece = take(board, phase, pieces)
    return phase + 1


@kernel
def _factors(weights: Any, layer: int) -> Any:
    """Factors for the columns of a layer's four matrices; nothing for those that are not quantized."""
    scales, columns = weights.scales, weights.columns[layer]
    if len(scales) == 0:
        return scales, scales, scales, scales
    return scales[columns[0] :], scales[columns[1] :], scales[columns[2] :], scales[columns[3] :]


@kernel
def _find_likeliest(board: Any, phase: int, outputs: Any) -> None:
    pieces = len(outputs.tokens)
    piece = take(board, phase, pieces)
    while piece >= 0:
        outputs.tokens[piece], outputs.largest[piece] = find_largest(outputs.logits[piece, : outputs.vocabulary])
        finish(board, phase, pieces)
        piece = take(board, phase, pieces)


@entry
def step(
    board: Any, thread: int, weights: Weights, sizes: Sizes, pages: Pages, slices: Slices, inputs: Inputs,
    buffers: Buffers, tiles: Tiles, work: Workspace, outputs: Outputs,
) -> None:  # fmt: skip
    """Computes what is wanted of a step; its keys and values are in the cache then.

    Called in every thread of a team: each phase returns when all of its pieces are done.
    """
    x, nothing = buffers.stream, weights.nothing
    phase = _embed(board, 0, weights, inputs.ids, x)
    for layer in range(len(weights.starts)):
        starts = weights.starts[layer]
        mixing, output, gated, down = _factors(weights, layer)
        rule = Rule(sizes.scale, sizes.windows[layer], 0.0, nothing)
        phase = _norm(board, phase, x, inputs.every, weights.norms[layer, 0], sizes.eps, buffers.input)
        phase = multiply(
            board, phase, thread, buffers.input, weights.matrices, starts[0], mixing, buffers.mixed, 0, tiles
        )
        phase = _place(board, phase, layer, pages, slices, sizes, inputs, weights, buffers.mixed, buffers.query)
        phase = attend(board, phase, thread, pages, layer, slices, rule, buffers.query, buffers.attended, work)
        phase = multiply(board, phase, thread, buffers.attended, weights.matrices, starts[1], output, x, 1, tiles)
        phase = _norm(board, phase, x, inputs.every, weights.norms[layer, 1], sizes.eps, buffers.input)
        phase = multiply_gated(
            board, phase, thread, buffers.input, weights.matrices, starts[2], gated, buffers.inner, tiles
        )
        phase = multiply(board, phase, thread, buffers.inner, weights.matrices, starts[3], down, x, 1, tiles)
    if len(inputs.rows) == 0:  # chunks of prompts only; a phase has one piece at least
        return
    chosen = buffers.input[: len(inputs.rows)]
    phase = _norm(board, phase, x, inputs.rows, weights.last_norm, sizes.eps, chosen)
    factors = weights.scales[weights.columns[-1, 0] :] if len(weights.scales) else nothing
    phase = multiply(board, phase, thread, chosen, weights.matrices, weights.head, factors, outputs.logits, 0, tiles)
    _find_likeliest(board, phase, outputs)
