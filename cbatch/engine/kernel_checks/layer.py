"""Checks the kernels between the matrix products of a model's layers, as the model calls them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn.functional import linear

from cbatch.attention.base import AttendOptions
from cbatch.attention.reference import ReferenceAttention, ReferenceMetadata
from cbatch.engine.kernel_checks.kernel_check import (
    TOLERANCES,
    KernelCheck,
    Workload,
    error_of_cache,
    largest_error,
    product_tolerance,
    run_check,
)
from cbatch.engine.kernel_checks.made_up_steps import (
    draw,
    empty_cache,
    empty_states,
    made_up_adapters,
    made_up_states,
    num_blocks,
    ragged_batch,
)
from cbatch.kernels.operands import AdapterRows, Addend, Embedding, Positions, Recurrence, Routing
from cbatch.kernels.quantized_matrix import QuantizedMatrix
from cbatch.model.base import HiddenStates
from cbatch.model.cuda import CudaModel
from cbatch.model.ops.device_kernel import DeviceKernel, DeviceOps, by_torch
from cbatch.model.ops.operation import constants
from cbatch.runtime.kv_cache import LayerShape, Shape

CHUNKS = [(0, 3), (0, 2)]
"""Of the step whose calls are noted."""

_TOKENS = 5
_PRODUCT_TOKENS = 2048
_HEAD_PIECE = 4096
"""Rows of the head's matrix that are widened to float64 at once."""

# Logits are float32: what the kernel before them rounds in another way is all that may differ. On GPUs that are not
# CUDA's, logits are rounded too, by up to 0.0005 in float16 and 0.004 in bfloat16.
_HEAD_TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}

Chunks = Sequence[tuple[int, int]]
"""Of a step of recurrent layers: the tokens of each, and after how many of them its state is copied, 0 for never."""

