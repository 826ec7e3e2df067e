"""Guards attention over the paged cache against the reference, on ragged batches with NaN in all unused places."""

from __future__ import annotations

import random
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cbatch.attention.base import AttentionBackend
from cbatch.attention.cpu import CpuAttention
from cbatch.attention.reference import ReferenceAttention
from cbatch.kernels.cpu.paged_kv import SPLIT, plan_attention
from cbatch.kernels.cpu.tensors import fits
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.kv_cache import U8, KVCache, LayerShape
from tests.support import attention_cases
from tests.support.attention_cases import AttentionCase

pytestmark = pytest.mark.kernels

CPU = torch.device("cpu")
NUM_BLOCKS = 64
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.exhaustive)]
"""Kernels are compiled for each, which takes long; tests of models run both."""

CASES = {
    "plain": AttentionCase(LayerShape(2, 64, 64)),
    "grouped heads": AttentionCase(LayerShape(3, 64, 64), group=3),
    "one head for many": AttentionCase(LayerShape(1, 32, 32), group=16),
    "odd sizes": AttentionCase(LayerShape(2, 80, 48), group=2),
    "large blocks": AttentionCase(LayerShape(2, 32, 32), group=2, block_size=128),
    "blocks of 48": AttentionCase(LayerShape(2, 32, 32), group=2, block_size=48),
    "window": AttentionCase(LayerShape(2, 32, 32), group=2, window=21),
    "chunks": AttentionCase(LayerShape(2, 32, 32), group=2, chunk=21),
    "softcap": AttentionCase(LayerShape(2, 32, 32), group=2, softcap=3.0),
    "sinks": AttentionCase(LayerShape(2, 32, 32), group=4, sinks=True),
    "all at once": AttentionCase(LayerShape(1, 256, 256), group=2, block_size=32, window=70, softcap=20.0, sinks=True),
}


