"""What an engine tells about its work: totals at any moment, and each step as it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cbatch.engine.scheduler.output import SchedulerOutput


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine is doing and has done so far. Read without a lock: each number is right on its own.

    num_running, num_waiting: requests
    used_blocks:              blocks of the KV cache that requests hold
    cache_used:               their share of all blocks, 0 to 1
    num_steps:                steps whose tokens are known
    num_preemptions:          requests that lost their blocks and were computed again
    num_prompt_tokens:        tokens of the prompts that were computed
    num_cached_tokens:        those of them that were in the KV cache already
    held_back:                steps that left requests waiting, by what was short: `slots`, `cache`, `budget` (tokens
                              of a step) or `target` (the time of a step)
    fallback:                 sentences that say which kernels are not used because they failed their check, and why

    Of the engine's thread:
    num_tokens:  tokens that were generated
    num_retries: steps that were tried again; `last_error` says why the latest one was
    num_shrinks: retries that made the batch smaller, for want of memory
    idle_s:      seconds in which there was nothing to compute
    """

    num_running: int
    num_waiting: int
    used_blocks: int
    cache_used: float
    num_steps: int
    num_preemptions: int
    num_prompt_tokens: int
    num_cached_tokens: int
    held_back: Mapping[str, int]
    fallback: str = ""
    num_tokens: int = 0
    num_retries: int = 0
    num_shrinks: int = 0
    last_error: str = ""
    idle_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step, as `Engine.on_step` is told of it: after the model has run, before its tokens are sampled.

    scheduled:   what was computed for which requests; the chunks' `blocks` may only be read during the call
    used_blocks: blocks of the KV cache that requests hold in this step
    start, end:  seconds of `time.perf_counter`, around the model; the device was idle at both
    """

    scheduled: SchedulerOutput
    used_blocks: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start
