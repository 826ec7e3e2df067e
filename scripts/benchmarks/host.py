"""The host's work in a step of many decoding requests: schedule it, build its input, take in its tokens.

    python -m scripts.benchmarks host --rows 512 --context 1500

The model costs nothing, so nothing else takes time. Prints medians over steps, without and with overlap scheduling.

    python -m scripts.benchmarks host --share

measures the host beside a real model, whose weights evict all else from the processor's caches in every step: how much
of the mixed work of the benchmark `grid` lies outside the kernels of the CPU's fast path.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from cbatch import EngineConfig, SamplingParams, SteppingEngine
from cbatch.kernels.cpu.thread_pool import shared_thread_pool
from cbatch.runtime import spans
from scripts.benchmarks.harness import Report, at_least_one
from scripts.benchmarks.models import FreeModel, load_random
from scripts.benchmarks.peers.work import make_work
from scripts.benchmarks.shapes import PEER_SHAPES, SHAPES

VOCABULARY = 128
WARMUP = 10


@dataclass(frozen=True)
class Share:
    """One round of work: its steps, its seconds, and the seconds outside the kernels."""

    steps: int
    elapsed_s: float
    outside_s: float

    def __str__(self) -> str:
        outside = 1e3 * self.outside_s / self.steps
        return f"{self.steps} steps in {self.elapsed_s:.2f} s; outside of kernels {outside:.2f} ms a step"


def make_engine(rows: int, context: int, steps: int, *, ahead: bool) -> SteppingEngine:
    """An engine all of whose requests decode from its second step on."""
    longest = context + steps + 16
    config = EngineConfig(
        device="cpu",
        max_seqs=rows,
        max_batch_tokens=rows * context,
        kv_blocks=rows * -(-longest // 16),
        run_ahead=ahead,
        prefix_cache=True,
    )
    engine = SteppingEngine(config, FreeModel(VOCABULARY, longest).loaded())
    for row in range(rows):
        prompt = [(row * 31 + place * 7 + row // 5) % VOCABULARY for place in range(context)]
        engine.add(prompt, SamplingParams(max_tokens=steps, ignore_eos=True), seed=row)
    return engine


def measure_phases(rows: int, context: int, steps: int, *, ahead: bool) -> dict[str, float]:
    """Median milliseconds of each phase of a step, and of the whole step."""
    engine = make_engine(rows, context, steps, ahead=ahead)
    taken: dict[str, list[float]] = {}

    @contextmanager
    def clock(name: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        taken.setdefault(name, []).append(time.perf_counter() - begun)

    spans.record_spans(clock)
    try:
        while engine.has_work:
            with clock("step"):
                engine.step()
    finally:
        spans.record_spans(None)
        engine.close()
    return {name: 1e3 * median(times[WARMUP:]) for name, times in taken.items() if name != "forward"}


def measure_share(shape: str, rounds: int) -> Iterator[Share]:
    """One record a round; no two rounds have the same prompts."""
    loaded = load_random(shape, SHAPES[shape], torch.device("cpu"))
    engine = SteppingEngine(EngineConfig(device="cpu", max_seqs=32, max_batch_tokens=512), loaded)
    pool, inside = shared_thread_pool(torch.get_num_threads()), 0.0
    run = pool.run

    def timed(*arguments: Any) -> None:
        nonlocal inside
        begun = time.perf_counter()
        run(*arguments)
        inside += time.perf_counter() - begun

    pool.run = timed  # type: ignore[assignment,method-assign]
    try:
        for seed in range(rounds):
            work, inside = make_work(32, seed, engine.model.vocab_size), 0.0
            for prompt, length in zip(work.prompts, work.lengths, strict=True):
                engine.add(prompt, SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True))
            before, begun = engine.stats().num_steps, time.perf_counter()
            while engine.has_work:
                engine.step()
            elapsed = time.perf_counter() - begun
            yield Share(engine.stats().num_steps - before, elapsed, elapsed - inside)
    finally:
        pool.run = run  # type: ignore[method-assign]
        engine.close()


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rows", type=int, default=512, help="requests (%(default)s)")
    add("--context", type=int, default=1500, help="tokens of each request before the first step (%(default)s)")
    add("--steps", type=int, default=100, help="(%(default)s)")
    add("--share", action="store_true", help="measure the host's share of the time beside a real model")
    add("--shape", choices=PEER_SHAPES, default="135m", help="size of the real model (%(default)s)")
    add(
        "--rounds",
        type=at_least_one,
        default=6,
        help="rounds with the real model; the first warms up (%(default)s)",
    )


def run(options: argparse.Namespace, report: Report) -> int:
    if options.share:
        report_share(options, report)
    else:
        report_phases(options, report)
    return 0


def report_phases(options: argparse.Namespace, report: Report) -> None:
    torch.set_num_threads(1)
    for ahead in (False, True):
        found = measure_phases(options.rows, options.context, options.steps, ahead=ahead)
        way = "overlapped" if ahead else "step by step"
        report.figures[way] = found
        phases = ", ".join(f"{name} {found[name]:.2f}" for name in sorted(found, key=list(found).index))
        report.line(f"{options.rows} requests behind {options.context:,} tokens, {way}, in ms: {phases}")


def report_share(options: argparse.Namespace, report: Report) -> None:
    found = list(measure_share(options.shape, options.rounds))[1:]  # the first round touches memory for the first time
    for one in found:
        report.line(one)
    share = median(one.outside_s / one.elapsed_s for one in found)
    report.figures |= {"rounds": found, "share": share}
    report.line(f"median share outside of kernels: {share:.1%}")
