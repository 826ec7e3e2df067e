"""Where drafts come from: a request's own text, and finished outputs.

The longest match says the draft. A form cuts it before the first token that it does not allow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cbatch.schedule.sequence import TokenSequence
from cbatch.schedule.suffix_index import END, Match, SuffixIndex

MIN_MATCH = 2
"""Tokens at the end of a text that must have occurred before, by default; a single one says little about the next."""

LOOK_BACK = 8
"""Tokens at the end of a text that are looked for in an index of other texts that is new to it."""

MAX_INDEXED, MAX_FINISHED_INDEXED = 1024, 256
"""Tokens of requests, and of finished outputs, that one step indexes; 1,000 take 0.2 to 0.45 milliseconds.

Of finished outputs, a step also indexes as many as it computes of prompts, which takes far longer.
"""

MAX_TOKENS = 2**17
"""Tokens of running requests that are indexed in all (about 30 MB); requests beyond have no drafts."""

CAPACITY = 2**15
"""Tokens of one of the two indexes of finished outputs: about 8 MB."""

PROMPT_TAIL = 16
"""Tokens of the prompt that are kept before a finished output, so that its first tokens can be found."""


class Proposal(NamedTuple):
    """Tokens that may come next.

    matched: tokens at the end of the text that occurred where these followed
    """

    tokens: list[int]
    matched: int


class FinishedOutputs:
    """Finished outputs, in which later requests find drafts: templated rows, second turns of a chat.

    Memory is bounded: outputs go into the younger of two indexes; when that is full, the older one is dropped as a
    whole, and another begun.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._to_index: deque[int] = deque(maxlen=capacity)
        """Tokens that are not indexed yet; the oldest go if they are too many."""
        self.indexes = [SuffixIndex()]
        """The one that grows, and the full one before it, if there is any."""
        self.num_begun = 1
        """Indexes that were begun so far."""

    def add(self, token_ids: Sequence[int]) -> None:
        """Adds an output."""
        self._to_index += token_ids
        self._to_index.append(END)

    def update(self, most: int) -> int:
        """Indexes at most so many tokens of the outputs that were added. Returns how many."""
        count = left = min(most, len(self._to_index))
        while left:
            if len(self.indexes[0]) >= self._capacity:
                self.indexes = [SuffixIndex(), self.indexes[0]]
                self.num_begun += 1
            part = min(left, self._capacity - len(self.indexes[0]))
            self.indexes[0].extend([self._to_index.popleft() for _ in range(part)])
            left -= part
        return count


@dataclass(slots=True)
class _Text:
    """The index of one request, and where its end occurs in those of finished outputs.

    matches:     in each index of finished outputs, the match of the first `num_matched` tokens
    num_indexes: that were begun when the matches were made
    """

    index: SuffixIndex = field(default_factory=SuffixIndex)
    matches: list[Match] = field(default_factory=list)
    num_matched: int = 0
    num_indexes: int = 0

    def match_others(self, finished: FinishedOutputs) -> None:
        """Finds the end of the request in the indexes of finished outputs."""
        own = self.index.tokens
        if self.num_indexes != finished.num_begun or len(own) - self.num_matched > LOOK_BACK:
            self.num_indexes = finished.num_begun
            self.num_matched = max(len(own) - LOOK_BACK, 0)
            self.matches = [Match()] * len(finished.indexes)
        new = own[self.num_matched :]
        for number, index in enumerate(finished.indexes):
            match = self.matches[number]
            for token in new:
                match = index.advanced(match, token)
            self.matches[number] = match
        self.num_matched = len(own)


class DraftSources:
    """Proposes drafts for the requests of one engine."""

    def __init__(self, min_match: int) -> None:
        """min_match: tokens at the end of a text that must have occurred before"""
        self._min_match = min_match
        self._finished = FinishedOutputs()
        self._texts: dict[TokenSequence, _Text] = {}
        self._num_indexed = 0
        self._budget = MAX_INDEXED

    def begin_step(self, prompt_tokens: int = 0) -> None:
        """From now on, a step's share of tokens can be indexed again. prompt_tokens: that it computes"""
        self._finished.update(MAX_FINISHED_INDEXED + min(prompt_tokens, MAX_INDEXED))
        self._budget = MAX_INDEXED

    def propose(self, sequence: TokenSequence, count: int) -> Proposal | None:
        """At most `count` tokens that the request may get next; None if nothing is known."""
        text = self.index(sequence, MAX_INDEXED)
        found = self._find(text, count) if len(text.index) == len(sequence.token_ids) else None
        if found is None or sequence.guide is None:
            return found
        if sequence.guide.alternative is not None and sequence.params.logprobs is not None:
            return None  # log-probabilities of an alternative are known for the first token of a step only
        allowed = sequence.guide.num_allowed(found.tokens)
        return Proposal(found.tokens[:allowed], found.matched) if allowed else None

    def _find(self, text: _Text, count: int) -> Proposal | None:
        """The continuation of the text with the longest match, the own one first."""
        best, where = text.index.own_match(), text.index
        if len(self._finished.indexes[0]):
            text.match_others(self._finished)
            for number, match in enumerate(text.matches):
                if match.length > best.length:
                    best, where = match, self._finished.indexes[number]
        tokens = where.after(best, count) if best.length >= self._min_match else []
        return Proposal(tokens, best.length) if tokens else None

    def forget(self, sequence: TokenSequence) -> None:
        """Drops the index of a request that has ended, and keeps its output for others."""
        text = self._texts.pop(sequence, None)
        self._num_indexed -= len(text.index) if text is not None else 0
        if sequence.num_generated:
            self._finished.add(sequence.token_ids[max(sequence.num_prompt - PROMPT_TAIL, 0) :])

    def index(self, sequence: TokenSequence, most: int) -> _Text:
        """Indexes what a request has grown by: at most so many tokens, and as many as step and memory allow."""
        text = self._texts.get(sequence)
        if text is None:
            text = self._texts[sequence] = _Text()
        done, tokens = len(text.index), sequence.token_ids
        if len(tokens) > done and self._num_indexed + len(tokens) - done <= MAX_TOKENS:
            new = tokens[done : done + min(most, self._budget)]
            text.index.extend(new)
            self._budget -= len(new)
            self._num_indexed += len(new)
        return text
