"""JSON in the text of models and rows. No function raises."""

from __future__ import annotations

import json
from typing import Any, NoReturn


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


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
