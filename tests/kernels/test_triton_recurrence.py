"""Guards Triton's kernels of recurrent layers against those of torch, which compute token by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from cbatch.model.ops.device_kernel import by_torch, by_triton
from cbatch.model.ops.gated_delta import GatedDelta
from cbatch.model.ops.selective_scan import SelectiveScan
from scripts.gpu.bound_kernels import BoundKernels, convolution, delta_rule, scan
from tests.support.cuda_model import DEVICE
from tests.support.kernels import draw
from tests.support.samples import sampled

pytest.importorskip("triton", reason="the kernels for a GPU need Triton")

from cbatch.kernels.operands import NormWeights, Recurrence

pytestmark = pytest.mark.kernels
SLOTS = 9
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3}
DTYPES = list(TOLERANCES)  # Triton's interpreter cannot multiply bfloat16

Run = Callable[[BoundKernels, Recurrence, Tensor, Tensor], None]
"""Runs an operation over chunks, on states [slots, ...], into rows of `out`."""


@dataclass(frozen=True)
class Chunk:
    """tokens, slot; snapshot: tokens before it and its slot"""

    tokens: int
    slot: int
    snapshot: tuple[int, int] = (0, -1)


STEPS = {
    "decode": [Chunk(1, 4), Chunk(1, 0, (1, 8)), Chunk(1, -1, (1, 7)), Chunk(1, 6, (0, -1))],
    "one chunk": [Chunk(11, 2)],
    "mixed": [Chunk(1, 4), Chunk(7, -1), Chunk(2, 3), Chunk(23, 1), Chunk(1, 0), Chunk(0, 6)],
    "long chunks": [Chunk(40, 3), Chunk(1, 0), Chunk(27, -1), Chunk(19, 5), Chunk(16, 1)],
    "long chunks, snapshots": [
        Chunk(40, 3, (21, 8)),
        Chunk(25, 0, (16, 7)),
        Chunk(21, 1, (18, 4)),
        Chunk(29, 2, (29, 6)),
    ],
    "snapshots": [Chunk(9, 0, (1, 5)), Chunk(9, 1, (4, 6)), Chunk(2, 2, (2, 7)), Chunk(5, -1, (2, 3)), Chunk(1, 4)],
}


def recurrence_of(chunks: list[Chunk]) -> Recurrence:
    starts = torch.tensor([0, *(chunk.tokens for chunk in chunks)]).cumsum(0)
    columns = [chunk.slot for chunk in chunks], [chunk.snapshot[0] for chunk in chunks]
    ints = [torch.tensor(one, dtype=torch.int32, device=DEVICE) for one in (starts.tolist(), *columns)]
    copies = torch.tensor([chunk.snapshot[1] for chunk in chunks], dtype=torch.int32, device=DEVICE)
    return Recurrence(*ints, copies, max(chunk.tokens for chunk in chunks))


def rows_of(chunks: list[Chunk]) -> int:
    return sum(chunk.tokens for chunk in chunks)


def results(run: Run, ops: BoundKernels, chunks: list[Chunk], state: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that are no padding, and all states after a step."""
    state, out = state.clone(), out.clone()
    run(ops, recurrence_of(chunks), state, out)
    real = [chunk.slot >= 0 for chunk in chunks for _ in range(chunk.tokens)]
    return out[torch.tensor(real, device=DEVICE)], state


