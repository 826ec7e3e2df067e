"""Cost of LoRA adapters in a batch: none loaded, loaded and not asked for, one for all requests, and one for each.

    python -m scripts.benchmarks lora --shape 135m

In each round, by turns: prompts alone, and then requests that all decode at once. The adapters are random, and add to
all linears of the layers.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file

from cbatch import EngineConfig, SamplingParams, SteppingEngine
from cbatch.model.families import read_program
from cbatch.model.ops.all import Linear
from scripts.benchmarks.harness import Report, at_least_one, by_turns
from scripts.benchmarks.models import load_random
from scripts.benchmarks.shapes import ALL_SHAPES, Config


def save_random(folder: Path, config: Config, rank: int, seed: int) -> None:
    """An adapter for all linears of a model, as PEFT writes it."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for operation in read_program(config).operations:
        for part in operation.matrix.parts if isinstance(operation, Linear) else ():
            columns, depth = part.shape
            name = "base_model.model." + part.name.removesuffix(".weight")
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, depth, generator=generator) / depth**0.5
            tensors[f"{name}.lora_B.weight"] = torch.randn(columns, rank, generator=generator) / 10
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(f'{{"peft_type": "LORA", "r": {rank}, "lora_alpha": {rank}}}')


def measure(engine: SteppingEngine, adapters: Sequence[str], requests: int, prompt: int, output: int) -> float:
    """Seconds that so many requests take, whose adapters are these by turns."""
    numbers = random.Random(0)
    for number in range(requests):
        tokens = [numbers.randrange(engine.model.vocab_size) for _ in range(prompt)]
        lora = adapters[number % len(adapters)]
        engine.add(tokens, SamplingParams(max_tokens=output, ignore_eos=True, lora=lora))
    begun = time.perf_counter()
    while engine.has_work:
        engine.step()
    return time.perf_counter() - begun


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=sorted(ALL_SHAPES), default="135m", help="model (%(default)s)")
    parser.add_argument("--rank", type=at_least_one, default=16, help="of the adapters (%(default)s)")
    parser.add_argument("--adapters", type=at_least_one, default=8, help="how many there are (%(default)s)")
    parser.add_argument("--requests", type=at_least_one, default=8, help="at once (%(default)s)")
    parser.add_argument("--prompt", type=at_least_one, default=256, help="tokens (%(default)s)")
    parser.add_argument("--output", type=at_least_one, default=32, help="tokens (%(default)s)")
    parser.add_argument("--rounds", type=at_least_one, default=5, help="%(default)s")


def run(options: argparse.Namespace, report: Report) -> int:
    config = ALL_SHAPES[options.shape]
    loaded = load_random(options.shape, config, torch.device("cpu"))
    settings = EngineConfig(device="cpu", max_seqs=options.requests, prefix_cache=False, speculate="off")
    names = [f"adapter{number}" for number in range(options.adapters)]
    with TemporaryDirectory() as folder:
        for number, name in enumerate(names):
            save_random(Path(folder, name), config, options.rank, number)
        places = {name: str(Path(folder, name)) for name in names}
        plain = SteppingEngine(settings, loaded)
        adapted = SteppingEngine(replace(settings, lora=places), loaded)
    used = {
        "no adapters loaded": (plain, [""]),
        "loaded, not asked for": (adapted, [""]),
        "one for all requests": (adapted, names[:1]),
        "one for each request": (adapted, names),
    }
    lengths = {"prompts": (options.prompt, 1), "decoding": (1, options.output)}
    ways: dict[tuple[str, str], Callable[[], float]] = {
        (work, name): partial(measure, engine, chosen, options.requests, *length)
        for work, length in lengths.items()
        for name, (engine, chosen) in used.items()
    }
    found = {way: median(times[1:]) for way, times in by_turns(ways, options.rounds + 1).items()}
    rows = [["", "prompts, tokens/s", "", "decoding, tokens/s", ""]]
    for name in used:
        row = [name]
        for work, (prompt, output) in lengths.items():
            seconds, first = found[work, name], found[work, "no adapters loaded"]
            tokens = options.requests * (prompt if work == "prompts" else output)
            row += [f"{tokens / seconds:,.0f}", f"{seconds / first - 1:+.0%} time"]
        rows.append(row)
    report.facts({"model": f"random weights, {options.shape}; {options.adapters} adapters of rank {options.rank}"})
    report.table(rows)
    report.figures = {f"{work}: {name}": seconds for (work, name), seconds in found.items()}
    return 0
