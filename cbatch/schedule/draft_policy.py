"""How many tokens are drafted: as many as raise the expected tokens per second, by what steps cost and drafts gave.

What a token costs is learnt from the steps (`StepCost`). How likely it is right is learnt for each request by the
length of the match (`AcceptanceRates`), also while nothing is drafted: then the first token that would have been
drafted is compared with the one that came. So text that does not repeat costs no drafts, and the host looks for them
ever more rarely. It also does so if the time that drafts save is less than what it takes to look for them.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from cbatch.schedule.draft_sources import Proposal
from cbatch.schedule.output import ScheduledChunk, SchedulerOutput
from cbatch.schedule.sequence import TokenSequence

MAX_DRAFT = 24
"""Most tokens of a draft whose length is chosen."""

MISSES_PER_REST, LONGEST_REST = 8, 8
"""After so many looks in vain, one more token is let pass before the next, up to the longest rest."""

BALANCE_RATE, LONGEST_PAUSE = 1 / 8, 128
"""The weight of one look in the mean time that looks save; most steps without a look, while they save none."""

FREE_SHARE = 0.01
"""Share of a step's time that a look may take in any case."""

SETTLING = 4
"""Steps of a pause, the last ones, whose times are observed."""

LEAST_PROMISE = 0.5
"""How likely two tokens must be right so that a request waits for the step in flight to have its draft."""

LEVEL_RATE, SLOPE_RATE, FADE = 1 / 8, 1 / 5, 1 / 300
"""How much one step changes: the height of the line, its slope, and the slope of steps that tell nothing of it."""

FIRST_GUESS, LOWEST_GUESS = 0.03, 0.3
"""Of a token's unknown cost: this share of the step's time, or of an equal part of each token if that is less."""

MAX_SURPRISE = 1.0
"""Times of the usual step by which one counts as slower or faster than expected, at most."""

LEAST_REACH = 2.0
"""Tokens beside those of recent steps for which the line is trusted in any case."""

MIN_GAIN = 1.02
"""Tokens per second with drafts over those without, below which nothing is drafted."""

WORTH_LOOKING = 0.8
"""The share of a step's time that its tokens may cost, so that it is worth the host's time to look for drafts."""


class StepCost:
    """Predicts the time of a step without prompts by its number of tokens, learnt from the steps themselves.

    Near the number of tokens that steps have, time is nearly a line: the weights are read whatever the tokens are, and
    each token adds its part. The height of the line follows recent steps, which get slower as texts get longer. Its
    slope is learnt when steps differ in their tokens, and fades towards a low guess while they do not, so that what was
    too dear once is tried again. It is trusted only near the steps that have told it: drafts begin small, and may
    double.
    """

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        """The point on the line around which recent steps were."""
        self._slope = 0.0
        self._num_told = 0
        self._reach = LEAST_REACH
        """Most tokens that a recent step had more than others."""

    def observe(self, tokens: int, seconds: float) -> None:
        """Learns from a step without prompts."""
        if self._seconds == 0:
            self._tokens, self._seconds = float(tokens), seconds
            self._slope = self._guess
            return
        surprise = seconds - self.seconds(tokens)
        most = MAX_SURPRISE * self._seconds
        surprise = min(max(surprise, -most), most)
        further = tokens - self._tokens
        self._reach = max(self._reach - FADE * self._reach, further, LEAST_REACH)
        if abs(further) >= 0.5:
            self._num_told += 1
            rate = max(SLOPE_RATE, 1 / (1 + self._num_told))
            self._slope = max(self._slope + rate * surprise * further / (further * further + 1), 0.0)
        else:
            self._slope += FADE * (self._guess - self._slope)
        self._seconds += LEVEL_RATE * (surprise + self._slope * further)
        self._tokens += LEVEL_RATE * further

    @property
    def _guess(self) -> float:
        return self._seconds * min(FIRST_GUESS, LOWEST_GUESS / self._tokens)

    @property
    def is_known(self) -> bool:
        """Whether a step was observed."""
        return self._seconds > 0

    @property
    def reach(self) -> int:
        """Most tokens beside those of recent steps for which predictions are trusted: twice what was seen."""
        return int(2 * self._reach)

    def seconds(self, tokens: float) -> float:
        """The time that a step of so many tokens will probably take."""
        return max(self._seconds + self._slope * (tokens - self._tokens), self._seconds / 8)

    def is_worth_looking(self, tokens: float | None = None) -> bool:
        """Whether drafts could pay in a step of so many tokens, by default as many as recent steps had.

        They cannot if a token costs nearly its part of the step.
        """
        tokens = self._tokens if tokens is None else tokens
        return self.is_known and self._slope * tokens < WORTH_LOOKING * self.seconds(tokens)

    def least_chance(self, tokens: float, weight: float = 1) -> float:
        """The chance of being accepted below which no drafted token pays in a step of so many others."""
        return weight * self._slope * tokens / self.seconds(tokens) if self.is_known else 0.0

    def num_worth(self, tokens: int, chances: Sequence[float], weight: float = 1) -> tuple[int, float]:
        """How many of these drafted tokens give the most tokens per second in a step of so many others.

        Returns the seconds that they save, too.

        chances: of each to be accepted, falling
        weight:  times that a drafted token is computed
        """
        if not chances:
            return 0, 0.0
        seconds, more = self.seconds(tokens), weight * self._slope
        plain, expected = tokens / seconds, float(tokens)
        best, count, saved = MIN_GAIN * plain, 0, 0.0
        for number, chance in enumerate(chances[: self.reach], 1):
            expected += chance
            seconds += more
            if expected > best * seconds:
                best, count, saved = expected / seconds, number, expected / plain - seconds
        return count, saved


