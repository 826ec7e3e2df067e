"""Runs block pool, prefix cache and scheduler in many small random simulations, each step against a plain model.

    python -m scripts.stress.soak_scheduler --steps 1000000 [--recurrent]

Exits with 1 at the first violation, and prints how to repeat it. Needs no language model.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter

from tests.support.scheduler_simulation import RandomWalk

ACTIONS = 200
"""Random actions in each simulation, before it runs until all requests are done."""


def report(counts: Counter[str], simulations: int, violations: int, began: float) -> str:
    figures = ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()) if name != "steps")
    took = time.monotonic() - began
    return f"{counts['steps']:,} steps in {simulations:,} simulations, {took:.0f} s: {figures}; violations {violations}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000, help="steps in all (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all simulations (%(default)s)")
    parser.add_argument("--simulation", type=int, default=0, help="number of the first simulation, to repeat one")
    parser.add_argument("--recurrent", action="store_true", help="with the states of recurrent layers and snapshots")
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    began, number, told = time.monotonic(), arguments.simulation, 0
    while counts["steps"] < arguments.steps:
        walk = RandomWalk(arguments.seed, number, recurrent=arguments.recurrent)
        try:
            walk.run(ACTIONS)
        except Exception:
            traceback.print_exc()
            print(report(counts, number - arguments.simulation, 1, began))
            states = " --recurrent" if arguments.recurrent else ""
            again = f"--seed {arguments.seed} --simulation {number} --steps 1{states}"
            sys.exit(f"{walk.sizes}\nTo repeat it: {again}")
        counts += walk.counts + Counter(preemptions=walk.scheduler.num_preemptions)
        number += 1
        if counts["steps"] - told >= 100_000:
            told = counts["steps"]
            print(report(counts, number - arguments.simulation, 0, began), flush=True)
    print(report(counts, number - arguments.simulation, 0, began))


if __name__ == "__main__":
    main()
