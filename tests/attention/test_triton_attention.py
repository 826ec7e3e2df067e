"""Guards the GPU's attention against the reference, on ragged batches with NaN in all unused places.

Without a GPU the kernels run in Triton's interpreter, which multiplies bfloat16 wrongly: it is tested on a GPU only.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl

from cbatch.attention.base import AttentionBackend
from cbatch.attention.reference import ReferenceAttention
from cbatch.attention.triton import TritonAttention, fits
from cbatch.kernels.triton import attention_decode, attention_metadata, attention_prefill, attention_tile
from cbatch.kernels.triton.attention_decode import DecodeTuning
from cbatch.kernels.triton.attention_metadata import (
    NARROW,
    PrefillMetadata,
    StepBuffers,
    count_splits,
    list_work,
    split_tokens,
)
from cbatch.kernels.triton.attention_prefill import PrefillTuning
from cbatch.runtime.batch import DeviceTokens, ImageRows, RaggedBatch
from cbatch.runtime.kv_cache import LayerShape
from tests.support.attention_cases import AttentionCase, ScheduledChunk, make_batch
from tests.support.device import DEVICE
from tests.support.samples import sampled

pytestmark = [pytest.mark.slow, pytest.mark.kernels]

CPU = torch.device("cpu")
NUM_BLOCKS = 64
SPLIT = 16
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16


CASES = {
    "plain": AttentionCase(LayerShape(2, 64, 64)),
    "grouped heads": AttentionCase(LayerShape(2, 32, 32), group=3, block_size=5),
    "one head for many": AttentionCase(LayerShape(1, 16, 16), group=17),
    "odd sizes": AttentionCase(LayerShape(2, 80, 48), group=2, block_size=7),
    "blocks of one": AttentionCase(LayerShape(1, 128, 128), group=4, block_size=1),
    "window": AttentionCase(LayerShape(1, 32, 32), group=2, window=21),
    "window of one": AttentionCase(LayerShape(1, 16, 32), window=1),
    "wide window": AttentionCase(LayerShape(1, 32, 32), group=2, window=64),
    "softcap": AttentionCase(LayerShape(1, 32, 32), group=2, softcap=3.0),
    "sinks": AttentionCase(LayerShape(1, 32, 32), group=4, sinks=True),
    "all at once": AttentionCase(LayerShape(1, 256, 192), group=2, block_size=32, window=70, softcap=20.0, sinks=True),
}


def backend() -> TritonAttention:
    """Small splits and tiles, so that short sequences have several of them."""
    return TritonAttention(
        DEVICE, DecodeTuning(split=SPLIT, tile_bytes=1024), PrefillTuning(rows=32, tokens=16, warps=4)
    )


def invariant_backend() -> TritonAttention:
    """Small tiles, of which short sequences have several."""
    tuning = PrefillTuning(rows=32, tokens=64, warps=4)  # in float32, a quarter of the tokens
    return TritonAttention(DEVICE, DecodeTuning(split=SPLIT, tile_bytes=1024), tuning, batch_invariant=True)


@dataclass
class Sequences:
    """Keys, values and queries of some sequences, and the blocks of their tokens."""

    case: AttentionCase
    lengths: list[int]
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        layer, size = self.case.layer, self.case.block_size
        heads = layer.heads * self.case.group
        counts = [-(-length // size) for length in self.lengths]
        order = torch.randperm(sum(counts) + 3, generator=generator).tolist()
        self.num_blocks = len(order)
        self.tables = [[order.pop() for _ in range(count)] for count in counts]

        def numbers(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(self.dtype)

        self.query = [numbers(length, heads, layer.key_dim) for length in self.lengths]
        self.keys = [numbers(length, layer.heads, layer.key_dim) for length in self.lengths]
        self.values = [numbers(length, layer.heads, layer.value_dim) for length in self.lengths]
        self.sinks = numbers(heads) if self.case.sinks else None

    def rows(self, of: list[Tensor], slices: list[ScheduledChunk], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.cat([of[one][start:stop] for one, start, stop in slices]).to(device, dtype)

    def batch(self, slices: list[ScheduledChunk], device: torch.device) -> RaggedBatch:
        return make_batch(slices, self.tables, self.case.block_size, device)

    def cache(self, attention: AttentionBackend, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        shapes = attention.block_shapes(self.case.layer, self.case.block_size, dtype)
        keys, values = (
            torch.full((self.num_blocks, *shape), torch.nan, dtype=dtype, device=device) for shape in shapes
        )
        return keys, values

    def write(
        self,
        attention: AttentionBackend,
        cache: tuple[Tensor, Tensor],
        slices: list[ScheduledChunk],
        dtype: torch.dtype | None = None,
    ) -> tuple[RaggedBatch, object]:
        """Stores the tokens of the slices, in the cache's type or another; returns their batch and metadata."""
        dtype, device = dtype or cache[0].dtype, cache[0].device
        batch = self.batch(slices, device)
        metadata = attention.prepare(batch, self.case.block_size)
        new = (self.rows(of, slices, dtype, device) for of in (self.keys, self.values))
        attention.store_kv(*cache, *new, metadata)
        return batch, metadata

    def fill(self, attention: AttentionBackend, cache: tuple[Tensor, Tensor], slices: list[ScheduledChunk]) -> None:
        """Stores the tokens of the slices as `write` does, without the kernel, which takes long in the interpreter."""
        size, device = self.case.block_size, cache[0].device
        slots = self.batch(slices, device).slot_mapping
        for part, of in zip(cache, (self.keys, self.values), strict=True):
            by_place = part.transpose(1, 2) if attention.name == "triton" else part
            by_place[slots // size, slots % size] = self.rows(of, slices, part.dtype, device)

    def run(
        self, attention: AttentionBackend, steps: list[list[ScheduledChunk]], dtype: torch.dtype, only_written: int = 0
    ) -> list[Tensor]:
        """The results of each step, [T, heads, value_dim], computed in a type; the first steps only store."""
        device = DEVICE if attention.name == "triton" else CPU
        cache = self.cache(attention, dtype, device)
        found = []
        for slices in steps[:only_written]:
            self.fill(attention, cache, slices)
        for slices in steps[only_written:]:
            _, metadata = self.write(attention, cache, slices)
            query = self.rows(self.query, slices, dtype, device)
            sinks = None if self.sinks is None else self.sinks.to(device, torch.float32)
            found.append(attention.attend(query, *cache, metadata, sinks=sinks, **self.case.options).cpu())  # type: ignore[arg-type]
        return found


def check(
    sequences: Sequences, steps: list[list[ScheduledChunk]], attention: TritonAttention | None = None, **options: Any
) -> None:
    """Compares each step with the reference in float64."""
    dtype, tolerance = options.pop("dtype", torch.float32), options.pop("tolerance", 2e-5)
    found = sequences.run(attention or backend(), steps, dtype, **options)
    expected = sequences.run(ReferenceAttention(), steps, torch.float64, **options)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance, check_dtype=False)