def make_batches(case: AttentionCase, seed: int) -> list[RaggedBatch]:
    """Sequences in two steps: first chunks of all, then decoding, further chunks, and new ones beside them."""
    chooser = random.Random(seed)
    blocks = list(range(NUM_BLOCKS))
    chooser.shuffle(blocks)
    tables, steps = [], []
    lengths = [chooser.choice((1, 2, 15, 16, 17, 40, 63, 64, 65, 120, 190)) for _ in range(5)]
    for length in lengths:
        tables.append([blocks.pop() for _ in range(-(-(length + 40) // case.block_size)) if blocks] or [0])
    capacity = [len(table) * case.block_size for table in tables]
    first = [(row, 0, min(length, capacity[row])) for row, length in enumerate(lengths)]
    second = [(row, stop, min(stop + chooser.choice((1, 1, 1, 7, 30)), capacity[row])) for row, _, stop in first]
    for slices in (first, [one for one in second if one[2] > one[1]]):
        steps.append(make_batch(slices, tables, case.block_size))
    return steps


make_batch = partial(attention_cases.make_batch, device=CPU)


def poisoned_cache(
    backend: AttentionBackend, layer: LayerShape, num_blocks: int, block_size: int, dtype: torch.dtype
) -> KVCache:
    """A cache in which nobody wrote: every number is NaN, and of bytes every scale."""
    kv_dtype = backend.kv_dtype or dtype
    kv_cache = KVCache([backend.block_shapes(layer, block_size, kv_dtype)], num_blocks, block_size, kv_dtype, CPU)
    for tensor in (*kv_cache.keys, *kv_cache.values):
        tensor.fill_(255 if kv_dtype == U8 else float("nan"))
    return kv_cache


def run(
    backend: AttentionBackend, case: AttentionCase, batches: list[RaggedBatch], dtype: torch.dtype, of: torch.dtype
) -> list[Tensor]:
    """Outputs [T, heads, value_dim] of each step, computed in a type from random numbers of another."""
    kv_cache = poisoned_cache(backend, case.layer, NUM_BLOCKS, case.block_size, dtype)
    generator = torch.Generator().manual_seed(0)
    layer, heads = case.layer, case.layer.heads * case.group
    sizes = (heads, layer.key_dim), (layer.heads, layer.key_dim), (layer.heads, layer.value_dim)
    sinks = torch.randn(heads, generator=generator) if case.sinks else None
    outputs = []
    for batch in batches:
        query, key, value = (torch.randn(len(batch.ids), *size, generator=generator).to(of).to(dtype) for size in sizes)
        metadata = backend.prepare(batch, case.block_size)
        backend.store_kv(kv_cache.keys[0], kv_cache.values[0], key, value, metadata)
        options = case.options | {"sinks": sinks}
        outputs.append(backend.attend(query, kv_cache.keys[0], kv_cache.values[0], metadata, **options).float())  # type: ignore[arg-type]
    return outputs


@pytest.mark.parametrize("kv_dtype", [None, U8], ids=["", "bytes"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name: str, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    """Guards kernels in every form of attention, in chunks that end anywhere; NaN in unused places must not show."""
    case = CASES[name]
    assert fits([case.layer], case.block_size, dtype, kv_dtype)
    tolerance = 2e-2 if dtype != torch.float32 else 2e-5 if kv_dtype is None else 5e-4
    for seed in range(3):
        batches = make_batches(case, seed)
        found = run(CpuAttention(kv_dtype), case, batches, dtype, dtype)
        expected = run(ReferenceAttention(kv_dtype), case, batches, torch.float32, dtype)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("seed", range(20))
def test_tasks_cover_every_token_once(seed: int) -> None:
    """Guards the plan: each token sees all before it in its own blocks, long rows in adjacent splits, those that are
    common to several sequences once, expensive tasks first."""
    chance, group = random.Random(seed), random.Random(seed).choice([1, 3, 8, 100])
    starts = [chance.choice([0, 3, SPLIT - 1, SPLIT, 2 * SPLIT, 5 * SPLIT // 2]) for _ in range(chance.randint(1, 30))]
    stops = [start + chance.choice([1, 1, 1, 2, chance.randint(3, 200)]) for start in starts]
    total = sum(stops) - sum(starts)
    tokens, blocks = np.arange(total), SPLIT // 64
    beginnings = [chance.choices(range(3), k=4) for _ in starts]  # sequences whose splits are alike in some places
    tables = np.array(
        [[9 * (3 * i + of[i]) + j for i in range(4) for j in range(blocks)] for of in beginnings], np.int32
    )
    batch = RaggedBatch(tokens, tokens, tokens, tokens[:0], tables, starts, stops, torch.device("cpu"))
    plan = plan_attention(batch, 64, group, group, 4)
    seen: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    whole: list[tuple[int, ...]] = []
    for sequence, first, tokens, begin, end, member in plan.tasks.tolist():
        members = plan.members[member : member + tokens].tolist() if member >= 0 else []
        for number, part in members:
            seen.setdefault((number, 0), []).append((begin, end, part))
            assert (tables[number, begin // 64 : end // 64] == tables[sequence, begin // 64 : end // 64]).all()
        positions = [starts[number] for number, _ in members]
        assert positions == sorted(positions)
        if members and end - begin == SPLIT:
            whole += [(begin, *tables[sequence, begin // 64 : end // 64])] * (tokens < max(1, 96 // group))
        for token in range(first, first + tokens) if member < 0 else ():
            seen.setdefault((sequence, token), []).append((begin, end - (first + tokens - 1 - token), -1))
    assert len(set(whole)) == len(whole), "sequences with the same blocks are in two tasks"
    wanted = {(number, token) for number in range(len(starts)) for token in range(stops[number] - starts[number])}
    assert seen.keys() == wanted
    parts = {int(row): list(range(first, first + count)) for row, first, count in plan.merges.tolist()}
    for (sequence, token), found in seen.items():
        found.sort()
        assert found[0][0] == 0 and found[-1][1] == starts[sequence] + token + 1
        assert all(before[1] == after[0] for before, after in pairwise(found))
        numbers = [part for _, _, part in found]
        assert numbers == parts.pop(int(plan.first_rows[sequence]) + token, [-1])
    chunks = list(pairwise(plan.chunks.tolist()))
    assert [chunks[0][0], chunks[-1][1]] == [0, total] and all(start < stop for start, stop in chunks)
    owner = np.repeat(np.arange(len(starts)), np.subtract(stops, starts))
    place = np.concatenate([np.arange(start, stop) for start, stop in zip(starts, stops, strict=True)])
    for start, stop in chunks:
        in_one_panel = len({(owner[row], place[row] // 16) for row in range(start, stop)}) == 1
        assert in_one_panel or (stop - start <= 8 and len(set(owner[start:stop])) == stop - start)
    costs = (plan.tasks[:, 4] - plan.tasks[:, 3]) * plan.tasks[:, 2]
    assert not parts and (np.diff(costs) <= 0).all() and plan.most_tokens == plan.tasks[:, 2].max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("key_dim, cuts", [(64, [0, 48, 70]), (44, [0, 16, 17, 21, 53, 64, 70])])
def test_every_number_is_stored_in_its_place(key_dim: int, cuts: list[int], dtype: torch.dtype) -> None:
    """Guards panels that are transposed whole, tokens that come alone, and keys that do not fill their last vector."""
    layer, backend, generator = LayerShape(2, key_dim, 32), CpuAttention(), torch.Generator().manual_seed(0)
    kv_cache = KVCache([backend.block_shapes(layer, 32, dtype)], 4, 32, dtype, CPU)
    key, value = (torch.randn(cuts[-1], 2, dim, generator=generator).to(dtype) for dim in (key_dim, 32))
    for tensor in (*kv_cache.keys, *kv_cache.values):
        tensor.fill_(float("nan"))
    for start, stop in pairwise(cuts):  # beside another sequence that decodes
        batch = make_batch([(1, start, start + 1), (0, start, stop)], [[2, 0, 3], [1, 1, 1]], 32)
        new = (torch.cat([part[:1] + 1, part[start:stop]]) for part in (key, value))
        backend.store_kv(kv_cache.keys[0], kv_cache.values[0], *new, backend.prepare(batch, 32))
    keys, values = (part[0][[2, 0, 3]] for part in (kv_cache.keys, kv_cache.values))
    keys = keys.permute(0, 2, 4, 1, 3, 5).reshape(96, 2, key_dim)  # block, token; head; number and its place in a pair
    values = values.permute(0, 3, 5, 1, 2, 4).reshape(96, 2, 32)
    assert torch.equal(keys[: cuts[-1]], key) and torch.equal(values[: cuts[-1]], value)
    assert keys[cuts[-1] :].isnan().all() and not values[cuts[-1] : (cuts[-1] + 1) // 2 * 2].any()


@pytest.mark.parametrize("window", [None, SPLIT + 70, 90])
@pytest.mark.parametrize("heads", [3, 9, 99])
def test_common_blocks_change_no_bit(window: int | None, heads: int) -> None:
    """Guards sequences that read the same blocks together: each gets what it gets alone, wherever it is."""
    layer, backend, generator = LayerShape(3, 32, 32), CpuAttention(), torch.Generator().manual_seed(0)
    shapes = backend.block_shapes(layer, 32, torch.float32)
    lengths = [2 * SPLIT + 40, 2 * SPLIT, 3 * SPLIT + 1, SPLIT + 3, 2 * SPLIT + 200, 3 * SPLIT - 1]
    common, blocks = 2 * SPLIT // 32, -(-max(lengths) // 32)
    table = [
        [*range(common), *range(common + number * blocks, common + (number + 1) * blocks)][:blocks]
        for number in range(len(lengths))
    ]
    kv_cache = KVCache([shapes], common + blocks * len(lengths), 32, torch.float32, CPU)
    for number, length in enumerate(lengths):
        key, value = (torch.randn(length, 3, 32, generator=generator) for _ in "kv")
        metadata = backend.prepare(make_batch([(number, 0, length)], table, 32), 32)
        backend.store_kv(kv_cache.keys[0], kv_cache.values[0], key, value, metadata)
    query = torch.randn(len(lengths), heads, 32, generator=generator)
    options = {"scale": 0.2, "window": window, "sinks": torch.ones(heads)}

    def attend(numbers: list[int]) -> Tensor:
        batch = make_batch([(number, lengths[number] - 1, lengths[number]) for number in numbers], table, 32)
        metadata = backend.prepare(batch, 32)
        return backend.attend(query[numbers], kv_cache.keys[0], kv_cache.values[0], metadata, **options)  # type: ignore[arg-type]

    numbers = list(range(len(lengths)))
    together = attend(numbers)
    assert together.isfinite().all()
    for number in numbers:
        assert torch.equal(attend([number]), together[number : number + 1])
    assert torch.equal(attend(numbers[::-1]).flip(0), together)


def in_steps(
    backend: AttentionBackend, layer: LayerShape, rows: list[Tensor], cuts: list[int], **options: Any
) -> Tensor:
    """Attention of a sequence that is cut into steps. rows: its queries, keys and values"""
    kv_cache = KVCache([backend.block_shapes(layer, 32, torch.float32)], NUM_BLOCKS, 32, torch.float32, CPU)
    parts = []
    for start, stop in pairwise(cuts):
        metadata = backend.prepare(make_batch([(0, start, stop)], [list(range(54))], 32), 32)
        query, key, value = (part[start:stop] for part in rows)
        backend.store_kv(kv_cache.keys[0], kv_cache.values[0], key, value, metadata)
        parts.append(backend.attend(query, kv_cache.keys[0], kv_cache.values[0], metadata, **options))
    return torch.cat(parts)


def drawn_rows(length: int, heads: int, layer: LayerShape) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(length, n, layer.key_dim, generator=generator) for n in (heads, layer.heads, layer.heads)]


@pytest.mark.parametrize("window, shift", [(None, 0.0), (16, 0.0), (16, -4.0), (16, -300.0)])
def test_a_token_has_the_same_bits_however_its_sequence_was_cut(window: int | None, shift: float) -> None:
    """Guards the promise that neither chunks nor neighbours change a result; nor do tiles outside the window, which
    once counted as a score of 0."""
    layer = CASES["grouped heads"].layer
    rows = drawn_rows(150, 9, layer)
    rows[0][..., 0], rows[1][..., 0] = 8, shift  # shifts all scores
    first, *others = (
        in_steps(CpuAttention(), layer, rows, cuts, scale=0.125, window=window)
        for cuts in ([0, 150], [0, 1, 64, 65, 149, 150], [0, 100, 150], list(range(151)))
    )
    assert first.isfinite().all() and all(torch.equal(other, first) for other in others)


@pytest.mark.parametrize("window", [None, 700, 90])
def test_long_rows_are_split(window: int | None) -> None:
    """Guards rows whose splits are computed apart and merged: right, and the same bits as in a chunk of many.

    Splits before a window once gave what another row had left behind.
    """
    layer, cuts = LayerShape(2, 32, 32), [0, 512, 513, 1023, 1024, 1025, 1698, 1699, 1700]
    rows, options = drawn_rows(1700, 4, layer), {"scale": 0.2, "window": window, "sinks": torch.ones(4)}
    expected = in_steps(ReferenceAttention(), layer, rows, [0, 1700], **options)
    whole, cut = (in_steps(CpuAttention(), layer, rows, one, **options) for one in ([0, 1700], cuts))
    torch.testing.assert_close(whole, expected, atol=2e-5, rtol=2e-5)
    assert torch.equal(whole, cut)


def test_nan_in_a_split_shows() -> None:
    """Guards NaN in an early split of a long row, which must come out as NaN."""
    rows = [torch.ones(601, 1, 16) for _ in range(3)]
    rows[1][3] = float("nan")
    assert in_steps(CpuAttention(), LayerShape(1, 16, 16), rows, [0, 600, 601], scale=1.0)[-1].isnan().all()


def test_what_does_not_fit_goes_another_way() -> None:
    """Guards the choice: sizes, blocks and types that the panels cannot hold are not tried."""
    layer = LayerShape(2, 64, 64)
    assert not fits([layer], 8, torch.float32) and not fits([layer], 16, torch.float16)
    assert not fits([layer, LayerShape(2, 64, 12)], 16, torch.float32)
    assert not fits([LayerShape(2, 63, 64)], 16, torch.float32)
