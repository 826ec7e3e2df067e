"""Cost of `--deterministic`, and whether it keeps its promise on this device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from cbatch.api import Engine
from cbatch.base.config import EngineConfig
from cbatch.base.params import SamplingParams
from cbatch.cli.bench.workload import Workload
from cbatch.requests.completion import Completion
from scripts.gpu.runs import Run, Setup, first_of, free

TOKENS = 64
"""Output tokens of each request that runs alone."""


@dataclass(frozen=True, slots=True)
class Cost:
    """How many times as long the same work takes; 0 if one of the runs failed."""

    shape: str
    requests: int
    ratio: float

    def __str__(self) -> str:
        return f"{self.shape}, {self.requests} requests: --deterministic takes {self.ratio:.2f} times as long"


@dataclass(frozen=True, slots=True)
class Sameness:
    """How many requests have the same log-probabilities, to the last bit, alone as among all others."""

    shape: str
    deterministic: bool
    requests: int
    same_bits: int
    same_tokens: int

    def __str__(self) -> str:
        mode = "with" if self.deterministic else "without"
        return (
            f"{self.shape}, {mode} --deterministic: alone and together, {self.same_bits} of {self.requests} requests "
            f"have the same bits, {self.same_tokens} the same tokens"
        )


def deterministic_lines(setup: Setup, work: Workload, alone: int) -> Iterator[Run | Cost | Sameness]:
    """The same work with and without `--deterministic`, and requests alone and in company.

    alone: how many requests run alone
    """
    runs = []
    for deterministic in (False, True):
        runs.append(replace(setup, deterministic=deterministic).run(work))
        yield runs[-1]
        free(setup.device)
    plain, fixed = (run.tokens_per_s for run in runs)
    yield Cost(setup.shape, len(work.prompts), plain / fixed if fixed else 0.0)
    for deterministic in (False, True):
        yield sameness(setup, work, alone, deterministic=deterministic)
        free(setup.device)


def sameness(setup: Setup, work: Workload, alone: int, *, deterministic: bool) -> Sameness:
    config = EngineConfig(
        device=str(setup.device),
        max_seqs=setup.max_seqs,
        max_batch_tokens=setup.max_batch_tokens,
        prefix_cache=False,
        deterministic=deterministic,
    )
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, logprobs=0)
    with Engine(config, loaded=setup.loaded) as engine:
        together = engine.generate(work.prompts, params)[:alone]
        single = [engine.generate([prompt], params)[0] for prompt in first_of(work, alone).prompts]
    pairs = list(zip(together, single, strict=True))
    return Sameness(
        setup.shape,
        deterministic,
        len(pairs),
        sum(_bits(one) == _bits(other) for one, other in pairs),
        sum(one.token_ids == other.token_ids for one, other in pairs),
    )


def _bits(completion: Completion) -> list[float | None]:
    return [one.logprob for one in completion.logprobs or ()]
