"""Runs the program of a model: one step, from token ids to logits, in one call.

A program is an array of instructions (see `INSTRUCTION`). Each is one phase of the step or several, whose tasks the
threads share (see `work_queue`). Buffers of float32, and of the type that goes into products, lie in two arenas.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import typeof, types
from numpy.typing import NDArray

from cbatch.kernels.cpu.activation import ActivationParams
from cbatch.kernels.cpu.argmax import argmax
from cbatch.kernels.cpu.attention import attend
from cbatch.kernels.cpu.fast_math import exp, from_float32, tanh, to_float32
from cbatch.kernels.cpu.jit import Part, call_address, entry, inlined, kernel
from cbatch.kernels.cpu.kv_store import store_kv
from cbatch.kernels.cpu.matmul.experts import (
    ExpertMatrix,
    RouterParams,
    Routing,
    combine_rows,
    expert_matmul,
    gather_rows,
    route,
)
from cbatch.kernels.cpu.matmul.formats import unpack_column
from cbatch.kernels.cpu.matmul.linear import ADD, WRITE, LinearWorkspace, PackedMatrix, matmul
from cbatch.kernels.cpu.matmul.lora import LoraStep, activate_product, add_adapters
from cbatch.kernels.cpu.norm import RMS_NORM, NormParams, inverse_rms, normalize
from cbatch.kernels.cpu.paged_kv import (
    AttentionParams,
    AttentionPlan,
    AttentionWorkspace,
    PagedCaches,
    PagedKV,
    kv_of_layer,
)
from cbatch.kernels.cpu.recurrent.convolution import ConvolutionParams, convolve
from cbatch.kernels.cpu.recurrent.delta_rule import DeltaParams, gated_delta
from cbatch.kernels.cpu.recurrent.gated_norm import gated_norm
from cbatch.kernels.cpu.recurrent.selective_scan import ScanParams, selective_scan
from cbatch.kernels.cpu.recurrent.states import Recurrence, with_memory
from cbatch.kernels.cpu.work_queue import Worker, claim, new_work_queue, next_task

EMBED, NORMALIZE, LINEAR, PREPARE_HEADS, ATTEND, GATE, GATHER, SCALE, HEAD = range(9)
ROUTE, GATHER_FOR_EXPERTS, EXPERT_LINEAR, COMBINE_EXPERTS = range(9, 13)
CONVOLVE, GATED_DELTA, SELECTIVE_SCAN, GATED_NORM = range(13, 17)
ADD_ADAPTERS, ACTIVATE = range(17, 19)

IDENTITY, SIGMOID, SOFTPLUS = range(3)
"""Functions of a gate."""

ROWS_PER_TASK = 8
"""Rows of a task, for what is done row by row."""

_INTS = (
    "code", "source", "source_width", "target", "target_width", "start", "width", "add", "mode", "function",
    "matrix", "format", "scale", "bias", "params", "norm_kind", "norm_weight", "norm_bias", "table", "positions",
    "position_offset", "is_packed", "cache", "stores", "heads", "rotary", "query_norm_kind", "query_norm_weight",
    "query_norm_bias", "key_norm_kind", "key_norm_weight", "key_norm_bias", "value_norm_kind", "value_norm_weight",
    "value_norm_bias", "norm_rows", "norm_last", "window", "chunk", "sinks", "index",
    "top_k", "num_experts", "scores", "choice_bias", "expert_scales", "groups", "top_groups", "group_score",
    "normalize", "weigh_input", "stride", "columns", "scale_stride", "other", "other_width", "state", "kernel",
    "input_gate", "output_gate", "is_element", "key_heads", "key_dim", "value_dim", "gate_first",
)  # fmt: skip
_FLOATS = (
    "factor",
    "eps",
    "query_eps",
    "key_eps",
    "value_eps",
    "clip",
    "attention_scale",
    "softcap",
    "epsilon",
    "least_sum",
    "step_min",
    "step_max",
)
INSTRUCTION = np.dtype([*((name, np.int64) for name in _INTS), *((name, np.float32) for name in _FLOATS)])
"""One instruction. What an operation does not use is 0, or -1 if it is a place.

code:          which operation (see `models/programs/program.py`); or one of the two that follow a linear to which
               adapters add: ADD_ADAPTERS, with its number among those and the first of its tiles in `index` and
               `columns` (see `LoraStep`), and ACTIVATE
