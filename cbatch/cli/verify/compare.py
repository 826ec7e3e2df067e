"""Where a row of output that was made again differs from the one in a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from cbatch.batch.row_check import CHECK

OF_THE_MOMENT = frozenset(["cached_tokens", "ttft_s", "elapsed_s", "from_cache", CHECK])
"""Fields of --timings, which no two runs have alike, and what depends on them."""

OF_AN_OUTPUT = frozenset(
    ["text", "finish_reason", "reasoning", "tool_calls", "stop_reason", "token_ids", "logprobs"]
)  # fmt: skip
"""Fields that a row has of its first output."""

CROP = 40
"""Characters that are shown on either side of the first difference."""

Path = tuple[str | int, ...]


class Difference(NamedTuple):
    """The first place at which two rows differ.

    field:   its name, such as `choices[1].text`
    output:  number of the output that differs; None if what differs is of the whole row
    offset:  of the first character or token that differs; None if the field has neither
    unit:    what the offset counts: character or token
    token:   of a text, offset of the first token that differs, if both rows have token ids
    in_file, now: the values, or what stands around the first difference; null if there is no such field
    """

    field: str
    output: int | None
    offset: int | None
    unit: str | None
    token: int | None
    in_file: str
    now: str

    def __str__(self) -> str:
        place = "" if self.offset is None else f" from {self.unit} {self.offset} on"
        place += "" if self.token is None else f" (token {self.token})"
        return f"{self.field} differs{place}: {self.in_file} in the file, {self.now} now"


def content_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without what depends on the moment."""
    return {name: value for name, value in row.items() if name not in OF_THE_MOMENT}


def first_difference(stored: Mapping[str, Any], made: Mapping[str, Any]) -> Difference | None:
    """None if the rows are equal but for fields of --timings and the check."""
    stored, made = content_of(stored), content_of(made)
    path = _first_path(stored, made)
    if path is None:
        return None
    one, other = _at(stored, path), _at(made, path)
    offset = token = unit = None
    in_file, now = _cropped(_shown(one)), _cropped(_shown(other))
    if isinstance(one, str) and isinstance(other, str):
        unit, offset = "character", _common_length(one, other)
        in_file, now = (_shown(_around(text, offset)) for text in (one, other))
        token = _first_token(stored, made, path)
    elif len(path) > 1 and path[-2] == "token_ids":
        unit, offset = "token", int(path[-1])
    return Difference(_name(path), _output(path), offset, unit, token, in_file, now)


def _first_path(one: Any, other: Any) -> Path | None:
    """Where two values of JSON differ first, in the order of the first one."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in [*one, *(name for name in other if name not in one)]:
            if name not in one or name not in other:
                return (name,)
            if (path := _first_path(one[name], other[name])) is not None:
                return (name, *path)
        return None
    if isinstance(one, list) and isinstance(other, list):
        for place, (left, right) in enumerate(zip(one, other, strict=False)):
            if (path := _first_path(left, right)) is not None:
                return (place, *path)
        return None if len(one) == len(other) else (min(len(one), len(other)),)
    is_same = one == other and isinstance(one, bool) == isinstance(other, bool)
    return None if is_same else ()


def _at(value: Any, path: Path) -> Any:
    """The value at a path; None if there is none."""
    for step in path:
        try:
            value = value[step]
        except (KeyError, IndexError):
            return None
    return value


def _first_token(stored: Mapping[str, Any], made: Mapping[str, Any], path: Path) -> int | None:
    """The first token that differs, if the rows have token ids beside the place, or above it."""
    for length in range(len(path) - 1, -1, -1):
        ids = [_at(row, (*path[:length], "token_ids")) for row in (stored, made)]
        if all(isinstance(each, list) for each in ids):
            return _common_length(*ids)
    return None


def _common_length(one: Any, other: Any) -> int:
    """How many items two sequences have in common at their beginning."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))


def _output(path: Path) -> int | None:
    if "choices" in path[:-1]:
        number = path[path.index("choices") + 1]
        return number if isinstance(number, int) else None
    return 0 if path[0] in OF_AN_OUTPUT else None


def _name(path: Path) -> str:
    name = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return name.removeprefix(".")


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _around(text: str, offset: int) -> str:
    start, stop = max(offset - CROP, 0), offset + CROP
    return ("…" if start else "") + text[start:stop] + ("…" if stop < len(text) else "")


def _cropped(text: str) -> str:
    return text if len(text) <= 2 * CROP else f"{text[: 2 * CROP]}…"
