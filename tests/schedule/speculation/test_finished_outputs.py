"""The index of finished outputs: matches of other texts, and bounded memory."""

from __future__ import annotations

import random

from cbatch.schedule.speculation.finished_outputs import FinishedOutputs
from cbatch.schedule.speculation.suffix_index import Match, SuffixIndex


def occurs(part: list[int], text: list[int]) -> bool:
    return any(text[at : at + len(part)] == part for at in range(len(text) - len(part) + 1))


def test_matches_of_another_text_are_the_longest() -> None:
    """Guards matches while the index grows: a state may be split after a text has matched it."""
    for seed in range(40):
        rng = random.Random(seed)
        symbols = rng.choice([2, 3, 6])
        index, match, text = SuffixIndex(), Match(), []
        for _ in range(120):
            for _ in range(rng.randrange(3)):
                index.append(rng.randrange(symbols))
            text.append(rng.randrange(symbols))
            match = index.advanced(match, text[-1])
            # What was appended since a shorter match cannot make it longer: a match only grows at its end.
            assert occurs(text[len(text) - match.length :], index.tokens)
            if match.length:
                after = index.after(match, 1)
                assert not after or occurs([*text[len(text) - match.length :], *after], index.tokens * 2)
    still = SuffixIndex()
    tokens = [random.Random(1).randrange(3) for _ in range(300)]
    for token in tokens:
        still.append(token)
    match, text = Match(), []
    for _ in range(200):
        text.append(rng.randrange(3))
        match = still.advanced(match, text[-1])
        assert match.length == max(n for n in range(len(text) + 1) if occurs(text[len(text) - n :], tokens))


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