STEPS: Mapping[str, Chunks] = {
    "decode": [(1, 0), (1, 1), (1, 0)],
    "chunks": [(1, 0), (2, 0), (75, 37), (1, 0), (40, 32), (21, 21)],
}
"""Chunks shorter than a convolution, of several tiles, and of some tiles and a few tokens."""


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One call of a kernel, with its arguments as they were before it."""

    kernel: DeviceKernel[Any, Any]
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> KernelCall:
        """With every tensor of the step changed; weights stay."""
        pairs = zip(self.kernel.parameters, self.arguments, strict=False)
        changed = (one if name == "weights" else _changed(one, change) for name, one in pairs)
        return replace(self, arguments=tuple(changed))

    def run(self, ops: DeviceOps) -> Any:
        return self.kernel(ops, *self.arguments, **self.keywords)

    def results(self, ops: DeviceOps) -> list[Tensor]:
        """Makes the call again, with copies. Returns what its tensors hold then, and its result."""
        mine = self.with_tensors(torch.clone)
        result = mine.run(ops)
        found = [one for one in mine.arguments if isinstance(one, Tensor)]
        if isinstance(result, Routing):
            # The experts that were chosen. Where a pair stands among those of its expert does not matter.
            experts = torch.searchsorted(result.counts.cumsum(0), result.places.long(), right=True)
            found += [result.weights, experts.float(), result.counts[:, None].float()]
        return [one for one in found if one.dim() > 1]

    @property
    def state(self) -> int | None:
        """Which argument holds the states of a recurrent layer; the next is the `Recurrence`, and then comes `out`."""
        names = self.kernel.parameters
        return names.index("state") if "state" in names else None

    @property
    def is_low_rank(self) -> bool:
        """Whether it multiplies with adapters: then it reads and writes rows longer than it multiplies them."""
        return any(isinstance(one, AdapterRows) for one in self.arguments)

    def bytes_per_token(self) -> int:
        """The bytes that it reads and writes for each token, without weights and small numbers."""
        total = 0
        for name, one in zip(self.kernel.parameters, self.arguments, strict=False):
            if isinstance(one, Embedding):
                total += one.table[0].nbytes * (1 if one.positions is None else 2)
            elif name != "weights" and not isinstance(one, Routing):
                for tensor in filter(Tensor.is_floating_point, _tensors_of(one)):
                    row = tensor[0, :, 0] if tensor.dim() == 4 else tensor[0]  # of a cache, the place of one token
                    total += (1 + (name == self.kernel.updates)) * row.nbytes
        return total

    def bytes_per_sequence(self) -> int:
        """The bytes that a decoding sequence reads and writes in a recurrent layer."""
        assert self.state is not None
        rows = [one[0].nbytes for one in self.arguments if isinstance(one, Tensor) and one.dim() == 2]
        state: Tensor = self.arguments[self.state]
        return 2 * state[0].nbytes + sum(rows)

    def over_chunks(self, chunks: Chunks, draw: Callable[..., Tensor]) -> KernelCall:
        """The call over a step of such chunks, with random states and numbers, which are columns of wider tensors.

        Slots lie in no order. Each chunk has one for a snapshot, too, which is NaN before one is made.

        draw: random numbers, of a seed and a shape
        """
        place, count, counts = self.state, len(chunks), [tokens for tokens, _ in chunks]
        assert place is not None
        noted, out, tokens = self.arguments[place], self.arguments[place + 2], sum(counts)
        state = noted.new_full((2 * count, *noted.shape[1:]), math.nan)
        state[count:] = draw(0, count, *noted.shape[1:])
        arguments = [
            draw(number + 1, tokens, one.shape[1] + 16).to(one.dtype)[:, 8:-8] if isinstance(one, Tensor) else one
            for number, one in enumerate(self.arguments)
        ]
        targets = [number if snapshot else -1 for number, (_, snapshot) in enumerate(chunks)]
        columns = [0, *accumulate(counts)], range(2 * count - 1, count - 1, -1), [after for _, after in chunks], targets
        placed = [torch.tensor(list(column), dtype=torch.int32, device=state.device) for column in columns]
        recurrence = Recurrence(placed[0], placed[1], placed[2], placed[3], max(counts))
        arguments[place : place + 3] = [state, recurrence, out.new_zeros(tokens, out.shape[1])]
        return replace(self, arguments=tuple(arguments))


def _tensors_of(value: Any) -> list[Tensor]:
    """Those of an argument that `_changed` changes."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _changed(value, note)
    return found


def _changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    match value:
        case Tensor():
            return change(value)
        case Addend():
            return value._replace(value=change(value.value))
        case Positions() | Routing():
            return value._replace(**{name: change(one) for name, one in value._asdict().items() if one is not None})
        case tuple() if type(value) is tuple:
            return tuple(_changed(one, change) for one in value)
    return value


@dataclass(frozen=True, slots=True)
class _NotingOps(DeviceOps):
    """Operations by torch, each call of which is noted if there was none like it."""

    calls: dict[Any, KernelCall] = field(default_factory=dict)

    def call(self, kernel: DeviceKernel[Any, Any], arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        key = kernel.name, constants(arguments), constants(tuple(sorted(keywords.items())))
        if key not in self.calls:
            self.calls[key] = KernelCall(kernel, arguments, keywords).with_tensors(torch.clone)
        return kernel.function_for(self)(*arguments, **keywords)


class _HeadsFirstReference(ReferenceAttention):
    """The reference, over blocks as Triton's attention lays them out."""

    def block_shapes(self, layer: LayerShape, block_size: int, dtype: torch.dtype) -> tuple[Shape, Shape]:
        keys, values = super().block_shapes(layer, block_size, dtype)
        return (keys[1], keys[0], keys[2]), (values[1], values[0], values[2])

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, metadata: ReferenceMetadata, **options: Unpack[AttendOptions]
    ) -> Tensor:
        return super().attend(query, keys.transpose(1, 2), values.transpose(1, 2), metadata, **options)


