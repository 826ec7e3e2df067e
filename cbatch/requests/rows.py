"""Reads a row from an object: cbatch's own forms, or a request line of the OpenAI Batch API.

https://platform.openai.com/docs/api-reference/batch describes the latter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cbatch.base.errors import RequestError, invalid_row
from cbatch.base.params import ALIASES, with_overrides
from cbatch.base.request import ApiCall, Request, ToolChoice
from cbatch.base.strict_json import json_type
from cbatch.requests import responses
from cbatch.requests.embeddings import EMBED, EMBEDDINGS, FIELDS, fill_embedding
from cbatch.requests.param_names import (
    COLUMN_NAMES,
    IGNORED,
    REFUSED,
    ROW_FIELDS,
    TEMPLATE_FIELDS,
    TOOL_FIELDS,
    UNDERSTOOD,
    intended_name,
    is_param,
    own_params,
    translate,
)
from cbatch.requests.scores import PAIR_FIELDS, RANKING_FIELDS, SCORE, take_continuations, take_pair

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SCORES, RANKING = "/v1/score", "/v1/rerank"
PROMPT_OF_URL = {CHAT: "messages", TEXT: "prompt", EMBEDDINGS: "input", RESPONSES: "input"}
PROMPT_OF_URL |= {SCORES: "text_1", RANKING: "query"}

MAX_PRIORITY = 2**31
"""Leaves room for more urgent requests: those of a chat that runs rows in the background."""

ID_FIELDS = ("id", "custom_id")
KNOWN = frozenset([*ROW_FIELDS, *UNDERSTOOD])

SPELLINGS = frozenset([*ALIASES, *UNDERSTOOD, *ROW_FIELDS]) - {*COLUMN_NAMES, "system"}
"""Names that a misspelt one may have been meant to be. Everyday words are not among them."""

_CUSTOM_ID = re.compile(rb'\s*\{\s*"custom_id"\s*:\s*(?:"([^"\\]*)")?')

ENVELOPE_FIELDS = ("custom_id", "method", "url", "body")
"""Fields of a request line of the OpenAI Batch API."""

_MEDIA = {"image_url": "image", "image": "image", "input_image": "image", "video_url": "video", "video": "video"}
"""The media that content parts of these kinds are, of OpenAI's APIs, of vLLM and of transformers."""

_ROLES_WITH_IMAGES = ("user", "tool", "system", "developer")

_OF_CHATS = "top_logprobs enable_thinking think thinking reasoning_effort reasoning".split()
CHAT_FIELDS = (*TOOL_FIELDS, *TEMPLATE_FIELDS, *_OF_CHATS)
PARAMS = frozenset([*UNDERSTOOD, *REFUSED])


def fill_row(row: Request, fields: dict[str, Any], *, allow_unknown: bool = False) -> None:
    """Sets the row's fields from a JSON object. Those that are set before an error is raised stay valid.

    allow_unknown: carry misspelt parameters along, and those that are not available here, instead of refusing the row

    Raises RequestError.
    """
    is_ours = any(name in fields for name in PROMPT_FIELDS)  # such a row may have columns of a request line's names
    if ("body" in fields or not is_ours) and any(name in fields for name in ("custom_id", "url", "method")):
        _fill_api_request(row, fields, allow_unknown=allow_unknown)
        return
    has_images = is_param("images", fields.get("images")) and fields.get("raw") is not True  # of ollama
    if has_images and "prompt" in fields and "messages" not in fields:
        message = {"role": "user", "content": fields["prompt"], "images": fields["images"]}
        fields = {name: value for name, value in fields.items() if name not in ("prompt", "images")}
        fields["messages"] = [message]
    if fields.get(SCORE) is True:
        fields = take_continuations(row, fields)
    params = {name: value for name, value in fields.items() if is_param(name, value)}
    row.extra = {  # what is refused, but asks for nothing, is data: it was a column before and counts in the key
        name: value
        for name, value in fields.items()
        if name not in ROW_FIELDS and (name not in params or name in REFUSED)
    }
    row.id = _identity(row, fields)
    row.raw = _typed_field(row, fields, "raw", bool, False)
    row.system = _typed_field(row, fields, "system", str, None)
    _set_priority(row, fields)
    _set_params(row, params, carries_refused=allow_unknown)
    _set_tools(row, fields)
    if row.extra and not allow_unknown:
        # `Stop` may be an everyday word, if it holds no text.
        words = {
            name for name, value in row.extra.items() if name.lower() == "stop" and not isinstance(value, str | list)
        }
        _check_spelling(row, (name for name in row.extra if name not in REFUSED and name not in words), SPELLINGS)
    forms = [name for name in PROMPT_FIELDS if name in fields]
    if fields.get(EMBED) is True:
        fill_embedding(row, fields)
        return
    if len(forms) != 1:
        found = f"both {' and '.join(forms)}" if forms else f"none of {', '.join(PROMPT_FIELDS)}"
        raise row.invalid(f"the row has {found}")
    PROMPT_FIELDS[forms[0]](row, fields[forms[0]])
    if row.raw and row.text is None:
        raise row.invalid("raw works only with prompt")
    _check_template_fields(row)


