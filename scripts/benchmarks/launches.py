"""The host's work to launch a step on a GPU, without one.

    python -m scripts.benchmarks launches --shape 8B

Launches take their real path through Triton, up to a driver that drops them; matrix products are left out. So the time
that the GPU's own driver takes for each launch is missing, as is that of cuBLAS. Models have the true number of layers,
and tiny ones otherwise, which changes nothing on the host. The time is that of the processor, so that other programs
disturb it little.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

from scripts.benchmarks.harness import Report, at_least_one, by_turns
from scripts.benchmarks.shapes import GPU_SHAPES, TINY, Config

ROWS = (1, 64, 256, 512)
CONTEXT = 500
CHUNK = 256
"""Tokens of the one chunk of a mixed step."""


def narrow(shape: Config) -> Config:
    """The same layers of a model that computes next to nothing."""
    return shape | TINY | {name: shape[name] for name in ("num_hidden_layers", "max_position_embeddings")}


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shape", choices=sorted(GPU_SHAPES), action="append", help="model (all)")
    add("--rows", type=at_least_one, action="append", help=f"sequences of a step ({', '.join(map(str, ROWS))})")
    add("--rounds", type=at_least_one, default=15, help="(%(default)s)")


def run(options: argparse.Namespace, report: Report) -> int:
    os.environ["TRITON_INTERPRET"] = "0"  # before anything imports Triton
    for name in options.shape or sorted(GPU_SHAPES):
        found = measure(GPU_SHAPES[name], options.rows or ROWS, options.rounds)
        report.figures[name] = {f"{step}, {rows} rows": figures for (step, rows), figures in found.items()}
        ways = list(next(iter(found.values())))
        report.line(f"{name}: milliseconds of the host for a step")
        report.table(
            [
                ["step", *(f"{rows} rows" for rows in options.rows or ROWS)],
                *(
                    [f"{step}, {way}", *(f"{found[step, rows][way]:.2f}" for rows in options.rows or ROWS)]
                    for step in ("decode", "mixed")
                    for way in ways
                ),
            ]
        )
        report.line()
    return 0


def measure(shape: Config, sizes: Sequence[int], rounds: int) -> dict[tuple[str, int], dict[str, float]]:
    """Median milliseconds of a decode step and of a mixed step of each size, kernel by kernel and as a graph."""
    import torch

    from tests.support.stubbed_steps import StubbedSteps, host_work_only
    from tests.support.triton_driver import stub_driver

    torch.set_num_threads(1)
    steps = StubbedSteps(narrow(shape), num_blocks=max(sizes) * (CONTEXT // 16 + 1))
    with stub_driver(), host_work_only(), torch.inference_mode():
        graphs = steps.capture(max(sizes), max(sizes) + CHUNK)
        ways: dict[tuple[str, int, str], Callable[[], float]] = {}
        for rows in sizes:
            contexts = [CONTEXT - 1] * (rows - 1)
            stops = [CONTEXT] * (rows - 1)
            for step, make in (
                ("decode", partial(steps.batch, [*contexts, CONTEXT - 1], [*stops, CONTEXT])),
                ("mixed", partial(steps.batch, [*contexts, 0], [*stops, CHUNK])),
            ):
                ways[step, rows, "launched"] = partial(_seconds, make, steps.run)
                ways[step, rows, "captured"] = partial(_seconds, make, partial(steps.replay, graphs))
        by_turns(ways, 2)  # the first steps of a size allocate
        results = by_turns(ways, rounds)
    found: dict[tuple[str, int], dict[str, float]] = {}
    for (step, rows, way), times in results.items():
        found.setdefault((step, rows), {})[way] = 1e3 * median(times)
    return found


def _seconds(make: Callable[[], Any], work: Callable[[Any], None]) -> float:
    batch = make()
    begun = time.thread_time()
    work(batch)
    return time.thread_time() - begun
