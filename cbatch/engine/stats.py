"""Figures of an engine's work: totals at any moment, and each step as it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from cbatch.schedule.output import SchedulerOutput


@dataclass(frozen=True, slots=True)
class EngineStats:
    """An engine's present work and its totals so far. Read without a lock: each number is right on its own.

    num_running, num_waiting: requests
    used_blocks:              blocks of the KV cache that requests hold
    cache_used:               their share of all blocks, 0 to 1
    num_steps:                steps whose tokens are known
    num_preemptions:          requests that lost their blocks and were computed again
    num_prompt_tokens:        tokens of the prompts that were computed whole
    num_cached_tokens:        those of them that were in the KV cache already
    num_prefilled_tokens:     tokens of prompts that were computed, also of those that are not whole yet
    held_back:                steps that left requests waiting, by what was short: `slots`, `cache`, `budget` (tokens
                              of a step) or `target` (the time of a step)
    num_snapshots:            recurrent states that requests with the same beginning can go on from
    num_drafted_tokens:       tokens that were drafted (`EngineConfig.speculate`)
    num_accepted_tokens:      those of them that were right
    num_images, num_encoded_images: of requests, and those that the vision tower has computed
    images_s:                 seconds in which it did; on a GPU, in which its work was launched
    fallback:                 sentences that say what was stepped down from on a GPU, and why

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
    num_snapshots: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_prefilled_tokens: int = 0
    num_images: int = 0
    num_encoded_images: int = 0
    images_s: float = 0.0


def total_stats(engines: Iterable[EngineStats], ended: Iterable[EngineStats] = ()) -> EngineStats:
    """The sums over several engines; all zero without any.

    `cache_used` is the mean of those that still run. `fallback` holds each sentence once, `last_error` the last of all.

    ended: the last figures of engines that are gone: they have no requests and no blocks any more
    """
    alive = list(engines)
    every = [*(replace(one, num_running=0, num_waiting=0, used_blocks=0, num_snapshots=0) for one in ended), *alive]
    held_back: Counter[str] = Counter()
    for one in every:
        held_back.update(one.held_back)
    special: dict[str, Any] = {
        "cache_used": sum(one.cache_used for one in alive) / max(len(alive), 1),
        "held_back": dict(held_back),
        "fallback": " ".join(dict.fromkeys(one.fallback for one in every if one.fallback)),
        "last_error": next((one.last_error for one in reversed(every) if one.last_error), ""),
    }
    names = [field.name for field in fields(EngineStats) if field.name not in special]
    return EngineStats(**{name: sum(getattr(one, name) for one in every) for name in names}, **special)


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