def fill_broken(row: Request, data: bytes) -> None:
    """Makes the row a request line, with its id, if bytes that cannot be read as JSON look like one."""
    is_ours = b'"body"' not in data and any(f'"{name}"'.encode() in data for name in PROMPT_FIELDS)
    if not is_ours and (found := _CUSTOM_ID.match(data)):
        row.call = ApiCall(b'"/v1/completions"' not in data, None)
        row.id = found[1].decode(errors="replace") if found[1] is not None else None


def fill_with_columns(
    row: Request, fields: dict[str, Any], columns: dict[str, Any], *, allow_unknown: bool = False
) -> None:
    """Sets the row's fields, and takes its `id` and columns to carry along from a table. Raises RequestError.

    columns: may have any names, and only `id` and `custom_id` have a meaning; what `fields` says counts first
    """
    carried = {name: value for name, value in columns.items() if name not in ID_FIELDS}
    try:
        fill_row(row, fields, allow_unknown=allow_unknown)
    finally:
        row.extra = carried | row.extra
        if row.id is None:
            row.id = _identity(row, columns)


def _identity(row: Request, fields: Mapping[str, Any]) -> str | int | float | None:
    given = {name: fields[name] for name in ID_FIELDS if fields.get(name) is not None}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise row.invalid(f"{name} must be a string or a number, not {json_type(value)}")
    if len({(type(value), value) for value in given.values()}) > 1:
        raise row.invalid("id and custom_id are two names of one thing, and they differ")
    return next(iter(given.values()), None)


def _check_template_fields(row: Request) -> None:
    """Raises RequestError if the row says something to a chat template that its prompt does not go through."""
    given = {"tools": row.tools, "system": row.system, **row.given_template} if row.raw or row.prompt_ids else {}
    for name in filter(given.get, given):
        verb = "need" if name == "tools" else "needs"
        raise row.invalid(f"{name} {verb} the chat template, so give messages or a prompt that is not raw")


def _fill_api_request(row: Request, fields: dict[str, Any], *, allow_unknown: bool) -> None:
    """Sets the row's fields from a request line. The API's bookkeeping (`user`, `store`) is ignored."""
    url, body, is_chat = fields.get("url"), fields.get("body"), fields.get("url") not in (TEXT, SCORES, RANKING)
    model = body.get("model") if isinstance(body, dict) else None
    row.call = ApiCall(is_chat, model if isinstance(model, str) else None)
    row.extra = {name: value for name, value in fields.items() if name not in ENVELOPE_FIELDS}
    row.id = _typed_field(row, fields, "custom_id", str, None)
    if url not in [*PROMPT_OF_URL]:
        found = url if isinstance(url, str) else json_type(url)
        raise row.invalid(f"url must be {' or '.join(PROMPT_OF_URL)}, not {found}")
    if fields.get("method", "POST") != "POST":
        raise row.invalid("method must be POST")
    if not isinstance(body, dict):
        raise row.invalid(f"body must be an object, not {json_type(body)}")
    if doubled := [name for name in PROMPT_FIELDS if name in fields]:
        raise row.invalid(f"the row has both body and {doubled[0]}")
    known = API_FIELDS | {RESPONSES: responses.FIELDS, SCORES: PAIR_FIELDS, RANKING: RANKING_FIELDS}.get(url, set())
    row.extra |= {name: value for name, value in body.items() if name not in known}
    _set_priority(row, body)
    if doubled := [name for name in PROMPT_FIELDS if name != PROMPT_OF_URL[url] and body.get(name) is not None]:
        raise row.invalid(f"this url takes {PROMPT_OF_URL[url]}, not {doubled[0]}")
    if url == EMBEDDINGS:
        _set_params(row, {name: value for name, value in body.items() if name in PARAMS and name not in FIELDS})
        fill_embedding(row, body)
        return
    if not is_chat and (strange := [name for name in CHAT_FIELDS if body.get(name) and name != "parallel_tool_calls"]):
        raise row.invalid(f"{strange[0]} is a field of {CHAT}, and this is a request to {url}")
    if url == RESPONSES:
        body = responses.chat_request(row, body)
    if url == RANKING:
        top_n = _typed_field(row, body, "top_n", int, 0)
        row.call = ApiCall(is_chat, row.call.model, top_n=top_n)
        if top_n < 0:
            raise row.invalid("top_n must be at least 0")
    if url in (SCORES, RANKING):
        body = take_pair(row, body)
    if is_chat and not _typed_field(row, body, "logprobs", bool, False):
        _typed_field(row, body, "top_logprobs", int, 0)
    _set_params(row, {name: value for name, value in body.items() if name in PARAMS})
    if not allow_unknown:
        _check_spelling(row, [name for name in body if name not in known], known)
    if is_chat:
        _set_tools(row, body)
        _set_messages(row, body.get("messages"))
        renamed = {"developer": "system"}  # by newer models of the API
        row.messages = [{**one, "role": renamed.get(one["role"], one["role"])} for one in row.messages or ()]
        return
    prompt = body.get("prompt")  # a text, its token ids, or a list of one of those
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list):
        if prompt and isinstance(prompt[0], str | list):
            raise row.invalid("a row has one prompt; give each prompt a row of its own")
        _set_token_ids(row, prompt)
    else:
        _set_prompt(row, prompt)
        row.raw = True


