"""What two techniques are worth as prompts grow: memory of a prompt in chunks, time of a token with the cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cbatch.cli.bench.peak_memory import PeakMemory
from cbatch.cli.bench.strategies import Experiment
from cbatch.engine import ConfigError, Engine, SamplingParams

LONG_PROMPT = 10_000
CHUNK = 512
SHORTEST = 64
REPEATS = 5


def measure_prompt_memory(experiment: Experiment, context: int) -> list[dict[str, Any]]:
    """The most memory that one long prompt takes in chunks and as a whole, the cache's own blocks left out.

    The prompt has 10,000 tokens, or as many as the context holds; the cache is written, and so in memory, before.
    """
    length = min(LONG_PROMPT, context - 1)
    return [_prompt_memory(experiment, length, budget) for budget in dict.fromkeys((min(CHUNK, length), length))]


def _engine(experiment: Experiment, context: int, budget: int) -> Engine:
    """For one row of up to `context` tokens, in a cache that holds no more, so that large steps find room."""
    blocks = -(-context // experiment.config.block_size)
    config = replace(
        experiment.config, max_seqs=1, max_batch_tokens=budget, kv_blocks=blocks, prefix_cache=False, run_ahead=False
    )
    return Engine(config, experiment.loaded)


def _prompt_memory(experiment: Experiment, length: int, budget: int) -> dict[str, Any]:
    with _engine(experiment, length + 1, budget) as engine:
        for tensor in (*engine.runner.kv_cache.keys, *engine.runner.kv_cache.values):
            tensor.zero_()
        with PeakMemory(engine.device) as memory:
            start = time.perf_counter()
            (done,) = engine.generate([[1] * length], SamplingParams(max_tokens=1, ignore_eos=True))
            elapsed = time.perf_counter() - start
    if done.error is not None:
        raise ConfigError(f"A prompt of {length:,} tokens could not be measured: {done.error}")
    return {"prompt_tokens": length, "tokens_a_step": budget, "peak_bytes": memory.peak_bytes, "elapsed_s": elapsed}


def measure_token_costs(
    experiment: Experiment, context: int, clock: Callable[[], float] = time.perf_counter
) -> list[dict[str, Any]]:
    """Seconds that the next token takes after texts of growing length, with their keys and values kept and without."""
    found = []
    length = SHORTEST
    with _engine(experiment, context, context) as engine:
        while length + REPEATS + 1 <= context:
            engine.add([1] * length, SamplingParams(max_tokens=REPEATS + 1, ignore_eos=True))
            times = []
            while engine.has_work:
                start = clock()
                engine.step()
                engine.synchronize()
                times.append(clock() - start)
            found.append(
                {"context_tokens": length, "without_cache_s": times[0], "with_cache_s": sorted(times[1:])[REPEATS // 2]}
            )
            length *= 2
    return found
