"""Says which path each published config.json of tests/data/configs takes, and compares a small model of its kind.

python -m scripts.real_checkpoints [AUTHOR/MODEL ...]     compares these, or all
python -m scripts.real_checkpoints --write                writes the list in docs/models.md, and what tests expect

Exits with 1 if a model differs from transformers, or if one is refused that transformers has.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import torch
import transformers

from tests.support.published_configs import (
    EXPECTED,
    FAST,
    REFUSED,
    TRANSFORMERS,
    error_in,
    names,
    path_of,
    published,
    same_small_models,
)
from tests.support.wrappers import wrapper_kinds

DOCUMENT = Path(__file__).parents[1] / "docs" / "models.md"
LIST = re.compile(r"(?<=\| path \| models \|\n\|---\|---\|\n)(\|.*\n)*")
WRAPPERS = re.compile(r"(?<=have a fast path for text:\n)(.+\n)*")
TOLERANCE = 2e-4
"""Most that the order of sums changes logits in float32, as a share of their spread."""


def main() -> int:
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    if sys.argv[1:] == ["--write"]:
        EXPECTED.write_text(json.dumps({name: path_of(name) for name in names()}, indent=1) + "\n", encoding="utf-8")
        page = DOCUMENT.read_text(encoding="utf-8")
        page = WRAPPERS.sub(lambda _: wrapped(", ".join(f"`{kind}`" for kind in wrapper_kinds())), page)
        DOCUMENT.write_text(LIST.sub(lambda _: rows(names()), page), encoding="utf-8")
        return 0
    chosen = sys.argv[1:] or names()
    wrong = compare([name for name in chosen if path_of(name) == FAST])
    for name in chosen:
        if path_of(name) != FAST:
            print(f"{name}: {path_of(name)}")
    had = [name for name in chosen if "transformers has no model type" not in path_of(name)]
    counts = [sum(path_of(name).startswith(path) for name in had) for path in (FAST, TRANSFORMERS, REFUSED)]
    share = counts[0] / max(1, len(had))
    print(f"{len(chosen)} published configurations; transformers has the language model of {len(had)}.")
    print(
        "Of these {} take the fast path ({:.0%}), {} transformers, {} are refused.".format(
            counts[0], share, *counts[1:]
        )
    )
    print(f"{wrong} differ from transformers.")
    return int(wrong > 0 or counts[2] > 0)


def compare(chosen: Iterable[str]) -> int:
    """How many differ from transformers. Those that are the same model when they are small are compared once."""
    wrong = 0
    for group in same_small_models(chosen):
        error = error_in(group[0])
        wrong += len(group) * (not error < TOLERANCE)
        said = "equal" if error < TOLERANCE else "WRONG"
        print(f"{', '.join(group)} ({published(group[0])['model_type']}): {FAST}, {said}, {error:.0e}", flush=True)
    return wrong


def wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n"


def rows(chosen: Iterable[str]) -> str:
    """The rows of the page's table, one for each type on the fast path and each reason."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in chosen:
        path = path_of(name)
        found[f"{FAST}, `{published(name)['model_type']}`" if path == FAST else path].append(name.split("/")[1])
    return "".join(f"| {path} | {', '.join(models)} |\n" for path, models in sorted(found.items()))


if __name__ == "__main__":
    sys.exit(main())
