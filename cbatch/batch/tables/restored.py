"""The lines of JSON that the rows of a table of results were made of: tables are resumed and verified like them.

Cells do not tell everything: in CSV an empty one may have been null, and 5 a text. So a row is read in each way that
may be meant, until its check fits. What no way of reading gives stands in a column of its own (`REST`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from itertools import product
from typing import Any

from cbatch.base.strict_json import parse_json_value
from cbatch.batch.journal import CHECK, join_check, with_check, without_check
from cbatch.batch.row import format_row
from cbatch.batch.tables.columns import (
    ALWAYS,
    FIRST,
    REST,
    Column,
    Rows,
    as_text,
    own_names,
    split_result,
    values_of,
)
from cbatch.requests.embeddings import nine_digits

_TEXTS = frozenset("text finish_reason reasoning stop_reason note prompt_text error_code error_message key".split())
_ORDER = (
    "index id text logprob mean_logprob num_tokens is_greedy label score scores logits finish_reason reasoning "
    "tool_calls stop_reason closed note token_ids logprobs choices prompt_logprobs embedding embeddings prompt_text "
    "error usage key tool_messages validation extra cached_tokens ttft_s elapsed_s from_cache"
).split()
"""Fields of a row in their order. One that is missing here costs a cell in `REST`."""

REST_COLUMN = Column(REST, REST, "answer", str)
_STARTS = frozenset('{["-0123456789tfn \t\r\n')
"""Characters that JSON begins with."""

_USAGE = ("prompt_tokens", "completion_tokens", "total_tokens", "reasoning_tokens")
_ABSENT = object()

Fields = dict[str, Any]


def restored(cells: Mapping[str, Any], *, has_blanks: bool) -> bytes:
    """The line of a row; if a value of it has been changed, one whose check does not fit.

    cells:      of a row for which `is_result` holds, by the names of their columns; an older version wrote no check
    has_blanks: whether the table has the same empty cell for null and empty text
    """
    check = str(cells.get(CHECK) or "")
    first = b""
    for line in _lines(cells, has_blanks=has_blanks):
        if not check or join_check(line, check) == with_check(line):
            return join_check(line, check)
        first = first or line
    return join_check(first, check)


def rest_of(row: bytes, cells: Mapping[str, Any], *, has_blanks: bool) -> str | None:
    """The cell of `REST` with which these cells are restored to a row; None if they are without it."""
    if restored(cells, has_blanks=has_blanks) == row:
        return None
    line = without_check(row)
    fields, first = json.loads(line), next(_readings(cells, has_blanks=has_blanks))
    more = {name: value for name, value in fields.items() if name not in first or first[name] != value}
    text = _text(format_row(more))
    return text if restored({**cells, REST: text}, has_blanks=has_blanks) == row else _text(line)


def _text(line: bytes) -> str:
    return line.decode().removesuffix("\n")


def _lines(cells: Mapping[str, Any], *, has_blanks: bool) -> Iterator[bytes]:
    """The lines, without a check, that the cells may be those of, the most likely first."""
    rest = cells.get(REST)
    for fields in _readings(cells, has_blanks=has_blanks):
        if not rest:
            yield format_row(fields)
        elif isinstance(more := _parsed(rest), dict):
            yield format_row(fields | more)
            if _shows(cells, more):
                yield f"{rest}\n".encode("utf-8", "replace")
            return


def _shows(cells: Mapping[str, Any], fields: Fields) -> bool:
    """Whether a row has these fields, as far as the columns of every table tell."""
    answer, _ = split_result(fields)
    shown = (name for name in ALWAYS if name not in ("id", CHECK))
    return all((as_text(answer[name]) or "") == (as_text(cells.get(name)) or "") for name in shown)


def _readings(cells: Mapping[str, Any], *, has_blanks: bool) -> Iterator[Fields]:
    own, others = _parts(tuple(cells))
    answer = {name: _answer_value(name, cells[name]) for name in others}
    if has_blanks:
        answer["text"] = answer["text"] or ""
    # An empty cell is most often empty text where there is no null, and else null.
    for as_json, empty in product((False, True), ("", _ABSENT, None) if has_blanks else (None, _ABSENT)):
        extra = {}
        for column, name in own.items():
            value = cells[column]
            value = empty if value is None or (has_blanks and value == "") else _parsed(value) if as_json else value
            if value is not _ABSENT:
                extra[name] = value
        identity = cells.get("id")
        yield _row(answer | {"id": (_parsed(identity) if as_json else identity) or None}, extra)


@lru_cache(16)
def _parts(names: tuple[str, ...]) -> tuple[dict[str, str], list[str]]:
    """The names in the input of those columns that came from there, and the columns of the answer's fields."""
    start, stop = names.index("text"), names.index("finish_reason") if "finish_reason" in names else 0
    inputs = [name for name in names[:start] if name not in FIRST]
    properties = names[start + 1 : stop]  # which stand in the text
    others = [name for name in names if name not in (*inputs, *properties)]
    return own_names(inputs, {*ALWAYS, *others, REST}), others


def _answer_value(name: str, value: Any) -> Any:
    if value is None or (value == "" and name != "text"):
        return None
    value = value if name in _TEXTS else _parsed(value)
    return nine_digits(value) if name == "embedding" and isinstance(value, list) else value


def _parsed(value: Any) -> Any:
    if isinstance(value, str) and value[:1] in _STARTS:  # else the reader would take most of the time of a row
        if value.isdecimal() and value.isascii() and len(value) < 19 and (value[0] != "0" or value == "0"):
            return int(value)
        with suppress(ValueError):
            return parse_json_value(value)
    return value


def _row(answer: Fields, extra: Fields) -> Fields:
    fields: Fields = {name: value for name, value in answer.items() if value is not None}
    code, message = fields.pop("error_code", None), fields.pop("error_message", "")
    if code is None:
        is_embedded = "embedding" in fields or "embeddings" in fields
        fields |= {} if is_embedded else {"text": answer["text"]}
        fields |= {"usage": {name: fields[name] for name in _USAGE if name in fields}}
    else:
        fields["error"] = {"code": code, "message": message}
        fields.pop("text", None)
    fields |= {"id": answer["id"]} | ({"extra": extra} if extra else {})
    return {name: fields[name] for name in _ORDER if name in fields}


Stored = Callable[[Column, Any], Any]
"""Gives what a reader of a table will find for a value of a column."""


def cells_of(row: bytes, columns: list[Column], stored: Stored, *, has_blanks: bool) -> list[Any]:
    """The cells of a row as they are stored, the last of which is that of `REST` if there is such a column."""
    values = values_of(json.loads(row), columns)
    cells = [stored(column, value) for column, value in zip(columns, values, strict=True)]
    if columns[-1].name == REST:
        named = {column.name: cell for column, cell in zip(columns, cells, strict=True)}
        cells[-1] = stored(columns[-1], rest_of(row, named, has_blanks=has_blanks))
    return cells


def with_cells(
    rows: Rows, columns: list[Column], stored: Stored, *, has_blanks: bool
) -> tuple[list[Column], Iterator[tuple[bytes, list[Any]]]]:
    """The columns, with `REST` if a row needs it, and the rows, each with its cells."""
    nothing, more = stored(REST_COLUMN, None), [*columns, REST_COLUMN]
    if all(cells_of(row, more, stored, has_blanks=has_blanks)[-1] == nothing for row in rows()):
        more = columns
    return more, ((row, cells_of(row, more, stored, has_blanks=has_blanks)) for row in rows())
