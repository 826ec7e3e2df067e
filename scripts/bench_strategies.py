"""One by one, static batches and continuous batching on the same work, model and engine, in one run.

    python scripts/bench_strategies.py [--model DIR] [--requests 32] [--slots 8] [--rounds 3]

All three give every request the same number of output tokens. A static batch pads its prompts to the longest
with real tokens and decodes until its slowest row ends, as a padded tensor would make it. The strategies
alternate within each round; medians over the rounds are printed as a Markdown table.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cbatch import Engine, EngineConfig, SamplingParams


@dataclass(frozen=True)
class Work:
    """Prompts as token ids, and how many tokens each is to get."""

    prompts: list[list[int]]
    lengths: list[int]

    @property
    def output_tokens(self) -> int:
        return sum(self.lengths)


def make_work(requests: int, vocabulary: int, seed: int = 7) -> Work:
    """Lengths log-uniform: prompts of 16 to 256 tokens, outputs of 8 to 256."""
    draw = random.Random(seed)

    def log_uniform(low: int, high: int) -> int:
        return round(math.exp(draw.uniform(math.log(low), math.log(high))))

    prompts = [[draw.randrange(10, vocabulary) for _ in range(log_uniform(16, 256))] for _ in range(requests)]
    return Work(prompts, [log_uniform(8, 256) for _ in range(requests)])


def params(length: int) -> SamplingParams:
    return SamplingParams(max_tokens=length, ignore_eos=True)


def one_by_one(engine: Engine, work: Work, slots: int) -> None:
    for prompt, length in zip(work.prompts, work.lengths, strict=True):
        engine.generate([prompt], params(length))


def static_batches(engine: Engine, work: Work, slots: int) -> None:
    for first in range(0, len(work.prompts), slots):
        prompts, lengths = work.prompts[first : first + slots], work.lengths[first : first + slots]
        width = max(map(len, prompts))
        padded = [[10] * (width - len(prompt)) + prompt for prompt in prompts]
        engine.generate(padded, params(max(lengths)))


def continuous(engine: Engine, work: Work, slots: int) -> None:
    engine.generate(work.prompts, [params(length) for length in work.lengths])


STRATEGIES: dict[str, Callable[[Engine, Work, int], None]] = {
    "one by one": one_by_one,
    "static batches": static_batches,
    "continuous": continuous,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="model folder; default: the bundled demo model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--slots", type=int, default=8, help="seats of every strategy")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()

    engine = Engine(EngineConfig(model=options.model, dtype=options.dtype, max_seqs=options.slots))
    work = make_work(options.requests, engine.model.vocab_size)
    seconds: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    continuous(engine, make_work(2, engine.model.vocab_size), options.slots)  # warm-up
    for _ in range(options.rounds):
        for name, strategy in STRATEGIES.items():
            start = time.perf_counter()
            strategy(engine, work, options.slots)
            seconds[name].append(time.perf_counter() - start)
    report(engine, work, options.slots, {name: statistics.median(times) for name, times in seconds.items()})


def report(engine: Engine, work: Work, slots: int, medians: dict[str, float]) -> None:
    print(f"{engine.loaded.name}, {engine.model.num_parameters / 1e6:.1f} million parameters, {engine.model.dtype}")
    prompt_tokens = sum(map(len, work.prompts))
    print(f"{len(work.prompts)} requests, {prompt_tokens} prompt and {work.output_tokens} output tokens, {slots} slots")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    print("| strategy | seconds | output tokens/s | times one by one |")
    print("|---|---|---|---|")
    for name, median in medians.items():
        speed, factor = work.output_tokens / median, medians["one by one"] / median
        print(f"| {name} | {median:.2f} | {speed:.0f} | {factor:.1f} |")
    print(f"\ncontinuous is {medians['static batches'] / medians['continuous']:.2f} times as fast as static batches")


if __name__ == "__main__":
    main()
