"""Kills `cbatch run` at random moments, resumes it, and compares the result with that of an undisturbed run.

    python -m scripts.stress.kill_runs --kills 1000 [--kind qwen3_5_text]

The rows are sampled on a tiny random model; some are large, one is bad. Needs the packages of the tests.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.support.fork_server import fork_server
from tests.support.kill_runs import KillTest
from tests.support.model_folder import save_model

LARGE_ROW = 6_000_000
"""Bytes of a column in some rows, so that writing one takes long enough to be killed in the middle."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", default="llama", help="model type, such as qwen3_5_text (%(default)s)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, fork_server() as server:
        model = save_model(Path(folder) / "model", kind=arguments.kind)
        test = KillTest(server, Path(folder), model, arguments.seed, large_row=LARGE_ROW)
        for kills in range(50, arguments.kills + 50, 50):
            print(test.run_random(min(kills, arguments.kills)), flush=True)


if __name__ == "__main__":
    main()
