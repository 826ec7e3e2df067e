"""Logits processors against transformers' own, on random logits; log-probabilities against a plain forward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation import logits_process

from cbatch.base.outputs import MIN_LOGPROB, Sample
from cbatch.base.params import SamplingParams
from cbatch.base.request import Request
from cbatch.sample.output import PendingLogprobs
from cbatch.sample.processors import counts_for, process_logits
from cbatch.sample.row_masks import RowMasks
from cbatch.sample.structured.masks import TokenMasks
from cbatch.sample.structured.token_bitmask import bitmask_of
from cbatch.schedule.sequence import TokenSequence

CPU = torch.device("cpu")
VOCABULARY = 50


def make_request(number: int = 0, prompt: int = 6, output: int = 9, words: Any = (), **params: Any) -> TokenSequence:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(VOCABULARY // 2, (prompt + output,), generator=generator).tolist()
    asked = SamplingParams(**params)
    counts = counts_for(asked, ids[:prompt])
    sequence = TokenSequence(0, ids[:prompt], Request(params=asked, max_new_tokens=99, bad_words=words), counts=counts)
    for token in ids[prompt:]:
        sequence.accept(Sample(token))
    return sequence


def random_logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(3)) * 3


def apply(logits: torch.Tensor, sequences: list[TokenSequence]) -> torch.Tensor:
    before = logits.clone()
    processed = process_logits(logits, sequences)
    if (masks := RowMasks.build(sequences, None, [], logits)) is not None:
        processed = masks.apply(processed)
    assert logits.numpy().tobytes() == before.numpy().tobytes(), "the raw logits are needed for log-probabilities"
    return processed


LOWER = logits_process.RepetitionPenaltyLogitsProcessor(0.7)
BIAS = logits_process.SequenceBiasLogitsProcessor([[[3], 5.5], [[7], -100.0]])
FORBIDDEN = logits_process.SuppressTokensLogitsProcessor([0, 1, *range(30, VOCABULARY)])
CASES: dict[str, tuple[dict[str, Any], Callable[..., torch.Tensor]]] = {
    "repetition": ({"repetition_penalty": 4.0}, logits_process.RepetitionPenaltyLogitsProcessor(4.0)),
    "repetition below 1": ({"repetition_penalty": 0.7}, LOWER),
    "bias": ({"logit_bias": {3: 5.5, "7": -100}}, BIAS),
    "presence": ({"presence_penalty": -1.5}, lambda ids, logits: by_formula(ids, logits, -1.5, 0.0)),
    "frequency": ({"frequency_penalty": 0.7}, lambda ids, logits: by_formula(ids, logits, 0.0, 0.7)),
    "everything": (
        {
            "logit_bias": {3: 5.5, 7: -100},
            "repetition_penalty": 0.7,
            "presence_penalty": 0.3,
            "frequency_penalty": 0.2,
            "allowed_token_ids": list(range(2, 30)),
        },
        lambda ids, logits: FORBIDDEN(ids, by_formula(ids, LOWER(ids, BIAS(ids, logits)), 0.3, 0.2)),
    ),
}


def by_formula(ids: torch.Tensor, logits: torch.Tensor, presence: float, frequency: float) -> torch.Tensor:
    """The published one, over the output alone: `logit - count * frequency - (count > 0) * presence`."""
    counts = torch.bincount(ids[0, 6:], minlength=VOCABULARY)
    return logits - counts * frequency - (counts > 0) * presence


@pytest.mark.parametrize("name", CASES)
def test_processors_are_those_of_transformers(name: str) -> None:
    """Guards signs, the tokens that count, which row gets what, and the order if a row asks for everything."""
    params, theirs = CASES[name]
    sequences = [make_request(1), make_request(0, output=30, **params), make_request(2)]
    ids = torch.tensor([sequences[1].token_ids])
    assert len({*ids[0, 6:].tolist()}) < 30 and {*ids[0, :6].tolist()} - {*ids[0, 6:].tolist()}, "it shows nothing"
    logits = random_logits(3)
    processed = apply(logits, sequences)
    assert torch.allclose(processed[1:2], theirs(ids, logits[1:2].clone()), atol=1e-5)
    assert torch.equal(processed[::2], logits[::2])


def test_bad_words_are_those_of_transformers() -> None:
    """Guards words of one token and of several: forbidden only after their beginning."""
    sequence = make_request(4)
    last, before = sequence.token_ids[-1], sequence.token_ids[-2]
    words = [[5], [last, 6], [before, last, 7], [last, last, 8], [9, 10]]
    logits = random_logits(1)
    sequence.request.bad_words = words
    processor = logits_process.NoBadWordsLogitsProcessor(words, eos_token_id=49)
    expected = processor(torch.tensor([sequence.token_ids]), logits.clone())
    processed = apply(logits, [sequence])
    assert torch.equal(processed, expected)
    assert [token for token in range(VOCABULARY) if processed[0, token] == -math.inf] == [5, 6, 7]


def test_what_costs_nothing() -> None:
    """Guards the time of a step: no copy for rows that ask for nothing; a long list of tokens is looked up once."""
    logits = random_logits(1)
    assert process_logits(logits, [make_request(temperature=1.0)]) is logits
    sequence = make_request(allowed_token_ids=[4, 2, 4])
    assert sequence.params.allowed_token_ids == (2, 4)
    first = apply(logits, [sequence])
    bitmask = sequence.allowed_bitmask
    assert torch.equal(apply(logits, [sequence]), first) and sequence.allowed_bitmask is bitmask is not None


def test_a_forbidden_token_that_is_not_a_number_does_no_harm() -> None:
    """Guards padding of the vocabulary, whose logits may be anything, and what is forbidden in two ways."""
    sequence = make_request(allowed_token_ids=[3, 4, 5], logit_bias={8: 100, 3: 100, 4: 99})
    sequence.request.bad_words = [[3], [9]]
    logits = random_logits(1)
    logits[0, 10], logits[0, 11] = math.nan, math.inf
    assert apply(logits, [sequence])[0].isfinite().nonzero().flatten().tolist() == [4, 5]
    constraint = TokenMasks(torch.from_numpy(bitmask_of([3, 5, 9], VOCABULARY))[None], [None])
    masks = RowMasks.build([sequence], constraint, [0], logits)
    assert masks is not None
    processed = masks.apply(process_logits(logits, [sequence]))
    assert processed[0].isfinite().nonzero().flatten().tolist() == [5] and processed[0, 5] == logits[0, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_a_softmax_in_float32(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards values, the likeliest tokens in order, what JSON cannot say, and parts, without a copy of all logits."""
    logits = random_logits(3).to(dtype)
    logits[1, 4] = -math.inf
    asked = logits, np.arange(3), torch.tensor([7, 4, 0]), [3, 0, VOCABULARY + 5]
    found, expected = PendingLogprobs(*asked).get(), logits.double().log_softmax(-1)
    assert abs(found[0].logprob - float(expected[0, 7])) < 1e-5 and found[1].logprob == MIN_LOGPROB
    assert [len(one.top) for one in found] == [3, 0, VOCABULARY]
    assert [token for token, _ in found[0].top] == logits[0].float().topk(3).indices.tolist()
    assert all(abs(value - float(expected[2, token])) < 1e-5 for token, value in found[2].top)
    monkeypatch.setattr("cbatch.sample.output.MAX_ELEMENTS", 2 * VOCABULARY)
    assert PendingLogprobs(*asked).get() == found
    again = PendingLogprobs(logits, np.array([2, 0, 2]), torch.tensor([0, 7, 0]), [0, 3, 0]).get()
    assert again[1] == found[0] and again[0] == again[2] == found[2]._replace(top=[])
