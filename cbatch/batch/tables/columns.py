"""The columns of a table: rows as readers give them, and results beside the columns of their input."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any, Literal

from cbatch.base.errors import RequestError
from cbatch.base.strict_json import parse_json_value
from cbatch.batch.journal import CHECK, KEY
from cbatch.requests.columns import DROPPED
from cbatch.requests.responses import answer_of


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row of a table.

    index:   0-based number of the row; what names the columns is none
    where:   where it stands, for messages: “row 3 (line 5)”
    columns: values in the types of JSON, by the names of their columns
    error:   why the row cannot be read; `columns` then holds what is known of it
    """

    index: int
    where: str
    columns: dict[str, Any]
    error: RequestError | None = None


def as_text(value: Any) -> str | None:
    """A value as it stands in a prompt, or in a cell of CSV: what is no text as JSON, and null as None."""
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)


FIRST = ("index", "id")
"""Columns that come before those of the input."""

ANSWER = ("text", "finish_reason", "prompt_tokens", "completion_tokens", "total_tokens", "error_code", "error_message")
LAST = ("key", CHECK)

ALWAYS = (*FIRST, *ANSWER, *LAST)
"""Columns of every table of results. What only some answers have, such as `reasoning`, comes behind `ANSWER`."""

REST = "rest"
"""The last column, if the others do not tell all of a row: what its line of JSON has otherwise, as JSON text."""

OF_SCORES = ("logprob", "mean_logprob", "num_tokens", "is_greedy", "label", "score", "scores", "logits")
"""Fields of a score row; of an answer there is `finish_reason` instead."""

TEXTS = "texts"
"""The texts of all outputs, if there are several."""

MAX_PROPERTIES = 500
"""Most columns that properties of answers become if no schema names them."""

_MORE = {REST, "validation", "reasoning_tokens", "completion_tokens_details", DROPPED}
BOOKKEEPING = frozenset(ALWAYS) - {"id", "text"} | _MORE
"""Columns that say something about the run and not about the row: a further run does not carry them along."""

Rows = Callable[[], Iterator[bytes]]
"""Gives the rows of results, as lines of JSON, from the beginning."""


