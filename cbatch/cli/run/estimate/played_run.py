"""A run that is only played: outputs go through the slots and the cache of an engine, by what its steps cost.

A step takes some time whatever is in it, and more for each token of a prompt and for each output that it continues.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from cbatch.cli.run.estimate.sample_run import StepTime

WaitReason = Literal["slots", "cache", "rows"]

WARMUP_STEPS = 2
"""First steps of a trial, which take longer than others: kernels and memory are used for the first time."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of a step: whatever is in it, for each token of a prompt, and for each output that it continues."""

    fixed: float
    prompt: float
    decoding: float

    @classmethod
    def fit(cls, steps: Sequence[StepTime]) -> StepCosts:
        """The costs, none below 0, with which the squared errors of these steps are least."""
        import numpy as np

        steps = steps[WARMUP_STEPS:] or steps
        costs, used = np.zeros(3), [0, 1, 2] if steps else []
        seconds = np.array([step.seconds for step in steps])
        counts = np.array([[1.0, step.prompt_tokens, step.decoding] for step in steps])
        while used:
            scale = np.maximum(counts[:, used].max(axis=0), 1.0)
            found = np.linalg.lstsq(counts[:, used] / scale, seconds, rcond=None)[0]
            if found.min() >= 0:
                costs[used] = found / scale
                break
            used.pop(int(found.argmin()))
        return cls(*costs.tolist())


class PlayedOutput(NamedTuple):
    """An output to play: its own tokens, and those of the prompt that are computed for it and that it alone holds."""

    tokens: float
    prompt: float


@dataclass(frozen=True, slots=True)
class PlayedRun:
    """How a run went that was played.

    prefill_s: of its seconds, those for prompts
    waits:     the others, by what further outputs waited for: `slots` or the `cache`; none waited in those of `rows`
    running:   mean number of outputs that ran at once
    """

    prefill_s: float
    waits: dict[WaitReason, float]
    running: float

    @property
    def seconds(self) -> float:
        return self.prefill_s + self.waited_s

    @property
    def waited_s(self) -> float:
        """Seconds that are not for prompts."""
        return sum(self.waits.values())

    @property
    def prefill_share(self) -> float:
        return self.prefill_s / self.seconds if self.seconds else 0.0

    def wait_share(self, reason: WaitReason) -> float:
        """The share of the time without prompts in which outputs waited for this."""
        return self.waits[reason] / self.waited_s if self.waited_s else 0.0

    def longer(self, times: float) -> float:
        """Seconds of a run with so many times the outputs; at its end, the last ones take as long as here."""
        return (self.seconds - self.waits["rows"]) * times + self.waits["rows"]


def play(
    outputs: Sequence[PlayedOutput], costs: StepCosts, slots: int, cache_tokens: int, tokens_per_step: float = 1.0
) -> PlayedRun:
    """Plays outputs, from one end of an output to the next.

    In the cache, an output counts with half of its tokens: those that run at once are at different places.
    """
    running: list[tuple[float, float]] = []  # at which step each ends, and what it holds
    step = prefill_s = held = slot_seconds = 0.0
    waits: dict[WaitReason, float] = {"slots": 0.0, "cache": 0.0, "rows": 0.0}
    waiting = list(reversed(outputs))
    while waiting or running:
        while waiting and len(running) < slots:
            need = waiting[-1].prompt + waiting[-1].tokens / 2
            if running and held + need > cache_tokens:
                break
            output = waiting.pop()
            prefill_s += output.prompt * costs.prompt
            heapq.heappush(running, (step + output.tokens / tokens_per_step, need))
            held += need
        took = (running[0][0] - step) * (costs.fixed + costs.decoding * len(running))
        reason: WaitReason = "rows" if not waiting else "slots" if len(running) >= slots else "cache"
        waits[reason] += took
        slot_seconds += took * len(running)
        step = running[0][0]
        while running and running[0][0] <= step:
            held -= heapq.heappop(running)[1]
    return PlayedRun(prefill_s, waits, slot_seconds / max(sum(waits.values()), 1e-12))
