"""Logits processors: changes that requests ask for in their logits before a token is sampled.

All rows of a step that ask for something are processed at once. `output.py` says in which order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from cbatch.base.params import SamplingParams
from cbatch.runtime.transfer import to_device
from cbatch.schedule.sequence import TokenCounts, TokenSequence

LogitIndices = tuple[Tensor, Tensor]
"""Indices into logits [R, V]: rows and token ids, each [N] int64."""


def _put(
    rows: Sequence[int], tokens: Sequence[ArrayLike], columns: Sequence[NDArray[Any]], device: torch.device
) -> tuple[LogitIndices, list[Tensor]]:
    """The indices of the tokens `tokens[i]` in row `rows[i]`, for all i, and columns [N] for them, on the device."""
    ids = [np.asarray(some, np.int64) for some in tokens]
    repeated = np.repeat(np.array(rows, np.int64), [len(some) for some in ids])
    there = to_device([repeated, np.concatenate(ids), *columns], device)
    return (there[0], there[1]), there[2:]


def process_logits(logits: Tensor, sequences: Sequence[TokenSequence]) -> Tensor:
    """A copy of logits [R, V] in float32 with what the R rows of a step ask for; the logits themselves if none does."""
    biases = {row: _as_arrays(one.params.logit_bias) for row, one in enumerate(sequences) if one.params.logit_bias}
    counts = {row: one.counts for row, one in enumerate(sequences) if one.counts is not None and one.counts.tokens}
    forbidden = {row: tokens for row, sequence in enumerate(sequences) if (tokens := _forbidden(sequence))}
    if not (biases or counts or forbidden):
        return logits
    logits = logits.to(torch.float32, copy=True)
    if biases:
        ids, values = zip(*biases.values(), strict=True)
        places, (bias,) = _put(list(biases), ids, [np.concatenate(values)], logits.device)
        logits.index_put_(places, bias, accumulate=True)
    if counts:
        _penalize(logits, counts, sequences)
    if forbidden:
        places, _ = _put(list(forbidden), list(forbidden.values()), [], logits.device)
        logits[places] = float("-inf")
    return logits


def _penalize(logits: Tensor, counts: dict[int, TokenCounts], sequences: Sequence[TokenSequence]) -> None:
    """Applies penalties to logits [R, V] float32 in place. `counts`: the known tokens of the rows that have some.

    Presence and frequency: https://platform.openai.com/docs/api-reference, "frequency and presence penalties".
    """
    params = [sequences[row].params for row in counts]
    each = [[p.repetition_penalty, p.presence_penalty, p.frequency_penalty] for p in params]
    columns = np.repeat(np.array(each, np.float32).T, [len(one.tokens) for one in counts.values()], axis=1)
    tokens = [np.frombuffer(one.tokens, np.int64) for one in counts.values()]
    counted = np.concatenate([np.frombuffer(one.counts, np.int64) for one in counts.values()])
    indices, (generated, repetition, presence, frequency) = _put(
        list(counts), tokens, [counted, *columns], logits.device
    )
    touched = logits[indices]
    touched = torch.where(touched < 0, touched * repetition, touched / repetition)
    logits[indices] = touched - generated * frequency - (generated > 0) * presence


def counts_for(params: SamplingParams, prompt: Sequence[int]) -> TokenCounts | None:
    """The tokens that a request's penalties depend on; None if it has no penalties."""
    if params.repetition_penalty != 1:
        return TokenCounts(prompt)
    return TokenCounts() if params.presence_penalty != 0 or params.frequency_penalty != 0 else None


@lru_cache(maxsize=256)
def _as_arrays(bias: tuple[tuple[int, float], ...]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Token ids and values of a bias. Cached, because they are the same in every step."""
    return np.array([token for token, _ in bias], np.int64), np.array([value for _, value in bias], np.float32)


def _forbidden(sequence: TokenSequence) -> list[int]:
    """Tokens that may not come now: the last ones of bad words, and end tokens before min_tokens."""
    early = sorted(sequence.request.stop_ids) if sequence.num_generated < sequence.min_tokens else []
    ids = sequence.token_ids
    ends = [word[-1] for word in sequence.request.bad_words if len(word) == 1 or ids[1 - len(word) :] == word[:-1]]
    return early + ends
