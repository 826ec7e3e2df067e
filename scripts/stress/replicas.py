"""Kills replicas of the demo model at random moments, and compares the rows with those of a single engine.

    python -m scripts.stress.replicas --kills 300

Every batch runs on new replicas, into a file in the order of the input; some rows are bad, some are sampled, some have
several outputs. Needs the packages of the tests.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch

from cbatch.api import Engine
from cbatch.batch.engine_driver import EngineDriver
from cbatch.replicas.dispatcher import FAILED
from cbatch.replicas.driver import ReplicaDriver
from tests.support.replica_runs import (
    CONFIG,
    ROWS_OF_KILL,
    KillableLauncher,
    RowCounter,
    forked_replicas,
    killing,
    run_to_file,
    write_rows,
)

KILLS_OF_BATCH = 20
BACKOFF_S = 0.01


@dataclass
class Comparison:
    """How two outputs differ, in rows. Those that `failed` say that replicas died of them three times."""

    lost: int = 0
    doubled: int = 0
    changed: int = 0
    failed: int = 0

    @classmethod
    def of(cls, found: bytes, expected: bytes) -> Comparison:
        rows, wanted = found.splitlines(), expected.splitlines()
        seen = Counter(json.loads(row)["index"] for row in rows)
        changed = set(rows) - set(wanted)
        failed = sum(FAILED.encode() in row for row in changed)
        return cls(len(wanted) - len(seen), seen.total() - len(seen), len(changed) - failed, failed)


@dataclass
class Totals:
    """Counts so far. `states`: what the killed replicas were doing."""

    kills: int = 0
    batches: int = 0
    rows: int = 0
    starts: int = 0
    lost: int = 0
    doubled: int = 0
    changed: int = 0
    failed: int = 0
    states: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        states = ", ".join(f"{name} {count}" for name, count in sorted(self.states.items()))
        return (
            f"{self.kills} kills ({states}) in {self.batches} batches of {self.rows:,} rows, {self.starts} starts; "
            f"rows lost {self.lost}, doubled {self.doubled}, changed {self.changed}; "
            f"three deaths hit {self.failed}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no batch after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fork", action="store_true", help="fork replicas, which is quicker than starting Python anew")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("cbatch").addHandler(logging.NullHandler())
    chance, totals, started = random.Random(arguments.seed), Totals(), time.monotonic()
    with tempfile.TemporaryDirectory() as name, forked_replicas() if arguments.fork else nullcontext():
        folder = Path(name)
        write_rows(folder / "in.jsonl", KILLS_OF_BATCH * ROWS_OF_KILL, arguments.seed)
        with Engine(CONFIG) as engine:
            run_to_file(EngineDriver(engine.thread), folder / "in.jsonl", folder / "expected.jsonl")
        while totals.kills < arguments.kills and time.monotonic() < started + arguments.seconds:
            run_batch(folder, min(KILLS_OF_BATCH, arguments.kills - totals.kills), arguments.replicas, chance, totals)
            print(f"{totals}; {time.monotonic() - started:.0f} s", flush=True)
    sys.exit(bool(totals.lost or totals.doubled or totals.changed))


def run_batch(folder: Path, kills: int, num_replicas: int, chance: random.Random, totals: Totals) -> None:
    """Runs the batch once, and counts what differs from the rows of one engine."""
    output, launcher, counter = folder / "out.jsonl", KillableLauncher(num_replicas), RowCounter()
    output.unlink(missing_ok=True)
    with (
        ReplicaDriver(launcher, CONFIG, backoff_s=BACKOFF_S) as driver,
        killing(launcher, counter, kills, chance, lambda number: driver.each()[number].state) as states,
    ):
        run_to_file(driver, folder / "in.jsonl", output, counter=counter)
    totals.states += states
    totals.kills += states.total()
    totals.batches, totals.rows, totals.starts = totals.batches + 1, counter.rows, totals.starts + launcher.num_starts
    found = Comparison.of(output.read_bytes(), (folder / "expected.jsonl").read_bytes())
    totals.lost += found.lost
    totals.doubled += found.doubled
    totals.changed += found.changed
    totals.failed += found.failed


if __name__ == "__main__":
    main()
