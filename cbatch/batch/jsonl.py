"""Turns a line of input into a row or a clear error."""

from __future__ import annotations

from cbatch.base.errors import RequestError
from cbatch.base.request import Request
from cbatch.base.strict_json import parse_json_object
from cbatch.batch.lines import MAX_LINE_BYTES, Line
from cbatch.batch.row_options import DEFAULT_OPTIONS, RowOptions
from cbatch.requests.rows import fill_row, fill_with_columns


def parse_line(line: Line, options: RowOptions = DEFAULT_OPTIONS) -> Request:
    """Reads one line. Does not raise: whatever is wrong with the line is the row's `error`."""
    row = Request(index=line.index, where=f"{options.unit} {line.index + 1}")
    try:
        text = line_text(line, row.where)
        if options.is_text:
            row.text = text
        else:
            fields = parse_json_object(text, row.where, "a row")
            if options.has_columns:
                fill_with_columns(row, fields["row"], fields["columns"], allow_unknown=options.allow_unknown)
            else:
                fill_row(row, fields, allow_unknown=options.allow_unknown)
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
