"""Kinds of settings in JSON files: their types, and the ranges of their numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cbatch.base.model_files import InvalidFile

_MOST_SHOWN, _LONGEST = 60, 2**14
"""Characters of a value that a sentence repeats, and numbers of a list that layers have one each of."""


_PATTERN = re.compile(r"[^*+?{}]{0,256}(?:[^*+?{})][*+?][^*+?{}]{0,256}){0,2}")
"""Repeats two characters or sets, and no groups: others take time without end on a name of a hundred characters."""


class Kind(NamedTuple):
    """A kind of value in words, and the test of one."""

    words: str
    accepts: Callable[[Any], bool]


FLAG = Kind("true or false", lambda value: isinstance(value, int) and value in (0, 1))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))


def whole(least: int, most: int, *, listed: bool = False) -> Kind:
    """A whole number. listed: or a list of them, of which layers have one each"""

    def is_one(value: Any) -> bool:
        return type(value) is int and least <= value <= most

    def accepts(value: Any) -> bool:
        if listed and isinstance(value, list):
            return len(value) <= _LONGEST and all(map(is_one, value))
        return is_one(value)

    return Kind(f"a whole number from {least} to {most}{', or a list of them' if listed else ''}", accepts)


def number(least: float, most: float) -> Kind:
    words = f"a number from {_plain(least)} to {_plain(most)}"
    return Kind(words, lambda value: type(value) in (int, float) and least <= value <= most)


def text(longest: int = 256) -> Kind:
    return Kind(
        f"a text of at most {longest} characters", lambda value: isinstance(value, str) and len(value) <= longest
    )


def listed(longest: int, kind: Kind, plural: str) -> Kind:
    """A list of values of a kind. plural: what they are called"""
    return Kind(
        f"a list of at most {longest} {plural}",
        lambda value: isinstance(value, list) and len(value) <= longest and all(map(kind.accepts, value)),
    )


def patterns(kind: Kind) -> Kind:
    """An object with a value for each pattern of names, which are regular expressions with few repetitions."""
    return Kind(
        f"an object that has {kind.words} for each pattern, which repeats two characters at most",
        lambda value: (
            isinstance(value, dict)
            and all(_PATTERN.fullmatch(name) and kind.accepts(one) for name, one in value.items())
        ),
    )


def either(first: Kind, second: Kind) -> Kind:
    return Kind(f"{first.words}, or {second.words}", lambda value: first.accepts(value) or second.accepts(value))


FINITE = Kind("a number", lambda value: type(value) in (int, float) and abs(value) < math.inf)


def check_settings(settings: Mapping[str, Any], kinds: Mapping[str, Kind], path: Path, inside: str = "") -> None:
    """Raises InvalidFile for the first setting that is not of its kind; null is what is not there.

    inside: the names of the objects that hold the settings, such as `text_config.`
    """
    for name, value in settings.items():
        if value is not None and name in kinds and not kinds[name].accepts(value):
            raise InvalidFile(f"{path}: {inside}{name} must be {kinds[name].words}, not {shown(value)}.")


def shown(value: Any) -> str:
    """A value for a sentence, cut where it is long."""
    if isinstance(value, int) and value.bit_length() > 200:
        return "a number of more than 60 digits"
    if isinstance(value, str | list) and len(value) > _MOST_SHOWN:
        text = repr(value[:_MOST_SHOWN])[:_MOST_SHOWN]
        return f"{text}… ({len(value)} {'characters' if isinstance(value, str) else 'values'})"
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def _plain(value: float) -> str:
    return f"{value:.0f}" if value == int(value) and abs(value) < 10**12 else f"{value:g}"
