"""What the host does in a step of many decoding rows: planning it, preparing its input, taking in its tokens.

The model is a fake that has the same logits for every row, so nothing else takes time. Medians over steps:

    python scripts/bench_host.py --rows 512 --context 1500
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cbatch import Engine, EngineConfig, SamplingParams
from cbatch.engine import spans
from cbatch.engine.batch import Logits
from cbatch.engine.loader import LoadedModel

VOCABULARY = 128
WARMUP = 10


def make_engine(rows: int, context: int, steps: int, *, ahead: bool) -> Engine:
    """A real engine, all rows of which decode from its second step on."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=context + steps + 16,
    )
    loaded = LoadedModel("fake", lambda: LlamaForCausalLM(config).eval(), None, SamplingParams(), frozenset())
    budget = rows * context
    engine = Engine(
        EngineConfig(
            device="cpu",
            max_seqs=rows,
            max_batch_tokens=budget,
            kv_blocks=rows * -(-(context + steps + 16) // 16),
            run_ahead=ahead,
            prefix_cache=True,
        ),
        loaded,
    )
    logits = torch.zeros(rows, VOCABULARY)
    engine.runner.forward = lambda batch: Logits(logits[: len(batch.rows)])  # type: ignore[method-assign]
    for row in range(rows):
        prompt = [(row * 31 + place * 7 + row // 5) % VOCABULARY for place in range(context)]
        engine.add(prompt, SamplingParams(max_tokens=steps, ignore_eos=True), seed=row)
    return engine


def measure(rows: int, context: int, steps: int, *, ahead: bool) -> dict[str, float]:
    """Median milliseconds of each phase of a step, and of the whole step."""
    engine = make_engine(rows, context, steps, ahead=ahead)
    taken: dict[str, list[float]] = {}

    @contextmanager
    def clock(name: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        taken.setdefault(name, []).append(time.perf_counter() - begun)

    spans.record_spans(clock)
    try:
        while engine.has_work:
            with clock("step"):
                engine.step()
    finally:
        spans.record_spans(None)
        engine.close()
    return {name: 1e3 * median(times[WARMUP:]) for name, times in taken.items() if name != "forward"}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--context", type=int, default=1500, help="tokens of each row before the first step")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for ahead in (False, True):
        found = measure(options.rows, options.context, options.steps, ahead=ahead)
        phases = ", ".join(f"{name} {found[name]:.2f}" for name in sorted(found, key=list(found).index))
        way = "running ahead" if ahead else "step by step"
        print(f"{options.rows} rows behind {options.context:,} tokens, {way}, in ms: {phases}")


if __name__ == "__main__":
    main()
