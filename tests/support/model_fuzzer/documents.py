"""Damage to JSON documents and to bytes: a mutation is drawn from a table, and what it is made of at random."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import numpy as np

DEEP = "a value 100,000 lists deep"
TWICE = "\ue000"
"""Begins a key that gets the name of another one in the file, so that the file has this name twice."""

ODD: list[Any] = [
    None, True, False, -1, 0, 1, 2, 3, 7, 48, 64, 2**31, 2**40, 2**63, 10**30, -(10**30), 10**5000, 0.5, -0.0, 1e308,
    5e-324, math.nan, math.inf, "", "x", "128", "\ud800", "\x1b[31mred\x1b[0m\x07", "\x00", "\u202e\x9b", "../../etc",
    "/dev/zero", "a" * 100_000, [], [0], [1, 2], [2**40, 2**40], [-1, 10**30], [None, "x"], [[1], [2]], [0] * 10_000,
    {}, {"a": 1}, {"format": ["x"]}, {"": {"": {"": []}}}, {"\x1b[31m": 1}, DEEP,
]  # fmt: skip
"""Wrong values that a file may hold instead."""

NUMBERS = (0, 1, 2, 3, 7, 48, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)
"""New values of a length or a number of a binary file."""

Generator = np.random.Generator


def pick(generator: Generator, values: Any) -> Any:
    """A copy of one of the values: what changes it must not change what the next model gets."""
    return deepcopy(values[int(generator.integers(len(values)))])


def damaged_document(document: Any, generator: Generator, extra: dict[str, list[Any]] | None = None) -> bytes:
    """The bytes of a damaged JSON file. extra: keys that the file may have besides, with values for them"""
    changed = deepcopy(document)
    for _ in range(int(generator.integers(1, 3))):
        if extra and generator.random() < 0.4:
            key = pick(generator, list(extra))
            if isinstance(changed, dict):
                changed[key] = pick(generator, extra[key] if generator.random() < 0.6 else ODD)
        elif isinstance(changed, dict | list) and changed:
            _change_value(changed, generator)
    content = to_bytes(changed)
    return damaged_text(content, generator) if generator.random() < 0.2 else content


def to_bytes(value: Any) -> bytes:
    text = _dumped(value).replace(json.dumps(TWICE)[1:-1], "")
    return text.replace(json.dumps(DEEP), "[" * 100_000 + "]" * 100_000).encode()


def _dumped(value: Any) -> str:
    try:
        return json.dumps(value)
    except ValueError:  # an integer with more digits than Python prints
        return json.dumps(_with_short_integers(value)).replace('"10**5000"', "1" + "0" * 5000)


def _with_short_integers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_short_integers(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_with_short_integers(one) for one in value]
    return "10**5000" if value == 10**5000 else value


def _change_value(document: Any, generator: Generator) -> None:
    """Changes one value somewhere in a document, which is not empty; mostly near its top."""
    place = document
    while True:
        key = pick(generator, list(place) if isinstance(place, dict) else range(len(place)))
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or generator.random() < 0.2:
            break
        place = inner
    match int(generator.integers(10)):
        case 0:
            del place[key]
        case 1:
            place[key] = pick(generator, [[inner], {"a": inner}])
        case 2 if isinstance(place, dict):
            names = [key.upper(), key[:-1], key + "s", "", "\x00" + key, "\x1b" + key, "k" * 100_000]
            place[pick(generator, names)] = place.pop(key)
        case 3 if isinstance(place, dict):
            place[TWICE + key] = pick(generator, ODD)
        case 4 if isinstance(inner, int | float) and not isinstance(inner, bool) and abs(inner) < 1e300:
            place[key] = pick(generator, [-inner, inner + 1, inner * 2, inner * 10**9, inner * 0.5, str(inner)])
        case 5:
            other = pick(generator, list(place) if isinstance(place, dict) else range(len(place)))
            place[key], place[other] = place[other], place[key]
        case _:
            place[key] = pick(generator, ODD)


Mutation = Callable[[bytes, int, int, Generator], bytes]
"""Changes a file's bytes, given a place and a size for it."""

_BYTES: list[Mutation] = [
    lambda data, at, size, generator: data[:at] + generator.bytes(1) + data[at + 1 :],
    lambda data, at, size, generator: data[:at] + struct.pack("<Q", pick(generator, NUMBERS)) + data[at + 8 :],
    lambda data, at, size, generator: data[:at] + generator.bytes(4) + data[at + 4 :],
    lambda data, at, size, generator: data[:at] + data[at + size :],
    lambda data, at, size, generator: data[:at] + data[at : at + size] * 2 + data[at + size :],
    lambda data, at, size, generator: data[:at],
    lambda data, at, size, generator: data + bytes(size),
]
_INSERTED = (b"\xff\xfe\x80", b"\0" * 5, b"\x1b[2J\x07", b"}{ x")
_WHOLE = (
    b"", b"[]", b"null", b"1", b'"x"', b"{}", b"[" * 100_000, b'{"a":' * 50_000, b"\0" * 1000, b"{" * 9
)  # fmt: skip
_TEXT: list[Mutation] = [
    *_BYTES,
    lambda data, at, size, generator: pick(generator, _WHOLE),
    lambda data, at, size, generator: data[:at] + pick(generator, _INSERTED) + data[at:],
    lambda data, at, size, generator: data + b"}{ x",
    lambda data, at, size, generator: b"\xef\xbb\xbf" + data,
    lambda data, at, size, generator: data.decode("utf-8", "replace").encode("utf-16"),
    lambda data, at, size, generator: b" " * 3_000_000 + data,
]


def damaged_bytes(
    content: bytes, generator: Generator, stop: int | None = None, mutations: Sequence[Mutation] = _BYTES
) -> bytes:
    """Damage to the bytes of a file, most of it before `stop`."""
    for _ in range(int(generator.integers(1, 4))):
        at = int(generator.integers(min(len(content), stop or len(content)) + 1))
        content = pick(generator, mutations)(content, at, int(generator.integers(1, 100)), generator)
    return content


def damaged_text(content: bytes, generator: Generator) -> bytes:
    """Damage to the bytes of a file of text."""
    return damaged_bytes(content, generator, mutations=_TEXT)
