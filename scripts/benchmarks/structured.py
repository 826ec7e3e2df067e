"""How long structured output takes, by library: compiling, and filling the mask of a token, over random outputs.

    python -m scripts.benchmarks structured --vocabulary 150000

Vocabularies are made up: all bytes, then words, numbers, punctuation and characters of many bytes. Libraries that
are not installed are left out.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from cbatch.base.params import Constraint
from cbatch.sample.structured.lark import to_lark
from cbatch.sample.structured.sandbox import LIMITS, Vocabulary
from scripts.benchmarks.harness import Report

STEPS = 200
SMALL = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["age"]}
MEDIUM = {
    "type": "object",
    "properties": {
        "status": {"enum": ["open", "closed", "pending"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 1, "maxItems": 10},
        "address": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}, "street": {"type": "string"}},
            "required": ["street"],
        },
        "parent": {"anyOf": [{"type": "null"}, {"type": "string"}]},
    },
    "required": ["status", "tags", "address"],
    "additionalProperties": False,
}
LARGE = {
    "type": "object",
    "properties": {f"part{n}": MEDIUM | {"title": str(n)} for n in range(100)},
    "additionalProperties": False,
}
CASES = {
    "small schema": Constraint("json_schema", json.dumps(SMALL)),
    "medium schema": Constraint("json_schema", json.dumps(MEDIUM)),
    "large schema": Constraint("json_schema", json.dumps(LARGE)),
    "date": Constraint("regex", "[0-9]{4}-[0-9]{2}-[0-9]{2}"),
    "sentence": Constraint("regex", "[A-Z][^.!?]{10,300}[.!?]"),
    "any text": Constraint("regex", r"(.|\n){1,200}"),
    "100 choices": Constraint("choice", json.dumps([f"option {n * 7919 % 10007}" for n in range(100)])),
    "10,000 choices": Constraint("choice", json.dumps([f"option {n * 7919 % 100003}" for n in range(10_000)])),
    "states": Constraint("regex", ".*[ab].{14}[cd].{14}[ef]"),
    "counts": Constraint("regex", "(a{1,500}){1,500}"),
}

Output = tuple[Callable[[], Any], Callable[[int], bool]]
"""An output under a constraint: fills its mask as packed bits; takes a token, and says whether the output ends."""
Library = Callable[[Constraint], Callable[[], Output]]
"""Compiles a constraint; the result starts outputs under it."""


def make_tokens(count: int) -> list[bytes]:
    rng = random.Random(0)
    letters = "bcdfghjklmnprstvwz", "aeiou"
    tokens = dict.fromkeys([bytes([byte]) for byte in range(256)])
    tokens |= dict.fromkeys((a + b).encode() for a in '"{}[]:,.\\/ \n-' for b in '"{}[]:,.\\/ \n-')
    while len(tokens) < count:
        word = "".join(rng.choice(letters[n % 2]) for n in range(rng.randint(2, 9)))
        if rng.random() < 0.2:
            word = "".join(chr(rng.randint(0x4E00, 0x9FA0)) for _ in range(rng.randint(1, 3)))
        tokens[(rng.choice(["", " ", " ", '"']) + rng.choice([word, word.capitalize()])).encode()] = None
    return list(tokens)[:count]


def llguidance_library(tokens: list[bytes]) -> Library:
    import llguidance

    tokenizer = llguidance.LLTokenizer(Vocabulary(tokens))
    limits = llguidance.LLParserLimits(**LIMITS)

    def compile_one(constraint: Constraint) -> Callable[[], Output]:
        matcher = llguidance.LLMatcher(tokenizer, to_lark(constraint), limits=limits, log_level=0)

        def start() -> Output:
            output = matcher.deep_copy()
            return output.compute_bitmask, lambda token: not output.consume_token(token) or output.is_stopped()

        return start

    return compile_one


def xgrammar_library(tokens: list[bytes]) -> Library:
    import xgrammar

    info = xgrammar.TokenizerInfo([*tokens, b"<end>"], vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[len(tokens)])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    mask = xgrammar.allocate_token_bitmask(1, len(tokens) + 1)

    def compile_one(constraint: Constraint) -> Callable[[], Output]:
        if constraint.kind == "json_schema":
            grammar = compiler.compile_json_schema(constraint.source)
        else:
            is_regex = constraint.kind == "regex"
            grammar = compiler.compile_regex(constraint.source if is_regex else "|".join(json.loads(constraint.source)))

        def start() -> Output:
            output = xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=True)

            def fill() -> Any:
                output.fill_next_token_bitmask(mask, 0)
                return mask.numpy()

            return fill, lambda token: not output.accept_token(token) or output.is_terminated()

        return start

    return compile_one


def measure(library: Library, constraint: Constraint, vocabulary: int, seconds: float) -> tuple[float, list[float]]:
    """Milliseconds to compile, and to fill each mask of random outputs. Stops after so many seconds."""
    begun = time.perf_counter()
    start = library(constraint)
    compiling = time.perf_counter() - begun
    masks: list[float] = []
    rng, is_over = random.Random(0), True
    deadline = time.perf_counter() + seconds
    while len(masks) < STEPS and time.perf_counter() < deadline:
        if is_over:
            fill, accept = start()
        before = time.perf_counter()
        bits = fill()
        masks.append(1e3 * (time.perf_counter() - before))
        allowed = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little", count=vocabulary).nonzero()[0]
        is_over = not len(allowed) or accept(int(rng.choice(allowed)))
    return 1e3 * compiling, masks


LIBRARIES = {"llguidance": llguidance_library, "xgrammar": xgrammar_library}


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--vocabulary", type=int, default=150_000, help="tokens of the vocabulary (%(default)s)")
    add("--seconds", type=float, default=10.0, help="most time for the outputs of one constraint (%(default)s)")
    add("--library", action="append", help="only this library; can be repeated")


def run(options: argparse.Namespace, report: Report) -> int:
    tokens = make_tokens(options.vocabulary)
    for name, prepare in LIBRARIES.items():
        if options.library and name not in options.library:
            continue
        try:
            library = prepare(tokens)
        except ImportError:
            report.line(f"{name} is not installed.")
            continue
        figures = report.figures[name] = {}
        for title, constraint in CASES.items():
            compiling, masks = measure(library, constraint, options.vocabulary, options.seconds)
            p50, p99 = map(float, np.percentile(masks, [50, 99]))
            figures[title] = {"compile_ms": compiling, "mask_ms": {"p50": p50, "p99": p99, "max": max(masks)}}
        report.line(f"{name}, {options.vocabulary} tokens: milliseconds")
        head = ["constraint", "compile", "p50", "p99", "max"]
        report.table([head, *([title, *shown(one)] for title, one in figures.items())])
    return 0


def shown(figures: dict[str, Any]) -> list[str]:
    return [f"{figures['compile_ms']:.1f}", *(f"{figure:.3f}" for figure in figures["mask_ms"].values())]
