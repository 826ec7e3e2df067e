"""Loads many models with random damage: each is loaded or refused with a sentence, quickly and in little memory.

    python -m scripts.stress.damaged_models --models 10000

So many GGUF files, and as many folders of quantized weights of all kinds together. The limits are a second of the
processor's time, and 100 MiB beyond what the process had before. Exits with 1 at the end if a model was beyond them or
raised another error, and prints how to repeat it.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

from tests.support.damaged_models import FOLDERS, Outcome, outcomes


def summary(kind: str, found: Sequence[Outcome]) -> str:
    refused = sum(outcome.sentence is not None for outcome in found)
    slowest, largest = max(outcome.seconds for outcome in found), max(outcome.bytes for outcome in found)
    return (
        f"{kind}: {len(found):,} models, {refused:,} refused, {len(found) - refused:,} loaded; "
        f"at most {slowest:.2f} s and {largest / 2**20:.1f} MiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=10_000, help="GGUF files, and folders in all (%(default)s)")
    parser.add_argument("--kind", choices=["GGUF", *FOLDERS], action="append", help="all by default")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable()  # what becomes of formats that no kernel reads
    violations = 0
    for kind in arguments.kind or ["GGUF", *FOLDERS]:
        count = arguments.models if kind == "GGUF" else -(-arguments.models // len(FOLDERS))
        found: list[Outcome] = []
        with tempfile.TemporaryDirectory() as folder:
            try:
                for number, outcome in outcomes(kind, Path(folder), count, arguments.seed):
                    found.append(outcome)
                    if outcome.violation is not None:
                        violations += 1
                        print(f"model {number} of {kind}, seed {arguments.seed}: {outcome.violation}", flush=True)
            except AssertionError:
                violations += 1
                traceback.print_exc()
        if found:
            print(summary(kind, found), flush=True)
    print(f"violations: {violations}")
    sys.exit(1 if violations else 0)


if __name__ == "__main__":
    main()
