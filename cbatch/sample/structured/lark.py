"""Translates constraints into Lark grammars of llguidance."""

from __future__ import annotations

import json
import re
from typing import Any

from cbatch.base.errors import RequestError
from cbatch.base.params import Constraint, Kind

MAX_SOURCE = 1 << 20
"""Most characters of a schema, a pattern, a grammar or all choices together."""

# Without this the library allows only one tokenization of text that the grammar forces.
HEADER = '%llguidance {"no_forcing": true}\n'

# A small model can fill its whole budget with blanks if any number of them is allowed.
_JSON_OPTIONS = {"whitespace_pattern": r"( |\r?\n[ \t]{0,40})", "lenient": False}

RESERVED_KEYWORD = "x-guidance"
"""The library's keyword for its own options in a JSON schema."""

_NAMES: dict[Kind, str] = {
    "json_object": "The JSON object",
    "json_schema": "The JSON schema",
    "regex": "The regex",
    "choice": "The list of choices",
    "grammar": "The grammar",
    "tool_call": "The call of a tool",
}


def check_source(constraint: Constraint) -> None:
    """Raises RequestError (`invalid_row`) for a source that is too long, or that is not text."""
    source = constraint.source
    if len(source) > MAX_SOURCE:
        raise constraint_error(constraint, f"It has {len(source)} characters; at most {MAX_SOURCE} are read.")
    try:
        source.encode()
    except UnicodeEncodeError:
        raise constraint_error(constraint, "It holds half of a character (a lone surrogate).") from None


def to_lark(constraint: Constraint) -> str:
    """The constraint as a grammar of llguidance; calls of tools have a grammar of their own (see `tool_choice`).

    Raises RequestError (`invalid_row`) if it is invalid.
    """
    check_source(constraint)
    match constraint.kind:
        case "json_object":
            return f"{HEADER}start: {json_rule({'type': 'object'})}"
        case "json_schema":
            return f"{HEADER}start: {json_rule(_read_schema(constraint))}"
        case "regex":
            import llguidance

            pattern = constraint.source
            if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
                raise constraint_error(constraint, "It ends with a backslash.")
            return f"{HEADER}start: /{llguidance.regex_to_lark(pattern, 'd') or '(?:)'}/"  # \d is 0 to 9
        case "choice":
            return f"{HEADER}start: /{'|'.join(map(_escape, _read_choices(constraint)))}/"
    if "%llguidance" in constraint.source:
        raise constraint_error(constraint, "The directive %llguidance cannot be used here.")
    return HEADER + constraint.source


def constraint_error(constraint: Constraint, what: str, part: str = "") -> RequestError:
    """The error of a request with an invalid constraint.

    what: a sentence, or the library's message
    part: the part of the constraint that is wrong, as the beginning of a sentence; by default, all of it
    """
    name = part or _NAMES[constraint.kind]
    return RequestError("invalid_row", f"{name} cannot be used: {_shorten(constraint, what)}")


def json_rule(schema: dict[str, Any]) -> str:
    """The rule of a grammar for JSON that is valid for a schema."""
    return "%json " + json.dumps(schema | {RESERVED_KEYWORD: _JSON_OPTIONS})


def _read_schema(constraint: Constraint) -> dict[str, Any]:
    schema = _read_json(constraint)
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise constraint_error(constraint, "It must be a JSON object.")
    if RESERVED_KEYWORD in schema:
        raise constraint_error(constraint, f"The keyword {RESERVED_KEYWORD} cannot be used here.")
    return schema


def _read_choices(constraint: Constraint) -> list[str]:
    choices = _read_json(constraint)
    if not isinstance(choices, list) or not choices or not all(isinstance(item, str) and item for item in choices):
        raise constraint_error(constraint, "It must be a list of strings that are not empty, at least one.")
    if any("\ud800" <= character <= "\udfff" for character in "".join(choices)):
        raise constraint_error(constraint, "It holds half of a character (a lone surrogate).")
    return choices


def _read_json(constraint: Constraint) -> Any:
    try:
        return json.loads(constraint.source)
    except ValueError as error:
        raise constraint_error(constraint, f"It is not valid JSON: {error}.") from error
    except RecursionError as error:
        raise constraint_error(constraint, "It is nested too deeply.") from error


def _escape(text: str) -> str:
    """A pattern that matches only this text."""
    return "".join(one if one.isalnum() or ord(one) > 0x2FFF else f"\\x{{{ord(one):X}}}" for one in text)


def _shorten(constraint: Constraint, what: str) -> str:
    """The line of the library's message that gives the reason, as the end of a sentence, without the excerpt."""
    lines = [line.strip() for line in what.splitlines() if line.strip()]
    reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    place = re.match(r"(?:at )?(\d+)\(\d+\): ", reason)
    reason = reason.removeprefix(place[0] if place else "")
    reason = reason.removeprefix("failed to compile JSON schema: ").removeprefix('failed to parse "%json": ')
    if constraint.kind == "grammar" and place:  # the header is a line that the request does not have
        reason = f"line {int(place[1]) - 1}: {reason}"
    return reason[:200] + ("…" if len(reason) > 200 else "" if reason.endswith((".", "!", "?")) else ".")
