"""The estimate of a run's time, and of its bottleneck: `cbatch run --check --estimate`.

A short trial of some rows tells how long steps take, and how long outputs get. Only some of these end in it. So there
are three answers: likely, each token is as likely to be the last one as it was in the trial; at least, what goes on
ends at once; at most, it goes on to its limit. Then the whole run is played: outputs go through the slots and the cache
of an engine, by what its steps cost. A step takes some time whatever is in it, and more for each token of a prompt and
for each output that it continues.
"""

from __future__ import annotations

import heapq
import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice, pairwise
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple

from cbatch.api import Engine
from cbatch.base.outputs import TokenEvent
from cbatch.base.request import Request
from cbatch.base.units import format_count, rounded_s
from cbatch.batch.feed import ends_by_limit
from cbatch.engine.stats import StepRecord
from cbatch.schedule.limits import EngineLimits

ROWS_PER_SLOT = 4
"""Rows of a sample for each sequence that runs at once."""

TRIAL_SECONDS = 10.0

LEAST_STEPS, WARMUP_STEPS = 4, 2
"""Steps that a trial waits for, however long they take; and how many of them do not count, if there are more."""

MAX_PLAYED = 4096
"""Outputs that are played at most; a longer run goes on like these."""

MUCH = 0.3
"""The share of the time in which outputs wait for slots or for the cache, from which on these hold a run back."""

WORTH_SAYING = 0.9
"""The share of the time that twice the slots may still take at most, so that they are worth naming."""


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


class Span(NamedTuple):
    least: float
    likely: float
    most: float

    def rounded(self) -> dict[str, float]:
        return {name: round(value) if value >= 100 else round(value, 1) for name, value in self._asdict().items()}

    def words(self, form: Callable[[float], str]) -> str:
        """Like `2 hours (1 hour to 4 hours)`."""
        least, likely, most = map(form, self)
        return f"{likely} ({least} to {most})" if least != most else likely


@dataclass(slots=True)
class TriedOutput:
    """An output of a row, as far as the trial has brought it. One that `is_failed` has ended, too, with an error."""

    row: SampledRow
    tokens: int = 0
    has_ended: bool = False
    is_failed: bool = False

    @property
    def has_begun(self) -> bool:
        return self.tokens > 0 or self.has_ended


class StepTime(NamedTuple):
    """The work of a step, and the time until the next one."""

    seconds: float
    prompt_tokens: int
    decoding: int


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The results of a trial of at least one row."""

    seconds: float
    outputs: Sequence[TriedOutput]
    steps: Sequence[StepTime]

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a decoding output got in a step: more than 1 with drafts."""
        decoding = sum(step.decoding for step in self.steps)
        after_first = sum(max(one.tokens - 1, 0) for one in self.outputs)
        return max(after_first / decoding, 1.0) if decoding else 1.0


def run_trial(engine: Engine, rows: Sequence[SampledRow], seconds: float) -> TrialResult:
    """Runs at least one row, until all have ended or the time is up; what is unfinished is cancelled then."""
    each = [[TriedOutput(row) for _ in range(row.request.num_outputs)] for row in rows]
    outputs = [one for several in each for one in several]
    all_ended, num_unfinished = threading.Event(), len(outputs)
    begun: list[tuple[float, int, int]] = []
    """When each step began, its tokens of prompts, and the outputs that it continued."""

    def on_event(several: list[TriedOutput], event: TokenEvent) -> None:
        """Runs on the engine's thread, as `on_step`."""
        nonlocal num_unfinished
        output = several[event.sample_index]
        output.tokens += event.token_id is not None
        if event.finish_reason is not None:
            output.has_ended, output.is_failed = True, event.error is not None
            num_unfinished -= 1
            if num_unfinished == 0:
                all_ended.set()

    def on_step(step: StepRecord) -> None:
        scheduled = step.scheduled
        beside = sum(len(chunk.draft) + chunk.caught_up for chunk in scheduled.chunks)
        decoding = scheduled.num_decoding
        begun.append((step.start, scheduled.num_tokens - decoding - beside, decoding))

    engine.on_step = on_step
    started = time.monotonic()
    try:
        for row, several in zip(rows, each, strict=True):
            engine.thread.submit(row.request, partial(on_event, several))
        has_ended = all_ended.wait(seconds)
        while not has_ended and len(begun) <= LEAST_STEPS:
            has_ended = all_ended.wait(0.1)
        if has_ended:
            begun.append((time.perf_counter(), 0, 0))
    finally:
        elapsed = time.monotonic() - started
        engine.on_step = None
        for row in rows:
            engine.thread.cancel(row.request)
    steps = [StepTime(after[0] - start, *work) for (start, *work), after in pairwise(begun)]
    return TrialResult(elapsed, outputs, steps)


