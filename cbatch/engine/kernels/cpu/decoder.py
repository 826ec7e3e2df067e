"""One step of a decoder of the Llama family, from token ids to logits, in one call."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch.engine.kernels.cpu.argmax import argmax
from cbatch.engine.kernels.cpu.attention import attend, store_kv
from cbatch.engine.kernels.cpu.fast_math import from_float32, to_float32
from cbatch.engine.kernels.cpu.jit import entry, kernel
from cbatch.engine.kernels.cpu.linear import ADD, GATED, WRITE, LinearWorkspace, PackedMatrix, matmul
from cbatch.engine.kernels.cpu.microkernel import COLUMNS
from cbatch.engine.kernels.cpu.paged_kv import (
    AttentionParams,
    AttentionPlan,
    AttentionWorkspace,
    PagedKV,
    kv_of_layer,
)
from cbatch.engine.kernels.cpu.work_queue import Worker, claim, next_task

_ROWS_PER_TASK = 8
"""Rows of a task, for what is done row by row."""


class Weights(NamedTuple):
    """A model's weights, those of all layers side by side.

    matrices:      every linear, packed (see `linear.pack_weight`) one after the other
    starts:        [layers, 4] where those of a layer begin: qkv, output, gate with up, down
    lm_head:       where the matrix of the logits begins
    scales:        flat float32, a factor for each column of each matrix; empty if the matrices are not quantized
    scale_starts:  [layers + 1, 4] where the factors of each matrix begin; those of the logits in the last row
    qkv_bias:      [layers, columns]; no layers if there is none
    norms:         [layers, 2, hidden] float32, before attention and before the feed-forward part
    final_norm:    [hidden]
    qk_norms:      [layers, 2, head_dim] of queries and of keys; no layers if there are none
    embedding:     [vocabulary, hidden]; empty if it is tied to the matrix of the logits
    """

    matrices: NDArray[Any]
    starts: NDArray[np.int64]
    lm_head: int
    scales: NDArray[np.float32]
    scale_starts: NDArray[np.int64]
    qkv_bias: NDArray[np.float32]
    norms: NDArray[np.float32]
    final_norm: NDArray[np.float32]
    qk_norms: NDArray[np.float32]
    embedding: NDArray[Any]


class DecoderParams(NamedTuple):
    """heads: query heads; eps: of all norms; scale: of the scores; windows: [layers], 0 for none."""

    heads: int
    eps: float
    scale: float
    windows: NDArray[np.int64]


class StepInputs(NamedTuple):
    """What changes from step to step.

    ids:            [T] token ids
    positions:      [T] position of each token in its sequence
    cosines, sines: [positions, rotary_dim / 2] float32, of every position up to the largest
    every:          [T] 0 to T - 1
    rows:           [R] rows whose logits are wanted
    """

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    cosines: NDArray[np.float32]
    sines: NDArray[np.float32]
    every: NDArray[np.int64]
    rows: NDArray[np.int64]


class Activations(NamedTuple):
    """The activations of T tokens, which every layer uses again.

    residual:      [T, hidden] float32
    linear_input:  [T, hidden] what goes into a linear, as do `attended` and `intermediate`
    qkv:           [T, columns] float32
    query:         [T, heads * head_dim]
    attended:      [T, heads * head_dim]
    intermediate:  [T, intermediate size] of the feed-forward part
    """

    residual: NDArray[np.float32]
    linear_input: NDArray[Any]
    qkv: NDArray[np.float32]
    query: NDArray[Any]
    attended: NDArray[Any]
    intermediate: NDArray[Any]


class Buffers(NamedTuple):
    """Memory that one step leaves to the next."""

    activations: Activations
    linear: LinearWorkspace
    attention: AttentionWorkspace


class StepOutputs(NamedTuple):
    """What a step gives for R rows.

    logits:  [R, columns] float32, of which the first `vocabulary` count
    tokens:  [R] int64, the first of the tokens with the largest logit
    largest: [R] float32, its logit; NaN if any logit of the row is NaN
    """

    logits: NDArray[np.float32]
    vocabulary: int
    tokens: NDArray[np.int64]
    largest: NDArray[np.float32]


class _Layer(NamedTuple):
    """The weights of one layer. Biases and norms that a model does not have are empty."""

    qkv: PackedMatrix
    output: PackedMatrix
    gate_up: PackedMatrix
    down: PackedMatrix
    qkv_bias: NDArray[np.float32]
    query_norm: NDArray[np.float32]
    key_norm: NDArray[np.float32]


@kernel
def _matrix(weights: Weights, start: int, scale_start: int) -> PackedMatrix:
    return PackedMatrix(weights.matrices, start, weights.scales[scale_start if len(weights.scales) else 0 :])


@kernel
def _layer(weights: Weights, layer: int) -> _Layer:
    starts, scales, empty = weights.starts[layer], weights.scale_starts[layer], weights.final_norm[:0]
    return _Layer(
        _matrix(weights, starts[0], scales[0]),
        _matrix(weights, starts[1], scales[1]),
        _matrix(weights, starts[2], scales[2]),
        _matrix(weights, starts[3], scales[3]),
        weights.qkv_bias[layer] if len(weights.qkv_bias) else empty,
        weights.qk_norms[layer, 0] if len(weights.qk_norms) else empty,
        weights.qk_norms[layer, 1] if len(weights.qk_norms) else empty,
    )


@kernel
def _embed(worker: Worker, phase: int, weights: Weights, ids: Any, out: Any) -> int:
    num_tasks = -(-len(ids) // _ROWS_PER_TASK)
    hidden = out.shape[1]
    pair = 1 if weights.matrices.itemsize == 4 else 2
    task = claim(worker, phase, num_tasks)
    while task >= 0:
        for row in range(task * _ROWS_PER_TASK, min(len(ids), (task + 1) * _ROWS_PER_TASK)):
            if len(weights.embedding):
                for i in range(hidden):
                    out[row, i] = to_float32(weights.embedding[ids[row], i])
            else:
                tile, column = ids[row] // COLUMNS, ids[row] % COLUMNS
                base = weights.lm_head + tile * hidden * COLUMNS + column * pair
                factor = np.float32(1)
                if len(weights.scales):
                    factor = weights.scales[weights.scale_starts[-1, 0] + ids[row]]
                for i in range(hidden):
                    out[row, i] = factor * to_float32(weights.matrices[base + i // pair * COLUMNS * pair + i % pair])
        task = next_task(worker, phase, num_tasks)
    return phase + 1


@kernel
def _inverse_rms(x: Any, eps: float) -> Any:
    """What scales x to a root mean square of 1 (RMSNorm, Zhang and Sennrich, 2019)."""
    squares = np.float32(0)
    for i in range(len(x)):
        squares += x[i] * x[i]
    return np.float32(1) / np.sqrt(squares / np.float32(len(x)) + np.float32(eps))


@kernel
def _rms_norm(worker: Worker, phase: int, x: Any, rows: Any, weight: Any, eps: float, out: Any) -> int:
    """out [R, hidden] = RMSNorm of those rows of x [T, hidden]."""
    num_tasks = -(-len(rows) // _ROWS_PER_TASK)
    task = claim(worker, phase, num_tasks)
    while task >= 0:
        for i in range(task * _ROWS_PER_TASK, min(len(rows), (task + 1) * _ROWS_PER_TASK)):
            row = x[rows[i]]
            factor = _inverse_rms(row, eps)
            for j in range(len(row)):
                out[i, j] = from_float32(row[j] * factor * weight[j], out)
        task = next_task(worker, phase, num_tasks)
    return phase + 1


@kernel
def _norm_and_rope(head: Any, norm: Any, eps: float, cosines: Any, sines: Any) -> None:
    """Norms the query or key of a head, if it has a norm, and rotates it by its position (RoPE), in place."""
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
    worker: Worker, phase: int, kv: PagedKV, plan: AttentionPlan, params: DecoderParams, inputs: StepInputs,
    layer: _Layer, activations: Activations,
) -> int:  # fmt: skip
    """Rotates queries and keys, and stores keys and values in the cache."""
    qkv, query = activations.qkv, activations.query
    num_tasks = -(-len(qkv) // _ROWS_PER_TASK)
    width = kv.key_dim
    task = claim(worker, phase, num_tasks)
    while task >= 0:
        for row in range(task * _ROWS_PER_TASK, min(len(qkv), (task + 1) * _ROWS_PER_TASK)):
            position = inputs.positions[row]
            cosines, sines = inputs.cosines[position], inputs.sines[position]
            if len(layer.qkv_bias):
                for i in range(qkv.shape[1]):
                    qkv[row, i] += layer.qkv_bias[i]
            for head in range(params.heads + kv.heads):
                norm = layer.key_norm if head >= params.heads else layer.query_norm
                _norm_and_rope(qkv[row, head * width : (head + 1) * width], norm, params.eps, cosines, sines)
            for i in range(params.heads * width):
                query[row, i] = from_float32(qkv[row, i], query)
            for head in range(kv.heads):
                left = (params.heads + head) * width
                right = (params.heads + kv.heads + head) * width
                key, value = qkv[row, left : left + width], qkv[row, right : right + width]
                store_kv(kv, plan.slots[row], head, key, value, plan.is_last[row])
        task = next_task(worker, phase, num_tasks)
    return phase + 1


@kernel
def _argmax_rows(worker: Worker, phase: int, outputs: StepOutputs) -> None:
    num_tasks = len(outputs.tokens)
    task = claim(worker, phase, num_tasks)
    while task >= 0:
        outputs.tokens[task], outputs.largest[task] = argmax(outputs.logits[task, : outputs.vocabulary])
        task = next_task(worker, phase, num_tasks)


@entry
def decoder_step(
    worker: Worker, weights: Weights, params: DecoderParams, kv: PagedKV, plan: AttentionPlan, inputs: StepInputs,
    buffers: Buffers, outputs: StepOutputs,
) -> None:  # fmt: skip
    """Computes the outputs of a step, and stores its keys and values in the cache.

    Every thread of a pool calls it. Each phase returns when all of its tasks are complete.
    """
    activations, x = buffers.activations, buffers.activations.residual
    phase = _embed(worker, 0, weights, inputs.ids, x)
    for index in range(len(weights.starts)):
        layer, layer_kv, norms = _layer(weights, index), kv_of_layer(kv, index), weights.norms[index]
        attention = AttentionParams(params.scale, params.windows[index], 0.0, weights.final_norm[:0])
        phase = _rms_norm(worker, phase, x, inputs.every, norms[0], params.eps, activations.linear_input)
        phase = matmul(worker, phase, activations.linear_input, layer.qkv, activations.qkv, WRITE, buffers.linear)
        phase = _rope_and_store_kv(worker, phase, layer_kv, plan, params, inputs, layer, activations)
        phase = attend(
            worker, phase, layer_kv, plan, attention, activations.query, activations.attended, buffers.attention
        )
        phase = matmul(worker, phase, activations.attended, layer.output, x, ADD, buffers.linear)
        phase = _rms_norm(worker, phase, x, inputs.every, norms[1], params.eps, activations.linear_input)
        phase = matmul(
            worker, phase, activations.linear_input, layer.gate_up, activations.intermediate, GATED, buffers.linear
        )
        phase = matmul(worker, phase, activations.intermediate, layer.down, x, ADD, buffers.linear)
    if len(inputs.rows) == 0:  # chunks of prompts only; a phase must have a task
        return
    chosen = activations.linear_input[: len(inputs.rows)]
    phase = _rms_norm(worker, phase, x, inputs.rows, weights.final_norm, params.eps, chosen)
    lm_head = _matrix(weights, weights.lm_head, weights.scale_starts[-1, 0])
    phase = matmul(worker, phase, chosen, lm_head, outputs.logits, WRITE, buffers.linear)
    _argmax_rows(worker, phase, outputs)
