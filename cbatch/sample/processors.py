"""Logits processors: changes that requests ask for in their logits before a token is sampled.

All rows of a step that ask for something are processed at once. `output.py` says in which order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of some rows.

    indices: the logits that they change
    counts:  [N], how often each of these tokens was generated
    The other fields [N] are the penalties of their rows.
    """

    indices: LogitIndices
    counts: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor

    @classmethod
    def build(
        cls, counts: dict[int, TokenCounts], sequences: Sequence[TokenSequence], device: torch.device
    ) -> Penalties:
        """`counts`: the known tokens of the rows with penalties, by row."""
        params = [sequences[row].params for row in counts]
        each = [[p.repetition_penalty, p.presence_penalty, p.frequency_penalty] for p in params]
        columns = np.repeat(np.array(each, np.float32).T, [len(one.tokens) for one in counts.values()], axis=1)
        tokens = [np.frombuffer(one.tokens, np.int64) for one in counts.values()]
        generated = np.concatenate([np.frombuffer(one.counts, np.int64) for one in counts.values()])
        indices, there = _put(list(counts), tokens, [generated, *columns], device)
        return cls(indices, *there)

    def apply(self, logits: Tensor) -> None:
        """Changes logits [R, V] float32 in place.

        Presence and frequency: https://platform.openai.com/docs/api-reference, "frequency and presence penalties".
        """
        touched = logits[self.indices]
        touched = torch.where(touched < 0, touched * self.repetition, touched / self.repetition)
        logits[self.indices] = touched - self.counts * self.frequency - (self.counts > 0) * self.presence


def counts_for(params: SamplingParams, prompt: Sequence[int]) -> TokenCounts | None:
    """The tokens that a request's penalties depend on; None if it has no penalties."""
    if params.repetition_penalty != 1:
        return TokenCounts(prompt)
    return TokenCounts() if params.presence_penalty != 0 or params.frequency_penalty != 0 else None


@dataclass(frozen=True, slots=True)
class Processors:
    """The changes to logits that the R rows of a step ask for. A part that no row asks for is None.

    forbidden: tokens that may not come now: the last ones of bad words, and end tokens before min_tokens
    """

    bias: tuple[LogitIndices, Tensor] | None
    penalties: Penalties | None
    forbidden: LogitIndices | None

    @classmethod
    def build(cls, sequences: Sequence[TokenSequence], device: torch.device) -> Processors:
        biases = {row: _as_arrays(one.params.logit_bias) for row, one in enumerate(sequences) if one.params.logit_bias}
        bias = None
        if biases:
            ids, values = zip(*biases.values(), strict=True)
            indices, there = _put(list(biases), ids, [np.concatenate(values)], device)
            bias = indices, there[0]
        counts = {row: r.counts for row, r in enumerate(sequences) if r.counts is not None and r.counts.tokens}
        forbidden = {row: tokens for row, sequence in enumerate(sequences) if (tokens := _forbidden(sequence))}
        return cls(
            bias=bias,
            penalties=Penalties.build(counts, sequences, device) if counts else None,
            forbidden=_put(list(forbidden), list(forbidden.values()), [], device)[0] if forbidden else None,
        )

    def apply(self, logits: Tensor) -> Tensor:
        """A processed copy of logits [R, V] in float32; the logits themselves if no row asks for anything."""
        if self.bias is None and self.penalties is None and self.forbidden is None:
            return logits
        logits = logits.to(torch.float32, copy=True)
        if self.bias is not None:
            places, values = self.bias
            logits.index_put_(places, values, accumulate=True)
        if self.penalties is not None:
            self.penalties.apply(logits)
        if self.forbidden is not None:
            logits[self.forbidden] = float("-inf")
        return logits


@lru_cache(maxsize=256)
def _as_arrays(bias: tuple[tuple[int, float], ...]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Token ids and values of a bias. Cached, because they are the same in every step."""
    return np.array([token for token, _ in bias], np.int64), np.array([value for _, value in bias], np.float32)


def _forbidden(sequence: TokenSequence) -> list[int]:
    """Tokens that would complete a bad word or end the output too early."""
    early = sorted(sequence.request.stop_ids) if sequence.num_generated < sequence.min_tokens else []
    ids = sequence.token_ids
    ends = [word[-1] for word in sequence.request.bad_words if len(word) == 1 or ids[1 - len(word) :] == word[:-1]]
    return early + ends
