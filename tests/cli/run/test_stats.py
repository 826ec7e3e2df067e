"""Statistics of a run: figures, the bottleneck, the time left by tokens, and the long tail."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cbatch.base.errors import RequestError
from cbatch.base.outputs import ToolCall
from cbatch.base.params import SamplingParams
from cbatch.base.request import Request, ToolChoice
from cbatch.batch.driver import ReplicaStatus, WorkAhead
from cbatch.batch.row import Row, RowOutcome
from cbatch.cli.run import stats as stats_module
from cbatch.cli.run.stats import RunProgress, RunStats, bottleneck, since, work_left
from cbatch.engine.stats import EngineStats, total_stats
from cbatch.requests.completion import Choice, Completion, Timing, Usage

STREAM: Any = SimpleNamespace(
    output_tokens=0, started_at=None, interrupted_at=None, window=SimpleNamespace(waited_s=0.0)
)


def result(tokens: int, first: float = 1.0, last: float = 2.0, error: RequestError | None = None) -> Row:
    choices, usage = [Choice(token_ids=range(tokens))], Usage(7, tokens)
    completion = Completion(choices=choices, usage=usage, error=error, timing=Timing(0.25, first, last))
    row = Row(0, 0)
    row.finish(completion)
    return row


def test_figures_of_a_run() -> None:
    """Guards --stats: time to the first token from when the row was taken, time per token after that."""
    stats, driver = RunStats(), TwoReplicas()
    stats.attach(driver, SimpleNamespace(output_tokens=33, started_at=0.0, interrupted_at=None))  # type: ignore[arg-type]
    stats.count([result(tokens, last=last) for tokens, last in ((11, 3.0), (21, 4.0), (1, 1.0))])
    stats.count([result(0, error=RequestError("nan_logits", "m"), last=4.5)])
    figures = stats.as_dict()
    assert (figures["rows"], figures["errors"], figures["error_codes"]) == (4, 1, {"nan_logits": 1})
    assert (figures["prompt_tokens"], figures["output_tokens"]) == (21, 33)
    assert figures["elapsed_s"] == 4.5 and figures["output_tokens_per_s"] == pytest.approx(33 / 4.5)
    assert figures["ttft_s"] == {"p50": 0.75, "p90": 0.75, "p99": 0.75}
    assert figures["tpot_s"]["p50"] == pytest.approx((0.2 + 0.15) / 2)


def test_an_interrupted_run_lasts_until_the_signal() -> None:
    """Guards speed: the tokens of unfinished rows count, so does the time after the last finished one."""
    stats, driver = RunStats(), TwoReplicas()
    stream = SimpleNamespace(output_tokens=50, started_at=1.0, interrupted_at=11.0)
    stats.attach(driver, stream)  # type: ignore[arg-type]
    stats.count([result(11, last=3.0)])
    assert stats.elapsed_s == 10.0 and stats.output_tokens_per_s == 5.0


SCHEMA = SamplingParams(regex="a+")
CUT, WHOLE = Choice(text="a", finish_reason="length"), Choice(text="a")
BAD = RequestError("invalid_answer", "m")
FINISHED: dict[str, tuple[list[Choice], dict[str, Any], tuple[int, int, int], str]] = {
    "whole": ([WHOLE, WHOLE], {}, (0, 0, 0), "1 row ok, 0 failed"),
    "cut": ([WHOLE, CUT], {}, (1, 0, 0), "1 row: 0 ok, 1 cut off at max_tokens, 0 failed"),
    "form": (
        [CUT, CUT], {"params": SCHEMA}, (1, 1, 0),
        "1 row: 0 ok, 1 cut off at max_tokens, 1 of them incomplete forms, 0 failed",
    ),
    "call": (
        [CUT], {"choice": ToolChoice()}, (1, 1, 0),
        "1 row: 0 ok, 1 cut off at max_tokens, 1 of them incomplete forms, 0 failed",
    ),
    "closed form": (
        [replace(CUT, closed=True)], {"params": SCHEMA}, (1, 0, 0), "1 row: 0 ok, 1 cut off at max_tokens, 0 failed",
    ),
    "whole form": ([WHOLE], {"params": SCHEMA}, (0, 0, 0), "1 row ok, 0 failed"),
    "blank": ([WHOLE, Choice(text=" \n")], {}, (0, 0, 1), "1 row: 0 ok, 1 empty, 0 failed"),
    "only reasoning": (
        [Choice(reasoning="hm", finish_reason="length")], {}, (1, 0, 1),
        "1 row: 0 ok, 1 cut off at max_tokens, 1 empty, 0 failed",
    ),
    "only calls": ([Choice(tool_calls=(ToolCall("f", "{}"),))], {}, (0, 0, 0), "1 row ok, 0 failed"),
}  # fmt: skip
"""For each kind of row: its outputs, what it asked for, how it counts, and the summary."""


@pytest.mark.parametrize("kind", FINISHED)
def test_rows_that_are_not_whole_are_told(kind: str) -> None:
    """Guards outputs that were cut off or are empty against being counted as all is well."""
    choices, asked, counts, sentence = FINISHED[kind]
    stats, row = RunStats(), Row(0, 0)
    row.finish(Completion(Request(**asked), choices=choices, usage=Usage(7, 3, 0, 2)))
    stats.count([row])
    figures = stats.as_dict()
    assert figures["reasoning_tokens"] == 2
    assert (figures["truncated"], figures["incomplete_forms"], figures["empty"]) == counts
    assert stats.summary(TwoReplicas())[0] == sentence


@pytest.mark.parametrize("has_text", [True, False])
def test_rows_without_text_and_error_rows_are_not_empty(has_text: bool) -> None:
    """Guards the count against models without a tokenizer, and against rows that count as failed."""
    stats, rows = RunStats(), [Row(0, 0), Row(1, 1)]
    rows[0].finish(Completion(choices=[Choice(token_ids=[1])], has_text=False))
    failed = Completion(choices=[replace(CUT, text="")], error=BAD, has_text=has_text)
    failed.validation = {"valid": False, "errors": ["x"]}
    rows[1].finish(failed)
    stats.count(rows)
    assert (stats.sum.truncated, stats.sum.empty, stats.unfinished) == (0, 0, 0)
    assert stats.summary(TwoReplicas())[0] == "1 row ok, 1 failed (invalid_answer 1, 1 of them cut off at max_tokens)"


@pytest.mark.parametrize(
    ("state", "waited", "expected"),
    [
        ({"idle_s": 6.0}, 0.0, "the input: the engine had nothing to do for 60% of the time"),
        ({"idle_s": 6.0}, 5.0, "the output, which accepted rows slowly"),
        ({"images_s": 6.0, "held_back": {"slots": 90}}, 0.0, "the model: its vision tower took 60% of the time"),
        ({"images_s": 4.0}, 0.0, "the model: there were seldom more rows than could run at once"),
        ({"num_shrinks": 2}, 0.0, "the device's memory, which made the batch smaller 2 times"),
        ({}, 0.0, "the model: there were seldom more rows than could run at once"),
        ({"held_back": {"slots": 90, "cache": 1}}, 0.0, "all 8 slots (--max-seqs) were taken in 90% of the steps"),
        ({"held_back": {"cache": 50}}, 0.0, "the KV cache, which was full (3 preemptions"),
        ({"held_back": {"budget": 50}}, 0.0, "(--max-batch-tokens 64) while prompts waited in 50%"),
        ({"held_back": {"target": 40}}, 0.0, "(--target-step-ms), which made prompts wait in 40% of the steps"),
    ],
)
def test_what_limited_a_run(state: dict[str, Any], waited: float, expected: str) -> None:
    """Guards the last line of the summary: it names the option that a person would change first."""
    driver: Any = SimpleNamespace(limits=SimpleNamespace(max_seqs=8, max_batch_tokens=64), num_engines=1)
    done = replace(total_stats(()), num_steps=100, num_preemptions=3, **state)
    assert expected in bottleneck(driver, done, 10.0, waited)


def test_a_second_run_on_an_engine_counts_its_own() -> None:
    """Guards the figures of a batch in a chat, whose engine has worked before."""
    before = replace(total_stats(()), num_steps=100, num_preemptions=3, idle_s=60.0, held_back={"slots": 5})
    now = replace(before, num_running=2, num_steps=110, num_retries=1, idle_s=61.0, held_back={"slots": 7})
    done = replace(total_stats(()), num_running=2, num_steps=10, num_retries=1, idle_s=1.0, held_back={"slots": 2})
    assert since(now, before) == done


class TwoReplicas:
    """A driver of replicas, of which the second has died before and during the run, and the first took copies."""

    num_engines = 2
    limits = SimpleNamespace(max_seqs=8, max_batch_tokens=64)

    def __init__(self) -> None:
        self.lives = 1

    def each(self) -> list[ReplicaStatus]:
        stats = replace(total_stats([]), num_steps=10 * self.lives, num_tokens=100 * self.lives, idle_s=0.5)
        died = ReplicaStatus("replica 2", "running", stats, 7 * self.lives, 0, self.lives, "died: killed by signal 9")
        return [ReplicaStatus("replica 1", "running", stats, 5, 3 * self.lives), died]

    def stats(self) -> EngineStats:
        return total_stats([one.stats for one in self.each()])


def test_figures_of_each_replica() -> None:
    """Guards --stats with replicas: sums at the top, and what each has done since the run began, not before."""
    driver: Any = TwoReplicas()
    stats = RunStats()
    stats.attach(driver, STREAM)
    stats.rows, driver.lives = 12, 3
    stats.detach()
    driver.lives = 9  # whatever comes later does not count
    figures = stats.as_dict()
    one, two = figures["replicas"]
    assert (one["name"], one["rows"], one["copies"], one["deaths"]) == ("replica 1", 0, 6, 0)
    assert (two["rows"], two["steps"], two["output_tokens"], two["deaths"]) == (14, 20, 200, 2)
    assert two["problem"] == "died: killed by signal 9" and two["state"] == "running"
    assert (figures["steps"], figures["deaths"], figures["copies"]) == (40, 2, 6)
    (line,) = (line for line in stats.summary(driver) if line.startswith("replicas: "))
    assert line == (
        "replicas: replica 2 died: killed by signal 9 (the last of 2 deaths); "
        "6 unfinished rows were also given to idle ones"
    )


def test_idle_replicas_are_counted_by_their_share() -> None:
    """Guards the bottleneck: two replicas that idle for a second each have idled for a tenth of ten seconds."""
    driver: Any = TwoReplicas()
    assert "seldom more rows" in bottleneck(driver, replace(total_stats(()), num_steps=100, idle_s=5.0), 10.0, 0.0)
    assert "nothing to do for 40%" in bottleneck(driver, replace(total_stats(()), num_steps=100, idle_s=8.0), 10.0, 0.0)


def stats_of(*rows: tuple[int, int], cached: int = 0, in_flight: int = 0) -> RunStats:
    """Figures after rows of so many prompt and output tokens, and tokens of rows that go on; it began at time 0."""
    stats, tokens = RunStats(), sum(output for _, output in rows) + in_flight
    driver: Any = SimpleNamespace(stats=lambda: total_stats(()), each=lambda: ())
    stats.attach(driver, SimpleNamespace(started_at=0.0, interrupted_at=None, output_tokens=tokens))  # type: ignore[arg-type]
    for number, (prompt, output) in enumerate(rows):
        outcome = RowOutcome(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=output)
        stats.count([Row(number, number, b"", outcome)])
    return stats


def test_the_work_that_is_left() -> None:
    """Guards the time left: by tokens of rows that were read, the mean of others, and what will be in the cache."""
    assert work_left(RunStats(), 5, 0, None) == (None, None)
    assert work_left(RunStats(), 10, 0, WorkAhead(rows=5, prompt_tokens=50, prompts_to_come=50)) == (100, None)
    ahead = WorkAhead(rows=3, prompt_tokens=300, prompts_to_come=200, output_tokens=75)
    assert work_left(stats_of((100, 20), in_flight=5), 5, 1, ahead) == (400, 125)
    assert work_left(stats_of((100, 20), cached=50), 3, 1, ahead) == (200 - 2 * 50, 75)
    long_one_first = stats_of((5000, 20), *[(50, 20)] * 9, cached=30)
    assert work_left(long_one_first, 3, 1, ahead) == (200 - 2 * 30, 75)


def test_the_work_that_is_left_to_replicas() -> None:
    """Guards the prompts that are left, which replicas tell nothing of ahead: by the mean of the rows so far."""
    assert work_left(stats_of((80, 40), in_flight=60), 4, 1, None) == (3 * 80, 4 * 40 - 60)
    assert work_left(stats_of((80, 40), cached=20, in_flight=900), 4, 6, None) == (0, 0)
    assert work_left(stats_of((80, 40), cached=20, in_flight=900), 4, 2, None) == (2 * 60, 0)


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
    assert text.startswith("97 tok/s, 20:00 left, 8/8 slots, 4 wait, KV 50%, 10,000 of about 13,000 tokens")


def test_the_first_line_has_the_speed_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the first line of a run without a terminal, after ten seconds of prompts, against a speed of 0."""
    run = Run(monkeypatch, 20, stats_of())
    run.now += 10
    assert run.progress._rates(20, 5000)[1] == 500


