"""Statistics of a run: counted while it goes on, summarized for people, and written as JSON by --stats."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from cbatch.base.units import format_count, rounded_s
from cbatch.batch.output_row import OutputRow
from cbatch.batch.pipeline import RunObserver
from cbatch.cli.common.percentiles import Percentiles

if TYPE_CHECKING:
    from cbatch.batch.driver import BatchDriver, ReplicaStatus
    from cbatch.engine.stats import EngineStats


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """What the engines of a driver have done so far. The difference of two is what it did between them."""

    steps: int = 0
    preemptions: int = 0
    retries: int = 0
    shrinks: int = 0
    idle_s: float = 0.0
    held_back: Counter[str] = field(default_factory=Counter)
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @classmethod
    def of(cls, stats: EngineStats) -> EngineCounters:
        return cls(
            stats.num_steps,
            stats.num_preemptions,
            stats.num_retries,
            stats.num_shrinks,
            stats.idle_s,
            Counter(stats.held_back),
            stats.num_drafted_tokens,
            stats.num_accepted_tokens,
        )

    def __sub__(self, before: EngineCounters) -> EngineCounters:
        return EngineCounters(*(getattr(self, one.name) - getattr(before, one.name) for one in fields(self)))


@dataclass(frozen=True, slots=True)
class ReplicaFigures:
    """What one replica did in a run; see `ReplicaStatus`. `state` and `problem` are those of now."""

    name: str
    state: str
    rows: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    steps: int
    preemptions: int
    idle_s: float
    copies: int
    deaths: int
    problem: str

    def death_words(self) -> str:
        """Why it died the last time, and how often it did."""
        return self.problem + (f" (the last of {self.deaths:,} deaths)" if self.deaths > 1 else "")

    @classmethod
    def between(cls, before: ReplicaStatus, now: ReplicaStatus) -> ReplicaFigures:
        then, stats = before.stats, now.stats
        return cls(
            name=now.name,
            state=now.state,
            rows=now.rows - before.rows,
            prompt_tokens=stats.num_prompt_tokens - then.num_prompt_tokens,
            cached_tokens=stats.num_cached_tokens - then.num_cached_tokens,
            output_tokens=stats.num_tokens - then.num_tokens,
            steps=stats.num_steps - then.num_steps,
            preemptions=stats.num_preemptions - then.num_preemptions,
            idle_s=stats.idle_s - then.idle_s,
            copies=now.copies - before.copies,
            deaths=now.deaths - before.deaths,
            problem=now.problem,
        )


class RunStats(RunObserver):
    """Counts rows and tokens of one run, and keeps eight bytes for each row for the percentiles.

    rows, errors:           rows that this run wrote, and its error rows by their code
    rows_kept, errors_kept: rows of an earlier run that were kept, and error rows among them
    output_tokens:          tokens generated so far; `finished_tokens` of them belong to finished rows
    tries:                  of all rows that were validated, `rows_validated`
    rows_from_cache:        rows of which nothing was computed; `reused_tokens`: output tokens from the cache
    load_s:                 seconds that loading the model took
    """

    def __init__(self) -> None:
        self._driver: BatchDriver | None = None
        self._before = EngineCounters()
        self._each_before: Sequence[ReplicaStatus] = ()
        self._counters = EngineCounters()
        self._replicas: list[ReplicaFigures] = []
        self._fallback = ""
        self.rows = 0
        self.errors: Counter[str] = Counter()
        self.rows_kept = 0
        self.errors_kept = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.finished_tokens = 0
        self.tries = 0
        self.rows_validated = 0
        self.rows_from_cache = 0
        self.rows_continued = 0
        self.reused_tokens = 0
        self.load_s = 0.0
        self._started: float | None = None
        self._ended: float | None = None
        self._ttft = array("f")
        self._tpot = array("f")

    def attach(self, driver: BatchDriver) -> None:
        """Sets what runs the rows. What it has done before does not count."""
        self._driver = driver
        self._before = EngineCounters.of(driver.stats())
        self._each_before = driver.each()

    def detach(self) -> None:
        """Keeps the figures of what ran the rows as they are now, since it may be closed."""
        self._counters, self._replicas, self._fallback = self.counters, self.replicas, self.fallback
        self._driver = None

    @property
    def counters(self) -> EngineCounters:
        """What the engines have done since the run began."""
        return EngineCounters.of(self._driver.stats()) - self._before if self._driver else self._counters

    @property
    def replicas(self) -> list[ReplicaFigures]:
        """What each replica has done since the run began; none if an engine of this process runs the rows."""
        if self._driver is None:
            return self._replicas
        return [ReplicaFigures.between(*pair) for pair in zip(self._each_before, self._driver.each(), strict=True)]

    @property
    def fallback(self) -> str:
        """Which kernels are not used, and why."""
        return self._driver.stats().fallback if self._driver else self._fallback

    def start(self, now: float) -> None:
        """Sets the time at which the first row was taken; later calls change nothing."""
        if self._started is None:
            self._started = now

    def count(self, row: OutputRow) -> None:
        """Counts a row that is finished and written."""
        outcome = row.outcome
        self.rows += 1
        self._ended = max(self._ended or row.finished_at, row.finished_at)
        if outcome.error_code is not None:
            self.errors[outcome.error_code] += 1
        self.tries += outcome.tries
        self.rows_validated += outcome.tries > 0
        self.rows_from_cache += outcome.from_cache
        self.rows_continued += outcome.continued_tokens > 0
        self.reused_tokens += outcome.reused_tokens
        self.prompt_tokens += outcome.prompt_tokens
        self.cached_tokens += outcome.cached_tokens
        self.finished_tokens += outcome.completion_tokens
        if outcome.ttft_s is not None:
            self._ttft.append(outcome.ttft_s)
        if outcome.tpot_s is not None:
            self._tpot.append(outcome.tpot_s)

    @property
    def running_s(self) -> float:
        """Seconds since the first row was taken."""
        return time.monotonic() - self._started if self._started is not None else 0.0

    @property
    def elapsed_s(self) -> float:
        """Seconds from when the first row was taken to when the last one so far was finished."""
        if self._started is None or self._ended is None:
            return self.running_s
        return self._ended - self._started

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens per second of `elapsed_s`."""
        return self.output_tokens / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def ttft_s(self) -> Percentiles:
        """Seconds from when a row was taken to its first token."""
        return Percentiles.of(self._ttft)

    @property
    def tpot_s(self) -> Percentiles:
        """Seconds for each further token of a row."""
        return Percentiles.of(self._tpot)

    def as_dict(self) -> dict[str, Any]:
        """The object that --stats writes; times in seconds."""
        counters = self.counters
        return {
            "rows": self.rows,
            "rows_kept": self.rows_kept,
            "errors": self.errors.total(),
            "errors_kept": self.errors_kept,
            "error_codes": dict(self.errors),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "prefix_hit_rate": round(self.cached_tokens / max(self.prompt_tokens, 1), 4),
            "output_tokens": self.output_tokens,
            "rows_from_cache": self.rows_from_cache,
            "rows_continued": self.rows_continued,
            "reused_tokens": self.reused_tokens,
            "rows_validated": self.rows_validated,
            "tries": self.tries,
            "load_s": rounded_s(self.load_s),
            "elapsed_s": rounded_s(self.elapsed_s),
            "output_tokens_per_s": round(self.output_tokens_per_s, 6),
            "steps": counters.steps,
            "retried_steps": counters.retries,
            "preemptions": counters.preemptions,
            "drafted_tokens": counters.drafted_tokens,
            "accepted_tokens": counters.accepted_tokens,
            "fallback": self.fallback,
            "ttft_s": _rounded(self.ttft_s),
            "tpot_s": _rounded(self.tpot_s),
            "deaths": sum(one.deaths for one in self.replicas),
            "copies": sum(one.copies for one in self.replicas),
            "replicas": [asdict(one) for one in self.replicas],
        }

    def summary(self, driver: BatchDriver, waited_for_output_s: float) -> list[str]:
        """Four lines for people, and one about replicas if they died; or one line if there was nothing left to do."""
        if not self.rows and self.rows_kept:
            are = f"{format_count(self.rows_kept, 'row')} {'is' if self.rows_kept == 1 else 'are'} there"
            return [f"nothing left to do: {are}, {self.errors_kept:,} of them errors"]
        failed = self.errors.total()
        kinds = ", ".join(f"{code} {count:,}" for code, count in sorted(self.errors.items()))
        kept = f", {self.rows_kept:,} kept" if self.rows_kept else ""
        kept += f", {self.rows_from_cache:,} from the cache" if self.rows_from_cache else ""
        kept += f", {self.rows_continued:,} continued" if self.rows_continued else ""
        if more := self.tries - self.rows_validated:
            kept += f", {more:,} further {'try' if more == 1 else 'tries'}"
        cached = f" ({self.cached_tokens:,} cached)" if self.cached_tokens else ""
        counters = self.counters
        retried = f", {counters.retries:,} retried ({driver.stats().last_error})" if counters.retries else ""
        lines = [
            f"{format_count(self.rows - failed, 'row')} ok, {failed:,} failed{kinds and f' ({kinds})'}{kept}",
            f"{format_count(self.prompt_tokens, 'prompt token')}{cached}, "
            f"{format_count(self.output_tokens, 'output token')}",
            f"{self.elapsed_s:,.1f} s, {self.output_tokens_per_s:,.0f} output tokens/s, "
            f"{format_count(counters.steps, 'step')}{retried}",
            f"limited by {bottleneck(driver, counters, self.elapsed_s, waited_for_output_s)}",
        ]
        return lines + ([f"replicas: {happened}"] if (happened := self._replica_line()) else [])

    def _replica_line(self) -> str:
        """How often replicas died and rows were copied, in a line; empty if neither happened."""
        each = self.replicas
        deaths = [f"{one.name} {one.death_words()}" for one in each if one.deaths and one.state != "gone"]
        gone = [f"{one.name} was given up: {one.problem}" for one in each if one.state == "gone"]
        copies = sum(one.copies for one in each)
        words = "was also given to an idle one" if copies == 1 else "were also given to idle ones"
        copied = [f"{format_count(copies, 'unfinished row')} {words}"] if copies else []
        return "; ".join(deaths + gone + copied)


