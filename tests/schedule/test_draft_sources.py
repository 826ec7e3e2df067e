"""Where drafts come from: own text, finished outputs, forms; how much of it is kept, and where texts repeat."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from cbatch.base.request import Request
from cbatch.schedule import draft_sources
from cbatch.schedule.draft_sources import (
    MAX_FINISHED_INDEXED,
    MAX_INDEXED,
    DraftSources,
    FinishedOutputs,
    Proposal,
)
from cbatch.schedule.sequence import TokenSequence
from cbatch.schedule.suffix_index import Match, SuffixIndex


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
    """Allows tokens below 10."""

    alternative = None

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        return next((place for place, token in enumerate(token_ids) if token >= 10), len(token_ids))


def test_a_form_cuts_drafts() -> None:
    """Guards constrained requests: no token that is forbidden is drafted."""
    form: Any = Form()
    assert step(DraftSources(2), request_of(0, [1, 2, 3, 4, 50, 6, 1, 2], guide=form)) == Proposal([3, 4], 2)
    assert step(DraftSources(2), request_of(3, [60, 70, 60, 70], guide=form)) is None


def ends_of(part: list[int], text: list[int]) -> list[int]:
    return [at + len(part) for at in range(len(text) - len(part) + 1) if text[at : at + len(part)] == part]


def test_own_match_is_the_longest_suffix_that_occurs_before() -> None:
    """Guards splits of states: the length is the longest there is, and the place is one where that text ends."""
    for seed in range(60):
        rng = random.Random(seed)
        index, text = SuffixIndex(), []
        for _ in range(80):
            text.append(rng.randrange(rng.choice([2, 3, 9])))
            index.extend([text[-1]])
            longest = next(n for n in range(len(text) - 1, -1, -1) if n == 0 or len(ends_of(text[-n:], text)) > 1)
            match = index.own_match()
            assert match.length == longest
            if longest:
                places = [text[end:] for end in ends_of(text[-longest:], text)[:-1]]
                assert index.after(match, 3) in [(rest * 3)[:3] for rest in places]


def test_many_tokens_at_once_are_indexed_as_one_by_one() -> None:
    """Guards prompts, which are indexed in long parts: the same matches and places, also for texts to come."""
    for seed in range(60):
        rng = random.Random(seed)
        text = [rng.randrange(rng.choice([2, 3, 9])) for _ in range(120)]
        single, whole, at = SuffixIndex(), SuffixIndex(), 0
        while at < len(text):
            part = text[at : at + rng.randrange(1, 30)]
            at += len(part)
            whole.extend(part)
            for token in part:
                single.extend([token])
            assert whole.tokens == single.tokens == text[:at]
            assert whole.own_match().length == single.own_match().length
            assert whole.after(whole.own_match(), 4) == single.after(single.own_match(), 4)
        found, wanted = Match(), Match()
        for token in [rng.randrange(9) for _ in range(60)]:
            found, wanted = whole.advanced(found, token), single.advanced(wanted, token)
            assert found.length == wanted.length and whole.after(found, 3) == single.after(wanted, 3)


def test_matches_of_another_text_are_the_longest() -> None:
    """Guards matches while the index grows: a state may be split after a text has matched it."""
    for seed in range(40):
        rng = random.Random(seed)
        symbols = rng.choice([2, 3, 6])
        index, match, text = SuffixIndex(), Match(), []
        for _ in range(120):
            for _ in range(rng.randrange(3)):
                index.extend([rng.randrange(symbols)])
            text.append(rng.randrange(symbols))
            match = index.advanced(match, text[-1])
            # What was appended since a shorter match cannot make it longer: a match only grows at its end.
            assert ends_of(text[len(text) - match.length :], index.tokens)
            if match.length:
                after = index.after(match, 1)
                assert not after or ends_of([*text[len(text) - match.length :], *after], index.tokens * 2)
    still = SuffixIndex()
    tokens = [random.Random(1).randrange(3) for _ in range(300)]
    for token in tokens:
        still.extend([token])
    match, text = Match(), []
    for _ in range(200):
        text.append(rng.randrange(3))
        match = still.advanced(match, text[-1])
        assert match.length == max(n for n in range(len(text) + 1) if ends_of(text[len(text) - n :], tokens))


def test_memory_is_bounded_and_the_oldest_go_first() -> None:
    """Guards a run of many rows: two indexes of so many tokens, whatever was added."""
    finished = FinishedOutputs(capacity=100)
    for number in range(50):
        finished.add([number] * 30)
        while finished.update(7):
            assert len(finished.indexes) <= 2 and all(len(index) <= 100 for index in finished.indexes)
    held = {token for index in finished.indexes for token in index.tokens if token >= 0}
    assert held == set(range(min(held), 50)) and len(held) >= 4
    finished.add(range(1000))
    assert finished.update(10**6) <= 100, "the tokens that wait are bounded, too"
