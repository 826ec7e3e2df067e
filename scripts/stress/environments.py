"""Runs `cbatch run` in hostile environments: each run ends as the exit codes say, with sentences and never a traceback.

    python -m scripts.stress.environments [--only WORD]... [--list]

Exits with 1 at the end if a run hung, or ended with something else than rows or a sentence. Needs Linux.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.support.environments import CASES, judge, run_case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="runs whose names have this word")
    parser.add_argument("--list", action="store_true", help="print the names of the runs")
    arguments = parser.parse_args()
    cases = [case for case in CASES if all(word in case.name for word in arguments.only)]
    if arguments.list:
        print(*(case.name for case in cases), sep="\n")
        return
    violations = 0
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            outcome = run_case(case, Path(folder))
        problem = judge(case, outcome)
        violations += problem is not None
        print(f"{case.name}: exit {outcome.status} in {outcome.seconds:.1f} s", flush=True)
        print("".join(f"    {line}\n" for line in outcome.stderr.splitlines()), end="", flush=True)
        if problem is not None:
            print(f"  VIOLATION: {problem}", flush=True)
    print(f"{len(cases)} runs, violations: {violations}")
    sys.exit(1 if violations else 0)


if __name__ == "__main__":
    main()
