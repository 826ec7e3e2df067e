"""Finds a short way to the end of a form: bytes after which the text so far is complete.

It is found by trying. A matcher over single bytes says in less than a microsecond which may come next, and takes back
what was tried. Each try follows what the form forces, and chooses where it does not: first what closes JSON, then what
the policy of the try prefers. So the way need not be the shortest, but it is one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

MAX_BYTES = 4096
"""Of a way. A form that needs more to end is not closed."""

IN_TEXT = 64
"""If more bytes than so many may come next, they are those of a free text, such as a string of JSON."""

FIRST_TRIES, RANDOM_TRIES = 2, 8
"""Random ones follow only if the others, which know better, find nothing."""

_CLOSES_TEXT, _CLOSES, _OPENS, _DIGITS = b'"a', b'}],":', b"[{", b"0123456789"

CACHE_SIZE = 4096
"""Sets of bytes whose best one is known: few of them occur in a form, again and again."""

_Choice = Callable[[bytes], int]
"""Chooses one of the bytes that may come next, which a bitmask says."""


def short_end(matcher: Any, most: int = MAX_BYTES) -> bytes | None:
    """The bytes of a short way from the matcher's position to the end of its form; None if none was found.

    matcher: over single bytes; its position stays
    most:    bytes of the way
    """
    best: bytes | None = None
    chooser = random.Random(0)
    first: list[_Choice] = [partial(_best, digits_first=True), partial(_best, digits_first=False)]
    tries = [*first, *[lambda mask: chooser.choice(bytes_in(mask))] * RANDOM_TRIES]
    for number, choose in enumerate(tries):
        if number == FIRST_TRIES and best is not None:
            break
        way = _try(matcher, most if best is None else len(best) - 1, choose)
        best = best if way is None else way
    return best


def _try(matcher: Any, most: int, choose: _Choice) -> bytes | None:
    way, is_alive = bytearray(), True
    while is_alive and len(way) <= most and not matcher.is_accepting():
        step = matcher.compute_ff_bytes()
        if not step:
            bitmask = matcher.compute_bitmask()
            step = bytes([choose(bitmask)]) if any(bitmask[:32]) else b""
        is_alive = bool(step) and matcher.try_consume_tokens(list(step)) == len(step)
        way += step if is_alive else b""
    is_found = is_alive and len(way) <= most and matcher.is_accepting()
    matcher.rollback(len(way))
    return bytes(way) if is_found else None


@lru_cache(CACHE_SIZE)
def bytes_in(bitmask: bytes) -> list[int]:
    """The bytes that may come next."""
    return [byte for byte in range(256) if bitmask[byte >> 3] >> (byte & 7) & 1]


@lru_cache(CACHE_SIZE)
def _best(bitmask: bytes, *, digits_first: bool) -> int:
    """A byte that closes JSON, else a digit or a punctuation mark, else a letter.

    digits_first: digits count before punctuation marks, and the first letter, not the last, counts
    """
    allowed = bytes_in(bitmask)
    others = [byte for byte in allowed if byte not in _OPENS] or allowed
    marks = [byte for byte in allowed if byte not in _OPENS and not chr(byte).isalnum()]
    closing = _CLOSES_TEXT if len(allowed) > IN_TEXT else _CLOSES
    order = [*closing, *_DIGITS, *marks] if digits_first else [*closing, *marks, *_DIGITS]
    return next((byte for byte in order if byte in allowed), min(others) if digits_first else max(others))
