"""How many tokens are drafted: as many as raise the expected tokens per second, by what steps cost and drafts gave.

The cost of a token in a step is learnt from the steps (`step_cost`). How likely a token is right is learnt for each
request by the length of the match (`acceptance`), also while nothing is drafted: then the first token that would have
been drafted is compared with the one that came. So text that does not repeat costs no drafts, and the host looks for
them ever more rarely. It also does so if the time that drafts save is less than what it takes to look for them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter

from cbatch.schedule.output import ScheduledChunk, SchedulerOutput
from cbatch.schedule.sequence import TokenSequence
from cbatch.schedule.speculation.acceptance import AcceptanceRates, kind_of
from cbatch.schedule.speculation.drafter import Proposal
from cbatch.schedule.step_cost import StepCost

MAX_DRAFT = 24
"""Most tokens of a draft whose length is chosen."""

MISSES_PER_REST, LONGEST_REST = 8, 8
"""After so many looks in vain, one more token is let pass before the next, up to the longest rest."""

BALANCE_RATE, LONGEST_PAUSE = 1 / 8, 128
"""What one look changes of the mean time that looks save; steps without a look, at most, while they save none."""

FREE_SHARE = 0.01
"""Share of a step's time that a look may take in any case."""

SETTLING = 4
"""Steps of a pause, the last ones, whose times are observed."""

LEAST_PROMISE = 0.5
"""How likely two tokens must be right so that a request waits for the step in flight to have its draft."""


@dataclass(slots=True)
class _Record:
    """The known facts about one request.

    rates:    how often its drafts are right
    matched:  of its draft in the step in flight
    foreseen: number of a token that was not known yet, what it would have been drafted as, and the kind of the match
    misses:   looks since a token was last foreseen
    look_at:  tokens before which there is no further look
    """

    rates: AcceptanceRates
    matched: int = 0
    foreseen: tuple[int, int, int] | None = None
    misses: int = 0
    look_at: int = 0


class DraftPolicy:
    """Decides on the drafts of a step."""

    def __init__(self, most: int | None, weight: float = 1) -> None:
        """
        most:   tokens of every draft, whatever it costs; None: as many as pay
        weight: times that an accepted token is computed
        """
        self._most = most or MAX_DRAFT
        self._counts_cost = most is None
        self._weight = weight
        self._cost = StepCost()
        self._common = AcceptanceRates()
        self._records: dict[TokenSequence, _Record] = {}
        self._began_at = 0.0
        self._balance = 0.0
        """Seconds that a look saves, on average, but for its own time."""
        self._pause = self._paused = 0
        self._is_dear = False
        """Whether looks take a share of a step that counts."""

    def observe_step(self, scheduled: SchedulerOutput, seconds: float | None) -> None:
        """Learns what a completed step cost; None if that is not known."""
        if not self._counts_cost or seconds is None or self._paused < self._pause - SETTLING:
            return
        if _is_decode_only(scheduled):
            self._cost.observe(scheduled.num_tokens, seconds)

    @property
    def most(self) -> int:
        """Tokens of a draft."""
        return min(self._most, self._cost.reach) if self._counts_cost else self._most

    def rests(self, scheduled: SchedulerOutput) -> bool:
        """Whether nothing is done for drafts in a step: in pauses after vain looks, and if tokens are dear."""
        if not self._counts_cost:
            return False
        if self._paused < self._pause:
            self._paused += 1
            return True
        return self._cost.is_known and not self._cost.is_worth_looking(len(scheduled.chunks))

    def looks_beside(self, scheduled: SchedulerOutput) -> bool:
        """Whether drafts are looked for in a step with these chunks: not beside prompts, if costs count."""
        self._began_at = time.perf_counter()
        return not self._counts_cost or (self._cost.is_known and _is_decode_only(scheduled))

    def looks_at(self, sequence: TokenSequence) -> bool:
        """Whether a draft is looked for; first, learns from the last look."""
        if not self._counts_cost:
            return True
        record = self._records.get(sequence)
        if record is None:
            self._records[sequence] = _Record(AcceptanceRates(self._common))
            return True
        known = sequence.token_ids
        if record.foreseen is not None and record.foreseen[0] < len(known):
            place, token, kind = record.foreseen
            record.rates.observe(kind, is_right=known[place] == token)
            record.foreseen = None
            if known[place] == token:
                record.misses = 0
        return len(known) >= record.look_at or not self._is_dear

    def found(self, sequence: TokenSequence, proposal: Proposal | None) -> None:
        """The result of a look."""
        record = self._records.get(sequence)
        if record is None:
            return
        known = len(sequence.token_ids)
        record.misses += 1  # until a token proves right
        record.look_at = known + 1 + min(record.misses // MISSES_PER_REST, LONGEST_REST)
        if proposal is not None:
            record.matched = proposal.matched
            record.foreseen = known, proposal.tokens[0], kind_of(proposal.matched)

    def is_promising(self, sequence: TokenSequence, proposal: Proposal) -> bool:
        """Whether a request should wait for its draft."""
        if not self._counts_cost:
            return True
        if not self._cost.is_worth_looking():
            return False
        record = self._records.get(sequence)
        rates = record.rates if record is not None else self._common
        return rates.chances(proposal.matched, 2)[-1] >= LEAST_PROMISE

    def counts(self, scheduled: SchedulerOutput, found: Mapping[int, Proposal], budget: int) -> dict[int, int]:
        """How many tokens of each proposal are drafted, by the number of the chunk."""
        if self._counts_cost:
            order = self._worth(scheduled, found, budget)
        else:
            order = [number for number, proposal in found.items() for _ in proposal.tokens]
        counts: dict[int, int] = {}
        for number in order[:budget]:
            counts[number] = counts.get(number, 0) + 1
        return counts

    def _worth(self, scheduled: SchedulerOutput, found: Mapping[int, Proposal], budget: int) -> list[int]:
        """For each drafted token that pays, the number of the chunk that it is for."""
        tokens, chances = scheduled.num_tokens, list[tuple[float, int]]()
        least = self._cost.least_chance(tokens, self._weight)
        for number, proposal in found.items():
            rates = self._records[scheduled.chunks[number].sequence].rates
            for chance in rates.chances(proposal.matched, len(proposal.tokens), least):
                chances.append((chance, number))
        chances.sort(key=itemgetter(0), reverse=True)
        count, saved = self._cost.num_worth(tokens, [chance for chance, _ in chances[:budget]], self._weight)
        self._weigh(saved, tokens)
        return [number for _, number in chances[:count]]

    def _weigh(self, saved: float, tokens: int) -> None:
        """Weighs what drafts will save of a step against the time that this look has taken."""
        taken = time.perf_counter() - self._began_at - FREE_SHARE * self._cost.seconds(tokens)
        self._is_dear = taken > 0
        self._balance += BALANCE_RATE * (saved - max(taken, 0) - self._balance)
        self._pause, self._paused = min(2 * self._pause + 1, LONGEST_PAUSE) if self._balance < 0 else 0, 0

    def observe(self, chunk: ScheduledChunk, accepted: int) -> None:
        """Learns how many tokens of a draft were accepted."""
        record = self._records.get(chunk.sequence)
        if record is not None:
            record.rates.observe_draft(record.matched, len(chunk.draft), accepted)
            record.foreseen = None
            if accepted:
                record.misses = 0

    def forget(self, sequence: TokenSequence) -> None:
        """Drops what is known of a request that has ended."""
        self._records.pop(sequence, None)


def _is_decode_only(scheduled: SchedulerOutput) -> bool:
    return all(chunk.is_decode for chunk in scheduled.chunks)
