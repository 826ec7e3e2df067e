"""The rows of `cbatch run`: a line of input becomes a row or a clear error, a finished row becomes a line."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, NoReturn

from cbatch.engine import PARAM_NAMES, RequestError

MAX_LINE_BYTES = 16 * 2**20
MAX_DEPTH = 100
"""Nesting that no real row has, well inside what Python's own JSON code can write again."""

ALIASES = {"max_completion_tokens": "max_tokens", "max_new_tokens": "max_tokens"}
FORMS = ("messages", "prompt", "prompt_token_ids")
LATER: dict[str, Any] = {
    "n": 1,
    "logprobs": False,
    "prompt_logprobs": None,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "bad_words": [],
    "response_format": None,
    "tools": [],
    "custom_id": None,
}
"""Fields of the contract that this version does not serve, and the values that ask for nothing.

To ignore other values would be to answer a question that was not asked.
"""

KNOWN = (*FORMS, *PARAM_NAMES, *ALIASES, *LATER, "id", "raw", "priority")


@dataclass(frozen=True, slots=True)
class Line:
    """One physical line of the input, without its end; None where it was longer than MAX_LINE_BYTES."""

    index: int
    data: bytes | None


@dataclass(slots=True)
class Row:
    """One input row. Exactly one of messages, prompt and prompt_token_ids is set, unless `error` is."""

    index: int
    id: str | int | float | None = None
    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    raw: bool = False
    params: dict[str, Any] = field(default_factory=dict)
    priority: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    error: RequestError | None = None


def read_lines(stream: IO[bytes]) -> Iterator[Line]:
    """Lines ended by `\\n` only, blank ones left out, a BOM at the start and CRs at the ends removed.

    Reads no more than one line ahead; of a line that is too long it keeps nothing.
    """
    index = 0
    while data := stream.readline(MAX_LINE_BYTES + 2):  # room for a line end of two bytes
        too_long = len(data.rstrip(b"\r\n")) > MAX_LINE_BYTES
        while not data.endswith(b"\n") and (more := stream.readline(MAX_LINE_BYTES)):
            data, too_long = more, True
        if index == 0 and not too_long:
            data = data.removeprefix(b"\xef\xbb\xbf")
        data = data.rstrip(b"\r\n")
        if too_long or data.strip():
            yield Line(index, None if too_long else data)
        index += 1


def parse_line(line: Line, *, as_text: bool = False, allow_unknown: bool = False) -> Row:
    """Reads one line; what is wrong with it stands in the row's `error`, never in an exception.

    as_text: the line is a prompt, not JSON.
    """
    row = Row(line.index)
    try:
        if line.data is None:
            raise RequestError("line_too_long", f"line {line.index + 1} is longer than {MAX_LINE_BYTES >> 20} MiB")
        text = _decode(line.data, line.index)
        if as_text:
            row.prompt = text
        else:
            _fill(row, _parse_object(text, line.index), allow_unknown)
    except RequestError as error:
        row.error = error
    return row


def format_row(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def _decode(data: bytes, index: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"line {index + 1}, byte {error.start + 1}: not valid UTF-8 ({error.reason})"
        raise RequestError("invalid_utf8", message) from None


def _parse_object(text: str, index: int) -> dict[str, Any]:
    where = f"line {index + 1}"
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite_float)
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
        raise RequestError("invalid_row", f"{where}: a row is a JSON object, not {_kind(value)}")
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


def _without_surrogates(value: Any) -> Any:
    """Lone surrogates become U+FFFD, in keys and values; `value` is not nested deeply."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    return value


def _fill(row: Row, fields: dict[str, Any], allow_unknown: bool) -> None:
    """Puts the fields of a JSON object where they belong in the row; what is there of it is true also in an error."""
    row.extra = {name: value for name, value in fields.items() if name not in KNOWN}
    identity = fields.get("id")
    if isinstance(identity, bool) or not isinstance(identity, str | int | float | None):
        raise _wrong(row, f"id must be a string or a number, not {_kind(identity)}")
    row.id = identity
    row.params = {ALIASES.get(name, name): fields[name] for name in fields if name in PARAM_NAMES or name in ALIASES}
    row.raw = _typed(row, fields, "raw", bool, False)
    row.priority = _typed(row, fields, "priority", int, 0)
    for name, nothing in LATER.items():
        if fields.get(name) not in (None, nothing):
            raise _wrong(row, f"{name} is not available in this version of cbatch")
    if not allow_unknown:
        _check_spelling(row)
    forms = {name: fields[name] for name in FORMS if name in fields}
    if len(forms) != 1:
        found = "has both " + " and ".join(forms) if forms else f"has none of {', '.join(FORMS)}"
        raise _wrong(row, f"the row {found}")
    _fill_prompt(row, *forms.popitem())
    if row.raw and row.prompt is None:
        raise _wrong(row, "raw goes with prompt only")


def _check_spelling(row: Row) -> None:
    """Refuses a key that is no column of the user's own but a parameter misspelt."""
    for name in row.extra:
        if meant := _misspelt(name):
            raise RequestError(
                "unknown_parameter",
                f"line {row.index + 1}: unknown parameter {name!r}; did you mean {meant!r}? "
                "(--allow-unknown carries it along)",
            )


def _fill_prompt(row: Row, form: str, value: Any) -> None:
    if form == "messages":
        row.messages = _messages(row, value)
    elif form == "prompt":
        if not isinstance(value, str) or not value:
            raise _wrong(row, "prompt is empty" if value == "" else f"prompt must be a string, not {_kind(value)}")
        row.prompt = value
    else:
        if not isinstance(value, list) or not value or any(type(token) is not int for token in value):
            raise _wrong(row, "prompt_token_ids must be a list of at least one whole number")
        row.prompt_token_ids = value


def _messages(row: Row, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise _wrong(row, "messages must be a list of at least one message")
    messages = []
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _wrong(row, f"message {number} must be an object with a role and content")
        messages.append({**message, "content": _content(row, number, message.get("content"))})
    return messages


def _content(row: Row, number: int, value: Any) -> str:
    """Text of one message; text parts are joined."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _wrong(row, f"content of message {number} must be text, not {_kind(value)}")
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise _wrong(row, f"message {number} has a content part that is not text")
    return "".join(part["text"] for part in value)


def _typed(row: Row, fields: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    value = fields.get(name)
    if value is None:
        return default
    if type(value) is not kind:
        wanted = {bool: "true or false", int: "a whole number"}[kind]
        raise _wrong(row, f"{name} must be {wanted}, not {_kind(value)}")
    return value


def _wrong(row: Row, message: str) -> RequestError:
    return RequestError("invalid_row", f"line {row.index + 1}: {message}")


def _kind(value: Any) -> str:
    """What a JSON value is, in JSON's own words."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    names: dict[type, str] = {str: "a string", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names[type(value)]


def _misspelt(name: str) -> str | None:
    """The parameter of five letters or more that `name` is a single edit away from."""
    return next((known for known in KNOWN if len(known) >= 5 and _one_edit_apart(name, known)), None)


def _one_edit_apart(a: Sequence[str], b: Sequence[str]) -> bool:
    """One insertion, deletion, replacement or swap of neighbours (optimal string alignment distance 1)."""
    if abs(len(a) - len(b)) > 1 or a == b:
        return False
    first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    rest_a, rest_b = a[first:], b[first:]
    if len(a) != len(b):
        return rest_a[1:] == rest_b or rest_a == rest_b[1:]
    swapped = rest_a[:2] == rest_b[:2][::-1] and rest_a[2:] == rest_b[2:]
    return rest_a[1:] == rest_b[1:] or swapped