def chunks_and_decodes(lengths: list[int], seed: int) -> list[list[ScheduledChunk]]:
    """Prompts alone, then decode rows among chunks, then decode rows alone; each sequence ends with its length."""
    chooser = random.Random(seed)
    steps: list[list[ScheduledChunk]] = [[], [], []]
    for one, length in enumerate(lengths):
        first = max(length - chooser.choice((2, 2, 9, 18)), 0)
        if first:
            steps[0].append((one, 0, first))
        if length - 1 > first:
            steps[1].append((one, first, length - 1))
        steps[2].append((one, length - 1, length))
    return steps


class WithImage(Sequences):
    """The first sequence has an image, whose tokens see each other."""

    def batch(self, slices: list[ScheduledChunk], device: torch.device) -> RaggedBatch:
        images = ImageRows(np.arange(5, 30), torch.empty(0), None, np.full(25, 30))
        return replace(super().batch(slices, device), images=images)


@pytest.mark.parametrize("name", ["window", "all at once"])
def test_images_that_see_later_tokens_are_left_to_the_reference(name: str) -> None:
    """Guards steps that the kernels, which are causal, would compute wrongly; blocks lie as the kernels have them."""
    check(WithImage(CASES[name], [40, 20]), [[(0, 0, 40), (1, 0, 20)]])


