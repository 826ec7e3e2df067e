"""Waiting times in `cbatch chat`: the first token, alone and beside a batch, and the screen.

    python -m scripts.benchmarks chat

The first part asks an engine as the chat does, while nothing else runs, and while a batch of 64 rows runs underneath;
idle and loaded rounds alternate. The second part drives the real program in a pseudo-terminal, with four sessions that
all answer, and reads off `/stats` how long tokens take from the engine to the screen.
"""

from __future__ import annotations

import argparse
import queue
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

from cbatch import Engine, EngineConfig, SamplingParams
from cbatch.base.outputs import TokenEvent
from cbatch.base.request import Request
from cbatch.cli.chat.engine_client import PRIORITY
from cbatch.engine.thread import EngineThread
from cbatch.runtime.cpu import tune_process
from scripts.benchmarks.harness import Report, at_least_one, by_turns
from scripts.benchmarks.terminal import Terminal

ASKS, ROWS = 12, 64
"""Questions in a round, and requests of the batch underneath."""
QUESTION = "What is the capital of France?"
STORY = "Tell me a story about a cat named Tom."


@dataclass(frozen=True)
class FirstToken:
    """Seconds to a first token, and the steps that ended in that time; the last of them made it."""

    seconds: float
    steps: int


@dataclass(frozen=True)
class Round:
    """The first tokens of one round, and the mean seconds of a step in it."""

    first_tokens: list[FirstToken]
    step_s: float


def ask(engine_thread: EngineThread, prompt: list[int]) -> FirstToken:
    events: queue.SimpleQueue[tuple[TokenEvent, float, int]] = queue.SimpleQueue()
    engine = engine_thread.engine

    def take(event: TokenEvent) -> None:
        events.put((event, time.monotonic(), engine.stats().num_steps))

    started, before = time.monotonic(), engine.stats().num_steps
    request = Request(prompt_ids=prompt, params=SamplingParams(max_tokens=4), priority=PRIORITY)
    engine_thread.submit(request, take)
    _, came, after = events.get()
    time.sleep(0.05)
    return FirstToken(came - started, after - before)


@contextmanager
def batch_underneath(engine_thread: EngineThread, prompt: list[int]) -> Iterator[None]:
    """Requests that decode until their context is full."""
    params = SamplingParams(max_tokens=900, ignore_eos=True)
    requests = [Request(prompt_ids=prompt, params=params, seed=row) for row in range(ROWS)]
    for request in requests:
        engine_thread.submit(request, lambda event: None)
    while engine_thread.engine.stats().num_running < min(ROWS, engine_thread.engine.limits.max_seqs):
        time.sleep(0.01)
    yield
    assert engine_thread.engine.stats().num_running > 1, "the batch ended before the measurement did"
    for request in requests:
        engine_thread.cancel(request)
    while engine_thread.engine.stats().num_running:
        time.sleep(0.01)


def measure_first_tokens(rounds: int) -> dict[str, list[Round]]:
    """Rounds with nothing else to do, and rounds beside a batch."""
    engine = Engine(EngineConfig(max_seqs=ROWS))
    tune_process()
    # The prompts differ in their beginning, so that none is in the prefix cache.
    prompts = iter([engine.encode(f"{n}: {QUESTION}") for n in range(2 * rounds * ASKS + 5)])
    for _ in range(5):
        ask(engine.thread, next(prompts))

    def idle() -> Round:
        since, steps = time.monotonic(), engine.stats().num_steps
        first_tokens = [ask(engine.thread, next(prompts)) for _ in range(ASKS)]
        return Round(first_tokens, (time.monotonic() - since) / (engine.stats().num_steps - steps))

    def loaded() -> Round:
        with batch_underneath(engine.thread, engine.encode(STORY)):
            return idle()

    found = by_turns({"idle": idle, f"beside {ROWS} rows": loaded}, rounds)
    engine.close()
    return found


def report_first_tokens(found: dict[str, list[Round]], report: Report) -> None:
    for name, rounds in found.items():
        first_tokens = [first for one in rounds for first in one.first_tokens]
        seconds = sorted(first.seconds for first in first_tokens)
        steps = sorted(first.steps for first in first_tokens)
        report.line(
            f"first token, {name}: median {1000 * median(seconds):.1f} ms, "
            f"worst {1000 * seconds[-1]:.1f} ms; steps: median {steps[len(steps) // 2]}, worst {steps[-1]}"
        )
    name, loaded = list(found.items())[-1]
    report.line(f"a step {name}: {1000 * median(one.step_s for one in loaded):.1f} ms")


def measure_screen() -> str:
    """The line of `/stats` about four sessions that answer at once."""
    terminal = Terminal("--no-history", "-q")
    terminal.wait("the bundled demo model")
    for name in ("a", "b", "c"):
        terminal.submit(f"/new {name}")
    terminal.wait(r"\[4 c( \d+%)?\]")
    for _ in range(12):
        terminal.submit(f"/all {STORY}")
        terminal.wait("c…")
        terminal.wait(r"\[4 c( \d+%)?\]")
        terminal.submit("/close")
        terminal.submit("/new c")
        terminal.wait(r"\[4 c( \d+%)?\]")
    terminal.submit("/stats")
    found = terminal.wait(r"from engine to screen: .*? tokens")[0]
    terminal.close()
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=at_least_one, default=3, help="of the first part (%(default)s)")


def run(options: argparse.Namespace, report: Report) -> int:
    found = measure_first_tokens(options.rounds)
    report_first_tokens(found, report)
    screen = measure_screen()
    report.line(f"four sessions at once, {screen}")
    report.figures |= {"first_tokens": found, "screen": screen}
    return 0
