"""Lays out a program for a device that runs it operation by operation: weights, buffers, and calls of `LayerOps`.

What is added to the residual waits for the norm that comes next, so that both are one kernel: a linear leaves its
product in a buffer, or a post-norm its source, until the residual is read. So does the embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cbatch.attention.base import AttendOptions, AttentionBackend
from cbatch.base.quantization import Quantization
from cbatch.kernels.float8_matrix import Float8Matrix
from cbatch.kernels.layer_ops import (
    Addend,
    Convolution,
    DeltaHeads,
    Embedding,
    Heads,
    LayerOps,
    NormWeights,
    Positions,
    Recurrence,
    Router,
    Routing,
    ScanHeads,
)
from cbatch.kernels.quantized_matrix import QuantizedMatrix
from cbatch.model.base import DeviceInputs, HiddenStates
from cbatch.model.config import UnsupportedConfig
from cbatch.model.device_weights import DeviceWeights
from cbatch.model.float8 import Float8Use
from cbatch.model.programs.program import (
    RESIDUAL,
    Attend,
    Embed,
    Experts,
    Gate,
    GatedDelta,
    GatedNorm,
    Gather,
    Head,
    Linear,
    Norm,
    Normalize,
    Operation,
    PrepareHeads,
    Program,
    Route,
    Scale,
    SelectiveScan,
    ShortConvolution,
)
from cbatch.runtime.kv_cache import KVCache

_MOST_ADDENDS = 2
_SECOND, _PRODUCT, _ACTIVATED, _ROWS = "(second addend)", "(product)", "(activated)", "(rows of experts)"
_EMBEDDED = "(embedded)"
"""Buffers that the program does not name."""


class Buffer(NamedTuple):
    """A tensor [T, width] of a step.  is_float: of float32, because it is added to; else of the model's type"""

    name: str
    width: int
    is_float: bool = False


@dataclass(slots=True)
class Step:
    """What the operations of a step share.

    ids:       [T] the tokens that are embedded
    hidden:    the residual [T, hidden] float32. In a decode step it stays in the device's cache. For 2,000 tokens of an
               8B model, half the bytes would save 67 MB of memory traffic beside 0.9 TFLOP, by calculation a hundredth
               of a layer's time; and rounding it in every layer is much of what a model loses in bfloat16.
    positions: for each rotary setting, and last for none
    routing:   of the last router
    """

    ops: LayerOps
    ids: Tensor
    inputs: DeviceInputs
    metadata: Any
    kv_cache: KVCache
    attention: AttentionBackend
    hidden: HiddenStates
    positions: list[Positions]
    buffers: dict[Buffer, Tensor] = field(default_factory=dict)
    routing: Routing | None = None

    @property
    def recurrence(self) -> Recurrence:
        """Where the chunks have their states, of a model that has recurrent layers."""
        assert self.inputs.recurrence is not None
        return self.inputs.recurrence

    def adapt(self, linear: Linear, source: Buffer, out: Tensor) -> None:
        """Adds to a linear's product what adapters add to it, for tokens that have one."""
        if self.inputs.adapters is not None:
            self.inputs.adapters.add_to(linear, self[source], out)

    def __getitem__(self, buffer: Buffer) -> Tensor:
        """The memory of a buffer, which every layer uses again."""
        if buffer.name == RESIDUAL:
            return self.hidden.residual
        if buffer not in self.buffers:
            added = self.hidden.added
            dtype = torch.float32 if buffer.is_float else added.dtype
            self.buffers[buffer] = added.new_empty(len(added), buffer.width, dtype=dtype)
        return self.buffers[buffer]


class _Pending(NamedTuple):
    """What is still to be added to the residual.  buffer: None for `HiddenStates.added`"""

    buffer: Buffer | None
    factor: float
    norm: NormWeights | None

    def addend(self, step: Step) -> Addend:
        value = step.hidden.added if self.buffer is None else step[self.buffer]
        return Addend(value, self.factor, self.norm)


