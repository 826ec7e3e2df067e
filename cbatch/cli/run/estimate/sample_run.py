"""A short trial of some rows of an input: how long steps take, and how long outputs get."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from cbatch.api import Engine
from cbatch.base.outputs import TokenEvent
from cbatch.base.request import EventCallback, Request
from cbatch.batch.feed import ends_by_limit
from cbatch.engine.stats import StepRecord

ROWS_PER_SLOT = 4
"""Rows of a sample for each sequence that runs at once."""

LEAST_STEPS = 4
"""Steps that a trial waits for, however long they take."""


@dataclass(frozen=True, slots=True)
class SampledRow:
    """A row of the input.

    limit:  most tokens of each output
    shared: tokens of the prompt that an earlier row begins with, too
    """

    request: Request
    limit: int
    shared: int = 0


class RowSample:
    """Some rows of an input whose length nobody knows, each as likely as any other (Vitter's algorithm R, 1985)."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._random = random.Random(0)
        self._rows: list[SampledRow] = []
        self.num_offered = 0

    def offer(self, row: SampledRow) -> None:
        self.num_offered += 1
        if len(self._rows) < self._size:
            self._rows.append(row)
        elif (place := self._random.randrange(self.num_offered)) < self._size:
            self._rows[place] = row

    def rows(self) -> list[SampledRow]:
        """The rows of the sample, shuffled, so that the first ones are spread over the input as well."""
        return random.Random(0).sample(self._rows, len(self._rows))


@dataclass(slots=True)
class TriedOutput:
    """An output, as far as the trial has brought it.

    row:           number of its row in the sample
    ends_by_limit: whether nothing else may end it
    has_ended:     whether it has; `is_failed`, with an error
    """

    row: int
    limit: int
    ends_by_limit: bool
    tokens: int = 0
    has_ended: bool = False
    is_failed: bool = False

    @property
    def was_stopped(self) -> bool:
        """Whether it has ended before its limit."""
        return self.has_ended and not self.is_failed and self.tokens < self.limit


class StepTime(NamedTuple):
    """What a step has computed, and how long it took until the next one."""

    seconds: float
    prompt_tokens: int
    decoding: int


@dataclass(frozen=True, slots=True)
class TrialResult:
    """What a trial has told.

    rows: of the sample
    """

    seconds: float
    rows: Sequence[SampledRow]
    outputs: Sequence[TriedOutput]
    steps: Sequence[StepTime]

    @property
    def begun(self) -> list[TriedOutput]:
        """Outputs that got a token at least, or have ended without one."""
        return [one for one in self.outputs if not one.is_failed and (one.tokens or one.has_ended)]

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a decoding output got in a step: more than 1 with drafts."""
        decoding = sum(step.decoding for step in self.steps)
        after_first = sum(max(one.tokens - 1, 0) for one in self.outputs)
        return max(after_first / decoding, 1.0) if decoding else 1.0


class _StepWatch:
    """Follows the steps of an engine. Called on its thread."""

    def __init__(self) -> None:
        self.steps: list[StepTime] = []
        self._latest: tuple[float, int, int] | None = None

    def __call__(self, step: StepRecord) -> None:
        self.finish(step.start)
        scheduled = step.scheduled
        decoding = scheduled.num_decoding
        beside = sum(len(chunk.draft) + chunk.replayed for chunk in scheduled.chunks)
        self._latest = step.start, scheduled.num_tokens - decoding - beside, decoding

    def finish(self, now: float) -> None:
        if self._latest is not None:
            started, prompt_tokens, decoding = self._latest
            self.steps.append(StepTime(now - started, prompt_tokens, decoding))


def run_trial(engine: Engine, rows: Sequence[SampledRow], seconds: float) -> TrialResult:
    """Runs at least one row, until all have ended or the time is up; what is unfinished is cancelled then."""
    outputs: list[TriedOutput] = []
    readers: list[EventCallback] = []
    all_ended, watch = threading.Event(), _StepWatch()
    num_unfinished = 0

    def on_event(first: int, event: TokenEvent) -> None:
        """Runs on the engine's thread."""
        nonlocal num_unfinished
        output = outputs[first + event.sample_index]
        output.tokens += event.token_id is not None
        if event.finish_reason is not None:
            output.has_ended, output.is_failed = True, event.error is not None
            num_unfinished -= 1
            if num_unfinished == 0:
                all_ended.set()

    for number, row in enumerate(rows):
        params = row.request.params
        readers.append(partial(on_event, len(outputs)))
        outputs += [TriedOutput(number, row.limit, ends_by_limit(params)) for _ in range(params.n)]
    num_unfinished = len(outputs)
    engine.on_step = watch
    started = time.monotonic()
    try:
        for row, reader in zip(rows, readers, strict=True):
            engine.thread.submit(row.request, reader)
        has_ended = all_ended.wait(seconds)
        while not has_ended and len(watch.steps) < LEAST_STEPS:
            has_ended = all_ended.wait(0.1)
        if has_ended:
            watch.finish(time.perf_counter())
    finally:
        elapsed = time.monotonic() - started
        engine.on_step = None
        for row in rows:
            engine.thread.cancel(row.request)
    return TrialResult(elapsed, rows, outputs, list(watch.steps))
