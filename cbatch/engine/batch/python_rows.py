"""Rows from Python as lines of JSON, so that they are read, keyed and resumed exactly like the rows of a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from cbatch.engine.base.errors import RequestError
from cbatch.engine.batch.lines import Line
from cbatch.engine.batch.prompt_template import PromptTemplate
from cbatch.engine.requests.prompts import row_fields
from cbatch.engine.requests.row import PROMPT_FIELDS

RowTemplate = PromptTemplate | Callable[[Any], object]
"""Makes the prompt of a row: a text with names of columns, or a function of the row."""


def lines_of(rows: Iterable[object], template: RowTemplate | None = None) -> Iterator[Line]:
    """The line of a JSONL file for each row. Never raises for a row: whatever is wrong with it is the line's `error`.

    A row is a text, token ids, a list of messages, or a dictionary as in a file. With a template, columns may have any
    names, and the row's own prompt, if it has one, is replaced.
    """
    for index, row in enumerate(rows):
        try:
            fields = row_fields(row) if template is None else _templated(row, template)
            yield Line.of(index, json.dumps(fields).encode())
        except RequestError as error:
            yield _failed(index, row, error)
        except (TypeError, ValueError, RecursionError) as error:
            yield _failed(index, row, RequestError("invalid_row", f"the row cannot be written as JSON: {error}"))


def _templated(row: object, template: RowTemplate) -> dict[str, Any]:
    """The fields of a row whose prompt the template makes. Its other columns stay. Raises RequestError."""
    columns = dict(row) if isinstance(row, Mapping) else {}
    prompt: object
    if isinstance(template, PromptTemplate):
        prompt = template.render(columns or row_fields(row))
    else:
        try:
            prompt = template(row)
        except Exception as error:
            raise RequestError("template_error", f"the template raised {error!r}") from error
    others = {name: value for name, value in columns.items() if name not in PROMPT_FIELDS}
    return others | row_fields(prompt)


def _failed(index: int, row: object, error: RequestError) -> Line:
    identity = row.get("id") if isinstance(row, Mapping) else None
    known = {"id": identity} if isinstance(identity, str | int | float) else {}
    return Line(index, json.dumps(known).encode(), error=RequestError(error.code, f"line {index + 1}: {error}"))
