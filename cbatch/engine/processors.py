"""Logits processors: what requests ask to change in their logits before a token is chosen.

All rows of a step at once, and only those that ask for something; the order is that of transformers: bias,
repetition penalty, presence and frequency penalties, then what is forbidden: words, early ends, other forms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from cbatch.engine.request import Request

Places = tuple[Tensor, Tensor]
"""Places in logits [R, V]: rows and token ids, each [N] int64."""


def _places(rows: Sequence[int], tokens: Sequence[Sequence[int]], device: torch.device) -> Places:
    """`tokens[i]` are those of row `rows[i]`."""
    counts = [len(ids) for ids in tokens]
    ids = np.fromiter(chain.from_iterable(tokens), np.int64, sum(counts))
    repeated = np.repeat(np.array(rows, np.int64), counts)
    return torch.from_numpy(repeated).to(device), torch.from_numpy(ids).to(device)


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of P rows: which rows of the logits, their tokens, and three factors [P].

    known, generated: places in [P, V]: tokens of prompt and output, and of the output alone, once for each time
    """

    rows: Tensor
    known: Places
    generated: Places
    repetition: Tensor
    presence: Tensor
    frequency: Tensor

    @classmethod
    def build(cls, rows: list[int], requests: Sequence[Request], device: torch.device) -> Penalties:
        those = [requests[row] for row in rows]
        places = range(len(rows))

        def column(name: str) -> Tensor:
            return torch.tensor([getattr(request.params, name) for request in those], device=device)

        repeating = [request.token_ids if request.params.repetition_penalty != 1 else () for request in those]
        return cls(
            rows=torch.tensor(rows, device=device),
            known=_places(places, repeating, device),
            generated=_places(places, [request.token_ids[request.num_prompt :] for request in those], device),
            repetition=column("repetition_penalty"),
            presence=column("presence_penalty"),
            frequency=column("frequency_penalty"),
        )

    def apply(self, logits: Tensor) -> None:
        """Changes logits [R, V] float32 in place.

        Presence and frequency: https://platform.openai.com/docs/api-reference, "frequency and presence penalties".
        """
        chosen = logits[self.rows]
        known = torch.zeros_like(chosen, dtype=torch.bool)
        known[self.known] = True
        factor = self.repetition[:, None]
        chosen = torch.where(known, torch.where(chosen < 0, chosen * factor, chosen / factor), chosen)
        counts = torch.zeros_like(chosen)
        one = torch.ones((), device=logits.device)
        counts.index_put_(self.generated, one, accumulate=True)
        chosen -= counts * self.frequency[:, None] + (counts > 0) * self.presence[:, None]
        logits[self.rows] = chosen


@dataclass(frozen=True, slots=True)
class Processors:
    """What the R rows of a step ask for; a part that no row asks for is None and costs nothing.

    forbidden:  tokens that may not come now: the ends of bad words, and end tokens before min_tokens
    """

    bias: tuple[Places, Tensor] | None
    penalties: Penalties | None
    forbidden: Places | None

    @classmethod
    def build(cls, requests: Sequence[Request], device: torch.device) -> Processors:
        biased = [row for row, request in enumerate(requests) if request.params.logit_bias]
        penalized = [row for row, request in enumerate(requests) if _has_penalty(request)]
        forbidden = {row: tokens for row, request in enumerate(requests) if (tokens := _forbidden(request))}
        return cls(
            bias=_bias(biased, requests, device) if biased else None,
            penalties=Penalties.build(penalized, requests, device) if penalized else None,
            forbidden=_places(list(forbidden), list(forbidden.values()), device) if forbidden else None,
        )

    def apply(self, logits: Tensor, allowed: Tensor | None = None, guided: Sequence[int] = ()) -> Tensor:
        """Logits [R, V] as the rows want them, in float32 where any of them wants something; the given ones stay.

        allowed: [G, V] bool, tokens that the forms of rows `guided` leave
        """
        if all(part is None for part in (self.bias, self.penalties, self.forbidden, allowed)):
            return logits
        logits = logits.to(torch.float32, copy=True)
        if self.bias is not None:
            places, values = self.bias
            logits.index_put_(places, values, accumulate=True)
        if self.penalties is not None:
            self.penalties.apply(logits)
        if self.forbidden is not None:
            logits[self.forbidden] = float("-inf")
        if allowed is not None:
            rows = torch.tensor(guided, device=logits.device)
            logits[rows] = logits[rows].masked_fill(~allowed.to(logits.device), float("-inf"))
        return logits


def _bias(rows: list[int], requests: Sequence[Request], device: torch.device) -> tuple[Places, Tensor]:
    pairs = [requests[row].params.logit_bias for row in rows]
    values = torch.tensor([bias for row in pairs for _, bias in row], device=device)
    return _places(rows, [[token for token, _ in row] for row in pairs], device), values


def _has_penalty(request: Request) -> bool:
    params = request.params
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def _forbidden(request: Request) -> list[int]:
    """Tokens that would complete a bad word or end the output too early."""
    early = sorted(request.stop_ids) if request.num_generated < request.min_tokens else []
    ids = request.token_ids
    ends = [word[-1] for word in request.bad_words if len(word) == 1 or ids[1 - len(word) :] == word[:-1]]
    return early + ends
