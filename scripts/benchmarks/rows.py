"""Cost of everything but the model: many short rows from the reader through the engine to the output file.

    python -m scripts.benchmarks rows --rows 1000000 --compare 1000

The model costs nothing, and rows are token ids, so no template or tokenizer runs. Each number of rows runs in a process
of its own. Prints rows per second and peak memory.
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

from cbatch import Engine, EngineConfig
from cbatch.batch.engine_driver import EngineDriver
from cbatch.batch.lines import RowOptions, read_lines
from cbatch.batch.writer import FileWriter, run_stream
from cbatch.cli.run.stats import RunStats
from cbatch.runtime.cpu import tune_process
from scripts.benchmarks.harness import ROOT, Report
from scripts.benchmarks.models import FreeModel

VOCABULARY, END = 64, 1


def measure(folder: Path, rows: int, max_seqs: int) -> dict[str, float]:
    """One run in this process: rows per second, and the peak of its memory in MiB."""
    torch.set_num_threads(1)
    source = folder / "in.jsonl"
    with source.open("w") as file:
        for number in range(rows):
            file.write(json.dumps({"id": f"row-{number}", "prompt_token_ids": [5, 6, 7, 8 + number % 50]}) + "\n")
    model = FreeModel(VOCABULARY, max_model_len=64, likeliest=END).loaded(eos_ids=frozenset([END]))
    engine = Engine(EngineConfig(device="cpu", max_seqs=max_seqs, kv_blocks=4 * max_seqs), loaded=model)
    stats = RunStats()
    driver = EngineDriver(engine.thread)
    rows_of = driver.open(RowOptions())
    stats.attach(driver, rows_of)
    with FileWriter(folder / "out.jsonl", input_order=True) as output, source.open("rb") as stream:
        output.start()
        tune_process()
        started = time.perf_counter()
        run_stream(rows_of, output, read_lines(stream), stats.count)
        elapsed = time.perf_counter() - started
    engine.close()
    assert stats.rows == rows and not stats.errors, "rows were lost"
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
    return {"rows": rows, "rows_per_s": rows / elapsed, "peak_mib": peak, "steps": engine.stats().num_steps}


def measure_apart(few: int, many: int, max_seqs: int) -> list[dict[str, float]]:
    """Two runs in a process of their own, whose memory nothing else has touched. The peak only rises from one on."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", __name__, folder, str(max_seqs), str(few), str(many)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=ROOT)
    figures: list[dict[str, float]] = json.loads(done.stdout)
    return figures


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rows", type=int, default=1_000_000, help="(%(default)s)")
    add("--compare", type=int, default=1_000, help="number of rows whose peak memory is the base (%(default)s)")
    add("--max-seqs", type=int, default=256, help="(%(default)s)")


def run(options: argparse.Namespace, report: Report) -> int:
    found = measure_apart(options.compare, options.rows, options.max_seqs)
    for figures in found:
        report.line("{rows:>9,} rows  {rows_per_s:>8,.0f} rows/s  peak {peak_mib:,.0f} MiB".format(**figures))
    grown = found[1]["peak_mib"] - found[0]["peak_mib"]
    report.line(f"memory for the others: {grown:.0f} MiB")
    report.figures |= {"runs": found, "grown_mib": grown}
    return 0


if __name__ == "__main__":  # the process of the runs
    print(json.dumps([measure(Path(sys.argv[1]), int(rows), int(sys.argv[2])) for rows in sys.argv[3:]]))
