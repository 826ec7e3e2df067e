"""How the tokens that a step leaves to prompts are divided among them.

Newly admitted requests come first, then running prompts, shortest remaining first: a short prompt does not wait for a
long one that came before it. But half of the tokens belong to the oldest prompt, so that none starves, and all that it
needs if the step can finish it. Logits take memory, so a step scores a limited number of tokens; half of them, too, are
the oldest prompt's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from cbatch.schedule.output import ScheduledChunk
from cbatch.schedule.sequence import TokenSequence

ScheduleKey = tuple[int, int, int]


def schedule_key(sequence: TokenSequence) -> ScheduleKey:
    """The order of a step: priority; then decoding (0), admission (1) and prefill, shortest first; then age."""
    if sequence.is_decoding:
        return sequence.priority, 0, sequence.id
    return sequence.priority, sequence.num_pending if sequence.is_running else 1, sequence.id


class PrefillBudget:
    """Says how many tokens of a step each prompt may have; asked in the order of `schedule_key`.

    limit:      most tokens of all prompts, or None. It applies to prompts that come after a decoding request.
    max_scored: most positions whose logits score prompts
    is_limited: whether a decoding request has been scheduled
    multiple:   of which prompts get parts, if they do not get all; neither limit nor shares are below it
    """

    def __init__(
        self,
        limit: int | None,
        running: Iterable[tuple[ScheduleKey, TokenSequence]],
        multiple: int = 1,
        max_scored: int = sys.maxsize,
    ) -> None:
        self.is_limited = False
        self._left = max(limit, multiple) if limit is not None and multiple > 1 else limit
        self._multiple = multiple
        self._kept: dict[int, int] = {}
        self._oldest: dict[int, TokenSequence] = {}
        for (priority, pending, _), sequence in running:
            if pending and sequence.id <= self._oldest.get(priority, sequence).id:
                self._oldest[priority] = sequence
        self._scores = max(max_scored, 2 * multiple)
        self._kept_scores = self._scores // 2 if any(one.has_unscored_prompt for one in self._oldest.values()) else 0

    @property
    def is_exhausted(self) -> bool:
        """Whether the limit is used up."""
        return self.is_limited and self._left == 0

    def allow(self, sequence: TokenSequence, budget: int) -> int:
        """Most tokens that a prompt may have of the step's remaining `budget`."""
        if self.is_limited and self._left is not None:
            budget = min(budget, self._left)
        oldest = self._oldest.get(sequence.priority)
        if oldest is None or sequence.id <= oldest.id:  # preempted meanwhile only if all younger ones were
            return budget
        kept = self._kept.get(sequence.priority)
        if kept is None:
            wanted, half = oldest.num_pending, -(-budget // 2)
            kept = wanted if wanted <= budget else min(-(-half // self._multiple) * self._multiple, budget)
            self._kept[sequence.priority] = kept
        return budget - kept

    def allow_spans(self, sequence: TokenSequence, budget: int) -> int:
        """The tokens of `budget` that a request may have so that it ends within none of its `two_way_spans`.

        The oldest prompt gets a span that does not fit all the same, beyond the step's budget: so it always advances.
        """
        start, stop = sequence.num_computed, sequence.num_computed + budget
        first, end = next((span for span in sequence.request.two_way_spans if span[0] < stop < span[1]), (stop, stop))
        if first > start or first == stop:
            return first - start
        oldest = self._oldest.get(sequence.priority)
        return end - start if oldest is None or sequence.id <= oldest.id else 0

    def allow_scores(self, sequence: TokenSequence, budget: int) -> int:
        """How many of `budget` tokens a running request may have, if it scores its prompt."""
        if not sequence.has_unscored_prompt:
            return budget
        left = self._scores - (0 if self._is_oldest(sequence) else self._kept_scores)
        allowed = max(sequence.next_to_score - sequence.num_computed, 0) + max(left, 0)
        if allowed >= budget:
            return budget
        return max(allowed - (sequence.num_computed + allowed) % self._multiple, 0)

    def _is_oldest(self, sequence: TokenSequence) -> bool:
        return self._oldest.get(sequence.priority) is sequence

    def spare(self, budget: int) -> int:
        """Tokens of the step's remaining `budget` that drafts may have, for which the limit holds, too."""
        return budget if self._left is None else min(budget, self._left)

    def take(self, chunk: ScheduledChunk, *, is_prompt: bool) -> None:
        """Counts the tokens that a prompt was given, or a decoding request."""
        sequence = chunk.sequence
        self._scores -= len(chunk.to_score)
        if not is_prompt:
            self.is_limited = True
            return
        if self._left is not None:
            self._left = max(self._left - chunk.num_tokens, 0)
        if self._is_oldest(sequence):
            self._kept[sequence.priority] = self._kept_scores = 0