source, target: where a buffer begins in its arena, in columns of the step; with its width
matrix, scale, bias: where they begin among all, the matrix in bytes; -1 for none
format:        how the matrix is packed (see `matmul/formats.py`)
norm_*, query_norm_*, ...: see `NormParams`; the weight and bias are places among the vectors
add:           1: to what a target of float32 holds; 2: a norm replaces what it holds
params:        place of an activation's parameters among the vectors
sinks:         likewise
table, positions: where an embedding begins among the tables; the first is a packed matrix if `is_packed`
rotary:        number of the rotary tables
index:         place of column numbers among the indices
stride, columns: how far apart the matrices of experts are, in bytes, and their factors and biases
other:         where a second buffer begins: memory for the sums of a convolution, what controls a recurrence, or a gate
is_element:    whether what a convolution gives goes into a product
heads, key_dim, value_dim: also of a recurrence; of a scan, state_size and head_dim
"""


class Weights(NamedTuple):
    """A model's weights.

    matrices: every linear, packed (see `matmul/formats.py`) one after the other
    scales:   float32, a factor for each column of some matrices
    vectors:  float32: norms, biases, parameters of activations
    tables:   embeddings, row by row
    indices:  int64 column numbers
    """

    matrices: NDArray[np.uint8]
    scales: NDArray[np.float32]
    vectors: NDArray[np.float32]
    tables: NDArray[Any]
    indices: NDArray[np.int64]


class StepInputs(NamedTuple):
    """What changes from step to step.

    ids:           [T] token ids
    positions:     [T] position of each token in its sequence
    rotary:        float32, of each rotary setting a row for every position up to the largest: cosines and sines
                   [rotary_dim / 2] each, and the factor of the query
    rotary_layout: [settings, 2] int64, where the rows of each begin, and rotary_dim / 2
    every:         [T] 0 to T - 1
    rows:          [R] rows whose logits are wanted
    """

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    rotary: NDArray[np.float32]
    rotary_layout: NDArray[np.int64]
    every: NDArray[np.int64]
    rows: NDArray[np.int64]


class Arenas(NamedTuple):
    """Memory of all buffers, which one step leaves to the next. elements: of the type that goes into products."""

    floats: NDArray[np.float32]
    elements: NDArray[Any]


class RoutingMemory(NamedTuple):
    """Memory for the routing of a step.

    numbers: int64 (see `Routing`)
    weights: [T * top_k] float32
    scratch: [threads, hidden + 2 * experts] float32
    """

    numbers: NDArray[np.int64]
    weights: NDArray[np.float32]
    scratch: NDArray[np.float32]


class Buffers(NamedTuple):
    """All memory that one step leaves to the next."""

    arenas: Arenas
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


@inlined
def buffer_of(arena: Any, start: int, width: int, tokens: int) -> Any:
    """The buffer [T, width] of an arena."""
    return arena[start * tokens : (start + width) * tokens].reshape(tokens, width)


@kernel
def matrix_of(weights: Weights, op: Any) -> PackedMatrix:
    nothing = weights.vectors[:0]
    return PackedMatrix(
        weights.matrices,
        op.matrix,
        op.format,
        weights.scales[op.scale :] if op.scale >= 0 else nothing,
        weights.vectors[op.bias :] if op.bias >= 0 else nothing,
    )


@kernel
def activation_of(weights: Weights, op: Any) -> ActivationParams:
    return ActivationParams(op.function, weights.vectors[op.params : op.params + 4])


@inlined
def vector_of(weights: Weights, start: int, size: int) -> Any:
    """So many numbers of the vectors; none if `start` is negative."""
    return weights.vectors[start : start + size] if start >= 0 else weights.vectors[:0]


@kernel
def _embed(worker: Worker, phase: int, op: Any, weights: Weights, inputs: StepInputs, arenas: Arenas) -> int:
    ids = inputs.ids
    out = buffer_of(arenas.floats, op.target, op.target_width, len(ids))
    num_tasks = -(-len(ids) // ROWS_PER_TASK)
    hidden = out.shape[1]
    task = claim(worker, phase, num_tasks)
    while task >= 0:
        for row in range(task * ROWS_PER_TASK, min(len(ids), (task + 1) * ROWS_PER_TASK)):
            factor = op.factor
            if op.is_packed:
                if op.scale >= 0:
                    factor = factor * weights.scales[op.scale + ids[row]]
                unpack_column(weights.matrices, op.matrix, op.format, ids[row], factor, out[row])
            else:
                base = op.table + ids[row] * op.width
                for i in range(op.width):
                    out[row, i] = factor * to_float32(weights.tables[base + i])
                for i in range(op.width, hidden):
                    out[row, i] = np.float32(0)
            if op.positions >= 0:
                base = op.positions + (inputs.positions[row] + op.position_offset) * op.width
                for i in range(op.width):
                    out[row, i] += to_float32(weights.tables[base + i])
        task = next_task(worker, phase, num_tasks)
    return phase + 1


@kernel
def _norm_of(weights: Weights, op: Any, size: int) -> NormParams:
    return NormParams(
        op.norm_kind, op.eps, vector_of(weights, op.norm_weight, size), vector_of(weights, op.norm_bias, size)
    )


@kernel
def _clear(out: Any) -> None:
    """Padding, which is multiplied with zeros."""
    for i in range(len(out)):
        out[i] = 0


@kernel
def _rms_norm_rows(worker: Worker, phase: int, x: Any, rows: Any, weight: Any, eps: float, out: Any) -> int:
    """out [R, width] = RMSNorm of those rows of x [T, width]. What most models need, as simple as it can be."""
    num_tasks = -(-len(rows) // ROWS_PER_TASK)
    task = claim(worker, phase, num_tasks)
    while task >= 0:
        for i in range(task * ROWS_PER_TASK, min(len(rows), (task + 1) * ROWS_PER_TASK)):
            row = x[rows[i]]
            factor = inverse_rms(row, eps)
            for j in range(len(row)):
                out[i, j] = from_float32(row[j] * factor * weight[j], out)
        task = next_task(worker, phase, num_tasks)
    return phase + 1


@kernel
def _normalize_rows(worker: Worker, phase: int, op: Any, weights: Weights, source: Any, rows: Any, out: Any) -> int:
    """out [R, width] = the norm of a part of those rows of the source [T, width]; its padding is 0."""
    norm = _norm_of(weights, op, op.width)
    if norm.kind == RMS_NORM and len(norm.weight) == source.shape[1] == out.shape[1]:
        return _rms_norm_rows(worker, phase, source, rows, norm.weight, norm.eps, out)
    num_tasks = -(-len(rows) // ROWS_PER_TASK)
    task = claim(worker, phase, num_tasks)
    while task >= 0:
        for i in range(task * ROWS_PER_TASK, min(len(rows), (task + 1) * ROWS_PER_TASK)):
            normalize(source[rows[i], op.start : op.start + op.width], norm, out[i])
            _clear(out[i, op.width :])
        task = next_task(worker, phase, num_tasks)
    return phase + 1


@kernel
def _normalize(worker: Worker, phase: int, op: Any, weights: Weights, inputs: StepInputs, arenas: Arenas) -> int:
    tokens = len(inputs.ids)
    source = buffer_of(arenas.floats, op.source, op.source_width, tokens)
    if op.add == 0:
        out = buffer_of(arenas.elements, op.target, op.target_width, tokens)
        return _normalize_rows(worker, phase, op, weights, source, inputs.every, out)
    norm, target = _norm_of(weights, op, op.width), buffer_of(arenas.floats, op.target, op.target_width, tokens)
    num_tasks = -(-tokens // ROWS_PER_TASK)
    task = claim(worker, phase, num_tasks)
    while task >= 0:
        for row in range(task * ROWS_PER_TASK, min(tokens, (task + 1) * ROWS_PER_TASK)):
            for group in range(op.groups):
                first = op.start + group * op.width
                part, sums = source[row, first : first + op.width], target[row, group * op.width :]
                normalize(part, norm, part)
                for i in range(len(part)):
                    sums[i] = op.factor * part[i] + (sums[i] if op.add == 1 else np.float32(0))
        task = next_task(worker, phase, num_tasks)
    return phase + 1


@kernel
def _linear(
    worker: Worker, phase: int, op: Any, weights: Weights, tokens: int, arenas: Arenas, workspace: LinearWorkspace
) -> int:
    source = buffer_of(arenas.elements, op.source, op.source_width, tokens)
    matrix, activation = matrix_of(weights, op), activation_of(weights, op)
    if op.mode <= ADD:
        out = buffer_of(arenas.floats, op.target, op.target_width, tokens)
        return matmul(worker, phase, source, matrix, out, op.mode, activation, workspace)
    activated = buffer_of(arenas.elements, op.target, op.target_width, tokens)
    return matmul(worker, phase, source, matrix, activated, op.mode, activation, workspace)


@kernel
def _rotate(head: Any, cosines: Any, sines: Any) -> None:
    """Rotates the first numbers of a head by its position (RoPE), in place."""
    half = len(cosines)
    for i in range(half):
        left, right = head[i], head[half + i]
        head[i] = left * cosines[i] - right * sines[i]
        head[half + i] = right * cosines[i] + left * sines[i]


@kernel
def _norm_heads(part: Any, norm: NormParams, width: int, norm_rows: int) -> None:
    """Norms heads of `width` numbers side by side, each by itself or all together, in place."""
    if norm.kind == 0:
        return
    size = len(part) if norm_rows else width
    for start in range(0, len(part), size):
        weight = norm.weight[start : start + size] if len(norm.weight) else norm.weight
        bias = norm.bias[start : start + size] if len(norm.bias) else norm.bias
        head = part[start : start + size]
        normalize(head, NormParams(norm.kind, norm.eps, weight, bias), head)


@kernel
def _prepare_heads(
    worker: Worker, phase: int, op: Any, weights: Weights, caches: PagedCaches, plan: AttentionPlan, inputs: StepInputs,
    arenas: Arenas, stored: Any,
) -> int:  # fmt: skip
    """Norms and rotates queries and keys, and stores keys and values in the cache."""
    tokens = len(inputs.ids)
    kv = kv_of_layer(caches, op.cache)
    source = buffer_of(arenas.floats, op.source, op.source_width, tokens)
    query = buffer_of(arenas.elements, op.target, op.target_width, tokens)
    width, kv_heads = kv.key_dim, kv.heads if op.stores else 0
    first_key, first_value = op.heads * width, (op.heads + kv_heads) * width
    end = first_value + kv_heads * kv.value_dim
    query_norm = NormParams(
        op.query_norm_kind, op.query_eps, vector_of(weights, op.query_norm_weight, first_key),
        vector_of(weights, op.query_norm_bias, first_key),
    )  # fmt: skip
    key_norm = NormParams(
        op.key_norm_kind, op.key_eps, vector_of(weights, op.key_norm_weight, first_value - first_key),
        vector_of(weights, op.key_norm_bias, first_value - first_key),
    )  # fmt: skip
    value_norm = NormParams(
        op.value_norm_kind, op.value_eps, vector_of(weights, op.value_norm_weight, end - first_value),
        vector_of(weights, op.value_norm_bias, end - first_value),
    )  # fmt: skip
    num_tasks = len(plan.chunks) - 1
    task = claim(worker, phase, num_tasks)
    while task >= 0:
        first, stop = plan.chunks[task], plan.chunks[task + 1]
        for number in range(first, stop):
            row = source[number]
            if op.clip > 0:
                for i in range(end):
                    row[i] = min(max(row[i], -op.clip), op.clip)
            queries, keys, values = row[:first_key], row[first_key:first_value], row[first_value:end]
            if not op.norm_last:
                _norm_heads(queries, query_norm, width, op.norm_rows)
                _norm_heads(keys, key_norm, width, op.norm_rows)
            _norm_heads(values, value_norm, kv.value_dim, op.norm_rows)
            scale = np.float32(1)
            if op.rotary >= 0:
                half = inputs.rotary_layout[op.rotary, 1]
                at = inputs.rotary_layout[op.rotary, 0] + inputs.positions[number] * (2 * half + 1)
                cosines, sines = inputs.rotary[at : at + half], inputs.rotary[at + half : at + 2 * half]
                scale = inputs.rotary[at + 2 * half]
                for head in range(op.heads + kv_heads):
                    _rotate(row[head * width : (head + 1) * width], cosines, sines)
            if op.norm_last:
                _norm_heads(queries, query_norm, width, op.norm_rows)
                _norm_heads(keys, key_norm, width, op.norm_rows)
            if scale != 1:
                for i in range(first_key):
                    queries[i] *= scale
            for i in range(first_key):
                query[number, i] = from_float32(queries[i], query)
        store_kv(kv, plan.slots, first, stop, source, first_key, source, first_value, kv_heads, stored[worker.thread])
        task = next_task(worker, phase, num_tasks)
    return phase + 1


@kernel
def _attend(
    worker: Worker, phase: int, op: Any, weights: Weights, caches: PagedCaches, plan: AttentionPlan, tokens: int,
    arenas: Arenas, workspace: AttentionWorkspace,
) -> int:  # fmt: skip
    kv: PagedKV = kv_of_layer(caches, op.cache)
    params = AttentionParams(
        op.attention_scale, op.window, op.chunk, op.softcap, vector_of(weights, op.sinks, op.heads)
    )
    query = buffer_of(arenas.elements, op.source, op.source_width, tokens)
    out = buffer_of(arenas.elements, op.target, op.target_width, tokens)
    return attend(worker, phase, kv, plan, params, query, out, workspace)


def _run_attention(
    worker: Worker, phase: int, op: Any, weights: Weights, caches: PagedCaches, plan: AttentionPlan, inputs: StepInputs,
    arenas: Arenas, workspace: AttentionWorkspace,
) -> int:  # fmt: skip
    """The instructions of attention."""
    if op.code == PREPARE_HEADS:
        return _prepare_heads(worker, phase, op, weights, caches, plan, inputs, arenas, workspace.stored)
    return _attend(worker, phase, op, weights, caches, plan, len(inputs.ids), arenas, workspace)


@kernel
def _gate(worker: Worker, phase: int, op: Any, tokens: int, arenas: Arenas) -> int:
    """Multiplies each run of `width` numbers with a function of one number of the gate."""
    gate = buffer_of(arenas.floats, op.source, op.source_width, tokens)
    target = buffer_of(arenas.elements, op.target, op.target_width, tokens)
    num_tasks = -(-tokens // ROWS_PER_TASK)
    task = claim(worker, phase, num_tasks)
    while task >= 0:
        for row in range(task * ROWS_PER_TASK, min(tokens, (task + 1) * ROWS_PER_TASK)):
            for i in range(op.columns):
                x = gate[row, op.start + i]
                if op.function == SIGMOID:
                    x = np.float32(1) / (np.float32(1) + exp(-x))
                elif op.function == SOFTPLUS:
                    x = np.log1p(exp(-abs(x))) + max(x, np.float32(0))
                for j in range(i * op.width, (i + 1) * op.width):
                    target[row, j] = from_float32(op.factor * x * to_float32(target[row, j]), target)
        task = next_task(worker, phase, num_tasks)
    return phase + 1


@kernel
def _gather(worker: Worker, phase: int, op: Any, weights: Weights, tokens: int, arenas: Arenas) -> int:
    """Copies columns of the arena: an index is the first column of a buffer, times its width, plus a column."""
    floats = arenas.floats
    target = buffer_of(floats, op.target, op.target_width, tokens)
    starts = weights.indices[op.index : op.index + op.columns]
    widths = weights.indices[op.index + op.columns : op.index + 2 * op.columns]
    places = weights.indices[op.index + 2 * op.columns : op.index + 3 * op.columns]
    num_tasks = -(-tokens // ROWS_PER_TASK)
    task = claim(worker, phase, num_tasks)
    while task >= 0:
        for row in range(task * ROWS_PER_TASK, min(tokens, (task + 1) * ROWS_PER_TASK)):
            for i in range(op.columns):
                target[row, i] = floats[starts[i] * tokens + row * widths[i] + places[i]]
        task = next_task(worker, phase, num_tasks)
    return phase + 1


@kernel
def _scale(worker: Worker, phase: int, op: Any, weights: Weights, tokens: int, arenas: Arenas) -> int:
    factor = weights.vectors[op.params]
    target = buffer_of(arenas.floats, op.target, op.target_width, tokens)
    num_tasks = -(-tokens // ROWS_PER_TASK)
    task = claim(worker, phase, num_tasks)
    while task >= 0:
        for row in range(task * ROWS_PER_TASK, min(tokens, (task + 1) * ROWS_PER_TASK)):
            for i in range(target.shape[1]):
                target[row, i] *= factor
        task = next_task(worker, phase, num_tasks)
    return phase + 1


@inlined
def routing_of(op: Any, tokens: int, memory: RoutingMemory) -> Routing:
    """The memory of the step's routing, as long as it is needed."""
    pairs, numbers = tokens * op.top_k, memory.numbers
    chosen, places = numbers[:pairs].reshape(tokens, op.top_k), numbers[pairs : 2 * pairs].reshape(tokens, op.top_k)
    rest = numbers[3 * pairs :]
    return Routing(
        chosen,
        memory.weights[:pairs].reshape(tokens, op.top_k),
        places,
        numbers[2 * pairs : 3 * pairs],
        rest[: op.num_experts + 1],
        rest[op.num_experts + 1 : 2 * op.num_experts + 2],
    )


