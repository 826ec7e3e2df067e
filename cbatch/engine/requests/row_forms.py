"""Reads a row from an object: cbatch's own forms, or a request of the OpenAI Batch API."""

from __future__ import annotations

from typing import Any

from cbatch.engine.base.params import PARAM_NAMES
from cbatch.engine.base.strict_json import json_type
from cbatch.engine.requests import openai_batch
from cbatch.engine.requests.row import ALIASES, PROMPT_FIELDS, InputRow

KNOWN = frozenset([*PROMPT_FIELDS, *PARAM_NAMES, *ALIASES, "id", "raw", "priority", "tools", "tool_choice"])


def fill_row(row: InputRow, fields: dict[str, Any], *, is_own_form: bool = False, allow_unknown: bool = False) -> None:
    """Sets the row's fields from a JSON object. Those that are set before an error is raised stay valid.

    is_own_form:   it is no request of the OpenAI Batch API, whatever its columns are called
    allow_unknown: carry misspelt parameters along instead of refusing the row

    Raises RequestError.
    """
    if not is_own_form and openai_batch.is_request(fields):
        openai_batch.fill(row, fields, allow_unknown=allow_unknown)
        return
    row.extra = {name: value for name, value in fields.items() if name not in KNOWN}
    identity = fields.get("id")
    if isinstance(identity, bool) or not isinstance(identity, str | int | float | None):
        raise row.invalid(f"id must be a string or a number, not {json_type(identity)}")
    row.id = identity
    row.raw = row.typed_field(fields, "raw", bool, False)
    row.set_priority(fields)
    row.set_params(fields)
    row.set_tools(fields)
    if row.extra and not allow_unknown:
        row.check_spelling(row.extra, KNOWN)
    forms = [name for name in PROMPT_FIELDS if name in fields]
    if len(forms) != 1:
        found = f"both {' and '.join(forms)}" if forms else f"none of {', '.join(PROMPT_FIELDS)}"
        raise row.invalid(f"the row has {found}")
    PROMPT_FIELDS[forms[0]](row, fields[forms[0]])
    if row.raw and row.prompt is None:
        raise row.invalid("raw works only with prompt")
    if row.tools and (row.raw or row.prompt_token_ids is not None):
        raise row.invalid("tools need the chat template, so give messages or a prompt that is not raw")
