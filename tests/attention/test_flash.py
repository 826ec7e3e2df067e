"""Attention of long chunks by FlashInfer, for which a double stands in: what it is told, and what stays with Triton."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from cbatch.attention import flash
from cbatch.attention.flash import FlashAttention, with_flash
from cbatch.attention.reference import ReferenceAttention
from cbatch.attention.triton import TritonAttention
from cbatch.kernels.triton.attention_metadata import AttentionMetadata
from cbatch.kernels.triton.occupancy import CHIPS
from cbatch.runtime.kv_cache import FP8, LayerShape
from tests.attention.test_triton_attention import HALF, Sequences, backend, check
from tests.support import fake_flashinfer
from tests.support.attention_cases import AttentionCase, ScheduledChunk
from tests.support.device import DEVICE

pytestmark = [pytest.mark.slow, pytest.mark.kernels]

FORMS = {
    "plain": AttentionCase(LayerShape(2, 64, 64)),
    "window, odd blocks": AttentionCase(LayerShape(1, 64, 64), group=2, block_size=5, window=21),
    "softcap": AttentionCase(LayerShape(1, 128, 128), group=2, softcap=3.0),
}
LENGTHS = [150, 20, 300, 40, 9]
PAST: list[ScheduledChunk] = [(0, 0, 10), (1, 0, 19), (2, 0, 160), (3, 0, 30), (4, 0, 8)]
STEP: list[ScheduledChunk] = [(1, 19, 20), (0, 10, 150), (4, 8, 9), (2, 160, 300), (3, 30, 40)]
PLANNERS = fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper.made


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.setattr(flash, "find_spec", lambda name: name)
    PLANNERS.clear()


def with_small_tiles() -> FlashAttention:
    one = backend()
    return FlashAttention(one.device, one.decode, one.prefill)


@pytest.mark.parametrize("name", FORMS)
def test_long_chunks_equal_the_reference(name: str) -> None:
    """Guards what FlashInfer is told of a step: rows, blocks, lengths, window, softcap, between rows of Triton's."""
    sequences = Sequences(FORMS[name], LENGTHS, HALF)
    check(sequences, [PAST, STEP], with_small_tiles(), dtype=HALF, tolerance=2e-2, only_written=1)
    (plan,) = PLANNERS[0].plans
    assert plan["qo_indptr"].tolist() == [0, 140, 141, 281] and len(PLANNERS) == 1


def test_layers_share_the_plan_of_a_step() -> None:
    """Guards the host's time, and a plan that the device still copies while the next step is planned."""
    sequences, attention = Sequences(FORMS["plain"], LENGTHS, HALF), with_small_tiles()
    cache = sequences.cache(attention, HALF, DEVICE)
    sequences.fill(attention, cache, [*PAST, *STEP])
    query, batch = sequences.rows(sequences.query, STEP, HALF, DEVICE), sequences.batch(STEP, DEVICE)
    for _ in range(3):
        metadata = attention.prepare(batch, sequences.case.block_size)
        for window in (None, 9, None):
            attention.attend(query, *cache, metadata, scale=0.3, window=window)
    assert [len(one.plans) for one in PLANNERS] == [2, 2, 1, 1]
    assert [one.plans[0]["window_left"] for one in PLANNERS] == [-1, 8, -1, 8]


@pytest.mark.parametrize(
    "case",
    [AttentionCase(LayerShape(1, 64, 64), sinks=True), AttentionCase(LayerShape(1, 32, 32)),
     AttentionCase(LayerShape(1, 128, 64))],
    ids=["sinks", "small heads", "other values"],
)  # fmt: skip
def test_what_flashinfer_cannot_do_stays_with_triton(case: AttentionCase) -> None:
    """Guards layers that FlashInfer has no kernel for, in a step with long chunks: Triton computes all of it."""
    sequences = Sequences(case, LENGTHS[:2], HALF)
    past, step = PAST[:2], STEP[:2]
    found = sequences.run(with_small_tiles(), [past, step], HALF, only_written=1)
    assert not PLANNERS and torch.equal(found[0], sequences.run(backend(), [past, step], HALF, only_written=1)[0])


def test_short_and_captured_steps_are_tritons() -> None:
    """Guards CUDA graphs, which cannot hold a plan, and steps that no long chunk is in."""
    sequences, attention = Sequences(FORMS["plain"], LENGTHS), with_small_tiles()
    metadata = attention.prepare(sequences.batch([(0, 10, 138), (1, 19, 20)], DEVICE), 16)
    assert isinstance(metadata, AttentionMetadata)
    assert isinstance(attention.graph_buffers(400, 4, 40, 16, decode_only=False).metadata, AttentionMetadata)


def test_it_is_offered_where_it_can_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards everybody without the package, older chips, FP8 caches and `--deterministic`."""

    def offered(capability: int = 90, **options: Any) -> bool:
        return with_flash(TritonAttention(DEVICE, limits=CHIPS[capability], **options)) is not None

    assert offered() and offered(100)
    assert not offered(89) and not offered(kv_dtype=FP8) and not offered(batch_invariant=True)
    assert with_flash(ReferenceAttention()) is None
    monkeypatch.setattr(flash, "find_spec", lambda _: None)
    assert not offered()