@kernel
def _route(
    worker: Worker, phase: int, op: Any, weights: Weights, tokens: int, arenas: Arenas, memory: RoutingMemory
) -> int:
    experts = op.num_experts
    source = buffer_of(arenas.elements, op.source, op.source_width, tokens)
    router = RouterParams(
        weights.vectors[op.params : op.params + experts * op.width].reshape(experts, op.width),
        vector_of(weights, op.bias, experts), vector_of(weights, op.choice_bias, experts),
        vector_of(weights, op.expert_scales, experts), op.top_k, op.scores, op.groups, op.top_groups, op.group_score,
        op.normalize, op.epsilon, op.least_sum, op.factor,
    )  # fmt: skip
    return route(worker, phase, source, router, routing_of(op, tokens, memory), memory.scratch)


@kernel
def _gather_for_experts(worker: Worker, phase: int, op: Any, tokens: int, arenas: Arenas, memory: RoutingMemory) -> int:
    """The source of each pair of a token and an expert."""
    elements = arenas.elements
    source = buffer_of(elements, op.source, op.source_width, tokens)
    rows = buffer_of(elements, op.target, op.target_width, tokens).reshape(tokens * op.top_k, op.source_width)
    return gather_rows(worker, phase, source, routing_of(op, tokens, memory), op.weigh_input, rows)