def noted_calls(model: CudaModel, block_size: int, kv_dtype: torch.dtype | None) -> list[KernelCall]:
    """The different calls of a step of the model, by operations of torch. Keys go to two blocks, and one token has no
    slot."""
    noting = _NotingOps(heads_first=model.ops.heads_first)
    attention = _HeadsFirstReference(kv_dtype) if noting.heads_first else ReferenceAttention(kv_dtype)
    batch = ragged_batch(CHUNKS, block_size, model.device, model.vocab_size)
    blocks = num_blocks(CHUNKS, block_size)
    kv_cache = empty_cache(attention, model.layers, blocks, block_size, model.dtype, model.device)
    if model.states:
        batch = replace(batch, states=made_up_states(empty_states(model, len(CHUNKS)), batch))
    model.with_ops(noting).forward(made_up_adapters(model, batch), kv_cache, attention)
    slots = torch.arange(len(batch.ids), device=model.device) + block_size - 2
    slots[len(slots) // 2] = -1
    for call in noting.calls.values():
        for one in call.arguments:
            if isinstance(one, Positions):
                one.slots.copy_(slots)
    return list(noting.calls.values())


@dataclass(frozen=True, slots=True)
class LayerChecks:
    """The checks of a model's kernels.

    kv_dtype:       type of the KV cache; None: that of the model
    workload_bytes: what a workload reads and writes: more than the L2 cache of any GPU holds
    """

    model: CudaModel
    block_size: int
    kv_dtype: torch.dtype | None = None
    workload_bytes: int = 2**29

    def run(self) -> Iterator[KernelCheck]:
        """One check for each way in which the model calls a kernel, and one of the output head."""
        model, seen = self.model, Counter[str]()
        with torch.inference_mode():
            calls = noted_calls(model, self.block_size, self.kv_dtype)
        for call in calls:
            kernel = call.kernel
            is_torch = not kernel.triton or kernel.name in model.ops.without
            if is_torch or (kernel.name == "linear" and not model.ops.batch_invariant):
                continue  # torch's or the library's: nothing could take its place
            seen[kernel.name] += 1
            name = kernel.name + (f" ({seen[kernel.name]})" if seen[kernel.name] > 1 else "")
            tolerance = TOLERANCES[model.dtype]
            if kernel.is_product:
                tolerance = product_tolerance(model.dtype, tolerance)
            measure, workload = partial(self._error, call), partial(self._workload, call)
            yield replace(run_check(name, model.device, tolerance, measure, workload), kernel=kernel.name)
        tolerance = product_tolerance(model.dtype, _HEAD_TOLERANCES[model.dtype])
        yield run_check("output head", model.device, tolerance, self._head_error, self._head_workload)

    def _error(self, call: KernelCall) -> float:
        if call.state is not None:
            return max(self._difference(call.over_chunks(chunks, self._draw)) for chunks in STEPS.values())
        return self._difference(call)

    def _difference(self, call: KernelCall) -> float:
        plain = by_torch(heads_first=self.model.ops.heads_first)
        pairs = zip(call.results(self.model.ops), call.results(plain), strict=True)
        return max(error_of_cache(one, other) for one, other in pairs)

    def _head_error(self) -> float:
        """With the model's own matrix, compared with a product in float64."""
        residual, added = (self._draw(seed, _TOKENS, self.model.program.hidden_size) for seed in (0, 1))
        hidden, rows = HiddenStates(residual.float(), added), torch.tensor([3, 0], device=self.model.device)
        plain = self.model.with_ops(by_torch(heads_first=self.model.ops.heads_first))
        wide = plain.head_input(hidden, rows).double()
        products = torch.cat([linear(wide, piece.double()) for piece in _pieces(plain.head.lm_head)], 1)
        return largest_error(self.model.run_head(hidden, rows), plain.finished(products))

    def _head_workload(self) -> Workload:
        tokens, program = 256, self.model.program
        hidden = HiddenStates(*(self._draw(seed, tokens, program.hidden_size) for seed in (0, 1)))
        hidden = hidden._replace(residual=hidden.residual.float())
        rows = torch.arange(tokens, device=self.model.device)
        return Workload(partial(self.model.run_head, hidden, rows), flops=2 * tokens * program.head.size)

    def _workload(self, call: KernelCall) -> Workload:
        """The call with so many tokens, or decoding sequences, that the device's memory limits it; or a product."""
        ops = self.model.ops
        if call.state is not None:
            size = call.bytes_per_sequence()
            sequences = max(self.workload_bytes // size, 1)
            grown = call.over_chunks([(1, 0)] * sequences, self._draw)
            return Workload(partial(grown.run, ops), bytes_read=size * sequences)
        size = call.bytes_per_token()
        has_flops = call.kernel.is_product and not call.is_low_rank
        tokens = _PRODUCT_TOKENS if has_flops else max(self.workload_bytes // size, 1)
        grown = self._grown(call, tokens)
        if not has_flops:
            return Workload(partial(grown.run, ops), bytes_read=size * tokens)
        # All products end with the rows of the result, which are as long as a matrix has columns.
        out = next(one for one in reversed(grown.arguments) if isinstance(one, Tensor))
        return Workload(partial(grown.run, ops), flops=2.0 * out.numel() * grown.arguments[0].shape[1])

    def _grown(self, call: KernelCall, tokens: int) -> KernelCall:
        """The call with so many tokens instead of the few that were noted, of random numbers."""
        noted = sum(stop - start for start, stop in CHUNKS)
        sequences, count = len(CHUNKS), 0
        routing = next((one for one in call.arguments if isinstance(one, Routing)), None)
        scale = 1 if routing is None else routing.weights.shape[1]

        def grow(tensor: Tensor) -> Tensor:
            nonlocal count
            count += 1
            rows = {noted: tokens, sequences: tokens, noted * scale: tokens * scale}.get(len(tensor))
            if rows is None or (tensor.dim() == 4 and call.kernel.name == "prepare_heads"):  # a cache of all tokens
                blocks = -(-tokens // self.block_size)
                return tensor.new_empty(blocks, *tensor.shape[1:]) if tensor.dim() == 4 else tensor
            if tensor.is_floating_point():
                return self._draw(count, rows, *tensor.shape[1:]).to(tensor.dtype)
            numbers = torch.arange(rows, device=tensor.device) % self.model.vocab_size  # each is read from memory
            return numbers.to(tensor.dtype)

        grown = call.with_tensors(grow)
        if call.is_low_rank:
            all_rows = torch.arange(tokens, dtype=torch.int32, device=self.model.device)
            one_adapter = AdapterRows(all_rows, torch.ones_like(all_rows))
            changed = (one_adapter if isinstance(one, AdapterRows) else one for one in grown.arguments)
            return replace(grown, arguments=tuple(changed))
        if routing is None:
            return grown
        chosen = torch.arange(tokens * scale, device=self.model.device) % len(routing.counts)  # about as many of each
        order, counts = chosen.argsort(stable=True), torch.bincount(chosen, minlength=len(routing.counts)).int()
        weights = torch.full((tokens, scale), 1 / scale, device=self.model.device)
        spread = Routing(weights, order.argsort().view(tokens, scale).int(), order.int(), counts)
        return replace(grown, arguments=tuple(spread if isinstance(one, Routing) else one for one in grown.arguments))

    def _draw(self, seed: int, *shape: int) -> Tensor:
        return draw(seed, *shape, dtype=self.model.dtype, device=self.model.device)


def _pieces(matrix: Tensor | QuantizedMatrix) -> Iterator[Tensor]:
    """Some rows of the head's matrix after the other."""
    if not isinstance(matrix, QuantizedMatrix):
        yield from torch.split(matrix, _HEAD_PIECE)
        return
    for first in range(0, matrix.columns, _HEAD_PIECE):
        yield matrix.values(slice(first, first + _HEAD_PIECE))
