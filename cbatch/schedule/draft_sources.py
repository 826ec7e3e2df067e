"""Where drafts come from: a request's own text, finished outputs, and what a form forces.

The longest match says the draft. A form cuts it before the first token that it does not allow; if it forces text, that
is the draft, unless a match agrees and goes on further.
"""

from __future__ import annotations

from cbatch.schedule.sequence import TokenSequence
from cbatch.schedule.speculation.drafter import FORCED, Drafter, Proposal
from cbatch.schedule.speculation.finished_outputs import FinishedOutputs

MAX_INDEXED, MAX_FINISHED_INDEXED = 1024, 256
"""Tokens of requests, and of finished outputs, that one step indexes; 1,000 take 0.2 to 0.45 milliseconds.

Of finished outputs, a step also indexes as many as it computes of prompts, which takes far longer.
"""

MAX_TOKENS = 2**17
"""Tokens of running requests that are indexed in all (about 30 MB); requests beyond have no drafts."""

PROMPT_TAIL = 16
"""Tokens of the prompt that are kept before a finished output, so that its first tokens can be found."""


class DraftSources:
    """Proposes drafts for the requests of one engine."""

    def __init__(self, min_match: int) -> None:
        """min_match: tokens at the end of a text that must have occurred before"""
        self._min_match = min_match
        self._finished = FinishedOutputs()
        self._drafters: dict[TokenSequence, Drafter] = {}
        self._num_indexed = 0
        self._budget = MAX_INDEXED

    def begin_step(self, prompt_tokens: int = 0) -> None:
        """From now on, a step's share of tokens can be indexed again. prompt_tokens: that it computes"""
        self._finished.update(MAX_FINISHED_INDEXED + min(prompt_tokens, MAX_INDEXED))
        self._budget = MAX_INDEXED

    def propose(self, sequence: TokenSequence, count: int) -> Proposal | None:
        """At most `count` tokens that the request may get next; None if nothing is known."""
        grammar = sequence.grammar_state
        drafter = self.index(sequence, MAX_INDEXED)
        found = drafter.propose(count, self._min_match) if len(drafter) == len(sequence.token_ids) else None
        if grammar is None:
            return found
        if found is not None and (allowed := grammar.num_allowed(found.tokens)) < len(found.tokens):
            found = Proposal(found.tokens[:allowed], found.matched) if allowed else None
        if forced := grammar.forced_tokens()[:count]:
            agrees = found is not None and found.tokens[: len(forced)] == forced
            return found if agrees else Proposal(forced, FORCED)
        return found

    def forget(self, sequence: TokenSequence) -> None:
        """Drops the index of a request that has ended, and keeps its output for others."""
        drafter = self._drafters.pop(sequence, None)
        self._num_indexed -= len(drafter) if drafter is not None else 0
        if sequence.num_generated:
            self._finished.add(sequence.token_ids[max(sequence.num_prompt - PROMPT_TAIL, 0) :])

    def index(self, sequence: TokenSequence, most: int) -> Drafter:
        """Indexes what a request has grown by: at most so many tokens, and as many as step and memory allow."""
        drafter = self._drafters.get(sequence)
        if drafter is None:
            drafter = self._drafters[sequence] = Drafter(self._finished)
        text = sequence.token_ids
        missing = len(text) - len(drafter)
        if missing and self._num_indexed + missing <= MAX_TOKENS:
            done = drafter.update(text, min(most, self._budget))
            self._budget -= done
            self._num_indexed += done
        return drafter
