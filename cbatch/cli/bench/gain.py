"""The gain of continuous over static batches with as many slots, by its parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cbatch.cli.bench.recorder import TOKEN_KINDS, RunRecord
from cbatch.cli.bench.workload import Workload


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
    }


def gain_sentence(gain: Mapping[str, Any]) -> str:
    return (
        f"Continuous batching is {gain['measured']:.2f} × as fast as static batches: {gain['slots']:.2f} by slots that "
        f"do not wait, × {gain['padding']:.2f} without padding, × {gain['tail']:.2f} for empty slots at the end, "
        f"× {gain['step_time']:.2f} for the time of a step."
    )
