"""The work: outputs that repeat their prompts, outputs that repeat by chance only, and questions to the demo model.

A script says what comes after a token, whatever came before it. So each token of a text that is copied occurs in one
request only, and once in its prompt: the output goes along the prompt, and leaves it for tokens that are nowhere else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cbatch import SteppingEngine
from scripts.benchmarks.harness import ROOT
from scripts.benchmarks.speculation.model import Script

SHARE = 0.7
"""Of a prompt, what a rewriting repeats; of an output, what is extracted from its prompt."""

SYMBOLS = 16
"""Tokens of each random text, so few that its last two have often occurred before and say nothing about the next."""

RANDOM_PROMPT = 16
ALONE = 4
"""Requests that run one after the other, if one is to run at a time."""

DEMO_TOKENS = 128
"""Most tokens of an answer of the demo model."""


@dataclass(frozen=True)
class Work:
    """Requests.

    lengths: the most tokens of each output
    at_once: how many of the requests run at a time
    script:  what the model says; None: what it wants
    outputs: what each request gets; None if that is not known before
    """

    prompts: list[list[int]]
    lengths: list[int]
    at_once: int
    script: Script | None = None
    outputs: list[list[int]] | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(len(prompt) + length for prompt, length in zip(self.prompts, self.lengths, strict=True))

    @property
    def groups(self) -> Iterator[list[tuple[list[int], int]]]:
        """Prompts and lengths of the requests that run at a time."""
        requests = list(zip(self.prompts, self.lengths, strict=True))
        for first in range(0, len(requests), self.at_once):
            yield requests[first : first + self.at_once]


@dataclass(frozen=True)
class Copying:
    """How texts are copied: tokens of a prompt, and of what is copied at a stretch on average."""

    vocabulary: int
    tokens: int
    span: int


def rewriting(copying: Copying, at_once: int, seed: int) -> Work:
    """Each output goes through its whole prompt, and replaces a stretch after each that it keeps."""
    rng, fresh = _chance(copying, seed)

    def output_of(text: list[int]) -> list[int]:
        output: list[int] = []
        while len(output) < len(text):
            kept, added = _lengths(rng, copying.span, len(text) - len(output))
            output += text[len(output) : len(output) + kept] + [next(fresh) for _ in range(added)]
        return output

    texts = [[next(fresh) for _ in range(copying.tokens)] for _ in range(max(at_once, ALONE))]
    return _scripted(texts, [output_of(text) for text in texts], at_once, copying.vocabulary, fresh)


def extraction(copying: Copying, at_once: int, seed: int) -> Work:
    """Each output has stretches from different places of a prompt twice as long, each with new tokens behind it."""
    rng, fresh = _chance(copying, seed)

    places = np.arange(0, max(2 * copying.tokens - 3 * copying.span // 2, 1), 2 * copying.span)  # too far to overlap

    def output_of(text: list[int]) -> list[int]:
        output: list[int] = []
        for place in rng.permutation(places):
            kept, added = _lengths(rng, copying.span, copying.tokens // 2 - len(output))
            output += text[place : place + kept] + [next(fresh) for _ in range(added)]
        return output

    texts = [[next(fresh) for _ in range(2 * copying.tokens)] for _ in range(max(at_once, ALONE))]
    return _scripted(texts, [output_of(text) for text in texts], at_once, copying.vocabulary, fresh)


def random_text(vocabulary: int, tokens: int, at_once: int, seed: int) -> Work:
    """Outputs of `tokens` tokens, each drawn from the few of its request, whatever came before."""
    rng, count = np.random.default_rng(seed), max(at_once, ALONE)
    if count * SYMBOLS > vocabulary:
        raise ValueError(f"{count} requests need {count * SYMBOLS} tokens; the vocabulary has {vocabulary}.")
    drawn = rng.integers(SYMBOLS, size=(count, RANDOM_PROMPT + tokens, SYMBOLS))

    def script(read: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        request, symbol = read // SYMBOLS, read % SYMBOLS
        told: NDArray[np.int64] = request * SYMBOLS + drawn[request, positions, symbol]
        return told

    prompts = [(SYMBOLS * n + rng.integers(SYMBOLS, size=RANDOM_PROMPT)).tolist() for n in range(count)]
    outputs = [_follow(script, prompt, tokens) for prompt in prompts]
    return Work(prompts, [tokens] * count, at_once, script, outputs)


def demo_questions(engine: SteppingEngine, file: Path = ROOT / "scripts" / "prompts.jsonl") -> Work:
    """Questions to the demo model, one after the other."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    prompts = [engine.encode(row["prompt"] if "prompt" in row else {"messages": row["messages"]}) for row in rows]
    return Work(prompts, [DEMO_TOKENS] * len(prompts), at_once=1)


def _chance(copying: Copying, seed: int) -> tuple[np.random.Generator, Iterator[int]]:
    """A generator for lengths, and all tokens in a random order."""
    rng = np.random.default_rng(seed)
    return rng, iter(rng.permutation(copying.vocabulary).tolist())


def _lengths(rng: np.random.Generator, span: int, left: int) -> tuple[int, int]:
    """Tokens of a stretch that is copied, and of the new ones after it; together at most as many as are left."""
    kept = int(rng.integers(max(span // 2, 1), span + span // 2 + 1))
    both = min(round(kept / SHARE), left)
    kept = round(both * SHARE)
    return kept, both - kept


def _scripted(
    texts: list[list[int]], outputs: list[list[int]], at_once: int, vocabulary: int, fresh: Iterator[int]
) -> Work:
    """The work whose prompts are the texts, each with a last token that is nowhere else."""
    prompts = [[*text, next(fresh)] for text in texts]
    following = np.arange(vocabulary)
    for prompt, output in zip(prompts, outputs, strict=True):
        for token, after in pairwise([prompt[-1], *output]):
            following[token] = after
    return Work(prompts, list(map(len, outputs)), at_once, lambda read, positions: following[read], outputs)


def _follow(script: Script, prompt: list[int], length: int) -> list[int]:
    """A script's output after a prompt."""
    text = list(prompt)
    for _ in range(length):
        text.append(int(script(np.array(text[-1:]), np.array([len(text) - 1]))[0]))
    return text[len(prompt) :]