@pytest.mark.parametrize("filler", [0, 980, 981, 982, 983, 984, 985])
def test_the_last_row_is_shown_as_its_text(filler: int) -> None:
    """Guards the display of answers in JSON against backslashes, and against a row that is cut inside an escape."""
    text = "x" * 4 * filler + '{"a": "é\n\u2028b"}'
    data = json.dumps({"index": 6, "text": text}).encode()
    driver: Any = SimpleNamespace(stats=lambda: total_stats(()), each=lambda: ())
    progress = RunProgress(RunStats(), driver, driver, 20, in_lines=True)
    progress.finished([Row(6, 6, data, RowOutcome(completion_tokens=9))])
    shown = progress.details()[1]
    assert shown.startswith("row 6, 9 tokens: " + (text[:3900] if filler else '{"a": "é b"}')) and "\\" not in shown


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


def test_sums_over_engines() -> None:
    """Guards the figures of several engines: work of those that died counts, what they held does not."""
    one = EngineStats(1, 2, 3, 0.5, 10, 1, 100, 20, {"slots": 2}, "A.", 7, 1, 0, "first", 0.5)
    two = replace(one, cache_used=0.1, held_back={"slots": 1, "cache": 4}, last_error="second")
    both = total_stats([one, two], ended=[replace(one, fallback="B.", last_error="")])
    assert (both.num_running, both.num_waiting, both.used_blocks, both.cache_used) == (2, 4, 6, 0.3)
    assert (both.num_steps, both.num_preemptions, both.num_tokens, both.idle_s) == (30, 3, 21, 1.5)
    assert both.held_back == {"slots": 5, "cache": 4}
    assert (both.fallback, both.last_error) == ("B. A.", "second")
    assert total_stats([]).num_steps == 0 == total_stats([]).cache_used
