"""Tools of a request and tool calls in a model's text, in the formats of the public model families.

A call counts only if it is whole: valid JSON with a name. No reader of calls raises.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from cbatch.base.errors import RequestError
from cbatch.base.outputs import ToolCall

HERMES, MISTRAL, LLAMA = "<tool_call>", "[TOOL_CALLS]", "<|python_tag|>"
"""The tags that tool calls begin with: Hermes and Qwen, Mistral, and Llama 3, which mostly leaves its tag out."""

TOOL_TAGS = {HERMES: (HERMES, "</tool_call>"), MISTRAL: (MISTRAL, "[CALL_ID]", "[ARGS]"), LLAMA: (LLAMA,)}
"""For each format, every tag that is needed to read it."""

MAX_INVALID_CALLS = 100
"""After so many tags without a call, the rest of an output counts as text: the model is repeating itself.

Each such tag costs time in proportion to the length of the output.
"""

_HERMES_END = re.compile(r"\s*+(?:</tool_call>|(?=<tool_call>)|\Z)")
_MISTRAL_HEAD = re.compile(r"([\w.-]++)\s*+(?:\[CALL_ID\]\s*+[\w-]*+\s*+)?(?:\[ARGS\]\s*+)?(?=\{)")
_FUNCTION = re.compile(r"<function=([^<>\n]+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?")
_PARAMETER_END = re.compile(r"</parameter>\s*")
_SURROGATE = re.compile("[\ud800-\udfff]")


def check_tools(value: Any) -> list[dict[str, Any]]:
    """The `tools` field of a row. Raises RequestError (`invalid_row`) unless it is a list of OpenAI's functions."""
    if not isinstance(value, list):
        raise RequestError("invalid_row", "tools must be a list of functions.")
    for number, tool in enumerate(value, start=1):
        if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
            sentence = f'Tool {number} must be an object {{"type": "function", "function": {{"name": ...}}}}.'
            raise RequestError("invalid_row", sentence)
        function = tool["function"]
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise RequestError("invalid_row", f"The function of tool {number} must have a name.")
        if not isinstance(function.get("parameters"), dict | None):
            raise RequestError("invalid_row", f"The parameters of tool {number} must be a JSON schema, an object.")
    return value


def extract_tool_calls(text: str, tag: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[ToolCall]]:
    """The text without its tool calls, and the calls in their order.

    tag:   HERMES, MISTRAL or LLAMA
    tools: the request's tools; their schemas give the types of arguments that are written as text

    Without a call the text is unchanged. Otherwise the pieces of text around the calls are joined, a line each: white
    space around them goes, except in front of text before the first call, since a stream has shown that by then.
    """
    if tag == LLAMA:
        return _extract_llama(text)
    read = _read_mistral if tag == MISTRAL else partial(_read_hermes, tools)
    pieces: list[str] = []
    calls: list[ToolCall] = []
    begin = place = num_invalid = 0
    opening = re.compile(re.escape(tag) + r"\s*")
    while num_invalid < MAX_INVALID_CALLS and (found := opening.search(text, place)):
        place = found.end()
        block = read(text, place)
        if block:
            calls += block[0]
            pieces.append(text[begin : found.start()])
            begin = place = block[1]
        else:
            num_invalid += 1
    pieces.append(text[begin:])
    if not calls:
        return text, []
    pieces = [pieces[0].rstrip(), *(piece.strip() for piece in pieces[1:])]
    return "\n".join(piece for piece in pieces if piece), calls


def _extract_llama(text: str) -> tuple[str, list[ToolCall]]:
    before, tag, after = text.partition(LLAMA)
    parsed = whole_json(after if tag else text)
    if parsed and isinstance(parsed[0], dict) and parsed[0].keys() & {"parameters", "arguments"}:
        call = _to_call(parsed[0])
        if call:
            return (before.rstrip() if tag else ""), [call]
    return text, []


def _read_hermes(tools: Sequence[Mapping[str, Any]], text: str, at: int) -> tuple[list[ToolCall], int] | None:
    found = _read_function(tools, text, at) if text.startswith("<function=", at) else _read_json_calls(text, at)
    end = _HERMES_END.match(text, found[1]) if found else None
    return (found[0], end.end()) if found and end else None


def _read_mistral(text: str, at: int) -> tuple[list[ToolCall], int] | None:
    head = _MISTRAL_HEAD.match(text, at)
    if head is None:
        return _read_json_calls(text, at)
    parsed = _json_at(text, head.end())
    call = _to_call({"name": head[1], "arguments": parsed[0]}) if parsed else None
    return ([call], parsed[1]) if parsed and call else None


def _read_json_calls(text: str, at: int) -> tuple[list[ToolCall], int] | None:
    """One call or a list of calls as JSON. If one item of the list is not a call, the whole list is none."""
    parsed = _json_at(text, at)
    if parsed is None:
        return None
    values = parsed[0] if isinstance(parsed[0], list) else [parsed[0]]
    calls = [call for value in values if (call := _to_call(value))]
    return (calls, parsed[1]) if calls and len(calls) == len(values) else None


def _read_function(tools: Sequence[Mapping[str, Any]], text: str, at: int) -> tuple[list[ToolCall], int] | None:
    """Qwen3-Coder's format: `<function=name>`, with one tag for each parameter."""
    function = _FUNCTION.match(text, at)
    if function is None:
        return None
    schemas, arguments, place = _properties(tools, function[1]), {}, function.end()
    while parameter := _PARAMETER.match(text, place):
        close = _PARAMETER_END.search(text, parameter.end())
        if close is None:
            return None
        value = text[parameter.end() : close.start()].removesuffix("\n")
        arguments[parameter[1]] = _typed(value, schemas.get(parameter[1]))
        place = close.end()
    call = _to_call({"name": function[1], "arguments": arguments})
    return ([call], place + len("</function>")) if call and text.startswith("</function>", place) else None


def _properties(tools: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    functions = [tool["function"] for tool in tools if tool["function"]["name"] == name]
    properties = (functions[0].get("parameters") or {}).get("properties") if functions else None
    return properties if isinstance(properties, dict) else {}


def _typed(value: str, schema: Any) -> Any:
    """A parameter written as text. It is JSON if its schema gives a type other than string; otherwise a string."""
    kinds = schema.get("type") if isinstance(schema, dict) else None
    if not isinstance(kinds, str | list) or "string" in kinds:
        return value
    # Templates write earlier calls back through str(), so models write these words as Python does.
    parsed = whole_json({"True": "true", "False": "false", "None": "null"}.get(value.strip(), value))
    return parsed[0] if parsed else value


def _to_call(value: Any) -> ToolCall | None:
    if not isinstance(value, dict):
        return None
    name, given = value.get("name"), value.get("arguments", value.get("parameters"))
    if isinstance(given, str):
        parsed = whole_json(given)
        given = parsed[0] if parsed else given
    arguments = {} if given is None else given
    if not isinstance(name, str) or not name or _SURROGATE.search(name) or not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    return ToolCall(name, _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", text))


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _json_at(text: str, at: int) -> tuple[Any, int] | None:
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None


def whole_json(text: str) -> tuple[Any] | None:
    """The value of a text that is JSON with nothing but white space around it, in a tuple of one. None otherwise."""
    text = text.strip()
    parsed = _json_at(text, 0)
    return (parsed[0],) if parsed and parsed[1] == len(text) else None
