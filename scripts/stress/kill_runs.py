"""Kills `cbatch run` at random moments, resumes it, and compares the result with that of an undisturbed run.

    python -m scripts.stress.kill_runs --kills 1000

Rows are sampled, large and bad ones among them, on a tiny random model. Needs the tests' own packages.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.support.kill_runs import KillTest, fork_server
from tests.support.model_folder import save_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, fork_server() as runs:
        killer = KillTest(runs, Path(folder), save_model(Path(folder) / "model"), arguments.seed)
        for kills in range(50, arguments.kills + 50, 50):
            print(killer.run(min(kills, arguments.kills)), flush=True)


if __name__ == "__main__":
    main()