class DeviceHead(NamedTuple):
    """The output head (see `Head`).

    added:   factor of `HiddenStates.added`, which the head adds to the residual; None if it does not
    lm_head: [vocabulary, hidden]
    bias:    [vocabulary] float32
    """

    added: float | None
    norm: NormWeights
    lm_head: Tensor | QuantizedMatrix
    bias: Tensor | None
    factor: float
    softcap: float


class DeviceProgram:
    """A program with its weights on a device.

    calls: all operations but the head, in their order
    """

    head: DeviceHead

    def __init__(
        self,
        program: Program,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        quantize: Quantization | None = None,
        float8: Float8Use | None = None,
    ) -> None:
        """tensors:  by their names in the program; each is read when it is copied
        quantize, float8: see `DeviceWeights`

        Raises UnsupportedConfig for what operations on a device do not support.
        """
        self.program = program
        self.calls: list[Callable[[Step], None]] = []
        head = program.head.matrix
        is_tied = head.parts == (program.embed.table,)
        self._loader = DeviceWeights(tensors, dtype, device, quantize, head if is_tied else None, float8)
        self._begins: Callable[[Step], tuple[Embedding, Tensor]] | None = None
        self._pending: list[_Pending] = []
        self._top_k = 0
        self._floats = frozenset(_accumulators(program))
        self._buffers = {RESIDUAL: Buffer(RESIDUAL, program.hidden_size, True)}
        self._inv_freqs = [
            tuple(torch.tensor(inv_freq, device=device) for inv_freq in (rotary.inv_freq, rotary.long_inv_freq))
            for rotary in program.rotaries
        ]
        for operation in program.operations:
            self._add(operation)
        self._loader.forget()

    @property
    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self._loader.loaded)

    @property
    def matrix_bytes(self) -> int:
        """Of the weights that every step reads."""
        return sum(matrix.nbytes for matrix in self._loader.matrices)

    def new_step(
        self,
        ops: LayerOps,
        inputs: DeviceInputs,
        metadata: Any,
        kv_cache: KVCache,
        attention: AttentionBackend,
        hidden: HiddenStates,
    ) -> Step:
        """metadata: what `attention.prepare` returned for the step; hidden: memory for its result"""
        ids = inputs.input_ids
        for replaced, instead in self.program.replaced_ids.items():
            ids = torch.where(ids == replaced, instead, ids)
        is_long = None
        if self.program.short_context is not None:
            longest = self.program.max_model_len
            is_long = inputs.position_ids >= longest
            position_ids = torch.where(is_long, inputs.position_ids - longest, inputs.position_ids)
            inputs = inputs._replace(position_ids=position_ids)
        positions = self._positions(inputs, is_long)
        return Step(ops, ids, inputs, metadata, kv_cache, attention, hidden, positions)

    def _positions(self, inputs: DeviceInputs, is_long: Tensor | None) -> list[Positions]:
        """By torch's own functions, which are exact for large angles too; a kernel's may not be.

        is_long: [T] whether each token's sequence is encoded as a long one; None if none is
        """
        found = []
        for rotary, (inv_freq, long_inv_freq) in zip(self.program.rotaries, self._inv_freqs, strict=True):
            cosines = sines = scales = None
            if len(inv_freq):
                if is_long is not None and len(long_inv_freq):
                    inv_freq = torch.where(is_long[:, None], long_inv_freq, inv_freq)
                cosines, sines = rotary.tables(inputs.position_ids, inv_freq)
            if rotary.scale_beta:
                scales = rotary.query_scales(inputs.position_ids)
            found.append(Positions(cosines, sines, inputs.slot_mapping, scales))
        return [*found, Positions(None, None, inputs.slot_mapping)]

    def _add(self, operation: Operation) -> None:
        match operation:
            case Embed():
                self._embed(operation)
            case Normalize():
                self._normalize(operation)
            case Linear():
                self._linear(operation)
            case PrepareHeads():
                self._prepare_heads(operation)
            case Attend():
                self._attend(operation)
            case Gate():
                self._gate(operation)
            case Gather():
                self._gather(operation)
            case Scale():
                self._scale(operation)
            case Route():
                self._route(operation)
            case Experts():
                self._experts(operation)
            case ShortConvolution():
                self._convolve(operation)
            case GatedDelta():
                self._gated_delta(operation)
            case SelectiveScan():
                self._selective_scan(operation)
            case GatedNorm():
                self._gated_norm(operation)
            case Head():
                self._head(operation)

    def _read(self, name: str) -> Buffer:
        """The buffer of that name as it was written last."""
        if name == RESIDUAL:
            self._flush()
        return self._buffers[name]

    def _written(self, name: str, width: int) -> Buffer:
        """The buffer of that name, which is written next."""
        buffer = Buffer(name, width, name in self._floats)
        if any(pending.buffer == buffer for pending in self._pending):
            self._flush()
        self._buffers[name] = buffer
        return buffer

    def _flush(self) -> None:
        """Adds to the residual what is still to be added."""
        if self._begins is not None or self._pending:
            self._norm_residual(None, None)

    def _norm_residual(self, norm: NormWeights | None, target: Buffer | None) -> None:
        """Adds to the residual what is still to be added, and norms it."""
        begins, pending = self._begins, tuple(self._pending)
        self._begins, self._pending = None, []

        def embed(step: Step) -> None:
            out, positions = None if target is None else step[target], step.inputs.position_ids
            assert begins is not None
            step.ops.embed_and_norm(*begins(step), positions, step.hidden.residual, norm, out)

        def add(step: Step) -> None:
            addends = tuple(one.addend(step) for one in pending)
            step.ops.add_and_norm(step.hidden.residual, addends, norm, None if target is None else step[target])

        self.calls.append(add if begins is None else embed)

    def _make_room(self, *, for_norm: bool = False) -> None:
        """For one more thing to be added to the residual. Only the first of several may have a norm."""
        is_full = len(self._pending) == _MOST_ADDENDS or (bool(self._pending) and for_norm)
        if self._begins is not None or is_full:
            self._flush()

    def _embed(self, one: Embed) -> None:
        found = self._looked_up(one)
        if one.target == RESIDUAL:
            self._begins = found
            return
        target = self._written(one.target, one.table.size[1])
        self.calls.append(
            lambda step: step.ops.embed_and_norm(*found(step), step.inputs.position_ids, step[target], None, None)
        )

    def _looked_up(self, one: Embed) -> Callable[[Step], tuple[Embedding, Tensor]]:
        """The embedding of a step and the rows that are taken of it; of a quantized one these become numbers first."""
        loader = self._loader
        table, positions = loader.embedding(one.table), None if one.positions is None else loader.table(one.positions)
        if not isinstance(table, QuantizedMatrix):
            embedding = Embedding(table, one.scale, positions, one.position_offset)
            return lambda step: (embedding, step.ids)
        matrix, buffer = table, Buffer(_EMBEDDED, table.depth, True)

        def look_up(step: Step) -> tuple[Embedding, Tensor]:
            step.ops.look_up(matrix, step.ids, step[buffer])
            rows = torch.arange(len(step.ids), device=step.ids.device)
            return Embedding(step[buffer], one.scale, positions, one.position_offset), rows

        return look_up

    def _normalize(self, one: Normalize) -> None:
        norm, width = self._loader.norm(one.norm), one.width or self._buffers[one.source].width - one.start
        is_whole = one.groups == 1 and width == self.program.hidden_size
        if one.source == RESIDUAL != one.target and is_whole and not one.add and one.factor == 1:
            self._norm_residual(norm, self._written(one.target, width))
            return
        source = self._read(one.source)
        if one.target == RESIDUAL and one.add and is_whole and one.source != RESIDUAL:
            self._make_room(for_norm=True)
            self._pending.append(_Pending(source, one.factor, norm))
            return
        columns = width * one.groups
        target = self._read(one.target) if one.target == RESIDUAL else self._written(one.target, columns)

        def run(step: Step) -> None:
            part = step[source][:, one.start : one.start + columns]
            step.ops.normalize(part, norm, one.groups, one.factor, step[target], add=one.add)

        self.calls.append(run)

    def _linear(self, one: Linear) -> None:
        source, (matrix, bias) = self._read(one.source), self._loader.linear(one.matrix)
        columns = one.matrix.columns
        if one.target == RESIDUAL and one.add and one.activation is None:
            self._make_room()
            place = Buffer(_SECOND, columns) if any(each.buffer is None for each in self._pending) else None
            self._pending.append(_Pending(place, one.factor, None))

            def run_before_norm(step: Step) -> None:
                out = step.hidden.added if place is None else step[place]
                _multiply(step, source, matrix, bias, out)
                step.adapt(one, source, out)

            self.calls.append(run_before_norm)
            return
        activation = None if one.activation is None else self._loader.activation(one.activation)
        target = self._read(RESIDUAL) if one.target == RESIDUAL else self._written(one.target, one.width)
        product = Buffer(_PRODUCT, columns)
        is_direct = activation is None and not (one.add or target.is_float or one.factor != 1)

        def run(step: Step) -> None:
            found = step[target if is_direct else product]
            _multiply(step, source, matrix, bias, found)
            step.adapt(one, source, found)
            if activation is not None:
                activated = step[Buffer(_ACTIVATED, one.width)] if one.add or one.factor != 1 else step[target]
                step.ops.activate(found, activation, activated)
                found = activated
            if one.add:
                step[target].add_(found, alpha=one.factor)
            elif found is not step[target]:
                torch.mul(found, one.factor, out=step[target])

        self.calls.append(run)

    def _prepare_heads(self, one: PrepareHeads) -> None:
        norms, shape, source = one.norms, one.shape, self._read(one.source)
        widths = [one.heads * shape.key_dim, shape.heads * shape.key_dim, shape.heads * shape.value_dim]
        query = self._written(one.query, widths[0])
        given = [norms.query, norms.key if one.stores else None, norms.value if one.stores else None]
        if norms.by_row:
            if norms.last or one.clip:
                raise UnsupportedConfig("its heads are normed together after the rotation, or after a clip")
            self._norm_rows(source, given, widths)
            given = [None, None, None]
        dims = shape.key_dim, shape.key_dim, shape.value_dim
        head_norms = [self._loader.head_norm(norm, dim) for norm, dim in zip(given, dims, strict=True)]
        queries, keys, values = head_norms
        heads = Heads(
            one.heads, shape.heads, shape.key_dim, shape.value_dim, queries, keys, values, norms.last, one.clip,
            one.stores,
        )  # fmt: skip
        rotary = -1 if one.rotary is None else one.rotary

        def run(step: Step) -> None:
            keys = values = None
            if one.stores:
                keys, values = step.kv_cache.keys[one.cache], step.kv_cache.values[one.cache]
            queries = step[query].view(-1, one.heads, shape.key_dim)
            step.ops.prepare_heads(step[source], heads, step.positions[rotary], queries, keys, values)

        self.calls.append(run)

    def _norm_rows(self, source: Buffer, norms: Sequence[Norm | None], widths: Sequence[int]) -> None:
        """Norms all queries of a token together, all keys and all values, in place."""
        start = 0
        for given, width in zip(norms, widths, strict=True):
            if given is not None:
                self._norm_columns(source, self._loader.norm(given), start, width)
            start += width

    def _norm_columns(self, source: Buffer, norm: NormWeights, start: int, width: int) -> None:
        def run(step: Step) -> None:
            part = step[source][:, start : start + width]
            step.ops.normalize(part, norm, 1, 1.0, part)

        self.calls.append(run)

    def _attend(self, one: Attend) -> None:
        if one.window and one.chunk:
            raise UnsupportedConfig("a layer of it has a window and chunks")
        query = self._read(one.query)
        target = self._written(one.target, one.heads * one.shape.value_dim)
        options = AttendOptions(
            scale=one.scale, window=one.window or None, chunk=one.chunk or None, softcap=one.softcap or None,
            sinks=None if one.sinks is None else self._loader.vector(one.sinks),
        )  # fmt: skip

        def run(step: Step) -> None:
            keys, values = step.kv_cache.keys[one.cache], step.kv_cache.values[one.cache]
            queries = step[query].view(-1, one.heads, one.shape.key_dim)
            step.buffers.pop(target, None)  # that of the layer before need not wait for this one
            attended = step.attention.attend(queries, keys, values, step.metadata, **options)
            step.buffers[target] = attended.flatten(1)

        self.calls.append(run)

    def _gate(self, one: Gate) -> None:
        gate, before = self._read(one.gate), self._buffers[one.target]
        target = self._written(one.target, before.width)
        columns = target.width // one.width

        def run(step: Step) -> None:
            factors = step[gate][:, one.start : one.start + columns]
            step.ops.gate(factors, one.width, one.function, one.factor, step[target])

        self.calls.append(run)

    def _gather(self, one: Gather) -> None:
        sources = [self._read(name) for name in one.sources]
        target, columns = self._written(one.target, len(one.columns)), self._loader.indices(one.columns)

        def run(step: Step) -> None:
            parts = [step[source] for source in sources]
            joined = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
            torch.index_select(joined, 1, columns, out=step[target])

        self.calls.append(run)

    def _scale(self, one: Scale) -> None:
        target, factor = self._read(one.target), self._loader.vector(one.weight)

        def run(step: Step) -> None:
            step[target].mul_(factor)

        self.calls.append(run)

    def _route(self, one: Route) -> None:
        source, loader = self._read(one.source), self._loader
        matrix, bias = loader.router(one.matrix)
        choice_bias, scales = (
            None if weight is None else loader.vector(weight) for weight in (one.choice_bias, one.expert_scales)
        )
        router = Router(
            one.top_k, one.scores, choice_bias, one.groups, one.top_groups, one.group_score, one.normalize,
            one.epsilon, one.least_sum, one.factor, scales,
        )  # fmt: skip

        def run(step: Step) -> None:
            rows = step[source].float()
            scores = rows.new_empty(len(rows), len(matrix))
            step.ops.linear(rows, matrix, bias, scores)
            step.routing = step.ops.route(scores, router)

        self._top_k = one.top_k
        self.calls.append(run)

    def _experts(self, one: Experts) -> None:
        loader, top_k, source = self._loader, self._top_k, self._read(one.source)
        up, down, activation = loader.experts(one.up), loader.experts(one.down), loader.activation(one.activation)
        inner, hidden = one.down[0].depth, one.down[0].columns
        target = self._read(RESIDUAL) if one.target == RESIDUAL else self._written(one.target, hidden)
        product, activated, rows = (
            Buffer(name, top_k * width)
            for name, width in ((_PRODUCT, one.up[0].columns), (_ACTIVATED, inner), (_ROWS, hidden))
        )

        def run(step: Step) -> None:
            routing, ops = step.routing, step.ops
            assert routing is not None
            first, second, last = (step[one].view(-1, one.width // top_k) for one in (product, activated, rows))
            ops.expert_linear(step[source], routing, up, first, gathers=True, weighs=one.weigh_input)
            ops.activate(first, activation, second)
            ops.expert_linear(second, routing, down, last, gathers=False, weighs=False)
            ops.combine(last, routing, one.factor, step[target], weighs=not one.weigh_input, add=one.add)

        self.calls.append(run)

    def _convolve(self, one: ShortConvolution) -> None:
        loader, source, channels = self._loader, self._read(one.source), one.channels
        target = self._written(one.target, channels)
        weight = loader.vector(one.weight).view(channels, one.kernel)
        convolution = Convolution(weight, None if one.bias is None else loader.vector(one.bias), one.activation)

        def run(step: Step) -> None:
            rows, recurrence, state = step[source], step.recurrence, step.inputs.states[one.state]
            part, *gates = (
                None if start is None else rows[:, start : start + channels]
                for start in (one.start, one.input_gate, one.output_gate)
            )
            assert part is not None
            step.ops.convolve(part, convolution, state, recurrence, step[target], *gates)

        self.calls.append(run)

    def _gated_delta(self, one: GatedDelta) -> None:
        loader, source, controls = self._loader, self._read(one.source), self._read(one.controls)
        target = self._written(one.target, one.value_heads * one.value_dim)
        decay, decay_bias = loader.decay(one.decay_log), loader.vector(one.decay_bias)
        heads = DeltaHeads(one.key_heads, one.value_heads, one.key_dim, one.value_dim, decay, decay_bias)

        def run(step: Step) -> None:
            state = step.inputs.states[one.state]
            step.ops.gated_delta(step[source], step[controls], heads, state, step.recurrence, step[target])

        self.calls.append(run)

    def _selective_scan(self, one: SelectiveScan) -> None:
        loader, source, steps = self._loader, self._read(one.source), self._read(one.steps)
        target = self._written(one.target, one.heads * one.head_dim)
        heads = ScanHeads(
            one.heads, one.head_dim, one.groups, one.state_size, loader.decay(one.decay_log),
            loader.vector(one.step_bias), loader.vector(one.skip), one.step_min, one.step_max,
        )  # fmt: skip

        def run(step: Step) -> None:
            columns = step[steps][:, one.step_start : one.step_start + one.heads]
            state = step.inputs.states[one.state]
            step.ops.selective_scan(step[source], columns, heads, state, step.recurrence, step[target])

        self.calls.append(run)

    def _gated_norm(self, one: GatedNorm) -> None:
        source, gate, norm = self._read(one.source), self._read(one.gate), self._loader.norm(one.norm)
        target = self._written(one.target, source.width)

        def run(step: Step) -> None:
            factors = step[gate][:, one.gate_start : one.gate_start + source.width]
            step.ops.gated_norm(step[source], factors, norm, one.groups, step[target], gate_first=one.gate_first)

        self.calls.append(run)

    def _head(self, one: Head) -> None:
        loader, added = self._loader, None
        if [(each.buffer, each.norm) for each in self._pending] == [(None, None)]:
            added = self._pending.pop().factor
        self._flush()
        lm_head = loader.output_head(one.matrix)
        bias = loader.vector(*one.matrix.biases, factor=one.factor) if one.matrix.biases else None
        self.head = DeviceHead(added, loader.norm(one.norm), lm_head, bias, one.factor, one.softcap)


def _multiply(
    step: Step, source: Buffer, matrix: Tensor | QuantizedMatrix | Float8Matrix, bias: Tensor | None, out: Tensor
) -> None:
    """out [T, columns] = source [T, depth] times matrix [columns, depth], plus bias [columns]."""
    if isinstance(matrix, QuantizedMatrix):
        step.ops.quantized_linear(step[source], matrix, bias, out)
    elif isinstance(matrix, Float8Matrix):
        step.ops.float8_linear(step[source], matrix, bias, out)
    else:
        step.ops.linear(step[source], matrix, bias, out)


def _accumulators(program: Program) -> Iterator[str]:
    """The buffers that operations add to."""
    for operation in program.operations:
        match operation:
            case Embed() | Experts() | Normalize(add=True) | Linear(add=True):
                yield operation.target
