"""Statistics of a run: shown while it goes on, summarized for people, and written as JSON by --stats."""

from __future__ import annotations

import json
import math
import re
import time
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from cbatch.base.units import format_count, rounded_s, word_for
from cbatch.batch.driver import PROMPT_TOKENS_PER_OUTPUT_TOKEN
from cbatch.batch.lines import PromptFigures
from cbatch.batch.row import Row, RowOutcome
from cbatch.cli.common.console import MOST_CHARACTERS, notice
from cbatch.cli.common.percentiles import percentiles
from cbatch.engine.stats import EngineStats, total_stats

if TYPE_CHECKING:
    from cbatch.batch.driver import BatchDriver, ReplicaStatus, RowStream, WorkAhead
    from cbatch.batch.templates import ColumnTemplate


SUMMED: dict[str, Any] = {name: 0 for name, value in RowOutcome._field_defaults.items() if isinstance(value, int)}
SHOWN = "truncated empty prompt_tokens cached_tokens reasoning_tokens reused_tokens tries".split()
"""Sums over rows that have the same name in --stats."""

NUMBERS_OF_NOW = {"num_running", "num_waiting", "num_snapshots"}
"""Fields of `EngineStats` that are no totals."""


def replica_figures(one: ReplicaStatus) -> dict[str, Any]:
    """The work of a replica as --stats tells it."""
    return {
        "name": one.name,
        "state": one.state,
        "rows": one.rows,
        "prompt_tokens": one.stats.num_prompt_tokens,
        "cached_tokens": one.stats.num_cached_tokens,
        "output_tokens": one.stats.num_tokens,
        "steps": one.stats.num_steps,
        "preemptions": one.stats.num_preemptions,
        "idle_s": one.stats.idle_s,
        "copies": one.copies,
        "deaths": one.deaths,
        "problem": one.problem,
    }


def since(now: EngineStats, before: EngineStats) -> EngineStats:
    """The work of engines between two moments, and their present state."""
    totals = {one.name for one in fields(now) if one.name.startswith("num_")} - NUMBERS_OF_NOW | {"idle_s"}
    done: dict[str, Any] = {name: getattr(now, name) - getattr(before, name) for name in totals}
    return replace(now, held_back=Counter(now.held_back) - Counter(before.held_back), **done)


