"""Rows of tables as lines of JSON, so that they are keyed, sent to replicas and resumed like the lines of a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cbatch.base.errors import RequestError
from cbatch.base.strict_json import parse_json_object, parse_json_value
from cbatch.batch.jsonl import line_text
from cbatch.batch.lines import Line
from cbatch.batch.tables.result_columns import carried_columns, earlier_error, is_result
from cbatch.batch.tables.table import TableRow, as_text
from cbatch.batch.templates.prompt_template import ColumnTemplate, PromptTemplate
from cbatch.requests.param_names import REFUSED
from cbatch.requests.row import PROMPT_FIELDS
from cbatch.requests.row_forms import ID_FIELDS, KNOWN

_TEXTS = frozenset(["prompt", "system", "regex", "grammar", "guided_regex", "guided_grammar", *ID_FIELDS])
"""Fields whose cells are taken as they are, whatever they look like."""


def line_of(row: TableRow, template: ColumnTemplate | None, *, is_text: bool = False) -> Line:
    """The line `{"columns": ..., "row": ...}` of a row (see `parse_line`). Never raises for a row.

    template: makes the prompt; without one, the columns are the fields of a row, as those of a line of JSON
    is_text:  all values are text, so those of fields that are no text are read as JSON
    """
    columns, error = row.columns, row.error
    fields: dict[str, Any] = {}
    try:
        if error is None and is_result(columns):
            problem = earlier_error(columns)
            columns = carried_columns(columns)
            if problem is not None:
                raise RequestError("invalid_row", problem)
        if is_text:
            columns = {name: text for name, text in columns.items() if text or name not in ID_FIELDS}
        if error is None:
            fields = _templated(columns, template) if template is not None else _fields(columns, is_text=is_text)
    except RequestError as raised:
        error = RequestError(raised.code, f"{row.where}: {raised}")
    data = json.dumps({"columns": columns, "row": fields}).encode()
    made = Line.of(row.index, data)
    return made if error is None else Line(made.index, made.data, made.digest, error)


def row_of_line(line: Line, unit: str, *, is_text: bool) -> TableRow:
    """The columns of a line of JSON, or of a line of text, which is the column `prompt`."""
    where = f"{unit} {line.index + 1}"
    try:
        text = line_text(line, where)
        columns = {"prompt": text} if is_text else parse_json_object(text, where, "a row")
    except RequestError as error:
        return TableRow(line.index, where, {}, error)
    return TableRow(line.index, where, columns)


def missing_columns(names: list[str], template: ColumnTemplate | None) -> str | None:
    """Why no row of a table with these columns could have a prompt; None if one could."""
    shown = ", ".join(names)
    example = next((name for name in names if name not in ID_FIELDS), "column")
    if template is None:
        if any(name in names for name in (*PROMPT_FIELDS, "body")):
            return None
        return (
            f"has no column 'prompt' (it has {shown}). --template makes prompts of other columns: "
            "--template 'Summarise: {" + example + "}'"
        )
    missing = [repr(name) for name in template.names if name not in names]
    if not missing:
        return None
    return f"has no column {' and no column '.join(missing)}, which the template needs (it has {shown})"


def _fields(columns: Mapping[str, Any], *, is_text: bool) -> dict[str, Any]:
    """The fields of a row. All rows of a table have all columns, so an empty cell or a null sets no field."""
    fields = {}
    for name, value in columns.items():
        if name not in KNOWN and name not in REFUSED:
            fields[name] = value
        elif value is not None and not (is_text and value == ""):
            fields[name] = _value(value) if is_text and name not in _TEXTS else value
    return fields


def _templated(columns: Mapping[str, Any], template: ColumnTemplate) -> dict[str, Any]:
    """The fields of the row that a template makes. Raises RequestError."""
    if isinstance(template, PromptTemplate):  # shows values as they are
        columns = {name: as_text(value) for name, value in columns.items()}
    return {"prompt": template.render(columns)}


def _value(text: str) -> Any:
    """What the cell of a parameter says: a JSON value, else text. pandas writes True, and 12.0 for whole numbers."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        value = parse_json_value(text)
    except ValueError:
        return text
    return int(value) if isinstance(value, float) and value.is_integer() else value
