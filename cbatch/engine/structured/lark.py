"""Translates constraints into Lark grammars of llguidance."""

from __future__ import annotations

import json
import re
from typing import Any

from cbatch.engine.base.constraint import Constraint, Kind
from cbatch.engine.base.errors import RequestError

MAX_SOURCE = 1 << 20
"""Most characters of a schema, a pattern, a grammar or all choices together."""

# Without this the library allows only one tokenization of text that the grammar forces.
_HEADER = '%llguidance {"no_forcing": true}\n'

# A small model can fill its whole budget with blanks if any number of them is allowed.
_JSON_OPTIONS = {"whitespace_pattern": r"( |\r?\n[ \t]{0,40})", "lenient": False}

_NAMES: dict[Kind, str] = {
    "json_object": "The JSON object",
    "json_schema": "The JSON schema",
    "regex": "The regex",
    "choice": "The list of choices",
    "grammar": "The grammar",
}


def to_lark(constraint: Constraint) -> str:
    """The constraint as a grammar of llguidance. Raises RequestError (`invalid_row`) if it is invalid."""
    source = constraint.source
    if len(source) > MAX_SOURCE:
        raise constraint_error(constraint, f"It has {len(source)} characters; at most {MAX_SOURCE} are read.")
    try:
        source.encode()
    except UnicodeEncodeError:
        raise constraint_error(constraint, "It holds half of a character (a lone surrogate).") from None
    if constraint.kind == "json_object":
        return _json_grammar({"type": "object"})
    if constraint.kind == "json_schema":
        return _json_grammar(_read_schema(constraint))
    if constraint.kind == "regex":
        return _HEADER + f"start: /{_regex_body(source)}/"
    if constraint.kind == "choice":
        return _HEADER + f"start: /{'|'.join(map(_escape, _read_choices(constraint)))}/"
    if constraint.kind == "grammar":
        if "%llguidance" in source:
            raise constraint_error(constraint, "The directive %llguidance cannot be used here.")
        return _HEADER + source
    raise RequestError("invalid_row", f"There is no constraint of the kind {constraint.kind!r}.")


def constraint_error(constraint: Constraint, what: str) -> RequestError:
    """The error of a request with an invalid constraint. `what` is a sentence, or the library's message."""
    return RequestError("invalid_row", f"{_NAMES[constraint.kind]} cannot be used: {_shorten(constraint, what)}")


def _json_grammar(schema: dict[str, Any]) -> str:
    return _HEADER + "start: %json " + json.dumps(schema | {"x-guidance": _JSON_OPTIONS})


def _read_schema(constraint: Constraint) -> dict[str, Any]:
    schema = _read_json(constraint)
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise constraint_error(constraint, "It must be a JSON object.")
    if "x-guidance" in schema:
        raise constraint_error(constraint, "The keyword x-guidance cannot be used here.")
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


def _regex_body(pattern: str) -> str:
    """A pattern as it is written between two slashes, with \\d as 0 to 9."""
    # One pass over pairs, so that what is already escaped stays as it is.
    pairs = re.compile(r"\\.|[/\n\r]", re.DOTALL)
    return pairs.sub(lambda found: _IN_SLASHES.get(found[0], found[0]), pattern) or "(?:)"


_IN_SLASHES = {
    "/": "\\/",
    "\n": "\\n",
    "\r": "\\r",
    "\\\n": "\\n",
    "\\\r": "\\r",
    "\\d": "[0-9]",
    "\\D": "[^0-9]",
}


def _escape(text: str) -> str:
    """A pattern that matches only this text."""
    return "".join(
        character if character.isalnum() or ord(character) > 0x2FFF else f"\\x{{{ord(character):X}}}"
        for character in text
    )


def _shorten(constraint: Constraint, what: str) -> str:
    """The line of the library's message that gives the reason, as the end of a sentence, without the excerpt."""
    lines = [line.strip() for line in what.splitlines() if line.strip()]
    reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    found = re.match(
        r'^(?:(?:at )?(\d+)\(\d+\): )?(?:failed to compile JSON schema: |failed to parse "%json": )?', reason
    )
    assert found is not None
    reason = reason[found.end() :]
    if constraint.kind == "grammar" and found[1]:  # the header is a line that the request does not have
        reason = f"line {int(found[1]) - 1}: {reason}"
    return reason[:200] + ("…" if len(reason) > 200 else "" if reason.endswith((".", "!", "?")) else ".")