def check(run: Run, chunks: list[Chunk], state: Tensor, out: Tensor) -> None:
    """Compares an operation with torch's."""
    triton, torchs = BoundKernels(by_triton(DEVICE)), BoundKernels(by_torch())
    tolerance = max(TOLERANCES[state.dtype], TOLERANCES[out.dtype])
    for found, expected in zip(
        results(run, triton, chunks, state, out), results(run, torchs, chunks, state, out), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def wide(tokens: int, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """[tokens, columns] from the middle of a wider tensor; what is beside them must not be read."""
    whole = torch.full((tokens, columns + 8), torch.nan, dtype=dtype, device=DEVICE)
    whole[:, 3:-5] = draw(tokens, columns, dtype=dtype, seed=seed)
    return whole[:, 3:-5]


def blank(tokens: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.full((tokens, columns), torch.nan, dtype=dtype, device=DEVICE)


def delta_case(heads: GatedDelta, tokens: int, dtype: torch.dtype, state_dtype: torch.dtype) -> tuple[Run, Tensor]:
    """The rule over random numbers, and states."""
    columns = 2 * heads.key_heads * heads.key_dim + heads.value_heads * heads.value_dim
    qkv, controls = wide(tokens, columns, dtype), wide(tokens, 2 * heads.value_heads, dtype, seed=1)
    state = draw(SLOTS, heads.value_heads, heads.key_dim, heads.value_dim, dtype=state_dtype, seed=2)

    def run(ops: BoundKernels, recurrence: Recurrence, state: Tensor, out: Tensor) -> None:
        ops.gated_delta(qkv, controls, heads, state, recurrence, out)

    return run, state


def scan_case(heads: SelectiveScan, tokens: int, dtype: torch.dtype, state_dtype: torch.dtype) -> tuple[Run, Tensor]:
    columns = heads.heads * heads.head_dim + 2 * heads.groups * heads.state_size
    xbc, steps = wide(tokens, columns, dtype), wide(tokens, heads.heads, dtype, seed=1)
    state = draw(SLOTS, heads.heads, heads.head_dim, heads.state_size, dtype=state_dtype, seed=2)

    def run(ops: BoundKernels, recurrence: Recurrence, state: Tensor, out: Tensor) -> None:
        ops.selective_scan(xbc, steps, heads, state, recurrence, out)

    return run, state


def convolution_case(
    channels: int, kernel: int, tokens: int, dtype: torch.dtype, state_dtype: torch.dtype, *, plain: bool = False
) -> tuple[Run, Tensor]:
    """plain: without gates, a bias and an activation"""
    weight, bias = draw(channels, kernel), draw(channels, seed=1)
    source, before, after = (wide(tokens, channels, dtype, seed) for seed in (2, 3, 4))
    gates = (None, None) if plain else (before, after)
    one = convolution(weight) if plain else convolution(weight, bias, "silu")
    state = draw(SLOTS, channels, kernel - 1, dtype=state_dtype, seed=5)

    def run(ops: BoundKernels, recurrence: Recurrence, state: Tensor, out: Tensor) -> None:
        ops.convolve(source, one, state, recurrence, out, *gates)

    return run, state


def delta_heads(key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> GatedDelta:
    decay, bias = -draw(value_heads, seed=7).exp(), draw(value_heads, seed=8)
    return delta_rule(key_heads, value_heads, key_dim, value_dim, decay, bias)


def scan_heads(heads: int, head_dim: int, groups: int, state_size: int, **limits: float) -> SelectiveScan:
    decay, bias, skip = -draw(heads, seed=7).exp(), draw(heads, seed=8), draw(heads, seed=9)
    return scan(heads, head_dim, groups, state_size, decay, bias, skip, **limits)


CASES: dict[str, Callable[[int, torch.dtype], tuple[Run, Tensor]]] = {
    "gated delta": lambda tokens, dtype: delta_case(delta_heads(2, 4, 8, 10), tokens, dtype, dtype),
    "scan": lambda tokens, dtype: scan_case(scan_heads(4, 10, 2, 24, step_min=0.2, step_max=2.0), tokens, dtype, dtype),
    "convolution": lambda tokens, dtype: convolution_case(40, 4, tokens, dtype, dtype),
    "plain convolution": lambda tokens, dtype: convolution_case(40, 3, tokens, dtype, dtype, plain=True),
}
"""With heads that share keys, or B and C, and with limits of the steps of a scan."""
EVERY = list(product(CASES, STEPS, DTYPES))


@pytest.mark.parametrize("way", sampled(EVERY, 30, keep=[way for way in EVERY if way[2] == torch.float32]), ids=str)
def test_equals_torch(way: tuple[str, str, torch.dtype]) -> None:
    """Guards steps of all kinds: slots, padding, snapshots, columns of a buffer, chunks shorter than a kernel."""
    name, steps, dtype = way
    tokens = rows_of(STEPS[steps])
    run, state = CASES[name](tokens, dtype)
    check(run, STEPS[steps], state, blank(tokens, 40, dtype))


@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (80, 96), (128, 80), (256, 40)])
def test_sizes(rows: int, columns: int) -> None:
    """Guards heads of several tiles, and of sizes that fill none: [key_dim, value_dim], [head_dim, state_size]."""
    for (run, state), width in (
        (delta_case(delta_heads(2, 2, rows, columns), 3, torch.float32, torch.float32), columns),
        (scan_case(scan_heads(2, columns, 1, rows), 3, torch.float32, torch.float32), columns),
    ):
        check(run, [Chunk(2, 3), Chunk(1, 0)], state, blank(3, 2 * width, torch.float32))


def test_states_of_another_type() -> None:
    """Guards states that are more exact, or less, than the rest of the model."""
    chunks = STEPS["snapshots"]
    tokens = rows_of(chunks)
    for dtype, state_dtype in ((torch.float16, torch.float32), (torch.float32, torch.float16)):
        out = blank(tokens, 40, dtype)
        for run, state in (
            delta_case(delta_heads(1, 2, 12, 20), tokens, dtype, state_dtype),
            scan_case(scan_heads(4, 10, 2, 24), tokens, dtype, state_dtype),
            convolution_case(40, 4, tokens, dtype, state_dtype),
        ):
            check(run, chunks, state, out)


def test_small_steps_are_exact() -> None:
    """Guards steps of 0.001 and less, as of many trained models: log(1 + x) loses the digits of a small x."""
    step_bias: Any = torch.tensor([-7.0, -15.0], device=DEVICE)
    heads = replace(scan_heads(2, 4, 1, 8), step_bias=step_bias)
    run, state = scan_case(heads, 3, torch.float32, torch.float32)
    found, expected = (
        results(run, ops, [Chunk(3, 0)], 0 * state, blank(3, 8, torch.float32))[1][0]
        for ops in (BoundKernels(by_triton(DEVICE)), BoundKernels(by_torch()))
    )
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize(("groups", "size"), [(1, 40), (3, 24), (2, 128)])
def test_gated_norm(groups: int, size: int, gate_first: bool, dtype: torch.dtype) -> None:
    """Guards both orders of gate and norm, groups with weights of their own, and columns of wider buffers."""
    source, gate = (wide(5, groups * size, dtype, seed) for seed in (0, 1))
    norm = NormWeights("rms", 0.01, 1 + draw(groups * size, seed=2))
    found, expected = blank(5, groups * size, dtype), blank(5, groups * size, dtype)
    for ops, out in ((BoundKernels(by_triton(DEVICE)), found), (BoundKernels(by_torch()), expected)):
        ops.gated_norm(source, gate, norm, groups, out, gate_first=gate_first)
    torch.testing.assert_close(found, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_company_changes_no_bit(name: str, dtype: torch.dtype) -> None:
    """Guards rows and states of a chunk against its place in a step, and against what else is in it."""
    chunks = [Chunk(3, 2), Chunk(1, 0), Chunk(37, 5, (7, 6))]
    run, state = CASES[name](rows_of(chunks), dtype)
    ops, out = BoundKernels(by_triton(DEVICE)), blank(rows_of(chunks), 40, dtype)
    together, after = results(run, ops, chunks, state, out)
    for number, chunk in enumerate(chunks):
        alone = [Chunk(one.tokens, one.slot if one is chunk else -1, one.snapshot) for one in chunks]
        rows, states = results(run, ops, alone, state, out)
        begin = rows_of(chunks[:number])
        assert torch.equal(rows, together[begin : begin + chunk.tokens])
        kept = [slot for slot in (chunk.slot, chunk.snapshot[1]) if slot >= 0]
        assert torch.equal(states[kept], after[kept])


@pytest.mark.parametrize("name", CASES)
def test_a_decoded_token_beside_chunks_has_the_same_bits(name: str) -> None:
    """Guards steps that only decode, which launch fewer kernels, or others."""
    chunks = [Chunk(1, 2), Chunk(1, 0), Chunk(20, 5)]
    run, state = CASES[name](rows_of(chunks), torch.float16)
    ops, out = BoundKernels(by_triton(DEVICE)), blank(rows_of(chunks), 40, torch.float16)
    rows, states = results(run, ops, chunks, state, out)
    decoded, after = results(run, ops, [*chunks[:2], *[Chunk(1, -1)] * 20], state, out)
    assert torch.equal(decoded, rows[:2]) and torch.equal(after[[0, 2]], states[[0, 2]])


@pytest.mark.parametrize("name", CASES)
def test_cutting_a_prompt_changes_no_bit(name: str) -> None:
    """Guards prompts that are cut at a multiple of 64 tokens, where the engine cuts them."""
    run, state = CASES[name](75, torch.float16)
    ops, out = BoundKernels(by_triton(DEVICE)), blank(75, 40, torch.float16)
    whole, expected = results(run, ops, [Chunk(75, 3)], state, out)
    first, between = results(run, ops, [Chunk(64, 3), Chunk(11, -1)], state, out)
    last, found = results(run, ops, [Chunk(64, -1), Chunk(11, 3)], between, out)
    assert torch.equal(torch.cat([first, last]), whole) and torch.equal(found, expected)


@pytest.mark.parametrize("name", ["gated delta", "scan"])
def test_tiles_are_exact(name: str) -> None:
    """Guards products of 16-bit numbers with states of float32: rounded states would be wrong by a thousand times."""
    chunks = [Chunk(48, 3, (37, 4)), Chunk(32, 1)]
    run, state = CASES[name](rows_of(chunks), torch.float16)
    check(run, chunks, state.float() + 0.1, blank(rows_of(chunks), 40, torch.float32))


def test_tiles_of_equal_keys() -> None:
    """Guards prompts that repeat a token: the systems of tiles are then as far from 1 as they can be."""
    decay: Any = torch.full((2,), -1e-4, device=DEVICE)
    heads = replace(delta_heads(1, 2, 16, 16), decay_log=decay)
    qkv = draw(1, 64, dtype=torch.float16).repeat(64, 1)
    qkv[:, 32:] = draw(64, 32, dtype=torch.float16, seed=1)
    controls = torch.full((64, 4), 3.0, dtype=torch.float16, device=DEVICE)

    def run(ops: BoundKernels, recurrence: Recurrence, state: Tensor, out: Tensor) -> None:
        ops.gated_delta(qkv, controls, heads, state, recurrence, out)

    check(run, [Chunk(64, 0)], draw(1, 2, 16, 16, seed=2), blank(64, 32, torch.float32))
