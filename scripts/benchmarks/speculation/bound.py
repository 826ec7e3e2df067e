"""The most that drafts from texts can gain: drafts that end before their first wrong token, all of them tried.

So nothing is computed in vain, and nothing has to be learnt first. What remains are the tokens that no text foresees,
the time of steps with drafts, and the look for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile

from cbatch import SteppingEngine
from cbatch.schedule.draft_policy import DraftPolicy
from cbatch.schedule.draft_sources import DraftSources
from cbatch.schedule.drafts import Drafts
from cbatch.schedule.output import SchedulerOutput
from cbatch.schedule.sequence import TokenSequence
from cbatch.schedule.speculation.drafter import Proposal


class ForesightedSources(DraftSources):
    """Proposes what a text says, as far as the output will agree."""

    def __init__(self, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> None:
        super().__init__(min_match=1)
        self._outputs = {tuple(prompt): output for prompt, output in zip(prompts, outputs, strict=True)}

    def propose(self, sequence: TokenSequence, count: int) -> Proposal | None:
        found = super().propose(sequence, count)
        if found is None:
            return None
        output = self._outputs[tuple(sequence.token_ids[: sequence.num_prompt])]
        coming = output[sequence.num_generated : -1]  # nothing comes after the last token, so its draft gains nothing
        right = list(takewhile(lambda pair: pair[0] == pair[1], zip(found.tokens, coming, strict=False)))
        return Proposal(found.tokens[: len(right)], found.matched) if right else None


class EagerPolicy(DraftPolicy):
    """Always looks, and drafts all that is found."""

    def rests(self, scheduled: SchedulerOutput) -> bool:
        return False

    def looks_at(self, sequence: TokenSequence) -> bool:
        return super().looks_at(sequence) or True

    def _worth(self, scheduled: SchedulerOutput, found: Mapping[int, Proposal], budget: int) -> list[int]:
        return [number for number, proposal in found.items() for _ in proposal.tokens]


def foresee(engine: SteppingEngine, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> None:
    """Makes a new engine with `--speculate auto` draft what is right. outputs: of the prompts"""
    drafts = engine.scheduler.drafts
    assert isinstance(drafts, Drafts), "an engine that does not speculate"
    drafts._sources = ForesightedSources(prompts, outputs)
    drafts._policy = EagerPolicy(None)
