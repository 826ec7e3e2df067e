"""Turns a line of input into a request or a clear error, and a row of output into a line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from cbatch.engine.base.errors import RequestError
from cbatch.engine.base.strict_json import parse_json_object
from cbatch.engine.batch.lines import MAX_LINE_BYTES, Line
from cbatch.engine.requests.completion import Completion
from cbatch.engine.requests.input_processor import InputProcessor
from cbatch.engine.requests.request import EncodedRequest
from cbatch.engine.requests.row import InputRow
from cbatch.engine.requests.row_forms import fill_row

_ENCODER = json.JSONEncoder(ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class LineProcessor:
    """Makes requests of the lines of an input.

    is_text:       lines are prompts instead of JSON
    is_own_form:   no row is a request of the OpenAI Batch API, whatever its columns are called
    allow_unknown: carry misspelt parameters along instead of refusing their row
    """

    inputs: InputProcessor
    is_text: bool = False
    is_own_form: bool = False
    allow_unknown: bool = False

    def key(self, line: Line) -> str:
        """The key of a line's row of output."""
        row = self._row(line)
        try:
            return self.inputs.request(row).key
        except RequestError as error:
            return self.inputs.refused(row, error, line.source).key

    def process(self, line: Line) -> EncodedRequest | Completion:
        """A line as a request; or, if anything is wrong with it, its result."""
        return self.inputs.process(self._row(line), lambda: line.source)

    def _row(self, line: Line) -> InputRow:
        return parse_line(line, is_text=self.is_text, is_own_form=self.is_own_form, allow_unknown=self.allow_unknown)


def parse_line(
    line: Line, *, is_text: bool = False, is_own_form: bool = False, allow_unknown: bool = False
) -> InputRow:
    """Reads one line. Does not raise: whatever is wrong with the line is the row's `error`.

    The options are those of `LineProcessor`.
    """
    row = InputRow(line.index, f"line {line.index + 1}")
    try:
        if line.data is None:
            raise RequestError("line_too_long", f"line {line.index + 1} is longer than {MAX_LINE_BYTES >> 20} MiB")
        text = line.data.decode()
        if is_text:
            row.prompt = text
        else:
            fields = parse_json_object(text, f"line {line.index + 1}", "a row")
            fill_row(row, fields, is_own_form=is_own_form, allow_unknown=allow_unknown)
    except UnicodeDecodeError as error:
        reason = f"line {line.index + 1}, byte {error.start + 1}: not valid UTF-8 ({error.reason})"
        row.error = RequestError("invalid_utf8", reason)
    except RequestError as error:
        row.error = error
    except Exception as unforeseen:  # one line that breaks something harms no other
        row = InputRow(row.index, row.where)
        row.error = row.invalid(f"the row cannot be read: {unforeseen!r}", "internal_error")
    if line.error is not None:
        row.error = line.error
    return row


def format_row(fields: dict[str, Any]) -> bytes:
    return _ENCODER.encode(fields).encode("utf-8", "replace") + b"\n"