def final_lengths(outputs: Sequence[TriedOutput]) -> list[Span]:
    """How long the outputs of a trial get. One that goes on is like a new one from where it is.

    If not only its limit ends an output, each token is its last one with a chance that all outputs tell together.
    """
    free = [one for one in outputs if one.has_begun and not ends_by_limit(one.row.request.params)]
    tokens = sum(one.tokens for one in free)
    stops = sum(one.has_ended and not one.is_failed and one.tokens < one.row.limit for one in free)
    to_limits = [one.row.limit - one.tokens for one in free if not one.has_ended]
    chances = (1.0, 0.0, 0.0)
    if tokens:
        most = stops + len(to_limits)
        high = min((most + 2 * math.sqrt(most)) / tokens, 1.0)
        chances = high, stops / tokens, max(stops - 2 * math.sqrt(stops), 0.0) / (tokens + sum(to_limits))

    def length(output: TriedOutput) -> Span:
        if output.has_ended or ends_by_limit(output.row.request.params):
            return Span(*[output.tokens if output.has_ended else output.row.limit] * 3)
        left = output.row.limit - output.tokens
        least, likely, most = ((1 - (1 - one) ** left) / one if one > 0 else float(left) for one in chances)
        if output.tokens:
            least, most = 0.0, float(left)
        return Span(*(output.tokens + more for more in (least, min(max(likely, least), most), most)))

    return list(map(length, outputs))


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of a step: whatever is in it, for each token of a prompt, and for each output that it continues."""

    fixed: float
    prompt: float
    decoding: float

    @classmethod
    def fit(cls, steps: Sequence[StepTime]) -> StepCosts:
        """The costs, none below 0, with which the squared errors of these steps are least."""
        import numpy as np

        steps = steps[WARMUP_STEPS:] or steps  # kernels and memory are used for the first time
        costs, used = np.zeros(3), [0, 1, 2] if steps else []
        seconds = np.array([step.seconds for step in steps])
        counts = np.array([[1.0, step.prompt_tokens, step.decoding] for step in steps])
        while used:
            scale = np.maximum(counts[:, used].max(axis=0), 1.0)
            found = np.linalg.lstsq(counts[:, used] / scale, seconds, rcond=None)[0]
            if found.min() >= 0:
                costs[used] = found / scale
                break
            used.pop(int(found.argmin()))
        return cls(*costs.tolist())


WaitReason = Literal["slots", "cache", "rows"]


@dataclass(frozen=True, slots=True)
class PlayedRun:
    """How a run went that was played.

    prefill_s: of its seconds, those for prompts
    waits:     the others, by what further outputs waited for: `slots` or the `cache`; none waited in those of `rows`
    running:   mean number of outputs that ran at once
    """

    prefill_s: float
    waits: dict[WaitReason, float]
    running: float

    @property
    def seconds(self) -> float:
        return self.prefill_s + sum(self.waits.values())

    @property
    def prefill_share(self) -> float:
        return self.prefill_s / self.seconds if self.seconds else 0.0

    def wait_share(self, reason: WaitReason) -> float:
        """The share of the time without prompts in which outputs waited for this."""
        return self.waits[reason] / (sum(self.waits.values()) or 1.0)

    def longer(self, times: float) -> float:
        """Seconds of a run with so many times the outputs; at its end, the last ones take as long as here."""
        return (self.seconds - self.waits["rows"]) * times + self.waits["rows"]


def play(
    outputs: Iterable[tuple[float, float]],
    costs: StepCosts,
    slots: int,
    cache_tokens: int,
    tokens_per_step: float = 1.0,
) -> PlayedRun:
    """Plays outputs, from one end of an output to the next.

    outputs: of each, its own tokens, and those of the prompt that are computed for it and that it alone holds

    In the cache, an output counts with half of its tokens: those that run at once are at different places.
    """
    running: list[tuple[float, float]] = []  # at which step each ends, and what it holds
    step = prefill_s = held = slot_seconds = 0.0
    waits: dict[WaitReason, float] = {"slots": 0.0, "cache": 0.0, "rows": 0.0}
    waiting = list(outputs)[::-1]
    while waiting or running:
        while waiting and len(running) < slots:
            tokens, prompt = waiting[-1]
            need = prompt + tokens / 2
            if running and held + need > cache_tokens:
                break
            waiting.pop()
            prefill_s += prompt * costs.prompt
            heapq.heappush(running, (step + tokens / tokens_per_step, need))
            held += need
        took = (running[0][0] - step) * (costs.fixed + costs.decoding * len(running))
        waits["rows" if not waiting else "slots" if len(running) >= slots else "cache"] += took
        slot_seconds += took * len(running)
        step = running[0][0]
        while running and running[0][0] <= step:
            held -= heapq.heappop(running)[1]
    return PlayedRun(prefill_s, waits, slot_seconds / max(sum(waits.values()), 1e-12))


def estimate_run(engine: Engine, sample: RowSample) -> RunEstimate | None:
    """Tries rows of an input. Returns None if there is none that the engine can run."""
    trial = run_trial(engine, rows, TRIAL_SECONDS) if (rows := sample.rows()) else None
    if trial is None or all(one.is_failed for one in trial.outputs):
        return None
    return RunEstimate(trial, sample.num_offered, engine.limits)


class RunEstimate:
    """Scales a trial of some rows up to all rows of an input.

    likely:        the run with outputs of likely lengths, or its beginning
    seconds:       without those for loading the model
    output_tokens: of the whole run
    cache_tokens:  that concurrent outputs hold on average, if the cache has room for them
    """

    def __init__(self, trial: TrialResult, num_rows: int, limits: EngineLimits) -> None:
        """
        trial:    of at least one row that the engine did not refuse
        num_rows: good rows of the whole input
        """
        self._trial, self._limits = trial, limits
        tried = [one for one in trial.outputs if not one.is_failed]
        self._begun = [one for one in tried if one.has_begun]
        self._times = num_rows / _num_rows(trial.outputs)
        self._costs = StepCosts.fit(trial.steps)
        self._cases = list(zip(*final_lengths(tried), strict=True))
        rows = [one.row for one in tried]
        self._prompts = [  # the first output of a row brings its prompt
            len(row.request.prompt_ids) - row.shared if row is not before else 0
            for before, row in zip([None, *rows], rows, strict=False)
        ]
        runs = [self._play(case, limits.max_seqs) for case in self._cases]
        self.likely = runs[1]
        self.seconds = self._with_error(map(self._whole_s, runs))
        self.output_tokens = self._with_error(self._times * sum(case) for case in self._cases)
        slots = min(limits.max_seqs, self._times * len(tried))
        self.cache_tokens = Span(*(slots * (fmean(self._prompts) + fmean(case) / 2) for case in self._cases))

    @property
    def held_back_by(self) -> Literal["prefill", "decode", "slots", "cache", "rows"]:
        run = self.likely
        if run.wait_share("cache") > MUCH:
            return "cache"
        if run.prefill_share > 0.5:
            return "prefill"
        if run.wait_share("slots") <= MUCH:
            return "rows"
        return "slots" if self._costs.fixed > self._costs.decoding * self._limits.max_seqs else "decode"

    def as_dict(self) -> dict[str, Any]:
        """The object in the report of --check; times in seconds, shares in 0 to 1."""
        return {
            "seconds": self.seconds.rounded(),
            "output_tokens": self.output_tokens.rounded(),
            "cache_tokens": self.cache_tokens.rounded(),
            "mean_running": round(self.likely.running, 1),
            "prefill_share": round(self.likely.prefill_share, 3),
            "held_back_by": self.held_back_by,
            "trial": {
                "seconds": rounded_s(self._trial.seconds),
                "rows": _num_rows(self._begun),
                "outputs": len(self._begun),
                "ended": sum(one.has_ended for one in self._begun),
                "output_tokens": sum(one.tokens for one in self._begun),
            },
        }

    def sentences(self) -> list[str]:
        begun, ended = len(self._begun), sum(one.has_ended for one in self._begun)
        return [
            f"estimate: {self.seconds.words(duration)}, "
            f"{self.output_tokens.words(lambda count: f'{count:,.0f}')} output tokens",
            f"in a trial of {duration(self._trial.seconds)}, {ended:,} of {format_count(begun, 'output')} ended"
            + ("; the range is what is known of the others" if ended < begun else ""),
            f"held back by {self._reason()}",
        ]

    def _reason(self) -> str:
        slots, reason = self._limits.max_seqs, self.held_back_by
        if reason == "slots":
            seconds = self._whole_s(self._play(self._cases[1], 2 * slots))
            is_much = seconds <= WORTH_SAYING * self._whole_s(self.likely)
            hint = f"; with {2 * slots}, perhaps {duration(seconds)}" if is_much else ""
            return f"the slots: all {slots} are taken (--max-seqs){hint}"
        return {
            "cache": f"the KV cache: {slots} rows at once need about {self.cache_tokens.likely:,.0f} tokens, "
            f"and it holds {self._limits.cache_tokens:,} (--kv-cache-memory)",
            "prefill": f"the prompts, whose tokens take {self.likely.prefill_share:.0%} of the time",
            "rows": f"the number of rows: it seldom fills all {slots} slots",
            "decode": f"the model: each output makes a step longer, and more than {slots} at once help little",
        }[reason]

    def _play(self, lengths: Sequence[float], slots: int) -> PlayedRun:
        outputs = cycle(zip(lengths, self._prompts, strict=True))
        count = min(round(self._times * len(lengths)), MAX_PLAYED)
        return play(islice(outputs, count), self._costs, slots, self._limits.cache_tokens, self._trial.tokens_per_step)

    def _whole_s(self, run: PlayedRun) -> float:
        return run.longer(max(self._times * len(self._prompts) / MAX_PLAYED, 1.0))

    def _with_error(self, values: Iterable[float]) -> Span:
        """Widens a range by twice the standard error of a sample; not if all rows of the input are in it."""
        error, likely = 0.0, self._cases[1]
        if self._times > 1 and len(likely) > 1 and (mean := fmean(likely)):
            error = min(2 * stdev(likely) / mean / math.sqrt(len(likely)), 0.9)
        least, middle, most = values
        return Span(least * (1 - error), middle, most * (1 + error))


def _num_rows(outputs: Iterable[TriedOutput]) -> int:
    return len({id(one.row) for one in outputs})


def duration(seconds: float) -> str:
    """Like `25 s`, `12 min` or `3.4 hours`."""
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:,.1f} hours"
