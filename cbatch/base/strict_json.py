"""Reads JSON more strictly than Python does, so that whatever it returns can be written again as valid JSON."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from itertools import chain
from typing import Any

from cbatch.base.errors import RequestError, invalid_row

MAX_DEPTH = 100
"""Deeper than any real row, and well below the depth at which Python's own JSON encoder fails."""

MAX_CONTAINERS = 100_000
"""Lists and objects of a value. Each takes up to a hundred times the memory of its brackets."""

MAX_NAMES = 300_000
"""Names in objects, each of which takes as much time as several values."""

MAX_VALUES = 2_000_000
"""Values in lists and objects, more than the token ids that fit in any context."""

_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


class TooManyValues(ValueError):
    """JSON would take many times as much memory as its text."""


def parse_json_object(text: str, where: str, what: str) -> dict[str, Any]:
    """Reads a JSON object. Of duplicate keys the last one wins; lone surrogates become U+FFFD.

    Refuses NaN, Infinity, numbers that overflow or have too many digits, deep nesting and too many values.

    where: begins each error message, such as “line 3”
    what:  what the object is to be, such as “a row”

    Raises RequestError: `invalid_json`, or `invalid_row` if the value is not an object or has too many values.
    """
    try:
        value = parse_json_value(text)
    except json.JSONDecodeError as error:
        line = f" line {error.lineno}," if error.lineno > 1 else ""
        raise RequestError("invalid_json", f"{where},{line} column {error.colno}: {error.msg}") from None
    except TooManyValues as error:
        raise invalid_row(f"{where}: {what} has {error}") from None
    except ValueError as error:
        reason = "a number has too many digits" if "digits" in str(error) else str(error)
        raise RequestError("invalid_json", f"{where}: {reason}") from None
    if not isinstance(value, dict):
        raise invalid_row(f"{where}: {what} is a JSON object, not {json_type(value)}")
    if "\\u" in text and ("\\ud" in text or "\\uD" in text):  # perhaps lone surrogates, in keys or values
        encoded = json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass")
        fields: dict[str, Any] = json.loads(encoded.decode("utf-16", "replace"))
        return fields
    return value


def parse_json_value(text: str) -> Any:
    """Reads a JSON value, which may hold lone surrogates, with the same strictness otherwise. Raises ValueError."""
    _check_size(text)
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if is_too_deep(text, value):
        raise ValueError("nested too deeply")
    return value


def json_at(text: str, at: int) -> tuple[Any, int] | None:
    """The value that begins at a place of a text, and where it ends. None if there is none."""
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None


def whole_json(text: str) -> tuple[Any] | None:
    """The value of a text that is JSON with nothing but white space around it, in a tuple of one. None otherwise."""
    text = text.strip()
    parsed = json_at(text, 0)
    return (parsed[0],) if parsed and parsed[1] == len(text) else None


def is_too_deep(text: str, value: Any) -> bool:
    """Whether the value of a JSON text is nested deeper than MAX_DEPTH."""
    return text.count("[") + text.count("{") > MAX_DEPTH and _depth(value) > MAX_DEPTH


def json_type(value: Any) -> str:
    """The kind of a JSON value, for messages: “a string”, “a list”, “null”."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    names: dict[type, str] = {str: "a string", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value)) or f"a {type(value).__name__}"


def _check_size(text: str) -> None:
    if len(text) <= MAX_CONTAINERS:
        return
    limits = (
        ("[{", MAX_CONTAINERS, "lists and objects"),
        (":", MAX_NAMES, "names"),
        (",", MAX_VALUES, "values"),
    )
    if all(sum(map(text.count, marks)) <= most for marks, most, _ in limits):
        return  # nearly always, even if strings count
    found: Counter[str] = Counter()
    start = 0
    for string in chain(_STRING.finditer(text), [None]):  # counts what stands between strings
        stop = string.start() if string else len(text)
        for marks, most, what in limits:
            found[what] += sum(text.count(mark, start, stop) for mark in marks)
            if found[what] > most:
                raise TooManyValues(f"more than {most:,} {what}, the most that it may have")
        start = string.end() if string else stop


def _depth(value: Any) -> int:
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, list | dict)]:
        depth += 1
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
    return depth


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        is_constant = text[-1].isalpha()
        raise ValueError(f"{text} is not a JSON value" if is_constant else f"the number {text[:40]} is too large")
    return value


_DECODER = json.JSONDecoder(parse_constant=_finite_float, parse_float=_finite_float)


def referenced(schema: Any, reference: str) -> Any:
    """The schema that a reference inside the document names; None for another."""
    if not reference.startswith("#"):
        return None
    for name in filter(None, reference[1:].split("/")):
        key = name.replace("~1", "/").replace("~0", "~")
        schema = schema.get(key) if isinstance(schema, dict) else None
    return schema
