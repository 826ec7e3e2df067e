"""Guards products with quantized weights: formats, the rounding of rows, and the loops of every instruction set."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from cbatch.kernels.cpu import jit
from cbatch.kernels.cpu.activation import ActivationParams
from cbatch.kernels.cpu.instruction_sets import FEATURES, INSTRUCTION_SETS
from cbatch.kernels.cpu.matmul import instructions, linear, microkernel
from cbatch.kernels.cpu.matmul import quantized as loops
from cbatch.kernels.cpu.matmul.formats import (
    CPU_FORMATS,
    OFFSETS,
    left_bytes_of,
    matrix_bytes,
    pack_integers,
    unpack_column,
)
from cbatch.kernels.cpu.matmul.linear import ADD, WRITE, PackedMatrix, new_linear_workspace
from cbatch.kernels.cpu.matmul.microkernel import Ahead, Rows
from cbatch.kernels.cpu.matmul.quantized import (
    left_group_bytes,
    multiply_quantized,
    quantize_row,
    quantized_row_bytes,
)
from cbatch.kernels.cpu.work_queue import Worker, lone_worker
from cbatch.kernels.formats import (
    GROUP,
    INT4,
    INT4_ZEROS,
    INT8,
    IQ4_NL,
    LEVELS,
    MIDDLE,
    MXFP4,
    NVFP4,
    Integers,
    group_of,
    quantized,
)
from tests.support.kernels import callable_kernel
from tests.support.samples import sampled

pytestmark = pytest.mark.kernels

NOTHING = np.empty(0, np.float32)
COLUMNS, PADDED = 70, 96
QUANTIZED = range(INT8, len(CPU_FORMATS))
unpack, quantize = callable_kernel(unpack_column), callable_kernel(quantize_row)
multiply_loop = callable_kernel(multiply_quantized)


@jit.entry
def matmul(worker: Worker, a: Any, matrix: Any, out: Any, mode: int, workspace: Any) -> None:
    linear.matmul(worker, 0, a, matrix, out, mode, ActivationParams(0, matrix.bias), workspace)


def bfloat16(numbers: NDArray[np.float32]) -> NDArray[np.uint16]:
    return (numbers.view(np.uint32) >> 16).astype(np.uint16)


def as_float(numbers: NDArray[np.uint16]) -> NDArray[np.float64]:
    return (numbers.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def rows_of(count: int, depth: int) -> NDArray[np.uint16]:
    return bfloat16(np.random.default_rng(depth).standard_normal((count, depth), dtype=np.float32))


def packed_of(kind: int, *parts: Any) -> NDArray[np.uint8]:
    return pack_integers(kind, Integers.of_arrays(*parts))


def draw(kind: int, depth: int) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """A matrix [columns, depth] packed, and its numbers."""
    generator, group = np.random.default_rng(depth), group_of(kind)
    groups = -(-depth // group)
    low, high = (-127, 128) if kind == INT8 else (0, 16)
    integers = generator.integers(low, high, (COLUMNS, depth))
    scales = generator.uniform(0.5, 2, (COLUMNS, groups)).astype(np.float16)
    zeros = generator.uniform(0, 15, (COLUMNS, groups)).astype(np.float16) if kind == INT4_ZEROS else None

    def spread(numbers: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
        return np.repeat(numbers.astype(np.float64), group, axis=1)[:, :depth]

    if kind == MXFP4:
        scales = np.exp2(generator.integers(-3, 4, (COLUMNS, groups)).astype(np.float32))
    centred = np.array(LEVELS[kind])[integers] if kind in LEVELS else integers - 8 * (kind == INT4)
    centred = centred if zeros is None else integers - spread(zeros)
    return packed_of(kind, integers, scales, zeros), centred * spread(scales)


def multiply(
    a: NDArray[Any], packed: NDArray[np.uint8], kind: int, left_bytes: int, out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """a [rows, depth] times the matrix; added to `out` if it is given."""
    mode, out = WRITE if out is None else ADD, np.full((len(a), PADDED), np.nan, np.float32) if out is None else out
    workspace = new_linear_workspace(1, [kind], a.shape[1], rows=len(a), left_bytes=left_bytes)
    workspace.rows[:] = workspace.few_rows[:] = 0xFF  # NaN, where nothing is written
    matrix = PackedMatrix(packed, 0, kind, NOTHING, NOTHING)
    matmul(lone_worker(), a, matrix, out, mode, workspace)
    return out[:, :COLUMNS]


SETS = [each.name for each in INSTRUCTION_SETS if each.needs <= FEATURES and each.name not in ("amx", "avx512bf16")]
"""Those that this processor has; the first two multiply integers as the third does."""

KEPT = [(name, kind) for name, kind in product(("avx2", "neon-i8mm", "neon-dotprod"), (INT8, INT4)) if name in SETS]


@pytest.fixture(params=sampled(product(SETS, QUANTIZED), 10, keep=KEPT), ids=str)
def kind_of_loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A format by the loops of an instruction set, compiled anew."""
    name, kind = request.param
    chosen = next(each for each in INSTRUCTION_SETS if each.name == name)
    for module in (instructions, microkernel, loops):
        monkeypatch.setattr(module, "CHOSEN", chosen)
    monkeypatch.setattr(loops, "MAX_ROWS", min(6, chosen.rows(panels=1)))
    monkeypatch.setattr(loops, "ROW_COUNTS", tuple(range(1, loops.MAX_ROWS + 1)))
    monkeypatch.setattr(jit.compat, "keep_compiled", lambda *_, **__: None)
    loops.quantized_address.cache_clear()
    yield kind
    loops.quantized_address.cache_clear()


