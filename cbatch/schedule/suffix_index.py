"""Finds where the end of a text has occurred before, so that what followed there can be tried again.

The index is a suffix automaton: a suffix tree of the text with equal subtrees merged. It grows by one token in constant
time on average, and has at most two states for each token (Blumer et al., Theoretical Computer Science 40, 1985).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

NONE = -1
"""No state, and no token."""

END = -2
"""In place of a token, ends one of several texts in an index; no match goes on past it."""


class Match(NamedTuple):
    """The longest suffix of a text that occurs in an index.

    state:  of the index
    length: tokens of that suffix; 0 if not even the last token occurs
    """

    state: int = 0
    length: int = 0


class SuffixIndex:
    """All substrings of a growing text, each with the place where it occurred last, or an earlier one.

    A token takes about 230 bytes: most states have one transition, so lists hold the first of each state.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._first: list[int] = [NONE]
        """For each state, the token of its first transition."""
        self._first_to: list[int] = [NONE]
        """For each state, the state that this leads to."""
        self._others: dict[int, dict[int, int]] = {}
        """Further transitions, of the states that have any."""
        self._link: list[int] = [NONE]
        """For each state, that of its longest suffix that occurs in more places."""
        self._length: list[int] = [0]
        self._end: list[int] = [0]
        """For each state, a place where its substrings have ended: the number of tokens up to there."""
        self._last = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds tokens at the end of the text. Many at once take half as long as one by one."""
        first, first_to, others = self._first, self._first_to, self._others
        link, length, end = self._link, self._length, self._end
        last, at_end, new = self._last, len(self.tokens), len(end)
        self.tokens += tokens
        ends = range(at_end + 1, len(self.tokens) + 1)  # one state for each prefix
        first += [NONE] * len(ends)
        first_to += [NONE] * len(ends)
        link += [0] * len(ends)
        length += ends
        end += ends
        for token in tokens:
            end[link[last] if last else 0] = at_end
            at_end += 1
            at = last
            while at >= 0:
                known = first[at]
                if known == NONE:
                    first[at], first_to[at] = token, new
                elif known == token:
                    break
                elif at not in others:
                    others[at] = {token: new}
                elif token in others[at]:
                    break
                else:
                    others[at][token] = new
                at = link[at]
            if at >= 0:
                after = first_to[at] if known == token else others[at][token]
                link[new] = after if length[after] == length[at] + 1 else self._split(after, at, token)
            last = new
            new += 1
        self._last = last

    def _following(self, state: int, token: int) -> int:
        if self._first[state] == token:
            return self._first_to[state]
        others = self._others.get(state)
        return NONE if others is None else others.get(token, NONE)

    def _split(self, state: int, before: int, token: int) -> int:
        """Splits off the state of the longest substring of `before` and the token from `state`, which has longer ones.

        Returns the new state.
        """
        link, split = self._link, len(self._end)
        self._first.append(self._first[state])
        self._first_to.append(self._first_to[state])
        self._link.append(link[state])
        self._length.append(self._length[before] + 1)
        self._end.append(self._end[state])
        if state in self._others:
            self._others[split] = self._others[state].copy()
        link[state] = split
        while before >= 0 and self._following(before, token) == state:
            if self._first[before] == token:
                self._first_to[before] = split
            else:
                self._others[before][token] = split
            before = link[before]
        return split

    def own_match(self) -> Match:
        """The longest suffix of the text that occurs in it before."""
        state = max(self._link[self._last], 0)
        return Match(state, self._length[state])

    def after(self, match: Match, count: int) -> list[int]:
        """The `count` tokens that followed a match, up to `END`, or up to the end of the text, over and over."""
        end = self._end[match.state]
        found = self.tokens[end : end + count]
        if END in found:
            return found[: found.index(END)]
        return (found * -(-count // len(found)))[:count] if found else []

    def advanced(self, match: Match, token: int) -> Match:
        """The match of another text that had `match`, once it has one more token."""
        link, length = self._link, self._length
        state, matched = match
        while state and matched <= length[link[state]]:  # since then, the index has grown, and the state was split
            state = link[state]
        while (following := self._following(state, token)) == NONE:
            if state == 0:
                return Match()
            state = link[state]
            matched = length[state]
        return Match(following, matched + 1)
