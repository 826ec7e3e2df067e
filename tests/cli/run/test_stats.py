"""Statistics of a run: figures, and the bottleneck."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cbatch.base.errors import RequestError
from cbatch.batch.driver import ReplicaStatus
from cbatch.batch.row import Row
from cbatch.cli.run.stats import RunStats, bottleneck, since
from cbatch.engine.stats import EngineStats, total_stats
from cbatch.requests.completion import Choice, Completion, Timing, Usage

STREAM: Any = SimpleNamespace(output_tokens=0, started_at=None, waited_for_consumer_s=0.0)


def result(tokens: int, first: float = 1.0, last: float = 2.0, error: RequestError | None = None) -> Row:
    choices, usage = [Choice(token_ids=range(tokens))], Usage(7, tokens)
    completion = Completion(choices=choices, usage=usage, error=error, timing=Timing(0.25, first, last))
    row = Row(0, 0)
    row.finish(completion)
    return row


def test_figures_of_a_run() -> None:
    """Guards --stats: time to the first token from when the row was taken, time per token after that."""
    stats, driver = RunStats(), TwoReplicas()
    stats.attach(driver, SimpleNamespace(output_tokens=33, started_at=0.0))  # type: ignore[arg-type]
    stats.count([result(tokens, last=last) for tokens, last in ((11, 3.0), (21, 4.0), (1, 1.0))])
    stats.count([result(0, error=RequestError("nan_logits", "m"), last=4.5)])
    figures = stats.as_dict()
    assert (figures["rows"], figures["errors"], figures["error_codes"]) == (4, 1, {"nan_logits": 1})
    assert (figures["prompt_tokens"], figures["output_tokens"]) == (21, 33)
    assert figures["elapsed_s"] == 4.5 and figures["output_tokens_per_s"] == pytest.approx(33 / 4.5)
    assert figures["ttft_s"] == {"p50": 0.75, "p90": 0.75, "p99": 0.75}
    assert figures["tpot_s"]["p50"] == pytest.approx((0.2 + 0.15) / 2)


@pytest.mark.parametrize(
    ("state", "waited", "expected"),
    [
        ({"idle_s": 6.0}, 0.0, "the input: the engine had nothing to do for 60% of the time"),
        ({"idle_s": 6.0}, 5.0, "the output, which accepted rows slowly"),
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