def test_products(kind_of_loops: int) -> None:
    """Guards every instruction set, depths that end within a block or a group, every number of rows, and columns that
    are read back.
    """
    kind = kind_of_loops
    for depth, left_bytes in product((16, 80, 336), (1, 2)):
        packed, numbers = draw(kind, depth)
        assert packed.nbytes == matrix_bytes(kind, COLUMNS, depth)
        a = rows_of(29, depth)
        found, expected = multiply(a, packed, kind, left_bytes), as_float(a) @ numbers.T
        sizes = np.linalg.norm(as_float(a), axis=1)[:, None] * np.linalg.norm(numbers, axis=1)
        assert (np.abs(found - expected) / sizes).max() < (8e-3 if left_bytes == 1 else 3e-5)
        for rows in range(1, 14):
            assert np.array_equal(multiply(a[:rows].copy(), packed, kind, left_bytes), found[:rows])
        for column in (0, 15, 16, 33, COLUMNS - 1):
            out = np.full(depth, np.nan, np.float32)
            unpack(packed, 0, kind, column, np.float32(2), out)
            assert np.allclose(out, 2 * numbers[column], rtol=1e-6)
        before = np.ones((29, PADDED), np.float32)
        assert np.allclose(multiply(a, packed, kind, left_bytes, before), found + 1, rtol=1e-5, atol=1e-4)


