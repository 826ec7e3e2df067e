"""What one step computes."""

from __future__ import annotations

from dataclasses import dataclass, field

from cbatch.engine.request import Request


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
