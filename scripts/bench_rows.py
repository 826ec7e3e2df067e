"""What everything but the model costs: many short rows through the real reader, driver, scheduler and output file.

The model is a fake that has the same logits for every row, and rows are token ids, so no template or tokenizer runs.

    python scripts/bench_rows.py --rows 1000000 --compare 1000

runs each number of rows in a process of its own, and prints rows per second and peak memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cbatch import Engine, EngineConfig, SamplingParams
from cbatch.cli.common.loading import tune_process
from cbatch.cli.run.input.lines import read_lines
from cbatch.cli.run.output.journal import Journal
from cbatch.cli.run.output.writer import FileWriter
from cbatch.cli.run.pipeline import Pipeline
from cbatch.cli.run.requests import RequestBuilder, RowOptions
from cbatch.cli.run.stats import RunStats
from cbatch.engine import Driver
from cbatch.engine.models.loader import LoadedModel
from cbatch.engine.runtime.batch import Logits

VOCABULARY, END = 64, 1


def make_engine(max_seqs: int) -> Engine:
    """A real engine whose model says END to everything."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    loaded = LoadedModel("fake", lambda: LlamaForCausalLM(config).eval(), None, SamplingParams(), frozenset([END]))
    engine = Engine(EngineConfig(device="cpu", max_seqs=max_seqs, kv_blocks=4 * max_seqs), loaded)
    logits = torch.zeros(engine.scheduler.max_batch_tokens, VOCABULARY)
    logits[:, END] = 1
    engine.runner.forward = lambda batch: Logits(logits[: len(batch.rows)])  # type: ignore[method-assign]
    return engine


def run(folder: Path, rows: int, max_seqs: int) -> dict[str, float]:
    """One run in this process. Returns rows/s and the peak of its memory in MiB."""
    torch.set_num_threads(1)
    source = folder / "in.jsonl"
    with source.open("w") as file:
        for number in range(rows):
            file.write(json.dumps({"id": f"row-{number}", "prompt_token_ids": [5, 6, 7, 8 + number % 50]}) + "\n")
    engine = make_engine(max_seqs)
    driver, stats = Driver(engine), RunStats()
    builder = RequestBuilder(engine, RowOptions(params=SamplingParams()))
    with FileWriter(folder / "out.jsonl", input_order=True) as output, source.open("rb") as stream:
        output.start(Journal())
        batch = Pipeline(driver, output, builder, stats, window=4 * max_seqs)
        tune_process()
        started = time.perf_counter()
        batch.run(read_lines(stream), lambda: None)
        elapsed = time.perf_counter() - started
    driver.close()
    engine.close()
    assert stats.rows == rows and not stats.errors, "rows were lost"
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
    return {"rows": rows, "rows_per_s": rows / elapsed, "peak_mib": peak, "steps": engine.num_steps}


def run_apart(rows: int, max_seqs: int) -> dict[str, float]:
    """`run` in a process of its own, so that its peak of memory is its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--rows", str(rows), "--max-seqs", str(max_seqs), "--folder", folder]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--compare", type=int, default=1_000, help="number of rows whose peak memory is the base")
    parser.add_argument("--max-seqs", type=int, default=256)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder is not None:
        print(json.dumps(run(arguments.folder, arguments.rows, arguments.max_seqs)))
        return
    few, many = (run_apart(rows, arguments.max_seqs) for rows in (arguments.compare, arguments.rows))
    for figures in (few, many):
        print("{rows:>9,} rows  {rows_per_s:>8,.0f} rows/s  peak {peak_mib:,.0f} MiB".format(**figures))
    print(f"memory for the others: {many['peak_mib'] - few['peak_mib']:.0f} MiB")


if __name__ == "__main__":
    main()