def test_sums_of_integers_are_exact(kind_of_loops: int) -> None:
    """Guards the integers of each instruction set: for all extremes the sums of groups are those of Python."""
    kind, group, generator = kind_of_loops, group_of(kind_of_loops), np.random.default_rng(kind_of_loops)
    low, high = (-128, 128) if kind == INT8 else (0, 16)
    drawn = generator.choice([low, low + 1, high - 2, high - 1, (low + high) // 2], (32, 3 * group))
    drawn[:2] = np.array([[low], [high - 1]])
    meant = np.array(LEVELS[kind])[drawn] if kind in LEVELS else drawn - MIDDLE * (kind == INT4)
    ones = np.ones((32, 3), np.float32)
    packed = packed_of(kind, drawn, ones, 0 * ones if kind == INT4_ZEROS else None)
    for left_bytes in {left_bytes_of(kind, 1), 2}:
        most, dtype = (127, np.int8) if left_bytes == 1 else (32767, np.int16)
        rows = generator.choice([-most, -most + 1, 0, most - 1, most], (loops.MAX_ROWS, 3 * group))
        rows[0] = most
        memory = np.zeros((len(rows), quantized_row_bytes(kind, left_bytes, 3 * group)), np.uint8)
        for row, numbers in enumerate(rows.reshape(-1, 3, group)):
            total = numbers.sum(axis=1)
            words = (-total).astype(np.float32).view(np.int32) if kind == INT4_ZEROS else -OFFSETS[kind] * total
            order = numbers if left_bytes == 1 else numbers.reshape(3, -1, 4)[..., [0, 2, 1, 3]].reshape(3, -1)
            parts = (
                order.astype(dtype).view(np.uint8),
                ones[:1].T.copy().view(np.uint8),
                words.astype(np.int32)[:, None],
            )
            groups = np.concatenate([*parts[:2], parts[2].view(np.uint8)], axis=1)
            memory[row, : groups.size] = groups.reshape(-1)
        exact = np.einsum("rgk,cgk->rgc", rows.reshape(-1, 3, group), meant.reshape(-1, 3, group))
        expected = np.zeros((len(rows), 32), np.float32)
        for part in range(3):
            expected += exact[:, part].astype(np.float32)
        for count in range(1, len(rows) + 1):
            out = np.full((count, 32), np.nan, np.float32)
            left, target = Rows(memory.ctypes.data, memory.shape[1]), Rows(out.ctypes.data, 128)
            address = loops.quantized_address(kind, left_bytes)
            multiply_loop(address, left, packed.ctypes.data, 3, Ahead(0, 0), target, count, 0)
            assert np.array_equal(out, expected[:count])


def test_extreme_sums(kind_of_loops: int) -> None:
    """Guards the sums against overflow: all weights and all numbers of a row are as large as they can be."""
    kind = kind_of_loops
    for sign, left_bytes in product((-1, 1), (1, 2)):
        a = bfloat16(np.full((1, 512), sign, np.float32))
        ones = np.ones((COLUMNS, 512 // group_of(kind)))
        zeros = 0 * ones if kind == INT4_ZEROS else None
        most = {INT8: -127, INT4: 0, INT4_ZEROS: 15, MXFP4: 15, IQ4_NL: 0, NVFP4: 15}[kind]
        weight = LEVELS[kind][most] if kind in LEVELS else most - 8 * (kind == INT4)
        packed = packed_of(kind, np.full((COLUMNS, 512), most), ones, zeros)
        assert np.allclose(multiply(a, packed, kind, left_bytes), sign * weight * 512, rtol=1e-5)


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: CPU_FORMATS[kind])
def test_nan_infinity_and_tiny_numbers_stay_in_their_rows(kind: int) -> None:
    """Guards rows with NaN or infinity, which must come out as NaN, and tiny ones, which may become 0."""
    a = rows_of(9, 64)
    packed, _ = draw(kind, 64)
    clean = multiply(a, packed, kind, 1)
    for row, value in enumerate([float("nan"), float("inf"), float("-inf")]):
        a[row, 5] = torch.tensor([value]).bfloat16().view(torch.uint16).item()
    a[3] = torch.tensor([1e-38]).bfloat16().view(torch.uint16).item()
    found = multiply(a, packed, kind, 1)
    assert np.isnan(found[:3]).all() and (found[3] == 0).all() and np.array_equal(found[4:], clean[4:])


@pytest.mark.parametrize("left_bytes", [1, 2])
@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: CPU_FORMATS[kind])
def test_rows_as_integers(kind: int, left_bytes: int) -> None:
    """Guards the memory of a row number by number: whole groups, the end of a depth, both types, marks, more of them
    than there is memory for, nothing behind it.
    """
    outlier, many, each = rows_of(1, 96)[0], np.full(192, 1e-3, np.float32), group_of(kind)
    outlier[[3, 40]] = bfloat16(np.array([200, -3e4], np.float32))
    many[:128] = np.random.default_rng(2).uniform(0.9, 1, 128)
    for row in (rows_of(1, 80)[0], np.random.default_rng(1).standard_normal(75, dtype=np.float32), outlier, many):
        numbers = row if row.dtype == np.float32 else as_float(row).astype(np.float32)
        memory = np.full(quantized_row_bytes(kind, left_bytes, len(row)), 0xAA, np.uint8)
        quantize(row, memory, kind, left_bytes)
        padded = np.pad(numbers, (0, -len(numbers) % each)).reshape(-1, each)
        size = left_group_bytes(kind, left_bytes)
        limit, end = loops._OUTLIER * np.sqrt(np.abs(padded).max(axis=1)).mean() ** 2, len(padded) * size
        expected: list[int] = []
        marks = memory[end + 4 :][: 12 * memory[end:][:4].view(np.int32)[0] if left_bytes == 1 else 0].reshape(-1, 12)
        high = dict(
            zip(
                marks[:, :4].copy().view(np.int32)[:, 0].tolist(),
                marks[:, 4:8].view(np.int8).astype(np.int32),
                strict=True,
            )
        )
        for number, part in enumerate(padded):
            group, largest = memory[number * size : (number + 1) * size], np.abs(part).max()
            scale, word = group[each * left_bytes :][:8].reshape(2, 4)
            if left_bytes == 1:
                quads, first = np.abs(part).reshape(-1, 4).max(axis=1), number * each // 4
                found = group[:each].view(np.int8).astype(np.int32)
                is_marked = (quads > limit) & (len(expected) <= len(padded))
                for quad in np.flatnonzero(is_marked).tolist():
                    found[4 * quad : 4 * quad + 4] += 256 * high[first + quad]
                    assert marks[len(expected), 8:].view(np.float32)[0] == 256 * scale.view(np.float32)[0]
                    expected.append(first + quad)
                unit = max(np.where(is_marked, 0, quads).max() / np.float32(127), largest / np.float32(127 * 257))
            else:
                unit = largest / np.float32(32767)
                found = group[: 2 * each].view(np.int16).reshape(-1, 4)[:, [0, 2, 1, 3]].reshape(-1)
            assert np.abs(found - part / unit).max() < 0.501 and np.isclose(scale.view(np.float32)[0], unit, rtol=1e-6)
            total = int(found.sum(dtype=np.int64))
            if kind == INT4_ZEROS:
                assert word.view(np.float32)[0] == -total
            else:
                assert word.view(np.int32)[0] == -OFFSETS[kind] * total
        assert list(high) == expected and len(marks) == len(expected)
        most = 4 + 12 * (len(padded) + 8) if left_bytes == 1 else 0  # what is written of marks, or may be
        assert (memory[end + most :] == 0xAA).all()


def test_outliers_cost_others_nothing(kind_of_loops: int) -> None:
    """Guards what models lose: a few channels of a row that are 100 times as large round no other number coarsely.

    The row has the same bits alone as beside others, whose outliers lie elsewhere.
    """
    kind = kind_of_loops
    packed, numbers = draw(kind, 336)
    a = as_float(rows_of(13, 336)).astype(np.float32)
    a[:, [7, 100]] *= 100
    a[np.arange(13), 5 * np.arange(13) + 130] *= 1000
    a = as_float(bfloat16(a)).astype(np.float32)
    found, expected = multiply(bfloat16(a), packed, kind, 1), a.astype(np.float64) @ numbers.T
    bulk = np.median(np.abs(a)) * np.sqrt(336) * np.sqrt((numbers**2).mean())
    assert np.abs(found - expected).mean() / bulk < 0.02
    for row in range(13):
        assert np.array_equal(multiply(bfloat16(a[row : row + 1]), packed, kind, 1)[0], found[row])


def test_scales_that_float16_does_not_have() -> None:
    """Guards the scales of MXFP4: every power of 2 that its 8 bits name, down to those that float32 denormalizes."""
    scales = np.ldexp(np.float32(1), np.array([[-128, -40], [17, 120]]))
    packed = packed_of(MXFP4, np.full((2, 64), 7), scales)
    for column in (0, 1):
        out = np.empty(64, np.float32)
        unpack(packed, 0, MXFP4, column, np.float32(0.5), out)
        assert np.array_equal(out, np.repeat(6 * scales[column].astype(np.float64), GROUP).astype(np.float32))
    rows = np.eye(64, dtype=np.float32)[[0, 32]]
    assert np.allclose(multiply(bfloat16(rows), packed, MXFP4, 1)[:, :2], 12 * scales.T, rtol=1e-6)


@pytest.mark.parametrize("kind", [INT8, INT4], ids=lambda kind: CPU_FORMATS[kind])
def test_rounding_of_weights(kind: int) -> None:
    """Guards the integers of a weight: within one step of it, half a step for most, and zeros stay zeros."""
    weight = torch.randn(40, 80, generator=torch.Generator().manual_seed(0))
    weight[3, :32] = 0
    integers, scales, _ = quantized(weight, kind)
    steps = scales.repeat_interleave(GROUP, dim=1)[:, :80]
    rounded = (integers.float() - 8 * (kind == INT4)) * steps
    assert (rounded[3, :32] == 0).all()
    assert integers.min() >= (-127 if kind == INT8 else 0) and integers.max() <= (127 if kind == INT8 else 15)
    errors = (rounded - weight).abs() / steps.abs().clamp(min=1e-9)
    assert errors.max() <= 1.01 and errors.median() < 0.3


def test_the_first_of_the_largest_numbers_decides() -> None:
    """Guards int4 groups that have their largest number with both signs: llama.cpp takes the first for the scale."""
    weight = torch.randint(-3, 4, (64, 96), generator=torch.Generator().manual_seed(0)).float()
    scales = quantized(weight, INT4).scales
    for group, scale in zip(weight.view(-1, GROUP).tolist(), scales.flatten().tolist(), strict=True):
        assert scale == max(group, key=abs) / -8
