"""A line of input becomes a row or a clear error; a row of output becomes a line."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from cbatch.cli.run.input import openai_batch
from cbatch.cli.run.input.lines import MAX_LINE_BYTES, Line
from cbatch.cli.run.input.row import (
    ALIASES,
    PROMPT_FIELDS,
    InputRow,
    check_spelling,
    fill_messages,
    fill_params,
    fill_priority,
    fill_prompt,
    fill_token_ids,
    fill_tools,
    json_type,
    typed_field,
)
from cbatch.engine import PARAM_NAMES, RequestError

MAX_DEPTH = 100
"""Nesting that no real row has, well inside what Python's own JSON code can write again."""

PROMPT_PARSERS = dict(zip(PROMPT_FIELDS, (fill_messages, fill_prompt, fill_token_ids), strict=True))
KNOWN = frozenset([*PROMPT_PARSERS, *PARAM_NAMES, *ALIASES, "id", "raw", "priority", "tools", "tool_choice"])


def parse_line(line: Line, *, is_text: bool = False, allow_unknown: bool = False) -> InputRow:
    """Reads one line; what is wrong with it stands in the row's `error`, never in an exception.

    as_text: the line is a prompt, not JSON.
    """
    row = InputRow(line.index)
    try:
        if line.data is None:
            raise RequestError("line_too_long", f"line {line.index + 1} is longer than {MAX_LINE_BYTES >> 20} MiB")
        text = _decode(line.data, line.index)
        if is_text:
            row.prompt = text
        else:
            _fill(row, parse_json_object(text, f"line {line.index + 1}", "a row"), allow_unknown)
    except RequestError as error:
        row.error = error
    return row


def format_row(fields: dict[str, Any]) -> bytes:
    return _ENCODER.encode(fields).encode("utf-8", "replace") + b"\n"


def _decode(data: bytes, index: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"line {index + 1}, byte {error.start + 1}: not valid UTF-8 ({error.reason})"
        raise RequestError("invalid_utf8", message) from None


def parse_json_object(text: str, where: str, what: str) -> dict[str, Any]:
    """A JSON object, strictly: no NaN, no overflow, no deep nesting, no lone surrogates.

    Raises RequestError that says where it stands, and what it was to be.
    """
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise RequestError("invalid_json", f"{where}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise RequestError("invalid_json", f"{where}: nested too deeply") from None
    except ValueError as error:
        reason = "a number has too many digits" if "digits" in str(error) else str(error)
        raise RequestError("invalid_json", f"{where}: {reason}") from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise RequestError("invalid_json", f"{where}: nested too deeply")
    if not isinstance(value, dict):
        raise RequestError("invalid_row", f"{where}: {what} is a JSON object, not {json_type(value)}")
    return _without_surrogates(value) if "\\ud" in text.lower() else value


def _depth(value: Any) -> int:
    """Levels of lists and objects, counted without recursion."""
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, list | dict)]:
        depth += 1
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
    return depth


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


_ENCODER = json.JSONEncoder(ensure_ascii=False)
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite_float)


def _without_surrogates(value: Any) -> Any:
    """Lone surrogates become U+FFFD, in keys and values; `value` is not nested deeply."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    return value


def _fill(row: InputRow, fields: dict[str, Any], allow_unknown: bool) -> None:
    """Puts the fields of a JSON object where they belong in the row; what is there of it is true also in an error."""
    if openai_batch.is_request(fields):
        openai_batch.fill(row, fields, allow_unknown=allow_unknown)
        return
    row.extra = {name: value for name, value in fields.items() if name not in KNOWN}
    identity = fields.get("id")
    if isinstance(identity, bool) or not isinstance(identity, str | int | float | None):
        raise row.invalid(f"id must be a string or a number, not {json_type(identity)}")
    row.id = identity
    row.raw = typed_field(row, fields, "raw", bool, False)
    fill_priority(row, fields)
    fill_params(row, fields)
    fill_tools(row, fields)
    if row.extra and not allow_unknown:
        check_spelling(row, row.extra, KNOWN)
    forms = [name for name in PROMPT_PARSERS if name in fields]
    if len(forms) != 1:
        raise row.invalid(
            "the row has " + (f"both {' and '.join(forms)}" if forms else f"none of {', '.join(PROMPT_PARSERS)}")
        )
    PROMPT_PARSERS[forms[0]](row, fields[forms[0]])
    if row.raw and row.prompt is None:
        raise row.invalid("raw goes with prompt only")
    if row.tools and (row.raw or row.prompt_token_ids is not None):
        raise row.invalid("tools go through the chat template, so they need messages or a prompt that is not raw")
