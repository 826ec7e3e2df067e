"""Guards convolutions, gated delta rules and scans on the CPU against torch, and their bits against cuts."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.kernels import operands
from cbatch.kernels.cpu import recurrent
from cbatch.kernels.cpu.norm import NO_NORM, RMS_NORM, NormParams
from cbatch.kernels.cpu.recurrent import Recurrence
from cbatch.kernels.cpu.tensors import as_array
from cbatch.kernels.cpu.thread_pool import ThreadPool
from cbatch.kernels.cpu.work_queue import Worker, lone_worker
from cbatch.model.ops.device_kernel import by_torch
from scripts.gpu import bound_kernels
from tests.support.kernels import callable_kernel
from tests.support.samples import sampled

TORCH = bound_kernels.BoundKernels(by_torch())
pytestmark = pytest.mark.kernels

Array = NDArray[Any]
NAMES = "convolve", "step_deltas", "step_scans", "gated_norm", "block_width"
convolve, step_deltas, step_scans, norm_and_gate, width_of = (
    callable_kernel(getattr(recurrent, name)) for name in NAMES
)
NOTHING = np.empty(0, np.float32)
LENGTHS = [1, 23, 1, 7, 2]
SLOTS = [6, 1, 4, 2, 9]
SNAPSHOTS = {1: (8, 3), 3: (7, 5), 4: (2, 7)}
"""For some chunks, after how many tokens its state is copied, and to which slot; slots 0 and 8 are nobody's."""
NUM_SLOTS = 10


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def record(**fields: float | Tensor) -> tuple[Any, Array]:
    """The record of an instruction over the only state of a step, and the vectors that its tensors are."""
    places, vectors = dict[str, Any](state=0), list[Array]()
    for name, value in fields.items():
        places[name] = sum(map(len, vectors)) if isinstance(value, Tensor) else value
        vectors += [value.flatten().numpy()] if isinstance(value, Tensor) else []
    return namedtuple("Record", places)(**places), np.concatenate(vectors)  # type: ignore[misc]


@dataclass(frozen=True)
class Operation:
    """A recurrent operation, by torch and by its kernel.

    columns, width: of its source and of its result
    shape:     of its state; `stored` reorders a state [slots, *shape] as the kernel has it
    reference: (source, state, recurrence, out)
    kernel:    (worker, recurrence, source, out)
    """

    columns: int
    width: int
    shape: tuple[int, ...]
    stored: Callable[[Tensor], Tensor]
    reference: Callable[[Tensor, Tensor, operands.Recurrence, Tensor], None]
    kernel: Callable[[Worker, Recurrence, Array, Array], None]


def blocks_of(state: Tensor) -> Tensor:
    """[slots, heads, keys, columns] as [slots, heads, blocks, keys, columns of a block]."""
    slots, heads, keys, columns = state.shape
    return state.view(slots, heads, keys, -1, width_of(columns)).transpose(2, 3)


def a_convolution(channels: int, kernel: int, *, gates: bool) -> Operation:
    weight, bias = draw(channels, kernel, seed=1), draw(channels, seed=2)
    settings = bound_kernels.convolution(weight, None if gates else bias, "none" if gates else "silu")
    places = (2 * channels, 0, channels) if gates else (5, -1, -1)
    start, input_gate, output_gate = places
    op = record(
        kernel=kernel, channels=channels, weight=weight.T, bias=-1 if gates else bias, is_silu=int(not gates),
        start=start, input_gate=input_gate, output_gate=output_gate,
    )  # fmt: skip

    def reference(source: Tensor, state: Tensor, recurrence: operands.Recurrence, out: Tensor) -> None:
        part, *factors = (source[:, at : at + channels] if at >= 0 else None for at in places)
        assert part is not None
        TORCH.convolve(part, settings, state, recurrence, out, *factors)

    def run(worker: Worker, recurrence: Recurrence, source: Array, out: Array) -> None:
        convolve(worker, 0, *op, recurrence, source, out, out)

    columns, shape = 3 * channels if gates else channels + 7, (channels, kernel - 1)
    return Operation(columns, channels, shape, lambda state: state.transpose(1, 2), reference, run)


