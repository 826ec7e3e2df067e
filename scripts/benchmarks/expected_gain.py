"""The gain of continuous over static batches as arithmetic on lengths, between whose two figures the measured one lies.

A static batch takes as many steps as its longest output has tokens; continuous batching as many as the slots need if
the first free one takes the next request. If a step costs a fixed time and a time for each token, the gain lies between
the ratio of the steps and that of the tokens.
"""

from __future__ import annotations

import heapq

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
    """The gain if all steps take as long, and if all tokens do."""
    static, continuous = count_static(work, slots), count_continuous(work, slots)
    return {"by_steps": static[0] / continuous[0], "by_tokens": static[1] / continuous[1]}
