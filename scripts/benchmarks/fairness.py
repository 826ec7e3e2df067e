"""What a long prompt does to requests that decode, and to a short prompt behind it.

    python -m scripts.benchmarks fairness

Requests decode for a while; then a long prompt arrives, and short ones behind it. The step time has no target, the
target `auto`, and a fixed one, by turns. The model is random.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

import torch

from scripts.benchmarks.harness import Report, at_least_one
from scripts.benchmarks.long_prompt import Sizes, Target, measure_targets
from scripts.benchmarks.models import load_random
from scripts.benchmarks.shapes import SHAPES, TINY


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", choices=SHAPES, default="135m", help="shape of the model (%(default)s)")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="(%(default)s)")
    add("--rows", type=int, default=32, help="requests that decode (%(default)s)")
    add("--row-tokens", type=int, default=256, help="tokens of the prompt of each of them (%(default)s)")
    add("--prompt-tokens", type=int, default=8000, help="tokens of the long prompt (%(default)s)")
    add("--short-tokens", type=int, default=64, help="tokens of each short prompt (%(default)s)")
    add("--steady-steps", type=int, default=40, help="steps of each pause (%(default)s)")
    add("--budget", type=int, help="token budget of a step (512 on a CPU, 2048 on a GPU)")
    add("--fixed-ms", type=float, default=100.0, help="the fixed target, in milliseconds (%(default)s)")
    add("--rounds", type=at_least_one, default=1, help="(%(default)s)")
    add("--tiny", action="store_true", help="small sizes, to try the benchmark")


def run(options: argparse.Namespace, report: Report) -> int:
    if options.device == "cuda" and not torch.cuda.is_available():
        report.note("There is no CUDA device here.")
        return 2
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    config = SHAPES[options.model]
    budget = options.budget or (512 if device.type == "cpu" else 2048)
    tokens = options.prompt_tokens, options.short_tokens
    sizes = Sizes(options.rows, options.row_tokens, *tokens, options.steady_steps, budget)
    if options.tiny:
        config, sizes = config | TINY, Sizes(2, 8, 200, 8, 8, 32)
    targets: list[Target] = [None, "auto", options.fixed_ms]
    shown = ", ".join(f"{name} {value:,}" for name, value in asdict(sizes).items())
    report.line(f"{options.model} on {options.device}, torch {torch.__version__}: {shown}")
    found = measure_targets(load_random("random", config, device), sizes, targets, options.rounds, device)
    for one in found:
        report.line(one)
    report.figures |= {
        "device": options.device,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "model": options.model,
        "sizes": asdict(sizes),
        "found": found,
    }
    return 0
