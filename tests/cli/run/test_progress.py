"""What a display shows of a run: the time left, by tokens, and the long tail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cbatch.batch.driver import PROMPT_TOKENS_PER_OUTPUT_TOKEN, WorkAhead
from cbatch.batch.row import Row, RowOutcome
from cbatch.cli.run import stats as stats_module
from cbatch.cli.run.stats import RunProgress, RunStats, work_left
from cbatch.engine.stats import total_stats


def stats_of(*rows: tuple[int, int], cached: int = 0, in_flight: int = 0) -> RunStats:
    """Figures after rows of so many prompt and output tokens, and tokens of rows that go on; it began at time 0."""
    stats, tokens = RunStats(), sum(output for _, output in rows) + in_flight
    driver: Any = SimpleNamespace(stats=lambda: total_stats(()), each=lambda: ())
    stats.attach(driver, SimpleNamespace(started_at=0.0, output_tokens=tokens))  # type: ignore[arg-type]
    for number, (prompt, output) in enumerate(rows):
        outcome = RowOutcome(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=output)
        stats.count([Row(number, number, b"", outcome)])
    return stats


def shares(*work: tuple[float, float, float, float]) -> list[Any]:
    """Output tokens that are left, and the share of the work, of tokens left and done of prompts and outputs."""
    size = PROMPT_TOKENS_PER_OUTPUT_TOKEN
    return [
        pytest.approx((output, (output + prompt / size) / (output_done + prompt_done / size)))
        for prompt, output, prompt_done, output_done in work
    ]


def test_the_work_that_is_left() -> None:
    """Guards the time left: by tokens of rows that were read, the mean of others, and the speed of prompts."""
    assert work_left(RunStats(), 5, WorkAhead(rows=5, output_tokens=10)) is None
    ahead = WorkAhead(rows=3, prompt_tokens=300, prompts_to_come=200, output_tokens=75)
    found = [
        work_left(stats_of((100, 20), in_flight=5), 5, ahead),
        work_left(stats_of((100, 20), cached=50), 3, ahead),
        work_left(stats_of((80, 40), in_flight=60), 4, None),  # replicas, which tell nothing ahead
        work_left(stats_of((80, 40), in_flight=900), 4, None),
    ]
    expected = [(400, 125, 200, 25), (100, 75, 100, 20), (4 * 80, 4 * 40 - 60, 80, 100), (4 * 80, 0, 80, 940)]
    assert found == shares(*expected)


class Run:
    """A run on an engine of 8 slots with steps of half a second."""

    limits = SimpleNamespace(max_seqs=8)

    def __init__(self, monkeypatch: pytest.MonkeyPatch, total: int, stats: RunStats) -> None:
        self.now, self.running, self.waiting, self.work = 100.0, 8, 4, WorkAhead(rows=12)
        monkeypatch.setattr(stats_module.time, "monotonic", lambda: self.now)
        self.notices: list[str] = []
        monkeypatch.setattr(stats_module, "notice", self.notices.append)
        driver: Any = self
        self.progress = RunProgress(stats, driver, driver, total)

    def stats(self) -> Any:
        return SimpleNamespace(
            num_steps=int(2 * self.now), num_running=self.running, num_waiting=self.waiting, cache_used=0.5
        )

    def ahead(self) -> WorkAhead:
        return self.work

    def each(self) -> list[Any]:
        return []

    def text(self) -> str:
        self.now += 1
        return self.progress.state()[1]


def test_the_time_left_is_at_least_that_of_the_longest_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the end of a run, when few slots work and the speed so far says nothing."""
    run = Run(monkeypatch, 20, stats_of(*[(8, 1000)] * 10))
    run.text()
    assert ", 20:00 left" not in run.text()
    run.work = WorkAhead(rows=10, output_tokens=3000, longest_likely=2400)
    text = run.text()
    assert text.startswith("97 tok/s, 20:00 left, 8 run, 4 wait, KV 50%, 10,000 of about 13,000 tokens")


def test_the_long_tail_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the notice: only of idle slots at the end of what filled them, only if it takes long, and only once."""
    run = Run(monkeypatch, 20, stats_of(*[(8, 100)] * 10))
    tail = WorkAhead(rows=3, output_tokens=100, longest_likely=100, longest=412, is_last=True)
    run.text()
    run.text()
    run.running, run.waiting = 3, 0
    for work in (tail._replace(is_last=False), tail._replace(longest=15), WorkAhead(is_last=True)):
        run.work = work
        run.text()
    assert run.notices == []
    run.work = tail
    run.text()
    run.text()
    assert run.notices == [
        "3 rows left, and 5 of 8 slots are idle: the longest has up to 412 tokens to go, which may take 03:26"
    ]


@pytest.mark.parametrize("busy", [{"running": 5}, {"waiting": 1}])
def test_no_tail_while_slots_are_busy(monkeypatch: pytest.MonkeyPatch, busy: dict[str, int]) -> None:
    """Guards against calling the middle of a run its end; and a batch that never filled the slots has no tail."""
    stats = stats_of(*[(8, 100)] * 10)
    for figures, state in ((stats, busy), (stats_of((8, 100)), {})):
        run = Run(monkeypatch, 20, figures)
        run.running, run.waiting = 3, 0
        run.work = WorkAhead(rows=3, output_tokens=100, longest_likely=100, longest=412, is_last=True)
        vars(run).update(state)
        run.text()
        run.text()
        assert run.notices == []
