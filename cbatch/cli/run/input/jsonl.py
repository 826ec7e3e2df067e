"""Turns a line of input into a row or a clear error, and a row of output into a line."""

from __future__ import annotations

import json
from typing import Any

from cbatch.cli.common.strict_json import json_type, parse_json_object
from cbatch.cli.run.input import openai_batch
from cbatch.cli.run.input.lines import MAX_LINE_BYTES, Line
from cbatch.cli.run.input.row import ALIASES, PROMPT_FIELDS, InputRow
from cbatch.engine import PARAM_NAMES, RequestError

_ENCODER = json.JSONEncoder(ensure_ascii=False)

KNOWN = frozenset([*PROMPT_FIELDS, *PARAM_NAMES, *ALIASES, "id", "raw", "priority", "tools", "tool_choice"])


def parse_line(line: Line, *, is_text: bool = False, allow_unknown: bool = False) -> InputRow:
    """Reads one line. Does not raise: whatever is wrong with the line is the row's `error`.

    is_text:       the line is a prompt instead of JSON
    allow_unknown: carry misspelt parameters along instead of refusing the row
    """
    row = InputRow(line.index)
    try:
        if line.data is None:
            raise RequestError("line_too_long", f"line {line.index + 1} is longer than {MAX_LINE_BYTES >> 20} MiB")
        text = line.data.decode()
        if is_text:
            row.prompt = text
        else:
            _fill(row, parse_json_object(text, f"line {line.index + 1}", "a row"), allow_unknown)
    except UnicodeDecodeError as error:
        reason = f"line {line.index + 1}, byte {error.start + 1}: not valid UTF-8 ({error.reason})"
        row.error = RequestError("invalid_utf8", reason)
    except RequestError as error:
        row.error = error
    return row


def format_row(fields: dict[str, Any]) -> bytes:
    return _ENCODER.encode(fields).encode("utf-8", "replace") + b"\n"


def _fill(row: InputRow, fields: dict[str, Any], allow_unknown: bool) -> None:
    """Sets the row's fields from a JSON object. Those that are set before an error is raised stay valid."""
    if openai_batch.is_request(fields):
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
