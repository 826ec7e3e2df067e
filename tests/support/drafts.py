"""Drafts that a test decides on, in place of those from texts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from cbatch.schedule.draft_policy import DraftPolicy
from cbatch.schedule.draft_sources import DraftSources, Proposal
from cbatch.schedule.output import SchedulerOutput
from cbatch.schedule.sequence import TokenSequence

Propose = Callable[[TokenSequence, int], Proposal | None]


class Prophet:
    """Drafts what requests will get, with mistakes. Forms are not asked whether they allow it."""

    def __init__(self, outputs: Sequence[Sequence[int]], vocabulary: int, right: float = 0.7) -> None:
        """
        outputs: of all requests, without speculation
        right:   the share of tokens that are not a mistake
        """
        self._rng = random.Random(0)
        self._vocabulary, self._right = vocabulary, right
        self._outputs = [list(output) for output in outputs]

    def __call__(self, sequence: TokenSequence, count: int) -> Proposal | None:
        told = sequence.token_ids[sequence.num_prompt :]
        for output in self._outputs if told else ():
            if output[: len(told)] == told:
                draft = [self._changed(token) for token in output[len(told) :][:count]]
                return Proposal(draft, 20) if draft else None
        return None

    def _changed(self, token: int) -> int:
        return token if self._rng.random() < self._right else self._rng.randrange(self._vocabulary)


def propose_by(monkeypatch: pytest.MonkeyPatch, propose: Propose) -> None:
    """Makes all engines draft what `propose` says."""
    monkeypatch.setattr(DraftSources, "propose", lambda _, sequence, count: propose(sequence, count))


def decide_at_random(monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> None:
    """Makes `auto` draft any part of what is found, whatever it costs."""
    rng = random.Random(seed)
    monkeypatch.setattr(DraftPolicy, "rests", lambda *_: rng.random() < 0.1)
    monkeypatch.setattr(DraftPolicy, "looks_beside", lambda *_: True)
    monkeypatch.setattr(DraftPolicy, "most", 24)
    monkeypatch.setattr(DraftPolicy, "is_promising", lambda *_: rng.random() < 0.7)

    def some(self: DraftPolicy, scheduled: SchedulerOutput, found: dict[int, Proposal], budget: int) -> list[int]:
        tokens = [number for number, proposal in found.items() for _ in proposal.tokens]
        return tokens[: rng.randrange(min(len(tokens), budget) + 1)]

    monkeypatch.setattr(DraftPolicy, "_worth", some)