@pytest.mark.parametrize("name", sampled(CASES, 6, keep=["odd sizes", "window", "all at once"]))
def test_equals_the_reference(name: str) -> None:
    """Guards every form of attention: prefill, decode and both in a step; NaN in unused places must not show."""
    sequences = Sequences(CASES[name], [1, 2, 34, 75] if CASES[name].group < 16 else [1, 34])
    check(sequences, chunks_and_decodes(sequences.lengths, seed=1))


@pytest.mark.parametrize(
    "name", sampled(["plain", "grouped heads", "window of one", "wide window", "all at once"], 3, keep=["plain"])
)
def test_short_chunks_are_split_over_keys(name: str) -> None:
    """Guards chunks of few tokens behind a long past: narrow and wide, at and across places where keys are split."""
    sequences = Sequences(CASES[name], [150] * 4)
    # Of a narrow window, the chunk that begins at 130 sees the last split only.
    chunks = [(0, 125, 130), (1, 63, 65), (2, 125, 142), (3, 117, 150) if name == "plain" else (3, 130, 147)]
    everything = [(one, 0, 150) for one in range(4)]
    counts, lengths = (np.array(ints) for ints in ([c - b for _, b, c in chunks], [c for _, _, c in chunks]))
    assert (count_splits(counts, lengths, SPLIT)[1] > 1).all()
    check(sequences, [everything, chunks], only_written=1)


