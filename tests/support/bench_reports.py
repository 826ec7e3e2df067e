"""Reports of a bench made by hand: runs of a few steps whose figures can be counted, and one of each kind of report."""

from __future__ import annotations

from typing import Any

from cbatch.cli.bench import comparison
from cbatch.cli.bench.command import bench
from cbatch.cli.bench.comparison import Result, run_figures
from cbatch.cli.bench.gain import gain_of
from cbatch.cli.bench.load import Capacity, Rounds, report_of
from cbatch.cli.bench.options import BenchOptions
from cbatch.cli.bench.page import Page
from cbatch.cli.bench.recorder import RecordedChunk, RecordedRequest, RecordedStep, RunRecord, TokenKind
from cbatch.cli.bench.users import Figures, Scenario
from cbatch.cli.bench.workload import LengthDistribution, Workload
from cbatch.cli.common.options import make_options
from scripts.benchmarks.skew import point_of

EVIL = "<script src='http://example.org/x'>\"&\x1b[2J"
"""A name that would be markup, and control the terminal."""

WORK = Workload([[1] * 4, [1] * 2, [1] * 3], [3, 2, 1], f"by hand {EVIL}")
VERSIONS = {"cbatch": "0.1.0", "python": "3.11", "torch": "2.13", "transformers": "5.24"}
MACHINE: dict[str, Any] = {"device": "AMD EPYC", "threads": 2, "system": f"Linux {EVIL}"}
ABOUT = {"machine": MACHINE | VERSIONS, "model": f"demo {EVIL}, 5.1M parameters"}

KINDS = ("strategies", "ablations", "peers")
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
    return RunRecord(2, requests, steps, elapsed_s=8.0, num_blocks=16)


def continuous_record() -> RunRecord:
    """The same requests, but request 2 enters when request 1 leaves."""
    steps = [
        make_step(0, 2, (0, 0, "prefill", 0, 4), (1, 1, "prefill", 0, 2)),
        make_step(2, 4, (0, 0, "decode", 4, 1), (1, 1, "decode", 2, 1)),
        make_step(4, 6, (0, 0, "decode", 5, 1), (1, 2, "prefill", 0, 3)),
    ]
    requests = [make_request(2, 6, 3), make_request(2, 4, 2), make_request(6, 6, 1)]
    return RunRecord(2, requests, steps, elapsed_s=6.0, num_blocks=16)


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


def both() -> dict[str, RunRecord]:
    return {"static batches": static_record(), "continuous": continuous_record()}


def bench_options(*arguments: str) -> BenchOptions:
    """Reads arguments as the command does."""
    with bench.make_context("bench", list(arguments)) as context:
        return make_options(BenchOptions, context.params)


def result_of(name: str, title: str, figures: dict[str, Any]) -> Result:
    rounds = [figures["elapsed_s"], figures["elapsed_s"] * 1.0123456789, figures["elapsed_s"] * 1.2]
    judged = {"floor_share": 0.123456789, "elapsed_s_of_rounds": rounds}
    judged |= {"equal_rows_share": 1.0, "first_difference": None}
    return {"strategy": name, "title": title, **figures, **judged}


def make_comparison(*kinds: str) -> Page:
    """Static batches and continuous batching, with what these kinds of reports have beside them."""
    records = both()
    if "ablations" in kinds:
        records |= {"without KV cache": slow_record(940.0), "without dynamic scheduling": slow_record(9.0)}
    names = {"static batches": "static", "continuous": "continuous"}
    results = [
        result_of(names.get(title, "no-technique"), title, run_figures(record, WORK))
        for title, record in records.items()
    ]
    if "peers" in kinds:
        peer = {"elapsed_s": 55.0, "output_tokens_per_s": 6 / 55, "attention": "sdpa"}
        results.append(result_of("transformers-generate", "transformers-generate", peer))
        failed = {"strategy": "transformers-cb", "title": "transformers-cb", "error": f"not available here: {EVIL}"}
        results.append(failed)
    work = {"source": WORK.source, "requests": 3, "prompt_tokens": 9, "output_tokens": 6}
    roofline = {"copy_bytes_per_s": 23_456_789_012.3, "matrix_flops_per_s": 212_345_678_901.2}
    roofline |= {"weights_s": 0.0123456789, "compute_s": 0.2, "cache_s": 0.3, "floor_s": 0.5}
    data = {
        **ABOUT,
        "work": work | {"slots": 2, "rounds": 3, "seed": 7},
        "strategies": results,
        "roofline": roofline | {"assumed": ["The model does not tell its width."]},
        "gain": gain_of(records["static batches"], records["continuous"], WORK),
    }
    return comparison.page_of(data, records)


def make_curve() -> list[dict[str, Any]]:
    """Equal lengths, which gain nothing, and a skew of 1."""

    def point(size: float, measured: float) -> dict[str, Any]:
        gain = {"measured": measured, "slots": measured, "padding": 1.1, "tail": 0.9, "step_time": 1.0}
        rounds = [{"static_s": measured, "continuous_s": 1.0, "gain": gain}]
        expected = {"by_steps": 1.2 * measured, "by_tokens": 1.1 * measured}
        return point_of(size, Workload([], [100], ""), rounds) | {"expected": expected}

    return [point(0, 1.0), point(1, 3.0)]


def make_load(users: int, missing: int = 0) -> Figures:
    figures: dict[str, Any] = dict.fromkeys(("users", "users_judged", "answers"), users)
    figures |= dict.fromkeys(("cut_off", "errors", "cached_tokens", "worst_lag_s"), 0) | {"first_error": ""}
    figures |= dict.fromkeys(("users_served_share", "answers_served_share"), 1 / users)
    figures |= {
        "ttft_s": {"p50": 0.1 * users, "p90": 0.15 * users, "p99": 0.2 * users},
        "tpot_s": {"p50": users / 90, "p90": users / 60, "p99": users / 50},
        "users_missing": missing,
        "elapsed_s": 9.0,
        "output_tokens_per_s": 30 / 9,
    }
    figures |= dict.fromkeys(("prompt_tokens", "output_tokens"), 30)
    return figures


def load_report(asked_for: int, rounds: Rounds, capacity: Capacity | None = None) -> Page:
    lengths = LengthDistribution(16, 64)
    scenario = Scenario(asked_for, 4.0, 20.0, 2.0, lengths, lengths, 100, 1000)
    return report_of(ABOUT, bench_options("--users", str(asked_for), "--slo-tps", "10"), scenario, rounds, capacity)


def make_one_load(users: int = 5, asked_for: int = 9) -> Page:
    """One load, of which only so many users came."""
    return load_report(asked_for, {asked_for: [make_load(users, asked_for - users)]})


def make_search(*users: int, capacity: int = 0, rounds: int = 1) -> Page:
    """Loads with these numbers of users; in a second round, each is served as if there was one fewer."""
    runs = {count: [make_load(count), make_load(max(count - 1, 1))][:rounds] for count in users}
    return load_report(max(users), runs, Capacity(capacity))
