"""Finds where the end of a text has occurred before, so that what followed there can be tried again.

The index is a suffix automaton: a suffix tree of the text with equal subtrees merged. It grows by one token in constant
time on average, and has at most two states for each token (Blumer et al., Theoretical Computer Science 40, 1985).
"""

from __future__ import annotations

from typing import NamedTuple

END = -1
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

    A token takes about 430 bytes.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._following: list[dict[int, int]] = [{}]
        """For each state, the states that one more token leads to."""
        self._link: list[int] = [-1]
        """For each state, that of its longest suffix that occurs in more places."""
        self._length: list[int] = [0]
        self._end: list[int] = [0]
        """For each state, a place where its substrings have ended: the number of tokens up to there."""
        self._last = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, token: int) -> None:
        """Adds one token at the end of the text."""
        following, link, length, end = self._following, self._link, self._length, self._end
        self._end[max(link[self._last], 0)] = len(self.tokens)
        self.tokens.append(token)
        new, at = len(length), self._last
        length.append(len(self.tokens))
        end.append(len(self.tokens))
        following.append({})
        link.append(0)
        while at >= 0 and token not in following[at]:
            following[at][token] = new
            at = link[at]
        if at >= 0:
            link[new] = self._exactly(following[at][token], at, token)
        self._last = new

    def _exactly(self, state: int, before: int, token: int) -> int:
        """The state of the longest substring of `before` and the token, split from `state` if that has longer ones."""
        following, link, length = self._following, self._link, self._length
        if length[state] == length[before] + 1:
            return state
        split = len(length)
        length.append(length[before] + 1)
        self._end.append(self._end[state])
        following.append(following[state].copy())
        link.append(link[state])
        link[state] = split
        while before >= 0 and following[before].get(token) == state:
            following[before][token] = split
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
        following, link, length = self._following, self._link, self._length
        state, matched = match
        while state and matched <= length[link[state]]:  # since then, the index has grown, and the state was split
            state = link[state]
        while state and token not in following[state]:
            state = link[state]
            matched = length[state]
        if token not in following[state]:
            return Match()
        return Match(following[state][token], matched + 1)
