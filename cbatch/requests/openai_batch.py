"""The OpenAI Batch API's form of rows: its request lines as input, its result lines as output.

https://platform.openai.com/docs/api-reference/batch describes both. The bodies are those of chat and text completions.
"""

from __future__ import annotations

from typing import Any

from cbatch.base.errors import RequestError
from cbatch.base.strict_json import json_type
from cbatch.requests.param_names import IGNORED, REFUSED, TEMPLATE_FIELDS, TOOL_FIELDS, UNDERSTOOD
from cbatch.requests.row import PROMPT_FIELDS, ApiCall, InputRow

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SERVER_ERRORS = ("internal_error", "tokenizer_error", "nan_logits", "cancelled", "invalid_answer")
"""Codes of errors that are not the request's fault."""

REQUEST_FIELDS = ("custom_id", "method", "url", "body")

_THINKING = ("enable_thinking", "think", "reasoning_effort", "reasoning")
CHAT_FIELDS = (
    *TOOL_FIELDS,
    "top_logprobs",
    *TEMPLATE_FIELDS,
    "enable_thinking",
    "think",
    "reasoning_effort",
    "reasoning",
)
PARAMS = frozenset([*UNDERSTOOD, *REFUSED])
KNOWN = frozenset([*PARAMS, *PROMPT_FIELDS, *IGNORED, *CHAT_FIELDS, "priority"])


def is_request(fields: dict[str, Any]) -> bool:
    """Whether a row is a request line. A row with a prompt of its own may have columns of the same names."""
    is_ours = any(name in fields for name in PROMPT_FIELDS)
    return ("body" in fields or not is_ours) and any(name in fields for name in ("custom_id", "url", "method"))


def fill(row: InputRow, fields: dict[str, Any], *, allow_unknown: bool) -> None:
    """Sets the row's fields from a request line. The API's bookkeeping (`user`, `metadata`) is ignored."""
    url, body = fields.get("url"), fields.get("body")
    model = body.get("model") if isinstance(body, dict) else None
    row.call = ApiCall(url != TEXT, model if isinstance(model, str) else None)
    row.extra = {name: value for name, value in fields.items() if name not in REQUEST_FIELDS}
    row.id = row.typed_field(fields, "custom_id", str, None)
    if url not in (CHAT, TEXT):
        raise row.invalid(f"url must be {CHAT} or {TEXT}, not {url if isinstance(url, str) else json_type(url)}")
    if fields.get("method", "POST") != "POST":
        raise row.invalid("method must be POST")
    if not isinstance(body, dict):
        raise row.invalid(f"body must be an object, not {json_type(body)}")
    if doubled := [name for name in PROMPT_FIELDS if name in fields]:
        raise row.invalid(f"the row has both body and {doubled[0]}")
    _fill_from_body(row, body, is_chat=url == CHAT, allow_unknown=allow_unknown)


def _fill_from_body(row: InputRow, body: dict[str, Any], *, is_chat: bool, allow_unknown: bool) -> None:
    row.extra |= {name: value for name, value in body.items() if name not in KNOWN}
    row.set_priority(body)
    wanted = "messages" if is_chat else "prompt"
    if doubled := [name for name in PROMPT_FIELDS if name != wanted and body.get(name) is not None]:
        raise row.invalid(f"this url takes {wanted}, not {doubled[0]}")
    if not is_chat and (strange := [name for name in CHAT_FIELDS if body.get(name) and name != "parallel_tool_calls"]):
        raise row.invalid(f"{strange[0]} is a field of {CHAT}, and this is a request to {TEXT}")
    if is_chat and not row.typed_field(body, "logprobs", bool, False):
        row.typed_field(body, "top_logprobs", int, 0)
    row.set_params({name: value for name, value in body.items() if name in PARAMS})
    if not allow_unknown:
        row.check_spelling([name for name in body if name not in KNOWN], KNOWN)
    if is_chat:
        _fill_chat(row, body)
    else:
        _fill_text(row, body.get("prompt"))


def _fill_chat(row: InputRow, body: dict[str, Any]) -> None:
    row.set_tools(body)
    row.set_messages(body.get("messages"))
    for message in row.messages or ():
        if message["role"] == "developer":  # the name that newer models of the API use
            message["role"] = "system"


def _fill_text(row: InputRow, prompt: Any) -> None:
    """Reads a prompt: a text, its token ids, or a list of one of those."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list):
        if prompt and isinstance(prompt[0], str | list):
            raise row.invalid("a row has one prompt; give each prompt a row of its own")
        row.set_token_ids(prompt)
    else:
        row.set_prompt(prompt)
        row.raw = True


def result_line(row: InputRow, key: str, body: dict[str, Any] | None, error: RequestError | None) -> dict[str, Any]:
    """The result line of a request, with `index` and `key` in addition. One that failed has the API's error body."""
    status, fields = 200, None
    if error is not None:
        status, fields = (500 if error.code in SERVER_ERRORS else 400), {"code": error.code, "message": str(error)}
        kind = "server_error" if status == 500 else "invalid_request_error"
        body = {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}
    return {
        "id": f"batch_req_{key}",
        "custom_id": row.id,
        "response": {"status_code": status, "request_id": f"req_{key}", "body": body},
        "error": fields,
        "index": row.index,
        "key": key,
    }


def response_body(call: ApiCall, key: str, choices: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
    """A ChatCompletion or Completion of the `openai` package. `created` is 0: the same row gives the same bytes."""
    return {
        "id": f"{'chatcmpl' if call.is_chat else 'cmpl'}-{key}",
        "object": "chat.completion" if call.is_chat else "text_completion",
        "created": 0,
        "model": call.model or "cbatch",
        "choices": choices,
        "usage": usage,
    }


def choice(row: InputRow, index: int, fields: dict[str, Any], logprobs: dict[str, Any] | None) -> dict[str, Any]:
    """One choice of a body, from the fields of cbatch's own form."""
    assert row.call is not None
    reason = fields["finish_reason"]
    if reason == "tool_calls" and row.choice is not None and row.choice.name is not None:
        reason = "stop"  # the API says so of a function that was named by tool_choice
    choice = {"index": index, "finish_reason": reason, "logprobs": logprobs}
    if not row.call.is_chat:
        return choice | {"text": fields["text"] or ""}
    message = {"role": "assistant", "content": fields["text"], "refusal": None}
    if "tool_calls" in fields:
        message |= {"content": fields["text"] or None, "tool_calls": fields["tool_calls"]}
    if "reasoning" in fields:
        message["reasoning"] = fields["reasoning"]
    return choice | {"message": message}
