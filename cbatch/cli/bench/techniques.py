"""The gains by two techniques as prompts grow: memory with chunked prefill, and time with the KV cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from cbatch.base.errors import ConfigError, RequestError
from cbatch.base.params import SamplingParams
from cbatch.cli.bench.strategies import Experiment, peak_memory, release_free_memory
from cbatch.engine.stepping_engine import SteppingEngine

LONG_PROMPT = 10_000
CHUNK_SHARES = (1 / 16, 1 / 4, 1)
"""Chunks of the long prompt whose memory is compared, as shares of its length; the last one is all of it."""

SHORTEST = 64
REPEATS = 5


@dataclass(frozen=True, slots=True)
class PromptMemory:
    """The memory that a long prompt takes when it is computed in chunks of `tokens_a_step` tokens."""

    prompt_tokens: int
    tokens_a_step: int
    peak_bytes: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class TokenCost:
    """Seconds that one more token takes after a context, with its KV cache and without."""

    context_tokens: int
    without_cache_s: float
    with_cache_s: float


@dataclass(frozen=True, slots=True)
class Techniques:
    """The gains by chunked prefill and by the KV cache; None if they were not measured."""

    prompt_memory: list[PromptMemory] | None = None
    token_costs: list[TokenCost] | None = None

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


def measure_techniques(
    experiment: Experiment, context: int, names: Sequence[str], on_progress: Callable[[str], None]
) -> Techniques:
    """The memory that chunked prefill saves and the time that the KV cache saves, if they are among the names.

    The prompt whose memory is measured has LONG_PROMPT tokens, or as many as the context holds.
    """
    prompt_memory = token_costs = None
    if "chunked-prefill" in names:
        on_progress("memory of a long prompt, in chunks and whole")
        length = min(LONG_PROMPT, context - 1)
        budgets = dict.fromkeys(max(round(share * length), 1) for share in CHUNK_SHARES)
        prompt_memory = [_prompt_memory(experiment, length, budget) for budget in budgets]
    if "kv-cache" in names:
        on_progress("time of one more token after longer and longer contexts, with and without the KV cache")
        token_costs = _token_costs(experiment, context)
    return Techniques(prompt_memory, token_costs)


def _engine(experiment: Experiment, context: int, budget: int, *, own_model: bool = False) -> SteppingEngine:
    """For one sequence of up to `context` tokens. The cache holds no more, to leave memory for large steps.

    own_model: load the model once more
    """
    blocks = -(-context // experiment.config.block_size)
    config = replace(
        experiment.config,
        max_seqs=1,
        max_batch_tokens=budget,
        kv_blocks=blocks,
        prefix_cache=False,
        run_ahead=False,
        speculate="off",  # a step is to give one token
    )
    return SteppingEngine(config, None if own_model else experiment.loaded)


def _prompt_memory(experiment: Experiment, length: int, budget: int) -> PromptMemory:
    """Peak memory of one long prompt in steps of `budget` tokens, without weights and KV cache.

    On a CPU, a model keeps the memory of its largest step for the next one, so that only a new model takes it again.
    """
    fast_model = experiment.loaded.fast_model
    own_model = fast_model is not None and fast_model.device.type == "cpu"
    with _engine(experiment, length + 1, budget, own_model=own_model) as engine:
        engine.zero_cache()
        release_free_memory()
        _compute(engine, [1])  # touches what any step does, such as weights that are mapped from a file
        with peak_memory(engine.device, releases=False) as memory:
            start = time.perf_counter()
            try:
                _compute(engine, [1] * length)
            except RequestError as error:
                raise ConfigError(f"A prompt of {length:,} tokens could not be measured: {error}") from error
            elapsed = time.perf_counter() - start
    return PromptMemory(length, budget, memory.bytes, elapsed)


def _compute(engine: SteppingEngine, prompt: list[int]) -> None:
    """Computes a prompt and one token after it. Raises RequestError if that fails."""
    engine.add(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    while engine.has_work:
        for event in engine.step():
            if event.error is not None:
                raise event.error


def _token_costs(experiment: Experiment, context: int) -> list[TokenCost]:
    """Seconds that one more token takes after longer and longer contexts, with the KV cache and without."""
    costs = []
    length = SHORTEST
    with _engine(experiment, context, context) as engine:
        while length + REPEATS + 1 <= context:
            engine.add([1] * length, SamplingParams(max_tokens=REPEATS + 1, ignore_eos=True))
            times = []
            while engine.has_work:
                start = time.perf_counter()
                engine.step()
                engine.synchronize()
                times.append(time.perf_counter() - start)
            costs.append(TokenCost(length, without_cache_s=times[0], with_cache_s=sorted(times[1:])[REPEATS // 2]))
            length *= 2
    return costs
