"""What a display shows of a run: the time left, by tokens, and the long tail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cbatch.batch.driver import PROMPT_TOKENS_PER_OUTPUT_TOKEN, WorkAhead
from cbatch.batch.row import Row, RowOutcome
from cbatch.cli.run import progress as progress_module
from cbatch.cli.run.progress import RunProgress, tokens_left
from cbatch.cli.run.stats import RunStats
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


def test_work_left_counts_the_tokens_of_rows_that_were_read() -> None:
    """Guards the time left against counting rows: those that were read count by their own, others by the mean."""
    assert tokens_left(RunStats(), 5, WorkAhead(rows=5, output_tokens=10)) is None
    ahead = WorkAhead(rows=3, prompt_tokens=300, prompts_to_come=200, output_tokens=75)
    left = tokens_left(stats_of((100, 20), in_flight=5), 5, ahead)
    assert left == (200 + 2 * 100, 75 + 2 * 25, 200, 25)
    cached = tokens_left(stats_of((100, 20), cached=50), 3, ahead)
    assert cached == (100, 75, 100, 20)


def test_work_left_without_knowing_what_was_read() -> None:
    """Guards the estimate for replicas: rows left times tokens of a row, less the tokens of unfinished rows."""
    left = tokens_left(stats_of((80, 40), in_flight=60), 4, None)
    assert left == (4 * 80, 4 * 40 - 60, 80, 100)
    left = tokens_left(stats_of((80, 40), in_flight=900), 4, None)
    assert left is not None and left.output == 0


def test_prompts_and_outputs_have_their_own_speed() -> None:
    """Guards runs of long prompts and short answers: after half of the work, as much time is left as has passed."""
    size = 10 * PROMPT_TOKENS_PER_OUTPUT_TOKEN
    left = tokens_left(stats_of((size, 10)), 1, WorkAhead())
    assert left is not None and left.seconds(30.0) == pytest.approx(30.0)
    left = tokens_left(stats_of((size, 10)), 1, WorkAhead(rows=1, prompt_tokens=size, output_tokens=10))
    assert left is not None and left.seconds(30.0) == pytest.approx(10.0)  # its prompt is done


class Run:
    """A run on an engine of 8 slots with steps of half a second."""

    limits = SimpleNamespace(max_seqs=8)

    def __init__(self, monkeypatch: pytest.MonkeyPatch, total: int, stats: RunStats) -> None:
        self.now, self.running, self.waiting, self.work = 100.0, 8, 4, WorkAhead(rows=12)
        monkeypatch.setattr(progress_module.time, "monotonic", lambda: self.now)
        self.notices: list[str] = []
        monkeypatch.setattr(progress_module, "notice", self.notices.append)
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
