"""Uses one engine from many threads in every way at once, and compares each result with the one that it gets alone.

    python -m scripts.stress.shared_engine --seconds 30 --threads 64

Calls, streams, loops of asyncio and maps, some of them left half-way or cancelled, on a tiny random model in float32.
Exits with 1 if a result differs, a call fails or hangs, or blocks of the cache, threads or futures are left.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.support.model_folder import save_model
from tests.support.shared_engine import SharedEngineStress


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30, help="how long new calls are made (%(default)s)")
    parser.add_argument("--threads", type=int, default=64, help="threads that make them (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of what they do (%(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        stress = SharedEngineStress(save_model(Path(folder) / "model"), arguments.seed)
        began = time.monotonic()
        try:
            stress.run(arguments.threads, arguments.seconds)
        except AssertionError as error:
            sys.exit(f"{error}\nTo repeat it: --seed {arguments.seed} --threads {arguments.threads}")
        finally:
            figures = ", ".join(f"{name} {count:,}" for name, count in sorted(stress.counts.items()))
            print(f"{arguments.threads} threads, {time.monotonic() - began:.0f} s: {figures}", flush=True)


if __name__ == "__main__":
    main()
