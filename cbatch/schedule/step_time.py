"""How many prompt tokens a step may compute beside decoding requests, so that it keeps to the target time.

Every decoding request waits for the step, and the more tokens of a long prompt are in it, the longer it takes. What a
prompt token costs depends on the device, the decoding requests and the depth of the prompt; only the steps themselves
tell. So each step scales the limit by the target time over the measured one, or rather the root of that, to avoid
swings. How far below the target it aims depends on how much step times vary.
"""

from __future__ import annotations

import math
import time
from collections import deque
from heapq import nlargest
from statistics import median_low
from typing import Literal, NamedTuple

from cbatch.base.errors import ConfigError
from cbatch.schedule.output import SchedulerOutput

STEADY_MULTIPLE = 1.75
"""The target of `auto`, in times of a steady step (one without prompts): below 2, since few samples tell that time."""

WINDOW, ALLOWED_LATE = 200, 2
"""Of the last `WINDOW` steps, `ALLOWED_LATE` may miss the target, so that p99 keeps to it if `AIM_RANGE` allows."""

AIM_RANGE, FIRST_AIM = (0.75, 0.95), 0.85
"""The smallest and largest share of the target to aim at, and the share until steps have shown how much they vary.

Below 0.75, prompts would hardly advance. If step times vary so much that this does not suffice, p99 misses the target,
as it would without prompts.
"""

MAX_CHANGE = 2.0
"""Largest factor between two limits: an outlier halves the limit at most."""

MIN_PREFILL_TOKENS = {"cpu": 4, "gpu": 128}
"""Prompt tokens that a step may always compute, by device: so few that they cost hardly more than one.

A CPU needs a small number: at a depth of 8,000 tokens, 16 tokens more than doubled the step of 32 sequences; 4 did not.
"""

SIMILAR, RECENT, SAMPLES = 0.25, 32, 5
"""Relative difference up to which counts are similar, steps that are recent, and steady ones of those that suffice."""


class _DecodeOnlyStep(NamedTuple):
    """A step without prompts: its number, its decoding requests, and its seconds."""

    number: int
    rows: int
    seconds: float


class StepTimeController:
    """Measures the time between completed steps, and limits the prompt tokens of the next ones."""

    def __init__(self, target_step_ms: float | Literal["auto"] | None, least: int) -> None:
        """Raises ConfigError if the target is not a time.

        target_step_ms: longest time of a step; `auto` is a multiple of its time without prompts; None is no limit
        least:          prompt tokens that a step may always compute (`MIN_PREFILL_TOKENS`)
        """
        is_time = isinstance(target_step_ms, int | float) and 0 < target_step_ms < math.inf
        if not is_time and target_step_ms not in (None, "auto"):
            raise ConfigError(f"target_step_ms must be milliseconds, 'auto' or None, not {target_step_ms!r}.")
        self._target = target_step_ms / 1e3 if isinstance(target_step_ms, int | float) else target_step_ms
        self._completed_at = 0.0
        self.last_seconds: float | None = None
        """Time of the latest step; None if there may have been a pause before it."""
        self._least = least
        self._limit = float(least)
        self._num_steps = 0
        self._ratios = deque([1 / FIRST_AIM] * ALLOWED_LATE, maxlen=WINDOW)
        """Measured over aimed-at time, of steps that used about the whole limit."""
        self._steady: deque[_DecodeOnlyStep] = deque(maxlen=RECENT)

    @property
    def limit(self) -> int | None:
        """Most prompt tokens in a step with decoding requests; None for no limit."""
        return None if self._target is None else int(self._limit)

    def step_completed(self, scheduled: SchedulerOutput) -> int | None:
        """Call it when a step has completed; returns the limit of the next one.

        A step counts only if it continues requests of an earlier one, so that pauses without work are left out.
        """
        now = time.perf_counter()
        seconds, self._completed_at = now - self._completed_at, now
        self.last_seconds = seconds if len(scheduled.admitted) < len(scheduled.chunks) else None
        if self._target is None or self.last_seconds is None:
            return self.limit
        return self.observe(scheduled.num_decoding, scheduled.num_tokens - scheduled.num_decoding, seconds)

    def observe(self, decode_rows: int, prompt_tokens: int, seconds: float) -> int | None:
        """Learns from a step, and returns the limit of the next one.

        With the target `auto`, the limit is 0 for one step if none of the last `RECENT` has told the steady time.
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
            self._ratios.append(seconds / aim)  # with fewer tokens, the time is below the aim whatever the noise
        ratio = min(max(math.sqrt(aim / seconds), 1 / MAX_CHANGE), MAX_CHANGE)
        is_full = prompt_tokens == int(self._limit)
        fitting = (self._limit if is_full else prompt_tokens) * ratio  # keep fractions, or 4 would never become 5
        self._limit = max(self._least, min(self._limit, fitting) if ratio < 1 else max(self._limit, fitting))
        return self.limit

    def _learn_steady(self, rows: int, prompt_tokens: int, seconds: float) -> float | None:
        """The target, from recent steps without prompts and with a similar number of rows; None if there are none."""
        if prompt_tokens == 0:
            self._steady.append(_DecodeOnlyStep(self._num_steps, rows, seconds))
        near = [step for step in self._steady if abs(step.rows - rows) <= SIMILAR * rows][-SAMPLES:]
        if not near or near[-1].number <= self._num_steps - RECENT:
            return None
        steady = median_low(step.seconds for step in near)
        # A prompt makes no step shorter: if this one was, the steady time is out of date.
        return STEADY_MULTIPLE * steady if seconds > (1 - SIMILAR) * steady else None
