"""What the host does in a step of many decoding rows: planning it, preparing its input, taking in its tokens.

The model is a fake that has the same logits for every row, so nothing else takes time. Medians over steps:

    python scripts/bench_host.py --rows 512 --context 1500

And the host's part beside a real model, whose weights put all else out of the processor's caches in every step: how
much of the work that `bench_peers.py` gives to every system lies outside of the kernels of the CPU's fast path.

    python scripts/bench_host.py --share
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_fair import MODELS, load
from peers.work import SHAPES as PEER_SHAPES
from peers.work import make_work

from cbatch import Engine, EngineConfig, SamplingParams
from cbatch.engine.kernels.cpu.thread_pool import shared_thread_pool
from cbatch.engine.models.loader import LoadedModel
from cbatch.engine.runtime.batch import Logits
from cbatch.engine.tracing import spans

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


def show_phases(rows: int, context: int, steps: int) -> None:
    torch.set_num_threads(1)
    for ahead in (False, True):
        found = measure(rows, context, steps, ahead=ahead)
        phases = ", ".join(f"{name} {found[name]:.2f}" for name in sorted(found, key=list(found).index))
        way = "running ahead" if ahead else "step by step"
        print(f"{rows} rows behind {context:,} tokens, {way}, in ms: {phases}")


def measure_share(shape: str, rounds: int) -> Iterator[tuple[int, float, float]]:
    """Steps, seconds, and seconds outside of kernels, of each round; the prompts of no two are alike."""
    loaded = load(MODELS[shape], torch.device("cpu"))
    engine = Engine(EngineConfig(device="cpu", max_seqs=32, max_batch_tokens=512), loaded)
    team, inside = shared_thread_pool(torch.get_num_threads()), 0.0
    run = team.run

    def timed(*arguments: Any) -> None:
        nonlocal inside
        begun = time.perf_counter()
        run(*arguments)
        inside += time.perf_counter() - begun

    team.run = timed  # type: ignore[assignment,method-assign]
    try:
        for seed in range(rounds):
            work, inside = make_work(32, seed, engine.model.vocab_size), 0.0
            for prompt, length in zip(work.prompts, work.lengths, strict=True):
                engine.add(prompt, SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True))
            before, begun = engine.num_steps, time.perf_counter()
            while engine.has_work:
                engine.step()
            elapsed = time.perf_counter() - begun
            yield engine.num_steps - before, elapsed, elapsed - inside
    finally:
        team.run = run  # type: ignore[method-assign]
        engine.close()


def show_share(shape: str, rounds: int) -> None:
    found = list(measure_share(shape, rounds))[1:]  # in the first, memory is touched first
    for steps, elapsed, outside in found:
        print(f"{steps} steps in {elapsed:.2f} s; outside of kernels {1e3 * outside / steps:.2f} ms a step")
    share = median(outside / elapsed for _, elapsed, outside in found)
    print(f"median share outside of kernels: {share:.1%}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--context", type=int, default=1500, help="tokens of each row before the first step")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--share", action="store_true", help="measure the share beside a real model")
    parser.add_argument("--shape", choices=PEER_SHAPES, default="135m", help="of that (%(default)s)")
    parser.add_argument("--rounds", type=int, default=6, help="of its work, the first to warm up (%(default)s)")
    options = parser.parse_args(arguments)
    if options.share:
        show_share(options.shape, options.rounds)
    else:
        show_phases(options.rows, options.context, options.steps)


if __name__ == "__main__":
    main()
