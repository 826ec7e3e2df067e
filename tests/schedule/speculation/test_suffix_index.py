"""The suffix index against a search through the text."""

from __future__ import annotations

import random

from cbatch.schedule.speculation.suffix_index import Match, SuffixIndex


def ends_of(part: list[int], text: list[int]) -> list[int]:
    return [at + len(part) for at in range(len(text) - len(part) + 1) if text[at : at + len(part)] == part]


def test_own_match_is_the_longest_suffix_that_occurs_before() -> None:
    """Guards splits of states: the length is the longest there is, and the place is one where that text ends."""
    for seed in range(60):
        rng = random.Random(seed)
        index, text = SuffixIndex(), []
        for _ in range(80):
            text.append(rng.randrange(rng.choice([2, 3, 9])))
            index.append(text[-1])
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
                single.append(token)
            assert whole.tokens == single.tokens == text[:at]
            assert whole.own_match().length == single.own_match().length
            assert whole.after(whole.own_match(), 4) == single.after(single.own_match(), 4)
        found, wanted = Match(), Match()
        for token in [rng.randrange(9) for _ in range(60)]:
            found, wanted = whole.advanced(found, token), single.advanced(wanted, token)
            assert found.length == wanted.length and whole.after(found, 3) == single.after(wanted, 3)


def test_what_repeats_is_continued_for_ever() -> None:
    """Guards drafts at the end of a text that goes in circles."""
    index = SuffixIndex()
    for token in [1, 2, 3, 1, 2, 3]:
        index.append(token)
    assert index.after(index.own_match(), 7) == [1, 2, 3, 1, 2, 3, 1]
