"""The gain of continuous batching over static batches with as many slots: by arithmetic, measured, and by its parts.

A static batch takes as many steps as its longest output has tokens. Continuous batching gives a slot that becomes free
to the next request, so that it takes as many steps as the slots need to finish their lists of requests. If a step costs
a fixed time and a time for each token, both above 0, the gain lies between the ratio of the steps and that of the
tokens.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import NamedTuple

from cbatch.cli.bench.recorder import TOKEN_KINDS, RunRecord
from cbatch.cli.bench.workload import Workload


class WorkCount(NamedTuple):
    """Steps of the engine, and the tokens that all of them compute, padding and tokens past an end included."""

    steps: int
    tokens: int


def count_static(work: Workload, slots: int) -> WorkCount:
    """The steps of static batches of `slots` requests: prompts padded to the longest, outputs until the last ends."""
    steps = tokens = 0
    for batch in work.batches(slots):
        width = max(len(work.prompts[index]) for index in batch)
        longest = max(work.output_lengths[index] for index in batch)
        steps += longest
        tokens += len(batch) * (width + longest - 1)
    return WorkCount(steps, tokens)


def count_continuous(work: Workload, slots: int) -> WorkCount:
    """The steps of continuous batching, if each prompt fits into one: the next request gets the first free slot."""
    free_at = [0] * slots
    for length in work.output_lengths:
        heapq.heapreplace(free_at, free_at[0] + length)
    return WorkCount(max(free_at), work.prompt_tokens + work.output_tokens - len(work.prompts))


@dataclass(frozen=True, slots=True)
class ExpectedGain:
    """The gain by arithmetic, named as in `--json`.

    by_steps:  if a step takes the same time whatever it computes
    by_tokens: if the time depends on the number of tokens only
    """

    by_steps: float
    by_tokens: float

    @classmethod
    def of(cls, work: Workload, slots: int) -> ExpectedGain:
        static, continuous = count_static(work, slots), count_continuous(work, slots)
        return cls(static.steps / continuous.steps, static.tokens / continuous.tokens)


@dataclass(frozen=True, slots=True)
class Gain:
    """The measured gain as a product of four factors, named as in `--json`; those below 1 eat some of it.

    slots:     what slots would gain that never wait: steps of static batches, to those in which all slots are busy
    padding:   what the time for padding adds
    tail:      what slots cost that are empty, most of them at the end, when no request waits any more
    step_time: what longer steps cost: prompts come in beside outputs, and every slot has work
    """

    measured: float
    slots: float
    padding: float
    tail: float
    step_time: float
    expected: ExpectedGain

    @classmethod
    def of(cls, static: RunRecord, continuous: RunRecord, work: Workload) -> Gain:
        full_steps = work.output_tokens / continuous.slots
        static_steps, steps = len(static.steps), len(continuous.steps)
        without_padding_s = static.elapsed_s
        for step in static.steps:
            if padding := step.tokens("padding"):  # which takes its share of the step's tokens
                without_padding_s -= (step.end - step.start) * padding / step.tokens(*TOKEN_KINDS)
        return cls(
            measured=static.elapsed_s / continuous.elapsed_s,
            slots=static_steps / full_steps,
            padding=static.elapsed_s / without_padding_s,
            tail=full_steps / steps,
            step_time=(without_padding_s / static_steps) / (continuous.elapsed_s / steps),
            expected=ExpectedGain.of(work, continuous.slots),
        )

    @property
    def sentence(self) -> str:
        """The gain and its factors in words."""
        return (
            f"Continuous batching is {self.measured:.2f} × as fast as static batches: {self.slots:.2f} by slots that "
            f"do not wait, × {self.padding:.2f} without padding, × {self.tail:.2f} for empty slots at the end, "
            f"× {self.step_time:.2f} for the time of a step. By arithmetic: {self.expected.by_steps:.2f} if all steps "
            f"take as long, {self.expected.by_tokens:.2f} if all tokens do."
        )
