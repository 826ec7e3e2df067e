"""Translates constraints into Lark grammars of llguidance.

Among them are grammars that make a model call one of its tools: `tool_choice` `required`, or a function by name. The
call has the form that the model's chat template shows, so that `OutputStream` reads it, and its arguments fit the JSON
schema of the function.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from cbatch.base.errors import RequestError, invalid_row
from cbatch.base.params import Constraint, Kind, SamplingParams
from cbatch.base.request import ToolChoice
from cbatch.sample.structured.call_rules import HEADER
from cbatch.sample.structured.json_schema import RESERVED_KEYWORD, json_rule, schema_faults
from cbatch.text.replies.declaration import NAME, Calls
from cbatch.text.tokenizer import ChatTokenizer

_log = logging.getLogger("cbatch")
_told: set[str] = set()
"""Warnings of schemas that the user of this process has seen."""

MAX_SOURCE = 1 << 20
"""Most characters of a schema, a pattern, a grammar or all choices together."""

_NAMES: dict[Kind, str] = {
    "json_object": "The JSON object",
    "json_schema": "The JSON schema",
    "regex": "The regex",
    "choice": "The list of choices",
    "grammar": "The grammar",
    "tool_call": "The call of a tool",
}


MAX_TOOLS = 128
"""Most tools that one output may choose from: OpenAI's own limit. Each schema is compiled on its own first."""


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
    """The constraint as a grammar of llguidance; calls of tools have a grammar of their own (see `ToolCallGrammar`).

    Raises RequestError (`invalid_row`) if it is invalid.
    """
    check_source(constraint)
    match constraint.kind:
        case "json_object":
            return f"{HEADER}start: {json_rule({'type': 'object'}, pretty=constraint.pretty)}"
        case "json_schema":
            try:
                return f"{HEADER}start: {json_rule(_read_schema(constraint), pretty=constraint.pretty)}"
            except RecursionError:
                raise constraint_error(constraint, "It is nested too deeply.") from None
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
    return invalid_row(f"{name} cannot be used: {_shorten(constraint, what)}")


def _read_schema(constraint: Constraint) -> dict[str, Any]:
    schema = json.loads(constraint.source)
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise constraint_error(constraint, "It must be a JSON object.")
    if RESERVED_KEYWORD in schema:
        raise constraint_error(constraint, f"The keyword {RESERVED_KEYWORD} cannot be used here.")
    for is_type, sentence in schema_faults(schema):
        if is_type:
            raise constraint_error(constraint, sentence)
        if sentence not in _told:
            _told.add(sentence)
            _log.warning("%s", sentence.rstrip("."))
    return schema


def _read_choices(constraint: Constraint) -> list[str]:
    choices: list[str] = json.loads(constraint.source)
    if any("\ud800" <= character <= "\udfff" for character in "".join(choices)):
        raise constraint_error(constraint, "It holds half of a character (a lone surrogate).")
    return choices


def _escape(text: str) -> str:
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


def request_constraint(
    params: SamplingParams,
    tokenizer: ChatTokenizer | None,
    tools: Sequence[Mapping[str, Any]] = (),
    choice: ToolChoice | None = None,
) -> Constraint | None:
    """The constraint on a request's output: that of its parameters, or a forced call of a tool.

    One call if the choice names a function, otherwise at least one, as far as the model's form has room for several.

    tools: the request's tools, as `check_tools` takes them

    Raises RequestError (`invalid_row`) if the request has both, if there is no such tool, for parameters that are not
    those of an object, and for a model whose form of calls is not known.
    """
    if choice is None:
        return params.constraint
    if params.constraint is not None:
        raise invalid_row("A forced call of a tool cannot be combined with another constraint.")
    functions = [tool["function"] for tool in tools]
    if choice.name is not None:
        functions = [function for function in functions if function["name"] == choice.name]
    if not functions:
        wanted = "no tools" if choice.name is None else f"no tool {choice.name!r}"
        raise invalid_row(f"tool_choice forces a call, but the request has {wanted}.")
    if len(functions) > MAX_TOOLS:
        raise invalid_row(f"A call can be forced from at most {MAX_TOOLS} tools, not {len(functions)}.")
    replies = tokenizer.reply_format if tokenizer is not None else None
    if replies is None or replies.calls is None or not replies.calls.is_forcible:
        what = "this model's chat template shows no format of tool calls that can be enforced"
        raise invalid_row(f"tool_choice cannot force a call: {what}.")
    described = [(function["name"], _parameters_of(function, replies.calls)) for function in functions]
    is_led = replies.reasoning is not None and not replies.headers
    asked = {"form": replies.name, "is_repeated": choice.name is None, "is_led": is_led, "functions": described}
    return Constraint("tool_call", json.dumps(asked))


def _parameters_of(function: Mapping[str, Any], calls: Calls) -> dict[str, Any]:
    name, parameters = function["name"], function.get("parameters")
    if not calls.is_object and not re.fullmatch(NAME, name):
        raise invalid_row(f"The model's format of tool calls has no room for the name {name!r}.")
    if parameters is None:  # in OpenAI's API, a function without arguments
        return {"type": "object", "properties": {}, "additionalProperties": False}
    kinds = parameters.get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        raise invalid_row(f"The parameters of the tool {name!r} must be of the type object.")
    if RESERVED_KEYWORD in parameters:
        what = f"the keyword {RESERVED_KEYWORD} cannot be used here"
        raise invalid_row(f"The parameters of the tool {name!r} cannot be used: {what}.")
    for key in parameters.get("properties") or () if calls.parts[1] != "json" else ():
        if not (key.isidentifier() if calls.parts[1] == "python" else re.fullmatch(NAME, key)):
            what = f"The model's format of tool calls has no room for the argument {key!r} of the tool {name!r}."
            raise invalid_row(what)
    return {**parameters, "type": "object"}
