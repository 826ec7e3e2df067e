"""How many tokens of prompts a step may hold beside rows that decode, so that it takes about as long as it should.

A long prompt makes a step as long as its part in it is large, and every row that decodes waits for the step. What a
token of a prompt costs depends on the device, the rows and the depth of the prompt, and is known from the steps
themselves only. So the part is changed in proportion to what the last step took, by the root of it, lest it swing. How
far below the target steps are to stay depends on how much they vary.
"""

from __future__ import annotations

import math
import time
from collections import deque
from heapq import nlargest
from statistics import median_low
from typing import Literal, NamedTuple

from cbatch.engine.base.errors import ConfigError
from cbatch.engine.scheduler.output import SchedulerOutput

Target = float | Literal["auto"] | None
"""Seconds that a step is to take at most; `auto` is a multiple of what it takes without prompts; None is no limit."""

STEADY_MULTIPLE = 1.75
"""What `auto` allows a step, in times of a steady one: below 2, since only a few tell what that is."""

WINDOW, ALLOWED_LATE = 200, 2
"""Of so many steps so many may take longer than the target: p99 keeps to it, as far as `AIM_RANGE` allows."""

AIM_RANGE, FIRST_AIM = (0.75, 0.95), 0.85
"""The least and the most of the target that is aimed at, and what is until steps have shown how much they vary.

Where one of a hundred takes longer than 1 / 0.75 of its like, p99 is above the target: so are steps without prompts
above theirs, and a prompt would hardly advance.
"""

MAX_CHANGE = 2.0
"""The largest change of one step: an outlier halves the limit at most."""

MIN_PREFILL_TOKENS = {"cpu": 4, "cuda": 128}
"""Tokens of prompts that a step may hold in any case: about as many as cost hardly more than one does on the device.

A CPU needs a small one: 8,000 tokens deep, a block of 16 more than doubled the step of 32 rows, and 4 did not.
"""

SIMILAR, RECENT, SAMPLES = 0.25, 32, 5
"""What counts as about as many, as steps of late, and how many steady ones of those are enough."""


class _DecodeOnlyStep(NamedTuple):
    """A step without prompts: its number, rows and seconds."""

    number: int
    rows: int
    seconds: float


class AdaptivePrefillLimit:
    """Learns from each step that lands, and says what the next one may hold. Knows neither requests nor devices."""

    def __init__(self, target: Target, least: int) -> None:
        """least: tokens that a step may hold in any case, see `MIN_PREFILL_TOKENS`"""
        self._target = target
        self._least = least
        self._limit = float(least)
        self._num_steps = 0
        self._ratios = deque([1 / FIRST_AIM] * ALLOWED_LATE, maxlen=WINDOW)
        """What steps took whose part was about the limit, in times of what was aimed at."""
        self._steady: deque[_DecodeOnlyStep] = deque(maxlen=RECENT)

    @property
    def limit(self) -> int | None:
        """Most tokens of prompts in a step with rows that decode; None for no limit."""
        return None if self._target is None else int(self._limit)

    def observe(self, decode_rows: int, prompt_tokens: int, seconds: float) -> int | None:
        """Takes in what a step held and took, and returns the limit of the next one.

        That is 0 for one step of `RECENT` where the target depends on the steady time, and nothing else told that.
        """
        if self._target is None or decode_rows == 0 or seconds <= 0:
            return self.limit
        self._num_steps += 1
        target = self._target if self._target != "auto" else self._learn_steady(decode_rows, prompt_tokens, seconds)
        if prompt_tokens == 0:
            return self.limit
        if target is None:
            return 0
        least, most = AIM_RANGE
        aim = target * min(max(1 / nlargest(ALLOWED_LATE, self._ratios)[-1], least), most)
        if prompt_tokens > max(self._least, (1 - SIMILAR) * self._limit):
            self._ratios.append(seconds / aim)  # smaller parts are below the aim whatever the noise
        self._adapt(prompt_tokens, aim / seconds)
        return self.limit

    def _adapt(self, prompt_tokens: int, ratio: float) -> None:
        """ratio: what the step should have taken to what it took"""
        ratio = min(max(math.sqrt(ratio), 1 / MAX_CHANGE), MAX_CHANGE)
        is_full = prompt_tokens == int(self._limit)
        fitting = (self._limit if is_full else prompt_tokens) * ratio  # fractions add up, or 4 would never become 5
        self._limit = max(self._least, min(self._limit, fitting) if ratio < 1 else max(self._limit, fitting))

    def _learn_steady(self, rows: int, prompt_tokens: int, seconds: float) -> float | None:
        """The target by what a step of about so many rows takes without prompts; None where none of late tells."""
        if prompt_tokens == 0:
            self._steady.append(_DecodeOnlyStep(self._num_steps, rows, seconds))
        near = [step for step in self._steady if abs(step.rows - rows) <= SIMILAR * rows][-SAMPLES:]
        if not near or near[-1].number <= self._num_steps - RECENT:
            return None
        steady = median_low(step.seconds for step in near)
        # A prompt makes no step shorter, so that what is known does not hold any more where one is.
        return STEADY_MULTIPLE * steady if seconds > (1 - SIMILAR) * steady else None


class StepTimeController:
    """Measures steps as they land, from one to the next, and paces those that come."""

    def __init__(self, target_step_ms: float | Literal["auto"] | None, least: int) -> None:
        """Raises ConfigError for a target that is no time. least: see `MIN_PREFILL_TOKENS`"""
        self._limit = AdaptivePrefillLimit(_to_target(target_step_ms), least)
        self._completed_at = 0.0

    def step_completed(self, scheduled: SchedulerOutput) -> int | None:
        """A step has been computed; returns the limit of the next one.

        Only a step with rows that were there before it counts, so that a pause without work never does.
        """
        now = time.perf_counter()
        seconds, self._completed_at = now - self._completed_at, now
        if self._limit.limit is None or len(scheduled.admitted) == len(scheduled.chunks):
            return self._limit.limit
        return self._limit.observe(scheduled.num_decoding, scheduled.num_tokens - scheduled.num_decoding, seconds)


def _to_target(milliseconds: float | Literal["auto"] | None) -> Target:
    if milliseconds is None or milliseconds == "auto":
        return milliseconds
    if not isinstance(milliseconds, int | float) or not 0 < milliseconds < math.inf:
        raise ConfigError(f"target_step_ms must be milliseconds, 'auto' or None, not {milliseconds!r}.")
    return milliseconds / 1e3
