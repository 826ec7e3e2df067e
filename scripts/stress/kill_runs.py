"""Kills `cbatch run` at random moments, resumes it, and compares the result with that of an undisturbed run.

    python -m scripts.stress.kill_runs --kills 1000 [--kind qwen3_5_text] [--tries] [--journal-tokens]

The rows are sampled on a tiny random model; some are large, one is bad. Needs the packages of the tests.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import closing
from pathlib import Path

from tests.support.fork_server import ForkServer
from tests.support.kill_runs import KillTest
from tests.support.model_folder import save_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", default="llama", help="model type, such as qwen3_5_text (%(default)s)")
    parser.add_argument(
        "--tries", action="store_true", help="validate answers, with three tries and a cache of answers"
    )
    parser.add_argument(
        "--journal-tokens", action="store_true", help="keep the tokens of unfinished answers, and make answers longer"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, closing(ForkServer()) as server:
        model = save_model(Path(folder) / "model", kind=arguments.kind)
        options: list[object] = []
        if arguments.tries:
            options += ["--validate", "regex=(?s).*[aeiou].*", "--tries", "3", "--cache", Path(folder) / "cache"]
        if arguments.journal_tokens:
            options += ["--journal-tokens", "--journal-interval", "0.02"]
        longest = 120 if arguments.journal_tokens else 40
        test = KillTest(server, Path(folder), model, arguments.seed, options=options, most_tokens=longest)
        for kills in range(50, arguments.kills + 50, 50):
            print(test.run_random(min(kills, arguments.kills)), flush=True)


if __name__ == "__main__":
    main()
