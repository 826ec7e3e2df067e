"""What a long prompt does to rows that decode, and to a short prompt behind it: `python scripts/bench_fair.py`.

Rows decode for a while; then a long prompt comes in, and at each quarter of it a short one. That is done without a
target for steps, with `auto` and with a fixed one, by turns, on a random model. `--tiny` tries the script itself.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import psutil
import torch

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT.parent)]

from gpu.shapes import SHAPES, TINY, Config, RandomTensors, make_network  # noqa: E402
from peers.work import SHAPES as PEER_SHAPES  # noqa: E402

from cbatch.engine import Engine, EngineConfig, LoadedModel, SamplingParams  # noqa: E402
from cbatch.engine.models.decoder import Decoder  # noqa: E402
from cbatch.engine.pace import LEAST  # noqa: E402

Target = float | Literal["auto"] | None

MODELS = SHAPES | {"135m": SHAPES["8B"] | PEER_SHAPES["135m"] | {"max_position_embeddings": 40960}}
QUARTERS = 4


@dataclass(frozen=True)
class Sizes:
    """Tokens, but for `rows` and `steady_steps`. budget: of a step."""

    rows: int
    row_tokens: int
    prompt_tokens: int
    short_tokens: int
    steady_steps: int
    budget: int

    def blocks(self, block_size: int, least: int) -> int:
        """Of a cache in which nobody is preempted, though a prompt advance by no more than `least` tokens a step."""
        steps = 2 * self.steady_steps + 2 * -(-(self.prompt_tokens + QUARTERS * self.short_tokens) // least)
        tokens = self.rows * (self.row_tokens + steps) + self.prompt_tokens + QUARTERS * self.short_tokens
        return tokens // block_size + 2 * (self.rows + QUARTERS + 1)


@dataclass(frozen=True)
class Found:
    """Seconds, of one target. A gap lies between two tokens of a row.

    steady:      p50 and p99 of the gaps before the long prompt, and after it, when rows are longer
    gaps:        p50, p99 and the largest while it comes in
    ratio:       p99 of those, each to the median of the steady ones; in between, that grows evenly
    prompt_s:    to the first token of the long prompt
    times_alone: that, to what it takes while nothing else runs
    short_s:     to the first token of each short prompt
    cores_elsewhere: how many other processes took meanwhile, on average: figures of a busy machine say little
    """

    target: str
    steady: list[list[float]]
    gaps: list[float]
    ratio: float
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
            f"p99 {self.ratio:.2f} x steady; prompt {self.prompt_s:.1f} s, {self.times_alone:.1f} x alone; "
            f"short prompts {statistics.median(self.short_s):.2f}, worst {max(self.short_s):.2f} s{busy}"
        )


class Gap(NamedTuple):
    """When a token came, and how long after the one before it."""

    end: float
    seconds: float


class Clients:
    """Asks an engine, and writes down when tokens come."""

    def __init__(self, engine: Engine, seed: int = 0) -> None:
        self.engine = engine
        self.times: defaultdict[int, list[float]] = defaultdict(list)
        self._chance = random.Random(seed)

    def ask(self, tokens: int, answer: int | None = None) -> int:
        """The id of a new request of random tokens; its answer goes on for as long as there is room if None."""
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
        """Of all tokens of these rows that came in this time."""
        pairs = (pair for row in rows for pair in pairwise(self.times[row]))
        return [Gap(after, after - before) for before, after in pairs if since < after <= until]

    def steady_gaps(self, rows: Sequence[int], steps: int) -> list[Gap]:
        """Of so many steps from now on."""
        since = time.perf_counter()
        for _ in range(steps):
            self.step()
        return self.gaps(rows, since, time.perf_counter())


def cpu_seconds_elsewhere() -> float:
    """Of all processes but this one, since the machine was started."""
    machine, own = psutil.cpu_times(), psutil.Process().cpu_times()
    return float(machine.user + machine.system - own.user - own.system)


def percentiles(gaps: Sequence[Gap], *shares: float) -> list[float]:
    """Seconds that so many of a hundred gaps do not exceed."""
    return [float(value) for value in np.percentile([gap.seconds for gap in gaps], shares)]


def ratio_of(gaps: Sequence[Gap], before: Sequence[Gap], after: Sequence[Gap]) -> float:
    """p99 of gaps, each to the median of the steady ones, which grows evenly from `before` to `after`."""
    ends = before[-1].end, after[0].end
    medians = percentiles(before, 50)[0], percentiles(after, 50)[0]
    steady = np.interp([gap.end for gap in gaps], ends, medians)
    return float(np.percentile(np.array([gap.seconds for gap in gaps]) / steady, 99))


def measure_alone(engine: Engine, sizes: Sizes) -> float:
    """Seconds to the first token of the long prompt, while nothing else runs."""
    clients = Clients(engine)
    start = time.perf_counter()
    prompt = clients.ask(sizes.prompt_tokens, 1)
    clients.step_until(lambda: prompt in clients.times)
    return clients.times[prompt][0] - start


def measure(engine: Engine, sizes: Sizes, target: Target, alone_s: float) -> Found:
    """Rows, then a long prompt, then short ones; the rows are dropped in the end."""
    clients, scheduler = Clients(engine), engine.scheduler
    started, elsewhere = time.perf_counter(), cpu_seconds_elsewhere()
    rows = [clients.ask(sizes.row_tokens) for _ in range(sizes.rows)]
    clients.step_until(lambda: all(len(clients.times[row]) > 2 for row in rows))
    before = clients.steady_gaps(rows, sizes.steady_steps)
    asked = time.perf_counter()
    prompt = clients.ask(sizes.prompt_tokens, 1)
    request = scheduler.waiting[-1]
    shorts: dict[int, float] = {}
    for quarter in range(1, QUARTERS):
        mark = sizes.prompt_tokens * quarter // QUARTERS
        clients.step_until(lambda mark=mark: request.num_computed >= mark)  # type: ignore[misc]
        now = time.perf_counter()
        shorts[clients.ask(sizes.short_tokens, 1)] = now
    clients.step_until(lambda: prompt in clients.times)
    clients.step_until(lambda: clients.times.keys() >= shorts.keys())
    came = clients.times[prompt][0]
    beside, after = clients.gaps(rows, asked, came), clients.steady_gaps(rows, sizes.steady_steps)
    for row in rows:
        engine.cancel(row)
    if scheduler.num_preemptions:
        raise RuntimeError("Rows were preempted: the cache is too small for these sizes.")
    return Found(
        target="none" if target is None else f"{target:g} ms" if target != "auto" else target,
        steady=[percentiles(before, 50, 99), percentiles(after, 50, 99)],
        gaps=percentiles(beside, 50, 99, 100),
        ratio=ratio_of(beside, before, after),
        prompt_s=came - asked,
        times_alone=(came - asked) / alone_s,
        short_s=[clients.times[short][0] - since for short, since in shorts.items()],
        cores_elsewhere=(cpu_seconds_elsewhere() - elsewhere) / (time.perf_counter() - started),
    )


def open_engine(loaded: LoadedModel, sizes: Sizes, target: Target, device: torch.device) -> Engine:
    config = EngineConfig(
        device=device.type,
        max_seqs=sizes.rows + QUARTERS + 1,
        max_batch_tokens=sizes.budget,
        kv_blocks=sizes.blocks(16, LEAST[device.type]),
        prefix_cache=False,
        target_step_ms=target,
    )
    return Engine(config, loaded)


def run(loaded: LoadedModel, sizes: Sizes, targets: Sequence[Target], rounds: int, device: torch.device) -> list[Found]:
    """All targets, by turns. Each gets an engine of its own, and so learns anew."""
    found = []
    warm = replace(sizes, prompt_tokens=min(sizes.prompt_tokens, 4 * sizes.budget), steady_steps=4)
    engine = open_engine(loaded, sizes, None, device)
    measure(engine, warm, None, 1.0)  # kernels are compiled
    alone_s = measure_alone(engine, sizes)
    engine.close()
    del engine
    for target in [*targets] * rounds:
        engine = open_engine(loaded, sizes, target, device)
        found.append(measure(engine, sizes, target, alone_s))
        engine.close()
        del engine  # and with it its cache
    return found


def load(config: Config, device: torch.device) -> LoadedModel:
    """A random model in bfloat16 on the fast path of the device."""
    tensors = RandomTensors(config, device, torch.bfloat16)
    if device.type == "cuda":
        from cbatch.engine.models.gpu_decoder import GpuDecoder  # which needs Triton

        decoder: Any = GpuDecoder(config, tensors, torch.bfloat16, device)
    else:
        decoder = Decoder(config, tensors, torch.bfloat16)
    return LoadedModel(
        name="random",
        make_network=lambda: make_network(config, tensors, torch.bfloat16, device),
        tokenizer=None,
        defaults=SamplingParams(),
        eos_ids=frozenset(),
        decoder=decoder,
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    add = parser.add_argument
    add("--model", choices=MODELS, default="135m", help="shape of the model (%(default)s)")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="(%(default)s)")
    add("--rows", type=int, default=32, help="that decode (%(default)s)")
    add("--row-tokens", type=int, default=256, help="of the prompt of each (%(default)s)")
    add("--prompt-tokens", type=int, default=8000, help="of the long prompt (%(default)s)")
    add("--short-tokens", type=int, default=64, help="of the short ones (%(default)s)")
    add("--steady-steps", type=int, default=100, help="before and after the long prompt (%(default)s)")
    add("--budget", type=int, help="tokens of a step (512 on a CPU, 2048 on a GPU)")
    add("--fixed-ms", type=float, default=100.0, help="the fixed target (%(default)s)")
    add("--rounds", type=int, default=1, help="(%(default)s)")
    add("--tiny", action="store_true", help="small sizes, to try the script")
    add("--json", action="store_true", help="one JSON object on stdout")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("There is no CUDA device here.", file=sys.stderr)
        return 2
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    config: Config = MODELS[options.model]
    budget = options.budget or (512 if device.type == "cpu" else 2048)
    tokens = options.prompt_tokens, options.short_tokens
    sizes = Sizes(options.rows, options.row_tokens, *tokens, options.steady_steps, budget)
    if options.tiny:
        config, sizes = config | TINY, Sizes(2, 8, 200, 8, 8, 32)
    targets: list[Target] = [None, "auto", options.fixed_ms]
    found = run(load(config, device), sizes, targets, options.rounds, device)
    if options.json:
        data: dict[str, Any] = {
            "device": options.device,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }
        data |= {"model": options.model, "sizes": asdict(sizes), "found": [asdict(one) for one in found]}
        print(json.dumps(data, indent=1))
    else:
        shown = ", ".join(f"{name} {value:,}" for name, value in asdict(sizes).items())
        print(f"{options.model} on {options.device}, torch {torch.__version__}: {shown}", *found, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