@pytest.fixture
def little_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little room for splits, so that few programs return at once: each takes its time in the interpreter."""
    monkeypatch.setattr(attention_metadata, "SPARE_TOKENS", 64)
    monkeypatch.setattr(attention_metadata, "SPARE_PIECES", 4)


@pytest.mark.usefixtures("little_spare")
@pytest.mark.parametrize("chunk", [(0, 89, 90), (0, 87, 90), (0, 70, 90)], ids=["decode", "narrow", "wide"])
def test_a_split_chunk_has_the_same_bits_in_every_batch(chunk: ScheduledChunk) -> None:
    """Guards the promise that requests beside a chunk change neither its splits nor its bits."""
    sequences = Sequences(replace(CASES["window"], block_size=5, window=50), [90, 5, 64, 33], HALF)
    attention, size = backend(), sequences.case.block_size
    cache = sequences.cache(attention, HALF, DEVICE)
    sequences.fill(attention, cache, [(one, 0, length) for one, length in enumerate(sequences.lengths)])
    buffers, results = attention.graph_buffers(40, 4, 20, size, decode_only=False), []
    for others in [], [(1, 4, 5), (2, 63, 64), (3, 20, 33)]:
        batch = sequences.batch([*others, chunk], DEVICE)
        buffers.fill(batch)
        query = sequences.rows(sequences.query, [*others, chunk], HALF, DEVICE)
        padded = torch.cat([query, query.new_zeros(40 - len(query), *query.shape[1:])])
        for metadata, rows in ((attention.prepare(batch, size), query), (buffers.metadata, padded)):
            out = attention.attend(rows, *cache, metadata, scale=0.3, window=50)[: len(query)]
            results.append(out[chunk[1] - chunk[2] :])
    assert results[0].isfinite().all() and all(torch.equal(one, results[0]) for one in results)


@pytest.mark.parametrize("name", ["grouped heads", "all at once"])
def test_half_precision_is_near_the_reference(name: str) -> None:
    """Guards kernels in the types that models have: sums are float32, only what is stored is rounded."""
    sequences = Sequences(CASES[name], [1, 33, 50], HALF)
    steps = chunks_and_decodes(sequences.lengths, seed=2)
    check(sequences, steps, dtype=HALF, tolerance=2e-2 if DEVICE.type == "cuda" else 3e-3)


def test_usual_tiles_equal_the_reference() -> None:
    """Guards the sizes that are used by default: splits, tiles and programs as on a GPU."""
    sequences = Sequences(CASES["grouped heads"], [530, 70])
    steps = [[(0, 0, 512), (1, 0, 60)], [(0, 512, 529), (1, 60, 69)], [(0, 529, 530), (1, 69, 70)]]
    check(sequences, steps, TritonAttention(DEVICE), only_written=1)


def test_more_splits_than_are_merged_at_once() -> None:
    """Guards the merge of a long past, which goes on with what it has merged before."""
    length = (2 * attention_tile.CHUNK + 1) * SPLIT + 5
    sequences = Sequences(AttentionCase(LayerShape(1, 16, 16), group=2), [length])
    steps = [[(0, 0, length - 4)], [(0, length - 4, length - 1)], [(0, length - 1, length)]]
    check(sequences, steps, only_written=1)


def test_the_last_split_to_be_done_changes_no_bits() -> None:
    """Guards the merge within the decode kernel: whichever program merges, it does so in one order, and what counts the
    splits is zero again.
    """
    sequences = Sequences(CASES["grouped heads"], [150, 90, 5], HALF)
    attention, slices = backend(), [(0, 149, 150), (1, 87, 90), (2, 4, 5)]
    cache = sequences.cache(attention, HALF, DEVICE)
    sequences.fill(attention, cache, [(one, 0, length) for one, length in enumerate(sequences.lengths)])
    metadata = attention.prepare(sequences.batch(slices, DEVICE), sequences.case.block_size)
    assert metadata.decode is not None
    query, results = sequences.rows(sequences.query, slices, HALF, DEVICE), []
    for _ in range(2):
        results.append(attention.attend(query, *cache, metadata, scale=0.3))
        assert not metadata.arrivals(2).any()
        metadata.decode.items.copy_(metadata.decode.items.flip(0))
    assert results[0].isfinite().all() and torch.equal(*results)


def undefined_query(sequences: Sequences, tokens: int, slices: list[ScheduledChunk]) -> Tensor:
    """Queries of a step, with NaN in the rows of padding."""
    query = torch.full((tokens, 2, 32), torch.nan, device=DEVICE)
    if slices:
        real = sequences.rows(sequences.query, slices, torch.float32, DEVICE)
        query[: len(real)] = real
    return query


STEPS = {
    "decode": [[(0, 89, 90), (1, 4, 5), (2, 63, 64), (3, 32, 33)], [(3, 32, 33)], [], [(1, 4, 5), (0, 89, 90)]],
    "mixed": [
        [(1, 4, 5), (0, 65, 90), (2, 63, 64), (3, 21, 33)],
        [(3, 31, 33), (2, 63, 64)],
        [],
        [(2, 50, 64), (0, 87, 90), (1, 0, 5)],
    ],
}


@pytest.mark.usefixtures("little_spare")
@pytest.mark.parametrize(("window", "invariant"), [(40, False), (40, True)])
@pytest.mark.parametrize("kind", STEPS)
def test_buffers_serve_one_step_after_another(kind: str, window: int | None, invariant: bool) -> None:
    """Guards captured graphs: the same launches, with other numbers at the same addresses, compute other steps.

    Those of `--deterministic` have one launch a layer.
    """
    sequences = Sequences(replace(CASES["window"], block_size=5, window=window), [90, 5, 64, 33])
    attention, size = invariant_backend() if invariant else backend(), sequences.case.block_size
    cache = sequences.cache(attention, torch.float32, DEVICE)
    everything = [(one, 0, length) for one, length in enumerate(sequences.lengths)]
    sequences.fill(attention, cache, everything)
    tokens = 4 if kind == "decode" else 40
    buffers = attention.graph_buffers(tokens, 4, 20, size, decode_only=kind == "decode")
    launches = []
    for slices in STEPS[kind]:
        batch = sequences.batch(slices, DEVICE)
        buffers.fill(batch)
        with launches_of() as seen:
            query = undefined_query(sequences, tokens, slices)
            out = attention.attend(query, *cache, buffers.metadata, scale=0.3, window=window)
        launches.append(seen)
        real = len(batch.ids)
        for found, wanted in (
            (buffers.input_ids, batch.ids), (buffers.position_ids, batch.positions), (buffers.slots, batch.slots),
        ):  # fmt: skip
            assert found[:real].tolist() == wanted.tolist()
        assert buffers.logit_rows[: len(batch.rows)].tolist() == batch.rows.tolist()
        assert (buffers.slots[real:] == -1).all()
        if slices:
            expected = attention.attend(query[:real], *cache, attention.prepare(batch, size), scale=0.3, window=window)
            assert expected.isfinite().all() and torch.equal(out[:real], expected)
        if kind == "decode" or invariant:
            assert (out[real:] == 0).all()
    assert all(seen == launches[0] for seen in launches) and (len(launches[0]) == 1) >= invariant


def as_recorded(value: object) -> object:
    """A graph's record of an argument. Activations have other addresses here; a graph gives them the same ones."""
    if not isinstance(value, Tensor):
        return value
    return value.data_ptr() if value.dtype == torch.int32 else value.shape


