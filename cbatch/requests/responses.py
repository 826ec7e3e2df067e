"""Requests of OpenAI's Responses API as chat completions, and answers to them in that API's form.

https://platform.openai.com/docs/api-reference/responses describes both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cbatch.base.request import ApiCall, Request
from cbatch.base.strict_json import json_type

Fields = dict[str, Any]

_REFUSED = {
    **dict.fromkeys(["previous_response_id", "conversation"], "nothing is stored; give the earlier items in input"),
    **dict.fromkeys(["background", "background_options"], "a batch gives whole answers"),
    "max_tool_calls": "it counts calls of built-in tools, and there are none",
    "context_management": "nothing is compacted; truncate_prompt shortens a prompt that is too long",
    "access_programs": "models have no programs of access",
    "image": "images stand in input, as parts input_image",
    "response_format": "text.format says it",
}
"""Fields that are not available, and why. Null and false ask for nothing."""

_STR, _LIST, _DICT, _BOOL = str | None, list | None, dict | None, bool | None
_BODY = {"input": str | list, "instructions": _STR, "include": _LIST, "text": _DICT, "metadata": _DICT, "tools": _LIST}
FIELDS = frozenset([*_REFUSED, *_BODY])
"""Fields of a request that a chat completion does not have, or has in another form."""

_SCHEMA = {"name": str, "description": _STR, "schema": dict, "strict": _BOOL}
_TOOL = {"name": str, "description": _STR, "parameters": _DICT, "strict": _BOOL}
_ITEMS: dict[str, Fields] = {
    "reasoning": {"content": _LIST, "summary": _LIST},
    "message": {"role": str, "content": str | list},
    "function_call": {"call_id": str, "name": str, "arguments": str},
    "function_call_output": {"call_id": str, "name": _STR, "output": str | list},
}
"""Items of an input. An answer consists of the first three, in this order."""

_ROLES = ("user", "assistant", "system", "developer")
_PARTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text")
_BOOKKEEPING = ("type", "id", "status", "phase")
_USAGE = {"prompt_tokens": "input_tokens", "completion_tokens": "output_tokens", "total_tokens": "total_tokens"}
_LOGPROBS = "message.output_text.logprobs"
_OF_CHATS = "created choices index finish_reason logprobs message role content refusal reasoning tool_calls".split()
"""Fields of a chat completion that a Response has in another form. It has all others as they are."""


def chat_request(row: Request, body: Fields) -> Fields:
    """The body of a chat completion that asks for the same. Unknown names are kept. Sets the row's `call`.

    Raises RequestError for what is not available, and for what cannot be read.
    """
    for name, reason in _REFUSED.items():
        if body.get(name) is not None and body[name] is not False:
            raise row.invalid(f"{name} is not available: {reason}")
    given = {name: body.get(name) for name in _BODY}
    _check(row, "", given, _BODY)
    instructions, text = given["instructions"], given["text"] or {}
    chat = {name: value for name, value in body.items() if name not in FIELDS}
    chat["messages"] = [{"role": "system", "content": instructions}] if instructions else []
    chat["messages"] += _messages(row, body["input"])
    if strange := [wanted for wanted in given["include"] or () if wanted != _LOGPROBS]:
        raise row.invalid(f"include has {strange[0]!r:.60}, which is not available: it may have {_LOGPROBS}")
    chat |= {"logprobs": True} if given["include"] else {}
    if body.get("top_logprobs") and not chat.get("logprobs"):
        raise row.invalid(f'top_logprobs needs include to be ["{_LOGPROBS}"]')
    _check(row, "text.", text, {"format": _DICT, "verbosity": _STR})
    chat["verbosity"] = text.get("verbosity")
    if (form := text.get("format")) is not None:
        kind = form.get("type")
        if kind not in ("text", "json_object", "json_schema"):
            raise row.invalid(f"text.format.type must be text, json_object or json_schema, not {kind!r:.60}")
        _check(row, "text.format.", form, _SCHEMA if kind == "json_schema" else {})
        schema = {name: value for name, value in form.items() if name != "type"}
        chat["response_format"] = {"type": kind} | ({kind: schema} if kind == "json_schema" else {})
    for number, tool in enumerate(tools := given["tools"] or []):
        kind = tool.get("type") if isinstance(tool, dict) else json_type(tool)
        if kind != "function":
            raise row.invalid(f"tools[{number}] is {kind!r:.60}, which is not available: tools are functions")
        _check(row, f"tools[{number}].", tool, _TOOL)
    functions = ({name: tool[name] for name in _TOOL if tool.get(name) is not None} for tool in tools)
    chat["tools"] = [{"type": "function", "function": function} for function in functions]
    choice = body.get("tool_choice") or "auto"
    if isinstance(choice, dict) and choice.get("type") == "function":
        chat["tool_choice"] = {"type": "function", "function": choice}
    metadata = given["metadata"] or {}
    _check(row, "metadata.", metadata, dict.fromkeys(metadata, str))
    repeated = {
        "instructions": instructions,
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": metadata,
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "text": {"format": form or {"type": "text"}},
        "tool_choice": choice,
        "tools": tools,
    }
    row.call = ApiCall(True, row.call.model if row.call is not None else None, json.dumps(repeated))
    return chat


def _check(row: Request, where: str, fields: Fields, kinds: Fields) -> None:
    """Raises RequestError unless fields have these types. Others may be null or false, apart from bookkeeping."""
    for name, value in fields.items():
        if name not in kinds and name not in _BOOKKEEPING and value is not None and value is not False:
            raise row.invalid(f"{where}{name} is not available: there are {', '.join(kinds) or 'no other fields'}")
    for name, kind in kinds.items():
        if not isinstance(fields.get(name), kind):
            raise row.invalid(f"{where}{name} must not be {json_type(fields.get(name))}")


def _messages(row: Request, given: str | Sequence[Any]) -> list[Fields]:
    """The messages that an input stands for. Items that one answer consisted of become one message."""
    messages: list[Fields] = []
    kinds, called = [*_ITEMS], set[str]()
    before = -1  # the place of the last item among the parts of an answer
    for number, item in enumerate([{"role": "user", "content": given}] if isinstance(given, str) else given):
        where = f"input[{number}]"
        kind = (item.get("type") or "message") if isinstance(item, dict) else json_type(item)
        if kind not in kinds:
            raise row.invalid(f"{where} is {kind!r:.60}, which is not available: there are {', '.join(kinds)}")
        _check(row, f"{where}.", item, _ITEMS[kind])
        given_parts = item.get("content") or item.get("summary") or item.get("output") or ""
        text = _content(row, where, given_parts, takes_images=kind in ("message", "function_call_output"))
        if kind == "reasoning" and not text:
            continue
        role, name, place = item.get("role", "assistant"), item.get("call_id", ""), kinds.index(kind)
        if role not in _ROLES:
            raise row.invalid(f"{where}.role must be one of {', '.join(_ROLES)}")
        if kind == "function_call_output":
            if name not in called:
                raise row.invalid(f"{where}.call_id is {name!r:.60}, which no function_call before it has")
            messages.append({"role": "tool", "tool_call_id": name, "content": text})
        elif role != "assistant" or not 0 <= before <= place or (kind == "message" and before == place):
            messages.append({"role": role, "content": ""})
        answer = messages[-1]
        if kind == "function_call":
            called.add(name)
            function = {"name": item["name"], "arguments": item["arguments"]}
            answer.setdefault("tool_calls", []).append({"id": name, "type": "function", "function": function})
        elif kind == "reasoning":
            answer["reasoning"] = answer.get("reasoning", "") + text
        elif kind == "message":
            answer["content"] = text
        before = place if answer["role"] == "assistant" else -1
    if not (given and messages):
        raise row.invalid("input is empty")
    return messages


def _content(row: Request, where: str, value: str | list[Any], *, takes_images: bool) -> Any:
    """The content of a message: its text, or a list of parts if it has images."""
    parts = [{"type": "text", "text": value}] if isinstance(value, str) else value
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else json_type(part)
        is_image = kind == "input_image" and takes_images
        if not is_image and (kind not in _PARTS or not isinstance(part.get("text"), str)):
            raise row.invalid(f"{where} has content of the type {kind!r:.60}, which is not available")
    if all(part["type"] in _PARTS for part in parts):
        return "".join(part["text"] for part in parts)
    return [{**part, "type": "text"} if part["type"] in _PARTS else part for part in parts]


def response_of(chat: Mapping[str, Any], key: str, repeated: Mapping[str, Any]) -> Fields:
    """A ChatCompletion of one output as a Response, which repeats fields of its request. Ids derive from the row's key.

    Cached tokens depend on what ran before, so they are 0.
    """
    (choice,), usage = chat["choices"], chat["usage"]
    message, scores, is_cut = choice["message"], choice["logprobs"], choice["finish_reason"] == "length"
    text, thought, calls = (message.get(name) for name in ("content", "reasoning", "tool_calls"))
    output: list[Fields] = []
    if thought is not None:
        parts: list[Fields] = [{"type": "reasoning_text", "text": thought}]
        output.append({"id": f"rs_{key}", "type": "reasoning", "summary": [], "content": parts})
    if text or scores or not (thought or calls):
        parts = [{"type": "output_text", "text": text or "", "annotations": []}]
        parts[0] |= {"logprobs": scores["content"]} if scores else {}
        output.append({"id": f"msg_{key}", "type": "message", "role": "assistant", "content": parts})
    for item in output:
        item["status"] = "incomplete" if is_cut and item is output[-1] else "completed"
    for call in calls or ():
        item = {"id": f"fc_{call['id']}", "type": "function_call", "call_id": call["id"]}
        output.append({**item, **call["function"], "status": "completed"})
    made = {
        "id": f"resp_{key}",
        "object": "response",
        "created_at": 0,
        "status": "incomplete" if is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "model": chat["model"],
        "output": output,
        **repeated,
        "usage": {
            **{name: usage[ours] for ours, name in _USAGE.items()},
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens_details": usage.get("completion_tokens_details", {"reasoning_tokens": 0}),
        },
    }
    others = {**chat, **choice, **message}
    return made | {name: others[name] for name in others if name not in made and name not in _OF_CHATS}


def answer_of(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The answer in a row of output: the row or the body of its `response`, of a Response as a ChatCompletion.

    Scores are choices, and so are documents that are ranked.
    """
    body: Mapping[str, Any] = fields["response"]["body"] if "response" in fields else fields
    if "response" in fields and "data" in body and "embedding" not in body["data"][0]:
        return {**body, "choices": body["data"]}
    if "response" in fields and "results" in body:
        ranked = ({"text": one["document"]["text"], "score": one["relevance_score"], **one} for one in body["results"])
        return {**body, "choices": [*ranked]}
    if body.get("object") != "response":
        return body
    (message,) = _messages(Request(), body["output"])
    said: Fields = next((item["content"][0] for item in body["output"] if item["type"] == "message"), {})
    scores = {"content": said["logprobs"]} if "logprobs" in said else None
    ending = "length" if body["status"] == "incomplete" else "tool_calls" if "tool_calls" in message else "stop"
    usage = {ours: body["usage"][name] for ours, name in _USAGE.items()}
    thought = body["usage"]["output_tokens_details"]
    usage |= {"completion_tokens_details": thought} if thought["reasoning_tokens"] else {}
    message["note"] = body.get("note")
    choice = {**body, "index": 0, "finish_reason": ending, "logprobs": scores, "message": message}
    return {**body, "choices": [choice], "usage": usage}
