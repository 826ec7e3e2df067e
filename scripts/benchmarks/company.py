"""Speed beside other busy processes, and what is left of it that fair sharing would leave.

    python -m scripts.benchmarks company --model FOLDER --neighbours 1 --rounds 9

By turns alone and beside processes that only count: one request that decodes, 16 of them, and prompts. Every neighbour
takes half of a core from a fair engine, as long as there are fewer of them than cores.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median

from cbatch import Engine, EngineConfig, SamplingParams
from cbatch.runtime.cpu import choose_threads, num_threads
from cbatch.runtime.device import choose_device
from scripts.benchmarks.harness import Report, at_least_one, by_turns
from scripts.benchmarks.models import load_random
from scripts.benchmarks.shapes import SHAPES

WORK = {"one request": (1, 16, 128), "16 requests": (16, 16, 32), "prompts": (4, 400, 1)}
"""Requests, and tokens of the prompt and of the output of each."""

SETTLE_SECONDS = 0.3
"""Until a new process counts, and the system has found a processor for it."""


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(SETTLE_SECONDS if busy else 0.0)
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def tokens_per_s(engine: Engine, requests: int, prompt: int, output: int) -> float:
    prompts = [[100 + 7 * request + place % 64 for place in range(prompt)] for request in range(requests)]
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    started = time.perf_counter()
    engine.generate(prompts, params)
    computed = output if output > 1 else prompt
    return requests * computed / (time.perf_counter() - started)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", help="a folder or GGUF file; by default a random one of the shape")
    add("--shape", choices=SHAPES, default="135m", help="(%(default)s)")
    add("--neighbours", type=at_least_one, default=1, help="busy processes (%(default)s)")
    add("--threads", type=at_least_one, help="threads of the engine (as many as it takes by itself)")
    add("--rounds", type=at_least_one, default=7, help="figures are medians of them (%(default)s)")


def run(options: argparse.Namespace, report: Report) -> int:
    choose_threads(options.threads)
    config = EngineConfig(
        model=options.model, device="cpu", threads=options.threads, speculate="off", prefix_cache=False, max_seqs=16
    )
    loaded = None if options.model else load_random("random", SHAPES[options.shape], choose_device("cpu"))
    with Engine(config, loaded=loaded) as engine:
        fair = 1 - options.neighbours / 2 / max(num_threads(), options.neighbours)
        report.line(f"{num_threads()} threads, {options.neighbours} neighbours; fair: {fair:.0%} of the speed alone")

        def measure(count: int) -> dict[str, float]:
            with neighbours(count):
                return {name: tokens_per_s(engine, *sizes) for name, sizes in WORK.items()}

        measure(0)
        ways: dict[str, Callable[[], dict[str, float]]] = {
            "alone": partial(measure, 0), "in company": partial(measure, options.neighbours),
        }  # fmt: skip
        found = by_turns(ways, options.rounds)
    table = [["work", "tokens/s alone", "in company", "of fair sharing"]]
    for name in WORK:
        alone, beside = (median(one[name] for one in found[way]) for way in ways)
        kept = beside / alone / fair
        report.figures[name] = {"alone": alone, "in_company": beside, "of_fair": kept}
        table.append([name, f"{alone:,.0f}", f"{beside:,.0f}", f"{kept:.2f}"])
    report.table(table)
    return 0
