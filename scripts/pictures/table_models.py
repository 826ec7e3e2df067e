"""Runs every causal architecture of the installed transformers in all scenarios, and writes docs/models.md.

python -m scripts.pictures.table_models [MODEL_TYPE ...]     with names it prints their lines and writes nothing
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers

from cbatch.engine.stepping_engine import SteppingEngine
from scripts.pictures.model_scenarios import compare_all_scenarios, unseen_faults
from tests.support.architectures import CLASSES, NOT_BUILT_HERE
from tests.support.model_checks import EQUAL, NOT_BUILT, REFUSED, CheckResult, check_model, outcome

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
VERSIONS = re.compile(r"transformers \S+, torch \S+: [^.]+\.")
ROWS = re.compile(r"(?<=\| result \| model types \|\n\|---\|---\|\n).*", re.DOTALL)
"""The part that is written; the rest of the page is by hand."""


def scenarios_and_faults(network: Any, engine: SteppingEngine) -> list[str]:
    return compare_all_scenarios(network, engine) + unseen_faults(network, engine)


def main() -> int:
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    results: dict[str, CheckResult] = {}
    for model_type in sys.argv[1:] or CLASSES:
        result = results[model_type] = check_model(model_type, scenarios_and_faults)
        if result.status == NOT_BUILT and model_type not in NOT_BUILT_HERE:
            result = results[model_type] = CheckResult("unknown", result.reason)
        print(f"{result.status:11} {model_type} {result.reason}", flush=True)
    if sys.argv[1:]:
        return 0
    counts = Counter(result.status for result in results.values())
    faulty = counts.keys() - {EQUAL, REFUSED, NOT_BUILT}
    if faulty:
        print(f"Not written: some are {', '.join(sorted(faulty))}.", file=sys.stderr)
        return 1
    told = ", ".join(f"{counts[word]} {word}" for word in (EQUAL, REFUSED, NOT_BUILT))
    said: dict[str, list[str]] = {}
    for model_type, result in sorted(results.items()):
        said.setdefault(outcome(model_type, result), []).append(f"`{model_type}`")
    rows = "".join(f"| {what} | {', '.join(names)} |\n" for what, names in sorted(said.items()))
    page = VERSIONS.sub(
        f"transformers {transformers.__version__}, torch {torch.__version__}: {told}.", DOCUMENT.read_text()
    )
    DOCUMENT.write_text(ROWS.sub(lambda _: rows, page), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
