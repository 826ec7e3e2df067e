"""Cost of a chat's second turn behind a long first one, and how fast one request decodes.

    python -m scripts.benchmarks turns --shape qwen3.5

In each round, by turns: a prompt that nothing is known of, as long as both turns together; a first turn, and then a
second one that adds a few tokens; and these few tokens alone. Then one request decodes, and the bytes of its weights
and states are compared with what the machine reads in the same time.
"""

from __future__ import annotations

import argparse
import random
import time
from statistics import median

import torch

from cbatch import EngineConfig, SamplingParams, SteppingEngine
from scripts.benchmarks.harness import Report, at_least_one, by_turns
from scripts.benchmarks.models import load_random
from scripts.benchmarks.shapes import ALL_SHAPES

OUTPUT = 32
READ_BYTES = 2**30


class Chat:
    """Turns on one engine; each way returns the seconds to its first token."""

    def __init__(self, engine: SteppingEngine, first: int, added: int) -> None:
        self._engine = engine
        self._first, self._added = first, added
        self._random = random.Random(0)
        self.cached = 0

    def cold(self) -> float:
        return self._ask(self._tokens(self._first + OUTPUT + self._added))[0]

    def second_turn(self) -> float:
        prompt = self._tokens(self._first)
        _, answer = self._ask(prompt)
        before = self._engine.stats().num_cached_tokens
        elapsed, _ = self._ask(prompt + answer + self._tokens(self._added))
        self.cached = self._engine.stats().num_cached_tokens - before
        return elapsed

    def alone(self) -> float:
        return self._ask(self._tokens(self._added))[0]

    def decode(self) -> float:
        """Seconds of a step of one request."""
        self._engine.add(self._tokens(OUTPUT), SamplingParams(max_tokens=OUTPUT, ignore_eos=True))
        times = []
        while self._engine.has_work:
            begun = time.perf_counter()
            self._engine.step()
            times.append(time.perf_counter() - begun)
        return median(times[2:])

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(self._engine.model.vocab_size) for _ in range(count)]

    def _ask(self, prompt: list[int]) -> tuple[float, list[int]]:
        """Seconds to the first token, and all tokens."""
        begun, first, tokens = time.perf_counter(), 0.0, list[int]()
        self._engine.add(prompt, SamplingParams(max_tokens=OUTPUT, ignore_eos=True))
        while self._engine.has_work:
            tokens += [event.token_id for event in self._engine.step() if event.token_id is not None]
            if tokens and not first:
                first = time.perf_counter() - begun
        return first, tokens


def read_rate() -> float:
    """Bytes that the machine reads in a second at best, with the threads of torch."""
    numbers = torch.rand(READ_BYTES // 4)
    times = []
    for _ in range(10):
        begun = time.perf_counter()
        numbers.sum()
        times.append(time.perf_counter() - begun)
    return READ_BYTES / min(times)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=sorted(ALL_SHAPES), default="qwen3.5", help="model (%(default)s)")
    parser.add_argument("--first", type=at_least_one, default=4000, help="tokens of the first turn (%(default)s)")
    parser.add_argument("--added", type=at_least_one, default=50, help="tokens that the second adds (%(default)s)")
    parser.add_argument("--rounds", type=at_least_one, default=3, help="%(default)s")


def run(options: argparse.Namespace, report: Report) -> int:
    loaded = load_random(options.shape, ALL_SHAPES[options.shape], torch.device("cpu"))
    with SteppingEngine(EngineConfig(device="cpu", max_seqs=4), loaded) as engine:
        chat = Chat(engine, options.first, options.added)
        chat.alone()  # kernels are loaded, and memory is touched
        ways = {"cold": chat.cold, "second turn": chat.second_turn, "alone": chat.alone}
        found = {name: median(times) for name, times in by_turns(ways, options.rounds).items()}
        decoding = by_turns({"step": chat.decode, "rate": read_rate}, options.rounds)
        step, rate = median(decoding["step"]), median(decoding["rate"])
        moved = engine.model.linear_cost.weight_bytes + 2 * engine.limits.state_bytes
    cold, second, tokens = found["cold"], found["second turn"], options.first + OUTPUT + options.added
    report.facts(
        {
            "model": f"random weights, {options.shape}",
            "cold": f"{cold * 1e3:,.0f} ms to the first token of {tokens:,} tokens",
            "second turn": f"{second * 1e3:,.0f} ms, {second / cold:.1%} of that; {chat.cached:,} tokens were cached",
            "alone": f"{found['alone'] * 1e3:,.0f} ms for a prompt of the {options.added} new tokens",
            "one request": f"{step * 1e3:.1f} ms a token: {moved / step / rate:.0%} of the {rate / 1e9:.1f} GB/s read",
        }
    )
    report.figures = found | {"cached": chat.cached, "decode_s": step, "moved_bytes": moved, "read_bytes_per_s": rate}
    return 0