@contextmanager
def launches_of() -> Iterator[list[object]]:
    """Launches of attention: the kernels with their grids, and addresses and numbers that a graph would keep."""
    seen: list[object] = []
    names = "_decode_kernel", "_combine_kernel", "_prefill_kernel"

    class Noted:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*arguments: object, **settings: object) -> None:
                held = [as_recorded(one) for one in (*arguments, *settings.values())]
                seen.append((self.kernel.__name__, grid, held))
                self.kernel[grid](*arguments, **settings)

            return launch

    with ExitStack() as stack:
        for module in (attention_tile, attention_decode, attention_prefill):
            for name in set(names) & set(vars(module)):
                stack.enter_context(patch.object(module, name, Noted(getattr(module, name))))
        yield seen


def test_buffers_gather_tokens_that_only_the_device_knows() -> None:
    """Guards steps that start before the tokens of the step before are known to the host."""
    sequences = Sequences(CASES["plain"], [9, 20, 1])
    buffers = backend().graph_buffers(16, 3, 2, 16, decode_only=False)
    batch = sequences.batch([(0, 8, 9), (1, 15, 20), (2, 0, 1)], DEVICE)
    tokens = torch.tensor([50, 60, 70], device=DEVICE)
    batch = replace(batch, ids=np.arange(7), device_tokens=DeviceTokens(tokens, np.array([0, 5]), np.array([2, 0])))
    buffers.fill(batch)
    assert buffers.input_ids.tolist() == [70, 1, 2, 3, 4, 50, 6] + [0] * 9


