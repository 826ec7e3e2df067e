"""What a user of `cbatch chat` waits for: the first token, alone and beside a batch, and the screen.

    python scripts/bench_chat.py

The first part asks an engine of its own, as the chat does it, while nothing else runs and while a batch of 64 rows
runs underneath; idle and loaded rounds alternate. The second part drives the real program in a pseudo-terminal, with
four sessions that all answer, and reads off `/stats` how long tokens take from the engine to the screen.
"""

from __future__ import annotations

import os
import queue
import re
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pexpect
import pyte

from cbatch import Engine, EngineConfig, SamplingParams
from cbatch.cli.chat.engine_client import PRIORITY
from cbatch.cli.common.loading import tune_process
from cbatch.engine import Driver, TokenEvent

ROUNDS, ASKS, ROWS = 3, 12, 64
QUESTION = "What is the capital of France?"
STORY = "Tell me a story about a cat named Tom."


@dataclass(frozen=True)
class First:
    """Seconds to a first token, and the steps that ended in that time; its own is the last of them."""

    seconds: float
    steps: int


def ask(driver: Driver, prompt: list[int]) -> First:
    events: queue.SimpleQueue[tuple[TokenEvent, float, int]] = queue.SimpleQueue()
    engine = driver.engine

    def take(event: TokenEvent) -> None:
        events.put((event, time.monotonic(), engine.num_steps))

    started, before = time.monotonic(), engine.num_steps
    driver.submit(prompt, SamplingParams(max_tokens=4), take, priority=PRIORITY)
    _, came, after = events.get()
    time.sleep(0.05)
    return First(came - started, after - before)


@contextmanager
def batch_underneath(driver: Driver, prompt: list[int]) -> Iterator[None]:
    """Rows that decode for as long as they are asked to."""
    params = SamplingParams(max_tokens=900, ignore_eos=True)
    tickets = [driver.submit(prompt, params, lambda event: None, seed=row) for row in range(ROWS)]
    while driver.load.running < min(ROWS, driver.engine.scheduler.max_seqs):
        time.sleep(0.01)
    yield
    assert driver.load.running > 1, "the batch ended before the measurement did"
    for ticket in tickets:
        driver.cancel(ticket)
    while driver.load.running:
        time.sleep(0.01)


def first_tokens() -> None:
    # The prompts differ in their beginning, so that none is in the prefix cache.
    driver = Driver(Engine(EngineConfig(max_seqs=ROWS)))
    tune_process()
    prompts = iter([driver.engine.encode(f"{n}: {QUESTION}") for n in range(2 * ROUNDS * ASKS + 5)])
    for _ in range(5):
        ask(driver, next(prompts))
    idle: list[First] = []
    loaded: list[First] = []
    step_s: list[float] = []
    for _ in range(ROUNDS):
        idle += [ask(driver, next(prompts)) for _ in range(ASKS)]
        with batch_underneath(driver, driver.engine.encode(STORY)):
            since, steps = time.monotonic(), driver.engine.num_steps
            loaded += [ask(driver, next(prompts)) for _ in range(ASKS)]
            step_s.append((time.monotonic() - since) / (driver.engine.num_steps - steps))
    driver.close()
    driver.engine.close()
    for name, firsts in (("idle", idle), (f"beside {ROWS} rows", loaded)):
        seconds = sorted(first.seconds for first in firsts)
        counts = sorted(first.steps for first in firsts)
        print(
            f"first token, {name}: median {1000 * statistics.median(seconds):.1f} ms, "
            f"worst {1000 * seconds[-1]:.1f} ms; steps: median {counts[len(counts) // 2]}, worst {counts[-1]}"
        )
    print(f"a step beside {ROWS} rows: {1000 * statistics.median(step_s):.1f} ms")


class Terminal:
    """The real program on a screen of 80 x 24."""

    def __init__(self, *arguments: str) -> None:
        environment = os.environ | {"TERM": "xterm-256color"}
        self._child = pexpect.spawn("cbatch", ["chat", *arguments], dimensions=(24, 80), env=environment)
        self._child.delaybeforesend = None
        self.screen = pyte.Screen(80, 24)
        self._stream = pyte.ByteStream(self.screen)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.screen.display).split())

    def send(self, keys: str) -> None:
        self._child.send(keys)

    def say(self, line: str) -> None:
        self.send(line + "\r")

    def pump(self, seconds: float) -> None:
        """Takes in what the program writes next, if it writes something in this time."""
        with suppress(pexpect.TIMEOUT):
            self._stream.feed(self._child.read_nonblocking(65536, timeout=seconds))

    def wait(self, pattern: str, seconds: float = 120) -> re.Match[str]:
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.text)):
            if time.monotonic() > end:
                raise TimeoutError(f"no {pattern!r} on the screen:\n" + "\n".join(self.screen.display))
            self.pump(0.1)
        return found

    def close(self) -> None:
        self._child.close(force=True)


def screen() -> None:
    terminal = Terminal("--no-history", "-q")
    terminal.wait("the bundled demo model")
    for name in ("a", "b", "c"):
        terminal.say(f"/new {name}")
    terminal.wait(r"\[4 c\]")
    for _ in range(12):
        terminal.say(f"/all {STORY}")
        terminal.wait("c…")
        terminal.wait(r"\[4 c\]")
        terminal.say("/close")
        terminal.say("/new c")
        terminal.wait(r"\[4 c\]")
    terminal.say("/stats")
    print("four sessions at once, " + terminal.wait(r"from engine to screen: .*? tokens")[0])
    terminal.close()


if __name__ == "__main__":
    first_tokens()
    screen()
