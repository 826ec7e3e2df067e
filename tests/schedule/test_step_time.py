"""The limit on prompt tokens, in simulated steps: the target time is kept, and prompts always advance."""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from cbatch.base.errors import ConfigError
from cbatch.schedule.step_time import RECENT, STEADY_MULTIPLE, WINDOW, StepTimeController

Target = float | Literal["auto"] | None
"""Longest time of a step, in seconds."""

Model = Callable[[int, int, int], float]
"""Seconds of a step by its decoding requests, its prompt tokens, and their depth in the prompt."""

SETTLED = 30
"""Steps after which the target must be kept."""


def affine(rows: int, tokens: int, depth: int) -> float:
    return 0.010 + 0.0001 * rows + 0.0002 * tokens


def deep(rows: int, tokens: int, depth: int) -> float:
    """Attention makes deeper tokens more expensive."""
    return 0.010 + 0.0001 * rows + tokens * (0.0001 + 1e-8 * depth)


def free_at_first(rows: int, tokens: int, depth: int) -> float:
    """Reading the weights takes longer than computing the first 150 tokens."""
    return 0.010 + 0.0001 * rows + 0.0002 * max(0, tokens - 150)


MODELS = [affine, deep, free_at_first]


@dataclass
class Device:
    """Steps that take as long as a cost model says, with noise, and whose times are known some steps later."""

    model: Model
    target: Target
    least: int = 4
    rows: int = 8
    noise: float = 0.0
    delay: int = 0
    seed: int = 0
    steps: list[tuple[int, float]] = field(default_factory=list)
    """Prompt tokens and seconds of each step since the first decoding one."""

    def __post_init__(self) -> None:
        target = 1e3 * self.target if isinstance(self.target, float) else self.target
        self.controller = StepTimeController(target, self.least)
        self.limit: int | None = self.controller.limit
        self._chance = random.Random(self.seed)
        self._in_flight: deque[tuple[int, int, float]] = deque()

    def step(self, tokens: int = 0, depth: int = 0, times: float = 1.0) -> None:
        seconds = self.model(self.rows, tokens, depth) * math.exp(self._chance.gauss(0, self.noise)) * times
        self.steps.append((tokens, seconds))
        self._in_flight.append((self.rows, tokens, seconds))
        if len(self._in_flight) > self.delay:
            self.limit = self.controller.observe(*self._in_flight.popleft())

    def decode(self, steps: int = 20) -> None:
        for _ in range(steps):
            self.step()

    def prefill(self, prompt: int, start: int = 0) -> list[tuple[int, float]]:
        """Computes a prompt from token `start` on, and returns its steps."""
        before = len(self.steps)
        while start < prompt:
            assert self.limit is not None
            tokens = min(self.limit, prompt - start)
            self.step(tokens, start)
            start += tokens
        return self.steps[before:]


def p99(seconds: list[float]) -> float:
    return sorted(seconds)[math.ceil(0.99 * len(seconds)) - 1]


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("target", ["auto", 0.018, 0.1])
def test_the_target_is_kept(model: Model, target: Target, delay: int) -> None:
    """Guards the gap between tokens: p99 keeps to the target with noise of 3%, and steps are not far below it."""
    allowed = STEADY_MULTIPLE * model(8, 0, 0) if target == "auto" else target
    assert isinstance(allowed, float)
    seconds = []
    for seed in range(8):
        device = Device(model, target, noise=0.03, delay=delay, seed=seed)
        device.decode()
        seconds += [took for _, took in device.prefill(30_000)[SETTLED:]]
    # What a steady step takes is known by a median of five.
    assert p99(seconds) <= allowed * (1.03 if target == "auto" else 1)
    assert sum(seconds) / len(seconds) > 0.8 * allowed, "a prompt could have had more"


@pytest.mark.parametrize("model", MODELS)
def test_without_noise_the_limit_settles(model: Model) -> None:
    """Guards against a limit that swings: in the end it varies by less than a tenth, or by one token."""
    device = Device(model, 0.02)
    device.decode()
    counts = [tokens for tokens, _ in device.prefill(100_000)[SETTLED:-1]]
    late = counts[-20:]
    assert max(late) - min(late) <= max(1, max(late) / 10), late


