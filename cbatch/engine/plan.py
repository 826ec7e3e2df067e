"""What one step computes, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cbatch.engine.request import Request, Sample, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens `start .. stop-1` of one request, computed in one step.

    is_last: whether the request's last known token is among them, so that its next one can be sampled.
    """

    request: Request
    start: int
    stop: int
    is_last: bool

    @property
    def count(self) -> int:
        return self.stop - self.start

    @property
    def to_score(self) -> range:
        """Places whose logits tell how likely the prompt's next token was, where that is asked for and not known."""
        request = self.request
        if not request.scores_prompt:
            return range(0)
        return range(max(self.start, len(request.scored)), min(self.stop, request.num_prompt - 1))


@dataclass(slots=True)
class StepPlan:
    """The slices of one step, at most one for a request, and the requests that entered with it."""

    slices: list[Slice] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(slice_.count for slice_ in self.slices)

    @property
    def to_sample(self) -> list[Request]:
        """Requests that get a token from this step, in slice order."""
        return [slice_.request for slice_ in self.slices if slice_.is_last]

    @property
    def to_score(self) -> list[Slice]:
        """Slices that hold tokens of a prompt to be scored, in slice order."""
        return [slice_ for slice_ in self.slices if slice_.to_score]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step has computed: a sample for each of the plan's `to_sample`, scores for each of its `to_score`."""

    samples: Sequence[Sample]
    scores: Sequence[Sequence[TokenLogprobs]] = ()
