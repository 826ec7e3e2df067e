"""A plain model whose next token is a pure function of all tokens before it, so every output is known in advance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cbatch.base.outputs import FinishReason
from cbatch.schedule.sequence import TokenSequence

Stamps = NDArray[np.int64]


class CollidingToken(int):
    """A token with the same hash as any other, so that only its value tells it apart."""

    def __hash__(self) -> int:
        return 0


@dataclass(slots=True)
class OracleRequest:
    """A request, with what the oracle knows of it.

    tokens:  prompt and whole output
    stamps:  what each token's slot must hold
    reason:  why the output ends there
    entered: number of the step that last admitted it
    cached:  tokens of it that were cached when it was first admitted to a step that was not rolled back
    """

    sequence: TokenSequence
    tokens: list[int]
    stamps: Stamps
    reason: FinishReason
    entered: int = 0
    cached: int = 0


def stamps_of(tokens: Sequence[int], before: Sequence[int] = (), position_offset: int = 0) -> list[int]:
    """The stamps of tokens; `before` are those of the tokens in front of them.

    A stamp stands for a token, its position id and all tokens before it.
    """
    stamps = list(before)
    for position, token in enumerate(tokens, len(stamps) + position_offset):
        last = stamps[-1] if stamps else 0
        stamps.append(hash((last, position, int(token))) & (2**63 - 1))
    return stamps


def next_token(stamp: int, vocabulary: int) -> int:
    """The token that follows the one with this stamp."""
    return (stamp >> 7) % vocabulary


def make_request(sequence: TokenSequence, stop_after: int | None, vocabulary: int, kind: type[int]) -> OracleRequest:
    """A new request and its output; token number `stop_after` of that, if there is one, becomes a stop token.

    kind: of its tokens, `int` or `CollidingToken`
    """
    prompt, limit = sequence.token_ids, sequence.request.max_new_tokens
    offset = sequence.request.position_offset
    tokens, stamps = list(prompt), stamps_of(prompt, position_offset=offset)
    for _ in range(limit):
        tokens.append(kind(next_token(stamps[-1], vocabulary)))
        stamps = stamps_of(tokens[-1:], stamps, offset)
    output = tokens[len(prompt) :]
    stop = {output[stop_after - 1]} if stop_after is not None and stop_after <= limit else set()
    length = len(prompt) + next((place + 1 for place, token in enumerate(output) if token in stop), limit)
    sequence.request.stop_ids = frozenset(stop)
    return OracleRequest(sequence, tokens[:length], np.array(stamps[:length], np.int64), "stop" if stop else "length")
