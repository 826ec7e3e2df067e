"""The gain of continuous over static batches with as many slots, by its parts.

A static batch takes as many steps as its longest output has tokens; continuous batching as many as the slots need if
the first free one takes the next request. If a step costs a fixed time and a time for each token, the gain lies between
the ratio of the steps and that of the tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any

from cbatch.cli.bench.recorder import TOKEN_KINDS, RunRecord
from cbatch.cli.bench.workload import Workload


def count_static(work: Workload, slots: int) -> tuple[int, int]:
    """The steps and tokens of static batches: prompts padded to the longest, outputs until the last ends."""
    steps = tokens = 0
    for batch in work.batches(slots):
        width = max(len(work.prompts[index]) for index in batch)
        longest = max(work.output_lengths[index] for index in batch)
        steps += longest
        tokens += len(batch) * (width + longest - 1)
    return steps, tokens


def count_continuous(work: Workload, slots: int) -> tuple[int, int]:
    """The steps and tokens if each prompt fits into one step: the next request gets the first free slot."""
    free_at = [0] * slots
    for length in work.output_lengths:
        heapq.heapreplace(free_at, free_at[0] + length)
    return max(free_at), work.prompt_tokens + work.output_tokens - len(work.prompts)


def expected_gain(work: Workload, slots: int) -> dict[str, float]:
    """The gain by arithmetic, named as in `--json`: if all steps take as long, and if all tokens do."""
    static, continuous = count_static(work, slots), count_continuous(work, slots)
    return {"by_steps": static[0] / continuous[0], "by_tokens": static[1] / continuous[1]}


def gain_of(static: RunRecord, continuous: RunRecord, work: Workload) -> dict[str, Any]:
    """The measured gain as a product of four factors, named as in `--json`; those below 1 eat some of it.

    They are of slots that never wait, of no padding, of slots that are empty at the end, and of longer steps.
    """
    full_steps = work.output_tokens / continuous.slots
    static_steps, steps = len(static.steps), len(continuous.steps)
    without_padding_s = static.elapsed_s
    for step in static.steps:
        if padding := step.tokens("padding"):  # which takes its share of the step's tokens
            without_padding_s -= (step.end - step.start) * padding / step.tokens(*TOKEN_KINDS)
    return {
        "measured": static.elapsed_s / continuous.elapsed_s,
        "slots": static_steps / full_steps,
        "padding": static.elapsed_s / without_padding_s,
        "tail": full_steps / steps,
        "step_time": (without_padding_s / static_steps) / (continuous.elapsed_s / steps),
        "expected": expected_gain(work, continuous.slots),
    }


def gain_sentence(gain: Mapping[str, Any]) -> str:
    return (
        f"Continuous batching is {gain['measured']:.2f} × as fast as static batches: {gain['slots']:.2f} by slots that "
        f"do not wait, × {gain['padding']:.2f} without padding, × {gain['tail']:.2f} for empty slots at the end, "
        f"× {gain['step_time']:.2f} for the time of a step. By arithmetic: {gain['expected']['by_steps']:.2f} if all "
        f"steps take as long, {gain['expected']['by_tokens']:.2f} if all tokens do."
    )
