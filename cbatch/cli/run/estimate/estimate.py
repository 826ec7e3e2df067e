"""What a run will take, and what will hold it back: `cbatch run --check --estimate`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle, islice
from statistics import fmean, stdev
from typing import Any, Literal

from cbatch.api import Engine
from cbatch.base.units import format_count, rounded_s
from cbatch.cli.run.estimate.lengths import EndChances, Span, length_of
from cbatch.cli.run.estimate.played_run import PlayedOutput, PlayedRun, StepCosts, play
from cbatch.cli.run.estimate.sample_run import RowSample, TrialResult, run_trial
from cbatch.schedule.limits import EngineLimits

HeldBack = Literal["prefill", "decode", "slots", "cache", "rows"]

TRIAL_SECONDS = 10.0

MAX_PLAYED = 4096
"""Outputs that are played at most; a longer run goes on like these."""

MUCH = 0.3
"""The share of the time in which outputs wait for slots or for the cache, from which on these hold a run back."""

WORTH_SAYING = 0.9
"""What twice the slots must make of the time, so that they are worth naming."""


def estimate_run(engine: Engine, sample: RowSample) -> RunEstimate | None:
    """Tries rows of an input. Returns None if there is none that the engine can run."""
    if not (rows := sample.rows()):
        return None
    trial = run_trial(engine, rows, TRIAL_SECONDS)
    is_refused = all(one.is_failed for one in trial.outputs)
    return RunEstimate(trial, sample.num_offered, engine.limits) if not is_refused else None


class RunEstimate:
    """Scales a trial of some rows up to all rows of an input."""

    def __init__(self, trial: TrialResult, num_rows: int, limits: EngineLimits) -> None:
        """
        trial:    of at least one row that the engine did not refuse
        num_rows: good rows of the whole input
        """
        self._trial, self._limits = trial, limits
        self._tried = [one for one in trial.outputs if not one.is_failed]
        self._times = num_rows / max(len(trial.rows), 1)
        self._costs = StepCosts.fit(trial.steps)
        chances = EndChances.of(trial.begun)
        lengths = [length_of(one, chances) for one in self._tried]
        self._cases: list[list[float]] = [[length[case] for length in lengths] for case in range(3)]
        self._runs = [self._play(case, limits.max_seqs) for case in self._cases]

    @property
    def likely(self) -> PlayedRun:
        """The run with outputs of likely lengths, or its beginning."""
        return self._runs[1]

    @property
    def output_tokens(self) -> Span:
        return self._with_error([self._times * sum(case) for case in self._cases])

    @property
    def seconds(self) -> Span:
        """Without those for loading the model."""
        return self._with_error([self._whole_s(run) for run in self._runs])

    @property
    def cache_tokens(self) -> Span:
        """What the outputs that run at once hold on average, at different places, if the cache has room for them."""
        slots = min(self._limits.max_seqs, self._times * len(self._tried))
        alone = [output.prompt for output in self._to_play(self._cases[1])]
        return Span(*(slots * (fmean(alone) + fmean(case) / 2) for case in self._cases))

    @property
    def held_back_by(self) -> HeldBack:
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
        begun = self._trial.begun
        return {
            "seconds": self.seconds.rounded(),
            "output_tokens": self.output_tokens.rounded(),
            "cache_tokens": self.cache_tokens.rounded(),
            "mean_running": round(self.likely.running, 1),
            "prefill_share": round(self.likely.prefill_share, 3),
            "held_back_by": self.held_back_by,
            "trial": {
                "seconds": rounded_s(self._trial.seconds),
                "rows": len({one.row for one in begun}),
                "outputs": len(begun),
                "ended": sum(one.has_ended for one in begun),
                "output_tokens": sum(one.tokens for one in begun),
            },
        }

    def sentences(self) -> list[str]:
        """What it says, for people."""
        begun = self._trial.begun
        ended = sum(one.has_ended for one in begun)
        return [
            f"estimate: {self.seconds.words(duration)}, "
            f"{self.output_tokens.words(lambda count: f'{count:,.0f}')} output tokens",
            f"in a trial of {duration(self._trial.seconds)}, {ended:,} of {format_count(len(begun), 'output')} ended"
            + ("; the range is what is known of the others" if ended < len(begun) else ""),
            f"held back by {self._reason()}",
        ]

    def _reason(self) -> str:
        limits, run = self._limits, self.likely
        match self.held_back_by:
            case "cache":
                needed, there = self.cache_tokens.likely, limits.cache_tokens
                return (
                    f"the KV cache: {limits.max_seqs} rows at once need about {needed:,.0f} tokens, "
                    f"and it holds {there:,} (--kv-cache-memory)"
                )
            case "prefill":
                return f"the prompts, whose tokens take {run.prefill_share:.0%} of the time"
            case "rows":
                return f"the number of rows: it seldom fills all {limits.max_seqs} slots"
            case "decode":
                return (
                    f"the model: each output makes a step longer, and more than {limits.max_seqs} at once help little"
                )
            case "slots":
                return f"the slots: all {limits.max_seqs} are taken (--max-seqs){self._with_more_slots()}"

    def _with_more_slots(self) -> str:
        slots = 2 * self._limits.max_seqs
        seconds = self._whole_s(self._play(self._cases[1], slots))
        if seconds > WORTH_SAYING * self._whole_s(self.likely):
            return ""
        return f"; with {slots}, perhaps {duration(seconds)}"

    def _play(self, lengths: Sequence[float], slots: int) -> PlayedRun:
        count = min(round(self._times * len(lengths)), MAX_PLAYED)
        outputs = list(islice(cycle(self._to_play(lengths)), count if lengths else 0))
        return play(outputs, self._costs, slots, self._limits.cache_tokens, self._trial.tokens_per_step)

    def _to_play(self, lengths: Sequence[float]) -> list[PlayedOutput]:
        """The outputs of the sample; the first one of a row brings its prompt."""
        found, before = [], -1
        for one, length in zip(self._tried, lengths, strict=True):
            row = self._trial.rows[one.row]
            prompt = len(row.request.prompt_ids) - row.shared if one.row != before else 0
            found.append(PlayedOutput(length, prompt))
            before = one.row
        return found

    def _whole_s(self, run: PlayedRun) -> float:
        return run.longer(max(self._times * len(self._tried) / MAX_PLAYED, 1.0))

    def _with_error(self, values: Sequence[float]) -> Span:
        """Widens a range by twice the standard error of a sample; not if all rows of the input are in it."""
        error, likely = 0.0, self._cases[1]
        if self._times > 1 and len(likely) > 1 and (mean := fmean(likely)):
            error = min(2 * stdev(likely) / mean / math.sqrt(len(likely)), 0.9)
        least, middle, most = values
        return Span(least * (1 - error), middle, most * (1 + error))


def duration(seconds: float) -> str:
    """Like `25 s`, `12 min` or `3.4 hours`."""
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:,.1f} hours"