def _set_params(row: Request, fields: Mapping[str, Any], *, carries_refused: bool = False) -> None:
    try:
        made = translate(fields, carries_refused=carries_refused)
    except RequestError as error:
        raise row.located(error) from None
    row.given_template = {name: made.pop(name) for name in TEMPLATE_FIELDS if name in made}
    row.given = made


def set_defaults(row: Request, params: Mapping[str, Any]) -> None:
    """Sets sampling parameters that the row does not set itself. Does not raise, as the row's `error` says more."""
    try:
        given, template = own_params(params)
    except RequestError as error:
        row.error = row.error or row.located(error)
        return
    row.given = with_overrides(given, row.given)
    kwargs, own = template.get("chat_template_kwargs"), row.given_template.get("chat_template_kwargs")
    row.given_template = template | row.given_template
    if isinstance(kwargs, Mapping) and isinstance(own, Mapping):
        row.given_template["chat_template_kwargs"] = {**kwargs, **own}


def _set_tools(row: Request, fields: Mapping[str, Any]) -> None:
    choice, asked = fields.get("tool_choice"), fields.get("tools")
    try:
        tools = check_tools(asked) if asked is not None else []
    except RequestError as error:
        raise row.located(error) from None
    row.tools = tools if choice != "none" else ()
    if choice not in (None, "auto", "none"):
        row.choice = _tool_choice(row, choice, tools)
    if not _typed_field(row, fields, "parallel_tool_calls", bool, True):
        row.max_calls = 1


def check_tools(value: Any) -> list[dict[str, Any]]:
    """The `tools` field of a row. Raises RequestError (`invalid_row`) unless it is a list of OpenAI's functions."""
    if not isinstance(value, list):
        raise invalid_row("tools must be a list of functions.")
    for number, tool in enumerate(value, start=1):
        if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
            raise invalid_row(f'Tool {number} must be an object {{"type": "function", "function": {{"name": ...}}}}.')
        function = tool["function"]
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise invalid_row(f"The function of tool {number} must have a name.")
        if not isinstance(function.get("parameters"), dict | None):
            raise invalid_row(f"The parameters of tool {number} must be a JSON schema, an object.")
    return value


def _tool_choice(row: Request, choice: Any, tools: Sequence[Mapping[str, Any]]) -> ToolChoice:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "allowed_tools":
        raise row.invalid("tool_choice allowed_tools is not available: give only the tools that are allowed")
    function = choice.get("function") if kind == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if choice != "required" and not isinstance(name, str):
        named = '"name": ...' if row.call is not None and row.call.repeated else '"function": {"name": ...}'
        raise row.invalid(f'tool_choice must be auto, none, required or {{"type": "function", {named}}}')
    if not tools:
        raise row.invalid("tool_choice forces a call, but there are no tools")
    if name is not None and all(tool["function"]["name"] != name for tool in tools):
        raise row.invalid(f"tool_choice names {name!r}, which is not one of the tools")
    return ToolChoice(name)


def _set_messages(row: Request, value: Any) -> None:
    if not isinstance(value, list) or not value:
        raise row.invalid("messages must be a list of at least one message")
    messages, pictures = [], list[tuple[Any, ...]]()
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise row.invalid(f"message {number} must be an object with a role and content")
        others = {name: value for name, value in message.items() if name != "images"}
        messages.append({**others, "content": _content(row, number, message, pictures)})
    row.messages, row.given_pictures = messages, pictures