def a_delta_rule(key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> Operation:
    decay, bias = -draw(value_heads, seed=1).sub(3).exp(), draw(value_heads, seed=2)
    heads = bound_kernels.delta_rule(key_heads, value_heads, key_dim, value_dim, decay, bias)
    sizes = {"groups": key_heads, "heads": value_heads, "keys": key_dim, "columns": value_dim}
    op, values = record(**sizes, decay=decay, decay_bias=bias), 2 * key_heads * key_dim
    inner = values + value_heads * value_dim

    def reference(source: Tensor, state: Tensor, recurrence: operands.Recurrence, out: Tensor) -> None:
        TORCH.gated_delta(source[:, :inner], source[:, inner:], heads, state, recurrence, out)

    def run(worker: Worker, recurrence: Recurrence, source: Array, out: Array) -> None:
        controls = np.ascontiguousarray(source[:, inner:])
        mixed = np.ascontiguousarray(source[:, :inner])
        step_deltas(worker, 0, *op, recurrence, 0, values, mixed, controls, 0, out)

    shape = (value_heads, key_dim, value_dim)
    return Operation(inner + 2 * value_heads, value_heads * value_dim, shape, blocks_of, reference, run)


def a_scan(heads: int, head_dim: int, groups: int, state_size: int) -> Operation:
    decay, bias, skip = -draw(heads, seed=1).sub(3).exp(), draw(heads, seed=2), draw(heads, seed=3)
    limits = 0.1, 1.5
    settings = bound_kernels.scan(heads, head_dim, groups, state_size, decay, bias, skip, *limits)
    sizes = {"heads": heads, "columns": head_dim, "groups": groups, "keys": state_size}
    low, high = map(np.float32, limits)
    op = record(**sizes, decay=decay, step_bias=bias, skip=skip, step_min=low, step_max=high)
    inner = heads * head_dim + 2 * groups * state_size

    def reference(source: Tensor, state: Tensor, recurrence: operands.Recurrence, out: Tensor) -> None:
        steps = source[:, inner + 3 : inner + 3 + heads]
        TORCH.selective_scan(source[:, :inner], steps, settings, state, recurrence, out)

    def run(worker: Worker, recurrence: Recurrence, source: Array, out: Array) -> None:
        step_scans(worker, 0, *op, recurrence, heads * head_dim, 0, source, source, inner + 3, out)

    shape, stored = (heads, head_dim, state_size), lambda state: blocks_of(state.transpose(2, 3))
    return Operation(inner + 3 + heads, heads * head_dim, shape, stored, reference, run)


OPERATIONS = {
    "convolution": a_convolution(48, 4, gates=False),
    "convolution of two tokens": a_convolution(16, 2, gates=False),
    "gated convolution": a_convolution(1100, 3, gates=True),
    "delta": a_delta_rule(2, 4, 24, 64),
    "delta, narrow": a_delta_rule(3, 3, 16, 48),
    "scan": a_scan(4, 32, 2, 24),
    "scan, narrow": a_scan(3, 16, 1, 40),
}


@dataclass
class Slots:
    """States of an operation as its kernel has them, NaN where nothing was put."""

    memory: Array
    shape: tuple[int, ...]

    def __getitem__(self, slot: int) -> Array:
        size = len(self.memory) // NUM_SLOTS
        return self.memory[slot * size : (slot + 1) * size]


def new_slots(operation: Operation, dtype: torch.dtype, begin: Tensor | None = None) -> Slots:
    """begin: states [slots, *shape]; zeros in all slots by default"""
    states = torch.zeros(NUM_SLOTS, *operation.shape) if begin is None else begin
    return Slots(as_array(operation.stored(states).to(dtype).clone()).reshape(-1), operation.shape)


def recurrence_of(slots: Slots, lengths: list[int], places: list[int], snapshots: dict[int, tuple[int, int]]) -> Any:
    counts, targets = (
        np.array([snapshots.get(chunk, (0, -1))[part] for chunk in range(len(lengths))], np.int64) for part in (0, 1)
    )
    layout = np.array([[0, len(slots.memory) // NUM_SLOTS]], np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Recurrence(slots.memory, layout, starts, np.array(places, np.int64), counts, targets)


def run_kernel(
    operation: Operation,
    source: Tensor,
    slots: Slots,
    lengths: list[int],
    places: list[int],
    snapshots: dict[int, tuple[int, int]] | None = None,
    threads: int = 1,
) -> Array:
    out = np.full((len(source), operation.width), np.nan, np.float32)
    recurrence, rows = recurrence_of(slots, lengths, places, snapshots or {}), source.numpy().copy()
    if threads == 1:
        operation.kernel(lone_worker(), recurrence, rows, out)
    else:
        ThreadPool(threads).run(operation.kernel, recurrence, rows, out)
    return out


def error_of(found: Array, expected: Array) -> float:
    """The root mean square of the differences, as a share of that of the numbers; infinite if others are NaN."""
    is_number = ~np.isnan(expected)
    if (np.isnan(found) == is_number).any():
        return float("inf")
    difference = (found - expected)[is_number]
    return float(np.sqrt(np.square(difference).mean() / np.square(expected[is_number]).mean()))


WAYS = list(product(OPERATIONS, (torch.float32, torch.bfloat16)))
SOME = sampled(WAYS, 7, keep=[way for way in WAYS if way[1] == torch.float32])


@pytest.mark.parametrize("way", SOME, ids=str)
def test_equals_torch(way: tuple[str, torch.dtype]) -> None:
    """Guards results, states and snapshots of prompts beside decoding requests, and slots that are nobody's."""
    operation, dtype = OPERATIONS[way[0]], way[1]
    source, begin = draw(sum(LENGTHS), operation.columns), draw(NUM_SLOTS, *operation.shape, seed=7, scale=0.3)
    begin = begin.to(dtype).float()
    begin[[0, 8]] = torch.nan
    slots, state = new_slots(operation, dtype, begin), begin.clone()
    found = run_kernel(operation, source, slots, LENGTHS, SLOTS, SNAPSHOTS)
    columns = recurrence_of(slots, LENGTHS, SLOTS, SNAPSHOTS)[2:]
    expected = torch.empty(len(source), operation.width)
    recurrence = operands.Recurrence(*(torch.from_numpy(column) for column in columns), longest=max(LENGTHS))
    operation.reference(source, state, recurrence, expected)
    assert error_of(found, expected.numpy()) < (1e-5 if dtype == torch.float32 else 0.02)
    stored = operation.stored(state).reshape(NUM_SLOTS, -1).numpy()
    kept = np.stack([slots[slot] for slot in range(NUM_SLOTS)])
    kept = (kept.astype(np.uint32) << 16).view(np.float32) if kept.dtype == np.uint16 else kept
    assert error_of(kept, stored) < (1e-5 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("way", SOME, ids=str)
def test_cuts_and_company_change_no_bit(way: tuple[str, torch.dtype]) -> None:
    """Guards results that depend on chunks: a sequence at once, token by token, or beside others on three threads."""
    operation, dtype, length = OPERATIONS[way[0]], way[1], 29
    source = draw(length, operation.columns)
    slots = new_slots(operation, dtype)
    whole = run_kernel(operation, source, slots, [length], [3])
    state = slots[3].copy()
    for cuts in ([1] * length, [2, 1, 1, 20, 5], [28, 1]):
        slots, row, parts = new_slots(operation, dtype), 0, []
        for count in cuts:
            other = draw(9, operation.columns, seed=row)
            step = torch.cat([other[:4], source[row : row + count], other[4:]])
            out = run_kernel(operation, step, slots, [4, count, 5], [1, 3, 7], threads=3 if row == 0 else 1)
            parts.append(out[4 : 4 + count])
            row += count
        assert np.concatenate(parts).tobytes() == whole.tobytes() and slots[3].tobytes() == state.tobytes()


@pytest.mark.parametrize("name", OPERATIONS)
def test_snapshots_are_states_of_that_token(name: str) -> None:
    """Guards snapshots one token early or late: going on from one gives the bits of the sequence it was taken of."""
    operation, length = OPERATIONS[name], 11
    source = draw(length, operation.columns)
    for count in (1, 2, 6, length):
        slots = new_slots(operation, torch.float32)
        whole = run_kernel(operation, source, slots, [length], [3], {0: (count, 5)})
        if count < length:
            rest = run_kernel(operation, source[count:], slots, [length - count], [5])
            assert rest.tobytes() == whole[count:].tobytes(), count
        assert slots[5].tobytes() == slots[3].tobytes(), count


@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("kind", [NO_NORM, RMS_NORM])
def test_gated_norm_equals_torch(kind: int, gate_first: bool) -> None:
    """Guards groups, the order of gate and norm, gates that are columns of a wider buffer, and padding."""
    source, gates, weight = draw(19, 64), draw(19, 80, seed=1), draw(48, seed=2)
    out, expected = np.empty((19, 48), np.float32), torch.empty(19, 48)
    norm = NormParams(kind, 1e-5, weight.numpy() if kind else NOTHING, NOTHING)
    norm_and_gate(lone_worker(), 0, source.numpy().copy(), gates.numpy(), 9, 48, norm, 3, int(gate_first), out)
    settings = operands.NormWeights("rms" if kind else "none", 1e-5, weight if kind else None)
    TORCH.gated_norm(source[:, :48], gates[:, 9:57], settings, 3, expected, gate_first=gate_first)
    np.testing.assert_allclose(out, expected.numpy(), rtol=1e-5, atol=1e-5)