class RunStats:
    """Counts rows and tokens of one run, and keeps eight bytes for each row for the percentiles.

    rows, errors:           rows that this run wrote, and its error rows by their code
    rows_kept, errors_kept: rows of an earlier run that were kept, and error rows among them
    sum:                    the figures of all these rows; of what is true of a row, the number of such rows
    unfinished:             rows that are cut off or empty
    prompts:                those that were cut, or use an empty column
    load_s:                 seconds that loading the model took
    """

    def __init__(self) -> None:
        self._driver: BatchDriver | None = None
        self._stream: RowStream | None = None
        self._before = self._engines = total_stats(())
        self._each_before: Sequence[ReplicaStatus] = ()
        self._replicas: list[ReplicaStatus] = []
        self.rows = self.rows_kept = self.errors_kept = 0
        self.errors: Counter[str] = Counter()
        self.sum = RowOutcome()._replace(**SUMMED)
        self.unfinished = self.rows_validated = self.rows_continued = 0
        self.load_s, self.prompts = 0.0, PromptFigures()
        self._squares = 0
        self._first_error = (math.inf, "")
        self._ended: float | None = None
        self._ttft = array("f")
        self._tpot = array("f")

    def attach(self, driver: BatchDriver, stream: RowStream) -> None:
        """Sets what runs the rows. What it has done before does not count."""
        self._driver, self._stream = driver, stream
        self._before, self._each_before = driver.stats(), driver.each()

    def detach(self) -> None:
        """Keeps the figures of what ran the rows as they are now, since it may be closed."""
        self._engines, self._replicas = self.engines, self.replicas
        self._driver = None

    @property
    def engines(self) -> EngineStats:
        """The work of the engines since the run began."""
        return since(self._driver.stats(), self._before) if self._driver else self._engines

    @property
    def replicas(self) -> list[ReplicaStatus]:
        """Each replica, with its work since the run began; none if an engine of this process runs the rows."""
        if self._driver is None:
            return self._replicas
        return [
            replace(
                now,
                stats=since(now.stats, before.stats),
                **{name: getattr(now, name) - getattr(before, name) for name in ("rows", "copies", "deaths")},
            )
            for before, now in zip(self._each_before, self._driver.each(), strict=True)
        ]

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far."""
        return self._stream.output_tokens if self._stream is not None else 0

    def count(self, rows: Iterable[Row]) -> None:
        """Counts rows that are finished and written."""
        for row in rows:
            outcome = row.outcome
            self.rows += 1
            self.prompts.add(row.line, outcome.dropped_tokens)
            self._ended = max(self._ended or row.finished_at, row.finished_at)
            if outcome.error_code is not None:
                self.errors[outcome.error_code] += 1
                self._first_error = min(self._first_error, (row.index, outcome.error_message))
            sums = {name: getattr(self.sum, name) + getattr(outcome, name) for name in SUMMED}
            self.sum = self.sum._replace(**sums)
            self.unfinished += outcome.truncated or outcome.empty
            self.rows_validated += outcome.tries > 0
            self.rows_continued += outcome.continued_tokens > 0
            self._squares += outcome.completion_tokens**2
            for times, seconds in ((self._ttft, outcome.ttft_s), (self._tpot, outcome.tpot_s)):
                if seconds is not None:
                    times.append(seconds)

    @property
    def running_s(self) -> float:
        """Seconds since the first row was taken."""
        return self._seconds_until(time.monotonic())

    @property
    def elapsed_s(self) -> float:
        """Seconds from when the first row was taken to when the last one so far was finished, or a signal came."""
        interrupted_at = self._stream.interrupted_at if self._stream is not None else None
        return self._seconds_until(interrupted_at or self._ended or time.monotonic())

    def _seconds_until(self, moment: float) -> float:
        started = self._stream.started_at if self._stream is not None else None
        return moment - started if started is not None else 0.0

    def spread(self, rows_left: int) -> float:
        """About two standard deviations of the work of so many rows, as a share of it, by the rows so far."""
        good = self.rows - self.errors.total()
        if good < 2 or not self.sum.completion_tokens or rows_left < 1:
            return 0.0
        mean = self.sum.completion_tokens / good
        variance = max(self._squares / good - mean**2, 0.0)
        return 2 * math.sqrt(variance * (1 / good + 1 / rows_left)) / mean

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens per second of `elapsed_s`."""
        return self.output_tokens / self.elapsed_s if self.elapsed_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The object that --stats writes; times in seconds."""
        engines, replicas = self.engines, self.replicas
        return {
            "rows": self.rows,
            "rows_kept": self.rows_kept,
            "errors": self.errors.total(),
            "errors_kept": self.errors_kept,
            "error_codes": dict(self.errors),
            **{name: getattr(self.sum, name) for name in SHOWN},
            "incomplete_forms": self.sum.incomplete_form,
            **self.prompts.as_dict(),
            "prefix_hit_rate": round(self.sum.cached_tokens / max(self.sum.prompt_tokens, 1), 4),
            "output_tokens": self.output_tokens,
            "rows_from_cache": self.sum.from_cache,
            "rows_continued": self.rows_continued,
            "rows_validated": self.rows_validated,
            "invalid_truncated": self.sum.invalid_cut,
            "not_retried": self.sum.is_last_try,
            "load_s": rounded_s(self.load_s),
            "elapsed_s": rounded_s(self.elapsed_s),
            "output_tokens_per_s": round(self.output_tokens_per_s, 6),
            "steps": engines.num_steps,
            "retried_steps": engines.num_retries,
            "preemptions": engines.num_preemptions,
            "drafted_tokens": engines.num_drafted_tokens,
            "accepted_tokens": engines.num_accepted_tokens,
            "images": {
                "given": engines.num_images,
                "encoded": engines.num_encoded_images,
                "seconds": rounded_s(engines.images_s),
            },
            "fallback": engines.fallback,
            **{
                name: {rank: rounded_s(value) if value is not None else None for rank, value in times.items()}
                for name, times in (("ttft_s", percentiles(self._ttft)), ("tpot_s", percentiles(self._tpot)))
            },
            "deaths": sum(one.deaths for one in replicas),
            "copies": sum(one.copies for one in replicas),
            "replicas": list(map(replica_figures, replicas)),
        }

    def summary(self, driver: BatchDriver) -> list[str]:
        """Some lines for people; one if there was nothing left to do."""
        if not self.rows and self.rows_kept:
            are = f"{format_count(self.rows_kept, 'row')} {word_for(self.rows_kept, 'is', 'are')} there"
            return [f"nothing left to do: {are}, {self.errors_kept:,} of them errors"]
        failed, engines, each = self.errors.total(), self.engines, self.replicas
        kinds = ", ".join(f"{code} {count:,}" for code, count in sorted(self.errors.items()))
        kinds += f", {self.sum.invalid_cut:,} of them cut off at max_tokens" if self.sum.invalid_cut else ""
        kinds += f", {self.sum.is_last_try:,} not tried again at temperature 0" if self.sum.is_last_try else ""
        others = (self.rows_kept, "kept"), (self.sum.from_cache, "from the cache"), (self.rows_continued, "continued")
        kept = "".join(f", {count:,} {what}" for count, what in others if count)
        if more := self.sum.tries - self.rows_validated:
            kept += f", {more:,} further {word_for(more, 'try', 'tries')}"
        cached = f" ({self.sum.cached_tokens:,} cached)" if self.sum.cached_tokens else ""
        if self.prompts.cut:
            cached += f", {self.prompts.dropped_tokens:,} dropped from {format_count(self.prompts.cut, 'prompt')}"
        waited_s = self._stream.window.waited_s if self._stream is not None else 0.0
        retried = f", {engines.num_retries:,} retried ({engines.last_error})" if engines.num_retries else ""
        kind, rate = "output", self.output_tokens_per_s
        if not self.output_tokens:  # of score rows
            kind, rate = "prompt", engines.num_prefilled_tokens / max(self.elapsed_s, 1e-9)
        lines = [
            f"{self._whole_rows()}, {failed:,} failed{kinds and f' ({kinds})'}{kept}",
            f"{format_count(self.sum.prompt_tokens, 'prompt token')}{cached}, "
            f"{format_count(self.output_tokens, 'output token')}",
            f"{self.elapsed_s:,.1f} s, {rate:,.0f} {kind} tokens/s, {format_count(engines.num_steps, 'step')}{retried}",
        ]
        if failed:
            lines.insert(1, f"the first error: {self._first_error[1]}")
        if engines.num_steps:
            lines.append(f"limited by {bottleneck(driver, engines, self.elapsed_s, waited_s)}")
        happened = [f"{one.name} {one.death_words()}" for one in each if one.deaths and one.state != "gone"]
        happened += [f"{one.name} was given up: {one.problem}" for one in each if one.state == "gone"]
        if copies := sum(one.copies for one in each):
            words = word_for(copies, "was also given to an idle one", "were also given to idle ones")
            happened.append(f"{format_count(copies, 'unfinished row')} {words}")
        return lines + ([f"replicas: {'; '.join(happened)}"] if happened else [])

    def prefix_advice(self, template: ColumnTemplate | None) -> str:
        """Advice if prompts share little, although their template has much constant text; else empty."""
        share = self.sum.cached_tokens / max(self.sum.prompt_tokens, 1)
        behind = (template.constant_behind if template is not None else 0) or 0
        if behind < 200 or share >= 0.1 or self.rows - self.sum.from_cache < 2:  # else it would gain little
            return ""
        return (
            f"only {share:.0%} of the prompt tokens were cached: {behind:,} characters that all prompts have stand "
            "behind a column of the template; move them before its first column, and they are computed once"
        )

    def _whole_rows(self) -> str:
        """How many rows are as they were to be, and what is the matter with those that are not."""
        good = self.rows - self.errors.total()
        if not self.unfinished:
            return f"{format_count(good, 'row')} ok"
        words = [f"{good - self.unfinished:,} ok"]
        if self.sum.truncated:
            forms = f", {self.sum.incomplete_form:,} of them incomplete forms" if self.sum.incomplete_form else ""
            words.append(f"{self.sum.truncated:,} cut off at max_tokens{forms}")
        if self.sum.empty:
            words.append(f"{self.sum.empty:,} empty")
        return f"{format_count(self.rows, 'row')}: {', '.join(words)}"


def bottleneck(driver: BatchDriver, done: EngineStats, elapsed_s: float, waited_for_output_s: float) -> str:
    """Names what a person would change first to make such a run faster."""
    limits, steps = driver.limits, max(done.num_steps, 1)
    engine_s = elapsed_s * driver.num_engines
    idle, in_tower = (min(one / engine_s, 1.0) if engine_s else 0.0 for one in (done.idle_s, done.images_s))
    if idle >= 0.3:
        what = "the output, which accepted rows slowly" if waited_for_output_s > elapsed_s * 0.3 else "the input"
        return f"{what}: the engine had nothing to do for {idle:.0%} of the time"
    if in_tower >= 0.5:
        return f"the model: its vision tower took {in_tower:.0%} of the time"
    if done.num_shrinks:
        return f"the device's memory, which made the batch smaller {done.num_shrinks} times (--kv-cache-memory)"
    reason, count = max(done.held_back.items(), key=lambda item: item[1], default=("", 0))
    if count < 0.3 * steps:
        return "the model: there were seldom more rows than could run at once"
    words = {
        "slots": f"the model: all {limits.max_seqs} slots (--max-seqs) were taken",
        "cache": f"the KV cache, which was full ({done.num_preemptions:,} preemptions, --kv-cache-memory)",
        "budget": f"the model: steps were full (--max-batch-tokens {limits.max_batch_tokens}) while prompts waited",
        "target": "the time of a step (--target-step-ms), which made prompts wait",
    }
    return f"{words[reason]} in {count / steps:.0%} of the steps"


RECENT_SECONDS = 5.0
"""Steps that are no older than this tell how long a step takes now."""

LONG_TAIL_SECONDS = 10.0
"""A tail is told of if its longest row may take so long."""


def work_left(
    stats: RunStats, rows_left: int, running: int, ahead: WorkAhead | None
) -> tuple[float | None, float | None]:
    """Tokens of prompts, without those in the cache, and of outputs that `rows_left` rows will probably still take.

    running: of these, those whose prompts are computed
    ahead:   rows that were read, if it is known; others count as much as the mean

    None is what is not known: the first until a row was read, the second until one has got its answer.
    """
    good = stats.rows - stats.errors.total() + stats.errors["invalid_answer"]  # which cost their tokens, too
    done, known, to_come = stats.sum, good + (ahead.rows if ahead is not None else 0), max(rows_left - running, 0)
    if not known:
        return None, None
    if ahead is None:
        prompts = done.prompt_tokens / known * to_come
        in_flight = stats.output_tokens - done.completion_tokens
        outputs = max(done.completion_tokens / known * rows_left - in_flight, 0.0)
    else:
        unread = max(rows_left - ahead.rows, 0)
        prompts = ahead.prompts_to_come + unread * (done.prompt_tokens + ahead.prompt_tokens) / known
        outputs = ahead.output_tokens + unread * (stats.output_tokens + ahead.output_tokens) / known
    prompts -= done.cached_tokens / max(good, 1) * to_come  # not by its share, which a long prompt distorts
    return max(prompts, 0.0), outputs if good and stats.output_tokens else None


_TEXT = re.compile(r'"(?:text|content|message)": "((?:[^"\\]|\\u[0-9a-f]{4}|\\[^u])*)')
"""The answer, or the error, in a row of output."""


class RunProgress:
    """The figures that a display shows of a run. It also says, once, that a few long rows leave most slots idle."""

    def __init__(
        self, stats: RunStats, driver: BatchDriver, stream: RowStream, total: int | None, *, in_lines: bool = False
    ) -> None:
        """
        total:    number of rows, if it is known
        in_lines: whether the text of `state` is only the beginning, and `details` has the rest, on lines of their own
        """
        self._stats, self._driver, self._stream, self._total = stats, driver, stream, total
        self._in_lines = in_lines
        self._recent = deque([(time.monotonic(), driver.stats().num_steps, 0)])
        """When how many steps were done, and tokens of prompts computed."""
        self._tail_is_told = False
        self._rest = ""
        self._last: Row | None = None

    def finished(self, rows: Sequence[Row]) -> None:
        """These rows were written."""
        self._last = rows[-1] if rows else self._last

    def state(self) -> tuple[int, str]:
        """The number of rows that are done, and the text that follows it."""
        stats, now, ahead = self._stats, self._driver.stats(), self._stream.ahead()
        done, engines, each = stats.rows + stats.rows_kept, stats.engines, self._driver.each()
        step_s, prompt_speed = self._rates(now.num_steps, engines.num_prefilled_tokens)
        rows_left = self._total - done if self._total else ahead.rows if ahead is not None else 0
        prompts, outputs = work_left(stats, rows_left, now.num_running, ahead)
        begun = engines.num_prefilled_tokens - (engines.num_prompt_tokens - engines.num_cached_tokens)
        prompts = max(prompts - max(begun, 0), 0.0) if prompts is not None and (self._total or ahead) else None
        left_s, tokens = 0.0, f"{stats.output_tokens:,}"
        if outputs is not None and prompts is not None and self._total:
            tokens += f" of about {stats.output_tokens + outputs:,.0f}"
            was_done = stats.output_tokens + engines.num_prefilled_tokens / PROMPT_TOKENS_PER_OUTPUT_TOKEN
            left_s = (outputs + prompts / PROMPT_TOKENS_PER_OUTPUT_TOKEN) / was_done * stats.running_s
        if ahead is not None and step_s is not None:
            if left_s:
                left_s = max(left_s, ahead.longest_likely * step_s)  # which no other row makes shorter
            self._tell_tail(ahead, now, step_s)
        spread, errors = stats.spread((self._total or done) - done), stats.errors.total()
        low, likely, high = (tqdm.format_interval(left_s * part) for part in (max(1 - spread, 0), 1, 1 + spread))
        running, slots = sum(one.state == "running" for one in each), self._driver.limits.max_seqs * max(len(each), 1)
        first = [  # the most important part comes first, because a narrow terminal cuts off the rest
            f"{stats.output_tokens / max(stats.running_s, 1e-9):,.0f} tok/s",
            f"{likely} left" + (f" ({low}-{high})" if low != high else "") if left_s else "",
            format_count(errors, "error") if errors else "",
            f"{running} of {len(each)} replicas" if running < len(each) else "",
        ]
        rest = [
            f"prompts {prompt_speed:,.0f} tok/s" if prompts or prompt_speed else "",
            f"{prompts:,.0f} to go" if prompts else "",
            f"{now.num_running}/{slots} slots, {now.num_waiting} wait",
            f"KV {now.cache_used:.0%}",
            f"{tokens} tokens",
        ]
        self._rest = ", ".join(filter(None, rest))
        return done, ", ".join(filter(None, first if self._in_lines else first + rest))

    def details(self) -> list[str]:
        """The figures that `state` left out, and the last row; nothing unless `in_lines`."""
        return [self._rest, self._last_row()] if self._in_lines else []

    def _last_row(self) -> str:
        if (row := self._last) is None:
            return ""
        found = _TEXT.search(row.data[: 4 * MOST_CHARACTERS].decode(errors="replace"))
        tokens = "" if row.has_failed else f", {format_count(row.outcome.completion_tokens, 'token')}"
        text = json.loads(f'"{found[1]}"') if found else ""
        return f"row {row.index}{tokens}: {' '.join(text.split())}"

    def _rates(self, num_steps: int, num_prefilled: int) -> tuple[float | None, float]:
        """Seconds of a step now, None if there is none, and tokens of prompts a second."""
        now = time.monotonic()
        self._recent.append((now, num_steps, num_prefilled))
        while len(self._recent) > 2 and self._recent[1][0] <= now - RECENT_SECONDS:
            self._recent.popleft()
        since, steps, prefilled = self._recent[0]
        step_s = (now - since) / (num_steps - steps) if num_steps > steps else None
        return step_s, (num_prefilled - prefilled) / max(now - since, 1e-9)

    def _tell_tail(self, ahead: WorkAhead, now: EngineStats, step_s: float) -> None:
        slots, seconds = self._driver.limits.max_seqs, ahead.longest * step_s
        is_tail = ahead.is_last and not now.num_waiting and 0 < now.num_running <= slots // 2
        had_more = self._stats.rows + ahead.rows > slots
        if self._tail_is_told or not (is_tail and had_more) or seconds < LONG_TAIL_SECONDS:
            return
        self._tail_is_told = True
        notice(
            f"{format_count(ahead.rows, 'row')} left, and {slots - now.num_running} of {slots} slots are idle: the "
            f"longest has up to {format_count(ahead.longest, 'token')} to go, which may take "
            f"{tqdm.format_interval(seconds)}"
        )
