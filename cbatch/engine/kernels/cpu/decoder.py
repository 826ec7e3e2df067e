"""One step of a decoder of the Llama family, from token ids to logits, in one call."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch.engine.kernels.cpu.argmax import argmax
from cbatch.engine.kernels.cpu.attention import attend, store_kv
from cbatch.engine.kernels.cpu.fast_math import from_float32, to_float32
from cbatch.engine.kernels.cpu.jit import entry, kernel
from cbatch.engine.kernels.cpu.linear import LinearWorkspace, gated_matmul, matmul
from cbatch.engine.kernels.cpu.microkernel import COLUMNS
from cbatch.engine.kernels.cpu.paged_kv import AttentionParams, AttentionPlan, AttentionWorkspace, PagedKV
from cbatch.engine.kernels.cpu.work_queue import claim, complete

_ROWS_PER_TASK = 8
"""Rows in a piece of what is done row by row."""


class Weights(NamedTuple):
    """A model's weights, for all layers side by side.

    matrices:  every linear, packed (see `linear.pack`), one after the other
    starts:    [layers, 4] where those of a layer begin: queries with keys and values, output, gate with up, down
    lm_head:  where that of the logits begins
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
    offsets: NDArray[np.int64]
    lm_head: int
    scales: NDArray[np.float32]
    scale_offsets: NDArray[np.int64]
    qkv_bias: NDArray[np.float32]
    norms: NDArray[np.float32]
    final_norm: NDArray[np.float32]
    qk_norms: NDArray[np.float32]
    embedding: NDArray[Any]
    empty: NDArray[np.float32]


class DecoderParams(NamedTuple):
    """heads: of queries; eps: of all norms; windows: [layers], 0 for none; scale: of the scores."""

    heads: int
    eps: float
    scale: float
    windows: NDArray[np.int64]


class StepInputs(NamedTuple):
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


class Activations(NamedTuple):
    """Room for T tokens of a step, used by every layer again.

    stream:  [T, hidden] float32, the residual stream
    input:   [T, hidden] what goes into a linear; `attended` [T, heads * head_dim] and `intermediate` [T, ...] likewise
    mixed:   [T, ...] float32, queries, keys and values
    query:   [T, heads * head_dim]
    """

    residual: NDArray[np.float32]
    linear_input: NDArray[Any]
    qkv: NDArray[np.float32]
    query: NDArray[Any]
    attended: NDArray[Any]
    intermediate: NDArray[Any]