def _rounded(times: Percentiles) -> dict[str, float | None]:
    return {name: rounded_s(value) if value is not None else None for name, value in asdict(times).items()}


def bottleneck(driver: BatchDriver, counters: EngineCounters, elapsed_s: float, waited_for_output_s: float) -> str:
    """Names what a person would change first to make such a run faster."""
    limits, steps = driver.limits, max(counters.steps, 1)
    idle = min(counters.idle_s / (elapsed_s * driver.num_engines), 1.0) if elapsed_s else 0.0
    if idle >= 0.3:
        what = "the output, which accepted rows slowly" if waited_for_output_s > elapsed_s * 0.3 else "the input"
        return f"{what}: the engine had nothing to do for {idle:.0%} of the time"
    if counters.shrinks:
        return f"the device's memory, which made the batch smaller {counters.shrinks} times (--kv-cache-memory)"
    reason, count = max(counters.held_back.items(), key=lambda item: item[1], default=("", 0))
    if count < 0.3 * steps:
        return "the model: there were seldom more rows than could run at once"
    words = {
        "slots": f"the model: all {limits.max_seqs} slots (--max-seqs) were taken",
        "cache": f"the KV cache, which was full ({counters.preemptions:,} preemptions, --kv-cache-memory)",
        "budget": f"the model: steps were full (--max-batch-tokens {limits.max_batch_tokens}) while prompts waited",
        "target": "the time of a step (--target-step-ms), which made prompts wait",
    }
    return f"{words[reason]} in {count / steps:.0%} of the steps"
