"""Reports of a bench made by hand: runs of a few steps whose figures can be counted, and one of each kind of report."""

from __future__ import annotations

import dataclasses

from cbatch.cli.bench.command import bench
from cbatch.cli.bench.load.measure import Capacity, LoadReport
from cbatch.cli.bench.load.users import SLO, LoadResult, Scenario, TimedAnswer
from cbatch.cli.bench.options import BenchOptions
from cbatch.cli.bench.peers import PeerMetrics
from cbatch.cli.bench.recorder import ExampleStep, RecordedChunk, RecordedRequest, RecordedStep, RunRecord, TokenKind
from cbatch.cli.bench.results import (
    AnyResult,
    ComparisonReport,
    FailedPeer,
    Machine,
    Metrics,
    OutputDifference,
    ReplicaMetrics,
    StrategyResult,
    run_metrics,
)
from cbatch.cli.bench.roofline import DeviceRates, RooflineBound
from cbatch.cli.bench.techniques import PromptMemory, Techniques, TokenCost
from cbatch.cli.bench.workload import LengthDistribution, Workload
from cbatch.cli.common.options import make_options
from cbatch.cli.common.percentiles import Percentiles
from cbatch.cli.run.stats import ReplicaFigures

EVIL = "<script src='http://example.org/x'>\"&\x1b[2J"
"""A name that would be markup, and control the terminal."""

SAME = OutputDifference(1.0, None)
WORK = Workload([[1] * 4, [1] * 2, [1] * 3], [3, 2, 1], f"by hand {EVIL}")
MACHINE = Machine("AMD EPYC", 2, f"Linux {EVIL}", "0.1.0", "3.11", "2.13", "5.24")
MODEL = f"demo {EVIL}, 5.1M parameters"

KINDS = ("strategies", "ablations", "peers", "replicas")
"""Of comparisons; those of loads are `load` and `capacity`."""


def make_step(start: float, end: float, *chunks: tuple[int, int, TokenKind, int, int]) -> RecordedStep:
    return RecordedStep(start, end, (end - start) / 2, tuple(RecordedChunk(*chunk) for chunk in chunks), 2)


def make_request(first: float, last: float, tokens: int) -> RecordedRequest:
    return RecordedRequest(tokens, [7] * tokens, first, last)


def static_record() -> RunRecord:
    """Two slots: request 1 is padded, and computed past its end; then request 2 runs alone."""
    steps = [
        make_step(0, 2, (0, 0, "prefill", 0, 4), (1, 1, "prefill", 0, 2), (1, 1, "padding", 0, 2)),
        make_step(2, 4, (0, 0, "decode", 4, 1), (1, 1, "decode", 2, 1)),
        make_step(4, 6, (0, 0, "decode", 5, 1), (1, 1, "idle", 3, 1)),
        make_step(6, 8, (0, 2, "prefill", 0, 3)),
    ]
    requests = [make_request(2, 6, 3), make_request(2, 4, 2), make_request(8, 8, 1)]
    return RunRecord(2, requests, steps, elapsed_s=8.0, num_blocks=16, example=ExampleStep(0, 2, ((3, 0), (5,), (6,))))


def continuous_record() -> RunRecord:
    """The same requests, but request 2 enters when request 1 leaves."""
    steps = [
        make_step(0, 2, (0, 0, "prefill", 0, 4), (1, 1, "prefill", 0, 2)),
        make_step(2, 4, (0, 0, "decode", 4, 1), (1, 1, "decode", 2, 1)),
        make_step(4, 6, (0, 0, "decode", 5, 1), (1, 2, "prefill", 0, 3)),
    ]
    requests = [make_request(2, 6, 3), make_request(2, 4, 2), make_request(6, 6, 1)]
    return RunRecord(2, requests, steps, elapsed_s=6.0, num_blocks=16, example=ExampleStep(2, 2, ((3, 0, 4), (1, 5))))


def slow_record(seconds: float) -> RunRecord:
    """One request after the other, with nearly all of the time for the last one."""
    steps = [
        make_step(0, 1, (0, 0, "prefill", 0, 4)),
        make_step(1, 3, (0, 0, "decode", 4, 2)),
        make_step(3, 4, (0, 1, "prefill", 0, 2)),
        make_step(4, 5, (0, 1, "decode", 2, 1)),
        make_step(5, seconds, (0, 2, "prefill", 0, 3)),
    ]
    requests = [make_request(1, 3, 3), make_request(4, 5, 2), make_request(seconds, seconds, 1)]
    return RunRecord(1, requests, steps, elapsed_s=seconds, num_blocks=16)