def test_buffers_refuse_what_they_cannot_hold() -> None:
    """Guards memory behind the buffers: steps with too much of anything are refused."""
    sequences = Sequences(AttentionCase(LayerShape(1, 16, 16), block_size=5), [50, 21, 20, 51, 30])
    buffers = backend().graph_buffers(12, 3, 10, 5, max_tokens=70, decode_only=False)
    only = backend().graph_buffers(2, 2, 10, 5, max_tokens=70, decode_only=True)
    held: list[ScheduledChunk] = [(0, 40, 50), (2, 18, 20)]
    buffers.fill(sequences.batch(held, DEVICE))
    only.fill(sequences.batch([(0, 49, 50), (2, 19, 20)], DEVICE))
    refused: dict[str, tuple[StepBuffers, list[ScheduledChunk]]] = {
        "tokens": (buffers, [(0, 39, 50), (2, 18, 20)]),
        "sequences": (buffers, [(0, 0, 1), (1, 0, 1), (2, 0, 1), (3, 0, 1)]),
        "length": (buffers, [(3, 50, 51)]),
        "tokens with the past": (buffers, [(0, 49, 50), (1, 20, 21)]),
        "chunks": (only, [(0, 0, 2)]),
    }
    for what, (where, slices) in refused.items():
        batch = sequences.batch(slices, DEVICE)
        assert not where.holds(batch), what
        with pytest.raises(ValueError, match="do not fit"):
            where.fill(batch)
    batch = sequences.batch(held, DEVICE)
    assert not buffers.holds(replace(batch, rows=np.zeros(4, np.int64))), "rows with an output"


def test_a_graph_has_room_for_turns_of_many_chats() -> None:
    """Guards 16 second turns of 64 tokens behind 8,192, beside 64 sequences that decode, against single launches."""
    counts, before = np.repeat([64, 1], [16, 64]), np.repeat([8192, 8200], [16, 64])
    rows, stops = np.arange(counts.sum()), before + counts
    batch = RaggedBatch(rows, rows, rows, counts.cumsum() - 1, np.zeros((80, 520), np.int32), before, stops, DEVICE)
    assert TritonAttention(DEVICE).graph_buffers(1152, 512, 1024, 16, decode_only=False).holds(batch)


def test_rows_may_be_parts_of_wider_ones() -> None:
    """Guards strides: queries, keys and values are often columns of one matrix."""
    sequences = Sequences(CASES["odd sizes"], [40])
    attention, slices = backend(), [(0, 0, 40)]
    cache = sequences.cache(attention, torch.float32, DEVICE)
    _, metadata = sequences.write(attention, cache, slices)
    wide = torch.cat([sequences.query[0], sequences.keys[0]], 1).to(DEVICE)
    other = sequences.cache(attention, torch.float32, DEVICE)
    attention.store_kv(
        *other, wide[:, 4:], sequences.values[0].transpose(0, 1).contiguous().transpose(0, 1).to(DEVICE), metadata
    )
    assert all(torch.equal(a.nan_to_num(9e9), b.nan_to_num(9e9)) for a, b in zip(cache, other, strict=True))
    straight = attention.attend(sequences.query[0].to(DEVICE), *cache, metadata, scale=0.3)
    assert torch.equal(attention.attend(wide[:, :4], *cache, metadata, scale=0.3), straight)


@pytest.mark.parametrize("seed", range(20))
def test_work_is_listed_once_and_windows_are_a_beginning(seed: int) -> None:
    """Guards the lists: each split once, those near the end first, partial results that none share."""
    chooser = np.random.default_rng(seed)
    lengths = chooser.choice([0, 1, 31, 32, 33, 64, 65, 300, 1000], int(chooser.integers(1, 9)))
    counts = np.minimum(chooser.choice([1, 1, 1, 2, 16, 17, 40, 500], len(lengths)), np.maximum(lengths, 1))
    work = list_work(counts, lengths, np.arange(len(lengths)) * 7, SPLIT)
    size, splits = (one.tolist() for one in count_splits(counts, lengths, SPLIT))
    every = [(one, split) for one in range(len(lengths)) for split in range(splits[one])]
    items = [tuple(item) for item in work.items.tolist()]
    assert sorted(items) == [(one, split) for one, split in every if counts[one] <= NARROW]
    assert work.totals[-1] == len(items)
    for back, total in enumerate(work.totals.tolist()):
        assert all(splits[one] - 1 - split <= back for one, split in items[:total])
        assert all(splits[one] - 1 - split > back for one, split in items[total:])
    pieces = [tuple(piece) for piece in work.pieces[:, :2].tolist()]
    assert sorted(pieces) == [(one, split) for one, split in every if counts[one] > 1]
    tokens = [counts[one] for one, _ in pieces]
    assert work.pieces[:, 2].tolist() == [sum(tokens[:place]) for place in range(len(tokens))]
    assert work.piece_tokens == sum(tokens)
    cut = [one for one in range(len(lengths)) if splits[one] > 1]
    parts = [
        work.sequences[one, 5] + split * counts[one] + token
        for one in cut for split in range(splits[one]) for token in range(counts[one])
    ]  # fmt: skip
    assert sorted(parts) == list(range(work.partials))
    assert work.merges.tolist() == [[one, token] for one in cut if counts[one] > 1 for token in range(counts[one])]
    assert work.sequences[:, 0].tolist() == [0, *np.cumsum(counts)[:-1].tolist()]
    assert work.sequences[:, 4].tolist() == size