@kernel
def _expert_linear(
    worker: Worker, phase: int, op: Any, weights: Weights, tokens: int, arenas: Arenas, memory: RoutingMemory,
    workspace: LinearWorkspace,
) -> int:  # fmt: skip
    pairs, width, columns = tokens * op.top_k, op.source_width // op.top_k, op.target_width // op.top_k
    source = buffer_of(arenas.elements, op.source, op.source_width, tokens).reshape(pairs, width)
    matrix = ExpertMatrix(matrix_of(weights, op), op.stride, op.columns)
    activation, routing = activation_of(weights, op), routing_of(op, tokens, memory)
    if op.mode == WRITE:
        out = buffer_of(arenas.floats, op.target, op.target_width, tokens).reshape(pairs, columns)
        return expert_matmul(worker, phase, source, routing, matrix, out, op.mode, activation, workspace)
    activated = buffer_of(arenas.elements, op.target, op.target_width, tokens).reshape(pairs, columns)
    return expert_matmul(worker, phase, source, routing, matrix, activated, op.mode, activation, workspace)


@kernel
def _combine_experts(worker: Worker, phase: int, op: Any, tokens: int, arenas: Arenas, memory: RoutingMemory) -> int:
    floats = arenas.floats
    rows = buffer_of(floats, op.source, op.source_width, tokens).reshape(tokens * op.top_k, op.source_width // op.top_k)
    out = buffer_of(floats, op.target, op.target_width, tokens)
    return combine_rows(worker, phase, rows, routing_of(op, tokens, memory), 1 - op.weigh_input, op.factor, op.add, out)


@kernel
def _softcap_and_argmax(worker: Worker, phase: int, op: Any, outputs: StepOutputs) -> int:
    num_tasks = len(outputs.tokens)
    task = claim(worker, phase, num_tasks)
    while task >= 0:
        row = outputs.logits[task, : outputs.vocabulary]
        if op.softcap > 0:
            for i in range(len(row)):
                row[i] = op.softcap * tanh(row[i] / op.softcap)
        outputs.tokens[task], outputs.largest[task] = argmax(row)
        task = next_task(worker, phase, num_tasks)
    return phase + 1


@kernel
def _head(
    worker: Worker, phase: int, op: Any, weights: Weights, inputs: StepInputs, arenas: Arenas,
    workspace: LinearWorkspace, outputs: StepOutputs,
) -> int:  # fmt: skip
    rows = len(inputs.rows)
    if rows == 0:  # chunks of prompts only; a phase must have a task
        return phase
    source = buffer_of(arenas.floats, op.source, op.source_width, len(inputs.ids))
    chosen = buffer_of(arenas.elements, op.target, op.target_width, len(inputs.ids))[:rows]
    phase = _normalize_rows(worker, phase, op, weights, source, inputs.rows, chosen)
    matrix, activation = matrix_of(weights, op), activation_of(weights, op)
    phase = matmul(worker, phase, chosen, matrix, outputs.logits, op.mode, activation, workspace)
    return _softcap_and_argmax(worker, phase, op, outputs)


def _mix_experts(
    worker: Worker, phase: int, op: Any, weights: Weights, tokens: int, arenas: Arenas, routing: RoutingMemory,
    workspace: LinearWorkspace,
) -> int:  # fmt: skip
    """The instructions of a mixture of experts."""
    if op.code == ROUTE:
        return _route(worker, phase, op, weights, tokens, arenas, routing)
    if op.code == GATHER_FOR_EXPERTS:
        return _gather_for_experts(worker, phase, op, tokens, arenas, routing)
    if op.code == EXPERT_LINEAR:
        return _expert_linear(worker, phase, op, weights, tokens, arenas, routing, workspace)
    return _combine_experts(worker, phase, op, tokens, arenas, routing)


@kernel
def _convolve(
    worker: Worker, phase: int, op: Any, weights: Weights, tokens: int, arenas: Arenas, recurrence: Recurrence
) -> int:
    columns = op.columns
    taps = vector_of(weights, op.params, op.kernel * columns).reshape(op.kernel, columns)
    params = ConvolutionParams(
        taps, vector_of(weights, op.bias, columns), op.function, op.start, op.input_gate, op.output_gate
    )
    source = buffer_of(arenas.floats, op.source, op.source_width, tokens)
    sums = buffer_of(arenas.floats, op.other, op.other_width, tokens)
    if op.is_element:
        out = buffer_of(arenas.elements, op.target, op.target_width, tokens)
        return convolve(worker, phase, recurrence, op.state, params, source, sums, out)
    return convolve(worker, phase, recurrence, op.state, params, source, sums, sums)


@kernel
def _gated_delta(
    worker: Worker, phase: int, op: Any, weights: Weights, tokens: int, arenas: Arenas, recurrence: Recurrence
) -> int:
    params = DeltaParams(
        op.key_heads, op.heads, op.key_dim, op.value_dim, vector_of(weights, op.params, op.heads),
        vector_of(weights, op.bias, op.heads),
    )  # fmt: skip
    source = buffer_of(arenas.floats, op.source, op.source_width, tokens)
    controls = buffer_of(arenas.floats, op.other, op.other_width, tokens)
    out = buffer_of(arenas.floats, op.target, op.target_width, tokens)
    return gated_delta(worker, phase, recurrence, op.state, params, source, controls, out)


@kernel
def _selective_scan(
    worker: Worker, phase: int, op: Any, weights: Weights, tokens: int, arenas: Arenas, recurrence: Recurrence
) -> int:
    params = ScanParams(
        op.heads, op.value_dim, op.groups, op.key_dim, vector_of(weights, op.params, op.heads),
        vector_of(weights, op.bias, op.heads), vector_of(weights, op.scale, op.heads), op.step_min, op.step_max,
    )  # fmt: skip
    source = buffer_of(arenas.floats, op.source, op.source_width, tokens)
    steps = buffer_of(arenas.floats, op.other, op.other_width, tokens)
    out = buffer_of(arenas.floats, op.target, op.target_width, tokens)
    return selective_scan(worker, phase, recurrence, op.state, params, source, steps, op.start, out)


@kernel
def _gated_norm(worker: Worker, phase: int, op: Any, weights: Weights, tokens: int, arenas: Arenas) -> int:
    source = buffer_of(arenas.floats, op.source, op.source_width, tokens)
    gates = buffer_of(arenas.floats, op.other, op.other_width, tokens)
    out = buffer_of(arenas.elements, op.target, op.target_width, tokens)
    norm = _norm_of(weights, op, op.columns)
    return gated_norm(worker, phase, source, gates, op.start, op.columns, norm, op.groups, op.gate_first, out)


@kernel
def _recur(
    worker: Worker, phase: int, op: Any, weights: Weights, tokens: int, arenas: Arenas, recurrence: Recurrence
) -> int:
    """The instructions of a recurrent layer."""
    if op.code == CONVOLVE:
        return _convolve(worker, phase, op, weights, tokens, arenas, recurrence)
    if op.code == GATED_DELTA:
        return _gated_delta(worker, phase, op, weights, tokens, arenas, recurrence)
    if op.code == SELECTIVE_SCAN:
        return _selective_scan(worker, phase, op, weights, tokens, arenas, recurrence)
    return _gated_norm(worker, phase, op, weights, tokens, arenas)


def _recur_in_float32(
    worker: Worker, phase: int, op: Any, weights: Weights, tokens: int, arenas: Arenas, states: Recurrence
) -> int:
    states = with_memory(states, states.memory.view(np.float32))
    return _recur(worker, phase, op, weights, tokens, arenas, states)


def _recur_in_bfloat16(
    worker: Worker, phase: int, op: Any, weights: Weights, tokens: int, arenas: Arenas, states: Recurrence
) -> int:
    states = with_memory(states, states.memory.view(np.uint16))
    return _recur(worker, phase, op, weights, tokens, arenas, states)


def _adapt(
    worker: Worker, phase: int, op: Any, weights: Weights, tokens: int, arenas: Arenas, workspace: LinearWorkspace,
    lora: LoraStep,
) -> int:  # fmt: skip
    """The instructions that follow a linear to which adapters add."""
    if op.code == ADD_ADAPTERS:
        source = buffer_of(arenas.elements, op.source, op.source_width, tokens)
        product = buffer_of(arenas.floats, op.target, op.target_width, tokens)
        return add_adapters(worker, phase, op.index, op.columns, op.width, source, lora, product)
    product = buffer_of(arenas.floats, op.source, op.source_width, tokens)
    out = buffer_of(arenas.elements, op.target, op.target_width, tokens)
    return activate_product(worker, phase, product, op.mode, activation_of(weights, op), workspace, out)


class Parts(NamedTuple):
    """Addresses of what is compiled by itself (see `parts_of`), 0 for what a program does not need."""

    attention: int = 0
    experts: int = 0
    recurrence: int = 0
    adapters: int = 0


def parts_of(
    state_type: np.dtype[Any], program: NDArray[Any], weights: Weights, caches: PagedCaches, plan: AttentionPlan,
    inputs: StepInputs, buffers: Buffers, routing: RoutingMemory, recurrence: Recurrence, lora: LoraStep,
) -> dict[str, Part]:  # fmt: skip
    """The fields of `Parts` that a program needs, for these arguments of `run_step`.

    state_type: of the numbers of recurrent states, float32, or uint16 for bfloat16
    """
    codes, number, arenas = program["code"], types.int64, typeof(buffers.arenas)
    before = typeof(Worker(new_work_queue(), 0)), number, typeof(program).dtype, typeof(weights)
    attention = typeof(caches), typeof(plan), typeof(inputs), arenas, typeof(buffers.attention)
    parts = {"attention": Part(_run_attention, number(*before, *attention))}
    if ((codes >= CONVOLVE) & (codes < ADD_ADAPTERS)).any():
        recur = _recur_in_float32 if state_type == np.float32 else _recur_in_bfloat16
        parts["recurrence"] = Part(recur, number(*before, number, arenas, typeof(recurrence)))
    if ((codes >= ROUTE) & (codes < CONVOLVE)).any():
        experts = number, arenas, typeof(routing), typeof(buffers.linear)
        parts["experts"] = Part(_mix_experts, number(*before, *experts))
    if (codes >= ADD_ADAPTERS).any():
        parts["adapters"] = Part(_adapt, number(*before, number, arenas, typeof(buffers.linear), typeof(lora)))
    return parts


@entry
def run_step(
    worker: Worker, program: Any, weights: Weights, caches: PagedCaches, plan: AttentionPlan, inputs: StepInputs,
    buffers: Buffers, routing: RoutingMemory, recurrence: Recurrence, lora: LoraStep, parts: Parts,
    outputs: StepOutputs,
) -> None:  # fmt: skip
    """Computes the outputs of a step, and stores its keys and values in the cache.

    Every thread of a pool calls it. Each phase returns when all of its tasks are complete.

    recurrence: its memory as bytes
    """
    # Not a plain 0: that has a type of its own, for which every kernel below would be compiled once more.
    phase: Any = np.int64(0)
    arenas, tokens = buffers.arenas, len(inputs.ids)
    for index in range(len(program)):
        op = program[index]
        if op.code == EMBED:
            phase = _embed(worker, phase, op, weights, inputs, arenas)
        elif op.code == NORMALIZE:
            phase = _normalize(worker, phase, op, weights, inputs, arenas)
        elif op.code == LINEAR:
            phase = _linear(worker, phase, op, weights, tokens, arenas, buffers.linear)
        elif op.code == PREPARE_HEADS or op.code == ATTEND:
            given = worker, phase, op, weights, caches, plan, inputs, arenas, buffers.attention
            phase = call_address(parts.attention, given)
        elif op.code == GATE:
            phase = _gate(worker, phase, op, tokens, arenas)
        elif op.code == GATHER:
            phase = _gather(worker, phase, op, weights, tokens, arenas)
        elif op.code == SCALE:
            phase = _scale(worker, phase, op, weights, tokens, arenas)
        elif op.code == HEAD:
            phase = _head(worker, phase, op, weights, inputs, arenas, buffers.linear, outputs)
        elif op.code >= ADD_ADAPTERS:
            phase = call_address(parts.adapters, (worker, phase, op, weights, tokens, arenas, buffers.linear, lora))
        elif op.code >= CONVOLVE:
            phase = call_address(parts.recurrence, (worker, phase, op, weights, tokens, arenas, recurrence))
        else:
            phase = call_address(parts.experts, (worker, phase, op, weights, tokens, arenas, routing, buffers.linear))