@pytest.mark.parametrize("target", ["auto", 1e-6])
def test_prompts_always_advance(target: Target) -> None:
    """Guards prompts if the target cannot be met: they keep the minimum, except in rare measuring steps."""
    device = Device(lambda rows, tokens, depth: 0.01 + 0.1 * tokens, target)
    device.decode()
    steps = device.prefill(2000)
    pauses = sum(tokens == 0 for tokens, _ in steps)
    assert {tokens for tokens, _ in steps if tokens} == {4}
    assert pauses == (0 if target != "auto" else len(steps) // (RECENT + 1))


def test_an_outlier_changes_little() -> None:
    """Guards against a step that compiled or was swapped out: the limit halves and recovers."""
    device = Device(affine, 0.018)
    device.prefill(20_000)
    before = device.limit
    assert before is not None and before > 16
    device.step(before, times=50)
    assert device.limit is not None and device.limit >= before // 2
    for _ in range(30):
        device.step(device.limit)
    assert device.limit is not None and device.limit > 0.9 * before


def test_steps_without_decoding_requests_are_ignored() -> None:
    """Guards against limiting prompts by steps that no decoding request waits for."""
    device = Device(affine, 0.018)
    device.prefill(5000)
    before = device.limit
    device.rows = 0
    device.step(512)
    device.step(4, times=9)
    assert device.limit == before


def test_an_unknown_steady_time_is_measured() -> None:
    """Guards `auto` if prompts never cease: one step without them measures the steady time, when it is unknown."""
    device = Device(affine, "auto")
    device.step(4)
    assert device.limit == 0
    device.step()
    assert device.limit == 4
    device.prefill(2000)
    device.rows = 100
    device.step(device.limit)
    assert device.limit == 0, "what 8 rows took says nothing about 100"


def test_the_steady_time_drifts() -> None:
    """Guards `auto` while sequences grow longer: the target follows, also in the middle of a prompt."""
    slow = [1.0]
    device = Device(lambda rows, tokens, depth: (0.01 + 0.0002 * tokens) * slow[0], "auto")
    device.decode()
    device.prefill(5000)
    slow[0] = 3.0
    steps = device.prefill(20_000)
    late = [seconds for tokens, seconds in steps[5 * RECENT + WINDOW : -1] if tokens]
    assert len(late) > 300 and 0.9 * 0.03 * STEADY_MULTIPLE < min(late) < max(late) <= 0.03 * STEADY_MULTIPLE


class Clock:
    """A clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def step_completed(
        self, step_time: StepTimeController, seconds: float, *, decoding: int, tokens: int = 0, entered: int = 0
    ) -> int | None:
        self.now += seconds
        scheduled: Any = SimpleNamespace(
            admitted=[None] * entered,
            chunks=[None] * (decoding + entered + (tokens > 0)),
            num_decoding=decoding,
            num_tokens=decoding + tokens,
        )
        return step_time.step_completed(scheduled)


def test_pauses_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the seconds of a step: from one completed step to the next, not counting pauses without work."""
    seen: list[tuple[int, int, float]] = []
    monkeypatch.setattr(StepTimeController, "observe", lambda self, *step: seen.append(step))
    clock, step_time = Clock(monkeypatch), StepTimeController("auto", 4)
    clock.step_completed(step_time, 500.0, decoding=0, entered=2)
    clock.step_completed(step_time, 2.0, decoding=2)
    clock.step_completed(step_time, 3.0, decoding=2, tokens=7)
    clock.step_completed(step_time, 900.0, decoding=0, entered=1)
    clock.step_completed(step_time, 4.0, decoding=1)
    assert seen == [(2, 0, 2.0), (2, 7, 3.0), (1, 0, 4.0)]


def test_milliseconds_become_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the unit of the option, and that there is no limit without a target."""
    clock, step_time = Clock(monkeypatch), StepTimeController(50.0, 4)
    assert clock.step_completed(step_time, 0.040, decoding=1, tokens=4) == 4
    assert clock.step_completed(step_time, 0.005, decoding=1, tokens=4) == 8
    assert clock.step_completed(step_time, 0.060, decoding=1, tokens=8) == 6
    assert clock.step_completed(StepTimeController(None, 4), 9.0, decoding=1, tokens=900) is None


@pytest.mark.parametrize("wrong", [0, -1.0, math.nan, math.inf, "fast", "20"])
def test_a_target_that_is_not_a_time_is_refused(wrong: Any) -> None:
    """Guards the error message for a wrong target."""
    with pytest.raises(ConfigError, match="target_step_ms must be milliseconds, 'auto' or None"):
        StepTimeController(wrong, 4)
