"""Cost of sharing an engine: the thread, its inbox and its queues, beside stepping the engine oneself.

    python -m scripts.benchmarks sharing --shape demo --tokens 200 --rounds 40

Two engines have the same weights. One is stepped by the calling thread; the other is the Engine that programs use. Each
round runs the same requests in every way, one after the other; the figures are medians of differences within a round.
Both sides make the text.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from statistics import median

import torch

from cbatch import Engine, EngineConfig, SamplingParams, SteppingEngine
from cbatch.base.request import Request
from cbatch.model.load_plan import LoadPlan
from cbatch.model.loader import LoadedModel, load_model
from cbatch.requests.output_processor import OutputProcessor
from scripts.benchmarks.harness import Report, at_least_one, by_turns
from scripts.benchmarks.models import load_random
from scripts.benchmarks.shapes import PEER_SHAPES, SHAPES

PROMPT_TOKENS = 24
WARMUP = 3


class Work:
    """Requests of equal length, and the ways to run them; each way returns the seconds of a token."""

    def __init__(self, loaded: LoadedModel, requests: int, tokens: int, stack: ExitStack) -> None:
        config = EngineConfig(device="cpu", max_seqs=max(requests, 1), prefix_cache=False)
        self.stepping = stack.enter_context(SteppingEngine(config, loaded))
        self.shared = stack.enter_context(Engine(config, loaded=loaded))
        self.params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        self.tokens = tokens
        source = random.Random(0)
        vocabulary = min(self.stepping.model.vocab_size, 1000)
        self.prompts = [[source.randrange(vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(requests)]

    @property
    def ways(self) -> dict[str, Callable[[], float]]:
        ways = [self.step, self.step_and_read, self.generate, self.stream, self.agenerate, self.astream]
        return {way.__name__: partial(self.timed, way) for way in ways}

    def timed(self, run: Callable[[], int]) -> float:
        begun = time.perf_counter()
        count = run()
        elapsed = time.perf_counter() - begun
        assert count == len(self.prompts) * self.tokens, f"{count} tokens"
        return elapsed / self.tokens

    def step(self) -> int:
        """Steps until all is done; makes the texts at the end."""
        return sum(len(outputs.completion().token_ids) for outputs in self._stepped(read=False))

    def step_and_read(self) -> int:
        """Steps, and makes the text of each token as it comes."""
        return sum(len(outputs.completion().token_ids) for outputs in self._stepped(read=True))

    def generate(self) -> int:
        return sum(len(done.token_ids) for done in self.shared.generate(self.prompts, self.params))

    def stream(self) -> int:
        return sum(event.token_id is not None for event in self.shared.stream(self.prompts, self.params))

    def agenerate(self) -> int:
        return sum(len(done.token_ids) for done in asyncio.run(self.shared.agenerate(self.prompts, self.params)))

    def astream(self) -> int:
        async def count() -> int:
            return sum([event.token_id is not None async for event in self.shared.astream(self.prompts, self.params)])

        return asyncio.run(count())

    def _stepped(self, *, read: bool) -> list[OutputProcessor]:
        engine, running = self.stepping, {}
        for prompt in self.prompts:
            request = Request(prompt_ids=prompt, params=self.params)
            running[engine.add_request(request)] = engine.output_processor(request)
        while engine.has_work:
            for event in engine.step():
                outputs = running[event.request_id or 0]
                outputs.take(event)
                if read:
                    outputs.read(event)
        return list(running.values())


RIVALS = {"generate": "step", "agenerate": "step", "stream": "step_and_read", "astream": "step_and_read"}
"""The ways of stepping that those of the shared engine are compared with."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shape", choices=["demo", *PEER_SHAPES], default="demo", help="the model (%(default)s)")
    add("--requests", type=at_least_one, nargs="+", default=[1, 8, 32], help="requests at once (%(default)s)")
    add("--tokens", type=at_least_one, default=100, help="of each request (%(default)s)")
    add("--rounds", type=at_least_one, default=20, help="(%(default)s)")


def run(options: argparse.Namespace, report: Report) -> int:
    device = torch.device("cpu")
    if options.shape == "demo":
        loaded = load_model(LoadPlan(device=device, dtype="float32"))
    else:
        loaded = load_random(options.shape, SHAPES[options.shape], device)
    rows = [["requests", "way", "a step", "more than stepping", "ratio"]]
    for requests in options.requests:
        with ExitStack() as stack:
            work = Work(loaded, requests, options.tokens, stack)
            seconds = {name: times[WARMUP:] for name, times in by_turns(work.ways, options.rounds + WARMUP).items()}
        for way, rival in RIVALS.items():
            pairs = list(zip(seconds[way], seconds[rival], strict=True))
            more, ratio = median(ours - bare for ours, bare in pairs), median(ours / bare for ours, bare in pairs)
            report.figures[f"{requests} {way}"] = {"seconds": median(seconds[way]), "more_s": more, "ratio": ratio}
            rows.append(
                [str(requests), way, f"{1e3 * median(seconds[way]):.3f} ms", f"{1e6 * more:+.1f} us", f"{ratio:.3f}"]
            )
    report.table(rows)
    return 0
