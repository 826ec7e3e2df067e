"""Effect of a long prompt on requests that decode, and on a short prompt behind it.

    python -m scripts.benchmarks fairness

Requests decode for a while; then a long prompt arrives, and a short one at each quarter of it. At each eighth, prompts
are held back for some steps, to measure the steady gap between tokens there: the requests grow longer meanwhile, and
the machine gets faster or slower. The step time has no target, the target `auto`, and a fixed one, by turns. The model
is random.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import torch

from cbatch.base.config import EngineConfig
from cbatch.base.params import SamplingParams
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.model.loader import LoadedModel
from cbatch.schedule.step_time import MIN_PREFILL_TOKENS
from scripts.benchmarks.harness import Report, at_least_one, cpu_seconds_elsewhere
from scripts.benchmarks.models import load_random
from scripts.benchmarks.shapes import SHAPES, TINY

Target = float | Literal["auto"] | None

QUARTERS, EIGHTHS = 4, 8


@dataclass(frozen=True)
class Sizes:
    """How large the experiment is, in tokens where nothing else is said.

    rows:         requests that decode
    steady_steps: steps of each pause
    budget:       tokens of one step
    """

    rows: int
    row_tokens: int
    prompt_tokens: int
    short_tokens: int
    steady_steps: int
    budget: int

    def blocks(self, block_size: int, least: int) -> int:
        """Blocks of a cache in which no request is preempted, even if prompts advance by only `least` tokens a step."""
        steps = (EIGHTHS + 1) * self.steady_steps + 2 * -(-(self.prompt_tokens + QUARTERS * self.short_tokens) // least)
        tokens = self.rows * (self.row_tokens + steps) + self.prompt_tokens + QUARTERS * self.short_tokens
        return tokens // block_size + 2 * (self.rows + QUARTERS + 1)


@dataclass(frozen=True)
class TargetResult:
    """Measurements with one target, in seconds. A gap is the time between two tokens of a request.

    steady:       p50 and p99 of the gaps before the long prompt, and after it, when requests are longer
    gaps:         p50, p99 and the largest while the long prompt comes in
    ratio:        p99 of those gaps, each divided by the median steady gap of requests as long, which is interpolated
                  between two pauses
    steady_ratio: the same of all steady gaps
    prompt_s:     to the first token of the long prompt, without the pauses
    times_alone:  `prompt_s` divided by what it takes if nothing else runs
    short_s:      to the first token of each short prompt
    cores_elsewhere: cores that other processes used meanwhile; the figures of a busy machine say little
    """

    target: str
    steady: list[list[float]]
    gaps: list[float]
    ratio: float
    steady_ratio: float
    prompt_s: float
    times_alone: float
    short_s: list[float]
    cores_elsewhere: float

    def __str__(self) -> str:
        (before, before_p99), (after, after_p99) = ([1e3 * gap for gap in gaps] for gaps in self.steady)
        p50, p99, most = (1e3 * gap for gap in self.gaps)
        busy = f"; other processes took {self.cores_elsewhere:.1f} cores" if self.cores_elsewhere >= 0.1 else ""
        return (
            f"{self.target:>8}: gaps before {before:.1f} (p99 {before_p99:.1f}) and after {after:.1f} "
            f"({after_p99:.1f}) ms, beside the prompt {p50:.1f} ({p99:.1f}, max {most:.1f}) ms: "
            f"p99 {self.ratio:.2f} x steady (steady {self.steady_ratio:.2f} x); "
            f"prompt {self.prompt_s:.1f} s, {self.times_alone:.1f} x alone; "
            f"short prompts {statistics.median(self.short_s):.2f}, worst {max(self.short_s):.2f} s{busy}"
        )


class Gap(NamedTuple):
    """The number of a token in its request, and how long it came after the token before."""

    number: int
    seconds: float


class Pause(NamedTuple):
    """Steps without prompts: when they began and ended, and the gaps between their tokens."""

    begin: float
    end: float
    gaps: list[Gap]


class Clients:
    """Sends requests to an engine, and notes when tokens come."""

    def __init__(self, engine: SteppingEngine, seed: int = 0) -> None:
        self.engine = engine
        self.times: defaultdict[int, list[float]] = defaultdict(list)
        asked = engine.config.run_ahead
        self.is_ahead = engine.device.type == "cuda" if asked is None else asked
        self._chance = random.Random(seed)

    def ask(self, tokens: int, answer: int | None = None) -> int:
        """Adds a request of so many random tokens, and returns its id. If `answer` is None, its output has no limit."""
        prompt = [self._chance.randrange(10, self.engine.model.vocab_size) for _ in range(tokens)]
        params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
        return self.engine.add(prompt, params)

    def step(self) -> None:
        events = self.engine.step()
        now = time.perf_counter()
        for event in events:
            if event.error is not None:
                raise event.error
            assert event.request_id is not None
            self.times[event.request_id].append(now)

    def step_until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self.step()

    def gaps(self, rows: Sequence[int], since: float, until: float) -> list[Gap]:
        """The gaps before all tokens of these requests that came in this time."""
        found = []
        for row in rows:
            for number, (before, after) in enumerate(pairwise(self.times[row])):
                if since < after <= until:
                    found.append(Gap(number, after - before))
        return found

    def pause(self, rows: Sequence[int], steps: int) -> Pause:
        """Does so many steps in which prompts are held back.

        An engine that overlaps scheduling has one more step in flight: one with a prompt at the beginning, one without
        at the end.
        """
        if self.is_ahead:
            self._hold()
        begin = time.perf_counter()
        for _ in range(steps - self.is_ahead):
            self._hold()
        if self.is_ahead:
            self.step()
        end = time.perf_counter()
        return Pause(begin, end, self.gaps(rows, begin, end))

    def _hold(self) -> None:
        self.engine.scheduler.prefill_limit = 0  # no front end can do that; the engine sets it anew after a step
        self.step()


def percentiles(gaps: Sequence[Gap], *shares: float) -> list[float]:
    """Percentiles of gaps, in seconds."""
    return [float(value) for value in np.percentile([gap.seconds for gap in gaps], shares)]


def ratio_of(gaps: Sequence[Gap], pauses: Sequence[Pause]) -> float:
    """p99 of gaps, each divided by the median steady gap, which is interpolated between the pauses."""
    places = [statistics.median(gap.number for gap in pause.gaps) for pause in pauses]
    medians = [statistics.median(gap.seconds for gap in pause.gaps) for pause in pauses]
    steady = np.interp([gap.number for gap in gaps], places, medians)
    return float(np.percentile(np.array([gap.seconds for gap in gaps]) / steady, 99))


def measure_alone(engine: SteppingEngine, sizes: Sizes) -> float:
    """Seconds to the first token of the long prompt if nothing else runs."""
    clients = Clients(engine)
    start = time.perf_counter()
    prompt = clients.ask(sizes.prompt_tokens, 1)
    clients.step_until(lambda: prompt in clients.times)
    return clients.times[prompt][0] - start


def bring_in(clients: Clients, rows: Sequence[int], sizes: Sizes) -> tuple[list[Pause], list[float], list[float]]:
    """Adds the long prompt, and short ones on the way.

    Returns the pauses, from the one before the long prompt to the one after; the times at which it was added, each
    pause in between began and ended, and its first token came; and the seconds to the first token of each short prompt.
    """
    pauses = [clients.pause(rows, sizes.steady_steps)]
    asked = time.perf_counter()
    prompt = clients.ask(sizes.prompt_tokens, 1)
    request = clients.engine.scheduler.waiting[-1]  # to follow how much of its prompt is computed
    shorts: dict[int, float] = {}
    for eighth in range(1, EIGHTHS):
        mark = sizes.prompt_tokens * eighth // EIGHTHS
        clients.step_until(lambda mark=mark: request.num_computed >= mark)  # type: ignore[misc]
        pauses.append(clients.pause(rows, sizes.steady_steps))
        if eighth % (EIGHTHS // QUARTERS) == 0:
            shorts[clients.ask(sizes.short_tokens, 1)] = time.perf_counter()
    clients.step_until(lambda: clients.times.keys() >= {prompt, *shorts})
    edges = [asked, *(edge for pause in pauses[1:] for edge in (pause.begin, pause.end)), clients.times[prompt][0]]
    pauses.append(clients.pause(rows, sizes.steady_steps))
    return pauses, edges, [clients.times[short][0] - since for short, since in shorts.items()]


def measure(engine: SteppingEngine, sizes: Sizes, target: Target, alone_s: float) -> TargetResult:
    """Requests that decode, then a long prompt and short ones; the requests are cancelled at the end."""
    clients = Clients(engine)
    started, elsewhere = time.perf_counter(), cpu_seconds_elsewhere()
    rows = [clients.ask(sizes.row_tokens) for _ in range(sizes.rows)]
    clients.step_until(lambda: all(len(clients.times[row]) > 2 for row in rows))
    pauses, edges, short_s = bring_in(clients, rows, sizes)
    beside = [gap for begin, end in zip(edges[::2], edges[1::2], strict=True) for gap in clients.gaps(rows, begin, end)]
    prompt_s = sum(edges[1::2]) - sum(edges[::2])
    for row in rows:
        engine.cancel(row)
    if engine.stats().num_preemptions:
        raise RuntimeError("Requests were preempted: the cache is too small for these sizes.")
    return TargetResult(
        target="none" if target is None else f"{target:g} ms" if target != "auto" else target,
        steady=[percentiles(pauses[0].gaps, 50, 99), percentiles(pauses[-1].gaps, 50, 99)],
        gaps=percentiles(beside, 50, 99, 100),
        ratio=ratio_of(beside, pauses),
        steady_ratio=ratio_of([gap for pause in pauses for gap in pause.gaps], pauses),
        prompt_s=prompt_s,
        times_alone=prompt_s / alone_s,
        short_s=short_s,
        cores_elsewhere=(cpu_seconds_elsewhere() - elsewhere) / (time.perf_counter() - started),
    )


def open_engine(loaded: LoadedModel, sizes: Sizes, target: Target, device: torch.device) -> SteppingEngine:
    config = EngineConfig(
        device=device.type,
        max_seqs=sizes.rows + QUARTERS + 1,
        max_batch_tokens=sizes.budget,
        kv_blocks=sizes.blocks(16, MIN_PREFILL_TOKENS[device.type]),
        prefix_cache=False,
        target_step_ms=target,
    )
    return SteppingEngine(config, loaded)


def measure_targets(
    loaded: LoadedModel, sizes: Sizes, targets: Sequence[Target], rounds: int, device: torch.device
) -> list[TargetResult]:
    """Measures all targets by turns. Each measurement has an engine of its own, which learns the step times anew."""
    found = []
    warm = replace(sizes, prompt_tokens=min(sizes.prompt_tokens, 4 * sizes.budget), steady_steps=4)
    engine = open_engine(loaded, sizes, None, device)
    measure(engine, warm, None, 1.0)  # compiles the kernels
    alone_s = measure_alone(engine, sizes)
    engine.close()
    del engine
    for target in [*targets] * rounds:
        engine = open_engine(loaded, sizes, target, device)
        found.append(measure(engine, sizes, target, alone_s))
        engine.close()
        del engine  # and with it its cache
    return found


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
