"""The worth of text that a form forces: the same requests with and without a step for each of its tokens, by turns.

python -m scripts.benchmarks forms --model FOLDER
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

from cbatch.api import Engine
from cbatch.schedule.sequence import TokenSequence
from scripts.benchmarks.harness import Report

TEXTS = ("name", "city", "country", "occupation", "favourite_colour")
NUMBERS = ("age", "children", "height_in_cm")
PROPERTIES: dict[str, Any] = {
    **{name: {"type": "string", "maxLength": 30} for name in TEXTS},
    **{name: {"type": "integer", "minimum": 0, "maximum": 300} for name in NUMBERS},
    "is_married": {"type": "boolean"},
    "kind": {"enum": ["human", "animal", "plant"]},
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": list(PROPERTIES)}
FORMS: dict[str, dict[str, Any]] = {
    "a schema of ten keys": {"guided_json": SCHEMA, "max_tokens": 300},
    "a choice": {"choice": ["I would say that this is fine", "This is not fine at all, I am afraid"]},
    "free text": {"regex": "[A-Za-z ,.]{500,}", "max_tokens": 60, "close_forms": False},
}


def seconds(engine: Engine, form: dict[str, Any], batch: int, number: int) -> float:
    """The time of an output; prompts differ, so that earlier outputs are no drafts of whole new ones."""
    prompts = [f"Describe person number {number + place} as JSON." for place in range(batch)]
    start = time.perf_counter()
    made = engine.generate(prompts, {"temperature": 0.8, **form})
    assert all(one.error is None for one in made)
    return (time.perf_counter() - start) / batch


def compare(engine: Engine, form: dict[str, Any], batch: int, rounds: int) -> tuple[float, float]:
    """The median time of an output, and how many times as long it takes step by step."""
    times = list[float](), list[float]()
    seconds(engine, form, batch, 0)
    for number in range(2 * rounds):
        steps = patch.object(TokenSequence, "forced_token", None) if number % 2 else nullcontext()
        with steps:
            times[number % 2].append(seconds(engine, form, batch, 100 * number))
    now, step_by_step = map(statistics.median, times)
    return now, step_by_step / now


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="a folder; by default the demo model")
    parser.add_argument("--rounds", type=int, default=5, help="of each (%(default)s)")


def run(options: argparse.Namespace, report: Report) -> int:
    chosen = {"model": options.model} if options.model else {}
    rows = [["drafts", "form", "at once", "seconds", "gain"]]
    for speculate in ("auto", "off"):
        with Engine(device="cpu", speculate=speculate, **chosen) as engine:
            for name, form in FORMS.items():
                for batch in (1, 16):
                    now, gain = compare(engine, form, batch, options.rounds)
                    report.figures[f"{speculate}, {name}, {batch}"] = {"seconds": now, "gain": gain}
                    rows.append([speculate, name, str(batch), f"{now:.4f}", f"{gain:.2f}"])
    report.table(rows)
    return 0
