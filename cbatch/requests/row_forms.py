"""Reads a row from an object: cbatch's own forms, or a request of the OpenAI Batch API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cbatch.base.params import PARAM_NAMES
from cbatch.base.strict_json import json_type
from cbatch.requests import openai_batch
from cbatch.requests.param_names import ALIASES, COLUMN_NAMES, REFUSED, ROW_FIELDS, UNDERSTOOD, is_param
from cbatch.requests.row import PROMPT_FIELDS, InputRow

ID_FIELDS = ("id", "custom_id")
KNOWN = frozenset([*ROW_FIELDS, *UNDERSTOOD])

SPELLINGS = frozenset([*PARAM_NAMES, *ALIASES, *UNDERSTOOD, *ROW_FIELDS]) - {*COLUMN_NAMES, "system"}
"""Names that a misspelt one may have been meant to be. Everyday words are not among them."""


def fill_row(row: InputRow, fields: dict[str, Any], *, allow_unknown: bool = False) -> None:
    """Sets the row's fields from a JSON object. Those that are set before an error is raised stay valid.

    allow_unknown: carry misspelt parameters along, and those that are not available here, instead of refusing the row

    Raises RequestError.
    """
    if openai_batch.is_request(fields):
        openai_batch.fill(row, fields, allow_unknown=allow_unknown)
        return
    params = {name: value for name, value in fields.items() if is_param(name, value)}
    row.extra = {  # what is refused, but asks for nothing, is data: it was a column before and counts in the key
        name: value
        for name, value in fields.items()
        if name not in ROW_FIELDS and (name not in params or name in REFUSED)
    }
    row.id = _identity(row, fields)
    row.raw = row.typed_field(fields, "raw", bool, False)
    row.system = row.typed_field(fields, "system", str, None)
    row.set_priority(fields)
    row.set_params(params, carries_refused=allow_unknown)
    row.set_tools(fields)
    if row.extra and not allow_unknown:
        names = [name for name, value in row.extra.items() if name not in REFUSED and _may_be_misspelt(name, value)]
        row.check_spelling(names, SPELLINGS)
    forms = [name for name in PROMPT_FIELDS if name in fields]
    if len(forms) != 1:
        found = f"both {' and '.join(forms)}" if forms else f"none of {', '.join(PROMPT_FIELDS)}"
        raise row.invalid(f"the row has {found}")
    PROMPT_FIELDS[forms[0]](row, fields[forms[0]])
    if row.raw and row.prompt is None:
        raise row.invalid("raw works only with prompt")
    _check_template_fields(row)


def _may_be_misspelt(name: str, value: Any) -> bool:
    """Whether a column may be a parameter in another writing: `Stop` may be an everyday word, if it holds no text."""
    return name.lower() != "stop" or isinstance(value, str | list)


def fill_with_columns(
    row: InputRow, fields: dict[str, Any], columns: dict[str, Any], *, allow_unknown: bool = False
) -> None:
    """Sets the row's fields, and takes its `id` and columns to carry along from a table. Raises RequestError.

    columns: may have any names, and only `id` and `custom_id` have a meaning; what `fields` says counts first
    """
    carried = {name: value for name, value in columns.items() if name not in ID_FIELDS}
    try:
        fill_row(row, fields, allow_unknown=allow_unknown)
    finally:
        row.extra = carried | row.extra
        if row.id is None:
            row.id = _identity(row, columns)


def _identity(row: InputRow, fields: Mapping[str, Any]) -> str | int | float | None:
    """The row's `id`, which may be called `custom_id`. Raises RequestError."""
    given = {name: fields[name] for name in ID_FIELDS if fields.get(name) is not None}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise row.invalid(f"{name} must be a string or a number, not {json_type(value)}")
    if len({(type(value), value) for value in given.values()}) > 1:
        raise row.invalid("id and custom_id are two names of one thing, and they differ")
    return next(iter(given.values()), None)


def _check_template_fields(row: InputRow) -> None:
    """Raises RequestError if the row says something to a chat template that its prompt does not go through."""
    if not row.raw and row.prompt_token_ids is None:
        return
    given = {"tools": row.tools, "system": row.system, **row.template}
    for name, value in given.items():
        if value:
            verb = "need" if name == "tools" else "needs"
            raise row.invalid(f"{name} {verb} the chat template, so give messages or a prompt that is not raw")
