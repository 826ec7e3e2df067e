"""Runs the whole command on models with random damage: each is refused with a sentence, or gives every row an outcome.

    python -m scripts.stress.damaged_models --folders 50000

Folders and GGUF files are damaged in their settings, tokenizers, templates, weights and bytes, in LoRA adapters and
in the cache of packed weights (`tests/support/model_fuzzer`). A run may take 20 s and a gibibyte, and must not print a
traceback, a panic or a control character. Exits with 1 at the end if one did, and prints how to repeat it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.model_fuzzer.kinds import AREAS
from tests.support.model_fuzzer.runs import Judged, LimitedRuns, limited_runs

CHILD_SECONDS = 2.0


@dataclass
class Summary:
    """Outcomes of the models of an area."""

    codes: Counter[int | None] = field(default_factory=Counter)
    violations: int = 0
    cpu: float = 0.0
    slowest: float = 0.0
    largest: int = 0

    def add(self, judged: Judged) -> None:
        self.codes[judged.outcome.code] += 1
        self.violations += bool(judged.violations)
        self.cpu += judged.outcome.cpu
        self.slowest = max(self.slowest, judged.outcome.seconds)
        self.largest = max(self.largest, judged.outcome.bytes)

    def __str__(self) -> str:
        count = self.codes.total()
        rows, refused = self.codes[0] + self.codes[1], self.codes[2]
        return (
            f"{count:,} models, {refused:,} refused, {rows:,} with all rows, {self.violations:,} violations; "
            f"{1000 * self.cpu / max(count, 1):.0f} ms of CPU each, at most {self.slowest:.1f} s and "
            f"{self.largest / 2**20:.0f} MiB"
        )


def judged_models(runs: LimitedRuns, arguments: argparse.Namespace, area: str) -> Iterator[Judged]:
    count = -(-arguments.folders // len(arguments.kind or AREAS))
    numbers: Sequence[int] = arguments.number or range(arguments.first, arguments.first + count)
    for number in numbers:
        yield runs.judge(area, arguments.seed, number)


def report(judged: Judged) -> str:
    lines = [f"  {violation}" for violation in judged.violations]
    repeat = f'--kind "{judged.area}" --seed {judged.seed} --number {judged.number}'
    return "\n".join([f"{repeat}: {ascii(judged.words)[:300]}", *lines])


def finding(judged: Judged) -> str:
    """A line of JSON."""
    return json.dumps({
        "area": judged.area, "seed": judged.seed, "number": judged.number, "damage": judged.words,
        "code": judged.outcome.code, "violations": judged.violations,
        "stderr": judged.outcome.errors[:2000].decode("utf-8", "replace"),
    })  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folders", type=int, default=5_000, help="in all (%(default)s)")
    parser.add_argument("--kind", choices=AREAS, action="append", help="what is damaged; all by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first model (%(default)s)")
    parser.add_argument("--number", type=int, action="append", help="only the model of this number")
    parser.add_argument("--findings", type=Path, help="a file to which violations are added as lines of JSON")
    parser.add_argument(
        "--child-seconds",
        type=float,
        default=CHILD_SECONDS,
        help="that processes for chat templates and tokenizers may take (%(default)s)",
    )
    arguments = parser.parse_args()
    areas = tuple(arguments.kind or AREAS)
    violations = 0
    with tempfile.TemporaryDirectory() as folder, limited_runs(Path(folder), areas, arguments.child_seconds) as runs:
        for area in areas:
            summary = Summary()
            for judged in judged_models(runs, arguments, area):
                summary.add(judged)
                if judged.violations:
                    print(report(judged), flush=True)
                if judged.violations and arguments.findings:
                    with arguments.findings.open("a") as file:
                        file.write(finding(judged) + "\n")
            violations += summary.violations
            print(f"{area}: {summary}", flush=True)
    print(f"violations: {violations}")
    sys.exit(1 if violations else 0)


if __name__ == "__main__":
    main()
