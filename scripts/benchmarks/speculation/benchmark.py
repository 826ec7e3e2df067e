"""Gains of speculation where outputs repeat their prompts, and costs where they do not: with and without, by turns.

    python -m scripts.benchmarks speculation --speculate 6 --work rewriting --requests 1 8

rewriting and extraction: a random model of 135 million parameters computes every step in full, and then says what a
script tells it, which is for 70% a copy of stretches of its prompt (`--span` tokens each on average) and else new.
demo: the questions of scripts/prompts.jsonl to the demo model, one after the other.
random: the model of the first two says tokens drawn from 16 of each request, so that the last two have often occurred
before, and say nothing about the next.

Each measurement has an engine of its own, so that nothing is known of outputs of earlier ones. The ratio is that of the
times of the whole work, prompts included; "decoding" is what comes after the first token of the last request of those
that run at once. All ways have to give the same outputs.

With --bound, a third way drafts only what is right, and all of it (`bound`): the most that these drafts could gain.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from statistics import median
from typing import Any, Literal, cast

import torch

from cbatch import EngineConfig, SamplingParams, SteppingEngine
from cbatch.model.load_plan import LoadPlan
from cbatch.model.loader import LoadedModel, load_model
from scripts.benchmarks.harness import Report, at_least_one, by_turns, cpu_seconds_elsewhere, machine_facts
from scripts.benchmarks.shapes import PEER_SHAPES, SHAPES
from scripts.benchmarks.speculation.model import ScriptedModel, foresee, load_scripted
from scripts.benchmarks.speculation.work import Copying, Work, demo_questions, extraction, random_text, rewriting

GOALS: dict[str, dict[int, float]] = {
    "rewriting": {1: 2.0, 8: 1.3},
    "extraction": {1: 2.0, 8: 1.3},
    "demo": {1: 1.2},
    "random": dict.fromkeys((1, 8, 32, 128), 0.98),
}
"""By kind of work and requests at once: how many times as fast the work is to be with speculation."""

BLOCK_SIZE = 16
WARMUP = 4
"""Output tokens of each request in the runs that warm up."""

Speculate = int | Literal["off", "auto"]
Way = Speculate | Literal["bound"]


@dataclass(frozen=True)
class Outcome:
    """One run of some work.

    seconds: of the whole work
    first_s: those of them before all requests that run at once had a token
    """

    seconds: float
    first_s: float
    steps: int
    drafted: int
    accepted: int
    outputs: list[list[int]]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.outputs))

    @property
    def decoding_s(self) -> float:
        return self.seconds - self.first_s


def measure(loaded: LoadedModel, work: Work, way: Way, known: Sequence[list[int]] = ()) -> Outcome:
    """Does the work on a new engine. Raises RuntimeError if its outputs are not those of the script.

    known: the outputs, of which `bound` makes its drafts
    """
    config = EngineConfig(
        device="cpu",
        max_seqs=max(work.at_once, 32),
        block_size=BLOCK_SIZE,
        kv_blocks=work.at_once * (work.longest // BLOCK_SIZE + 3),
        prefix_cache=False,
        speculate="auto" if way == "bound" else way,  # type: ignore[arg-type,unused-ignore]
    )
    seconds = first_s = 0.0
    outputs: list[list[int]] = []
    with SteppingEngine(config, loaded) as engine:
        engine.zero_cache()
        if way == "bound":
            foresee(engine, work.prompts, known)
        for group in work.groups:
            found, first, elapsed = _run(engine, group)
            outputs += found
            seconds, first_s = seconds + elapsed, first_s + first
        stats = engine.stats()
    if stats.num_preemptions:
        raise RuntimeError("Requests were preempted: the cache is too small for this work.")
    if work.outputs is not None and outputs != work.outputs:
        raise RuntimeError(f"The outputs of {way} are not those of the script.")
    drafted, accepted = stats.num_drafted_tokens, stats.num_accepted_tokens
    return Outcome(seconds, first_s, stats.num_steps, drafted, accepted, outputs)


def _run(engine: SteppingEngine, group: Sequence[tuple[list[int], int]]) -> tuple[list[list[int]], float, float]:
    """The outputs of requests that run at once, seconds until each has a token, and until all are finished."""
    begun, first = time.perf_counter(), 0.0
    outputs: dict[int | None, list[int]] = {
        engine.add(prompt, SamplingParams(max_tokens=length, temperature=0.0)): [] for prompt, length in group
    }
    while engine.has_work:
        for event in engine.step():
            if event.error is not None:
                raise event.error
            if event.token_id is not None:
                outputs[event.request_id].append(event.token_id)
        if not first and all(outputs.values()):
            first = time.perf_counter() - begun
    return list(outputs.values()), first, time.perf_counter() - begun


@dataclass(frozen=True)
class Comparison:
    """The rounds of some work without and with speculation."""

    name: str
    at_once: int
    without: list[Outcome]
    drafting: list[Outcome]
    bound: list[Outcome] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """How many times as fast with speculation, in each round."""
        return self._ratios(self.drafting)

    def _ratios(self, way: list[Outcome]) -> list[float]:
        return [off.seconds / on.seconds for off, on in zip(self.without, way, strict=True)]

    @property
    def decoding_ratio(self) -> float:
        pairs = zip(self.without, self.drafting, strict=True)
        return median(off.decoding_s / on.decoding_s for off, on in pairs)

    def cells(self) -> list[str]:
        last, goal = self.drafting[-1], GOALS[self.name].get(self.at_once)
        speeds = [median(one.tokens / one.seconds for one in way) for way in (self.without, self.drafting)]
        return [
            f"{self.name}, {self.at_once} at once",
            *(f"{speed:,.1f}" for speed in speeds),
            f"{median(self.ratios):.3f}",
            f"{min(self.ratios):.3f} – {max(self.ratios):.3f}",
            "" if goal is None else f">= {goal:g}",
            f"{self.decoding_ratio:.3f}",
            f"{median(self._ratios(self.bound)):.3f}" if self.bound else "",
            f"{last.accepted:,} of {last.drafted:,}",
            f"{self.without[-1].steps:,} / {last.steps:,}",
        ]

    def figures(self) -> dict[str, Any]:
        def of(outcome: Outcome) -> dict[str, Any]:
            names = ("seconds", "first_s", "steps", "drafted", "accepted", "tokens")
            return {name: getattr(outcome, name) for name in names}

        return {
            "ratio": median(self.ratios),
            "goal": GOALS[self.name].get(self.at_once),
            "decoding_ratio": self.decoding_ratio,
            "without": list(map(of, self.without)),
            "with": list(map(of, self.drafting)),
            "bound": list(map(of, self.bound)),
        }


HEAD = ["work", "tokens/s off", "on", "ratio", "min – max", "goal", "decoding", "bound", "accepted", "steps"]


def compare(
    name: str, loaded: LoadedModel, work: Work, speculate: Speculate, rounds: int, *, bound: bool = False
) -> Comparison:
    """Raises RuntimeError if the outputs differ."""
    _warm_up(loaded, work)
    ways: dict[Way, Callable[[], Outcome]] = {way: partial(measure, loaded, work, way) for way in ("off", speculate)}
    if bound:
        known = work.outputs or measure(loaded, work, "off").outputs
        ways["bound"] = partial(measure, loaded, work, "bound", known)
    found = by_turns(ways, rounds)
    result = Comparison(name, work.at_once, found["off"], found[speculate], found.get("bound", []))
    if any(one.outputs != result.without[0].outputs for one in (*result.without, *result.drafting, *result.bound)):
        raise RuntimeError(f"The outputs with --speculate {speculate} are others than those without.")
    return result


def _warm_up(loaded: LoadedModel, work: Work) -> None:
    """The first requests with short outputs: kernels are loaded, and memory is touched."""
    prompts = work.prompts[: work.at_once]
    measure(loaded, Work(prompts, [WARMUP] * len(prompts), work.at_once), "off")


class Models:
    """The models that are measured and the work for each, as the options ask for them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options

    @cached_property
    def _scripted(self) -> tuple[LoadedModel, ScriptedModel]:
        return load_scripted(self._options.shape, SHAPES[self._options.shape])

    def prepare(self, name: str, at_once: int) -> tuple[LoadedModel, Work]:
        """The model for some work, which has its script, and the work."""
        if name == "demo":
            demo = load_model(LoadPlan())
            with SteppingEngine(EngineConfig(device="cpu", kv_blocks=64), demo) as engine:
                return demo, demo_questions(engine)
        loaded, model = self._scripted
        work = self._make_work(name, at_once, model.vocab_size)
        model.script = work.script
        return loaded, work

    def _make_work(self, name: str, at_once: int, vocabulary: int) -> Work:
        options = self._options
        if name == "random":
            return random_text(vocabulary, options.tokens // 2, at_once, options.seed)
        copying = Copying(vocabulary, options.tokens, options.span)
        return (rewriting if name == "rewriting" else extraction)(copying, at_once, options.seed)


def speculate_option(text: str) -> Speculate:
    """Raises ArgumentTypeError for what is neither a number nor a word that EngineConfig knows."""
    return cast(Speculate, text) if text in ("off", "auto") else at_least_one(text)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    default = str(EngineConfig().speculate)
    add("--speculate", type=speculate_option, default=default, help="what is compared with off (%(default)s)")
    add("--work", nargs="+", choices=list(GOALS), default=list(GOALS), help="kinds of work (all of them)")
    add("--requests", type=at_least_one, nargs="+", help="requests at once (those that have a goal)")
    add("--bound", action="store_true", help="also measure drafts that are always right")
    add("--rounds", type=at_least_one, default=3, help="(%(default)s)")
    add("--shape", choices=PEER_SHAPES, default="135m", help="size of the random model (%(default)s)")
    add("--tokens", type=at_least_one, default=192, help="length of what is rewritten (%(default)s)")
    add("--span", type=at_least_one, default=20, help="tokens copied at a stretch, on average (%(default)s)")
    add("--seed", type=int, default=0, help="of all texts (%(default)s)")


def run(options: argparse.Namespace, report: Report) -> int:
    started, elsewhere = time.perf_counter(), cpu_seconds_elsewhere()
    models, comparisons = Models(options), list[Comparison]()
    for name in options.work:
        counts = [count for count in options.requests or GOALS[name] if name != "demo" or count == 1]
        for at_once in counts:
            report.note(f"{name}, {at_once} at once")
            prepared = models.prepare(name, at_once)
            comparisons.append(compare(name, *prepared, options.speculate, options.rounds, bound=options.bound))
    facts = machine_facts(torch.get_num_threads())
    cores = max(cpu_seconds_elsewhere() - elsewhere, 0.0) / (time.perf_counter() - started)
    machine = f"{facts['cpu']}, {facts['cores']} cores, {facts['threads']} threads, torch {torch.__version__}"
    report.facts(
        {
            "machine": f"{machine}; others used {cores:.2f} cores meanwhile",
            "models": f"random weights, {options.shape}, and the demo model, both in bfloat16",
            "ways": f"--speculate {options.speculate} and off; medians of {options.rounds} rounds by turns",
        }
    )
    report.table([HEAD, *(one.cells() for one in comparisons)])
    report.figures |= {"machine": facts, "cores_elsewhere": cores, "speculate": options.speculate}
    report.figures["work"] = {f"{one.name}, {one.at_once}": one.figures() for one in comparisons}
    return 0