def drafting_record() -> RunRecord:
    """Request 0 decodes in 40 steps with drafts of two in every other one; request 1 enters, and has none."""
    steps = []
    for n in range(40):
        right = (0, 2, 1, 1)[n // 2 % 4]
        own = RecordedChunk(0, 0, "decode", n, 3, 2, right) if n % 2 else RecordedChunk(0, 0, "decode", n, 1)
        other = RecordedChunk(1, 1, "decode" if n > 20 else "prefill", n, 1)
        steps.append(RecordedStep(n, n + 1, 0.5, (own, other) if n >= 20 else (own,), 2))
    return RunRecord(2, [RecordedRequest(60), RecordedRequest(19)], steps, elapsed_s=40.0)


def both() -> dict[str, RunRecord]:
    return {"static batches": static_record(), "continuous": continuous_record()}


def bench_options(*arguments: str) -> BenchOptions:
    """What the command makes of arguments."""
    with bench.make_context("bench", list(arguments)) as context:
        return make_options(BenchOptions, context.params)


def result_of(name: str, title: str, metrics: Metrics) -> StrategyResult:
    rounds = [metrics.elapsed_s, metrics.elapsed_s * 1.0123456789, metrics.elapsed_s * 1.2]
    return StrategyResult(name, title, metrics, 0.123456789, rounds, SAME)


def make_comparison(*kinds: str) -> ComparisonReport:
    """Static batches and continuous batching, with what these kinds of reports have beside them."""
    records = both()
    techniques = Techniques()
    if "ablations" in kinds:
        records |= {"without KV cache": slow_record(940.0), "without dynamic scheduling": slow_record(9.0)}
        memory = [PromptMemory(10_000, 512, 123_456_789, 0.123456789)]
        techniques = Techniques(memory, [TokenCost(64, 0.0123456789, 0.00123456789)])
    names = {"static batches": "static", "continuous": "continuous"}
    results: list[AnyResult] = [
        result_of(names.get(title, "no-technique"), title, run_metrics(record, WORK))
        for title, record in records.items()
    ]
    if "peers" in kinds:
        results.append(result_of("transformers-generate", "transformers-generate", PeerMetrics(55.0, 6 / 55, "sdpa")))
        results.append(FailedPeer("transformers-cb", f"not available here: {EVIL}"))
    if "replicas" in kinds:
        figures = [ReplicaFigures(f"cpu:{n}", "ready", 2, 5, 0, 3, 4, 0, 0.1, 0, 0, "") for n in range(2)]
        ttft, tpot = Percentiles(1.5, 2.0, 2.5), Percentiles(0.5, 0.6, 0.7)
        results.append(result_of("replicas", "2 replicas", ReplicaMetrics(3.0, 2.0, ttft, tpot, 4, 0, 0, 0, figures)))
    return ComparisonReport(
        options=bench_options("--batch-size", "2"),
        machine=MACHINE,
        model=MODEL,
        work=WORK,
        strategies=results,
        records=records,
        rates=DeviceRates(23_456_789_012.3, 212_345_678_901.2),
        bound=RooflineBound(0.0123456789, 0.2, 0.3),
        assumed=["The model does not tell its width."],
        techniques=techniques,
    )


def make_load(users: int) -> LoadResult:
    return LoadResult(
        users=users,
        users_judged=users,
        users_served=1 / users,
        answers=users,
        answers_served=1 / users,
        cut_off=0,
        errors=0,
        first_error="",
        ttft_s=Percentiles(0.1 * users, 0.15 * users, 0.2 * users),
        tpot_s=Percentiles(users / 90, users / 60, users / 50),
        prompt_tokens=30,
        cached_tokens=0,
        output_tokens=30,
        elapsed_s=9.0,
        worst_lag_s=0.0,
        timed=[TimedAnswer(n, n / users, 0.2 * (n + 1), 90 / (n + 1) if n else None) for n in range(users)],
    )


def make_load_report(found: LoadResult | Capacity, asked_for: int, *, rounds: int = 1) -> LoadReport:
    lengths = LengthDistribution(16, 64)
    scenario = Scenario(asked_for, 4.0, 20.0, 2.0, lengths, lengths, 100, 1000)
    if isinstance(found, LoadResult):
        found = dataclasses.replace(found, users_missing=asked_for - found.users)
    probes = found.probes if isinstance(found, Capacity) else {}
    several = {users: [run, make_load(users + 1)][:rounds] for users, run in probes.items()}
    if isinstance(found, LoadResult):
        several = {asked_for: [found]}
    options = bench_options("--users", str(asked_for))
    return LoadReport(options, MACHINE, MODEL, scenario, SLO(0.5, 10.0), found, several)


def make_capacity(*users: int, capacity: int = 0) -> Capacity:
    return Capacity(capacity, {count: make_load(count) for count in users})
