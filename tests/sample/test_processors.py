"""Logits processors against transformers' own, on random logits; log-probabilities against a plain forward."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from transformers.generation import logits_process

from cbatch.base.outputs import Sample
from cbatch.base.params import SamplingParams
from cbatch.base.request import Request
from cbatch.sample.output import MIN_LOGPROB, PendingLogprobs
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


@pytest.mark.parametrize("penalty", [1.3, 0.7, 4.0])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    """Guards the rule for positive and negative logits, over prompt and output, beside rows without it."""
    sequences = [make_request(0, repetition_penalty=penalty), make_request(1), make_request(2, repetition_penalty=2.0)]
    logits = random_logits(3)
    processed = apply(logits, sequences)
    for row, strength in ((0, penalty), (2, 2.0)):
        ids = torch.tensor([sequences[row].token_ids])
        expected = logits_process.RepetitionPenaltyLogitsProcessor(strength)(ids, logits[row : row + 1].clone())
        assert torch.equal(processed[row], expected[0])
    assert torch.equal(processed[1], logits[1])


@pytest.mark.parametrize("presence, frequency", [(0.5, 0.0), (0.0, 0.7), (-1.5, 0.4), (2.0, 2.0)])
def test_presence_and_frequency_follow_the_published_formula(presence: float, frequency: float) -> None:
    """Guards `logit - count * frequency - (count > 0) * presence`, over the output alone."""
    params = {"presence_penalty": presence, "frequency_penalty": frequency}
    sequences = [make_request(1), make_request(0, output=30, **params)]
    logits = random_logits(2)
    processed = apply(logits, sequences)
    counts = Counter(sequences[1].token_ids[sequences[1].num_prompt :])
    assert max(counts.values()) > 1 and set(sequences[1].token_ids[:6]) - set(counts), "the case shows nothing"
    expected = [
        float(logits[1, token]) - counts[token] * frequency - (counts[token] > 0) * presence
        for token in range(VOCABULARY)
    ]
    assert torch.allclose(processed[1], torch.tensor(expected), atol=1e-5)
    assert torch.equal(processed[0], logits[0])


def test_bias_is_that_of_transformers() -> None:
    """Guards logit_bias: added to its own tokens of its own row."""
    sequences = [make_request(), make_request(logit_bias={3: 5.5, 7: -100}), make_request(logit_bias={"0": 1})]
    logits = random_logits(3)
    processed = apply(logits, sequences)
    expected = logits_process.SequenceBiasLogitsProcessor([[[3], 5.5], [[7], -100.0]])(
        torch.tensor([[1]]), logits[1:2].clone()
    )
    assert torch.equal(processed[1], expected[0])
    assert processed[2, 0] == logits[2, 0] + 1 and torch.equal(processed[0], logits[0])


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


def test_allowed_tokens_are_looked_up_once() -> None:
    """Guards the time of a step, since a list may be as long as the vocabulary."""
    sequence = make_request(allowed_token_ids=[4, 2, 4])
    assert sequence.params.allowed_token_ids == (2, 4)
    first = apply(random_logits(1), [sequence])
    bitmask = sequence.allowed_bitmask
    assert torch.equal(apply(random_logits(1), [sequence]), first) and sequence.allowed_bitmask is bitmask is not None


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


def test_all_at_once_is_one_after_the_other() -> None:
    """Guards the order if a row asks for everything: bias, repetition, presence and frequency, bad words, lists."""
    sequence = make_request(
        5,
        output=20,
        logit_bias={3: 9},
        repetition_penalty=1.5,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        allowed_token_ids=list(range(2, 30)),
    )
    sequence.request.bad_words = [[4]]
    logits = random_logits(1)
    ids = torch.tensor([sequence.token_ids])
    expected = logits.clone()
    expected[0, 3] += 9
    expected = logits_process.RepetitionPenaltyLogitsProcessor(1.5)(ids, expected)
    for token, count in Counter(sequence.token_ids[sequence.num_prompt :]).items():
        expected[0, token] -= 0.3 + 0.2 * count
    expected[0, 4] = expected[0, :2] = expected[0, 30:] = -math.inf
    assert torch.allclose(apply(logits, [sequence]), expected, atol=1e-5)


def test_rows_that_ask_for_nothing_cost_nothing() -> None:
    """Guards the common step: no copy of the logits, no tensors."""
    logits = random_logits(2)
    assert process_logits(logits, [make_request(), make_request(temperature=1.0)]) is logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_a_softmax_in_float32(dtype: torch.dtype) -> None:
    """Guards values, the likeliest tokens in order, different counts side by side, and what JSON cannot say."""
    logits = random_logits(3).to(dtype)
    logits[1, 4] = -math.inf
    found = PendingLogprobs(logits, torch.tensor([7, 4, 0]), [3, 0, VOCABULARY + 5]).get()
    expected = logits.double().log_softmax(-1)
    assert abs(found[0].logprob - float(expected[0, 7])) < 1e-5 and found[1].logprob == MIN_LOGPROB
    assert [len(one.top) for one in found] == [3, 0, VOCABULARY]
    assert [token for token, _ in found[0].top] == logits[0].float().topk(3).indices.tolist()
    assert all(abs(value - float(expected[2, token])) < 1e-5 for token, value in found[2].top)


def test_logprobs_of_many_rows_are_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a long prompt with a large vocabulary against a float32 copy of all its logits at once."""
    logits = random_logits(7)
    whole = PendingLogprobs(logits, torch.arange(7), [2] * 7).get()
    monkeypatch.setattr("cbatch.sample.output.MAX_ELEMENTS", 3 * VOCABULARY)
    assert PendingLogprobs(logits, torch.arange(7), [2] * 7).get() == whole
