"""Damages outputs of small batches at random, resumes them, and compares the result with that of an undisturbed run.

    python -m scripts.stress.damaged_outputs --damages 10000 --seed 0

Bytes are flipped, cut, doubled and inserted in finished and unfinished outputs, in the journal of a table, and in
tokens of unfinished answers. `--ignore-checks` plants the fault that nobody looks at the check of a row. Exits with 1
if an output differs in the end. Needs the packages of the tests.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

from cbatch.batch import journal
from cbatch.batch.journal import fits_check
from tests.support.damaged_outputs import KINDS, DamageTest, make_engine

MEMORY = Path("/dev/shm")
"""Where syncing costs nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--damages", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, action="append", help="all by default")
    parser.add_argument("--ignore-checks", action="store_true")
    arguments = parser.parse_args()
    logging.disable()  # warnings of damaged tokens
    fault = mock.patch.object(journal, "fits_check", lambda line: fits_check(line) is not None or None)
    shares = {kind: KINDS[kind].share for kind in arguments.kind or KINDS}
    differing = 0
    with (
        fault if arguments.ignore_checks else nullcontext(),
        tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder,
        make_engine(Path(folder)) as engine,
    ):
        for kind, share in shares.items():
            count = math.ceil(arguments.damages * share / sum(shares.values()))
            counts = DamageTest(engine, Path(folder) / kind, kind, arguments.seed).damage_many(count)
            print(f"{kind}: {counts}", flush=True)
            differing += len(counts.differing)
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
