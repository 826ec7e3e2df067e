"""Where drafts come from: own text, finished outputs, forms; and how much of it is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from cbatch.base.request import Request
from cbatch.schedule import draft_sources
from cbatch.schedule.draft_sources import MAX_FINISHED_INDEXED, MAX_INDEXED, DraftSources
from cbatch.schedule.sequence import TokenSequence
from cbatch.schedule.speculation.drafter import FORCED, Proposal


def request_of(number: int, tokens: Sequence[int], prompt: int = 1, **fields: Any) -> TokenSequence:
    made = TokenSequence(number, list(tokens[:prompt]), Request(max_new_tokens=100), **fields)
    made.token_ids += tokens[prompt:]
    return made


def step(sources: DraftSources, sequence: TokenSequence, count: int = 4) -> Proposal | None:
    sources.begin_step()
    return sources.propose(sequence, count)


def test_a_finished_output_is_drafted_if_its_match_is_longer() -> None:
    """Guards templated outputs and second turns: the first tokens of an output are found behind the same prompt."""
    sources = DraftSources(2)
    sources.forget(request_of(0, [1, 2, 3, 40, 41, 42, 43, 44], prompt=3))
    assert step(sources, request_of(1, [9, 1, 2, 3])) == Proposal([40, 41, 42, 43], 3)
    own = request_of(2, [2, 3, 7, 8, 2, 3])
    assert step(sources, own) == Proposal([7, 8, 2, 3], 2), "of equal matches, the own text says"
    own.token_ids = [5, 1, 2, 3, 40, 5, 3, 40]
    assert step(DraftSources(2), own) == Proposal([5, 3, 40, 5], 2)


def test_the_end_of_an_output_is_not_drafted_across() -> None:
    """Guards the border between two finished outputs."""
    sources = DraftSources(2)
    for tokens in ([1, 2, 3, 4], [5, 6, 7, 8]):
        sources.forget(request_of(0, tokens))
    assert step(sources, request_of(1, [9, 2, 3])) == Proposal([4], 2)
    assert step(sources, request_of(2, [9, 3, 4])) is None


def test_a_step_indexes_a_bounded_number_of_tokens() -> None:
    """Guards steps against long prompts and outputs: they are indexed in parts, and drafted when they are whole."""
    sources, tokens = DraftSources(2), list(range(3 * MAX_INDEXED))
    sequence = request_of(0, [*tokens, 1, 2])
    found = [step(sources, sequence) for _ in range(4)]
    assert found[:3] == [None] * 3 and found[3] == Proposal([3, 4, 5, 6], 2)
    assert sources._num_indexed == len(sequence.token_ids)
    sources.forget(sequence)
    assert sources._num_indexed == 0
    before = len(sources._finished.indexes[0])
    sources.begin_step()
    assert len(sources._finished.indexes[0]) - before <= MAX_FINISHED_INDEXED


def test_a_prompt_is_indexed_while_it_is_computed() -> None:
    """Guards the first draft of a request: it does not wait until a long prompt is indexed."""
    sources, tokens = DraftSources(2), [*range(3 * MAX_INDEXED), 1, 2]
    sequence = request_of(0, tokens, prompt=len(tokens))
    for part in (MAX_INDEXED // 2, MAX_INDEXED, MAX_INDEXED, MAX_INDEXED // 2 + 2):
        sources.begin_step()
        sources.index(sequence, part)
    assert step(sources, sequence) == Proposal([3, 4, 5, 6], 2)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a long run: the tokens of running requests that are indexed, and those of finished outputs."""
    monkeypatch.setattr(draft_sources, "MAX_TOKENS", 100)
    sources = DraftSources(2)
    sequences = [request_of(number, [number, number + 1] * 15) for number in range(5)]
    found = [step(sources, sequence) for sequence in sequences]
    assert [one is not None for one in found] == [True, True, True, False, False]
    assert sources._num_indexed == 90
    sources.forget(sequences[0])
    assert step(sources, sequences[4]) is not None, "there is room again"


class Form:
    """Allows tokens below 10, and forces some."""

    is_finished = False

    def __init__(self, forced: list[int]) -> None:
        self.forced = forced

    def accept(self, token_id: int) -> None: ...

    def forced_tokens(self) -> list[int]:
        return self.forced

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        return next((place for place, token in enumerate(token_ids) if token >= 10), len(token_ids))


def test_a_form_cuts_drafts_and_forces_them() -> None:
    """Guards constrained requests: no token that is forbidden, and forced ones, or more if a text agrees."""
    text = [1, 2, 3, 4, 50, 6, 1, 2]
    assert step(DraftSources(2), request_of(0, text, grammar_state=Form([]))) == Proposal([3, 4], 2)
    assert step(DraftSources(2), request_of(1, text, grammar_state=Form([3]))) == Proposal([3, 4], 2)
    assert step(DraftSources(2), request_of(2, text, grammar_state=Form([7, 8]))) == Proposal([7, 8], FORCED)
    assert step(DraftSources(2), request_of(3, [60, 70, 60, 70], grammar_state=Form([]))) is None