MATCH_LENGTHS = (2, 3, 4, 6, 9, 17, 33)
"""The shortest matches of each kind but the first."""

RATES_BEFORE = (0.1, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 0.9)
"""How often a token of each kind is right, before any was seen."""

WEIGHT_BEFORE = 4
"""As many tokens count as seen before the first one."""

OWN_MEMORY, COMMON_MEMORY = 0.9, 0.99
"""The share of the tokens seen so far that still counts after one more: of a request, and of all requests."""

HIGHEST_RATE = 0.98
"""The highest rate that is believed."""


def kind_of(matched: int) -> int:
    """The kind of a match of so many tokens."""
    return bisect_right(MATCH_LENGTHS, matched)


class AcceptanceRates:
    """How often drafted tokens are right, by kind of match: of all requests, or of one, which begins with those of all.

    It is learnt without a draft, too: what a text would have drafted is compared with the token that came.

    Until much is seen of a kind, the rate of all requests is that of the next shorter matches, if that is more than
    before any was seen: the longer a match, the more often it is right.
    """

    def __init__(self, common: AcceptanceRates | None = None) -> None:
        self._common = common
        self._memory = COMMON_MEMORY if common is None else OWN_MEMORY
        self._right = [0.0] * len(RATES_BEFORE)
        self._seen = [0.0] * len(RATES_BEFORE)
        self._rates: list[float] = list(RATES_BEFORE)
        """Of all requests; unused for one."""
        self._expected: list[float] = list(RATES_BEFORE) if common is None else common._rates
        """Rates that count as seen before the first token."""

    def rate(self, kind: int) -> float:
        """The share of tokens of this kind that are right, if all before them were."""
        return (self._right[kind] + WEIGHT_BEFORE * self._expected[kind]) / (self._seen[kind] + WEIGHT_BEFORE)

    def observe(self, kind: int, *, is_right: bool) -> None:
        """Learns from one token, all before which were right."""
        self._right[kind] = self._memory * self._right[kind] + is_right
        self._seen[kind] = self._memory * self._seen[kind] + 1
        if self._common is not None:
            self._common.observe(kind, is_right=is_right)
            return
        self._rates[kind] = self.rate(kind)
        for longer in range(kind + 1, len(RATES_BEFORE)):
            expected = max(RATES_BEFORE[longer], self._rates[longer - 1])
            if expected == self._expected[longer]:
                return
            self._expected[longer] = expected
            self._rates[longer] = self.rate(longer)

    def observe_draft(self, matched: int, drafted: int, accepted: int) -> None:
        """Learns from a draft: the tokens after the first wrong one say nothing."""
        for place in range(min(accepted + 1, drafted)):
            self.observe(kind_of(matched + place), is_right=place < accepted)

    def chances(self, matched: int, count: int, least: float = 0.0) -> list[float]:
        """For each of `count` drafted tokens, how likely it is that it is accepted, as long as that is `least`."""
        chance, found, kind, rate = 1.0, list[float](), -1, 0.0
        for length in range(matched, matched + count):
            if kind != (kind := kind_of(length)):
                rate = min(self.rate(kind), HIGHEST_RATE)
            chance *= rate
            if chance < least:
                break
            found.append(chance)
        return found


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
        tokens, chances = scheduled.num_tokens, list[tuple[float, int]]()
        least = self._cost.least_chance(tokens, self._weight)
        for number, proposal in found.items():
            rates = self._records[scheduled.chunks[number].sequence].rates
            for chance in rates.chances(proposal.matched, len(proposal.tokens), least):
                chances.append((chance, number))
        chances.sort(key=itemgetter(0), reverse=True)
        count, saved = self._cost.num_worth(tokens, [chance for chance, _ in chances[:budget]], self._weight)
        # What drafts will save of a step, against the time that this look has taken.
        taken = time.perf_counter() - self._began_at - FREE_SHARE * self._cost.seconds(tokens)
        self._is_dear = taken > 0
        self._balance += BALANCE_RATE * (saved - max(taken, 0) - self._balance)
        self._pause, self._paused = min(2 * self._pause + 1, LONGEST_PAUSE) if self._balance < 0 else 0, 0
        return [number for _, number in chances[:count]]

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