def test_splits_are_worth_their_partial_results() -> None:
    """Guards the arithmetic of `split_tokens`: few sequences fill a GPU, many write few results, memory is bounded."""
    unit, group, kv_heads = DecodeTuning().split, 4, 8

    def counted(tokens: int, length: int) -> int:
        return int(count_splits(np.array([tokens]), np.array([length]), unit)[1][0])

    for length in range(4096, 131072, 1000):
        assert counted(1, length) * kv_heads >= 85
        assert all(counted(tokens, length) <= 34 for tokens in (2, 16, 20, 32, 33, 128))
        assert counted(129, length) == counted(2048, length) == 1
    assert counted(20, 32788) * kv_heads > 132 and counted(2, 32770) * kv_heads > 132
    chooser = random.Random(3)
    lengths = np.array([round(math.exp(chooser.uniform(math.log(256), math.log(8192)))) for _ in range(256)])
    splits = count_splits(np.ones_like(lengths), lengths, unit)[1]
    written = 2 * 4 * group * 128 * splits[splits > 1].sum()
    assert written < 0.03 * (2 * 2 * 128) * lengths.sum()
    sizes = split_tokens(np.arange(1, 129), np.full(128, 8192), unit)
    assert (sizes % 128 == 0).all(), "a split ends within a tile"


