"""Kills `cbatch run` at random moments, resumes it, and compares the result with that of an undisturbed run.

    python -m scripts.stress.kill_runs --kills 1000 [--kind qwen3_5_text] [--tries] [--journal-tokens]

The rows are sampled on a tiny random model; some are large, one is bad. Needs the packages of the tests.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from contextlib import closing
from pathlib import Path

from tests.support.fork_server import ForkServer, KillPoint
from tests.support.kill_runs import Aim, KillTest
from tests.support.model_folder import save_model


def kill_at_random(test: KillTest, chance: random.Random, kills: int) -> None:
    """Batches that are killed at random, until there were so many kills."""
    while (left := kills - test.counts.aims.total()) > 0:
        points: list[Aim] = [KillPoint("write", chance.randint(1, 3)), KillPoint("pread", chance.randint(1, 36))]
        points += [KillPoint("replace"), KillPoint("after replace"), "any moment", "any moment", "any moment"]
        test.run_batch(chance.sample(points, min(chance.randint(1, 6), left)))


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
        chance = random.Random(arguments.seed)
        for kills in range(50, arguments.kills + 50, 50):
            kill_at_random(test, chance, min(kills, arguments.kills))
            print(test.counts, flush=True)


if __name__ == "__main__":
    main()
