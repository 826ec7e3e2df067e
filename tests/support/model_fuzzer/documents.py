"""Damage to JSON documents: to one value, to one key, or to the bytes of the whole file."""

from __future__ import annotations

import json
import math
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
"""What a file may say instead of what it should."""

Generator = np.random.Generator


def pick(generator: Generator, values: Any) -> Any:
    """A copy of one of the values: what changes it must not change what the next model gets."""
    return deepcopy(values[int(generator.integers(len(values)))])


def brief(value: Any) -> str:
    text = ascii(value) if not isinstance(value, int) or abs(value) < 10**40 else "an integer of many digits"
    return text if len(text) <= 60 else text[:57] + "..."


def damaged_document(
    document: Any, generator: Generator, extra: dict[str, list[Any]] | None = None
) -> tuple[bytes, str]:
    """The bytes of a damaged JSON file, and what is wrong with it.

    extra: keys that the file may have besides, with values for them
    """
    changed, words = deepcopy(document), []
    for _ in range(int(generator.integers(1, 3))):
        if extra and generator.random() < 0.4:
            key = pick(generator, list(extra))
            value = pick(generator, extra[key] if generator.random() < 0.6 else ODD)
            if isinstance(changed, dict):
                changed[key] = value
                words.append(f"{key} = {brief(value)}")
        elif isinstance(changed, dict | list) and changed:
            words.append(_change_value(changed, generator))
    content = to_bytes(changed)
    if generator.random() < 0.2:
        content, how = damaged_text(content, generator)
        words.append(how)
    return content, "; ".join(words)


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


def _change_value(document: Any, generator: Generator) -> str:
    """Changes one value somewhere in a document, which is not empty; mostly near its top."""
    place, path = document, ""
    while True:
        key = pick(generator, list(place) if isinstance(place, dict) else range(len(place)))
        path += f".{key}" if isinstance(place, dict) else f"[{key}]"
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or generator.random() < 0.2:
            break
        place = inner
    path = brief(path[1:])
    match int(generator.integers(10)):
        case 0:
            del place[key]
            return f"without {path}"
        case 1:
            place[key] = [inner]
            return f"{path} in a list"
        case 2:
            place[key] = {"a": inner}
            return f"{path} in an object"
        case 3 if isinstance(place, dict):
            name = pick(generator, [key.upper(), key[:-1], key + "s", "", "\x00" + key, "\x1b" + key, "k" * 100_000])
            place[name] = place.pop(key)
            return f"{path} is called {brief(name)}"
        case 4 if isinstance(place, dict):
            place[TWICE + key] = value = pick(generator, ODD)
            return f"{path} twice, then {brief(value)}"
        case 5 if isinstance(inner, int | float) and not isinstance(inner, bool) and abs(inner) < 1e300:
            place[key] = value = pick(generator, [-inner, inner + 1, inner * 2, inner * 10**9, inner * 0.5, str(inner)])
            return f"{path} = {brief(value)}"
        case 6:
            other = pick(generator, list(place) if isinstance(place, dict) else range(len(place)))
            place[key], place[other] = place[other], place[key]
            return f"{path} changed places with {brief(other)}"
        case _:
            place[key] = value = pick(generator, ODD)
            return f"{path} = {brief(value)}"


def damaged_text(content: bytes, generator: Generator) -> tuple[bytes, str]:
    """Damage to the bytes of a file of text."""
    place = int(generator.integers(len(content) + 1))
    match int(generator.integers(12)):
        case 0:
            whole = [
                b"",
                b"[]",
                b"null",
                b"1",
                b'"x"',
                b"{}",
                b"[" * 100_000,
                b'{"a":' * 50_000,
                b"\0" * 1000,
                b"{" * 9,
            ]
            return (content := pick(generator, whole)), f"it is {len(content)} bytes: {brief(content[:40])}"
        case 1:
            return b"\xef\xbb\xbf" + content, "a BOM"
        case 2:
            return content.decode("utf-8", "replace").encode("utf-16"), "it is UTF-16"
        case 3:
            return content[:place], f"cut off at {place}"
        case 4:
            return content[:place] + b"\xff\xfe\x80" + content[place:], f"not UTF-8 at {place}"
        case 5:
            return content[:place] + b"\0" * 5 + content[place:], f"NUL at {place}"
        case 6:
            return content + b"}{ x", "more behind its end"
        case 7:
            return b" " * 3_000_000 + content, "3 MB of spaces"
        case 8:
            return content[:place] + b"\x1b[2J\x07" + content[place:], f"control characters at {place}"
        case 9:
            data = bytearray(content or b"x")
            for _ in range(int(generator.integers(1, 5))):
                data[int(generator.integers(len(data)))] = int(generator.integers(256))
            return bytes(data), "changed bytes"
        case 10:
            size = int(generator.integers(1, 200))
            return content[:place] + content[place : place + size] * 2 + content[place + size :], f"doubled at {place}"
        case _:
            size = int(generator.integers(1, 200))
            return content[:place] + content[place + size :], f"cut out at {place}"