@pytest.mark.parametrize("seed", range(20))
def test_each_tile_is_found(seed: int) -> None:
    """Guards the grid of the prefill kernel: there are enough tiles for every piece, and the first ones are its own."""
    chooser = np.random.default_rng(seed)
    counts = chooser.integers(2, 40, int(chooser.integers(1, 300)))
    work, tile = list_work(counts, counts + 100, counts * 0, SPLIT), int(chooser.integers(1, 20))
    pieces = torch.from_numpy(work.pieces)
    metadata = PrefillMetadata(pieces, torch.tensor([len(pieces)]), work.piece_tokens)
    first = pieces[:, 2] // tile + torch.arange(len(pieces))
    room = torch.cat([first[1:], torch.tensor([metadata.max_tiles(tile)])]) - first
    needed = -(-torch.from_numpy(counts)[pieces[:, 0]] // tile)
    assert ((room == needed) | (room == needed + 1)).all()


@triton.jit
def _find_tiles(found: Any, pieces: Any, count: Any, TILE: tl.constexpr) -> None:
    tile = tl.program_id(0)
    piece, number = attention_tile.find_tile(pieces + 2, 3, 1, tl.load(count), tile, TILE)
    tl.store(found + tile * 2, piece)
    tl.store(found + tile * 2 + 1, number)


def test_pieces_past_the_count_are_not_read() -> None:
    """Guards steps in buffers of a graph: how many pieces there are is read on the device, others are of old steps."""
    counts, tile = np.array([5, 9, 17]), 4
    work = list_work(counts, counts + 100, counts * 0, SPLIT)
    old = torch.tensor([[7, 0, 1]] * 6)
    pieces = torch.cat([torch.from_numpy(work.pieces), old]).int().to(DEVICE)
    first = work.pieces[:, 2] // tile + np.arange(len(work.pieces))
    tiles = np.arange(int(first[-1]) + 12)
    found = torch.empty(len(tiles), 2, dtype=torch.int32, device=DEVICE)
    _find_tiles[(len(tiles),)](found, pieces, torch.tensor([len(first)], device=DEVICE), tile)
    mine = np.searchsorted(first, tiles, side="right") - 1
    assert found.tolist() == np.stack([mine, tiles - first[mine]], 1).tolist()


@pytest.mark.parametrize("name", ["plain", "all at once"])
def test_a_tile_before_a_split_has_no_partial_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the end of each token in wide chunks: results of splits behind it were never written, and are NaN here."""
    empty = attention_tile.Partials.empty

    def poisoned(*arguments: Any) -> attention_tile.Partials:
        parts = empty(*arguments)
        for part in parts:
            part.fill_(torch.nan)
        return parts

    monkeypatch.setattr(attention_tile.Partials, "empty", poisoned)
    sequences = Sequences(CASES[name], [76, 20])
    chunks = [(1, 0, 20), (0, 46, 76)]  # the first tile ends before the split at 64
    small = TritonAttention(
        DEVICE, DecodeTuning(split=SPLIT, tile_bytes=1024), PrefillTuning(rows=16, tokens=16, warps=4)
    )
    check(sequences, [[(0, 0, 76), (1, 0, 20)], chunks], small, only_written=1)


def test_what_does_not_fit_goes_another_way() -> None:
    """Guards the choice: larger heads and other types are not tried."""
    layer = LayerShape(2, 64, 256)
    assert fits([layer], torch.bfloat16, DEVICE) and fits([layer], torch.float32, DEVICE)
    assert not fits([layer], torch.float64, DEVICE)
    assert not fits([layer, LayerShape(1, 576, 512)], torch.bfloat16, DEVICE)


def by_token(found: list[Tensor], steps: list[list[ScheduledChunk]]) -> dict[tuple[int, int], Tensor]:
    """The results of a run by sequence and token."""
    return {
        (one, token): row
        for results, chunks in zip(found, steps, strict=True)
        for (one, token), row in zip(
            ((one, token) for one, start, stop in chunks for token in range(start, stop)), results, strict=True
        )
    }


WAYS: list[list[list[ScheduledChunk]]] = [
    [[(0, 0, 50)], [(1, 0, 3)]],
    [[(0, 0, 20), (1, 0, 2)], [(1, 2, 3), (0, 20, 47)], [(0, 47, 48)], [(0, 48, 49)], [(0, 49, 50)]],
    [[(1, 0, 3), (0, 0, 7)], *([(0, token, token + 1)] for token in range(7, 12)), [(0, 12, 50)]],
]
"""Ways to cut two sequences into steps; tokens are decoded in one and belong to a chunk in another."""


@pytest.mark.usefixtures("placeless_products")
@pytest.mark.parametrize("name", sampled(["grouped heads", "window", "softcap", "sinks", "all at once"], 2))
def test_invariant_attention_has_the_same_bits_in_any_chunks(name: str) -> None:
    """Guards `--deterministic`: a token that is decoded, drafted or computed again in a chunk; and what is computed."""
    sequences = Sequences(CASES[name], [50, 3])
    runs = [by_token(sequences.run(invariant_backend(), steps, torch.float32), steps) for steps in WAYS]
    assert all(len(run) == 53 and run.keys() == runs[0].keys() for run in runs)
    assert all(torch.equal(run[token], runs[0][token]) for run in runs[1:] for token in run)
    expected = by_token(sequences.run(ReferenceAttention(), WAYS[0], torch.float64), WAYS[0])
    for token, row in expected.items():
        torch.testing.assert_close(runs[0][token], row, atol=2e-5, rtol=2e-5, check_dtype=False)
