"""Turns a line of input into a row or a clear error, and a row of output into a line."""

from __future__ import annotations

import json
from typing import Any

from cbatch.base.errors import RequestError
from cbatch.base.request import Request
from cbatch.base.strict_json import parse_json_object
from cbatch.batch.journal import with_check
from cbatch.batch.lines import MAX_LINE_BYTES, Line
from cbatch.requests.rows import fill_row, fill_with_columns

_ENCODER = json.JSONEncoder(ensure_ascii=False)


def parse_line(
    line: Line, *, is_text: bool = False, has_columns: bool = False, allow_unknown: bool = False, unit: str = "line"
) -> Request:
    """Reads one line. Does not raise: whatever is wrong with the line is the row's `error`.

    is_text:       the line is a prompt instead of JSON
    has_columns:   the line is `{"columns": ..., "row": ...}`: a row, and columns whose names have no meaning but `id`
    allow_unknown: carry misspelt parameters along instead of refusing the row
    unit:          what `index` counts, for messages: lines, or rows of a table
    """
    row = Request(index=line.index, where=f"{unit} {line.index + 1}")
    try:
        text = line_text(line, row.where)
        if is_text:
            row.text = text
        else:
            fields = parse_json_object(text, row.where, "a row")
            if has_columns:
                fill_with_columns(row, fields["row"], fields["columns"], allow_unknown=allow_unknown)
            else:
                fill_row(row, fields, allow_unknown=allow_unknown)
    except RequestError as error:
        row.error = error
    except Exception as unforeseen:  # one line that breaks something harms no other
        row = Request(index=row.index, where=row.where)
        row.error = row.invalid(f"the row cannot be read: {unforeseen!r}", "internal_error")
    if line.error is not None:
        row.error = line.error
    return row


def line_text(line: Line, where: str) -> str:
    """The text of a line. Raises RequestError if the line is too long or no UTF-8."""
    if line.data is None:
        raise RequestError("line_too_long", f"{where} is longer than {MAX_LINE_BYTES >> 20} MiB")
    try:
        return line.data.decode()
    except UnicodeDecodeError as error:
        reason = f"{where}, byte {error.start + 1}: not valid UTF-8 ({error.reason})"
        raise RequestError("invalid_utf8", reason) from None


def format_result(fields: dict[str, Any]) -> bytes:
    """A row of output, with its check."""
    return with_check(format_row(fields))


def format_row(fields: dict[str, Any]) -> bytes:
    return _ENCODER.encode(fields).encode("utf-8", "replace") + b"\n"