def _set_prompt(row: Request, value: Any) -> None:
    if value == "" and not row.continuations:
        raise row.invalid("prompt is empty")
    if not isinstance(value, str):
        hint = "; token ids go into prompt_token_ids" if _are_ids(value) else ""
        raise row.invalid(f"prompt must be a string, not {json_type(value)}{hint}")
    row.text = value


def _set_token_ids(row: Request, value: Any) -> None:
    if not _are_ids(value) and not (value == [] and row.continuations):
        raise row.invalid("prompt_token_ids must be a list of at least one whole number")
    row.prompt_ids = value


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _set_priority(row: Request, fields: Mapping[str, Any]) -> None:
    row.priority = _typed_field(row, fields, "priority", int, 0)
    if abs(row.priority) > MAX_PRIORITY:
        raise row.invalid(f"priority must be from -{MAX_PRIORITY} to {MAX_PRIORITY}")


def _typed_field(row: Request, fields: Mapping[str, Any], name: str, wanted: type, default: Any) -> Any:
    value = fields.get(name)
    if value is None:
        return default
    if type(value) is not wanted:
        words = {bool: "true or false", int: "a whole number", str: "a string", dict: "an object"}[wanted]
        raise row.invalid(f"{name} must be {words}, not {json_type(value)}")
    return value


def _check_spelling(row: Request, names: Iterable[str], known: Iterable[str]) -> None:
    advice = " (--allow-unknown carries it along)" if row.where else ""
    for name in names:
        if (meant := intended_name(name, known)) is not None:
            raise row.invalid(f"unknown parameter {name!r}; did you mean {meant!r}?{advice}", "unknown_parameter")


def _content(row: Request, number: int, message: Mapping[str, Any], pictures: list[tuple[Any, ...]]) -> Any:
    """The content of a message: its text, or a list of its texts, images and videos, which join `pictures`."""
    value, role = message.get("content"), message["role"]
    if shown := message.get("images"):  # of ollama
        if not isinstance(shown, list):
            raise row.invalid(f"images of message {number} must be a list, not {json_type(shown)}")
        texts = value if isinstance(value, list) else [{"type": "text", "text": value}]
        value = [*({"type": "image", "image": one} for one in shown), *texts]
    if isinstance(value, str) or (value is None and role == "assistant" and message.get("tool_calls")):
        return value or ""
    if not isinstance(value, list):
        raise row.invalid(f"content of message {number} must be text, not {json_type(value)}")
    made, before = list[dict[str, Any]](), len(pictures)
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else json_type(part)
        if kind == "text" and isinstance(part.get("text"), str):
            made.append({"type": "text", "text": part["text"]})
        elif (medium := _MEDIA.get(str(kind))) is not None:
            if role not in _ROLES_WITH_IMAGES:
                raise row.invalid(f"message {number} has a part {kind!r:.60}, and its role is {role!r:.60}")
            made.append({"type": medium})
            place = f"{medium} {made.count(made[-1])} of message {number}"
            pictures.append(_medium(row, part, place, medium))
        else:
            raise row.invalid(f"message {number} has a part {kind!r:.60}: parts are text (a string), images, videos")
    return made if len(pictures) > before else "".join(part["text"] for part in made)


def _medium(row: Request, part: Mapping[str, Any], place: str, kind: str) -> tuple[Any, ...]:
    """The arguments of `MediaSources.picture` or `video` for what a part of a content names. Raises RequestError."""
    names = (f"{kind}_url", kind, "url", "path", "base64")
    given = [(name, part[name]) for name in names if part.get(name) is not None]
    name, value = given[0] if len(given) == 1 else ("", None)
    if name == f"{kind}_url" and isinstance(value, dict):
        value = value.get("url")
    may_be = (dict, list) if name == "video" else (dict,) if name == "image" else ()
    if not isinstance(value, (str, *may_be)) or not value:
        raise row.invalid(f"{place} must have one of {', '.join(names)}, which is text")
    value = {"bytes": value} if name == "base64" else value
    if kind == "image":
        return value, place
    rates = {"fps", "sample_fps"} if isinstance(value, list) else set()
    if others := part.keys() - {"type", "digest", *names, *rates}:
        raise row.invalid(f"{place} has {min(others)!r:.60}: the model's processor chooses the frames of a file")
    fps = part.get("fps") or part.get("sample_fps") or 2.0
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < 1e6:
        raise row.invalid(f"fps of {place} must be a number above 0")
    return value, place, float(fps)


PROMPT_FIELDS = {"messages": _set_messages, "prompt": _set_prompt, "prompt_token_ids": _set_token_ids}
"""Fields that hold a prompt, and what reads them; a row has exactly one."""

API_FIELDS = frozenset([*PARAMS, *PROMPT_FIELDS, *IGNORED, *CHAT_FIELDS, "priority"])
"""Fields of a body."""
