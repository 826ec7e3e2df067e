"""The fewest tokens that text of a form can have, so that a form that no budget has room for is refused.

It is a bound: no output has fewer. What is not understood of a pattern makes it 0, which refuses nothing.
"""

from __future__ import annotations

import json
import re
import re._parser as parser  # type: ignore[import-not-found]  # the tree of a pattern is in no public module
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from cbatch.base.params import Constraint

_DIFFERS = re.compile(r"\[\[|&&|--|~~|\\[<>bBzZ]|\(\?[a-zA-Z-]")
"""Signs that mean another thing in Rust's patterns than in Python's, and flags."""


_MOST_BYTES = 2**14
"""Of choices that are looked at; more make no bound."""


def fewest_tokens(constraint: Constraint, token_bytes: Sequence[bytes], enough: int) -> int:
    """Of choices and patterns; 0 for other forms. `enough`: a choice of so few tokens ends the search"""
    if constraint.kind == "choice":
        return _of_choices([choice.encode() for choice in json.loads(constraint.source)], set(token_bytes), enough)
    if constraint.kind != "regex" or _DIFFERS.search(constraint.source):
        return 0
    try:
        tree = parser.parse(constraint.source)
        shortest, used = tree.getwidth()[0], b"".join(_used(tree))
    except (re.error, ValueError, RecursionError, OverflowError):
        return 0
    longest = max((len(token) for token in token_bytes if not token.strip(used)), default=0)
    return -(-shortest // longest) if longest else 0


def _of_choices(choices: Iterable[bytes], tokens: Collection[bytes], enough: int) -> int:
    longest, fewest, left = max(map(len, tokens)), 0, _MOST_BYTES
    for text in sorted(choices, key=len):
        if fewest and (fewest <= enough or len(text) >= fewest * longest):
            break
        left -= len(text)
        if left < 0:
            return 0
        needed = [0]  # tokens of each beginning of the text
        for end in range(1, len(text) + 1):
            starts = range(max(end - longest, 0), end)
            needed.append(1 + min((needed[at] for at in starts if text[at:end] in tokens), default=len(text)))
        fewest = min(fewest or needed[-1], needed[-1])
    return fewest


def _used(tree: Iterable[Any]) -> Iterable[bytes]:
    """Bytes of the text that a pattern can match. Raises ValueError if they are not known."""
    for operation, value in tree:
        match str(operation):
            case "LITERAL":
                yield chr(value).encode()
            case "RANGE" if value[1] < 128:
                yield bytes(range(value[0], value[1] + 1))
            case "CATEGORY" if str(value) == "CATEGORY_DIGIT":
                yield b"0123456789"
            case "IN":
                yield from _used(value)
            case "MAX_REPEAT" | "MIN_REPEAT":
                yield from _used(value[2])
            case "SUBPATTERN":
                yield from _used(value[3])
            case "BRANCH":
                for branch in value[1]:
                    yield from _used(branch)
            case "AT":
                pass
            case _:
                raise ValueError(f"{operation} may match anything")
