"""A row of results as columns: those of the input beside those of the answer."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from cbatch.batch.row_check import CHECK
from cbatch.requests.row_keys import KEY_LENGTH

FIRST = ("index", "id")
"""Columns that come before those of the input."""

ANSWER = ("text", "finish_reason", "prompt_tokens", "completion_tokens", "total_tokens", "error_code", "error_message")
LAST = ("key",)

ALWAYS = (*FIRST, *ANSWER, *LAST)
"""Columns of every table of results. What only some answers have, such as `reasoning`, comes behind `ANSWER`."""

BOOKKEEPING = frozenset(ALWAYS) - {"id", "text"} | {"validation"}
"""Columns that say something about the run and not about the row: a further run does not carry them along."""

_KEY = re.compile(f"[0-9a-f]{{{KEY_LENGTH}}}")


def split_result(fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The columns of the answer in a row of results, and those of the input, which it has under `extra`."""
    answer = dict.fromkeys(ALWAYS) | dict(_plain(fields) if "custom_id" in fields else fields)
    answer.pop(CHECK, None)  # of the bytes of a line, which a table does not have
    extra = answer.pop("extra", None) or {}
    usage, error = answer.pop("usage", None) or {}, answer.pop("error", None) or {}
    answer |= usage
    answer |= {"error_code": error.get("code"), "error_message": error.get("message")}
    return answer, extra


def input_names(columns: Iterable[str], taken: Collection[str]) -> dict[str, str]:
    """The name that each column of the input gets beside columns whose names are taken: its own, if that is free.

    Else it is `input_NAME`, then `input_NAME_2` and so on.
    """
    names = list(columns)
    used = {*taken, *names}
    made = {}
    for name in names:
        if name not in taken:
            made[name] = name
            continue
        free, number = f"input_{name}", 2
        while free in used:
            free, number = f"input_{name}_{number}", number + 1
        used.add(free)
        made[name] = free
    return made


def is_result(columns: Mapping[str, Any]) -> bool:
    """Whether the columns of a row are those of a result of an earlier run."""
    index, key = columns.get("index"), columns.get("key")
    return isinstance(key, str) and _KEY.fullmatch(key) is not None and str(index).isdecimal()


def carried_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a result that a further run sees and carries along: its answer, and what was carried before."""
    if not _is_nested(columns):
        return {name: value for name, value in columns.items() if name not in BOOKKEEPING}
    answer, extra = split_result(columns)
    names = input_names(extra, answer)
    carried = {names[name]: value for name, value in extra.items()}
    return carried | {name: value for name, value in answer.items() if name not in BOOKKEEPING}


def earlier_error(columns: Mapping[str, Any]) -> str | None:
    """What an earlier run says is wrong with this row; None if it gave an answer."""
    answer = split_result(columns)[0] if _is_nested(columns) else columns
    if not (code := answer.get("error_code")):
        return None
    return f"it is an error of an earlier run ({code}: {answer.get('error_message')})"


def _is_nested(columns: Mapping[str, Any]) -> bool:
    """Whether a result comes from JSON Lines, and not from a table, which is flat already."""
    return "response" in columns or any(isinstance(columns.get(name), dict) for name in ("usage", "error"))


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A result line of the OpenAI Batch API as a plain row."""
    made = {name: value for name, value in fields.items() if name not in ("custom_id", "response")}
    made["id"] = fields["custom_id"]
    body = (fields.get("response") or {}).get("body") or {}
    if choices := body.get("choices"):
        first = choices[0]
        made["text"] = first["message"].get("content") if "message" in first else first.get("text")
        made |= {"finish_reason": first.get("finish_reason"), "usage": body.get("usage")}
        if len(choices) > 1:
            made["choices"] = choices
    return made
