"""How far a run is, for a display: its speed, the time left by tokens, and the long tail of the last rows."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from tqdm import tqdm

from cbatch.base.units import format_count
from cbatch.batch.driver import PROMPT_TOKENS_PER_OUTPUT_TOKEN
from cbatch.cli.common.console import notice
from cbatch.cli.run.stats import RunStats

if TYPE_CHECKING:
    from cbatch.batch.driver import BatchDriver, RowStream, WorkAhead
    from cbatch.engine.stats import EngineStats

RECENT_SECONDS = 5.0
"""Steps that are no older than this tell how long a step takes now."""

LONG_TAIL_SECONDS = 10.0
"""A tail is told of if its longest row may take so long."""


class TokensLeft(NamedTuple):
    """Tokens of prompts and of outputs that are probably still to be computed, and those that were."""

    prompt: float
    output: float
    prompt_done: float
    output_done: float

    def seconds(self, running_s: float) -> float:
        """Time for them at the speed so far."""
        left = self.prompt / PROMPT_TOKENS_PER_OUTPUT_TOKEN + self.output
        done = self.prompt_done / PROMPT_TOKENS_PER_OUTPUT_TOKEN + self.output_done
        return left * running_s / done


def tokens_left(stats: RunStats, rows_left: int, ahead: WorkAhead | None) -> TokensLeft | None:
    """Estimates the work of `rows_left` rows, of which `ahead` tells those that were read, if it is known.

    A row that was not read counts as much as the mean of the others. Returns None until a row has got its answer.
    """
    good = stats.rows - stats.errors.total() + stats.errors["invalid_answer"]  # which cost their tokens, too
    if not good or not stats.output_tokens:
        return None
    computed = 1 - stats.cached_tokens / max(stats.prompt_tokens, 1)
    if ahead is None:
        per_row = stats.finished_tokens / good
        output = per_row * rows_left - (stats.output_tokens - stats.finished_tokens)
        prompt = computed * stats.prompt_tokens / good * rows_left
        return TokensLeft(prompt, max(output, 0.0), computed * stats.prompt_tokens, stats.output_tokens)
    unread, known = max(rows_left - ahead.rows, 0), good + ahead.rows
    prompts = stats.prompt_tokens + ahead.prompt_tokens
    return TokensLeft(
        computed * (ahead.prompts_to_come + unread * prompts / known),
        ahead.output_tokens + unread * (stats.output_tokens + ahead.output_tokens) / known,
        computed * (prompts - ahead.prompts_to_come),
        stats.output_tokens,
    )


class RunProgress:
    """The figures that a display shows of a run. It also says, once, that a few long rows leave most slots idle."""

    def __init__(self, stats: RunStats, driver: BatchDriver, stream: RowStream, total: int | None) -> None:
        """`total`: number of rows, if it is known."""
        self._stats, self._driver, self._stream, self._total = stats, driver, stream, total
        self._steps: deque[tuple[float, int]] = deque()
        """When how many steps were done."""
        self._tail_is_told = False

    def state(self) -> tuple[int, str]:
        """The number of rows that are done, and the text that follows it."""
        stats, now, ahead = self._stats, self._driver.stats(), self._stream.ahead()
        done, step_s = stats.rows + stats.rows_kept, self._step_s(now.num_steps)
        left = tokens_left(stats, self._total - done, ahead) if self._total else None
        seconds = left.seconds(stats.running_s) if left is not None else None
        if ahead is not None and step_s is not None:
            if seconds is not None:
                seconds = max(seconds, ahead.longest_likely * step_s)  # which no other row makes shorter
            self._tell_tail(ahead, now, step_s)
        each = self._driver.each()
        running = sum(one.state == "running" for one in each)
        of_about = f" of about {stats.output_tokens + left.output:,.0f}" if left is not None else ""
        parts = [  # the most important part comes first, because a narrow terminal cuts off the rest
            f"{stats.output_tokens / max(stats.running_s, 1e-9):,.0f} tok/s",
            f"{tqdm.format_interval(seconds)} left" if seconds is not None else "",
            format_count(stats.errors.total(), "error") if stats.errors else "",
            f"{running} of {len(each)} replicas" if running < len(each) else "",
            f"{now.num_running} run, {now.num_waiting} wait",
            f"KV {now.cache_used:.0%}",
            f"{stats.output_tokens:,}{of_about} tokens",
        ]
        return done, ", ".join(part for part in parts if part)

    def _step_s(self, num_steps: int) -> float | None:
        """Seconds of a recent step; None until that is known."""
        now = time.monotonic()
        self._steps.append((now, num_steps))
        while len(self._steps) > 2 and self._steps[1][0] <= now - RECENT_SECONDS:
            self._steps.popleft()
        since, before = self._steps[0]
        return (now - since) / (num_steps - before) if num_steps > before else None

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
