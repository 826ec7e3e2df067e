"""Measures two techniques: memory of a long prompt by chunked prefill, time of one more token by the KV cache.

    python -m scripts.benchmarks techniques --model FOLDER

The prompt whose memory is measured has 10,000 tokens, or as many as the context holds; its memory is that beyond the
weights and the KV cache.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from cbatch import Engine, EngineConfig
from cbatch.base.errors import ConfigError, RequestError
from cbatch.base.units import format_bytes
from cbatch.cli.bench import units
from cbatch.cli.bench.recorder import RunRecord, RunRecorder
from cbatch.cli.bench.strategies import Experiment, peak_memory, release_free_memory
from cbatch.cli.bench.workload import Workload
from cbatch.engine.stepping_engine import SteppingEngine
from scripts.benchmarks.harness import Report

LONG_PROMPT = 10_000
CHUNK_SHARES = (1 / 16, 1 / 4, 1)
"""Chunks of the long prompt whose memory is compared, as shares of its length; the last one is all of it."""

SHORTEST, REPEATS = 64, 5
"""The first context, in tokens, after which one more token is timed, and how many of them."""


def prompt_memory(experiment: Experiment, context: int) -> list[dict[str, Any]]:
    """The memory of a long prompt in steps of each of CHUNK_SHARES. Raises ConfigError if it cannot be computed."""
    length = min(LONG_PROMPT, context - 1)
    budgets = dict.fromkeys(max(round(share * length), 1) for share in CHUNK_SHARES)
    return [_prompt_memory(experiment, length, budget) for budget in budgets]


def _engine(experiment: Experiment, context: int, budget: int, *, own_model: bool = False) -> SteppingEngine:
    """For one sequence of up to `context` tokens. The cache holds no more, to leave memory for large steps.

    own_model: load the model once more
    """
    config = replace(
        experiment.config,
        max_seqs=1,
        max_batch_tokens=budget,
        kv_blocks=-(-context // experiment.config.block_size),
        prefix_cache=False,
        run_ahead=False,
        speculate="off",  # a step is to give one token
    )
    return SteppingEngine(config, None if own_model else experiment.loaded)


def _run_prompt(engine: SteppingEngine, length: int, tokens: int) -> RunRecord:
    """Runs one prompt to this number of output tokens."""
    recorder = RunRecorder(engine, [tokens], 1)
    recorder.add(0, [1] * length, tokens)
    recorder.run()
    return recorder.finish()


def _prompt_memory(experiment: Experiment, length: int, budget: int) -> dict[str, Any]:
    """Peak memory of one long prompt in steps of `budget` tokens, without weights and KV cache.

    On a CPU, a model keeps the memory of its largest step for the next one, so that only a new model takes it again.
    """
    fast_model = experiment.loaded.fast_model
    own_model = fast_model is not None and fast_model.device.type == "cpu"

    with _engine(experiment, length + 1, budget, own_model=own_model) as engine:
        engine.zero_cache()
        release_free_memory()
        _run_prompt(engine, 1, 1)  # touches what any step does, such as weights that are mapped from a file
        with peak_memory(engine.device, releases=False) as memory:
            try:
                elapsed = _run_prompt(engine, length, 1).elapsed_s
            except RequestError as error:
                raise ConfigError(f"A prompt of {length:,} tokens could not be measured: {error}") from error
    return {"prompt_tokens": length, "tokens_a_step": budget, "peak_bytes": memory["bytes"], "elapsed_s": elapsed}


def token_costs(experiment: Experiment, context: int) -> list[dict[str, Any]]:
    """Seconds that one more token takes after longer and longer contexts, with the KV cache and without."""
    costs, length = [], SHORTEST
    with _engine(experiment, context, context) as engine:
        while length + REPEATS + 1 <= context:
            first_s, *times = [step.end - step.start for step in _run_prompt(engine, length, REPEATS + 1).steps]
            middle = sorted(times)[REPEATS // 2]
            costs.append({"context_tokens": length, "without_cache_s": first_s, "with_cache_s": middle})
            length *= 2
    return costs


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="folder or name (the demo model)")
    parser.add_argument("--kv-blocks", type=int, help="size of the KV cache, which bounds the context")


def run(options: argparse.Namespace, report: Report) -> int:
    with Engine(EngineConfig(model=options.model, kv_blocks=options.kv_blocks)) as engine:
        experiment, context = Experiment.of(engine, Workload([], [], ""), 1), engine.limits.sequence.longest
    memory, costs = prompt_memory(experiment, context), token_costs(experiment, context)
    report.table(
        [
            ["tokens a step", "prompt", "peak memory", "first token"],
            *(
                [
                    f"{one['tokens_a_step']:,}",
                    f"{one['prompt_tokens']:,}",
                    format_bytes(one["peak_bytes"]),
                    units.duration(one["elapsed_s"]),
                ]
                for one in memory
            ),
        ]
    )
    report.line()
    report.table(
        [
            ["context", "with cache", "without", "speedup"],
            *(
                [
                    f"{one['context_tokens']:,}",
                    units.duration(one["with_cache_s"]),
                    units.duration(one["without_cache_s"]),
                    units.times(one["without_cache_s"] / one["with_cache_s"]),
                ]
                for one in costs
            ),
        ]
    )
    report.figures |= {"prompt_memory": memory, "token_costs": costs}
    return 0