class StepOutputs(NamedTuple):
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
def _embed(queue: Any, phase: int, weights: Any, ids: Any, out: Any) -> int:
    num_tasks = -(-len(ids) // _ROWS_PER_TASK)
    hidden = out.shape[1]
    pair = 1 if weights.matrices.itemsize == 4 else 2
    task = claim(queue, phase, num_tasks)
    while task >= 0:
        for row in range(task * _ROWS_PER_TASK, min(len(ids), (task + 1) * _ROWS_PER_TASK)):
            if len(weights.embedding):
                for i in range(hidden):
                    out[row, i] = to_float32(weights.embedding[ids[row], i])
            else:
                group, column = ids[row] // COLUMNS, ids[row] % COLUMNS
                base = weights.lm_head + group * hidden * COLUMNS + column * pair
                factor = np.float32(1)
                if len(weights.scales):
                    factor = weights.scales[weights.scale_offsets[-1, 0] + ids[row]]
                for i in range(hidden):
                    out[row, i] = factor * to_float32(weights.matrices[base + i // pair * COLUMNS * pair + i % pair])
        complete(queue, phase, num_tasks)
        task = claim(queue, phase, num_tasks)
    return phase + 1


@kernel
def _inverse_rms(x: Any, eps: float) -> Any:
    """What brings x to a root mean square of 1 (RMSNorm, Zhang and Sennrich, 2019)."""
    squares = np.float32(0)
    for i in range(len(x)):
        squares += x[i] * x[i]
    return np.float32(1) / np.sqrt(squares / np.float32(len(x)) + np.float32(eps))


@kernel
def _rms_norm(queue: Any, phase: int, x: Any, rows: Any, weight: Any, eps: float, out: Any) -> int:
    """out [R, hidden] = x [T, hidden] of those rows, brought to a root mean square of 1, times weight."""
    num_tasks = -(-len(rows) // _ROWS_PER_TASK)
    task = claim(queue, phase, num_tasks)
    while task >= 0:
        for i in range(task * _ROWS_PER_TASK, min(len(rows), (task + 1) * _ROWS_PER_TASK)):
            row = x[rows[i]]
            factor = _inverse_rms(row, eps)
            for j in range(len(row)):
                out[i, j] = from_float32(row[j] * factor * weight[j], out)
        complete(queue, phase, num_tasks)
        task = claim(queue, phase, num_tasks)
    return phase + 1


@kernel
def _norm_and_rope(head: Any, norm: Any, eps: float, cosines: Any, sines: Any) -> None:
    """Norm of a head's query or key, where it has one, and its rotation by the token's place (RoPE), in place."""
    if len(norm):
        factor = _inverse_rms(head, eps)
        for i in range(len(head)):
            head[i] = head[i] * factor * norm[i]
    half = len(cosines)
    for i in range(half):
        left, right = head[i], head[half + i]
        head[i] = left * cosines[i] - right * sines[i]
        head[half + i] = right * cosines[i] + left * sines[i]


@kernel
def _rope_and_store_kv(
    queue: Any, phase: int, layer: int, kv: Any, plan: Any, params: Any, inputs: Any, weights: Any, qkv: Any,
    query: Any,
) -> int:  # fmt: skip
    """Turns queries and keys, and puts keys and values into the cache."""
    num_tasks = -(-len(qkv) // _ROWS_PER_TASK)
    width = kv.key_dim
    task = claim(queue, phase, num_tasks)
    while task >= 0:
        for row in range(task * _ROWS_PER_TASK, min(len(qkv), (task + 1) * _ROWS_PER_TASK)):
            place = inputs.positions[row]
            cosines, sines = inputs.cosines[place], inputs.sines[place]
            if len(weights.qkv_bias):
                for i in range(qkv.shape[1]):
                    qkv[row, i] += weights.qkv_bias[layer, i]
            for head in range(params.heads + kv.heads):
                is_key = head >= params.heads
                norm = weights.qk_norms[layer, 1 if is_key else 0] if len(weights.qk_norms) else weights.empty
                _norm_and_rope(qkv[row, head * width : (head + 1) * width], norm, params.eps, cosines, sines)
            for i in range(params.heads * width):
                query[row, i] = from_float32(qkv[row, i], query)
            for head in range(kv.heads):
                left = (params.heads + head) * width
                right = (params.heads + kv.heads + head) * width
                store_kv(
                    kv, layer, plan.slots[row], head, qkv[row, left : left + width],
                    qkv[row, right : right + width], plan.is_last[row],
                )  # fmt: skip
        complete(queue, phase, num_tasks)
        task = claim(queue, phase, num_tasks)
    return phase + 1


@kernel
def _layer_scales(weights: Any, layer: int) -> Any:
    """Factors for the columns of a layer's four matrices; nothing for those that are not quantized."""
    scales, scale_offsets = weights.scales, weights.scale_offsets[layer]
    if len(scales) == 0:
        return scales, scales, scales, scales
    return (
        scales[scale_offsets[0] :],
        scales[scale_offsets[1] :],
        scales[scale_offsets[2] :],
        scales[scale_offsets[3] :],
    )


@kernel
def _argmax_rows(queue: Any, phase: int, outputs: Any) -> None:
    num_tasks = len(outputs.tokens)
    task = claim(queue, phase, num_tasks)
    while task >= 0:
        outputs.tokens[task], outputs.largest[task] = argmax(outputs.logits[task, : outputs.vocabulary])
        complete(queue, phase, num_tasks)
        task = claim(queue, phase, num_tasks)


@entry
def decoder_step(
    queue: Any,
    thread: int,
    weights: Weights,
    params: DecoderParams,
    kv: PagedKV,
    plan: AttentionPlan,
    inputs: StepInputs,
    activations: Activations,
    linear_workspace: LinearWorkspace,
    attention_workspace: AttentionWorkspace,
    outputs: StepOutputs,
) -> None:
    """Computes what is wanted of a step; its keys and values are in the cache then.

    Called in every thread of a team: each phase returns when all of its pieces are done.
    """
    x, empty = activations.residual, weights.empty
    phase = _embed(queue, 0, weights, inputs.ids, x)
    for layer in range(len(weights.offsets)):
        offsets = weights.offsets[layer]
        mixing, output, gated, down = _layer_scales(weights, layer)
        attention = AttentionParams(params.scale, params.windows[layer], 0.0, empty)
        phase = _rms_norm(queue, phase, x, inputs.every, weights.norms[layer, 0], params.eps, activations.linear_input)
        phase = matmul(
            queue,
            phase,
            thread,
            activations.linear_input,
            weights.matrices,
            offsets[0],
            mixing,
            activations.qkv,
            0,
            linear_workspace,
        )
        phase = _rope_and_store_kv(
            queue, phase, layer, kv, plan, params, inputs, weights, activations.qkv, activations.query
        )
        phase = attend(
            queue,
            phase,
            thread,
            kv,
            layer,
            plan,
            attention,
            activations.query,
            activations.attended,
            attention_workspace,
        )
        phase = matmul(
            queue, phase, thread, activations.attended, weights.matrices, offsets[1], output, x, 1, linear_workspace
        )
        phase = _rms_norm(queue, phase, x, inputs.every, weights.norms[layer, 1], params.eps, activations.linear_input)
        phase = gated_matmul(
            queue,
            phase,
            thread,
            activations.linear_input,
            weights.matrices,
            offsets[2],
            gated,
            activations.intermediate,
            linear_workspace,
        )
        phase = matmul(
            queue, phase, thread, activations.intermediate, weights.matrices, offsets[3], down, x, 1, linear_workspace
        )
    if len(inputs.rows) == 0:  # chunks of prompts only; a phase has one piece at least
        return
    chosen = activations.linear_input[: len(inputs.rows)]
    phase = _rms_norm(queue, phase, x, inputs.rows, weights.final_norm, params.eps, chosen)
    factors = weights.scales[weights.scale_offsets[-1, 0] :] if len(weights.scales) else empty
    phase = matmul(
        queue, phase, thread, chosen, weights.matrices, weights.lm_head, factors, outputs.logits, 0, linear_workspace
    )
    _argmax_rows(queue, phase, outputs)
