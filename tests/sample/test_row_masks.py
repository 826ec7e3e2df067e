"""Masks of rows: which row gets which, from lists and constraints, and bitmasks against a plain set of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from cbatch.base.params import SamplingParams
from cbatch.base.request import Request
from cbatch.runtime.batch import Logits
from cbatch.sample.output import NO_ALLOWED_TOKEN, PendingSample
from cbatch.sample.row_masks import RowMasks, bools_on_device
from cbatch.sample.sampler import Sampler
from cbatch.sample.structured.masks import MaskFiller, Place, TokenMasks
from cbatch.sample.structured.token_bitmask import bitmask_of, full_bitmask, to_bools
from cbatch.schedule.output import ScheduledChunk, SchedulerOutput
from cbatch.schedule.sequence import TokenSequence
from tests.support.device import HAS_GPU
from tests.support.fake_cuda import CUDA, FakeCuda

VOCABULARY = 75


class Open:
    """A constraint whose masks the tests make."""

    is_finished, needs_mask = False, True


def make_request(allowed: Sequence[int] | None = None, *, constrained: bool = False, **params: Any) -> TokenSequence:
    asked = SamplingParams(allowed_token_ids=allowed, **params)
    state: Any = Open() if constrained else None
    return TokenSequence(0, [1] * 5, Request(params=asked, max_new_tokens=9), guide=state)


def masks_of(*sets: Sequence[int]) -> TokenMasks:
    bitmasks = [bitmask_of(tokens, VOCABULARY) for tokens in sets]
    return TokenMasks(torch.from_numpy(np.stack(bitmasks)), [None] * len(sets))


def logits_of(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(1))


def pending(
    sequences: list[TokenSequence], logits: torch.Tensor, masks: TokenMasks | None, sampler: Sampler | None = None
) -> PendingSample:
    sampler = sampler or Sampler(logits.device)
    chunks = [ScheduledChunk(sequence, 0, len(sequence.token_ids), True, []) for sequence in sequences]
    return PendingSample(SchedulerOutput(chunks), Logits(logits), sampler, None, masks)


@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 64, VOCABULARY])
def test_bitmasks_are_sets_of_tokens(vocabulary: int) -> None:
    """Guards the order of bits, the last word of a vocabulary, and ids that a model has no logits for."""
    for tokens in ([0], [vocabulary - 1, vocabulary, vocabulary + 40], range(0, vocabulary, 3)):
        bitmask = bitmask_of(tokens, vocabulary)
        by_hand = [sum(1 << bit for bit in range(32) if 32 * word + bit in tokens and 32 * word + bit < vocabulary)
                   for word in range(len(bitmask))]  # fmt: skip
        assert bitmask.view(np.uint32).tolist() == by_hand
        found = np.flatnonzero(to_bools(bitmask[None], vocabulary)[0])
        assert bools_on_device(torch.from_numpy(bitmask)[None], vocabulary)[0].nonzero().flatten().tolist() == [*found]
        assert found.tolist() == [token for token in tokens if token < vocabulary]
    assert (full_bitmask(vocabulary) == bitmask_of(range(vocabulary), vocabulary)).all()


def test_each_row_keeps_its_own_tokens() -> None:
    """Guards rows with a list, a constraint, both and neither, in any order, against the mask of another row."""
    sequences = [
        make_request(),
        make_request(constrained=True),
        make_request([3, 40, 74]),
        make_request([5, 6, 64], constrained=True),
        make_request(),
        make_request([3, 40, 74]),
        make_request(constrained=True),
    ]
    logits = logits_of(len(sequences))
    masks = RowMasks.build(sequences, masks_of([1, 2], [6, 64, 70], [33]), [1, 3, 6], logits)
    assert masks is not None and len(masks.bitmasks) == 4, "a list that two rows have is one mask"
    masked = masks.apply(logits)
    every = list(range(VOCABULARY))
    expected = [every, [1, 2], [3, 40, 74], [6, 64], every, [3, 40, 74], [33]]
    for row, tokens in enumerate(expected):
        assert masked[row].isfinite().nonzero().flatten().tolist() == tokens
        assert torch.equal(masked[row, tokens], logits[row, tokens])


def test_masks_of_all_rows_are_taken_as_they_are() -> None:
    """Guards the common step of structured output, in half precision too: no copy of the masks, in whatever order."""
    logits, made = logits_of(3).bfloat16(), masks_of([4], [5, 50], [6])
    sequences = [make_request(constrained=True) for _ in range(3)]
    for order, expected in (
        ([0, 1, 2], [[0, 4], [1, 5], [1, 50], [2, 6]]),
        ([2, 0, 1], [[0, 5], [0, 50], [1, 6], [2, 4]]),
    ):
        masks = RowMasks.build(sequences, made, order, logits)
        assert masks is not None and masks.bitmasks is made.bitmasks
        masked, (rows, tokens) = masks.apply(logits), torch.tensor(expected).T
        assert masked.dtype == torch.float32 and masked.isfinite().nonzero().tolist() == expected
        assert torch.equal(masked[rows, tokens], logits[rows, tokens].float())
    assert RowMasks.build([make_request()], None, [], logits) is None


def test_a_step_takes_its_masks_after_its_penalties() -> None:
    """Guards the whole of a step: a bias does not bring a forbidden token back, and a row with nothing left fails."""
    sequences = [
        make_request([7, 8], logit_bias={70: 100, 8: 50}),
        make_request(constrained=True, temperature=1.0),
        make_request([9], constrained=True),
        make_request(logprobs=1),
    ]
    logits = logits_of(4)
    samples = pending(sequences, logits, masks_of([11], [12])).get().samples
    assert [sample.token_id for sample in samples[:2]] == [8, 11]
    assert samples[2].error is NO_ALLOWED_TOKEN and samples[3].token_id == int(logits[3].argmax())
    assert samples[3].logprobs is not None and samples[3].logprobs.logprob > -math.inf


class AnyState:
    """A state of which every token may come."""

    vocab_size, error = VOCABULARY, None

    def fill_ahead(self, bitmasks: Any, draft: Sequence[int]) -> list[str | None]:
        bitmasks[:] = full_bitmask(VOCABULARY)
        return [None] * len(bitmasks)


@pytest.mark.skipif(HAS_GPU, reason="torch has a real device")
@pytest.mark.parametrize("kernel", [True, False])
def test_masked_steps_on_a_gpu_wait_for_nothing(kernel: bool) -> None:
    """Guards masks in memory that is not pinned, and the sampler that stands in for a kernel that fails its check."""
    pytest.importorskip("triton", reason="the kernel needs Triton")
    sequences = [
        make_request(constrained=True, temperature=1.0, top_p=0.9),
        make_request([3, 4], logit_bias={3: 1.0}),
        make_request(constrained=True),
    ]
    with FakeCuda() as device:
        sampler, logits = Sampler(CUDA, kernel=kernel), torch.zeros(3, VOCABULARY, device=CUDA)
        filler = MaskFiller(1, pin=True)
        for rows in (sequences, [sequences[0], sequences[2]], [sequences[1]]):
            state: Any = AnyState()
            filler.begin([Place(state) for sequence in rows if sequence.guide is not None])
            masks = filler.result()
            with device.no_waits():
                pending(rows, logits[: len(rows)], masks, sampler).get()
        filler.close()
    assert (device.launches["_choose_kernel"] == 3) == kernel
