"""What a setting of a JSON file may be: its type, and the range of its numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cbatch.base.model_files import InvalidFile

_MOST_SHOWN, _LONGEST = 60, 2**14
"""Characters of a value that a sentence repeats, and numbers of a list that layers have one each of."""


_PATTERN = re.compile(r"[^*+?{}]{0,256}(?:[^*+?{})][*+?][^*+?{}]{0,256}){0,2}")
"""Repeats two characters or sets, and no groups: others take time without end on a name of a hundred characters."""


class Kind(Protocol):
    """As text, it says what a value has to be."""

    def accepts(self, value: Any) -> bool: ...


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number. is_listed: or a list of them, of which layers have one each"""

    least: int
    most: int
    is_listed: bool = False

    def accepts(self, value: Any) -> bool:
        if self.is_listed and isinstance(value, list):
            return len(value) <= _LONGEST and all(map(self._accepts_one, value))
        return self._accepts_one(value)

    def _accepts_one(self, value: Any) -> bool:
        return type(value) is int and self.least <= value <= self.most

    def __str__(self) -> str:
        return f"a whole number from {self.least} to {self.most}{', or a list of them' if self.is_listed else ''}"


@dataclass(frozen=True, slots=True)
class Number:
    least: float
    most: float

    def accepts(self, value: Any) -> bool:
        return type(value) in (int, float) and self.least <= value <= self.most

    def __str__(self) -> str:
        return f"a number from {_plain(self.least)} to {_plain(self.most)}"


@dataclass(frozen=True, slots=True)
class Numbers:
    """A list of numbers."""

    longest: int

    def accepts(self, value: Any) -> bool:
        return isinstance(value, list) and len(value) <= self.longest and all(map(_is_finite, value))

    def __str__(self) -> str:
        return f"a list of at most {self.longest} numbers"


@dataclass(frozen=True, slots=True)
class Text:
    longest: int = 256

    def accepts(self, value: Any) -> bool:
        return isinstance(value, str) and len(value) <= self.longest

    def __str__(self) -> str:
        return f"a text of at most {self.longest} characters"


@dataclass(frozen=True, slots=True)
class Texts:
    """A list of short texts."""

    longest: int

    def accepts(self, value: Any) -> bool:
        return isinstance(value, list) and len(value) <= self.longest and all(map(Text().accepts, value))

    def __str__(self) -> str:
        return f"a list of at most {self.longest} names"


class Flag:
    def accepts(self, value: Any) -> bool:
        return isinstance(value, int) and value in (0, 1)

    def __str__(self) -> str:
        return "true or false"


class Object:
    def accepts(self, value: Any) -> bool:
        return isinstance(value, dict)

    def __str__(self) -> str:
        return "an object"


@dataclass(frozen=True, slots=True)
class Patterns:
    """An object with a value for each pattern of names, which are regular expressions with few repetitions."""

    value: Kind

    def accepts(self, value: Any) -> bool:
        return isinstance(value, dict) and all(
            _PATTERN.fullmatch(name) and self.value.accepts(one) for name, one in value.items()
        )

    def __str__(self) -> str:
        return f"an object that has {self.value} for each pattern, which repeats two characters at most"


@dataclass(frozen=True, slots=True)
class Either:
    first: Kind
    second: Kind

    def accepts(self, value: Any) -> bool:
        return self.first.accepts(value) or self.second.accepts(value)

    def __str__(self) -> str:
        return f"{self.first}, or {self.second}"


def check_settings(settings: Mapping[str, Any], kinds: Mapping[str, Kind], path: Path, inside: str = "") -> None:
    """Raises InvalidFile for the first setting that is not of its kind; null is what is not there.

    inside: the names of the objects that hold the settings, such as `text_config.`
    """
    for name, value in settings.items():
        if value is not None and name in kinds and not kinds[name].accepts(value):
            raise InvalidFile(f"{path}: {inside}{name} must be {kinds[name]}, not {shown(value)}.")


def shown(value: Any) -> str:
    """A value for a sentence, cut where it is long."""
    if isinstance(value, int) and value.bit_length() > 200:
        return "a number of more than 60 digits"
    if isinstance(value, str | list) and len(value) > _MOST_SHOWN:
        text = repr(value[:_MOST_SHOWN])[:_MOST_SHOWN]
        return f"{text}… ({len(value)} {'characters' if isinstance(value, str) else 'values'})"
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def _plain(number: float) -> str:
    return f"{number:.0f}" if number == int(number) and abs(number) < 10**12 else f"{number:g}"


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < math.inf