def split_result(fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The columns of the answer in a row of results, and those of the input, which it has under `extra`."""
    answer = dict.fromkeys(ALWAYS) | dict(_plain(fields) if "custom_id" in fields else fields)
    extra = answer.pop("extra", None) or {}
    usage, error = answer.pop("usage", None) or {}, answer.pop("error", None) or {}
    answer |= usage
    answer |= {"error_code": error.get("code"), "error_message": error.get("message")}
    if choices := answer.get("choices"):
        answer[TEXTS] = [_text_of(choice) for choice in choices]
    return answer, extra


def _text_of(choice: Mapping[str, Any]) -> Any:
    return choice["message"].get("content") if "message" in choice else choice.get("text")


def _properties(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The properties of an answer that is a JSON object; none of any other, such as one that was cut off."""
    text = answer["text"]
    if isinstance(text, str) and text.lstrip()[:1] == "{":
        with suppress(ValueError):
            value: dict[str, Any] = parse_json_value(text)
            return value
    return {}


def free_names(columns: Iterable[str], taken: Collection[str], prefix: str = "input_") -> dict[str, str]:
    """The name that each column of the input gets beside columns whose names are taken: its own, if that is free.

    Else it is `input_NAME`, then `input_NAME_2` and so on.
    """
    made = {name: name for name in columns}
    used = {*taken, *made}
    for name in made:
        if name in taken:
            made[name] = next(free for free in _numbered(prefix + name) if free not in used)
            used.add(made[name])
    return made


def own_names(columns: Iterable[str], taken: Collection[str]) -> dict[str, str]:
    """The name in the input of each of its columns in a table, as far as the names tell: undoes `free_names`."""
    made = {name: name for name in columns}
    for name in taken:
        if numbered := list(takewhile(made.__contains__, _numbered(f"input_{name}"))):
            made[numbered[-1]] = name
    return made


def _numbered(name: str) -> Iterator[str]:
    return (name if number == 1 else f"{name}_{number}" for number in count(1))


def is_result(columns: Mapping[str, Any]) -> bool:
    """Whether the columns of a row are those of a result of an earlier run."""
    index, key = columns.get("index"), columns.get("key")
    return isinstance(key, str) and KEY.fullmatch(key) is not None and str(index).isdecimal()


def carried_columns(columns: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The columns of a result that a further run sees and carries along: its answer, and what was carried before.

    Beside them the error that the earlier run found; empty if it gave an answer.
    """
    answer, extra = columns, dict[str, Any]()
    if "response" in columns or any(isinstance(columns.get(name), dict) for name in ("usage", "error")):
        answer, extra = split_result(columns)  # it comes from JSON Lines; a table is flat already
    names = free_names(extra, answer)
    carried = {names[name]: value for name, value in extra.items()}
    carried |= {name: value for name, value in answer.items() if name not in BOOKKEEPING}
    code, message = answer.get("error_code"), answer.get("error_message")
    return carried, f"it is an error of an earlier run ({code}: {message})" if code else ""


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A result line of the OpenAI Batch API as a plain row."""
    made = {name: value for name, value in fields.items() if name not in ("custom_id", "response")}
    made["id"] = fields["custom_id"]
    body = answer_of(fields) if fields.get("response") is not None else {}  # null in errors of older versions
    if choices := body.get("choices"):
        first = choices[0]
        reasons = [one.get("finish_reason") for one in choices]
        reason = "length" if "length" in reasons else reasons[0]
        made |= {"text": _text_of(first), "finish_reason": reason, "usage": body.get("usage")}
        made |= {"choices": choices} if len(choices) > 1 else {}
        made |= {name: first[name] for name in OF_SCORES if name in first}
        made |= {DROPPED: body[DROPPED]} if DROPPED in body else {}
    elif data := body.get("data"):
        vectors = [one["embedding"] for one in data]
        made |= {"embedding": vectors[0]} if len(vectors) == 1 else {"embeddings": vectors}
        made |= {"usage": body.get("usage")}
    return made


Kind = type[bool | int | float | str | list[str] | tuple[float, ...]] | None
"""The type that all values of a column fit: text for what has no type in common; a tuple for an embedding. None if all
are null.
"""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table.

    source: name of the value in the answer, in the columns of the input, or in the JSON of the answer's text
    of:     which of these
    kind:   what it holds
    """

    name: str
    source: str
    of: Literal["answer", "input", "property"]
    kind: Kind

    def typed(self, value: Any) -> Any:
        """A value in the type of the column."""
        if self.kind is float and value is not None:
            return float(value)
        return as_text(value) if self.kind is str else value


class TableLayout:
    """Collects the columns of all rows, since a table names them before its first row."""

    def __init__(self, expand: Sequence[str] | None = None) -> None:
        """`expand`: properties of answers that become columns; all of them if it is empty, and none if it is None"""
        self._expand = expand
        self._properties: dict[str, Kind] = dict.fromkeys(expand or ())
        self._answer: dict[str, Kind] = dict.fromkeys(ALWAYS)
        self._input: dict[str, Kind] = {}

    def add(self, fields: Mapping[str, Any]) -> None:
        answer, columns = split_result(fields)
        found = _properties(answer) if self._expand is not None else {}
        if self._expand or len(self._properties) >= MAX_PROPERTIES:
            found = {name: value for name, value in found.items() if name in self._properties}
        for seen, values in ((self._answer, answer), (self._input, columns), (self._properties, found)):
            for name, value in values.items():
                is_embedding = name == "embedding" and seen is self._answer and isinstance(value, list)
                seen[name] = _common(seen.get(name), tuple if is_embedding else _kind(value))

    def columns(self) -> list[Column]:
        """The columns in their order: index, `id` if a row has one, those of the input, the answer, key and check.

        Properties of the answer come right behind its text.
        """
        first = [name for name in FIRST if name != "id" or self._answer[name]]
        more = [name for name in self._answer if name not in ALWAYS]
        names = free_names(self._input, {*first, *ANSWER, *more, *LAST, REST})
        inputs = [Column(names[name], name, "input", kind) for name, kind in self._input.items()]
        shown = [Column(name, name, "answer", self._answer[name]) for name in (*first, *ANSWER, *more, *LAST)]
        taken = {column.name for column in (*inputs, *shown)} | {REST}
        own = free_names(self._properties, taken, "answer_")
        properties = [Column(own[name], name, "property", kind) for name, kind in self._properties.items()]
        return [*shown[: len(first)], *inputs, shown[len(first)], *properties, *shown[len(first) + 1 :]]


def values_of(fields: Mapping[str, Any], columns: list[Column]) -> list[Any]:
    """The values of a row of results in the order of the columns; None for what it does not have."""
    answer, inputs = split_result(fields)
    found = _properties(answer) if any(column.of == "property" for column in columns) else {}
    parts = {"answer": answer, "input": inputs, "property": found}
    return [parts[column.of].get(column.source) for column in columns]


def _kind(value: Any) -> Kind:
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return list
    has_own = isinstance(value, bool | float) or (isinstance(value, int) and -(2**63) <= value < 2**63)
    return type(value) if has_own else None if value is None else str


def _common(one: Kind, other: Kind) -> Kind:
    if one is None or other is None or one is other:
        return one or other
    return float if {one, other} == {int, float} else str
